"""Gradients made longer, shorter, smoother, noisier or centred."""

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import cast, norm, rms, zeros_like
from optimjax.hyper import Hyper
from optimjax.leaf import LeafRule
from optimjax.noise import Noisy
from optimjax.rule import AxesOf, OneFactor, rule
from optimjax.rules.trust import trust_ratio
from optimjax.transforms.clipping import NOT_NEGATIVE
from optimjax.treewide import Count, PyTree, squared_length
from optimjax.units import apart, each_unit, has_inputs

__all__ = [
    "AddNoise",
    "Centralize",
    "Normalize",
    "Scale",
    "ScaleByParamNorm",
    "ScaleByParamRMS",
    "Smooth",
    "TrustRatio",
    "ZeroNans",
]


class Smoothed(NamedTuple):
    m: Array
    weight: Array | None


@rule
class Scale(LeafRule):
    """What comes in times a number.

        step = factor * g

    The factor may be a schedule, or differ by path: in a `Chain` after a rule it is a
    learning rate of its own.

    Args:
        factor: any number; below 0 to climb.
    State: nothing.
    Source: `scale` and `scale_by_schedule` of optax.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> scale = Scale(lambda count: 0.3 / (1 + count))
    >>> state, _ = scale.apply(scale.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = scale.apply(state, x, {"w": jnp.array([-1.0, 2.0])})
    >>> steps["w"].tolist()
    [-0.15, 0.30]
    """

    ranges: ClassVar = {"factor": None}

    factor: Hyper = 1.0

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, self.factor * g


@rule
class Centralize(LeafRule):
    """The mean of each unit's gradient taken away.

        step = g - mean(g)

    over the inputs of each output unit, so by default over all axes but the last of a
    kernel (..., in, out); optax takes the mean over all axes but the first. Arrays of
    one axis or none pass. (Inside a `shard_map`, an axis of the mean has to be whole on
    each device.)

    Args:
        axes: which axes are inputs, outputs and so on, as for `MatrixRule`.
    State: nothing.
    Raises: ValueError for an array of two or more axes that has not these.
    Source: Yong et al. 2020, equation 1, arXiv:2004.01461.

    >>> x = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    >>> centre = Centralize()
    >>> grads = {"w": jnp.array([[1.0, -2.0], [4.0, 0.5]]), "b": jnp.array([3.0, 1.0])}
    >>> _, steps = centre.apply(centre.init(x), x, grads)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([[-1.5, -1.25], [1.5, 1.25]], [3.0, 1.0])
    """

    axes: AxesOf = None

    def init_leaf(self, x):
        has_inputs(self.axes, x.shape)  # complain at once

    def apply_leaf(self, state, x, g, t):
        if not has_inputs(self.axes, x.shape):
            return None, g
        return None, each_unit(self.axes, centred, g)


def centred(g: Array, inputs: tuple[int, ...]) -> Array:
    return g - jnp.mean(g, inputs, keepdims=True)


@rule
class Normalize(OneFactor):
    """All gradients scaled by one factor, so that together they have one length.

        step = norm * g / (|g| + eps)

    where |g| is over all slots: a tied array counts once, with its summed gradient; a
    slot that is frozen or has no gradient does not count. Zeros stay zeros. A length
    below 1e-19, whose square float32 does not hold, counts as so much.

    Args:
        norm: the length, in the unit of what comes out, >= 0.
        eps: added to the length, in the gradient's unit, >= 0.
    State: `count`, updates so far, int32, ().
    Raises: ValueError if a number is outside its range.
    Source: Hazan et al. 2015, Algorithm 1, arXiv:1507.02030.

    >>> x = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    >>> unit = Normalize(0.5, eps=1.0)
    >>> grads = {"a": jnp.array([3.0]), "b": jnp.array([-4.0])}
    >>> _, steps = unit.apply(unit.init(x), x, grads)
    >>> steps["a"].tolist(), steps["b"].tolist()
    ([0.25], [-0.33333])
    """

    ranges: ClassVar = {"norm": NOT_NEGATIVE}

    norm: Hyper = 1.0
    eps: Hyper = 0.0

    def init(self, params: PyTree) -> Count:
        return Count.zero()

    def one_factor(
        self, state: Count, grads: PyTree, **context: Any
    ) -> tuple[Count, Array]:
        whole, here = squared_length(grads), self.at_count(state.count)
        wanted, eps = cast(here.norm, whole.dtype), cast(here.eps, whole.dtype)
        # The root of 0 has no derivative.
        length = jnp.sqrt(jnp.maximum(whole, jnp.finfo(whole.dtype).tiny))
        return state.next(), wanted / (length + eps)


