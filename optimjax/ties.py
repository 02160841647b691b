"""Which leaves of a model are one array; how to gather, accumulate and scatter them."""

import dataclasses
import types
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optimjax.arrays import (
    buffer,
    compute_dtype,
    is_array,
    is_inexact,
    is_traced,
    wider,
)
from optimjax.paths import (
    Path,
    Slots,
    Where,
    complain,
    nearest,
    selector,
    spell,
    with_paths,
)

__all__ = ["Place", "Slot", "Ties", "find_ties"]

Transform: TypeAlias = Callable[[Array], Array]
Structure: TypeAlias = Any  # a PyTreeDef, which JAX does not export as a type
Declared: TypeAlias = Mapping[Path, Path | tuple[Path, Transform]]
# As `ties=` takes them; `Ties` themselves, from an earlier call, are taken as they are.
TiesArg: TypeAlias = Union[Declared, Literal["identity"], "Ties", None]


class Place(NamedTuple):
    """Where a slot's array stands in the model, as it is or through a `transform`."""

    path: Path
    transform: Transform | None = None


class Slot(NamedTuple):
    """One array being optimised.

    Attributes:
        name: path of the first place that holds the array as it is.
        places: all places, that one first.
        shape: shape of the array.
        dtype: name of its dtype.
    """

    name: Path
    places: tuple[Place, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class Ties:
    """Which leaf of a model belongs to which slot: static, hashable, printable.

    Attributes:
        slots: the arrays being optimised, in the order of the model.
        others: paths of the floating arrays that `trainable=` left out.
        seen: whether the arrays were concrete, so that shared ones could be found.
    """

    slots: tuple[Slot, ...]
    others: tuple[Path, ...]
    seen: bool

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.slots, self.others, self.seen

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    @cached_property
    def _layouts(self) -> "dict[Structure, Layout]":
        return {}  # a memo: what is computed from `self` and a tree's structure alone

    @cached_property
    def names(self) -> tuple[Path, ...]:
        """The name of each slot."""
        return tuple(slot.name for slot in self.slots)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Ties) or self._hash != other._hash:
            return False
        return self._key == other._key

    def __str__(self) -> str:
        lines = [
            f"{place.path} is {through(place.transform, slot.name)}"
            for slot in self.slots
            for place in slot.places[1:]
        ]
        return "\n".join(lines) or "no ties"

    def take_apart(self, function: str, model: Any) -> "tuple[Layout, list[Any]]":
        """The leaves of a model, and where the slots stand among them.

        Raises: ValueError if the model has other paths than the one that `setup` saw.
        """
        leaves, structure = jax.tree.flatten(model)
        if structure not in self._layouts:
            self._layouts[structure] = self._find(function, model, structure)
        return self._layouts[structure], leaves

    def _find(self, function: str, model: Any, structure: Structure) -> "Layout":
        keyed, _ = jax.tree_util.tree_flatten_with_path(model)
        paths = spell([keys for keys, _ in keyed])
        index = {path: i for i, path in enumerate(paths)}
        places = {place.path for slot in self.slots for place in slot.places}
        problems = {
            path: "no such leaf in this model" for path in places if path not in index
        }
        known = places | set(self.others)
        for path, (_, leaf) in zip(paths, keyed, strict=True):
            if is_inexact(leaf) and path not in known:
                problems[path] = "an array that setup did not see"
        if problems:
            raise ValueError(
                complain(function, problems, "This is not the model that setup saw.")
                + nearest(next(iter(problems)), paths)
                + " Give the model that the state was made for, or call setup again."
            )
        positions = tuple(
            tuple((index[place.path], place.transform) for place in slot.places)
            for slot in self.slots
        )
        taken = {i for slot in positions for i, _ in slot}
        rest = tuple(i for i in range(len(paths)) if i not in taken)
        return Layout(self, structure, tuple(paths), positions, rest, {}, {})

    def confirmed(self, function: str, model: Any) -> "Ties":
        """These ties, checked against concrete arrays if `setup` could not see any.

        Raises: ValueError if leaves of `model` are one array but have a slot each.
        """
        if self.seen:
            return self
        named = with_paths(model)
        places = [place.path for slot in self.slots for place in slot.places]
        if any(is_traced(named[path]) for path in places if path in named):
            return self
        slot_of = {p.path: slot.name for slot in self.slots for p in slot.places}
        problems = {
            path: f"the same array as {group[0]!r}, but trained as another one"
            for group in shared({p: named[p] for p in places if p in named})
            for path in group[1:]
            if slot_of[path] != slot_of[group[0]]
        }
        if problems:
            raise ValueError(
                complain(function, problems)
                + " setup ran inside a jit, where shared arrays cannot be seen: call "
                "it outside, or declare them with ties={...}."
            )
        return dataclasses.replace(self, seen=True)


