"""Where slots stand in a model: gather, accumulate and scatter by position."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optimjax.arrays import compute_dtype, is_array, is_inexact, wider
from optimjax.paths import (
    Path,
    Slots,
    branches,
    by_words,
    complain,
    nearest,
    parts,
    picker,
    with_paths,
)

__all__ = []

Transform: TypeAlias = Callable[[Array], Array]
Structure: TypeAlias = Any  # a PyTreeDef, which JAX does not export as a type
Places: TypeAlias = tuple[tuple[int, Transform | None], ...]  # numbers of the leaves


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The slots in a model of one structure, by the position of each leaf.

    Attributes:
        names: of the slots.
        structure: of the model.
        paths: of its leaves.
        positions: for each slot its places, one that holds the array as it is first.
        rest: numbers of the leaves that belong to no slot.
        untrained: of those, the ones that may not be arrays that can be trained, since
            `setup` did not see them.
    """

    names: tuple[Path, ...]
    structure: Structure
    paths: tuple[Path, ...]
    positions: tuple[Places, ...]
    rest: tuple[int, ...]
    untrained: tuple[int, ...]

    @cached_property
    def trained(self) -> dict[int, None]:
        """The numbers of the leaves that belong to a slot."""
        return {i: None for places in self.positions for i, _ in places}

    @cached_property
    def words(self) -> list[tuple[str, ...]]:
        """The path of each leaf, in words that no spelling can confuse."""
        numbered = self.structure.unflatten(range(len(self.paths)))
        return list(by_words(numbered))

    # Two memos of what follows from the layout and a key alone.

    @cached_property
    def gradients(self) -> dict[Structure, list[int | None]]:
        """For each structure of gradients, the leaf that each is of."""
        return {}

    @cached_property
    def frames(self) -> dict[Any, Any]:
        """For each choice of frozen slots, the last frame of the compiled step."""
        return {}

    @cached_property
    def firsts(self) -> list[int]:
        """The leaf that is the first place of each slot, and holds its array."""
        return [places[0][0] for places in self.positions]

    @cached_property
    def gather(self) -> Callable[[list[Any]], tuple[Array, ...]]:
        """A function of the leaves: the array of each slot."""
        return picker(self.firsts)

    def scatter(self, arrays: Mapping[Path, Array], leaves: list[Any]) -> Any:
        """The model with `arrays` at all their places; other leaves as in `leaves`."""
        leaves = list(leaves)
        for name, places in zip(self.names, self.positions, strict=True):
            if arrays.get(name) is not None:
                put(arrays[name], places, leaves)
        return self.structure.unflatten(leaves)

    def accumulate(self, leaves: list[Any], grads: Any) -> Slots:
        """{slot: sum of the gradients at its places}; None where no place has one.

        Args:
            leaves: the model's leaves.
            grads: a tree like the model, in which None may stand for a leaf or a branch
                and the containers may be others, as long as the paths are the same.
        Raises:
            ValueError: a gradient has another shape than its leaf, or is complex where
                that is real; a gradient is missing, or belongs to no leaf.
            TypeError: a gradient arrives for a Python number or for integers.
        """
        given = self._match(leaves, grads)
        sums = Slots()
        for name, places in zip(self.names, self.positions, strict=True):
            total = None
            first = places[0][0]
            for i, transform in places:
                g = given[i]
                if g is None:
                    continue
                if transform is not None:
                    _, pull_back = jax.vjp(transform, jnp.asarray(leaves[first]))
                    # JAX pulls back the conjugate of what goes downhill.
                    g = jnp.asarray(g, leaves[i].dtype).conj()
                    g = pull_back(g)[0].conj()
                if len(places) > 1:  # partial derivatives are summed wide
                    g = jnp.asarray(g)
                    g = g.astype(compute_dtype(g.dtype))
                total = g if total is None else add(total, g)
            known = total is None or isinstance(total, jax.Array)
            sums[name] = total if known else jnp.asarray(total)
        return sums

    def _match(self, leaves: list[Any], grads: Any) -> list[Any]:
        """The gradient of each leaf of the model, checked; None where there is none."""
        given, structure = jax.tree.flatten(grads)
        if structure == self.structure:
            found = given
        else:
            given, structure = jax.tree.flatten(grads, is_leaf=_is_none)
            if structure not in self.gradients:
                self.gradients[structure] = self._pair(grads)
            found = [None] * len(self.paths)
            for g, i in zip(given, self.gradients[structure], strict=True):
                if i is not None:
                    found[i] = g
                elif g is not None:
                    self._refuse_strangers(grads)
        wrong, numbers, checked = {}, {}, [None] * len(found)
        for i, g in enumerate(found):
            if g is None or is_float0(g):
                continue
            if i in self.trained:
                problem = _misfit(leaves[i], g)
                if problem:
                    wrong[self.paths[i]] = problem
                checked[i] = g
            elif _is_gradient(leaves[i], g):
                kind = getattr(leaves[i], "dtype", type(leaves[i]).__name__)
                numbers[self.paths[i]] = (
                    f"a gradient for a leaf of type {kind}, which is not trained, "
                    "expected None"
                )
        if numbers:
            remedy = "To train it, make it an array of floats: jnp.asarray(x, float)."
            raise TypeError(complain("update", numbers, remedy))
        if wrong:
            raise ValueError(complain("update", wrong, NOT_THE_TREE))
        return checked

    def _pair(self, grads: Any) -> list[int | None]:
        """Which leaf each leaf of `grads` (None counts as one) is the gradient of.

        Raises: ValueError if a slot's place has no gradient, not even a None.
        """
        keyed, _ = jax.tree_util.tree_flatten_with_path(grads, is_leaf=_is_none)
        given = [parts(keys) for keys, _ in keyed]
        covered, index = set(given), {words: i for i, words in enumerate(self.words)}
        problems = {
            self.paths[i]: "no gradient, expected one, or None to leave it as it is"
            for i in self.trained
            if covered.isdisjoint(branches(self.words[i]))
        }
        if problems:
            raise ValueError(complain("update", problems, NOT_THE_TREE))
        return [index.get(words) for words in given]

    def _refuse_strangers(self, grads: Any) -> None:
        known = set(self.paths)
        problems = {
            path: "a gradient without a leaf in the model"
            for path in with_paths(grads)
            if path not in known
        }
        hint = nearest(next(iter(problems), ""), self.paths)
        raise ValueError(complain("update", problems, NOT_THE_TREE) + hint)


