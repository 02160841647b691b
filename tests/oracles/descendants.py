"""Adam's descendants: other orders of the same two moments, other sizes of the step.

Those whose steps do not depend on the parameters are generators of steps, as in
`oracles.adam`. Where the authors' code is not the paper, the docstring says which
of the two this is.
"""

import numpy as np

from oracles.adam import follow, moments
from oracles.leaves import Params, Steps, abs_sq, chosen, each, rms


def adopt(gs, *, learning_rate=1e-3, b1=0.9, b2=0.9999, eps=1e-6, clip_power=0.25):
    """Taniguchi et al. 2024, arXiv:2411.02853; t counts every gradient.

    t = 1:  v = |g|^2,  m = 0,  no step
    c = g / max(sqrt(v), eps),  made no larger than (t - 1)^clip_power in magnitude
    m <- b1 m + (1 - b1) c
    step = learning_rate m
    v <- b2 v + (1 - b2) |g|^2,  after the step

    The paper's limit t^(1/4) has t = 1 at the first gradient that makes a step.
    """
    v, m = abs_sq(gs[0]), 0 * gs[0]
    yield m
    for t, g in enumerate(gs[1:], 2):
        c = g / np.maximum(np.sqrt(v), eps)
        if clip_power is not None:
            limit, size = (t - 1) ** clip_power, np.abs(c)
            c = np.where(size > limit, phase(c) * limit, c)
        m = b1 * m + (1 - b1) * c
        yield learning_rate * m
        v = b2 * v + (1 - b2) * abs_sq(g)


def phase(g):
    """sign(g), for complex numbers too; 0 at 0."""
    return g / np.where(g == 0, 1, np.abs(g))


def ademamix(
    gs,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    b3=0.9999,
    alpha=5.0,
    eps=1e-8,
    eps_root=0.0,
    warmup=None,
):
    """Pagliardini et al. 2024, Algorithm 1, arXiv:2409.03137; `eps_root` as in optax.

    m <- b1 m + (1 - b1) g       v <- b2 v + (1 - b2) |g|^2
    slow <- b3_t slow + (1 - b3_t) g,  whose bias is not corrected
    step = learning_rate (m_hat + alpha_t slow) / (sqrt(v_hat + eps_root) + eps)

    With warmup = T, from t = 1:
    alpha_t = min(t alpha / T, alpha)
    b3_t = min(exp(ln b1 ln b3 / ((1 - t/T) ln b3 + t/T ln b1)), b3)
    The authors' code adds 1e-8 to both b's in the logarithms.
    """
    slow = np.zeros_like(gs[0])
    alpha_t, b3_t = alpha, b3
    for t, (g, m, v) in enumerate(moments(gs, b1, b2), 1):
        if warmup is not None:
            part, log1, log3 = t / warmup, np.log(b1), np.log(b3)
            alpha_t = min(part * alpha, alpha)
            b3_t = min(np.exp(log1 * log3 / ((1 - part) * log3 + part * log1)), b3)
        slow = b3_t * slow + (1 - b3_t) * g
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        yield (
            learning_rate * (m_hat + alpha_t * slow) / (np.sqrt(v_hat + eps_root) + eps)
        )


def simplified_ademamix(
    gs,
    *,
    learning_rate=1e-3,
    b1=0.99,
    b2=0.95,
    alpha=0.0,
    eps=1e-8,
    eps_root=0.0,
):
    """Morwani et al. 2025, arXiv:2502.02431, as in optax: b1 constant.

    m <- b1 m + g                            v <- b2 v + (1 - b2) |g|^2
    step = learning_rate (m + alpha g) / (sqrt(v / (1 - b2^t) + eps_root) + eps)
    """
    m, v = np.zeros_like(gs[0]), np.zeros(gs[0].shape)
    for t, g in enumerate(gs, 1):
        m = b1 * m + g
        v = b2 * v + (1 - b2) * abs_sq(g)
        root = np.sqrt(v / (1 - b2**t) + eps_root) + eps
        yield learning_rate * (m + alpha * g) / root


def laprop(gs, *, learning_rate=4e-4, b1=0.9, b2=0.999, eps=1e-15):
    """Ziyin et al. 2020, arXiv:2002.04839.

    v <- b2 v + (1 - b2) |g|^2
    m <- b1 m + (1 - b1) g / (sqrt(v / (1 - b2^t)) + eps),  0 / 0 = 0
    step = learning_rate m / (1 - b1^t)

    The authors' code has the learning rate within m, all the same if it is constant.
    """
    m, v = np.zeros_like(gs[0]), np.zeros(gs[0].shape)
    for t, g in enumerate(gs, 1):
        v = b2 * v + (1 - b2) * abs_sq(g)
        root = np.sqrt(v / (1 - b2**t)) + eps
        m = b1 * m + (1 - b1) * g / np.where(root > 0, root, 1)
        yield learning_rate * m / (1 - b1**t)


