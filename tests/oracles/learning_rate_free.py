"""Rules without a learning rate to tune, and those that read the loss.

All arrays are looked at together: the sums go over every entry of every array.
"""

import numpy as np

from oracles.leaves import Params, Steps, abs_sq, chosen, each, wide
from oracles.trees import combine, inner, squared


def l1(tree: Params):
    return sum(np.sum(np.abs(x)) for x in tree.values())


def scaled(factor, tree: Params) -> Params:
    return {path: factor * x for path, x in tree.items()}


def zeros(tree: Params) -> Params:
    return scaled(0.0, tree)


def mixed(b, old: Params, new: Params) -> Params:
    """b old + (1 - b) new"""
    return {path: b * old[path] + (1 - b) * new[path] for path in old}


def squares(tree: Params) -> Params:
    return {path: abs_sq(x) for path, x in tree.items()}


def decay_of(where, decay, x: Params) -> Params:
    """The factor of each array."""
    return {path: decay if chosen(where, path, a) else 0.0 for path, a in x.items()}


def debias(b1, b2, t, correct):
    return np.sqrt(1 - b2**t) / (1 - b1**t) if correct else 1.0


def rate_at(rate, count):
    return rate(count) if callable(rate) else rate


def prodigy(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1.0,
    b1=0.9,
    b2=0.999,
    b3=None,
    eps=1e-8,
    d0=1e-6,
    d_coef=1.0,
    growth_rate=np.inf,
    bias_correction=True,
    safeguard_warmup=False,
    weight_decay=0.0,
    decay_where=None,
) -> Steps:
    """Mishchenko and Defazio 2023, Algorithm 4, arXiv:2306.06101; options of the code.

    rate = d learning_rate sqrt(1 - b2^t) / (1 - b1^t), the last two: bias_correction
    m <- b1 m + (1 - b1) d g                 v <- b2 v + (1 - b2) d^2 g^2
    n <- b3 n + d / d0 rate <g, x0 - x>      b3 = sqrt(b2)
    s <- b3 s + d / d0 rate g                safeguard_warmup: d in place of rate
    d <- max(d, min(d_coef n / |s|_1, growth_rate d))
    x <- x - rate (m / (sqrt(v) + eps d) + weight_decay x)      the new d
    The paper has (1 - b3) in n and s, which leaves n / |s| alone.
    """
    b3 = np.sqrt(b2) if b3 is None else b3
    x0 = x = wide(params)
    decay, d, n, visited = decay_of(decay_where, weight_decay, x), d0, 0.0, []
    m, v, s = zeros(x), zeros(squares(x)), zeros(x)
    for t, g in enumerate(map(wide, grads), 1):
        rate = d * rate_at(learning_rate, t - 1) * debias(b1, b2, t, bias_correction)
        m = mixed(b1, m, scaled(d, g))
        v = mixed(b2, v, squares(scaled(d, g)))
        n = b3 * n + d / d0 * rate * inner(g, combine(x0, -1, x))
        weight = d if safeguard_warmup else rate
        s = combine(scaled(b3, s), d / d0 * weight, g)
        d = max(d, min(d_coef * n / l1(s), growth_rate * d)) if l1(s) > 0 else d
        x = {
            path: a - rate * (m[path] / (np.sqrt(v[path]) + d * eps) + decay[path] * a)
            for path, a in x.items()
        }
        visited.append(x)
    return visited


def dadapt_sgd(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1.0,
    momentum=0.0,
    d0=1e-6,
    growth_rate=np.inf,
) -> Steps:
    """Defazio and Mishchenko 2023, Algorithm 4, arXiv:2301.07733, and its code.

    rate = d learning_rate / |g_1|
    s <- s + rate g                          q <- q + rate^2 |g|^2
    d <- max(d, min((|s|^2 - q) / |s|, growth_rate d))
    x <- momentum x + (1 - momentum) (x0 - s)
    """
    x0 = x = wide(params)
    d, q, s, first, visited = d0, 0.0, zeros(x), None, []
    for t, g in enumerate(map(wide, grads)):
        first = np.sqrt(squared(g)) if first is None else first
        rate = d * rate_at(learning_rate, t) / first
        s, q = combine(s, rate, g), q + rate**2 * squared(g)
        d = max(d, min((squared(s) - q) / np.sqrt(squared(s)), growth_rate * d))
        x = mixed(momentum, x, combine(x0, -1, s))
        visited.append(x)
    return visited


