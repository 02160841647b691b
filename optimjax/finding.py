"""Finding ties: by identity, by shared buffers, or as they are declared."""

import dataclasses
import types
import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optimjax.arrays import is_array, is_inexact, is_traced
from optimjax.layout import Transform
from optimjax.paths import Path, Where, complain, nearest, selector, with_paths
from optimjax.ties import Place, Slot, Ties, name_of, shared, through

__all__ = ["find_ties"]

Declared: TypeAlias = Mapping[Path, Path | tuple[Path, Transform]]
# As `ties=` takes them; `Ties` themselves, from an earlier call, are taken as they are.
TiesArg: TypeAlias = Declared | Literal["identity"] | Ties | None


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
        if trainable is not None:
            raise TypeError(f"{function}: ties already say what is trainable=.")
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
            outer = place.transform
            place = Place(path, Composed(outer, transform) if outer else transform)
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
        try:
            hash(given[1])
        except TypeError as error:
            what = f"its transform, a {type(given[1]).__name__}, has no hash"
            raise TypeError(
                complain(function, {place: what})
                + " Ties are a part of a program's structure: give a plain function, "
                "or a frozen dataclass that can be called."
            ) from error
        return given
    if given == place:
        raise ValueError(complain(function, {place: "ties= goes in a circle"}))
    raise TypeError(
        complain(function, {place: f"ties= gives it {given!r}, expected a path"})
        + " Or a pair: (path, transform), where transform is a JAX function."
    )


@dataclasses.dataclass(frozen=True)
class Composed:
    """One transform after another; equal, and saved, by value as they are."""

    outer: Transform
    inner: Transform

    def __call__(self, x: Array) -> Array:
        return self.outer(self.inner(x))

    @property
    def __name__(self) -> str:
        return f"{name_of(self.outer)} of {name_of(self.inner)}"


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
    for path, transform in places[1:]:
        here, there = leaves[name], leaves[path]
        if is_traced(here) or is_traced(there):
            continue
        there = np.asarray(there)
        made = np.asarray(transform(jnp.asarray(here)) if transform else here)
        if not np.allclose(made, there, 1e-2, 1e-6, equal_nan=True):
            warnings.warn(
                f"{function}: {path!r} is declared to be {through(transform, name)}, "
                "but has other values. The first update will overwrite them.",
                stacklevel=4,
            )


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
