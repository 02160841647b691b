"""Rules that divide by the size of past gradients; some store little of it."""

import numpy as np

from oracles.leaves import Params, Steps, abs_sq, each, rms


def adagrad(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-2,
    initial_accumulator=0.1,
    eps=0.0,
    eps_root=1e-7,
    learning_rate_decay=0.0,
    weight_decay=0.0,
) -> Steps:
    """Duchi et al. 2011, Figure 1: eps_root is optax's eps; eps and the rest torch's.

    g <- g + weight_decay x
    s <- s + |g|^2,  s = initial_accumulator at first
    rate = learning_rate / (1 + (t - 1) learning_rate_decay)
    x <- x - rate g / (sqrt(s + eps_root) + eps),  0 / 0 = 0
    """

    def leaf(path, x, gs):
        s = np.full(x.shape, initial_accumulator)
        for t, g in enumerate(gs, 1):
            g = g + weight_decay * x
            s = s + abs_sq(g)
            rate = learning_rate / (1 + (t - 1) * learning_rate_decay)
            x = x - rate * over(g, np.sqrt(s + eps_root) + eps)
            yield x

    return each(params, grads, leaf)


def over(g, root):
    """g / root, and 0 where there never was a gradient."""
    return np.divide(g, root, out=np.zeros_like(g), where=root > 0)


def adadelta(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1.0,
    decay=0.9,
    eps=1e-6,
    weight_decay=0.0,
) -> Steps:
    """Zeiler 2012, Algorithm 1, arXiv:1212.5701; the weight decay of torch and optax.

    g <- g + weight_decay x
    v <- decay v + (1 - decay) |g|^2
    d = sqrt(u + eps) / sqrt(v + eps) g
    u <- decay u + (1 - decay) |d|^2
    x <- x - learning_rate d
    """

    def leaf(path, x, gs):
        v, u = np.zeros(x.shape), np.zeros(x.shape)
        for g in gs:
            g = g + weight_decay * x
            v = decay * v + (1 - decay) * abs_sq(g)
            d = np.sqrt(u + eps) / np.sqrt(v + eps) * g
            u = decay * u + (1 - decay) * abs_sq(d)
            x = x - learning_rate * d
            yield x

    return each(params, grads, leaf)


def rmsprop(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-2,
    decay=0.9,
    eps=0.0,
    eps_root=1e-8,
    initial_scale=0.0,
    centered=False,
    bias_correction=False,
    momentum=None,
    nesterov=False,
    rate_inside=True,
    weight_decay=0.0,
) -> Steps:
    """Hinton's lecture 6.5; centered as in Graves 2013, eq. 38-45, arXiv:1308.0850.

    g <- g + weight_decay x
    v <- decay v + (1 - decay) |g|^2,  v = initial_scale at first
    m <- decay m + (1 - decay) g
    d = g / (sqrt(v + eps_root) + eps);  centered: v - |m|^2 in place of v
    buf <- momentum buf + d
    x <- x - learning_rate (d + momentum buf if nesterov else buf)

    Inside or outside of the buffer is all the same to a constant learning rate.
    """

    def leaf(path, x, gs):
        v, m, buf = np.full(x.shape, initial_scale), 0 * x, 0 * x
        for t, g in enumerate(gs, 1):
            g = g + weight_decay * x
            v = decay * v + (1 - decay) * abs_sq(g)
            m = decay * m + (1 - decay) * g
            bias = 1 - decay**t if bias_correction else 1.0
            spread = v / bias
            if centered:
                spread = np.maximum(spread - abs_sq(m / bias), 0)
            d = g / (np.sqrt(spread + eps_root) + eps)
            if momentum is not None:
                buf = momentum * buf + d
                d = d + momentum * buf if nesterov else buf
            x = x - learning_rate * d
            yield x

    return each(params, grads, leaf)


