"""Gradient descent and its momentum."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import zeros_like
from optimjax.hyper import Hyper
from optimjax.rule import LeafRule, rule

__all__ = ["SGD"]


class Velocity(NamedTuple):
    v: Array


@rule
class SGD(LeafRule):
    """Stochastic gradient descent, with classical or Nesterov momentum.

        g    = (-g if maximize else g) + weight_decay * x
        v   <- momentum * v + (1 - dampening) * g      at t = 1: v <- g
        d    = g + momentum * v if nesterov else v     without momentum: d = g
        step = learning_rate * d

    The convention is that of torch and optax: the learning rate is outside of the
    buffer, and the weight decay is L2, coupled.

    Args:
        learning_rate: step per unit of gradient, >= 0.
        momentum: decay of the velocity, in [0, 1); None for none, and no buffer.
        dampening: what is kept back of each gradient but the first, in [0, 1].
        nesterov: look ahead along the velocity.
        weight_decay: L2 penalty added to the gradient, >= 0.
        maximize: ascend.
    State: `v`, shape of the parameter, with momentum; else nothing.
    Raises: ValueError if a number is outside its range, or for `nesterov` without
        momentum.
    Source: Sutskever et al. 2013, "On the importance of initialization and momentum in
        deep learning"; dampening and first step as in torch.optim.SGD.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> sgd = SGD(0.1, momentum=0.9, nesterov=True)
    >>> state, _ = sgd.apply(sgd.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = sgd.apply(state, x, {"w": jnp.array([-1.0, 2.0])})
    >>> steps["w"].tolist()
    [-0.1495, 0.137]
    """

    learning_rate: Hyper = 1e-2
    momentum: Hyper | None = None
    dampening: Hyper = 0.0
    nesterov: bool = False
    weight_decay: Hyper = 0.0
    maximize: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.nesterov and self.momentum is None:
            raise ValueError("SGD: nesterov without momentum. Give momentum=0.9, say.")

    def init_leaf(self, x):
        return None if self.momentum is None else Velocity(zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        g = (-g if self.maximize else g) + self.weight_decay * x
        if self.momentum is None:
            return None, self.learning_rate * g
        v = jnp.where(t == 1, g, self.momentum * state.v + (1 - self.dampening) * g)
        d = g + self.momentum * v if self.nesterov else v
        return Velocity(v), self.learning_rate * d
