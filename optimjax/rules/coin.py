"""Optimisation as betting: the gradients are the coin."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import zeros_like
from optimjax.hyper import Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import rule

__all__ = ["COCOB"]


class Bets(NamedTuple):
    x0: Array
    largest: Array
    length: Array
    reward: Array
    gradients: Array


@rule
class COCOB(LeafRule):
    """Bets on each coordinate's gradients, with what was won by those before.

        c          = learning_rate * g
        largest   <- max(largest, |c|)                                 eps at first
        length    <- length + |c|
        reward    <- max(reward - c * (x - x0), 0)
        gradients <- gradients - c
        share      = gradients / (largest * max(length + largest, alpha * largest))
        step       = x - (x0 + share * (largest + reward))

    x0 is where a slot was at `setup`. It says where parameters go: a step that is
    changed afterwards is undone.

    Args:
        learning_rate: factor on the gradients, as in optax, >= 0. Bets depend on no
            scale of them, so that it hardly matters, unless it changes on the way.
        alpha: the first bets are no more than 1 / alpha of what is had, > 0.
        eps: the least of the largest gradient, in the gradient's unit, > 0.
    State: `x0`, `largest`, `length`, `reward` and `gradients`, shape of the parameter.
    Raises: ValueError if a number is outside its range.
    Source: Orabona and Tommasi 2017, Algorithm 2, arXiv:1705.07795.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(COCOB(alpha=3.0), model)
    >>> for g in ([0.5, -3.0], [-0.1, -2.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist()
    [0.7333, -1.321]
    """

    complex_ok: ClassVar[bool] = False
    ends: ClassVar[bool] = True
    positive: ClassVar = ("alpha", "eps")

    learning_rate: Hyper = 1.0
    alpha: Hyper = 100.0
    eps: Hyper = 1e-8

    def init_leaf(self, x):
        zeros = zeros_like(x)
        return Bets(x, zeros + self.eps, zeros, zeros, zeros)

    def apply_leaf(self, state, x, g, t):
        x0, largest, length, reward, gradients = state
        c = self.learning_rate * g
        largest = jnp.maximum(largest, jnp.abs(c))
        length = length + jnp.abs(c)
        reward = jnp.maximum(reward - c * (x - x0), 0)
        gradients = gradients - c
        below = largest * jnp.maximum(length + largest, self.alpha * largest)
        bet = gradients / below * (largest + reward)
        return Bets(x0, largest, length, reward, gradients), x - (x0 + bet)
