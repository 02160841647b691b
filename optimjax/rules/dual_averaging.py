"""Rules whose steps are sums of gradients, seen from the start."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, zeros_like
from optimjax.hyper import Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import rule

__all__ = ["MADGRAD"]


class DualAverage(NamedTuple):
    s: Array
    v: Array
    start: Array


@rule
class MADGRAD(LeafRule):
    """Dual averaging with momentum, divided by a cube root of summed squares.

        w    = (learning_rate + eps) * sqrt(t)
        s   <- s + w * g
        v   <- v + w * |g|^2
        z    = start - s / (cbrt(v) + eps)
        step = (1 - momentum) * (x - z)

    where `start` is the parameter before the first step. A weight decay is
    to be a part of the gradient: `Chain(WeightDecay(w), MADGRAD())`.

    Args:
        learning_rate: weight of each gradient, >= 0; the step grows with its power 2/3.
        momentum: share of the way to z that is left for later, in [0, 1).
        eps: added to the learning rate and to the cube root, >= 0.
    State: `s`, `v` and `start`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Defazio and Jelassi 2021, Algorithm 1, arXiv:2101.11075; both places of eps
        as in the authors' code and optax.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> madgrad = MADGRAD(learning_rate=0.1)
    >>> state, steps = madgrad.apply(madgrad.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> x = {"w": x["w"] - steps["w"]}
    >>> state, steps = madgrad.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.01033, 0.001597]
    """

    ends = True  # a step that is changed afterwards comes back with the next

    learning_rate: Hyper = 1e-2
    momentum: Hyper = 0.9
    eps: Hyper = 1e-6

    def init_leaf(self, x):
        return DualAverage(zeros_like(x), zeros_like(x, real=True), x)

    def apply_leaf(self, state, x, g, t):
        w = (self.learning_rate + self.eps) * jnp.sqrt(t)
        s = state.s + w * g
        v = state.v + w * abs_sq(g)
        z = state.start - s / (jnp.cbrt(v) + self.eps)
        return DualAverage(s, v, state.start), (1 - self.momentum) * (x - z)