def dadapt_adam(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1.0,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    d0=1e-6,
    growth_rate=np.inf,
    bias_correction=True,
    weight_decay=0.0,
    decay_where=None,
) -> Steps:
    """Defazio and Mishchenko 2023, Algorithm 5, arXiv:2301.07733; c = sqrt(b2).

    rate = d learning_rate sqrt(1 - b2^t) / (1 - b1^t), the last two: bias_correction
    n <- c n + (1 - c) rate <g, s / (sqrt(v) + eps)>            the old s and v
    m <- b1 m + (1 - b1) rate g              v <- b2 v + (1 - b2) g^2
    s <- c s + (1 - c) rate g
    d <- max(d, min(n / ((1 - c) |s|_1), growth_rate d))
    x <- x - m / (sqrt(v) + eps) - rate weight_decay x
    """
    c, x = np.sqrt(b2), wide(params)
    decay, d, n, visited = decay_of(decay_where, weight_decay, x), d0, 0.0, []
    m, v, s = zeros(x), zeros(squares(x)), zeros(x)
    for t, g in enumerate(map(wide, grads), 1):
        rate = d * rate_at(learning_rate, t - 1) * debias(b1, b2, t, bias_correction)
        over = {path: a / (np.sqrt(v[path]) + eps) for path, a in s.items()}
        n = c * n + (1 - c) * rate * inner(g, over)
        m = mixed(b1, m, scaled(rate, g))
        v = mixed(b2, v, squares(g))
        s = mixed(c, s, scaled(rate, g))
        if l1(s) > 0:
            d = max(d, min(n / ((1 - c) * l1(s)), growth_rate * d))
        x = {
            path: a - m[path] / (np.sqrt(v[path]) + eps) - rate * decay[path] * a
            for path, a in x.items()
        }
        visited.append(x)
    return visited


def dadapt_lion(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1.0,
    b1=0.9,
    b2=0.99,
    d0=1e-6,
) -> Steps:
    """The authors' code of arXiv:2301.07733, which has no Lion; c = sqrt(b2).

    rate = d learning_rate
    u = sign(b1 m + (1 - b1) g)              x <- x - rate u
    m <- b2 m + (1 - b2) rate g
    n <- c n + (1 - c) rate <u, s>           s <- c s + (1 - c) rate u
    d <- max(d, n / ((1 - c) |s|_1))         the new s
    Its newest version does not keep n, so that n is that of this step alone.
    """
    c, x = np.sqrt(b2), wide(params)
    d, n, m, s, visited = d0, 0.0, zeros(x), zeros(x), []
    for t, g in enumerate(map(wide, grads)):
        rate = d * rate_at(learning_rate, t)
        u = {path: np.sign(a) for path, a in mixed(b1, m, g).items()}
        x = combine(x, -rate, u)
        m = mixed(b2, m, scaled(rate, g))
        n = c * n + (1 - c) * rate * inner(u, s)
        s = mixed(c, s, scaled(rate, u))
        d = max(d, n / ((1 - c) * l1(s))) if l1(s) > 0 else d
        visited.append(x)
    return visited


def dog(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1.0,
    reps_rel=1e-6,
    eps=1e-8,
    by_layer=False,
    init_distance=None,
    init_rate=None,
) -> Steps:
    """Ivgi et al. 2023, equation DoG, arXiv:2302.12022; by_layer: L-DoG, section 3.3.

    r <- max(r, |x - x0|), r = reps_rel (1 + |x0|) at first, or init_distance
    q <- q + |g|^2
    x <- x - learning_rate r / sqrt(q + eps) g;  init_rate g in the first step
    With init_rate, r = 0 at first: optax.
    """
    if by_layer:
        settings = {"learning_rate": learning_rate, "reps_rel": reps_rel, "eps": eps}
        settings |= {"init_distance": init_distance, "init_rate": init_rate}

        def leaf(path, x, gs):
            tree = dog({path: x}, [{path: g} for g in gs], **settings)
            return [values[path] for values in tree]

        return each(params, grads, leaf)
    x0 = x = wide(params)
    r = reps_rel * (1 + np.sqrt(squared(x0)))
    r = 0.0 if init_rate is not None else r if init_distance is None else init_distance
    q, visited = 0.0, []
    for t, g in enumerate(map(wide, grads)):
        r = max(r, np.sqrt(squared(combine(x, -1, x0))))
        q = q + squared(g)
        rate = r / np.sqrt(q + eps)
        rate = init_rate if t == 0 and init_rate is not None else rate
        x = combine(x, -rate_at(learning_rate, t) * rate, g)
        visited.append(x)
    return visited


def dowg(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1.0,
    init_distance_sq=None,
    eps=1e-4,
) -> Steps:
    """Khaled et al. 2023, Algorithm 1, arXiv:2305.16284.

    r2 <- max(r2, |x - x0|^2), init_distance_sq at first, which is eps if not given
    q <- q + r2 |g|^2
    x <- x - learning_rate r2 / (sqrt(q) + eps) g
    """
    x0 = x = wide(params)
    r2, q, visited = eps if init_distance_sq is None else init_distance_sq, 0.0, []
    for t, g in enumerate(map(wide, grads)):
        r2 = max(r2, squared(combine(x, -1, x0)))
        q = q + r2 * squared(g)
        x = combine(x, -rate_at(learning_rate, t) * r2 / (np.sqrt(q) + eps), g)
        visited.append(x)
    return visited