NOT_THE_TREE = (
    "Take the gradient with respect to the model that update is given (value_and_grad "
    "returns it second)."
)


def add(a: Array, b: Array) -> Array:
    """The sum, in the wider of two float dtypes, whatever promotion is in force."""
    dtype = wider(a.dtype, b.dtype)
    return a.astype(dtype) + b.astype(dtype)


def _is_none(x: Any) -> bool:
    return x is None


def is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def _is_gradient(leaf: Any, g: Any) -> bool:
    """Whether `g` means something to `leaf`, which is not trained: a function or string
    that only stands where the model has it does not, nor do integers for integers; and
    arrays that `trainable=` leaves out may have gradients."""
    if is_array(leaf):
        return is_inexact(g) and not is_inexact(leaf)
    return is_array(g) or isinstance(leaf, (float, complex, np.inexact))


def _misfit(leaf: Any, g: Any) -> str | None:
    """What is wrong with `g` as a gradient of `leaf`; None if nothing is."""
    if is_array(g) and g.dtype == leaf.dtype and g.shape == leaf.shape:
        return None
    if not (is_array(g) or isinstance(g, (int, float, complex, np.generic))):
        return f"gradient is a {type(g).__name__}, expected an array"
    if np.shape(g) != np.shape(leaf):
        return (
            f"gradient has shape {np.shape(g)}, expected {np.shape(leaf)} like its "
            "parameter (gradients are not broadcast: transpose or reshape it)"
        )
    dtype = jnp.result_type(g)
    if is_array(g) and not jnp.issubdtype(dtype, jnp.inexact):
        return f"gradient has dtype {dtype.name}, expected a floating one"
    if jnp.iscomplexobj(g) and not jnp.iscomplexobj(leaf):
        return (
            f"gradient has dtype {dtype.name}, expected a real one like its parameter"
        )
    return None


def put(array: Any, places: Places, leaves: list[Any]) -> None:
    """`array`, in `leaves` at all its places."""
    made: dict[Transform, Any] = {}  # once for each transform
    for i, transform in places:
        if transform is not None and transform not in made:
            made[transform] = transform(array)
        leaves[i] = array if transform is None else made[transform]
