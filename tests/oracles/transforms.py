"""Transforms alone, each as a rule: x <- x - step."""

import numpy as np

from oracles.leaves import Params, Steps, abs_sq, chosen, each, norm, rms, wide
from oracles.trees import combine, squared


def stepping(params: Params, grads: Steps, step) -> Steps:
    """x <- x - step(path, x, g, t), for a transform that keeps nothing."""

    def leaf(path, x, gs):
        for t, g in enumerate(gs, 1):
            x = x - step(path, x, g, t)
            yield x

    return each(params, grads, leaf)


def projected(params: Params, grads: Steps, where, projection) -> Steps:
    """x <- projection(x - g) for the arrays that `where` means, x - g for others."""

    def leaf(path, x, gs):
        inside = chosen(where, path, x)
        for g in gs:
            x = projection(x - g) if inside else x - g
            yield x

    return each(params, grads, leaf)


def shrunk(g, size, limit):
    """g, made as small as limit / size says where `size` is above `limit`."""
    return g * np.where(size > limit, limit / np.where(size > 0, size, 1), 1)


def other_axes(x, axes) -> tuple[int, ...]:
    """All axes of `x` but those of its outputs."""
    outputs = -1 if axes is None else axes.outputs
    outputs = [outputs] if np.ndim(outputs) == 0 else outputs
    outputs = {axis % x.ndim for axis in outputs}
    return tuple(axis for axis in range(x.ndim) if axis not in outputs)


# --- Clipping -------------------------------------------------------------------------


def clip_by_value(params: Params, grads: Steps, *, max_value=1.0) -> Steps:
    """step = min(max(g, -max_value), max_value)"""
    return stepping(
        params, grads, lambda path, x, g, t: np.clip(g, -max_value, max_value)
    )


def clip_by_norm(params: Params, grads: Steps, *, max_norm=1.0, p=2) -> Steps:
    """Pascanu et al. 2013, Algorithm 1, arXiv:1211.5063, with any norm, of each array.

    size = (sum |g|^p)^(1/p);  for p = inf max |g|,  for p = 0 the count of g != 0
    step = g min(1, max_norm / size)
    """

    def step(path, x, g, t):
        if p == 0:
            size = np.count_nonzero(g)
        elif p == np.inf:
            size = np.max(np.abs(g))
        else:
            size = np.sum(np.abs(g) ** p) ** (1 / p)
        return shrunk(g, size, max_norm)

    return stepping(params, grads, step)


def clip_by_block_rms(params: Params, grads: Steps, *, max_rms=1.0) -> Steps:
    """step = g min(1, max_rms / sqrt(mean |g|^2))"""
    return stepping(params, grads, lambda path, x, g, t: shrunk(g, rms(g), max_rms))


def adaptive_clip(
    params: Params, grads: Steps, *, clipping=0.01, eps=1e-3, axes=None
) -> Steps:
    """Brock et al. 2021, eq. 3, arXiv:2102.06171.

    For each unit i: one index of the output axes, or the whole of an array of one axis
    step_i = clipping max(|x_i|, eps) / |g_i| g_i  if |g_i| / max(|x_i|, eps) > clipping
    """

    def step(path, x, g, t):
        summed = other_axes(x, axes) if x.ndim > 1 else None
        x_norm, g_norm = (
            np.sqrt(np.sum(abs_sq(a), axis=summed, keepdims=True)) for a in (x, g)
        )
        return shrunk(g, g_norm, clipping * np.maximum(x_norm, eps)).reshape(x.shape)

    return stepping(params, grads, step)


# --- Decay ----------------------------------------------------------------------------


def sign_decay(params: Params, grads: Steps, *, weight_decay=1e-3, where=None) -> Steps:
    """step = g + weight_decay x / |x|: of the gradient of an L1 penalty."""

    def step(path, x, g, t):
        decay = weight_decay if chosen(where, path, x) else 0.0
        return g + decay * x / np.where(x == 0, 1, np.abs(x))

    return stepping(params, grads, step)


def cautious_weight_decay(
    params: Params, grads: Steps, *, weight_decay=1e-4, where=None
) -> Steps:
    """Chen et al. 2025, Algorithm 1, arXiv:2510.12402: where step and parameter agree.

    step = g + weight_decay x  where g x >= 0,  else g
    """

    def step(path, x, g, t):
        decay = weight_decay if chosen(where, path, x) else 0.0
        return np.where(g * x >= 0, g + decay * x, g)

    return stepping(params, grads, step)


# --- Shaping --------------------------------------------------------------------------


def scale(params: Params, grads: Steps, *, factor=1.0) -> Steps:
    """step = factor g"""
    return stepping(params, grads, lambda path, x, g, t: factor * g)


def centralize(params: Params, grads: Steps, *, axes=None) -> Steps:
    """Yong et al. 2020, eq. 1, arXiv:2004.01461: of arrays with two axes or more.

    step = g - mean of g over all axes but those of the outputs
    """

    def step(path, x, g, t):
        if g.ndim < 2:
            return g
        return g - np.mean(g, axis=other_axes(g, axes), keepdims=True)

    return stepping(params, grads, step)


def normalize(params: Params, grads: Steps, *, norm=1.0, eps=0.0) -> Steps:
    """step = norm g / (|g| + eps), |g| over all arrays together; 0 if all is 0."""
    x, visited = wide(params), []
    for g in map(wide, grads):
        size = np.sqrt(squared(g))
        x = combine(x, -norm / (size + eps) if size > 0 else 0.0, g)
        visited.append(x)
    return visited


