"""Rules that hold rules: one after another, or one around another."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import jax
from jax import Array

from optimjax.arrays import cast, widen
from optimjax.leaf import LeafRule, LeafState
from optimjax.paths import Slots
from optimjax.rule import OneFactor, Part, Rule, is_rule, rule
from optimjax.treewide import PyTree, spread, steps_like

__all__ = ["Chain", "LeafWrapper", "Wrapper"]


@rule
class Chain(Rule):
    """One rule after another: each one's steps are the next one's gradients.

        s1, steps = first.apply(s1, params, grads)
        s2, steps = second.apply(s2, params, steps)

    Args:
        *rules: one or more rules, in the order in which they act.
    State: a tuple, one rule's state each.
    Raises: TypeError if an argument is not a rule; ValueError if one that looks at the
        parameter after the step (a projection, an average) is followed by another kind,
        if anything comes after `MixedPrecision`, or before `LossScaling`.

    >>> from optimjax import SGD, ClipByGlobalNorm
    >>> Chain(ClipByGlobalNorm(1.0), SGD(0.1)).rules[0]
    ClipByGlobalNorm(max_norm=1)
    """

    rules: tuple[Rule, ...]

    def __init__(self, *rules: Rule):
        for each in rules:
            if not is_rule(each):
                raise TypeError(f"Chain: {each!r}, expected rules: Chain(a, b, ...).")
        for first, second in itertools.pairwise(rules):
            early = [r for r in every_rule(first) if r.follows]
            averaging = any(isinstance(r, Wrapper) for r in early)
            watches = getattr(second, "watches", False)
            if early and not (second.follows and (watches or not averaging)):
                raise ValueError(
                    f"Chain: {type(early[0]).__name__} looks at the parameter after "
                    f"the step, but {type(second).__name__} would still change that "
                    "step. Put it after."
                )
            steps_stay(f"Chain: {type(second).__name__}", first)
            sees_gradients(f"Chain: {type(first).__name__}", second)
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

    def descend(
        self, state: Any, params: Slots, grads: Slots, **context: Any
    ) -> tuple[Any, Slots]:
        *before, last = self.rules
        if not (isinstance(last, LeafRule) and last.fuses()):
            return super().descend(state, params, grads, **context)
        wide = Slots((path, widen(x)) for path, x in params.items())
        steps, new, scale = grads, [], None
        for i, (inner, own) in enumerate(zip(before, state, strict=False)):
            at_last = i == len(before) - 1 and jax.tree.leaves(steps)
            if at_last and isinstance(inner, OneFactor):
                own, scale = inner.one_factor(own, steps, **context)
            else:
                given = Slots(
                    (path, None if g is None else cast(g, wide[path].dtype))
                    for path, g in steps.items()
                )
                own, steps = inner.apply(own, wide, given, **context)
            new.append(own)
        own, params = last.descend(state[-1], params, steps, scale=scale, **context)
        return (*new, own), params

    def parts(self, state: PyTree, slots: Any) -> list[Part]:
        return [(r, s, slots) for r, s in zip(self.rules, state, strict=True)]

    def with_parts(self, rules: list[Rule]) -> Self:
        return self.with_fields(rules=tuple(rules))

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.rules))})"


@rule
class Wrapper(Rule):
    """A rule around another one, `inner`; its state has an `inner` too."""

    inner: Rule

    def parts(self, state: PyTree, slots: Any) -> list[Part]:
        return [(self.inner, state.inner, slots)]

    def with_parts(self, rules: list[Rule]) -> Self:
        return self.with_fields(inner=rules[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Around:
    """What a `LeafWrapper` keeps.

    Attributes:
        inner: the state of the rule inside.
        own: the wrapper's own, path by path.
    """

    inner: PyTree
    own: LeafState


@rule
class LeafWrapper(Wrapper, LeafRule):
    """Arithmetic on each array around another rule: write `init_leaf`, `after_leaf`.

        state.inner, steps = inner.apply(state.inner, params, grads)
        state, step        = after_leaf(state, x, g, step, t)       for each slot

    Its author may rely on what a `LeafRule` promises. A rule that keeps an average
    writes `eval_leaf` too, for `eval_model`, and says `follows = True`: it has to see
    the step that is taken in the end. One that returns the inner step as it is says
    `watches = True`.

    >>> import jax.numpy as jnp
    >>> import optimjax as oj
    >>> @oj.rule
    ... class Cautious(oj.LeafWrapper):
    ...     def init_leaf(self, x):
    ...         return None
    ...
    ...     def after_leaf(self, state, x, g, step, t):
    ...         return state, jnp.where(g * step > 0, step, 0)
    >>> rule = Cautious(oj.SGD(0.1, momentum=0.9))
    >>> x = {"w": jnp.array([1.0, 1.0])}
    >>> state, _ = rule.apply(rule.init(x), x, {"w": jnp.array([1.0, 1.0])})
    >>> rule.apply(state, x, {"w": jnp.array([1.0, -0.1])})[1]["w"]
    Array([0.19, 0.  ], dtype=float32)
    """

    watches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.watches:
            steps_stay(type(self).__name__, self.inner)
        early = [r for r in every_rule(self.inner) if r.follows]
        if early and not self.watches and not self.follows:
            name = type(early[0]).__name__
            raise ValueError(
                f"{type(self).__name__}: {name} looks at the parameter after the step, "
                f"but {type(self).__name__} would still change that step. Put {name} "
                "around it, or after it in a Chain."
            )

    def after_leaf(
        self, state: PyTree, x: Array, g: Array, step: Array, t: Array
    ) -> tuple[PyTree, Array]:
        """The new state of one slot, and the step in place of the inner rule's."""
        raise NotImplementedError(f"{type(self).__name__} has no after_leaf")

    def init(self, params: PyTree) -> Any:
        return Around(self.inner.init(params), super().init(params))

    def apply(
        self, state: Any, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Any, PyTree]:
        wide, grads = jax.tree.map(widen, params), spread(params, grads)
        inner, steps, *more = self._inside(state.inner, wide, grads, context)
        own, steps = self._apply_leaves(state.own, wide, grads, steps, *more)
        return Around(inner, own), steps_like(params, steps)

    def _inside(
        self, inner: PyTree, params: PyTree, grads: PyTree, context: Any
    ) -> tuple[PyTree, ...]:
        """The inner rule's state and steps, and what else `_arithmetic` is to see."""
        return self.inner.apply(inner, params, grads, **context)

    def _arithmetic(
        self, state: PyTree, x: Array, arrays: tuple[Array, ...], t: Array
    ) -> tuple[PyTree, Array]:
        g, step = arrays
        return self.after_leaf(state, x, g, step, t)

    def at_count(self, count: Any) -> Self:
        # Without the rule inside, whose numbers are no matter of the slot's arithmetic.
        return super().at_count(count).with_fields(inner=None)

    def eval_params(self, state: Any, params: Any) -> Any:
        if type(self).eval_leaf is LeafRule.eval_leaf:
            return self.inner.eval_params(state.inner, params)
        return super().eval_params(state.own, params)

    def own_state(self, state: Any) -> LeafState:
        return state.own