@rule
class AddNoise(Noisy):
    """Gaussian noise, of a variance that falls, added to what comes in.

        n    ~ Normal(0, eta / t^gamma)
        step = g + n

    Each slot has a generator of its own, started from `seed` and the slot's path, as in
    `NoisySGD`: two of either in one `Chain` want two seeds. optax has the law of
    `add_noise`, not its numbers.

    Args:
        eta: variance of the first step's noise, in the gradient's unit squared, >= 0.
        gamma: power with which the variance falls, >= 0.
        seed: where the generators start.
    State: `key`, data of a threefry key, uint32, (2,).
    Raises: ValueError if a number is outside its range; TypeError for a complex
        parameter.
    Source: Neelakantan et al. 2015, section 3, arXiv:1511.06807.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> noisy = AddNoise(0.04, seed=3)
    >>> state, _ = noisy.apply(noisy.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = noisy.apply(state, x, {"w": jnp.array([-1.0, 2.0])})
    >>> steps["w"].tolist()
    [-1.2338, 1.8552]
    """

    complex_ok = False
    ranges: ClassVar = {"eta": NOT_NEGATIVE, "gamma": NOT_NEGATIVE}

    eta: Hyper = 0.01
    gamma: Hyper = 0.55
    seed: int = 0

    def apply_leaf(self, state, x, g, t):
        state, n = self.noise(state, x, t)
        return state, g + n


@rule
class TrustRatio(LeafRule):
    """The gradient of each array made as long as the array itself.

        x_norm = max(|x|, min_norm)
        g_norm = max(|g|, min_norm)
        step   = g * coefficient * x_norm / (g_norm + eps)      g if a norm is 0

    where |.| is the norm of the whole array, or of each matrix that `axes` tells apart.
    After `Adam` it makes `LAMB` of it.

    Args:
        coefficient: length of the step, as a share of the parameter's, >= 0.
        min_norm: the least that a norm counts, in the unit of either, >= 0.
        eps: added to the denominator, in the gradient's unit, >= 0.
        axes: as for `MatrixRule`: with `Axes(batch=0)` each of the layers that are
            stacked in an array has a ratio of its own.
    State: nothing.
    Raises: ValueError if a number is outside its range.
    Source: You et al. 2020, section 3, arXiv:1904.00962; `min_norm` of optax.

    >>> x = {"w": jnp.array([3.0, -4.0])}
    >>> trust = TrustRatio(0.1, eps=0.5)
    >>> _, steps = trust.apply(trust.init(x), x, {"w": jnp.array([0.6, 0.8])})
    >>> steps["w"].tolist()
    [0.2000, 0.2667]
    """

    ranges: ClassVar = {"coefficient": NOT_NEGATIVE, "min_norm": NOT_NEGATIVE}

    coefficient: Hyper = 1.0
    min_norm: Hyper = 0.0
    eps: Hyper = 0.0
    axes: AxesOf = None

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, apart(self.axes, self._scaled, x, g)

    def _scaled(self, x: Array, g: Array) -> Array:
        x_norm = jnp.maximum(norm(x), self.min_norm)
        g_norm = jnp.maximum(norm(g), self.min_norm)
        return g * trust_ratio(x_norm, g_norm, self.coefficient, self.eps)


