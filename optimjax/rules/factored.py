"""Rules that keep the second moment of a matrix as one row and one column."""

import math
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, zeros_like
from optimjax.hyper import Hyper
from optimjax.rule import LeafRule, Selection, rule

__all__ = ["Adafactor"]


class Full(NamedTuple):
    v: Array
    m: Array | None


class Factored(NamedTuple):
    row: Array
    col: Array
    m: Array | None


@rule
class Adafactor(LeafRule):
    """Adam without momentum, in the memory of a row and a column for each matrix.

        w     = max(t - decay_offset, 1)^-decay_rate
        v    <- (1 - w) * v + w * (|g|^2 + eps)
        row  <- (1 - w) * row + w * mean of (|g|^2 + eps) along the columns
        col  <- (1 - w) * col + w * mean of (|g|^2 + eps) along the rows
        v_hat = row * col / max(mean of row, floor)         where v is factored
        u     = g / max(sqrt(v_hat), floor)
        u     = u / max(1, rms(u) / clipping_threshold)
        rate  = min(learning_rate, 1 / sqrt(t)) if relative_step else learning_rate
        u     = rate * max(rms(x), min_scale) * u           with parameter_scale
        m    <- momentum * m + (1 - momentum) * u           without momentum: m = u
        step  = m + (learning_rate if couple else 1) * weight_decay * x

    The defaults are optax's, but for the rate: it has None, which is 1. torch's are
    `Adafactor(1e-2, eps=0, floor=jnp.finfo(dtype).eps, relative_step=True, couple=True,
    last_axes=True, min_dim_size_to_factor=1)`, the paper's `relative_step=True`.

    Args:
        learning_rate: step per root mean square of the parameter; without
            `parameter_scale` in the parameter's unit, >= 0.
        decay_rate: how fast the weight w of a new gradient falls, in [0, 1].
        decay_offset: steps taken before, whose number the count includes, >= 0.
        eps: added to the squares, in the gradient's unit squared, >= 0.
        floor: below the root of v_hat, in the gradient's unit, >= 0; torch's eps1.
        clipping_threshold: the largest root mean square of u, > 0; None for no limit.
        relative_step: let the rate fall as 1 / sqrt(t), from at most `learning_rate`.
        parameter_scale: steps in proportion to the root mean square of the parameter.
        min_scale: the least that this counts as, in the parameter's unit, >= 0.
        momentum: decay of an average of the steps, in [0, 1); None for none.
        weight_decay: share of the parameter taken away, >= 0; per step or, with
            `couple`, per unit of learning rate.
        couple: multiply the decay by the learning rate.
        decay_where: the slots that decay, as for `AdamW`.
        factored: False to keep all of v.
        min_dim_size_to_factor: keep all of v if one of the two axes is shorter.
        last_axes: factor the last two axes instead of the two longest.
    State: `row` and `col`, the parameter's shape without its longer and its other
        factored axis, or `v`, its shape; real. `m`, its shape, with momentum.
    Raises: ValueError if a number is outside its range.
    Source: Shazeer and Stern 2018, Algorithms 4 to 6, arXiv:1804.04235.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]])}
    >>> adafactor = Adafactor(0.1, min_dim_size_to_factor=2, momentum=0.8)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]])}
    >>> state, _ = adafactor.apply(adafactor.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]])}
    >>> state, steps = adafactor.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.01401, -0.004906], [0.02175, -0.003403]]
    """

    learning_rate: Hyper = 1e-2
    decay_rate: Hyper = 0.8
    decay_offset: Hyper = 0.0
    eps: Hyper = 1e-30
    floor: Hyper = 0.0
    clipping_threshold: Hyper | None = 1.0
    relative_step: bool = False
    parameter_scale: bool = True
    min_scale: Hyper = 1e-3
    momentum: Hyper | None = None
    weight_decay: Hyper = 0.0
    couple: bool = False
    decay_where: Selection = None
    factored: bool = True
    min_dim_size_to_factor: int = 128
    last_axes: bool = False
    ranges: ClassVar = {
        "decay_rate": (0.0, 1.0, False),
        "decay_offset": (0.0, math.inf, False),
        "floor": (0.0, math.inf, False),
        "clipping_threshold": (1e-30, math.inf, False),
        "min_scale": (0.0, math.inf, False),
    }

    def init_leaf(self, x):
        m = None if self.momentum is None else zeros_like(x)
        v, axes = zeros_like(x, real=True), self._axes(x)
        if axes is None:
            return Full(v, m)
        return Factored(jnp.sum(v, axes[1]), jnp.sum(v, axes[0]), m)

    def apply_leaf(self, state, x, g, t):
        moments, v_hat = self._moments(state, g, t)
        v_hat = jnp.maximum(v_hat, self.floor**2)
        # Without eps and floor a number whose gradients were all 0 has no scale.
        u = jnp.where(v_hat > 0, g / jnp.sqrt(jnp.where(v_hat > 0, v_hat, 1)), 0)
        if self.clipping_threshold is not None:
            u = u / _rms(u / self.clipping_threshold, 1)
        rate = self.learning_rate
        if self.relative_step:
            rate = jnp.minimum(rate, 1 / jnp.sqrt(t))
        if self.parameter_scale:
            rate = rate * _rms(x, self.min_scale)
        m = step = rate * u
        if self.momentum is not None:
            m = step = self.momentum * state.m + (1 - self.momentum) * m
        if self.decay_where:
            decay = self.weight_decay * (self.learning_rate if self.couple else 1)
            step = step + decay * x
        return moments._replace(m=None if self.momentum is None else m), step

    def _moments(self, state, g, t):
        """The new second moment, and the estimate that it gives of each square."""
        w = jnp.maximum(t - self.decay_offset, 1) ** -self.decay_rate
        squares, axes = abs_sq(g) + self.eps, self._axes(g)
        if axes is None:
            v = (1 - w) * state.v + w * squares
            return state._replace(v=v), v
        short, long = axes
        row = (1 - w) * state.row + w * jnp.mean(squares, long)
        col = (1 - w) * state.col + w * jnp.mean(squares, short)
        rows, cols = jnp.expand_dims(row, long), jnp.expand_dims(col, short)
        mean = jnp.maximum(jnp.mean(rows, short, keepdims=True), self.floor)
        # Divided first: the product of two squares of small gradients would be 0.
        v_hat = rows / jnp.where(mean > 0, mean, 1) * cols
        return state._replace(row=row, col=col), v_hat

    def _axes(self, x: Array) -> tuple[int, int] | None:
        """The two axes to factor, the longer one second; None to keep all of v."""
        if not self.factored or x.ndim < 2:
            return None
        by_length = sorted(range(x.ndim), key=lambda axis: x.shape[axis])
        axes = (x.ndim - 2, x.ndim - 1) if self.last_axes else tuple(by_length[-2:])
        shortest = min(x.shape[axis] for axis in axes)
        return axes if shortest >= max(self.min_dim_size_to_factor, 1) else None


def _rms(x: Array, least: Array | float) -> Array:
    """The root mean square, or `least`; its derivative at 0 is 0 if `least` is above."""
    mean = jnp.sum(abs_sq(x)) / max(x.size, 1)
    return jnp.sqrt(jnp.maximum(mean, least**2))