class Layout(NamedTuple):
    """The slots of `ties` in a model of one structure, by the position of each leaf."""

    ties: Ties
    structure: Structure
    paths: tuple[Path, ...]
    positions: tuple[tuple[tuple[int, Transform | None], ...], ...]
    rest: tuple[int, ...]
    gradients: dict[Structure, list[int | None]]
    frames: dict[Any, Any]

    def gather(self, leaves: list[Any]) -> list[Array]:
        """The array of each slot."""
        return [leaves[places[0][0]] for places in self.positions]

    def scatter(self, arrays: Mapping[Path, Array], leaves: list[Any]) -> Any:
        """The model with `arrays` at all their places; other leaves as in `leaves`."""
        leaves = list(leaves)
        for name, places in zip(self.ties.names, self.positions, strict=True):
            array = arrays.get(name)
            if array is not None:
                for i, transform in places:
                    leaves[i] = array if transform is None else transform(array)
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
            TypeError: a gradient arrives for a Python number.
        """
        given = self._match(leaves, grads)
        sums = Slots()
        for name, places in zip(self.ties.names, self.positions, strict=True):
            total = None
            first = places[0][0]
            for i, transform in places:
                g = given[i]
                if g is None:
                    continue
                if transform is not None:
                    _, pull_back = jax.vjp(transform, jnp.asarray(leaves[first]))
                    (g,) = pull_back(jnp.asarray(g, leaves[i].dtype))
                if len(places) > 1:  # partial derivatives are summed wide
                    g = jnp.asarray(g)
                    g = g.astype(compute_dtype(g.dtype))
                total = g if total is None else add(total, g)
            sums[name] = None if total is None else jnp.asarray(total)
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
        trained = {i for places in self.positions for i, _ in places}
        wrong, numbers, checked = {}, {}, [None] * len(found)
        for i, g in enumerate(found):
            if g is None or _is_float0(g):
                continue
            if i in trained:
                problem = _misfit(leaves[i], g)
                if problem:
                    wrong[self.paths[i]] = problem
                checked[i] = g
            elif not is_array(leaves[i]) and _is_gradient(leaves[i], g):
                numbers[self.paths[i]] = (
                    f"a gradient for a {type(leaves[i]).__name__}, which is not "
                    "trained, expected None"
                )
        if numbers:
            remedy = "To train a number, make it an array: jnp.asarray(value)."
            raise TypeError(complain("update", numbers, remedy))
        if wrong:
            raise ValueError(complain("update", wrong, NOT_THE_TREE))
        return checked

    def _pair(self, grads: Any) -> list[int | None]:
        """Which leaf each leaf of `grads` (None counts as one) is the gradient of.

        Raises: ValueError if a slot's place has no gradient, not even a None.
        """
        keyed, _ = jax.tree_util.tree_flatten_with_path(grads, is_leaf=_is_none)
        index = {path: i for i, path in enumerate(self.paths)}
        paths = spell([keys for keys, _ in keyed])
        covered = set(paths)
        problems = {
            place.path: "no gradient, expected one, or None to leave it as it is"
            for slot in self.ties.slots
            for place in slot.places
            if covered.isdisjoint(branches(place.path))
        }
        if problems:
            raise ValueError(complain("update", problems, NOT_THE_TREE))
        return [index.get(path) for path in paths]

    def _refuse_strangers(self, grads: Any) -> None:
        known = set(self.paths)
        problems = {
            path: "a gradient without a leaf in the model"
            for path in with_paths(grads)
            if path not in known
        }
        hint = nearest(next(iter(problems)), self.paths)
        raise ValueError(complain("update", problems, NOT_THE_TREE) + hint)


NOT_THE_TREE = "Take the gradient with respect to the model that update is given."


def branches(path: Path) -> list[Path]:
    """The path and every branch above it, up to the whole model, which is ''."""
    parts = path.split("/")
    return ["", *("/".join(parts[:n]) for n in range(1, len(parts) + 1))]


def through(transform: Transform | None, name: Path) -> str:
    if transform is None:
        return name
    return f"{getattr(transform, '__name__', repr(transform))}({name})"


def add(a: Array, b: Array) -> Array:
    """The sum, in the wider of two float dtypes, whatever promotion is in force."""
    dtype = wider(a.dtype, b.dtype)
    return a.astype(dtype) + b.astype(dtype)


def _is_none(x: Any) -> bool:
    return x is None


def _is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def _is_gradient(leaf: Any, g: Any) -> bool:
    """Whether `g` means something to `leaf`, which is no array: a function or string
    that only stands where the model has it does not."""
    return is_array(g) or isinstance(leaf, (float, complex, np.inexact))


def _misfit(leaf: Any, g: Any) -> str | None:
    """What is wrong with `g` as a gradient of `leaf`; None if nothing is."""
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


def find_ties(
    model: Any,
    ties: TiesArg = "identity",
    trainable: Where = None,
    function: str = "find_ties",
) -> Ties:
    """Which trainable leaves of `model` are one array.

    Leaves are one array if they are the same Python object, or JAX arrays over the same
    device buffers with equal shape, dtype and sharding. Equal values are not a tie.

    Args:
        model: any pytree. Its trainable leaves are its floating and complex arrays.
        ties: "identity" as above; None to keep every leaf apart; or a dict
            `{place: source}` or `{place: (source, transform)}`, which declares ties
            that identity cannot show, beside those that it can. `transform` is a JAX
            function of the source's array, such as `jnp.transpose`.
        trainable: which of them to train: a glob, several, or a function of
            (path, leaf); None for all.
    Raises:
        ValueError: nothing to train; a path that does not exist; shapes or dtypes that
            cannot be tied; an array of which one place is trained and another is not.
        TypeError: a leaf is an object that holds arrays and is not a pytree.

    >>> w = jnp.ones((2, 2))
    >>> print(find_ties({"encoder": w, "decoder": w}))
    encoder is decoder
    """
    if isinstance(ties, Ties):
        return ties
    named = with_paths(model)
    _refuse_unregistered(named, function)
    arrays = {path: leaf for path, leaf in named.items() if is_inexact(leaf)}
    wanted = selector(trainable, f"{function}: trainable", arrays)
    leaves = {path: leaf for path, leaf in arrays.items() if wanted(path, leaf)}
    if not leaves:
        raise ValueError(
            complain(
                function,
                {"": f"nothing to train among {len(named)} leaves"},
                "Trainable leaves are arrays of a floating or complex dtype"
                + (f" that trainable={trainable!r} takes." if trainable else "."),
            )
            + (nearest(str(trainable), arrays) if arrays else "")
        )
    deleted = {
        path: "its array was deleted by a donating call"
        for path, leaf in leaves.items()
        if isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted()
    }
    if deleted:
        raise ValueError(complain(function, deleted, "Use what that call returned."))
    source: dict[Path, Path] = {}
    if ties is not None:
        groups = shared(arrays)
        _refuse_halves(groups, leaves, function)
        for first, *others in groups:
            source.update(dict.fromkeys(others, first))
    if ties is not None and ties != "identity":
        if not isinstance(ties, Mapping):
            raise TypeError(
                f"{function}: ties is {ties!r}, expected 'identity', None, or a dict "
                "{place: source} or {place: (source, transform)} of paths."
            )
        slots = _declared(ties, source, leaves, function)
    else:
        slots = {path: [Place(path)] for path in leaves if path not in source}
        for place, first in source.items():
            if first in slots:
                slots[first].append(Place(place))
    return Ties(
        tuple(
            Slot(
                name,
                tuple(places),
                np.shape(leaves[name]),
                jnp.result_type(leaves[name]).name,
            )
            for name, places in slots.items()
        ),
        tuple(path for path in arrays if path not in leaves),
        not any(is_traced(leaf) for leaf in leaves.values()),
    )


def shared(leaves: Mapping[Path, Any]) -> list[list[Path]]:
    """The groups of two or more paths whose leaves are one array."""
    objects: dict[int, list[Path]] = {}
    for path, leaf in leaves.items():
        objects.setdefault(id(leaf), []).append(path)
    buffers: dict[Any, list[Path]] = {}
    for paths in objects.values():
        leaf = leaves[paths[0]]
        where = buffer(leaf)
        key = id(leaf) if where is None else (where, leaf.shape, leaf.dtype)
        # One first shard is a hint, not a proof: arrays over several devices can share
        # it and differ elsewhere.
        while key in buffers and not _same_buffers(leaf, leaves[buffers[key][0]]):
            key = (key, "next")
        buffers.setdefault(key, []).extend(paths)
    order = {path: i for i, path in enumerate(leaves)}
    return [sorted(g, key=order.__getitem__) for g in buffers.values() if len(g) > 1]


def _same_buffers(a: Any, b: Any) -> bool:
    if not a.sharding.is_equivalent_to(b.sharding, a.ndim):
        return False
    shards = zip(a.addressable_shards, b.addressable_shards, strict=True)
    return all(
        x.data.unsafe_buffer_pointer() == y.data.unsafe_buffer_pointer()
        for x, y in shards
    )


def _refuse_halves(
    groups: list[list[Path]], leaves: Mapping[Path, Any], function: str
) -> None:
    problems = {}
    for group in groups:
        taken = [path for path in group if path in leaves]
        if taken and len(taken) < len(group):
            left = next(path for path in group if path not in leaves)
            problems[left] = (
                f"not to be trained, but the same array as {taken[0]!r}, is"
            )
    if problems:
        raise ValueError(
            complain(function, problems)
            + " An array is trained in all its places or in none: let trainable= take "
            "both or neither, or make one of them a copy."
        )


def _declared(
    ties: Declared, source: dict[Path, Path], leaves: Mapping[Path, Any], function: str
) -> dict[Path, list[Place]]:
    """The slots that result from declared ties on top of those found by identity."""
    pairs = {place: _pair_of(place, given, function) for place, given in ties.items()}
    mentioned = [p for place, (origin, _) in pairs.items() for p in (place, origin)]
    problems = {
        path: "ties= names it, but there is no such trainable leaf"
        for path in mentioned
        if path not in leaves
    }
    if problems:
        hint = nearest(next(iter(problems)), leaves)
        raise ValueError(complain(function, problems) + hint)

    # Places that are one array as it is come together first; transforms hang from them.
    root = dict(source)

    def origin(path: Path) -> Path:
        while path in root:
            path = root[path]
        return path

    order = {path: i for i, path in enumerate(leaves)}
    for place, (given, transform) in pairs.items():
        if transform is None:
            pair = (origin(place), origin(given))
            first, second = sorted(pair, key=order.__getitem__)
            if first != second:
                root[second] = first
    slots: dict[Path, list[Place]] = {}
    derived = {
        origin(place): (origin(given), transform)
        for place, (given, transform) in pairs.items()
        if transform is not None
    }
    for path in leaves:
        place = Place(path)
        first, seen = origin(path), set()
        while first in derived:
            if first in seen:
                raise ValueError(complain(function, {path: "ties= goes in a circle"}))
            seen.add(first)
            first, transform = derived[first]
            place = Place(path, compose(place.transform, transform))
        slots.setdefault(first, []).append(place)
    fitted = {}
    for path in leaves:
        if path in slots:
            places = slots[path]
            places.sort(key=lambda place: place.path != path)
            fitted[path] = places
            _refuse_misfits(path, places, leaves, function)
    return fitted


def _pair_of(place: Path, given: Any, function: str) -> tuple[Path, Transform | None]:
    if isinstance(given, str) and given != place:
        return given, None
    if isinstance(given, tuple) and len(given) == 2 and callable(given[1]):
        return given
    if given == place:
        raise ValueError(complain(function, {place: "ties= goes in a circle"}))
    raise TypeError(
        complain(function, {place: f"ties= gives it {given!r}, expected a path"})
        + " Or a pair: (path, transform), where transform is a JAX function."
    )


def compose(outer: Transform | None, inner: Transform) -> Transform:
    if outer is None:
        return inner
    return lambda x: outer(inner(x))


def _refuse_misfits(
    name: Path, places: list[Place], leaves: Mapping[Path, Any], function: str
) -> None:
    def aval(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x))

    problems = {}
    for path, transform in places:
        try:
            made = jax.eval_shape(transform or (lambda x: x), aval(leaves[name]))
        except Exception as error:
            problems[path] = f"its transform fails on {name!r}: {error}"
            continue
        leaf = aval(leaves[path])
        if (made.shape, made.dtype) != (leaf.shape, leaf.dtype):
            problems[path] = (
                f"{leaf.dtype.name}{list(leaf.shape)} cannot be tied to {name!r}, "
                f"which gives {made.dtype.name}{list(made.shape)} there"
            )
    if problems:
        remedy = "Tied places have one shape and dtype, if need be through a transform."
        raise ValueError(complain(function, problems, remedy))


def _refuse_unregistered(named: Mapping[Path, Any], function: str) -> None:
    problems = {
        path: f"a leaf of class {type(leaf).__name__} that holds arrays, but JAX does "
        "not see into it"
        for path, leaf in named.items()
        if not is_array(leaf) and _holds_arrays(leaf)
    }
    if problems:
        raise TypeError(
            complain(function, problems)
            + " Register the class as a pytree, for example with "
            "@jax.tree_util.register_dataclass above @dataclasses.dataclass."
        )


PLAIN = (str, bytes, int, float, complex, np.generic, type, type(None))


def _holds_arrays(x: Any, depth: int = 3) -> bool:
    """Whether a leaf that is no array has trainable arrays among its attributes."""
    if isinstance(x, (*PLAIN, types.FunctionType, types.MethodType, types.ModuleType)):
        return False
    if isinstance(x, (list, tuple, set)):
        inside = list(x)
    elif isinstance(x, dict):
        inside = list(x.values())
    else:
        inside = list(getattr(x, "__dict__", {}).values())
        slots = getattr(type(x), "__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        inside += [getattr(x, name, None) for name in names]
    return any(is_inexact(y) or (depth and _holds_arrays(y, depth - 1)) for y in inside)