@rule
class ScaleByParamNorm(LeafRule):
    """The gradient of each array times the norm of the array.

        step = g * max(|x|, min_norm)

    where |x| is the norm of the whole array.

    Args:
        min_norm: the least that the norm counts, in the parameter's unit, >= 0.
    State: nothing.
    Raises: ValueError if `min_norm` is negative.
    Source: `scale_by_param_block_norm` of optax.

    >>> x = {"w": jnp.array([3.0, -4.0]), "b": jnp.array([0.5])}
    >>> scale = ScaleByParamNorm(2.0)
    >>> grads = {"w": jnp.array([0.3, 0.1]), "b": jnp.array([0.7])}
    >>> _, steps = scale.apply(scale.init(x), x, grads)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([1.5, 0.5], [1.4])
    """

    ranges: ClassVar = {"min_norm": NOT_NEGATIVE}

    min_norm: Hyper = 1e-3

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, g * jnp.maximum(norm(x), self.min_norm)


@rule
class ScaleByParamRMS(LeafRule):
    """The gradient of each array times the usual size of a number of the array.

        step = g * max(sqrt(mean of |x|^2), min_rms)

    where the mean is over the whole array.

    Args:
        min_rms: the least that the size counts, in the parameter's unit, >= 0.
    State: nothing.
    Raises: ValueError if `min_rms` is negative.
    Source: Shazeer and Stern 2018, section 8, arXiv:1804.04235.

    >>> x = {"w": jnp.array([1.0, -7.0]), "b": jnp.array([0.5])}
    >>> scale = ScaleByParamRMS(2.0)
    >>> grads = {"w": jnp.array([0.3, 0.1]), "b": jnp.array([0.7])}
    >>> _, steps = scale.apply(scale.init(x), x, grads)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([1.5, 0.5], [1.4])
    """

    ranges: ClassVar = {"min_rms": NOT_NEGATIVE}

    min_rms: Hyper = 1e-3

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, g * jnp.maximum(rms(x), self.min_rms)


@rule
class Smooth(LeafRule):
    """A running mean in place of what comes in.

        m      <- decay * m + (1 - decay) * g
        weight <- decay * weight + (1 - decay)
        step    = m / weight if debias else m

    For the average of parameters see `EMA`.

    Args:
        decay: share of the old mean that is kept, in [0, 1); its memory is about
            1 / (1 - decay) steps.
        debias: divide by the sum of the weights, for `m` starts from 0.
    State: `m`, shape of the parameter; with `debias` also `weight`, (), which is
        1 - decay^t if decay stays what it is.
    Raises: ValueError if `decay` is outside its range.
    Source: `ema` of optax.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> smooth = Smooth(0.8)
    >>> state, _ = smooth.apply(smooth.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = smooth.apply(state, x, {"w": jnp.array([-1.0, 2.0])})
    >>> steps["w"].tolist(), state.slots["w"].m.tolist()
    ([-0.333333, -0.222222], [-0.12, -0.08])
    """

    decay: Hyper = 0.9
    debias: bool = True

    def init_leaf(self, x):
        weight = jnp.zeros((), x.real.dtype) if self.debias else None
        return Smoothed(zeros_like(x), weight)

    def apply_leaf(self, state, x, g, t):
        m = self.decay * state.m + (1 - self.decay) * g
        if not self.debias:
            return Smoothed(m, None), m
        weight = self.decay * state.weight + (1 - self.decay)
        return Smoothed(m, weight), m / weight


@rule
class ZeroNans(LeafRule):
    """Numbers that are NaN replaced by 0.

        step = 0 where g is NaN, else g

    For what is known to be harmless, such as a mean over an empty batch.
    `SkipNonFinite` leaves out the whole update instead.

    Args: none.
    State: nothing.
    Source: `zero_nans` of optax.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> _, steps = ZeroNans().apply(
    ...     ZeroNans().init(x), x, {"w": jnp.array([0.5, jnp.nan])}
    ... )
    >>> steps["w"].tolist()
    [0.5, 0.0]
    """

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, jnp.where(jnp.isnan(g), 0, g)