def madgrad(
    params: Params, grads: Steps, *, learning_rate=1e-2, momentum=0.9, eps=1e-6
) -> Steps:
    """Defazio and Jelassi 2021, Algorithm 1, arXiv:2101.11075: c = 1 - momentum.

    weight = (learning_rate + eps) sqrt(t),  the paper: learning_rate sqrt(t)
    s <- s + weight g                        v <- v + weight |g|^2
    z = x_1 - s / (v^(1/3) + eps),  x_1 the first parameters,  0 / 0 = 0
    x <- momentum x + (1 - momentum) z

    The eps by the learning rate is that of the authors' code and of optax.
    """

    def leaf(path, x, gs):
        first, s, v = x, 0 * x, np.zeros(x.shape)
        for t, g in enumerate(gs, 1):
            weight = (learning_rate + eps) * np.sqrt(t)
            s = s + weight * g
            v = v + weight * abs_sq(g)
            root = np.cbrt(v) + eps
            z = first - s / np.where(root > 0, root, 1)
            x = momentum * x + (1 - momentum) * z
            yield x

    return each(params, grads, leaf)


def adam_atan2(gs, *, learning_rate=1e-3, b1=0.9, b2=0.999, a=4 / np.pi, b=1.0):
    """Everett et al. 2024, arXiv:2407.05872, where it removes epsilon.

    step = learning_rate a atan2(m / (1 - b1^t), b sqrt(v / (1 - b2^t)))
    a = 4 / pi makes that of a constant gradient learning_rate for b = 1.
    """
    for t, (_, m, v) in enumerate(moments(gs, b1, b2), 1):
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        yield learning_rate * a * np.arctan2(m_hat, b * np.sqrt(v_hat))


def stable_adam(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.99,
    eps=1e-8,
    weight_decay=0.0,
    decay_where=None,
) -> Steps:
    """Wortsman et al. 2023, Algorithm 2 (StableAdamW), arXiv:2304.13013.

    b_hat = b (1 - b^(t - 1)) / (1 - b^t),  for b1 and b2
    m <- b1_hat m + (1 - b1_hat) g           v <- b2_hat v + (1 - b2_hat) |g|^2
    rms = sqrt(mean of |g|^2 / max(v, eps^2)),  of each array
    eta = learning_rate / max(1, rms)
    x <- x - eta (weight_decay x + m / (sqrt(v) + eps))
    """

    def leaf(path, x, gs):
        decay = weight_decay if chosen(decay_where, path, x) else 0.0
        m, v = 0 * x, np.zeros(x.shape)
        for t, g in enumerate(gs, 1):
            b1_hat, b2_hat = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (b1, b2))
            m = b1_hat * m + (1 - b1_hat) * g
            v = b2_hat * v + (1 - b2_hat) * abs_sq(g)
            ratio = rms(g / np.sqrt(np.maximum(v, eps**2)))
            eta = learning_rate / max(1, ratio)
            x = x - eta * (decay * x + m / (np.sqrt(v) + eps))
            yield x

    return each(params, grads, leaf)


def adabound(
    gs,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    final_rate=0.1,
    gamma=1e-3,
    eps=1e-8,
):
    """Luo et al. 2019, Algorithm 2, arXiv:1902.09843, as the authors' code has it.

    lower = final_rate (1 - 1 / (gamma t + 1)),  upper = final_rate (1 + 1 / (gamma t))
    rate = learning_rate sqrt(1 - b2^t) / (1 - b1^t) / (sqrt(v) + eps)
    step = min(max(rate, lower), upper) m

    In the paper neither moment is corrected, the rate is divided by sqrt(t) too, and
    gamma is 1 - b2. The code multiplies the bounds by what a schedule has made of the
    first learning rate; here it is constant.
    """
    for t, (_, m, v) in enumerate(moments(gs, b1, b2), 1):
        rate = learning_rate * np.sqrt(1 - b2**t) / (1 - b1**t) / (np.sqrt(v) + eps)
        lower = final_rate * (1 - 1 / (gamma * t + 1))
        upper = final_rate * (1 + 1 / (gamma * t))
        yield np.clip(rate, lower, upper) * m


def acprop(gs, *, learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-16, eps_root=1e-16):
    """Zhuang et al. 2021, arXiv:2110.05454, as the code of optax is.

    step = learning_rate g / (sqrt(s / (1 - b2^(t - 1))) + eps),  s of the step before;
    at t = 1 learning_rate g / (1 + eps)
    s <- b2 s + (1 - b2) |g - m|^2 + eps_root,  m of the step before
    m <- b1 m + (1 - b1) g

    In the authors' code, and in the docstring of optax, s has the new m: as g - m is
    b1 (g - m of the step before), that makes s smaller by b1^2. The code's eps_root is
    its eps.
    """
    m, s = np.zeros_like(gs[0]), np.zeros(gs[0].shape)
    for t, g in enumerate(gs, 1):
        s_hat = s / (1 - b2 ** (t - 1)) if t > 1 else np.ones(g.shape)
        yield learning_rate * g / (np.sqrt(s_hat) + eps)
        s = b2 * s + (1 - b2) * abs_sq(g - m) + eps_root
        m = b1 * m + (1 - b1) * g


