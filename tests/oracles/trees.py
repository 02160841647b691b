"""Rules that look at all arrays together, or at values of the loss; transforms."""

from collections import deque

import numpy as np

from oracles.leaves import Params, Steps, abs_sq, chosen, each, wide


def squared(tree: Params):
    return sum(np.sum(abs_sq(x)) for x in tree.values())


def inner(a: Params, b: Params):
    return sum(np.sum(np.conj(a[path]) * b[path]).real for path in a)


def combine(a: Params, factor, b: Params) -> Params:
    """a + factor b"""
    return {path: a[path] + factor * b[path] for path in a}


def reduce_on_plateau(
    params: Params,
    grads: Steps,
    values,
    *,
    factor=0.1,
    patience=10,
    rtol=1e-4,
    atol=0.0,
    cooldown=0,
    min_scale=0.0,
    accumulation=1,
) -> Steps:
    """torch's ReduceLROnPlateau, patience one more, acting at once; steps scale * g."""
    x, visited = wide(params), []
    scale, best, bad, rest, seen = 1.0, np.inf, 0, 0, []
    for g, value in zip(map(wide, grads), values, strict=True):
        seen.append(value)
        if len(seen) >= accumulation:
            mean, seen = np.mean(seen), []
            margin = 0 if np.isinf(best) else rtol * abs(best) + atol
            improved = mean < best - margin
            best = mean if improved else best
            bad = 0 if improved or rest > 0 else bad + 1
            rest = max(rest - 1, 0)
            if bad >= patience:
                scale, bad, rest = max(factor * scale, min_scale), 0, cooldown
        x = combine(x, -scale, g)
        visited.append(x)
    return visited


def polyak_sgd(
    params: Params,
    grads: Steps,
    values,
    *,
    max_learning_rate=1.0,
    scaling=1.0,
    f_min=0.0,
    eps=0.0,
    variant="sps",
) -> Steps:
    """Loizou et al. 2021, eq. SPS_max, arXiv:2002.10542; the options are optax's.

    d = scaling g                            gap = value - f_min; "sps+": max(gap, 0)
    x <- x - min(gap / (|d|^2 + eps), max_learning_rate) d
    """
    x, visited = wide(params), []
    for g, value in zip(map(wide, grads), values, strict=True):
        gap = max(value - f_min, 0) if variant == "sps+" else value - f_min
        rate = min(gap / (scaling**2 * squared(g) + eps), max_learning_rate)
        x = combine(x, -rate * scaling, g)
        visited.append(x)
    return visited


def lbfgs(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1.0,
    memory=10,
    line_search=None,
    scale_initial=True,
    keep_negative=False,
) -> Steps:
    """Nocedal and Wright 2006, Algorithms 7.4 and 7.5, with a constant step length.

    The last `memory` pairs s = x - x_before, y = g - g_before, those with s.y > 0, or
    with `keep_negative` all, as in optax.
    newest to oldest:  a = s.q / s.y,  q <- q - a y,  from q = g
    q <- (s.y / y.y of the newest pair; without one min(1, 1 / |g|)) q
    oldest to newest:  q <- q + (a - y.q / s.y) s
    x <- x - learning_rate q
    """
    assert line_search is None, "an oracle knows no loss"
    x, visited, pairs, before = wide(params), [], deque(maxlen=memory), None
    for g in map(wide, grads):
        if before is not None:
            s, y = combine(x, -1, before[0]), combine(g, -1, before[1])
            if inner(s, y) > 0 or keep_negative:
                pairs.append((s, y))
        q, shares, scale = g, [], min(1, 1 / np.sqrt(squared(g)))
        if pairs:
            s, y = pairs[-1]
            scale = inner(s, y) / squared(y)
        for s, y in reversed(pairs):
            shares.append(inner(s, q) / inner(s, y))
            q = combine(q, -shares[-1], y)
        q = {path: scale * array for path, array in q.items()} if scale_initial else q
        for s, y in pairs:
            q = combine(q, shares.pop() - inner(y, q) / inner(s, y), s)
        before = x, g
        x = combine(x, -learning_rate, q)
        visited.append(x)
    return visited


def weight_decay(
    params: Params, grads: Steps, *, weight_decay=1e-4, where=None
) -> Steps:
    """x <- x - (g + weight_decay x): the gradient of an L2 penalty of half of it."""

    def leaf(path, x, gs):
        decay = weight_decay if chosen(where, path, x) else 0.0
        for g in gs:
            x = x - (g + decay * x)
            yield x

    return each(params, grads, leaf)


def clip_by_global_norm(params: Params, grads: Steps, *, max_norm=1.0) -> Steps:
    """Pascanu et al. 2013, Algorithm 1, arXiv:1211.5063, over all arrays together.

    norm = sqrt(sum of |g|^2)
    g <- g max_norm / norm if norm >= max_norm else g
    x <- x - g
    """
    x, visited = wide(params), []
    for g in map(wide, grads):
        norm = np.sqrt(squared(g))
        x = combine(x, -max_norm / norm if norm >= max_norm else -1.0, g)
        visited.append(x)
    return visited


def identity(params: Params, grads: Steps) -> Steps:
    """x <- x - g."""

    def leaf(path, x, gs):
        for g in gs:
            x = x - g
            yield x

    return each(params, grads, leaf)


ORACLES = {
    "PolyakSGD": polyak_sgd,
    "ReduceOnPlateau": reduce_on_plateau,
    "LBFGS": lbfgs,
    "WeightDecay": weight_decay,
    "ClipByGlobalNorm": clip_by_global_norm,
    "Identity": identity,
}
