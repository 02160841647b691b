"""What a hyperparameter may be: a number, an array, a schedule, or one by path."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import GetAttrKey, Partial

from optimjax.arrays import is_traced, real_dtype, weaken
from optimjax.axes import Axes
from optimjax.paths import Path, complain, nearest, pattern, picker, selector

__all__ = ["Hyper", "by_path"]

# The field of a rule that is annotated with one of these is read by `@rule`. `Any`,
# because what goes in (a number, a schedule, a dict by path) is not what comes out: in
# `apply_leaf` it is a real scalar.
HYPER = "hyperparameter: data, traced"
WHERE = "selection of slots: structure, static"
AXES = "axes of matrices: structure, static"
OPTION = "option that may differ by path: structure, static"
Hyper: TypeAlias = Annotated[Any, HYPER]

# (lowest, highest, is the highest excluded)
NOT_NEGATIVE = (0.0, math.inf, False)

# Of hyperparameters by name. A rule whose own range differs says so in its `ranges`.
RANGES: dict[str, tuple[float, float, bool]] = {
    "learning_rate": NOT_NEGATIVE,
    "b1": (0.0, 1.0, True),
    "b2": (0.0, 1.0, True),
    "b3": (0.0, 1.0, True),
    "eps": NOT_NEGATIVE,
    "eps_root": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "momentum": (0.0, 1.0, True),
    "dampening": (0.0, 1.0, False),
    "decay": (0.0, 1.0, True),
    "max_norm": NOT_NEGATIVE,
}


MOST_SHOWN = 4  # paths in the text of a rule; more are counted


class PerPath:
    """Which option each slot takes; static, so that it is part of a program's shape.

    Written by a user as `{glob: option}` or as a function of (path, leaf). The first
    glob that matches decides, and `*` is for all the others. `bind` turns either into a
    table of exact names.
    """

    def __init__(self, source: Mapping[Path, Any] | Callable[[Path, Any], Any]):
        self.source: Any = source
        self._key = tuple(source.items()) if isinstance(source, Mapping) else source
        self._hash = hash(self._key)

    def __call__(
        self, path: Path, leaf: Any, owner: str, known: Collection[Path] = ()
    ) -> Any:
        """The option of the slot at `path`; `known` are all the paths there are."""
        if not isinstance(self.source, Mapping):
            return self.source(path, leaf)
        named = self._named(path, known)
        if named is not None:
            return self.source[named]
        if "*" in self.source:
            return self.source["*"]
        raise ValueError(
            complain(owner, {path: "no pattern matches it, expected one"})
            + f" Add it to {list(self.source)}, or '*' for all the others."
        )

    def _named(self, path: Path, known: Collection[Path]) -> Path | None:
        """The first glob other than `*` that matches."""
        if path in self.source:
            return path
        globs = (glob for glob in self.source if glob != "*")
        return next((glob for glob in globs if pattern(glob, known)(path)), None)

    def bind(
        self,
        places: Mapping[Path, Mapping[Path, Any]],
        owner: str,
        meaning: Callable[[Any], Any] = lambda option: option,
    ) -> dict[Path, Any]:
        """{slot: option}, decided over all the places of each slot.

        Args:
            places: {slot: {path: leaf}}.
            meaning: what an option stands for, where that is what must agree.

        Raises: ValueError where two places of one array take different options, or
        where a pattern matches no place (`*` may).
        """
        table = {}
        known = {path for leaves in places.values() for path in leaves}
        for slot, leaves in places.items():
            if isinstance(self.source, Mapping):
                # What names one place of an array speaks for all of them.
                named = {p: leaf for p, leaf in leaves.items() if self._named(p, known)}
                leaves = named or {slot: leaves[slot]}
            chosen = {p: self(p, leaf, owner, known) for p, leaf in leaves.items()}
            at, first = next(iter(chosen.items()))
            for path, option in chosen.items():
                there, here = meaning(option), meaning(first)
                if not same(there, here):
                    raise ValueError(
                        f"{owner}: {path!r} is {at!r}, one array, but takes "
                        f"{there!r} there and {here!r} here. Give both places the "
                        "same, or make one a copy."
                    )
            table[slot] = first
        if isinstance(self.source, Mapping):
            for glob in self.source:
                if glob == "*" or glob in known:
                    continue
                if not any(map(pattern(glob, known), known)):
                    raise ValueError(
                        f"{owner}: pattern {glob!r} matches no trainable leaf."
                        + nearest(glob, sorted(known))
                    )
        return table

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PerPath) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return PerPath, (self.source,)  # hashes of text differ from process to process

    def __repr__(self) -> str:
        if isinstance(self.source, Mapping) and len(self.source) > MOST_SHOWN:
            return counted(map(repr, self.source.values()))
        return getattr(self.source, "__name__", repr(self.source))


class ByPath:
    """A hyperparameter that differs by path: the values are data, the choice static.

    Build it by giving a rule `{glob: value}` or `by_path(function)`. The first glob
    that matches decides, and `*` is for all the others. Each value may be anything that
    a hyperparameter may be.
    """

    def __init__(self, values: Iterable[Any], pick: PerPath):
        self.values = tuple(values)
        self.pick = pick

    def at(self, path: Path, leaf: Any, owner: str) -> Any:
        chosen = self.pick(path, leaf, owner)
        if isinstance(self.pick.source, Mapping):
            return self.values[chosen]
        return canonical(chosen, owner)

    def bind(self, places: Mapping[Path, Mapping[Path, Any]], owner: str) -> "ByPath":
        values = list(self.values)
        if isinstance(self.pick.source, Mapping):
            table = self.pick.bind(places, owner, values.__getitem__)
        else:
            chosen = self.pick.bind(places, owner)
            values = [canonical(value, owner) for value in chosen.values()]
            first: dict[Any, int] = {}
            numbers = enumerate(v if isinstance(v, float) else id(v) for v in values)
            same_as = [first.setdefault(key, i) for i, key in numbers]
            table = dict(zip(chosen, same_as, strict=True))
        # Numbered as the slots come, so that the same grouping is the same structure.
        order = {option: i for i, option in enumerate(dict.fromkeys(table.values()))}
        index = {slot: order[option] for slot, option in table.items()}
        return ByPath([values[option] for option in order], PerPath(index))

    def map(self, function: Callable[[Any], Any]) -> "ByPath":
        return ByPath([function(value) for value in self.values], self.pick)

    def __repr__(self) -> str:
        if not isinstance(self.pick.source, Mapping):
            return f"by_path({self.pick!r})"
        return repr({glob: self.values[i] for glob, i in self.pick.source.items()})


jax.tree_util.register_pytree_node(
    ByPath, lambda h: (h.values, h.pick), lambda pick, values: ByPath(values, pick)
)


def by_path(function: Callable[[Path, Any], Any]) -> ByPath:
    """A hyperparameter given by a function of (path, leaf), evaluated once by `setup`.

    >>> from optimjax import Adam
    >>> rule = Adam(learning_rate=by_path(lambda path, x: 1e-3 / max(x.ndim, 1)))
    """
    return ByPath((), PerPath(function))


def same(a: Any, b: Any) -> bool:
    """Equality that does not ask a traced value for its truth."""
    if a is b:
        return True
    if is_traced(a) or is_traced(b) or callable(a) or callable(b):
        return False
    return bool(np.array_equal(np.asarray(a, object), np.asarray(b, object)))


def is_schedule(hyper: Any) -> bool:
    return callable(hyper) and not isinstance(hyper, (jax.Array, np.ndarray, ByPath))


def canonical(hyper: Any, owner: str) -> Any:
    """A hyperparameter in its one form, so that its type makes no difference later.

    Concrete scalars become Python floats; traced values and larger arrays take the
    dtype of hyperparameters; plain functions become static schedules; a mapping by path
    becomes a `ByPath`.
    """
    if isinstance(hyper, ByPath):
        return hyper.map(lambda h: canonical(h, owner))
    if isinstance(hyper, Mapping):
        values = [canonical(value, owner) for value in hyper.values()]
        return ByPath(values, PerPath({glob: i for i, glob in enumerate(hyper)}))
    if is_schedule(hyper):
        static = jax.tree_util.all_leaves([hyper])  # a pytree's numbers are data
        return Partial(hyper) if static else hyper
    numeric = isinstance(hyper, (int, float, np.generic, np.ndarray, jax.Array))
    if numeric and not isinstance(hyper, (bool, np.bool_)):
        dtype = jnp.result_type(hyper)
        if jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer):
            if is_traced(hyper):
                return lax.convert_element_type(jnp.asarray(hyper), real_dtype())
            if np.ndim(hyper) == 0:
                return float(hyper)
            return jnp.asarray(hyper, real_dtype())
    raise TypeError(
        f"{owner} is {hyper!r}, expected a number, a real array, a schedule (a "
        "function of the count of updates) or a dict {glob: any of these}."
    )


def check_range(
    rule: str,
    name: str,
    value: Any,
    bounds: Any,
    whole: bool = False,
    positive: bool = False,
) -> None:
    """ValueError if a concrete number is out of its range; tracers are not checked."""
    if isinstance(value, ByPath):
        for each in value.values:
            check_range(rule, name, each, bounds, whole, positive)
        return
    if bounds is None or is_traced(value) or is_schedule(value):
        return
    low, high, open_end = bounds
    for number in np.ravel(value):
        if not (low <= number and (number < high if open_end else number <= high)):
            expected = (
                f">= {low:g}"
                if high == math.inf
                else f"in [{low:g}, {high:g}{')' if open_end else ']'}"
            )
            negative_rate = name == "learning_rate" and number < low
            remedy = (
                " Steps are subtracted: leave the sign out." if negative_rate else ""
            )
            raise ValueError(
                f"{rule}: {name} is {number:g}, expected {expected}.{remedy}"
            )
        if positive and number == 0:
            raise ValueError(f"{rule}: {name} is 0, expected more.")
        if whole and np.isfinite(number) and number != np.round(number):
            raise ValueError(f"{rule}: {name} is {number:g}, expected a whole number.")


def evaluate(hyper: Any, count: Array | int) -> Any:
    """The hyperparameter with every schedule evaluated at the 0-based `count`."""
    if isinstance(hyper, ByPath):
        return hyper.map(lambda h: evaluate(h, count))
    if is_schedule(hyper):
        # Weakly typed, so that strict promotion, where a user has asked for it, lets a
        # schedule mix the count with Python floats.
        value = hyper(weaken(jnp.asarray(count, jnp.int32)))
        if np.ndim(value) != 0:
            raise ValueError(f"schedule: shape {np.shape(value)}, expected a scalar.")
        return lax.convert_element_type(value, real_dtype())
    return hyper


def as_value(tree: Any) -> tuple[Any, ...]:
    """What is equal for rules and schedules of equal structure and numbers."""
    leaves, structure = jax.tree.flatten(tree)

    def number(leaf: Any) -> Any:
        if is_traced(leaf) or not isinstance(leaf, (float, np.ndarray, jax.Array)):
            return id(leaf)
        array = np.asarray(leaf, real_dtype())
        return array.shape, array.tobytes()

    return structure, tuple(map(number, leaves))


def register_fields(cls: type, data: tuple[str, ...], static: tuple[str, ...]) -> None:
    """Make a class a pytree of its fields `data`, with `static` beside them.

    It is put together again without `__init__`: what JAX hands it need not be checked.
    """

    children_of, aux_of = picker(data), picker(static)

    def flatten(self: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        fields = vars(self)
        return children_of(fields), aux_of(fields)

    def flatten_with_keys(self: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, aux = flatten(self)
        return tuple(zip(map(GetAttrKey, data), children, strict=True)), aux

    def unflatten(aux: Iterable[Any], children: Iterable[Any]) -> Any:
        self = object.__new__(cls)
        vars(self).update(zip(data, children, strict=True))
        vars(self).update(zip(static, aux, strict=True))
        return self

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


def counted(options: Iterable[str]) -> str:
    """How many paths take each of some options."""
    pairs = [
        f"{option}: {n} path" + ("s" if n > 1 else "")
        for option, n in Counter(options).items()
    ]
    return "{" + ", ".join(pairs) + "}"


def spelled(hyper: Any) -> str:
    """A hyperparameter as a person would write it: `0.001`, not `0.0010000000475`."""
    if isinstance(hyper, ByPath) and isinstance(hyper.pick.source, Mapping):
        table = hyper.pick.source.items()
        pairs = [f"{glob!r}: {spelled(hyper.values[i])}" for glob, i in table]
        if len(pairs) > MOST_SHOWN:
            return counted(spelled(hyper.values[i]) for _, i in table)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(hyper, Partial) and not hyper.args and not hyper.keywords:
        return getattr(hyper.func, "__name__", repr(hyper.func))
    if is_traced(hyper):
        return "traced"
    if isinstance(hyper, (float, np.ndarray, jax.Array)) and np.ndim(hyper) == 0:
        if isinstance(hyper, jax.Array) and hyper.is_deleted():
            return "deleted"
        return f"{float(hyper):.7g}"
    if isinstance(hyper, (np.ndarray, jax.Array)):
        return f"{hyper.dtype.name}{list(hyper.shape)}"
    return repr(hyper)


def where_field(where: Any, owner: str) -> PerPath | None:
    """The `where` of a rule as a static choice of True or False for each slot."""
    if where is None or isinstance(where, PerPath):
        return where
    selector(where, owner)  # refuses what is neither
    if callable(where):
        return PerPath(where)
    table = dict.fromkeys((where,) if isinstance(where, str) else where, True)
    return PerPath({**table, "*": table.get("*", False)})


def axes_field(axes: Any, owner: str) -> PerPath | None:
    """The `axes` of a rule as a static choice of `Axes` for each slot; None: default.

    Raises: TypeError for what is neither `Axes`, a dict {glob: Axes} nor a function.
    """
    if axes is None or isinstance(axes, PerPath):
        return axes
    if isinstance(axes, Axes):
        return PerPath({"*": axes})
    if isinstance(axes, Mapping) and all(isinstance(a, Axes) for a in axes.values()):
        return PerPath({"*": Axes(), **axes})
    if callable(axes) and jax.tree_util.all_leaves([axes]):
        return PerPath(axes)
    raise TypeError(
        f"{owner} is {axes!r}, expected Axes(...), a dict {{glob: Axes(...)}} or a "
        "function of (path, leaf) that returns one."
    )


def option_field(value: Any, default: Any) -> Any:
    """An option of a rule that may differ by path: itself, or a static choice.

    Slots that no glob of a dict matches take the default.
    """
    if isinstance(value, Mapping):
        return PerPath({"*": default, **value})
    return (
        PerPath(value) if callable(value) and not isinstance(value, PerPath) else value
    )
