"""What a rule is: two pure functions, `init` and `apply`, and numbers that are data."""

import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike

from optimjax.arrays import (
    cast,
    compute_dtype,
    is_traced,
    real_dtype,
    real_part_dtype,
    widen,
)
from optimjax.hyper import (
    HYPER,
    RANGES,
    WHERE,
    ByPath,
    PerPath,
    canonical,
    check_range,
    evaluate,
    spelled,
    where_field,
)
from optimjax.paths import Path, Slots, complain, with_paths

__all__ = [
    "Chain",
    "Count",
    "LeafRule",
    "LeafState",
    "Rule",
    "Wrapper",
    "rule",
    "spread",
    "steps_like",
]

PyTree: TypeAlias = Any
Places: TypeAlias = Mapping[Path, Mapping[Path, Any]]
Part: TypeAlias = tuple["Rule", PyTree, list[Path]]
Selection: TypeAlias = typing.Annotated[Any, WHERE]
R = TypeVar("R", bound="Rule")


@typing.dataclass_transform(frozen_default=True)
def rule(cls: type[R]) -> type[R]:
    """Make a class with annotated fields a rule: frozen, and a pytree of its numbers.

    A field annotated `Hyper` is a hyperparameter: data, a leaf of the pytree. A field
    that holds rules is a subtree. Every other field is structure: static, hashable.

    >>> from optimjax import Hyper, LeafRule
    >>> @rule
    ... class Descent(LeafRule):
    ...     learning_rate: Hyper = 0.1
    ...
    ...     def init_leaf(self, x):
    ...         return None
    ...
    ...     def apply_leaf(self, state, x, g, t):
    ...         return state, self.learning_rate * g
    >>> Descent(0.5)
    Descent(learning_rate=0.5)
    >>> jax.tree.leaves(Descent(0.5))
    [0.5]
    """
    made = dataclasses.dataclass(
        frozen=True, eq=False, repr=False, init="__init__" not in vars(cls)
    )(cls)
    if "__init__" not in vars(cls):
        made.__init__ = _named_arguments(made.__init__)
    hints = typing.get_type_hints(made, include_extras=True)
    loose = [name for name, hint in hints.items() if hint is float]
    loose += [n for n, v in vars(cls).items() if type(v) is float and n not in hints]
    if loose:
        raise TypeError(
            f"{cls.__name__}: {', '.join(loose)}: a number that a step depends on is a "
            "hyperparameter: annotate it `oj.Hyper`."
        )
    fields = dataclasses.fields(typing.cast(Any, made))
    kinds = {f.name: _kind(hints[f.name]) for f in fields}
    made._kinds = kinds
    made._optional = {n for n in kinds if type(None) in typing.get_args(hints[n])}
    data = tuple(name for name, kind in kinds.items() if kind in ("hyper", "rule"))
    static = tuple(name for name in kinds if name not in data)

    def flatten(self: R) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        fields = vars(self)
        return tuple(fields[n] for n in data), tuple(fields[n] for n in static)

    def flatten_with_keys(self: R) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, aux = flatten(self)
        keys = map(GetAttrKey, data)
        return tuple(zip(keys, children, strict=True)), aux

    def unflatten(aux: tuple[Any, ...], children: Iterable[Any]) -> R:
        self = object.__new__(made)
        vars(self).update(zip(data, children, strict=True))
        vars(self).update(zip(static, aux, strict=True))
        return self

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return made


def _named_arguments(init: Any) -> Any:
    """`__init__`, with an error for an unknown name that lists those that there are."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = [name for name in kwargs if name not in self._kinds]
        if unknown:
            raise TypeError(
                f"{type(self).__name__}: no argument {unknown[0]!r}, expected "
                f"{', '.join(self._kinds)}."
            )
        init(self, *args, **kwargs)

    return checked


def _kind(hint: Any) -> str:
    """What a field's annotation makes of it: "hyper", "where", "rule" or "static"."""
    parts = (hint, *typing.get_args(hint))
    notes = [note for p in parts for note in getattr(p, "__metadata__", ())]
    if HYPER in notes:
        return "hyper"
    if WHERE in notes:
        return "where"
    holds_rules = any(isinstance(p, type) and issubclass(p, Rule) for p in parts)
    return "rule" if holds_rules else "static"


