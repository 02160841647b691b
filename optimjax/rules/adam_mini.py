"""Adam with one second moment for each block of an array."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, zeros_like
from optimjax.hyper import Hyper, PerPath
from optimjax.leaf import LeafRule
from optimjax.options import one_of
from optimjax.rule import AxesOf, Option, rule
from optimjax.rules.adam import momentum
from optimjax.units import blocks, has_inputs, joined

__all__ = ["AdamMini"]


class Moments(NamedTuple):
    m: Array
    v: tuple[Array, ...]


@rule
class AdamMini(LeafRule):
    """Adam whose second moment is one number for each block of the array.

        m    <- b1 * m + (1 - b1) * g
        v    <- b2 * v + (1 - b2) * mean of |g|^2 over the block
        m_hat = m / (1 - b1^t)
        v_hat = v / (1 - b2^t)
        step  = learning_rate * m_hat / (sqrt(v_hat) + eps)

    Blocks are each output unit ("outputs"), each input ("inputs": embedding tables, a
    row for each token), the whole matrix ("array"), n equal groups of output units, one
    behind the other (an int: heads), or every number ("elements": Adam). An array that
    has no inputs, such as a bias, is one block for "outputs" and "inputs".

    Args:
        learning_rate, b1, b2, eps: as for `Adam`.
        blocks: one name or number, a dict {glob: name or number}, "outputs" for all
            others, or a function of (path, leaf). As the authors have it:
            `{"*embed*": "inputs", "*query*": heads, "*key*": heads}`.
        axes: as for `MatrixRule`.
    State: `m`, shape of the parameter; `v`, a tuple, real, (matrices, inputs or 1,
        outputs, groups or 1), with several entries only where an axis is split into
        unequal parts.
    Raises: ValueError if a number is outside its range, for another name, or where the
        outputs cannot be put in so many groups.
    Source: Zhang et al. 2024, Algorithms 1 to 3, arXiv:2406.16793.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.ones(2)}
    >>> mini = AdamMini(0.1)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]]), "b": jnp.array([0.3, 0.1])}
    >>> state, _ = mini.apply(mini.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]]), "b": jnp.array([0.2, 0.5])}
    >>> state, steps = mini.apply(state, x, g)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([[0.03172, -0.01367], [0.1087, -0.07461]], [0.07921, 0.09944])
    """

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-8
    blocks: Option = "outputs"
    axes: AxesOf = None

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.blocks, PerPath):
            self._check()

    def _check(self) -> None:
        if not (type(self.blocks) is int and self.blocks > 0):
            one_of(self, "blocks", ("outputs", "inputs", "array", "elements"))

    def init_leaf(self, x):
        self._check()
        for part in blocks(self.axes, x):
            if isinstance(self.blocks, int) and part.shape[-1] % self.blocks:
                raise ValueError(
                    f"AdamMini: blocks is {self.blocks}, expected a divisor of the "
                    f"number of outputs, which is {part.shape[-1]} in an array of "
                    f"shape {x.shape}."
                )
        squares = blocks(self.axes, zeros_like(x, real=True))
        return Moments(zeros_like(x), tuple(self._means(s, x.shape) for s in squares))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        kept, parts = [], []
        for v, s, m_hat in zip(
            state.v,
            blocks(self.axes, abs_sq(g)),
            blocks(self.axes, momentum(m, g, self.b1, t, False)),
            strict=True,
        ):
            v = self.b2 * v + (1 - self.b2) * self._means(s, x.shape)
            kept.append(v)
            root = jnp.sqrt(v / (1 - self.b2**t))
            if isinstance(self.blocks, int):
                root = jnp.repeat(root, s.shape[-1] // self.blocks, axis=-1)
            parts.append(m_hat / (root + self.eps))
        step = self.learning_rate * joined(self.axes, parts, x)
        return Moments(m, tuple(kept)), step

    def _means(self, s: Array, shape: tuple[int, ...]) -> Array:
        """The mean over each block of (matrices, inputs, outputs); they stay in place.

        Args:
            shape: of the array that the matrices are of.
        """
        name = self.blocks
        if name == "elements":
            return s
        if isinstance(name, int):
            s = s.reshape(*s.shape[:2], name, s.shape[2] // name)
            return mean(s, (1, 3))[..., 0]
        if name == "array" or not has_inputs(self.axes, shape):
            return mean(s, (1, 2))
        return mean(s, 1 if name == "outputs" else 2)


def mean(s: Array, axis: int | tuple[int, ...]) -> Array:
    """The mean along axes, which are kept; 0 if there is nothing."""
    return (
        jnp.mean(s, axis, keepdims=True) if s.size else jnp.sum(s, axis, keepdims=True)
    )
