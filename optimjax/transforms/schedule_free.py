"""Averaging in place of a falling learning rate."""

import typing
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from optimjax.hyper import NOT_NEGATIVE, ByPath, Hyper, evaluate
from optimjax.nested import LeafWrapper, every_rule
from optimjax.rule import Rule, rule

__all__ = ["ScheduleFree"]


class Base(NamedTuple):
    z: Array
    weight: Array
    highest: Array


@rule
class ScheduleFree(LeafWrapper):
    """Steps from one sequence, gradients at a second, evaluation at a third.

        z       <- z - step                                step of `inner`, at y
        highest <- max(highest, rate)                      rate: its learning rate
        weight  <- weight + highest^power
        c       =  highest^power / weight                  0 where the weight is
        x       <- (1 - c) * x + c * z
        y       <- (1 - b1) * z + b1 * x

    The model holds y; `eval_model` gives x. The rule inside needs no momentum, for b1
    does that, and no schedule but a warm-up: `ScheduleFree(SGD(1.0))`, or
    `ScheduleFree(RMSProp(3e-3, decay=0.999, bias_correction=True))` for what its
    authors call AdamW; with decay, `Chain(RMSProp(...), ...)` or any other.
    Only z is kept: x = (y - (1 - b1) z) / b1, so b1 has to stay what it is. 16-bit
    parameters want `MixedPrecision` around it; guards and `Accumulate` go around it,
    too, for a step of 0 inside would be weighed like any other.

    Args:
        inner: the rule that takes the steps.
        b1: how near the gradient is taken to the average, in (0, 1].
        power: how a step's weight grows with the highest learning rate so far, >= 0.
        learning_rate: the one that weighs; None for that of the rule inside, at the
            same count.
    State: `z`, shape of the parameter; `weight` and `highest`, ().
    Raises: ValueError if a number is outside its range, or if no single learning rate
        is found inside and none is given.
    Source: Defazio et al. 2024, Algorithm 1, arXiv:2405.15682.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(ScheduleFree(oj.SGD(0.1), b1=0.8), model)
    >>> for g in ([1.0, 2.0], [-3.0, 1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), oj.eval_model(state, model)["w"].tolist()
    ([1.08, -2.26], [1.05, -2.25])
    """

    follows: ClassVar[bool] = True
    ends: ClassVar[bool] = True
    ranges: ClassVar = {"b1": (0.0, 1.0, False), "power": NOT_NEGATIVE}
    positive: ClassVar = ("b1",)
    settled: ClassVar = {"b1": "Its averages are worked out from that of all the run"}

    b1: Hyper = 0.9
    power: Hyper = 2.0
    learning_rate: Hyper | None = None

    def __post_init__(self):
        super().__post_init__()
        self._rate()

    def with_parts(self, rules: list[Rule]) -> Self:
        made = super().with_parts(rules)
        made._rate()  # still one
        return made

    def _rate(self) -> Any:
        """The learning rate that weighs, as a number, a schedule or an array."""
        if self.learning_rate is not None:
            return self.learning_rate
        inside = [each.hypers() for each in every_rule(self.inner)]
        rates = [found["learning_rate"] for found in inside if "learning_rate" in found]
        if len(rates) != 1 or isinstance(rates[0], ByPath):
            raise ValueError(
                f"ScheduleFree: {self.inner!r} has "
                f"{'one by path' if len(rates) == 1 else len(rates)} for a learning "
                "rate, expected a single one. Say which weighs: learning_rate=..."
            )
        return rates[0]

    def at_count(self, count: Any) -> Self:
        rate = evaluate(self._rate(), count)
        return super().at_count(count).with_fields(learning_rate=rate)

    def init_leaf(self, x):
        zero = jnp.zeros((), x.real.dtype)
        return Base(x, zero, zero)

    def after_leaf(self, state, x, g, step, t):
        y, z, rate = x, state.z, typing.cast(Any, self.learning_rate)
        average = (y - (1 - self.b1) * z) / self.b1
        highest = jnp.maximum(state.highest, rate)
        share = highest**self.power
        weight = state.weight + share
        c = jnp.where(weight > 0, share / jnp.where(weight > 0, weight, 1), 0)
        z = z - step
        average = (1 - c) * average + c * z
        return Base(z, weight, highest), y - ((1 - self.b1) * z + self.b1 * average)

    def eval_leaf(self, state, x, t):
        return (x - (1 - self.b1) * state.z) / self.b1
