"""Keeping gradients small."""

import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from optimjax.arrays import cast, lengths, norm, rms, total, varying_axes
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import AxesOf, OneFactor, rule
from optimjax.treewide import Count, PyTree, squared_length
from optimjax.units import apart, each_unit, has_inputs

__all__ = [
    "AdaptiveClip",
    "ClipByBlockRMS",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
]


@rule
class ClipByGlobalNorm(OneFactor):
    """All gradients scaled by one factor, so that together they are not too long.

        norm = sqrt(sum of |g|^2 over all slots)
        step = g * min(1, max_norm / norm)

    The norm is taken over slots: a tied array counts once, with its summed gradient; a
    slot that is frozen or has no gradient does not count. A NaN makes all steps NaN; an
    infinite gradient makes the others 0 and its own NaN.

    Args:
        max_norm: the longest that the gradient may be, in its unit, >= 0.
    State: `count`, updates so far, int32, ().
    Raises: ValueError if `max_norm` is negative.
    Source: Pascanu et al. 2013, Algorithm 1, arXiv:1211.5063.

    >>> x = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    >>> clip = ClipByGlobalNorm(1.0)
    >>> grads = {"a": jnp.array([3.0]), "b": jnp.array([-4.0])}
    >>> _, steps = clip.apply(clip.init(x), x, grads)
    >>> steps["a"], steps["b"]
    (Array([0.6], dtype=float32), Array([-0.8], dtype=float32))
    """

    max_norm: Hyper = 1.0

    def init(self, params: PyTree) -> Count:
        return Count.zero()

    def one_factor(
        self, state: Count, grads: PyTree, **context: Any
    ) -> tuple[Count, Array]:
        whole = squared_length(grads)
        limit = cast(self.at_count(state.count).max_norm, whole.dtype)
        # The root of 0 has no derivative. And `whole` is used once: XLA on CPU copies a
        # scalar with two uses, all its sums included, into the kernel of every slot.
        length = jnp.sqrt(jnp.maximum(whole, jnp.finfo(whole.dtype).tiny))
        return state.next(), jnp.minimum(limit / length, 1)


def shortening(norm: Array, limit: Array) -> Array:
    """min(1, limit / norm); 1 where the norm is 0, NaN where it is NaN."""
    short = norm <= limit
    return jnp.where(short, 1, limit / jnp.where(short, 1, norm))


def largest(x: Array) -> Array:
    """The maximum of a whole array of numbers >= 0, also inside of a `shard_map`."""
    part = jnp.max(x, initial=0)
    axes = varying_axes(part)
    return lax.pmax(part, axes) if axes else part


def p_norm(x: Array, p: int | float) -> Array:
    """(sum |x|^p)^(1/p) of a whole array, real."""
    if p == 2:
        return norm(x)
    if p == 0:
        return total((x != 0).astype(x.real.dtype))
    size = jnp.abs(x)
    most = largest(size)
    if p == math.inf:
        return most
    # As shares of the largest, whose powers neither overflow nor all vanish. A number
    # that is 0 stays out of the power, which for p < 1 has no derivative there.
    usual = (most > 0) & (most < jnp.inf)
    share = size / jnp.where(usual, most, 1)
    powers = jnp.where(share > 0, jnp.where(share > 0, share, 1) ** p, 0)
    whole = jnp.where(usual, total(powers), 1)
    return most * whole ** (1 / p)


@rule
class ClipByValue(LeafRule):
    """Every number of the gradient cut off at the same size.

        step = min(max(g, -max_value), max_value)

    It turns the gradient, which the other ways of clipping do not. NaN stays NaN.

    Args:
        max_value: the largest that a number may be, in the gradient's unit, >= 0.
    State: nothing.
    Raises: ValueError if `max_value` is negative; TypeError for a complex parameter.
    Source: Mikolov 2012, "Statistical language models based on neural networks".

    >>> x = {"w": jnp.array([1.0, -2.0, 3.0])}
    >>> clip = ClipByValue(0.7)
    >>> _, steps = clip.apply(clip.init(x), x, {"w": jnp.array([0.5, -3.0, 2.0])})
    >>> steps["w"].tolist()
    [0.5, -0.7, 0.7]
    """

    complex_ok = False
    ranges: ClassVar = {"max_value": NOT_NEGATIVE}

    max_value: Hyper = 1.0

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, jnp.clip(g, -self.max_value, self.max_value)


