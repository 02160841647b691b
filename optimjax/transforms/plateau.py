"""Steps that become smaller when the loss no longer falls."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optimjax.arrays import cast, real_dtype
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.rule import OneFactor, rule
from optimjax.treewide import Count, PyTree, increment

__all__ = ["Plateau", "ReduceOnPlateau"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plateau(Count):
    """What `ReduceOnPlateau` keeps, all scalars.

    Attributes:
        scale: what steps are multiplied by, real.
        best: the least value that counted as an improvement, real; at first infinite.
        bad: evaluations without improvement in a row, int32.
        cooldown: evaluations that are not to be counted, int32.
        mean: of the values since the last evaluation, real.
        seen: how many those are, int32.
    """

    scale: Array
    best: Array
    bad: Array
    cooldown: Array
    mean: Array
    seen: Array


@rule
class ReduceOnPlateau(OneFactor):
    """Steps scaled down whenever the loss has not improved for a while.

        improved = value < best - (rtol * |best| + atol)       best: inf at first
        best     = value                         if improved
        bad      = 0                             if improved or in cooldown
                   bad + 1                       else; at bad = patience:
                   scale <- max(factor * scale, min_scale), cooldown and bad = 0 again
        step     = scale * g

    To be the last link of a `Chain`. It needs the loss: `update(..., value=loss)`, or
    `make_step`. A value that is NaN is no improvement; neither is inf.

    Args:
        factor: by what the scale is multiplied, in [0, 1).
        patience: after how many evaluations without improvement in a row, >= 1. It is
            counted as by optax and Keras; torch's is 1 less.
        rtol: what share of the best value an improvement has to exceed, in [0, 1].
        atol: what it has to exceed beside, in the unit of the loss, >= 0.
        cooldown: evaluations after a reduction in which bad ones do not count, >= 0.
        min_scale: the least scale, in [0, 1].
        accumulation: updates whose mean value makes one evaluation, >= 1.
    State: `Plateau`: `count`, `scale`, `best`, `bad`, `cooldown`, `mean`, `seen`.
    Raises: ValueError if a number is outside its range.
    Source: torch's ReduceLROnPlateau, whose scale acts one step later, and in which a
        loss below 0 improves by getting a little worse (rtol * best, not |best|).

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> plateau = ReduceOnPlateau(0.3, patience=2)
    >>> state = plateau.init(x)
    >>> for value in (5.0, 4.0, 4.2, 4.0):
    ...     state, steps = plateau.apply(state, x, {"w": jnp.ones(2)}, value=value)
    >>> steps["w"].tolist(), state.scale, state.best
    ([0.3, 0.3], Array(0.3, dtype=float32), Array(4., dtype=float32))
    """

    needs = ("value",)
    ranges: ClassVar = {
        "factor": (0.0, 1.0, True),
        "patience": (1.0, math.inf, False),
        "rtol": (0.0, 1.0, False),
        "atol": NOT_NEGATIVE,
        "min_scale": (0.0, 1.0, False),
        "accumulation": (1.0, math.inf, False),
    }
    whole: ClassVar = ("patience", "cooldown", "accumulation")

    factor: Hyper = 0.1
    patience: Hyper = 10
    rtol: Hyper = 1e-4
    atol: Hyper = 0.0
    cooldown: Hyper = 0
    min_scale: Hyper = 0.0
    accumulation: Hyper = 1

    def init(self, params: PyTree) -> Plateau:
        def number(x: float) -> Array:
            return jnp.asarray(x, real_dtype())

        def none() -> Array:  # each its own buffer: a state can be donated
            return jnp.zeros((), jnp.int32)

        return Plateau(
            *(none(), number(1), number(math.inf)), none(), none(), number(0), none()
        )

    def one_factor(
        self, state: Plateau, grads: PyTree, **context: Any
    ) -> tuple[Plateau, Array]:
        value = context["value"]
        if np.ndim(value) != 0:
            raise ValueError(
                f"ReduceOnPlateau: value has shape {np.shape(value)}, expected a "
                "scalar, the loss."
            )
        now = self.at_count(state.count)
        state = now._evaluated(state, cast(value, state.best.dtype))
        return state, state.scale

    def _evaluated(self, state: Plateau, value: Array) -> Plateau:
        """The state after one more value, with schedules evaluated."""
        dtype = value.dtype
        seen = increment(state.seen)
        mean = state.mean + (value - state.mean) / cast(seen, dtype)
        due = cast(seen, dtype) >= cast(self.accumulation, dtype)

        margin = cast(self.rtol, dtype) * jnp.abs(state.best) + cast(self.atol, dtype)
        # Without a best value yet, inf - inf would be NaN, and nothing would improve.
        least = jnp.where(jnp.isinf(state.best), state.best, state.best - margin)
        improved = mean < least
        cooling = state.cooldown > 0
        bad = jnp.where(improved | cooling, 0, increment(state.bad))
        reduce = cast(bad, dtype) >= cast(self.patience, dtype)
        smaller = jnp.maximum(
            state.scale * cast(self.factor, dtype), cast(self.min_scale, dtype)
        )
        rest = jnp.where(cooling, state.cooldown - 1, 0)
        pause = jnp.minimum(cast(self.cooldown, dtype), 2.0**30)  # in float32, too
        after = Plateau(
            count=state.count,
            scale=jnp.where(reduce, smaller, state.scale),
            best=jnp.where(improved, mean, state.best),
            bad=jnp.where(reduce, 0, bad),
            cooldown=jnp.where(reduce, cast(pause, jnp.int32), rest),
            mean=jnp.zeros_like(mean),
            seen=jnp.zeros_like(seen),
        )
        before = dataclasses.replace(state, mean=mean, seen=seen)
        new = jax.tree.map(lambda a, b: jnp.where(due, a, b), after, before)
        return dataclasses.replace(new, count=state.next().count)
