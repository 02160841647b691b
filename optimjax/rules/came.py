"""Adafactor's squares, and how far steps are from their mean, both factored."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, ratio, rms, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import AxesOf, rule
from optimjax.rules.factored import Factored, Whole
from optimjax.units import blocks, has_inputs, joined

__all__ = ["CAME"]


class Kept(NamedTuple):
    m: Array
    squares: Any  # Whole, Factored, or a tuple of these
    unsure: Any  # Factored, None, or a tuple of these


@rule
class CAME(LeafRule):
    """Adafactor with momentum, in which numbers move less where steps disagree.

        row  <- b2 * row + (1 - b2) * mean of |g|^2 + eps over the outputs
        col  <- b2 * col + (1 - b2) * mean of |g|^2 + eps over the inputs
        u     = g / sqrt(row * col / mean(row))
        u     = u / max(1, rms(u) / clipping_threshold)
        m    <- b1 * m + (1 - b1) * u
        q     = |u - m|^2 + eps_instability           factored as |g|^2, decay b3
        step  = learning_rate * m / sqrt(q_row * q_col / mean(q_row))

    An array of one axis or none keeps v of its shape, u = g / sqrt(v), and its step is
    learning_rate * m.

    Args:
        learning_rate: size of a step when all steps agree, in the parameter's unit,
            >= 0.
        b1: decay of the momentum, in [0, 1).
        b2, b3: decay of the squares, and of the instability q, in [0, 1).
        eps: added to |g|^2, >= 0.
        eps_instability: added to q, >= 0.
        clipping_threshold: the largest root mean square of u, > 0.
        axes: as for `MatrixRule`; None for the last two axes, with all before them of
            one array.
    State: `m`, shape of the parameter; `squares` and `unsure`, each `row` and `col`,
        shape of the parameter less an axis, real; with `axes` a tuple of (m, ...) for
        blocks of equal matrices.
    Raises: ValueError if a number is outside its range.
    Source: Luo et al. 2023, Algorithm 2, arXiv:2307.02047.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.ones(2)}
    >>> came = CAME(0.1)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]]), "b": jnp.array([0.3, 0.1])}
    >>> state, _ = came.apply(came.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]]), "b": jnp.array([0.2, 0.5])}
    >>> state, steps = came.apply(state, x, g)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([[0.07663, 0.3763], [1.447, -0.9209]], [0.01596, 0.02131])
    """

    learning_rate: Hyper = 2e-4
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    b3: Hyper = 0.9999
    eps: Hyper = 1e-30
    eps_instability: Hyper = 1e-16
    clipping_threshold: Hyper = 1.0
    axes: AxesOf | None = None
    ranges: ClassVar = {"eps_instability": NOT_NEGATIVE}
    positive: ClassVar = ("clipping_threshold",)

    def init_leaf(self, x):
        v, m = zeros_like(x, real=True), zeros_like(x)
        if self.axes is None:
            return Kept(m, *self._start(v))
        return Kept(m, *zip(*map(jax.vmap(self._start), self._blocks(v)), strict=True))

    def _start(self, v: Array) -> tuple[Any, Any]:
        if v.ndim < 2:
            return Whole(v), None
        return factored(v), factored(v)

    def apply_leaf(self, state, x, g, t):
        if self.axes is None:
            return self._moved(state, g)
        states = map(Kept, self._blocks(state.m), state.squares, state.unsure)
        pairs = zip(states, self._blocks(g), strict=True)
        made = [jax.vmap(self._moved)(*pair) for pair in pairs]
        states, steps = zip(*made, strict=True)
        ms, *others = zip(*states, strict=True)
        return Kept(self._joined(ms, x), *others), self._joined(steps, x)

    def _blocks(self, x: Array) -> list[Array]:
        """Stacks of matrices, or of vectors where there are no inputs."""
        axes: Any = self.axes
        found = blocks(axes, x)
        return found if has_inputs(axes, x.shape) else [b[:, 0] for b in found]

    def _joined(self, parts: Sequence[Array], like: Array) -> Array:
        axes: Any = self.axes
        flat = not has_inputs(axes, like.shape)
        return joined(axes, [b[:, None] if flat else b for b in parts], like)

    def _moved(self, state: Kept, g: Array) -> tuple[Kept, Array]:
        square = abs_sq(g) + self.eps
        if g.ndim < 2:
            squares = Whole(self.b2 * state.squares.v + (1 - self.b2) * square)
            u = ratio(g, jnp.sqrt(squares.v))
        else:
            squares = averaged(state.squares, square, self.b2)
            u = ratio(g, product_root(squares))
        u = u / jnp.maximum(1, rms(u) / self.clipping_threshold)
        m = self.b1 * state.m + (1 - self.b1) * u
        if g.ndim < 2:
            return Kept(m, squares, None), self.learning_rate * m
        q = abs_sq(u - m) + self.eps_instability
        unsure = averaged(state.unsure, q, self.b3)
        step = self.learning_rate * ratio(m, product_root(unsure))
        return Kept(m, squares, unsure), step


def factored(v: Array) -> Factored:
    """Means over the last axis, and over the last but one."""
    rows, cols = max(v.shape[-2], 1), max(v.shape[-1], 1)
    return Factored(jnp.sum(v, -1) / cols, jnp.sum(v, -2) / rows)


def averaged(old: Any, new: Array, decay: Any) -> Factored:
    row, col = factored(new)
    return Factored(
        decay * old.row + (1 - decay) * row, decay * old.col + (1 - decay) * col
    )


def product_root(squares: Factored) -> Array:
    """sqrt(row * col / mean(row)), by factors whose product stays in float32."""
    row, col = squares
    mean = jnp.sum(row, -1, keepdims=True) / max(row.shape[-1], 1)
    share = ratio(row, mean)
    return jnp.sqrt(share)[..., None] * jnp.sqrt(col)[..., None, :]