class Rule:
    """Two pure functions over whole pytrees, and the hyperparameters that they use.

        state        = rule.init(params)
        state, steps = rule.apply(state, params, grads)

    `steps` has the structure and dtypes of `params` and is to be SUBTRACTED from it. A
    gradient may be None, for a leaf or a branch; its step is None then, and whatever
    the rule keeps for it stays as it is. A subclass for arithmetic on each array alone
    is a `LeafRule`; one that looks at all of them (a global norm) derives from `Rule`.

    Attributes:
        needs: names of the keyword arguments that `apply` cannot do without, among
            those that `update` is given, such as `value`.
        complex_ok: whether complex parameters are allowed.
        by_path: whether hyperparameters may differ by path.
        ranges: `{name: (low, high, high_excluded)}`, where a hyperparameter's range
            differs from the usual one for its name; None for no check.

    What a `LeafRule` need not care for is here the rule's own business: schedules
    (`at_count`), counting, missing gradients (`spread`) and dtypes (`steps_like`). All
    keyword arguments of `update` arrive in `context`.

    >>> import optimjax as oj
    >>> @oj.rule
    ... class Normalize(oj.Rule):
    ...     norm: oj.Hyper = 1.0
    ...
    ...     def init(self, params):
    ...         return oj.Count.zero()
    ...
    ...     def apply(self, state, params, grads, **context):
    ...         norm = self.at_count(state.count).norm
    ...         grads = oj.spread(params, grads)  # None at every leaf that has none
    ...         squares = [jnp.sum(oj.abs_sq(g)) for g in jax.tree.leaves(grads)]
    ...         if not squares:
    ...             return state, grads
    ...         scale = norm / jnp.sqrt(sum(squares))
    ...         steps = jax.tree.map(lambda g: scale * g, grads)
    ...         return state.next(), oj.steps_like(params, steps)
    >>> rule = Normalize(10.0)
    >>> x = {"a": jnp.zeros(2), "b": jnp.zeros(())}
    >>> _, steps = rule.apply(rule.init(x), x, {"a": jnp.array([3.0, 4.0]), "b": None})
    >>> steps
    {'a': Array([6., 8.], dtype=float32), 'b': None}
    """

    needs: ClassVar[tuple[str, ...]] = ()
    complex_ok: ClassVar[bool] = True
    by_path: ClassVar[bool] = False
    ranges: ClassVar[dict[str, tuple[float, float, bool] | None]] = {}
    _kinds: ClassVar[dict[str, str]] = {}
    _optional: ClassVar[set[str]] = set()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if "_kinds" not in vars(cls):
            raise TypeError(f"{cls.__name__}: not a rule yet, put @oj.rule above it.")
        return object.__new__(cls)

    def init(self, params: PyTree) -> PyTree:
        raise NotImplementedError(f"{type(self).__name__} has no init")

    def apply(
        self, state: PyTree, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[PyTree, PyTree]:
        raise NotImplementedError(f"{type(self).__name__} has no apply")

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, kind in self._kinds.items():
            value, owner = getattr(self, field), f"{name}: {field}"
            if kind == "hyper" and not (value is None and field in self._optional):
                value = self.checked(field, value)
            elif kind == "where":
                value = where_field(value, owner)
            elif kind == "rule":
                for inner in jax.tree.leaves(value, is_leaf=lambda x: not _holds(x)):
                    if not is_rule(inner):
                        raise TypeError(f"{owner} is {inner!r}, expected a rule.")
            object.__setattr__(self, field, value)

    # Hyperparameters ----------------------------------------------------------------

    def hypers(self) -> dict[str, Any]:
        """This rule's own hyperparameters by name, without those that are None."""
        values = {
            n: vars(self)[n] for n, kind in self._kinds.items() if kind == "hyper"
        }
        return {name: value for name, value in values.items() if value is not None}

    def checked(self, name: str, value: Any, prefix: str = "") -> Any:
        """A hyperparameter in its one form.

        Raises: TypeError if it is none; ValueError if it is out of its range.
        """
        owner = f"{prefix}{type(self).__name__}"
        value = canonical(value, f"{owner}: {name}")
        check_range(owner, name, value, self.range_of(name))
        return self.unless_by_path(name, value, owner)

    def range_of(self, name: str) -> tuple[float, float, bool] | None:
        """(lowest, highest, whether that is excluded) of a hyperparameter, if known."""
        return self.ranges.get(name, RANGES.get(name))

    def unless_by_path(self, name: str, value: Any, owner: str) -> Any:
        """`value`; TypeError if it differs by path where the rule cannot have that."""
        if isinstance(value, ByPath) and not self.by_path:
            raise TypeError(
                f"{owner}: {name} differs by path, expected one value: this rule looks "
                "at all slots together."
            )
        return value

    def with_fields(self, **fields: Any) -> Self:
        """A copy with other values, taken as they are: neither checked nor cast."""
        if all(vars(self)[name] is value for name, value in fields.items()):
            return self
        made = object.__new__(type(self))
        vars(made).update(vars(self), **fields)
        return made

    def at_count(self, count: Array | int) -> Self:
        """This rule with its own schedules evaluated at the 0-based `count`."""
        values = {}
        for name, hyper in self.hypers().items():
            try:
                values[name] = evaluate(hyper, count)
            except Exception as error:
                error.add_note(
                    f"{type(self).__name__}: {name} is a schedule: a function of the "
                    "0-based count of updates, an int32 that is traced (for conditions "
                    "use jnp.where), which returns a number."
                )
                raise
        return self.with_fields(**values)

    def at_path(self, path: Path, leaf: Any) -> Self:
        """This rule with its own choices by path made for one slot."""
        chosen = {}
        for name, value in vars(self).items():
            owner = f"{type(self).__name__}: {name}"
            if isinstance(value, ByPath):
                chosen[name] = value.at(path, leaf, owner)
            elif self._kinds.get(name) == "where":
                chosen[name] = value is None or bool(value(path, leaf, owner))
        return self.with_fields(**chosen)

    def bind(self, places: Places) -> Self:
        """This rule with every choice by path settled for the slots of a model.

        Args:
            places: `{slot: {path: leaf}}`, all the places of each slot, itself first.
        Raises: ValueError if two places of one array are given different values, if a
            slot is given none, or if a pattern matches nothing.
        """
        bound = {}
        for name, value in vars(self).items():
            owner = f"{type(self).__name__}: {name}"
            if isinstance(value, ByPath):
                bound[name] = value.bind(places, owner)
            elif isinstance(value, PerPath):
                bound[name] = PerPath(value.bind(places, owner))
            elif self._kinds.get(name) == "rule":
                bound[name] = jax.tree.map(
                    lambda inner: inner.bind(places), value, is_leaf=is_rule
                )
        return self.with_fields(**bound)

    # Rules inside -------------------------------------------------------------------

    def parts(self, state: PyTree, slots: list[Path]) -> list[Part]:
        """The rules inside, each with its own state and the slots that it acts on."""
        return []

    def with_parts(self, rules: list["Rule"]) -> Self:
        """This rule with others in place of `parts`, in the same order."""
        return self

    # As a value ---------------------------------------------------------------------

    def _key(self) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(self)

        def number(leaf: Any) -> Any:
            if is_traced(leaf) or not isinstance(leaf, (float, np.ndarray, jax.Array)):
                return id(leaf)
            array = np.asarray(leaf, real_dtype())
            return array.shape, array.tobytes()

        return structure, tuple(number(leaf) for leaf in leaves)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._key() == typing.cast(Rule, other)._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        shown = []
        for f in dataclasses.fields(typing.cast(Any, self)):
            value = vars(self)[f.name]
            if self._kinds[f.name] == "hyper" and value is not None:
                text = spelled(value)
                if text != "0" or f.default != 0:  # an option that is off says nothing
                    shown.append(f"{f.name}={text}")
            elif value is not f.default and value != f.default:
                shown.append(f"{f.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def is_rule(x: Any) -> bool:
    return isinstance(x, Rule)


def _holds(x: Any) -> bool:
    """Whether `x` is one of the containers in which a rule keeps others."""
    return isinstance(x, (tuple, list, dict))


def every_rule(rule: Rule) -> list[Rule]:
    """The rule and all the rules inside it."""
    held = [vars(rule)[n] for n, kind in rule._kinds.items() if kind == "rule"]
    inner = [r for r in jax.tree.leaves(held, is_leaf=is_rule) if is_rule(r)]
    return [rule, *(r for each in inner for r in every_rule(each))]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Count:
    """The state of a rule that keeps nothing but the number of updates, int32, ().

    Schedules are evaluated at it.
    """

    count: Array

    @classmethod
    def zero(cls) -> "Count":
        return cls(jnp.zeros((), jnp.int32))

    def next(self) -> "Count":
        return Count(increment(self.count))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeafState(Count):
    """What a `LeafRule` keeps.

    Attributes:
        slots: path -> what `init_leaf` made.
        own: path -> number of steps, int32, (), of each slot that was ever skipped. All
            others have taken `count` steps: one scalar crosses the `jit` for them all.
    """

    slots: Slots
    own: Slots

    def skipping(self, paths: Iterable[Path]) -> "LeafState":
        """The same state, with room for these slots' own number of steps."""
        new = [p for p in paths if p in self.slots and p not in self.own]
        if not new:
            return self
        # Copies: a state of which two leaves are one buffer could not be donated.
        own = {path: jnp.array(self.count, copy=True) for path in new}
        return dataclasses.replace(self, own=Slots({**self.own, **own}))


def increment(count: Array) -> Array:
    """`count + 1`, staying at the largest int32 rather than turning negative."""
    return jnp.where(count < jnp.iinfo(count.dtype).max, count + 1, count)


@rule
class LeafRule(Rule):
    """Arithmetic on each array alone: write `init_leaf` and `apply_leaf`.

    What their author may rely on, and need not repeat:

    * `x`, `g` and the floating leaves of `state` arrive in the compute dtype (at least
      float32; float64 stays; complex stays complex, real state stays real); what is
      returned is cast back to the dtypes that are stored;
    * hyperparameters arrive as scalars of the matching real dtype, schedules evaluated,
      values by path chosen, and a `Where` as True or False for this slot;
    * `t` is the slot's own number of steps, from 1, as a real scalar;
    * a slot without a gradient is never passed in, and its state stays as it is.

    Args:
        state_dtype: dtype in which floating state is kept; None for at least float32.
    State: `LeafState`.
    """

    by_path: ClassVar[bool] = True

    state_dtype: DTypeLike | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_dtype is not None:
            object.__setattr__(self, "state_dtype", np.dtype(self.state_dtype))

    def init_leaf(self, x: Array) -> PyTree:
        """The state of one slot. Args: `x`, the parameter in its compute dtype."""
        raise NotImplementedError(f"{type(self).__name__} has no init_leaf")

    def apply_leaf(
        self, state: PyTree, x: Array, g: Array, t: Array
    ) -> tuple[PyTree, Array]:
        """The new state of one slot, and the step to subtract from `x`."""
        raise NotImplementedError(f"{type(self).__name__} has no apply_leaf")

    def init(self, params: PyTree) -> LeafState:
        current = self.at_count(0)
        scalars: dict[tuple[int, np.dtype], Rule] = {}
        slots = Slots()
        for path, x in with_paths(params).items():
            self._check_complex("init", path, x)
            x = widen(x)
            here = current.at_path(path, x)
            key = (id(here), x.dtype)
            if key not in scalars:  # thousands of slots share a few casts
                scalars[key] = _to_compute(here, x.dtype)
            made = typing.cast(LeafRule, scalars[key]).init_leaf(x)
            slots[path] = jax.tree.map(self._stored, made)
        return LeafState(jnp.zeros((), jnp.int32), slots, Slots())

    def _stored(self, leaf: Any) -> Array:
        if isinstance(leaf, jax.Array) and not leaf.weak_type and not self.state_dtype:
            return leaf
        leaf = jnp.asarray(leaf)
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return cast(
            leaf, self.state_dtype if floating and self.state_dtype else leaf.dtype
        )

    def _check_complex(self, function: str, path: Path, x: Any) -> None:
        if not self.complex_ok and jnp.iscomplexobj(x):
            what = "a complex parameter, expected a real one"
            raise TypeError(
                complain(f"{type(self).__name__}.{function}", {path: what})
                + " Train its real and imaginary parts as two arrays."
            )

    def apply(
        self, state: LeafState, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[LeafState, PyTree]:
        named, structure = with_paths(params), jax.tree.structure(params)
        gradients = gradients_by_path(named, grads)
        if not gradients:  # no update took place, so nothing is counted
            return state, structure.unflatten([None] * len(named))
        state = state.skipping(path for path in state.slots if path not in gradients)
        current = self.at_count(state.count)
        count = increment(state.count)
        slots, own = Slots(state.slots), Slots(state.own)
        steps: dict[Path, Array] = {}
        for path, g in gradients.items():
            x = named[path]
            self._check_complex("apply", path, x)
            if path in own:
                own[path] = increment(own[path])
            slots[path], steps[path] = _apply_leaf(
                current.at_path(path, x), slots[path], x, g, own.get(path, count)
            )
        return LeafState(count, slots, own), structure.unflatten(
            [steps.get(path) for path in named]
        )


def gradients_by_path(params: Mapping[Path, Any], grads: PyTree) -> dict[Path, Any]:
    """The gradients that there are, in the order of `params`; None drops out.

    Raises: ValueError for a gradient that belongs to no parameter.
    """
    given = with_paths(grads)
    unknown = {p: "a gradient without a parameter" for p in given if p not in params}
    if unknown:
        raise ValueError(complain("apply", unknown))
    return {path: given[path] for path in params if path in given}


def _to_compute(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """The floating leaves in the real, the complex ones in the complex `dtype`."""

    def one(leaf: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            return cast(leaf, dtype)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return cast(leaf, real_part_dtype(dtype))
        return leaf

    return jax.tree.map(one, tree)


@jax.jit
def _apply_leaf(
    rule: LeafRule, state: PyTree, x: Array, g: Array, t: Array
) -> tuple[PyTree, Array]:
    """`rule.apply_leaf` in the compute dtype, and back to the stored dtypes.

    Jitted on its own, so that slots of one shape are traced once, not once each.
    """
    dtype, name = compute_dtype(x.dtype), type(rule).__name__
    # A complex leaf meets its own real hyperparameters and magnitudes; that is the one
    # mixture that strict promotion, where a user has asked for it, would refuse.
    complex_x = jnp.issubdtype(dtype, jnp.complexfloating)
    with jax.numpy_dtype_promotion("standard") if complex_x else nullcontext():
        out = typing.cast(LeafRule, _to_compute(rule, dtype)).apply_leaf(
            _to_compute(state, dtype),
            cast(x, dtype),
            cast(g, dtype),
            cast(t, real_part_dtype(dtype)),
        )
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"{name}.apply_leaf: {out!r}, expected (state, step).")
    new, step = out
    if jax.tree.structure(new) != jax.tree.structure(state):
        raise ValueError(
            f"{name}.apply_leaf: state has structure {jax.tree.structure(new)}, "
            f"expected {jax.tree.structure(state)}, which init_leaf made."
        )
    made, kept = [*jax.tree.leaves(new), step], [*jax.tree.leaves(state), x]
    for after, before in zip(made, kept, strict=True):
        if jnp.shape(after) != before.shape:
            what = "the step" if before is x else "an array of the state"
            raise ValueError(
                f"{name}.apply_leaf: {what} has shape {jnp.shape(after)}, expected "
                f"{before.shape}. (Hyperparameters must be scalars: to sweep one, use "
                "jax.vmap over the rule.)"
            )
    return jax.tree.map(lambda n, old: cast(n, old.dtype), new, state), cast(
        step, x.dtype
    )


@rule
class Chain(Rule):
    """One rule after another: each one's steps are the next one's gradients.

        s1, steps = first.apply(s1, params, grads)
        s2, steps = second.apply(s2, params, steps)

    Args:
        *rules: one or more rules, in the order in which they act.
    State: a tuple, one rule's state each.
    Raises: TypeError if an argument is not a rule.

    >>> from optimjax import SGD, ClipByGlobalNorm
    >>> Chain(ClipByGlobalNorm(1.0), SGD(0.1)).rules[0]
    ClipByGlobalNorm(max_norm=1)
    """

    rules: tuple[Rule, ...]

    def __init__(self, *rules: Rule):
        for each in rules:
            if not is_rule(each):
                raise TypeError(f"Chain: {each!r}, expected rules: Chain(a, b, ...).")
        object.__setattr__(self, "rules", rules)
        self.__post_init__()

    def init(self, params: PyTree) -> tuple[PyTree, ...]:
        return tuple(inner.init(params) for inner in self.rules)

    def apply(
        self, state: tuple[PyTree, ...], params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[tuple[PyTree, ...], PyTree]:
        # Between the rules steps are kept wide, and rounded once at the end.
        wide = jax.tree.map(widen, params)
        steps, new = spread(params, grads), []
        for inner, own in zip(self.rules, state, strict=True):
            own, steps = inner.apply(own, wide, steps, **context)
            new.append(own)
        return tuple(new), steps_like(params, steps)

    def parts(self, state: PyTree, slots: list[Path]) -> list[Part]:
        return [(r, s, slots) for r, s in zip(self.rules, state, strict=True)]

    def with_parts(self, rules: list[Rule]) -> Self:
        return self.with_fields(rules=tuple(rules))

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.rules))})"


@rule
class Wrapper(Rule):
    """A rule around another one, `inner`; its state has an `inner` too."""

    inner: Rule

    def parts(self, state: PyTree, slots: list[Path]) -> list[Part]:
        return [(self.inner, state.inner, slots)]

    def with_parts(self, rules: list[Rule]) -> Self:
        return self.with_fields(inner=rules[0])


def spread(params: PyTree, grads: PyTree) -> PyTree:
    """`grads` in the structure of `params`, with None at every leaf that has none."""
    named = with_paths(params)
    given = gradients_by_path(named, grads)
    return jax.tree.structure(params).unflatten([given.get(path) for path in named])


def steps_like(params: PyTree, steps: PyTree) -> PyTree:
    """`steps` in the dtypes of `params`; None stays None."""
    return jax.tree.map(
        lambda x, s: None if s is None else cast(s, jnp.asarray(x).dtype), params, steps
    )


def walk(
    rule: Rule, state: PyTree, slots: list[Path]
) -> Iterable[tuple[Rule, PyTree, list[Path]]]:
    """A rule and all the rules inside it, each with its state and its slots."""
    yield rule, state, slots
    for part in rule.parts(state, slots):
        yield from walk(*part)
