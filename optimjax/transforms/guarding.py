"""Steps that are taken only if something holds."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimjax.arrays import cast, real_dtype, total, widen
from optimjax.hyper import Hyper
from optimjax.leaf import skipping
from optimjax.nested import Wrapper, sees_gradients
from optimjax.paths import Slots, with_paths
from optimjax.rule import Rule, rule
from optimjax.treewide import Count, PyTree, gradients_by_path, spread, steps_like

__all__ = ["ApplyIf", "LossScaling", "SkipNonFinite", "all_finite"]


def all_finite(tree: PyTree) -> Array:
    """Whether every number in a tree of arrays is finite: a bool, ().

    Inside of a `shard_map`: on all devices.

    >>> all_finite({"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])})
    Array(False, dtype=bool)
    """
    bad = [jnp.any(~jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    finite = [total(cast(each, jnp.float32)) == 0 for each in bad]
    return jnp.all(jnp.stack(finite)) if finite else jnp.asarray(True)


def stepped_if(
    holds: Array, rule: Rule, state: PyTree, params: PyTree, grads: PyTree, context: Any
) -> tuple[PyTree, PyTree]:
    """`rule.apply` if `holds`; else the state bit for bit, and steps of 0.

    `grads` has the structure of `params`, and at least one gradient.
    """
    named, structure = with_paths(params), jax.tree.structure(params)
    given = gradients_by_path(named, grads)
    state = skipping(state, [path for path in named if path not in given])
    wide = jax.tree.map(widen, params)
    zeros = Slots({path: jnp.zeros_like(widen(named[path])) for path in given})

    def step() -> tuple[PyTree, Slots]:
        new, steps = rule.apply(state, wide, grads, **context)
        return new, Slots({**zeros, **with_paths(steps)})

    new, steps = lax.cond(holds, step, lambda: (state, zeros))
    made = structure.unflatten([steps.get(path) for path in named])
    return new, steps_like(params, made)


def moved_if(
    holds: Array, rule: Rule, state: PyTree, params: Slots, grads: Slots, context: Any
) -> tuple[PyTree, Slots]:
    """`rule.descend` if `holds`; else state and parameters bit for bit."""
    state = skipping(state, [path for path, g in grads.items() if g is None])
    return lax.cond(
        holds,
        lambda: rule.descend(state, params, grads, **context),
        lambda: (state, params),
    )


@rule
class Guard(Wrapper):
    """A rule that acts only if something holds: write `weigh` and `after`.

    Where it does not, no slot moves, and the state inside stays bit for bit.
    """

    def weigh(self, state: Any, grads: Slots, context: Any) -> tuple[Array, Slots, Any]:
        """Whether to act, the gradients to act with, and what `after` is told.

        Args:
            grads: {path: gradient}, at least one; those that are None are missing.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weigh")

    def after(self, state: Any, inner: PyTree, taken: Array, told: Any) -> Any:
        """The new state."""
        raise NotImplementedError(f"{type(self).__name__} has no after")

    def apply(
        self, state: Any, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Any, PyTree]:
        grads = spread(params, grads)
        given = Slots(with_paths(grads))
        if not given:
            return state, grads
        taken, given, told = self.weigh(state, given, context)
        grads = jax.tree.structure(params).unflatten(
            [given.get(path) for path in with_paths(params)]
        )
        inner, steps = stepped_if(
            taken, self.inner, state.inner, params, grads, context
        )
        return self.after(state, inner, taken, told), steps

    def descend(
        self, state: Any, params: Slots, grads: Slots, **context: Any
    ) -> tuple[Any, Slots]:
        given = Slots((path, g) for path, g in grads.items() if g is not None)
        if not given:
            return state, params
        taken, given, told = self.weigh(state, given, context)
        grads = Slots((path, given.get(path)) for path in params)
        inner, params = moved_if(taken, self.inner, state.inner, params, grads, context)
        return self.after(state, inner, taken, told), params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guarded(Count):
    """What `ApplyIf` keeps: `count`, the number of calls, and the state inside."""

    inner: PyTree


@rule
class ApplyIf(Guard):
    """A rule that acts only in those updates in which a condition holds.

        steps = inner(g)  if condition(g, count, value=..., ...)  else 0

    In the others no slot moves, and the state inside stays bit for bit.

    Args:
        inner: the rule.
        condition: function of the gradients (a dict from path to array, in which those
            that are None are missing) and the 0-based count of calls, and by keyword
            of all that `update` is given beside; returns a bool, ().
    State: `count`, calls so far, int32, (); `inner`.

    >>> import optimjax as oj
    >>> def small(grads, count, **context):
    ...     return sum(jnp.sum(oj.abs_sq(g)) for g in grads.values()) < 100.0
    >>> model = {"w": jnp.array([1.0, 1.0])}
    >>> state = oj.setup(ApplyIf(oj.SGD(0.1), small), model)
    >>> for g in (1.0, 50.0, 2.0):
    ...     state, model = oj.update(state, model, {"w": jnp.array([g, 0.0])})
    >>> model["w"]
    Array([0.7, 1. ], dtype=float32)
    """

    condition: Callable[..., Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        sees_gradients("ApplyIf", self.inner)

    def init(self, params: PyTree) -> Guarded:
        return Guarded(jnp.zeros((), jnp.int32), self.inner.init(params))

    def weigh(
        self, state: Guarded, grads: Slots, context: Any
    ) -> tuple[Array, Slots, None]:
        wide = Slots((path, widen(g)) for path, g in grads.items())
        return jnp.asarray(self.condition(wide, state.count, **context)), grads, None

    def after(self, state: Guarded, inner: PyTree, taken: Array, told: None) -> Guarded:
        return Guarded(state.next().count, inner)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Skipping(Count):
    """What `SkipNonFinite` keeps. `count` is the number of steps taken.

    Attributes:
        inner: the state of the rule inside.
        skipped: updates skipped so far, int32, ().
        in_a_row: of those, the ones since the last good gradient, int32, ().
        gave_up: whether there were too many in a row, bool, ().
    """

    inner: PyTree
    skipped: Array
    in_a_row: Array
    gave_up: Array


@rule
class SkipNonFinite(Guard):
    """A rule that ignores gradients in which a number is not finite.

        steps = inner(g)  if all of g is finite and it has not given up  else 0

    One bad number skips all slots: parameters, moments and counts stay bit for bit.
    A NaN is never let through, however many there are.

    Args:
        inner: the rule.
        give_up_after: this many bad gradients in a row, and nothing moves any more:
            the parameters are still the last good ones, and `gave_up` in the state says
            so. A compiled step cannot raise; a loop may look from time to time. By
            default it never gives up.
    State: `Skipping`.
    Raises: ValueError if `give_up_after` is less than 1, or if a `LossScaling` is
        inside.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0])}
    >>> state = oj.setup(SkipNonFinite(oj.Adam(0.1)), model)
    >>> for g in (1.0, jnp.nan, jnp.inf, 1.0):
    ...     state, model = oj.update(state, model, {"w": jnp.array([g])})
    ...     print(model["w"], state.inner.skipped, state.inner.in_a_row)
    [0.9] 0 0
    [0.9] 1 1
    [0.9] 2 2
    [0.8] 2 0
    """

    ranges: ClassVar = {"give_up_after": (1.0, math.inf, False)}
    whole: ClassVar = ("give_up_after",)

    give_up_after: Hyper = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        sees_gradients("SkipNonFinite", self.inner)

    def init(self, params: PyTree) -> Skipping:
        zero = jnp.zeros((), jnp.int32)
        return Skipping(zero, self.inner.init(params), zero, zero, jnp.zeros((), bool))

    def weigh(
        self, state: Skipping, grads: Slots, context: Any
    ) -> tuple[Array, Slots, Array]:
        good = all_finite(grads)
        return good & ~state.gave_up, grads, good

    def after(
        self, state: Skipping, inner: PyTree, taken: Array, told: Array
    ) -> Skipping:
        in_a_row = jnp.where(told, 0, state.in_a_row + 1)
        limit = cast(self.at_count(state.count).give_up_after, jnp.float32)
        return Skipping(
            jnp.where(taken, state.next().count, state.count),
            inner,
            state.skipped + cast(~taken, jnp.int32),
            in_a_row,
            state.gave_up | (cast(in_a_row, jnp.float32) >= limit),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled(Count):
    """What `LossScaling` keeps. `count` is the number of steps taken.

    Attributes:
        inner: the state of the rule inside.
        scale: what the loss has to be multiplied by, ().
        good: steps taken since the scale last changed, int32, ().
    """

    inner: PyTree
    scale: Array
    good: Array


@rule
class LossScaling(Guard):
    """A large loss for small gradients, which float16 would round to 0.

        g     = (gradient of scale * loss) / scale
        steps = inner(g)  if all of g is finite  else 0
        scale <- scale * backoff                      if not finite
        scale <- scale * growth                       after `period` good steps in a row

    It goes around all else, since what is outside sees gradients that are still scaled.
    `make_step` multiplies the loss (and still returns the loss itself). In a step
    written by hand, multiply it by `loss_scale(state)`. Gradients arrive in float32,
    so that dividing loses nothing.

    Args:
        inner: the rule.
        scale: the first scale, > 0.
        growth: factor after a period without overflow, >= 1.
        backoff: factor after an overflow, in (0, 1].
        period: good steps before the scale grows, >= 1.
    State: `Scaled`.
    Raises: ValueError if a number is outside its range.
    Source: Micikevicius et al. 2018, section 3.2, arXiv:1710.03740; defaults of torch's
        GradScaler, but for a first scale that float16 can hold.

    >>> import optimjax as oj
    >>> def loss(model):  # of which the gradient, 2e-8, is 0 in float16
    ...     return jnp.sum((model["w"] * 1e-4) ** 2)
    >>> model = {"w": jnp.ones(2, jnp.float16)}
    >>> state = oj.setup(LossScaling(oj.SGD(1e7)), model)
    >>> state, model, value = oj.make_step(loss)(state, model)
    >>> model["w"], state.inner.scale
    (Array([0.8, 0.8], dtype=float16), Array(32768., dtype=float32))
    """

    ranges: ClassVar = {
        "growth": (1.0, math.inf, False),
        "backoff": (0.0, 1.0, False),
        "period": (1.0, math.inf, False),
    }
    whole: ClassVar = ("period",)
    positive: ClassVar = ("scale", "backoff")
    settled: ClassVar = {"scale": "It is the first scale; the state has the present"}

    scale: Hyper = 32768.0
    growth: Hyper = 2.0
    backoff: Hyper = 0.5
    period: Hyper = 2000

    def init(self, params: PyTree) -> Scaled:
        zero = jnp.zeros((), jnp.int32)
        scale = cast(self.at_count(0).scale, real_dtype())
        return Scaled(zero, self.inner.init(params), scale, zero)

    def weigh(
        self, state: Scaled, grads: Slots, context: Any
    ) -> tuple[Array, Slots, None]:
        true = Slots()
        for path, g in grads.items():
            true[path] = widen(g) / cast(state.scale, widen(g).dtype)
        return all_finite(true), true, None

    def after(self, state: Scaled, inner: PyTree, taken: Array, told: None) -> Scaled:
        now, scale = self.at_count(state.count), state.scale
        run = jnp.where(taken, state.good + 1, 0)
        grown = cast(run, scale.dtype) >= cast(now.period, scale.dtype)
        factor = jnp.where(taken, jnp.where(grown, now.growth, 1), now.backoff)
        scale = state.scale * cast(factor, scale.dtype)
        kept = jnp.isfinite(scale) & (scale > 0)
        return Scaled(
            jnp.where(taken, state.next().count, state.count),
            inner,
            jnp.where(kept, scale, state.scale),
            jnp.where(grown, 0, run),
        )

    def loss_scale(self, state: Scaled) -> Array:
        return state.scale