def grams(gs, *, learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8):
    """Cao et al. 2024, arXiv:2412.17107.

    step = learning_rate sign(g) |m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)|
    """
    for t, (g, m, v) in enumerate(moments(gs, b1, b2), 1):
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        yield learning_rate * phase(g) * np.abs(u)


def tiger(gs, *, learning_rate=1e-3, b1=0.965):
    """Su 2023, https://kexue.fm/archives/9512, without the decay.

    m <- b1 m + (1 - b1) g                   step = learning_rate sign(m)
    """
    m = np.zeros_like(gs[0])
    for g in gs:
        m = b1 * m + (1 - b1) * g
        yield learning_rate * phase(m)


# --- Steps along the sphere -----------------------------------------------------------


def tangent(x, g, u, delta, eps):
    """Heo et al. 2021, arXiv:2006.08217: u, and whether it is projected.

    For the views of x as one vector per unit, which the last axis numbers, then as one:
    if |cos(x, g)| < delta / sqrt(length of a vector) for all vectors of the view:
        n = x / (|x| + eps),  u <- u - (n . u) n,  and done
    Arrays of fewer than two axes are left alone, as in the authors' code.
    """
    if x.ndim < 2:
        return u, False
    for axes in (tuple(range(x.ndim - 1)), tuple(range(x.ndim))):
        length = np.prod([x.shape[axis] for axis in axes])

        def along(a, b, axes=axes):
            return np.sum(a * b, axis=axes, keepdims=True)

        sizes = np.sqrt(along(x, x) * along(g, g))
        cosines = along(x, g) / np.where(sizes > 0, sizes, 1)
        if np.max(np.abs(cosines)) < delta / np.sqrt(length):
            n = x / (np.sqrt(along(x, x)) + eps)
            return u - along(n, u) * n, True
    return u, False


def adamp(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    delta=0.1,
    weight_decay=0.0,
    decay_ratio=0.1,
    nesterov=False,
) -> Steps:
    """Heo et al. 2021, Algorithm 2, arXiv:2006.08217; `nesterov` of the authors' code.

    m <- b1 m + (1 - b1) g                   v <- b2 v + (1 - b2) |g|^2
    w = b1 m + (1 - b1) g  if nesterov  else m
    u = w / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
    u <- tangent(x, g, u),  decay = weight_decay (decay_ratio if projected else 1)
    x <- x - learning_rate (u + decay x)
    """

    def leaf(path, x, gs):
        for t, (g, m, v) in enumerate(moments(gs, b1, b2), 1):
            w = b1 * m + (1 - b1) * g if nesterov else m
            u = w / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
            u, projected = tangent(x, g, u, delta, eps)
            decay = weight_decay * (decay_ratio if projected else 1)
            x = x - learning_rate * (u + decay * x)
            yield x

    return each(params, grads, leaf)


def sgdp(
    params: Params,
    grads: Steps,
    *,
    learning_rate=0.1,
    momentum=0.9,
    dampening=0.0,
    nesterov=False,
    delta=0.1,
    weight_decay=0.0,
    decay_ratio=0.1,
    eps=1e-8,
) -> Steps:
    """Heo et al. 2021, Algorithm 1, arXiv:2006.08217; options of the authors' code.

    buf <- momentum buf + (1 - dampening) g,  from 0: torch's SGD starts with g
    u = g + momentum buf  if nesterov  else buf
    u <- tangent(x, g, u),  decay = weight_decay (decay_ratio if projected else 1)
    x <- x - learning_rate (u + decay / (1 - momentum) x)
    """

    def leaf(path, x, gs):
        buf = 0 * x
        for g in gs:
            buf = momentum * buf + (1 - dampening) * g
            u = g + momentum * buf if nesterov else buf
            u, projected = tangent(x, g, u, delta, eps)
            decay = weight_decay * (decay_ratio if projected else 1) / (1 - momentum)
            x = x - learning_rate * (u + decay * x)
            yield x

    return each(params, grads, leaf)


ORACLES = {
    "ADOPT": follow(adopt),
    "AdEMAMix": follow(ademamix),
    "SimplifiedAdEMAMix": follow(simplified_ademamix),
    "LaProp": follow(laprop),
    "MADGRAD": madgrad,
    "AdamAtan2": follow(adam_atan2),
    "StableAdam": stable_adam,
    "AdaBound": follow(adabound),
    "ACProp": follow(acprop),
    "Grams": follow(grams),
    "Tiger": follow(tiger),
    "AdamP": adamp,
    "SGDP": sgdp,
}