def add_noise(params: Params, grads: Steps, *, eta=0.01, gamma=0.55, seed=0) -> Steps:
    """Neelakantan et al. 2015, arXiv:1511.06807, as far as it can be foretold: eta = 0.

    step = g + noise of variance eta / t^gamma
    """
    assert eta == 0, "an oracle knows no noise"
    return stepping(params, grads, lambda path, x, g, t: g)


def stochastic_rounding(params: Params, grads: Steps, *, seed=0) -> Steps:
    """step = g for all that is not bfloat16, which an oracle cannot foretell."""
    return stepping(params, grads, lambda path, x, g, t: g)


def trust_ratio(
    params: Params, grads: Steps, *, coefficient=1.0, min_norm=0.0, eps=0.0
) -> Steps:
    """You et al. 2017, arXiv:1708.03888, as optax's `scale_by_trust_ratio` puts it.

    |x|, |g|: norms of the whole array, or `min_norm` if they are less
    step = g coefficient |x| / (|g| + eps),  g where a norm is 0
    """

    def step(path, x, g, t):
        x_norm, g_norm = max(norm(x), min_norm), max(norm(g), min_norm)
        if x_norm == 0 or g_norm == 0:
            return g
        return g * coefficient * x_norm / (g_norm + eps)

    return stepping(params, grads, step)


def scale_by_param_norm(params: Params, grads: Steps, *, min_norm=1e-3) -> Steps:
    """step = g max(|x|, min_norm)"""
    return stepping(params, grads, lambda path, x, g, t: g * max(norm(x), min_norm))


def scale_by_param_rms(params: Params, grads: Steps, *, min_rms=1e-3) -> Steps:
    """step = g max(sqrt(mean |x|^2), min_rms)"""
    return stepping(params, grads, lambda path, x, g, t: g * max(rms(x), min_rms))


def smooth(params: Params, grads: Steps, *, decay=0.9, debias=True) -> Steps:
    """m <- decay m + (1 - decay) g;  step = m / (1 - decay^t), or m without `debias`"""

    def leaf(path, x, gs):
        m = 0 * x
        for t, g in enumerate(gs, 1):
            m = decay * m + (1 - decay) * g
            x = x - (m / (1 - decay**t) if debias else m)
            yield x

    return each(params, grads, leaf)


def zero_nans(params: Params, grads: Steps) -> Steps:
    """step = 0 where g is NaN, else g"""
    return stepping(params, grads, lambda path, x, g, t: np.where(np.isnan(g), 0, g))


# --- Projections ----------------------------------------------------------------------


def non_negative(params: Params, grads: Steps, *, where=None) -> Steps:
    """P(y) = max(y, 0)"""
    return projected(params, grads, where, lambda y: np.maximum(y, 0))


def box(params: Params, grads: Steps, *, lower=-1.0, upper=1.0, where=None) -> Steps:
    """P(y) = min(max(y, lower), upper)"""
    return projected(params, grads, where, lambda y: np.clip(y, lower, upper))


def simplex(params: Params, grads: Steps, *, scale=1.0, axis=None, where=None) -> Steps:
    """The nearest p >= 0 with sum(p) = scale, along `axis` or of the whole array.

    Michelot 1986, a way without sorting (ours sorts, as Duchi et al. 2008):
    all entries are active at first; until none is dropped:
    theta = (sum of the active y - scale) / their number;  drop those with y < theta
    P(y) = max(y - theta, 0)
    """

    def nearest(y):
        active = y
        while True:
            theta = (np.sum(active) - scale) / active.size
            if not np.any(active < theta):
                return np.maximum(y - theta, 0)
            active = active[active >= theta]

    def projection(y):
        if axis is None:
            return nearest(y.ravel()).reshape(y.shape)
        return np.apply_along_axis(nearest, axis, y)

    return projected(params, grads, where, projection)


def l2_ball(
    params: Params, grads: Steps, *, radius=1.0, axis=None, where=None
) -> Steps:
    """P(y) = y min(1, radius / |y|), |y| along `axis` or of the whole array"""

    def projection(y):
        size = np.sqrt(np.sum(abs_sq(y), axis=axis, keepdims=True))
        return shrunk(y, size, radius)

    return projected(params, grads, where, projection)


# --- No step --------------------------------------------------------------------------


def frozen(params: Params, grads: Steps) -> Steps:
    """x <- x"""
    return [wide(params) for _ in grads]


ORACLES = {
    "ClipByValue": clip_by_value,
    "ClipByNorm": clip_by_norm,
    "ClipByBlockRMS": clip_by_block_rms,
    "AdaptiveClip": adaptive_clip,
    "SignDecay": sign_decay,
    "CautiousWeightDecay": cautious_weight_decay,
    "Scale": scale,
    "Centralize": centralize,
    "Normalize": normalize,
    "AddNoise": add_noise,
    "StochasticRounding": stochastic_rounding,
    "TrustRatio": trust_ratio,
    "ScaleByParamNorm": scale_by_param_norm,
    "ScaleByParamRMS": scale_by_param_rms,
    "Smooth": smooth,
    "ZeroNans": zero_nans,
    "NonNegative": non_negative,
    "Box": box,
    "Simplex": simplex,
    "L2Ball": l2_ball,
    "Frozen": frozen,
}
