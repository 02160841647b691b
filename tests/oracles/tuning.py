"""Tuners around a rule, of which only the steps are given: they stand in no table."""

from itertools import pairwise

import numpy as np
from scipy.special import erfi

from oracles.adam import adam, follow
from oracles.descent import sgd
from oracles.learning_rate_free import scaled, zeros
from oracles.leaves import Params, Steps, wide
from oracles.trees import combine, inner, squared


def sgd_steps(grads: Steps, **settings) -> Steps:
    """Of SGD, which looks at no parameters here."""
    return steps_of(lambda start: sgd(start, grads, **settings), grads)


def adam_steps(grads: Steps, **settings) -> Steps:
    return steps_of(lambda start: follow(adam)(start, grads, **settings), grads)


def steps_of(oracle, grads: Steps) -> Steps:
    """The steps of an oracle that does not look at the parameters, from 0."""
    start = zeros(wide(grads[0]))
    visited = [start, *oracle(start)]
    return [combine(a, -1, b) for a, b in pairwise(visited)]


def mechanic(
    params: Params,
    grads: Steps,
    *,
    steps: Steps,
    decay=0.01,
    eps=1e-8,
    s_init=1e-6,
    betas=6,
) -> Steps:
    """Cutkosky et al. 2023, Algorithm 1, arXiv:2306.00144, around given steps.

    b = 1 - 0.1^k, k = 1 ... betas, each with an s, r, q, top; S the sum of the s
    D = (x0 - x) / (S + eps)
    h = <g + decay S |g| / (|x| + eps) x, D>
    r <- b r + s clip(h, -top, top)          the old s and top
    top <- max(b top, |h| + eps)             q <- b^2 q + h^2
    s <- (s_init / betas top + max(r, 0)) / (sqrt(q) + eps)
    x <- x0 - S (D + step),  S of the new s
    s_init for each s at first, as in optax; the paper has s_init in all, and h by D
    without weight decay in the first lines.
    """
    b = 1 - 0.1 ** np.arange(1.0, betas + 1)
    s, r, q, top = s_init * np.ones(betas), *np.zeros((3, betas))
    x0 = x = wide(params)
    visited = []
    for g, step in zip(map(wide, grads), steps, strict=True):
        total = np.sum(s)
        d = scaled(1 / (total + eps), combine(x0, -1, x))
        shrink = decay * total * np.sqrt(squared(g)) / (np.sqrt(squared(x)) + eps)
        h = inner(combine(g, shrink, x), d)
        r = b * r + s * np.clip(h, -top, top)
        top, q = np.maximum(b * top, np.abs(h) + eps), b**2 * q + h**2
        s = (s_init / betas * top + np.maximum(r, 0)) / (np.sqrt(q) + eps)
        x = combine(x0, -np.sum(s), combine(d, 1, step))
        visited.append(x)
    return visited


def trac(
    params: Params,
    grads: Steps,
    *,
    steps: Steps,
    betas=(0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999),
    s_init=1e-8,
    eps=1e-8,
    sigma_init=1e-8,
) -> Steps:
    """Muppidi et al. 2024, Algorithms 1 and 2, arXiv:2405.16642, around given steps.

    D = (x - x0) / (S + eps),  S = 0 at first
    h = <g, D>,  for each b of `betas`
    q <- b^2 q + h^2                         sigma <- b sigma - h
    s = s_init / erfi(1 / sqrt(2)) erfi(sigma / (sqrt(2 q) + eps))
    S <- the sum of the s
    x <- x0 + max(S, 0) (D - step)
    sigma is 1e-8 at first in the code, 0 in the paper; the code's x0 - x, in JAX, and a
    sigma + h are the same.
    """
    b = np.array(betas)
    q, sigma, total = np.zeros(b.shape), sigma_init * np.ones(b.shape), 0.0
    x0 = x = wide(params)
    visited = []
    for g, step in zip(map(wide, grads), steps, strict=True):
        d = scaled(1 / (total + eps), combine(x, -1, x0))
        h = inner(g, d)
        q, sigma = b**2 * q + h**2, b * sigma - h
        s = s_init / erfi(np.sqrt(0.5)) * erfi(sigma / (np.sqrt(2 * q) + eps))
        total = np.sum(s)
        x = combine(x0, max(total, 0.0), combine(d, -1, step))
        visited.append(x)
    return visited