def momo(
    params: Params,
    grads: Steps,
    values,
    *,
    learning_rate=1.0,
    b1=0.9,
    lower_bound=0.0,
    adapt_lower_bound=False,
    weight_decay=0.0,
) -> Steps:
    """Schaipp et al. 2023, Algorithms 1 and 4, arXiv:2305.07583.

    f, c, m: running means of the loss, <g, x> and g, by b1; the first ones at first
    gap = max((1 + learning_rate weight_decay) (f - low - c) + <m, x>, 0)
    tau = min(learning_rate, gap / |m|^2)
    x <- x - tau m - shrink x, shrink = lr weight_decay / (1 + lr weight_decay)
    adapt_lower_bound, see `lifted`:
        low <- max(f + <m, x> - c - tau |m|^2 / 2, lower_bound) after the step
    The paper and its code shrink x - tau m as a whole; this is optax.
    """
    x, low, visited, f, c = wide(params), lower_bound, [], 0.0, 0.0
    m = zeros(x)
    for t, (g, value) in enumerate(zip(map(wide, grads), values, strict=True)):
        rate = rate_at(learning_rate, t)
        b = b1 if t > 0 else 0.0
        f, c = b * f + (1 - b) * value, b * c + (1 - b) * inner(g, x)
        m = mixed(b, m, g)
        more, along, length = 1 + rate * weight_decay, inner(m, x), squared(m)
        at = low
        if adapt_lower_bound:
            at = lifted(more * (f - c) + along, more, low, lower_bound)
        gap = max(more * (f - at - c) + along, 0.0)
        tau = min(rate, gap / length) if length > 0 else 0.0
        shrink = rate * weight_decay / more
        if adapt_lower_bound:
            low = max(f + along - c - tau * length / 2, lower_bound)
        x = combine(scaled(1 - shrink, x), -tau, m)
        visited.append(x)
    return visited


def lifted(cap, more, low, lower_bound):
    """A lower bound that the model of the loss does not contradict."""
    return max(cap / (2 * more), lower_bound) if cap < more * low else low


def momo_adam(
    params: Params,
    grads: Steps,
    values,
    *,
    learning_rate=1e-2,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    lower_bound=0.0,
    adapt_lower_bound=False,
    weight_decay=0.0,
) -> Steps:
    """Schaipp et al. 2023, Algorithms 2 and 5, arXiv:2305.07583; as `momo`, and

    f, c, m are 0 at first                   k = 1 - b1^t
    v <- b2 v + (1 - b2) g^2                 D = eps + sqrt(v / (1 - b2^t))
    |m|^2 = <m, m / D>
    gap = max((1 + learning_rate weight_decay) (f - k low - c) + <m, x>, 0)
    tau = min(learning_rate / k, gap / |m|^2)
    x <- x - tau m / D - shrink x
    low <- max((f + <m, x> - c - tau |m|^2 / 2) / k, lower_bound)
    """
    x, low, visited, f, c = wide(params), lower_bound, [], 0.0, 0.0
    m, v = zeros(x), zeros(squares(x))
    for t, (g, value) in enumerate(zip(map(wide, grads), values, strict=True), 1):
        rate, k = rate_at(learning_rate, t - 1), 1 - b1**t
        f = b1 * f + (1 - b1) * value
        c = b1 * c + (1 - b1) * inner(g, x)
        m, v = mixed(b1, m, g), mixed(b2, v, squares(g))
        u = {p: a / (eps + np.sqrt(v[p] / (1 - b2**t))) for p, a in m.items()}
        more, along, length = 1 + rate * weight_decay, inner(m, x), inner(m, u)
        at = low
        if adapt_lower_bound:
            at = lifted(more * (f - c) + along, more * k, low, lower_bound)
        gap = max(more * (f - k * at - c) + along, 0.0)
        tau = min(rate / k, gap / length) if length > 0 else 0.0
        if adapt_lower_bound:
            low = max((f + along - c - tau * length / 2) / k, lower_bound)
        x = combine(scaled(1 - rate * weight_decay / more, x), -tau, u)
        visited.append(x)
    return visited


def cocob(
    params: Params, grads: Steps, *, learning_rate=1.0, alpha=100.0, eps=1e-8
) -> Steps:
    """Orabona and Tommasi 2017, Algorithm 2, arXiv:1705.07795, for each entry.

    g <- learning_rate g, which is not in the paper
    l <- max(l, |g|), eps at first           a <- a + |g|
    r <- max(r - g (x - x0), 0)              c <- c - g
    x <- x0 + c / (l max(a + l, alpha l)) (l + r)
    """

    def leaf(path, x, gs):
        x0, c, a, r, top = x, 0 * x, np.zeros(x.shape), np.zeros(x.shape), eps
        for t, g in enumerate(gs):
            g = rate_at(learning_rate, t) * g
            top, a = np.maximum(top, np.abs(g)), a + np.abs(g)
            r = np.maximum(r - (np.conj(g) * (x - x0)).real, 0)
            c = c - g
            x = x0 + c / (top * np.maximum(a + top, alpha * top)) * (top + r)
            yield x

    return each(params, grads, leaf)


ORACLES = {
    "Prodigy": prodigy,
    "DAdaptSGD": dadapt_sgd,
    "DAdaptAdam": dadapt_adam,
    "DAdaptLion": dadapt_lion,
    "DoG": dog,
    "DoWG": dowg,
    "MoMo": momo,
    "MoMoAdam": momo_adam,
    "COCOB": cocob,
}
