"""Adam and its closest kin."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, zeros_like
from optimjax.hyper import Hyper
from optimjax.rule import LeafRule, Selection, rule

__all__ = ["Adam", "AdamW"]


class Moments(NamedTuple):
    m: Array
    v: Array


@rule
class Adam(LeafRule):
    """Momentum, divided by a running root mean square of the gradient.

        m    <- b1 * m + (1 - b1) * g
        v    <- b2 * v + (1 - b2) * |g|^2
        m_hat = m / (1 - b1^t)
        v_hat = v / (1 - b2^t)
        step  = learning_rate * m_hat / (sqrt(v_hat + eps_root) + eps)

    For a complex parameter v is real, and holds |g|^2: real and imaginary part share
    one scale (as in Optimisers.jl; torch treats them as two parameters).

    Args:
        learning_rate: size of a step when all gradients agree, in the parameter's
            unit, >= 0.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added outside of the root, in the gradient's unit, >= 0.
        eps_root: added inside of the root, in its square, >= 0; above 0 the step can be
            differentiated where the gradient is 0.
    State: `m` and `v`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Kingma and Ba 2015, Algorithm 1, arXiv:1412.6980.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adam = Adam(learning_rate=0.1)
    >>> state, _ = adam.apply(adam.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adam.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.05110, -0.01445]
    """

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-8
    eps_root: Hyper = 0.0

    def init_leaf(self, x):
        return Moments(zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        m_hat = m / (1 - self.b1**t)
        v_hat = v / (1 - self.b2**t)
        root = jnp.sqrt(v_hat + self.eps_root)
        return Moments(m, v), self.learning_rate * m_hat / (root + self.eps)


@rule
class AdamW(Adam):
    """Adam with weight decay apart from the moments.

        step = adam_step + learning_rate * weight_decay * x     couple=True
        step = adam_step + weight_decay * x                     couple=False

    Args:
        learning_rate, b1, b2, eps, eps_root: as for `Adam`.
        weight_decay: share of the parameter taken away, >= 0; per unit of learning rate
            with `couple`, per step without. The default is optax's; torch's is 1e-2.
        couple: multiply the decay by the learning rate, as torch and optax do; False is
            the independent decay of the paper, constant under a schedule.
        decay_where: the slots that decay: a glob on paths, several, or a function of
            (path, leaf) such as `lambda path, x: x.ndim > 1`; None for all.
    State: as for `Adam`.
    Raises: ValueError if a number is outside its range.
    Source: Loshchilov and Hutter 2019, Algorithm 2, arXiv:1711.05101.

    >>> x = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    >>> adamw = AdamW(0.1, weight_decay=0.5, decay_where="w")
    >>> grads = {"w": jnp.array([0.5, -3.0]), "b": jnp.array([0.2])}
    >>> state, steps = adamw.apply(adamw.init(x), x, grads)
    >>> grads = {"w": jnp.array([-0.1, 2.0]), "b": jnp.array([-0.3])}
    >>> state, steps = adamw.apply(state, x, grads)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([0.1011, -0.1145], [-0.02477])
    """

    weight_decay: Hyper = 1e-4
    couple: bool = True
    decay_where: Selection = None

    def apply_leaf(self, state, x, g, t):
        state, step = super().apply_leaf(state, x, g, t)
        if self.decay_where:
            rate = self.learning_rate if self.couple else 1
            step = step + rate * self.weight_decay * x
        return state, step
