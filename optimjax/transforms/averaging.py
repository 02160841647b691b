"""Averages of the parameters on their way, for `eval_model` to read."""

import math
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import zeros_like
from optimjax.hyper import Hyper
from optimjax.nested import LeafWrapper
from optimjax.rule import rule

__all__ = ["EMA", "SWA", "Lookahead"]


class Averaged(NamedTuple):
    average: Array


class Debiased(NamedTuple):
    average: Array
    weight: Array


@rule
class EMA(LeafWrapper):
    """An exponential moving average of the parameters, for evaluation.

        average <- decay * average + (1 - decay) * (x - step)
        weight  <- decay * weight + (1 - decay)
        eval_model: average / weight if debias else average

    The steps are those of the rule inside. Without `debias` the average starts at the
    first parameters; with it, at 0.

    Args:
        inner: the rule that takes the steps.
        decay: what is kept of the average, in [0, 1); it reaches back about
            1 / (1 - decay) steps.
        debias: forget where it started.
    State: `average`, shape of the parameter, at least float32; with `debias` also
        `weight`, (), which is 1 - decay^t if decay stays what it is.
    Raises: ValueError if `decay` is outside its range.
    Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by
        averaging"; debiased as in Kingma and Ba 2015, arXiv:1412.6980, section 3.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(EMA(oj.SGD(0.1), decay=0.8, debias=True), model)
    >>> for g in ([1.0, 2.0], [-3.0, 1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), oj.eval_model(state, model)["w"].tolist()
    ([1.2, -2.3], [1.0667, -2.2556])
    """

    follows: ClassVar[bool] = True
    watches: ClassVar[bool] = True

    decay: Hyper = 0.999
    debias: bool = False

    def init_leaf(self, x):
        if self.debias:
            return Debiased(zeros_like(x), jnp.zeros((), x.real.dtype))
        return Averaged(x)

    def after_leaf(self, state, x, g, step, t):
        average = self.decay * state.average + (1 - self.decay) * (x - step)
        if not self.debias:
            return Averaged(average), step
        weight = self.decay * state.weight + (1 - self.decay)
        return Debiased(average, weight), step

    def eval_leaf(self, state, x, t):
        if not self.debias:
            return state.average
        seen = state.weight > 0
        return jnp.where(seen, state.average / jnp.where(seen, state.weight, 1), x)


@rule
class SWA(LeafWrapper):
    """The plain mean of parameters on their way, for evaluation.

        after updates start, start + every, start + 2 every, ...:
        average <- average + (x - step - average) / n        the n-th of them

    Until the first of them `eval_model` gives the parameters as they are. The steps are
    those of the rule inside, which is best given a constant or cyclic learning rate.

    Args:
        inner: the rule that takes the steps.
        start: the number of the first update that counts, >= 1, whole.
        every: updates from one that counts to the next, >= 1, whole.
    State: `average`, shape of the parameter, at least float32.
    Raises: ValueError if a number is outside its range.
    Source: Izmailov et al. 2018, Algorithm 1, arXiv:1803.05407.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(SWA(oj.SGD(0.1), start=2), model)
    >>> for g in ([1.0, 2.0], [-3.0, 1.0], [2.0, 2.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), oj.eval_model(state, model)["w"].tolist()
    ([1.0, -2.5], [1.1, -2.4])
    """

    follows: ClassVar[bool] = True
    watches: ClassVar[bool] = True
    ranges: ClassVar = dict.fromkeys(("start", "every"), (1.0, math.inf, False))
    whole: ClassVar = ("start", "every")
    settled: ClassVar = dict.fromkeys(
        whole, "The mean's weights are worked out from it"
    )

    start: Hyper = 1
    every: Hyper = 1

    def init_leaf(self, x):
        return Averaged(x)

    def after_leaf(self, state, x, g, step, t):
        # A schedule may say 2.5, which no update is the number of.
        since, every = t - jnp.ceil(self.start), jnp.ceil(self.every)
        counts = (since >= 0) & (since % every == 0)
        n = jnp.maximum(jnp.round(since / every) + 1, 1)
        average = state.average + (x - step - state.average) / n
        return Averaged(jnp.where(counts, average, state.average)), step

    def eval_leaf(self, state, x, t):
        return jnp.where(t >= jnp.ceil(self.start), state.average, x)


class Slow(NamedTuple):
    slow: Array


@rule
class Lookahead(LeafWrapper):
    """Fast steps of another rule; every few of them a slow one in their direction.

        fast = x - step
        every `period` updates:
            slow <- (1 - slow_step) * slow + slow_step * fast
            fast  = slow
        step = x - fast

    The model holds the fast parameters. `eval_model` gives the slow ones. The moments
    of the rule inside go on over a slow step.

    Args:
        inner: the rule of the fast steps.
        period: fast steps for a slow one, >= 1, whole.
        slow_step: how far the slow ones go towards the fast ones, in [0, 1].
    State: `slow`, shape of the parameter, at least float32.
    Raises: ValueError if a number is outside its range.
    Source: Zhang et al. 2019, Algorithm 1, arXiv:1907.08610.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(Lookahead(oj.SGD(0.1), period=2, slow_step=0.3), model)
    >>> for g in ([1.0, 2.0], [-3.0, 1.0], [2.0, 2.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), oj.eval_model(state, model)["w"].tolist()
    ([0.86, -2.29], [1.06, -2.09])
    """

    follows: ClassVar[bool] = True
    ranges: ClassVar = {
        "period": (1.0, math.inf, False),
        "slow_step": (0.0, 1.0, False),
    }
    whole: ClassVar = ("period",)

    period: Hyper = 5
    slow_step: Hyper = 0.5

    def init_leaf(self, x):
        return Slow(x)

    def after_leaf(self, state, x, g, step, t):
        fast = x - step
        slow = (1 - self.slow_step) * state.slow + self.slow_step * fast
        met = t % jnp.ceil(self.period) == 0
        # From the new one alone, so that it can be written over the old one.
        slow = jnp.where(met, slow, state.slow)
        return Slow(slow), jnp.where(met, x - slow, step)

    def eval_leaf(self, state, x, t):
        return state.slow
