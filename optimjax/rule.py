"""What a rule is: two pure functions, `init` and `apply`, and numbers that are data."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import jax
import numpy as np
from jax import Array

from optimjax.arrays import cast, cast_like, widen
from optimjax.axes import Axes
from optimjax.hyper import (
    AXES,
    KINDS,
    NOT_NEGATIVE,
    OPTION,
    RANGES,
    WHERE,
    ByPath,
    PerPath,
    as_value,
    axes_field,
    canonical,
    check_range,
    evaluate,
    option_field,
    register_fields,
    spelled,
    where_field,
)
from optimjax.paths import Path, Slots, complain
from optimjax.treewide import PyTree, spread, steps_like

__all__ = ["Rule", "rule"]

Places: TypeAlias = Mapping[Path, Mapping[Path, Any]]
Part: TypeAlias = tuple["Rule", PyTree, Any]  # and the paths of its slots
Selection: TypeAlias = typing.Annotated[Any, WHERE]
AxesOf: TypeAlias = typing.Annotated[Any, AXES]
Option: TypeAlias = typing.Annotated[Any, OPTION]
R = TypeVar("R", bound="Rule")


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
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
    own_init = "__init__" in vars(cls)
    made = dataclasses.dataclass(frozen=True, eq=False, repr=False, init=not own_init)(
        cls
    )
    if not own_init:
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
    made._ints = {n for n in kinds if hints[n] is int or hints[n] == int | None}
    made._optional = {n for n in kinds if type(None) in typing.get_args(hints[n])}
    data = tuple(name for name, kind in kinds.items() if kind in ("hyper", "rule"))
    static = tuple(name for name in kinds if name not in data)

    register_fields(made, data, static)
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
    """What a field is: "hyper", "where", "axes", "option", "rule" or "static"."""
    parts = list(_parts(hint))
    notes = [note for p in parts for note in getattr(p, "__metadata__", ())]
    for note, kind in KINDS.items():
        if note in notes:
            return kind
    holds_rules = any(isinstance(p, type) and issubclass(p, Rule) for p in parts)
    return "rule" if holds_rules else "static"


def _parts(hint: Any) -> Iterable[Any]:
    yield hint
    for inner in typing.get_args(hint):
        yield from _parts(inner)


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
        follows: whether it looks at the parameter after the step, so that in a `Chain`
            none but its like may come after it.
        ends: whether it says where the parameter goes, so that a step which another
            rule changed afterwards would be undone by the next.
        freezes: whether its slots are never moved; `setup` freezes them.
        per_example: whether its gradients have a first axis more, which numbers the
            examples.
        by_path: whether hyperparameters may differ by path.
        ranges: `{name: (low, high, high_excluded)}`, where a hyperparameter's range
            differs from the usual one for its name; None for no check.
        whole, positive: names of the hyperparameters that count something, and of those
            that may be anything in their range but 0; the usual one is from 0 on.
        settled: `{name: why}`, of those that `adjust` may not change.

    What a `LeafRule` need not care for is here the rule's own business: schedules
    (`at_count`), counting, missing gradients (`spread`) and dtypes (`steps_like`). All
    keyword arguments of `update` arrive in `context`.

    >>> import jax.numpy as jnp
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
    follows: ClassVar[bool] = False
    ends: ClassVar[bool] = False
    freezes: ClassVar[bool] = False
    per_example: ClassVar[bool] = False
    by_path: ClassVar[bool] = False
    ranges: ClassVar[dict[str, tuple[float, float, bool] | None]] = {}
    whole: ClassVar[tuple[str, ...]] = ()
    positive: ClassVar[tuple[str, ...]] = ()
    settled: ClassVar[dict[str, str]] = {}
    _kinds: ClassVar[dict[str, str]] = {}
    _optional: ClassVar[set[str]] = set()
    _ints: ClassVar[set[str]] = set()

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

    def descend(
        self, state: PyTree, params: Slots, grads: Slots, **context: Any
    ) -> tuple[PyTree, Slots]:
        """`apply`, and its steps subtracted: the new state and parameters.

        Args:
            params: {path: array}, in the dtypes that are stored.
            grads: {path: array, of any float dtype, or None}.
        """
        # Steps stay in the compute dtype until they are subtracted: one rounding, not
        # two. Gradients come in it too, so no rule's state can take theirs.
        wide = Slots((path, widen(x)) for path, x in params.items())
        given = Slots(
            (path, None if g is None else cast(g, wide[path].dtype))
            for path, g in grads.items()
        )
        state, steps = self.apply(state, wide, given, **context)
        new = Slots(params)
        for path, step in steps.items():
            if step is not None:
                new[path] = cast_like(wide[path] - step, params[path])
        return state, new

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, kind in self._kinds.items():
            value, owner = getattr(self, field), f"{name}: {field}"
            if kind == "hyper" and not (value is None and field in self._optional):
                value = self.checked(field, value)
            elif field in self._ints and not (value is None or type(value) is int):
                if not isinstance(value, np.integer):
                    raise TypeError(f"{owner} is {value!r}, expected a whole number.")
                value = int(value)
            elif kind == "where":
                value = where_field(value, owner)
            elif kind == "axes":
                value = axes_field(value, owner)
            elif kind == "option":
                value = option_field(value, getattr(type(self), field))
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
        check_range(
            owner,
            name,
            value,
            self.range_of(name),
            name in self.whole,
            name in self.positive,
        )
        return self.unless_by_path(name, value, owner)

    def range_of(self, name: str) -> tuple[float, float, bool] | None:
        """(lowest, highest, whether that is excluded) of a hyperparameter, if known."""
        counts = name in self.whole or name in self.positive
        usual = RANGES.get(name, NOT_NEGATIVE if counts else None)
        return self.ranges.get(name, usual)

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

    def by_slot(self) -> Callable[[Path, Any], Self]:
        """A function of (path, leaf): this rule with its choices made for that slot.

        Slots that are alike in them are given the same object.
        """
        made: dict[Any, tuple[Self, Any]] = {}

        def at(path: Path, leaf: Any) -> Self:
            chosen = self.choices(path, leaf)
            plain = (bool, int, float, str, Axes)
            key = tuple(v if type(v) in plain else id(v) for v in chosen.values())
            if key not in made:  # what is chosen stays alive, so its id is its own
                made[key] = self.with_fields(**chosen), chosen
            return made[key][0]

        return at

    def choices(self, path: Path, leaf: Any) -> dict[str, Any]:
        """{field: what it is for this slot}, of the fields that may differ by path."""
        chosen = {}
        for name, value in vars(self).items():
            owner = f"{type(self).__name__}: {name}"
            if isinstance(value, ByPath):
                chosen[name] = value.at(path, leaf, owner)
            elif self._kinds.get(name) == "where":
                chosen[name] = value is None or bool(value(path, leaf, owner))
            elif self._kinds.get(name) == "axes" and value is not None:
                chosen[name] = axes = value(path, leaf, owner)
                if not isinstance(axes, Axes):
                    what = f"axes are {axes!r}, expected Axes(...)"
                    raise TypeError(complain(owner, {path: what}))
            elif self._kinds.get(name) == "axes" and name not in self._optional:
                chosen[name] = Axes()
            elif self._kinds.get(name) == "option" and isinstance(value, PerPath):
                chosen[name] = value(path, leaf, owner)
        return chosen

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
                table = (
                    value.bind(places, owner, bool)
                    if self._kinds.get(name) == "where"
                    else value.bind(places, owner)
                )
                bound[name] = PerPath(table)
            elif self._kinds.get(name) == "rule":
                bound[name] = jax.tree.map(
                    lambda inner: inner.bind(places), value, is_leaf=is_rule
                )
        return self.with_fields(**bound)

    # Rules inside -------------------------------------------------------------------

    def parts(self, state: PyTree, slots: Any) -> list[Part]:
        """The rules inside, each with its own state and the slots that it acts on.

        Args:
            slots: paths; {path: leaf} where choices by path are not yet bound.
        """
        return []

    def with_parts(self, rules: list["Rule"]) -> Self:
        """This rule with others in place of `parts`, in the same order."""
        return self

    # What users read from a state ---------------------------------------------------

    def own_state(self, state: PyTree) -> PyTree:
        """The part of its state that is not of the rules inside."""
        return state

    def eval_params(self, state: PyTree, params: Slots) -> Slots:
        """The parameters to evaluate a model at, wide; those of the rules inside."""
        averages = Slots(params)
        for inner, own, slots in self.parts(state, list(params)):
            mine = Slots((path, averages[path]) for path in slots)
            averages.update(inner.eval_params(own, mine))
        return averages

    def loss_scale(self, state: PyTree) -> Array | None:
        """What the loss has to be multiplied by before it is differentiated, if so."""
        return None

    # As a value ---------------------------------------------------------------------

    def _key(self) -> tuple[Any, ...]:
        return as_value(self)

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
                shown.append(f"{f.name}={getattr(value, '__name__', repr(value))}")
        return f"{type(self).__name__}({', '.join(shown)})"


class OneFactor(Rule):
    """A rule that scales all gradients alike: write `init` and `one_factor`.

    step = factor * g
    """

    def one_factor(
        self, state: PyTree, grads: PyTree, **context: Any
    ) -> tuple[PyTree, Array]:
        """The new state, and the factor, real, (). There is a gradient at least."""
        raise NotImplementedError(f"{type(self).__name__} has no one_factor")

    def apply(
        self, state: PyTree, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[PyTree, PyTree]:
        grads = jax.tree.map(widen, spread(params, grads))
        if not jax.tree.leaves(grads):  # no update took place, so nothing is counted
            return state, grads
        state, factor = self.one_factor(state, grads, **context)
        steps = jax.tree.map(lambda g: g * cast(factor, g.dtype), grads)
        return state, steps_like(params, steps)


def is_rule(x: Any) -> bool:
    return isinstance(x, Rule)


def _holds(x: Any) -> bool:
    """Whether `x` is one of the containers in which a rule keeps others."""
    return isinstance(x, (tuple, list, dict))