def every_rule(rule: Rule) -> list[Rule]:
    """The rule and all the rules inside it."""
    held = [vars(rule)[n] for n, kind in rule._kinds.items() if kind == "rule"]
    inner = [r for r in jax.tree.leaves(held, is_leaf=is_rule) if is_rule(r)]
    return [rule, *(r for each in inner for r in every_rule(each))]


def steps_stay(changes: str, inner: Rule) -> None:
    """ValueError if a rule inside would undo what is changed of its steps."""
    ends = [r for r in every_rule(inner) if r.ends]
    if ends:
        name = type(ends[0]).__name__
        raise ValueError(
            f"{changes} would change the steps of {name}, which says where parameters "
            f"go and would undo that. Put {name} around it."
        )


def scaling(rule: Rule) -> bool:
    """Whether a rule inside wants a scaled loss."""
    return any(type(r).loss_scale is not Rule.loss_scale for r in every_rule(rule))


def sees_gradients(who: str, inner: Rule) -> None:
    """ValueError if what looks at gradients is outside of what undoes their scale."""
    if scaling(inner):
        raise ValueError(
            f"{who} would see gradients that are still scaled. Put LossScaling around "
            "it."
        )


def walk(rule: Rule, state: PyTree, slots: Any) -> Iterable[Part]:
    """A rule and all the rules inside it, each with its state and its slots."""
    own, mine = rule.own_state(state), slots
    if isinstance(own, LeafState):  # a matrix rule leaves others to its `aux`
        mine = [path for path in slots if path in own.slots]
    yield rule, own, mine
    for part in rule.parts(state, slots):
        yield from walk(*part)