@rule
class ClipByNorm(LeafRule):
    """The gradient of each array scaled down, so that it is not too long.

        norm = (sum of |g|^p)^(1/p)          p = inf: max |g|; p = 0: how many are not 0
        step = g * min(1, max_norm / norm)

    where the sum is over the whole array. A gradient of zeros stays. A NaN makes its
    array's steps NaN; an infinite number makes the array's others 0 and its own NaN.

    Args:
        max_norm: the longest that an array's gradient may be, in its unit, >= 0.
        p: which norm, >= 0; `math.inf` for the largest number.
    State: nothing.
    Raises: ValueError if a number is outside its range.
    Source: Pascanu et al. 2013, Algorithm 1, arXiv:1211.5063, for each array alone.

    >>> x = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    >>> clip = ClipByNorm(2.0, p=3)
    >>> grads = {"w": jnp.array([1.5, -2.5]), "b": jnp.array([1.0])}
    >>> _, steps = clip.apply(clip.init(x), x, grads)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([1.12427, -1.87378], [1.0])
    """

    max_norm: Hyper = 1.0
    p: int | float = 2

    def __post_init__(self):
        super().__post_init__()
        if not self.p >= 0:
            raise ValueError(f"ClipByNorm: p is {self.p}, expected >= 0.")

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, g * shortening(p_norm(g, self.p), self.max_norm)


@rule
class ClipByBlockRMS(LeafRule):
    """The gradient of each array scaled down, so that its numbers are not too large.

        rms  = sqrt(mean of |g|^2)
        step = g * min(1, max_rms / rms)

    where the mean is over the whole array: as `ClipByNorm`, but the limit does not
    depend on how many numbers there are.

    Args:
        max_rms: the largest root mean square, in the gradient's unit, >= 0.
    State: nothing.
    Raises: ValueError if `max_rms` is negative.
    Source: Shazeer and Stern 2018, section 6, arXiv:1804.04235.

    >>> x = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    >>> clip = ClipByBlockRMS(2.0)
    >>> grads = {"w": jnp.array([1.5, -3.5]), "b": jnp.array([1.0])}
    >>> _, steps = clip.apply(clip.init(x), x, grads)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([1.11, -2.59], [1.0])
    """

    ranges: ClassVar = {"max_rms": NOT_NEGATIVE}

    max_rms: Hyper = 1.0

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, g * shortening(rms(g), self.max_rms)


@rule
class AdaptiveClip(LeafRule):
    """The gradient of each unit at most a share of the unit's weights in length.

        limit = clipping * max(|x|, eps)
        step  = g * min(1, limit / |g|)

    where |.| is a norm for each unit: over its inputs, by default all axes but the
    last. An array of one axis or none is one unit. (Inside a `shard_map`, an axis that
    is summed over has to be whole on each device.)

    Args:
        clipping: the longest that a gradient may be, as a share of the weights, >= 0.
        eps: the least that the weights count, in their unit, >= 0: zeros can grow.
        axes: which axes are inputs, outputs and so on, as for `MatrixRule`.
    State: nothing.
    Raises: ValueError if a number is outside its range, or for an array of two or more
        axes that has not these.
    Source: Brock et al. 2021, section 4, arXiv:2102.06171.

    >>> x = {"w": jnp.array([[0.75, 2.0], [1.0, 0.5]])}
    >>> clip = AdaptiveClip(0.2)
    >>> grads = {"w": jnp.array([[-1.0, 0.125], [2.0, 0.25]])}
    >>> _, steps = clip.apply(clip.init(x), x, grads)
    >>> steps["w"].tolist()
    [[-0.1118, 0.125], [0.2236, 0.250]]
    """

    ranges: ClassVar = {"clipping": NOT_NEGATIVE}

    clipping: Hyper = 0.01
    eps: Hyper = 1e-3
    axes: AxesOf = None

    def init_leaf(self, x):
        has_inputs(self.axes, x.shape)  # complain at once

    def apply_leaf(self, state, x, g, t):
        if has_inputs(self.axes, x.shape):
            return None, each_unit(self.axes, self._clipped, x, g)
        return None, apart(self.axes, self._clipped, x, g)

    def _clipped(
        self, x: Array, g: Array, inputs: tuple[int, ...] | None = None
    ) -> Array:
        def norms(x: Array) -> Array:
            return norm(x) if inputs is None else lengths(x, inputs)

        return g * shortening(norms(g), self.clipping * jnp.maximum(norms(x), self.eps))
