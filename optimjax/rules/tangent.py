"""Rules that leave the norm of scale-invariant weights alone."""

import math
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import rule
from optimjax.rules.adam import Moments
from optimjax.rules.sgd import Velocity

__all__ = ["SGDP", "AdamP"]


def tangent(
    d: Array, x: Array, g: Array, delta: Array, eps: Array
) -> tuple[Array, Array]:
    """A direction without its part along the weights, where these have no scale.

    Such weights, those before a normalisation, have gradients at right angles to them.
    First each output unit is looked at, along the last axis; then the whole array.

    Returns: the direction, and whether a part was taken away, bool, ().
    """
    found = jnp.zeros((), bool)
    if x.ndim < 2:  # a bias, or the gain of a normalisation
        return d, found
    for axes in (tuple(range(x.ndim - 1)), tuple(range(x.ndim))):

        def dot(a, b, axes=axes):
            return jnp.sum(a * b, axes, keepdims=True)

        length = jnp.sqrt(dot(x, x))
        both = length * jnp.sqrt(dot(g, g))
        cosine = jnp.abs(dot(g, x)) / jnp.where(both > 0, both, 1)
        size = max(math.prod(x.shape[axis] for axis in axes), 1)
        free = jnp.max(cosine, initial=0) < delta / math.sqrt(size)
        n = x / (length + eps)
        d = jnp.where(free & ~found, d - n * dot(n, d), d)
        found = found | free
    return d, found


@rule
class AdamP(LeafRule):
    """Adam without the part of its steps that only makes weights longer.

        m    <- b1 * m + (1 - b1) * g
        v    <- b2 * v + (1 - b2) * g^2
        p     = b1 * m + (1 - b1) * g if nesterov else m
        d     = p / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
        d     = d - n * <n, d>,  n = x / (|x| + eps)           where x has no scale
        decay = weight_decay * (decay_ratio where x has no scale, else 1)
        step  = learning_rate * (d + decay * x)

    Weights before a normalisation have no scale that matters: gradients are at right
    angles to them, momentum is not, and makes them longer, and so the steps shorter in
    effect. An array of two or more axes counts as such if max |cos(g, x)| over its
    output units (the last axis) is less than delta / sqrt(numbers in a unit), or else
    if it is so for the array as one; norms and products are those of each unit, or of
    the array. (Inside a `shard_map`, arrays have to be whole on each device.)

    Args:
        learning_rate, b1, b2, eps: as for `Adam`; b1 is not None.
        delta: how far from a right angle a gradient may be, >= 0.
        weight_decay: share of the parameter taken away per unit of learning rate, >= 0.
        decay_ratio: factor of the decay of weights that have no scale, >= 0.
        nesterov: look ahead along the momentum.
    State: `m` and `v`, shape of the parameter.
    Raises: ValueError if a number is outside its range; TypeError for a complex
        parameter.
    Source: Heo et al. 2021, Algorithm 2, arXiv:2006.08217; the two views, the decay and
        Nesterov's form as in the authors' code.

    >>> x = {"w": jnp.array([[1.0], [-2.0]])}
    >>> adamp = AdamP(learning_rate=0.1)
    >>> state, _ = adamp.apply(adamp.init(x), x, {"w": jnp.array([[0.5], [-3.0]])})
    >>> state, steps = adamp.apply(state, x, {"w": jnp.array([[2.0], [1.0]])})
    >>> steps["w"].ravel().tolist()
    [0.05474, 0.02737]
    """

    complex_ok = False
    ranges: ClassVar = dict.fromkeys(("delta", "decay_ratio"), NOT_NEGATIVE)

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-8
    delta: Hyper = 0.1
    weight_decay: Hyper = 0.0
    decay_ratio: Hyper = 0.1
    nesterov: bool = False

    def init_leaf(self, x):
        return Moments(zeros_like(x), zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        p = self.b1 * m + (1 - self.b1) * g if self.nesterov else m
        root = jnp.sqrt(v / (1 - self.b2**t))
        d = p / (1 - self.b1**t) / (root + self.eps)
        d, projected = tangent(d, x, g, self.delta, self.eps)
        decay = self.weight_decay * jnp.where(projected, self.decay_ratio, 1)
        return Moments(m, v), self.learning_rate * (d + decay * x)


@rule
class SGDP(LeafRule):
    """Momentum without the part of its steps that only makes weights longer.

        v    <- momentum * v + (1 - dampening) * g
        d     = g + momentum * v if nesterov else v
        d     = d - n * <n, d>,  n = x / (|x| + eps)           where x has no scale
        decay = weight_decay * (decay_ratio where x has no scale, else 1)
        step  = learning_rate * (d + decay / (1 - momentum) * x)

    Which weights have no scale, `AdamP` says.

    Args:
        learning_rate: step per unit of gradient, >= 0.
        momentum: decay of the velocity, in [0, 1).
        dampening: what is kept back of each gradient, in [0, 1]; unlike in `SGD` of the
            first as well.
        nesterov: look ahead along the velocity.
        delta, decay_ratio: as for `AdamP`.
        weight_decay: share of the parameter taken away per unit of learning rate and of
            1 / (1 - momentum), >= 0: as much in the end as that of `SGD`.
        eps: added to the norm of the weights, in their unit, >= 0.
    State: `v`, shape of the parameter.
    Raises: ValueError if a number is outside its range; TypeError for a complex
        parameter.
    Source: Heo et al. 2021, Algorithm 1, arXiv:2006.08217; the two views and the decay
        as in the authors' code.

    >>> x = {"w": jnp.array([[1.0], [-2.0]])}
    >>> sgdp = SGDP(learning_rate=0.1)
    >>> state, _ = sgdp.apply(sgdp.init(x), x, {"w": jnp.array([[0.5], [-3.0]])})
    >>> state, steps = sgdp.apply(state, x, {"w": jnp.array([[2.0], [1.0]])})
    >>> steps["w"].ravel().tolist()
    [0.1280, 0.06400]
    """

    complex_ok = False
    ranges: ClassVar = dict.fromkeys(("delta", "decay_ratio"), NOT_NEGATIVE)

    learning_rate: Hyper = 0.1
    momentum: Hyper = 0.9
    dampening: Hyper = 0.0
    nesterov: bool = False
    delta: Hyper = 0.1
    weight_decay: Hyper = 0.0
    decay_ratio: Hyper = 0.1
    eps: Hyper = 1e-8

    def init_leaf(self, x):
        return Velocity(zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        v = self.momentum * state.v + (1 - self.dampening) * g
        d = g + self.momentum * v if self.nesterov else v
        d, projected = tangent(d, x, g, self.delta, self.eps)
        decay = self.weight_decay * jnp.where(projected, self.decay_ratio, 1)
        d = d + decay / (1 - self.momentum) * x
        return Velocity(v), self.learning_rate * d