def sm3(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-2,
    momentum=0.9,
    b2=None,
    eps_root=1e-8,
) -> Steps:
    """Anil et al. 2019, Algorithm SM3-II, arXiv:1901.11150; the options are optax's.

    s_r: a number for each slice r of the array, along each of its axes; 0 at first
    nu_i = min over the slices r that hold i of s_r, + |g_i|^2
    nu_i = b2 min + (1 - b2) |g_i|^2, with b2
    s_r <- max over the i in r of nu_i
    m <- momentum m + (1 - momentum) g / sqrt(nu + eps_root),  0 / 0 = 0
    x <- x - learning_rate m
    """

    def leaf(path, x, gs):
        m = 0 * x
        # For each axis, its slices' numbers; every other axis has length 1.
        shapes = [[n if i == a else 1 for i, n in enumerate(x.shape)] for a in axes(x)]
        slices = [np.zeros(shape) for shape in shapes]
        for g in gs:
            least = slices[0]
            for s in slices[1:]:
                least = np.minimum(least, s)
            old, new = (1, 1) if b2 is None else (b2, 1 - b2)
            nu = old * least + new * abs_sq(g)
            slices = [
                nu.max(axis=tuple(i for i in axes(x) if i != a), keepdims=True)
                for a in axes(x)
            ]
            d = over(g, np.sqrt(nu + eps_root))
            m = d if momentum is None else momentum * m + (1 - momentum) * d
            x = x - learning_rate * m
            yield x

    return each(params, grads, leaf)


def axes(x):
    return range(x.ndim)


def adafactor(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-2,
    decay_rate=0.8,
    decay_offset=0,
    eps=1e-30,
    floor=0.0,
    clipping_threshold=1.0,
    relative_step=False,
    parameter_scale=True,
    min_scale=1e-3,
    momentum=None,
    weight_decay=0.0,
    couple=False,
    min_dim_size_to_factor=128,
    last_axes=False,
) -> Steps:
    """Shazeer and Stern 2018, Algorithms 4 to 6, arXiv:1804.04235; optax and torch.

    w = max(t - decay_offset, 1)^-decay_rate
    V <- (1 - w) V + w (|g|^2 + eps)
    R, C <- the same of the means of (|g|^2 + eps) along the longest two axes, or the
            last two; V = R C / max(mean of R, floor)                   where factored
    u = g / max(sqrt(V), floor)
    u <- u / max(1, rms(u) / clipping_threshold)
    rate = min(learning_rate, 1 / sqrt(t)) if relative_step else learning_rate
    u <- rate max(rms(x), min_scale) u
    m <- momentum m + (1 - momentum) u
    x <- x - m - weight_decay x,  the decay times learning_rate with `couple`
    """

    def leaf(path, x, gs):
        decay = weight_decay * (learning_rate if couple else 1.0)
        pair = (x.ndim - 2, x.ndim - 1) if last_axes else np.argsort(x.shape)[-2:]
        split = x.ndim > 1 and min_dim_size_to_factor is not None
        split = split and min(x.shape[i] for i in pair) >= min_dim_size_to_factor
        v = row = col = m = 0.0
        for t, g in enumerate(gs, 1):
            w = max(t - decay_offset, 1) ** -decay_rate
            square = abs_sq(g) + eps
            v = (1 - w) * v + w * square
            if split:
                short, long = (int(i) for i in pair)
                row = (1 - w) * row + w * square.mean(long, keepdims=True)
                col = (1 - w) * col + w * square.mean(short, keepdims=True)
                v = row * col / np.maximum(row.mean(short, keepdims=True), floor)
            u = g / np.maximum(np.sqrt(v), floor)
            if clipping_threshold is not None:
                u = u / max(1, rms(u) / clipping_threshold)
            rate = min(learning_rate, t**-0.5) if relative_step else learning_rate
            u = rate * (max(rms(x), min_scale) if parameter_scale else 1.0) * u
            m = u if momentum is None else momentum * m + (1 - momentum) * u
            x = x - m - decay * x
            yield x

    return each(params, grads, leaf)


ORACLES = {
    "AdaGrad": adagrad,
    "AdaDelta": adadelta,
    "RMSProp": rmsprop,
    "SM3": sm3,
    "Adafactor": adafactor,
}
