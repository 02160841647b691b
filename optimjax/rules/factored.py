"""Rules that keep the second moment of a matrix as one row and one column."""

from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, rms, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import AxesOf, rule
from optimjax.units import blocks, joined

__all__ = ["Adafactor"]


Axes: TypeAlias = tuple[int, int]


class Whole(NamedTuple):
    v: Array


class Factored(NamedTuple):
    row: Array
    col: Array


class Kept(NamedTuple):
    squares: Any  # Whole, Factored, or a tuple of these
    m: Array | None


@rule
class Adafactor(LeafRule):
    """Adam without momentum, with a row and a column of squares for each matrix.

        w     = max(t - decay_offset, 1)^-decay_rate
        v    <- (1 - w) * v + w * (|g|^2 + eps)       row, col: means of v over one axis
        v_hat = row * col / max(mean of row, floor)   or v, where that is kept whole
        u     = g / max(sqrt(v_hat), floor)
        u     = u / max(1, rms(u) / clipping_threshold)
        rate  = min(learning_rate, 1 / sqrt(t)) if relative_step else learning_rate
        u     = rate * max(rms(x), min_scale) * u     with parameter_scale
        m    <- momentum * m + (1 - momentum) * u     without momentum: m = u
        step  = m + (learning_rate if couple else 1) * weight_decay * x

    The defaults are optax's, where however no rate is given, which is 1. torch's are
    `Adafactor(eps=0, floor=finfo(dtype).eps, relative_step=True, couple=True,
    last_axes=True, min_dim_size_to_factor=1)`.

    Args:
        learning_rate: step in terms of the parameter's root mean square, >= 0.
        decay_rate: how fast the weight w of a new gradient falls, in [0, 1].
        decay_offset: the t up to which w stays 1, as in an earlier run, >= 0.
        eps: added to the squares, >= 0.
        floor: the least root of v_hat, in the gradient's unit, >= 0; torch's eps1.
        clipping_threshold: the largest root mean square of u, > 0; None for any.
        relative_step: let the rate fall as 1 / sqrt(t), as in the paper.
        parameter_scale: False for steps in the parameter's unit.
        min_scale: what a parameter's root mean square counts at least, >= 0.
        momentum: decay of an average of the steps, in [0, 1); None for none.
        weight_decay: share of the parameter taken away in a step, >= 0.
        couple: multiply the decay by the learning rate.
        min_dim_size_to_factor: the least length of both axes; None to factor nothing.
        last_axes: factor the last two axes, not the two longest.
        axes: as for `MatrixRule`: each matrix is for itself, factored over its inputs
            and outputs; None to guess by length.
    State: `row` and `col`, the parameter's shape less one axis, or `v`; real. `m`. With
        `axes` a tuple of (matrices, ...) for blocks of equal matrices.
    Raises: ValueError if a number is outside its range.
    Source: Shazeer and Stern 2018, Algorithms 4 to 6, arXiv:1804.04235.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]])}
    >>> adafactor = Adafactor(0.1, min_dim_size_to_factor=2, momentum=0.8)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]])}
    >>> state, _ = adafactor.apply(adafactor.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]])}
    >>> state, steps = adafactor.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.001493, 0.009943], [0.07467, -0.04530]]
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
    min_dim_size_to_factor: int | None = 128
    last_axes: bool = False
    axes: AxesOf | None = None
    ranges: ClassVar = {
        "decay_rate": (0.0, 1.0, False),
        **dict.fromkeys(("decay_offset", "floor", "min_scale"), NOT_NEGATIVE),
    }
    positive: ClassVar = ("clipping_threshold",)

    def init_leaf(self, x):
        v, m = zeros_like(x, real=True), zeros_like(x)
        squares: Any = (
            self._start(v)
            if self.axes is None
            else tuple(map(jax.vmap(self._start), blocks(self.axes, v)))
        )
        return Kept(squares, None if self.momentum is None else m)

    def _start(self, v: Array) -> Whole | Factored:
        axes = self._axes(v)
        return Whole(v) if axes is None else _factored(v, axes)

    def apply_leaf(self, state, x, g, t):
        if self.axes is None:
            return self._moved(state, x, g, t)
        xs, gs = blocks(self.axes, x), blocks(self.axes, g)
        ms: list[Any] = [None] * len(xs)
        if state.m is not None:
            ms = blocks(self.axes, state.m)
        made = [
            jax.vmap(self._moved, (0, 0, 0, None))(Kept(s, m), x, g, t)
            for s, m, x, g in zip(state.squares, ms, xs, gs, strict=True)
        ]
        m = None
        if state.m is not None:
            m = joined(self.axes, [cast(Any, kept.m) for kept, _ in made], x)
        squares = tuple(kept.squares for kept, _ in made)
        return Kept(squares, m), joined(self.axes, [step for _, step in made], x)

    def _moved(self, state, x, g, t):
        squares, m = state
        w = jnp.maximum(t - self.decay_offset, 1) ** -self.decay_rate
        new, axes = Whole(abs_sq(g) + self.eps), self._axes(x)
        if axes is not None:
            new = _factored(new.v, axes)
        squares = jax.tree.map(lambda old, new: (1 - w) * old + w * new, squares, new)
        v_hat = squares.v if axes is None else _product(squares, axes, self.floor)
        v_hat = jnp.maximum(v_hat, self.floor**2)
        # Without eps and floor a number whose gradients were all 0 has no scale.
        u = jnp.where(v_hat > 0, g / jnp.sqrt(jnp.where(v_hat > 0, v_hat, 1)), 0)
        if self.clipping_threshold is not None:
            u = u / jnp.maximum(rms(u / self.clipping_threshold), 1)
        rate = self.learning_rate
        if self.relative_step:
            rate = jnp.minimum(rate, 1 / jnp.sqrt(t))
        if self.parameter_scale:
            rate = rate * jnp.maximum(rms(x), self.min_scale)
        u = rate * u
        if self.momentum is not None:
            m = u = self.momentum * m + (1 - self.momentum) * u
        decay = self.weight_decay * (self.learning_rate if self.couple else 1)
        return Kept(squares, m), u + decay * x

    def _axes(self, x: Array) -> Axes | None:
        """The two axes to factor, the longer one second; None to keep all of v."""
        if self.min_dim_size_to_factor is None or x.ndim < 2:
            return None
        by_length = sorted(range(x.ndim), key=lambda axis: x.shape[axis])
        short, long = (x.ndim - 2, x.ndim - 1) if self.last_axes else by_length[-2:]
        least = min(x.shape[short], x.shape[long])
        return (short, long) if least >= max(self.min_dim_size_to_factor, 1) else None


def _factored(v: Array, axes: Axes) -> Factored:
    short, long = axes
    return Factored(jnp.mean(v, long), jnp.mean(v, short))


def _product(squares: Factored, axes: Axes, floor: Array) -> Array:
    short, long = axes
    row, col = jnp.expand_dims(squares.row, long), jnp.expand_dims(squares.col, short)
    mean = jnp.maximum(jnp.mean(row, short, keepdims=True), floor)
    # Divided first: the product of two squares of small gradients would be 0.
    return row / jnp.where(mean > 0, mean, 1) * col
