"""Rules that measure each array as a whole, and step in proportion to its norm."""

import numpy as np

from oracles.adam import directions
from oracles.leaves import Params, Steps, chosen, each, norm


def fromage(
    params: Params, grads: Steps, *, learning_rate=1e-2, min_norm=1e-6
) -> Steps:
    """Bernstein et al. 2020, Algorithm 1, arXiv:2002.03432; norms from below as optax.

    x <- (x - learning_rate g max(|x|, min_norm) / max(|g|, min_norm))
         / sqrt(1 + learning_rate^2)
    """

    def leaf(path, x, gs):
        for g in gs:
            ratio = max(norm(x), min_norm) / max(norm(g), min_norm)
            x = (x - learning_rate * ratio * g) / np.sqrt(1 + learning_rate**2)
            yield x

    return each(params, grads, leaf)


def lars(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-1,
    momentum=0.9,
    nesterov=False,
    weight_decay=0.0,
    trust_coefficient=1e-3,
    eps=0.0,
    separate_norms=False,
    decay_where=None,
    trust_where=None,
) -> Steps:
    """You et al. 2017, Algorithm 1, arXiv:1708.03888; else as in optax.

    d = g + weight_decay x
    ratio = trust_coefficient |x| / (|d| + eps), 1 where a norm is 0      optax
    ratio = trust_coefficient |x| / (|g| + weight_decay |x| + eps)        separate_norms
    v <- momentum v + learning_rate ratio d
    x <- x - v, or with nesterov x - (learning_rate ratio d + momentum v)
    """

    def leaf(path, x, gs):
        decay = weight_decay if chosen(decay_where, path, x) else 0.0
        trusted = chosen(trust_where, path, x)
        v = 0 * x
        for g in gs:
            d = g + decay * x
            size = norm(g) + decay * norm(x) if separate_norms else norm(d)
            if trusted and norm(x) > 0 and size > 0:
                d = trust_coefficient * norm(x) / (size + eps) * d
            d = learning_rate * d
            if momentum is not None:
                v = momentum * v + d
                d = d + momentum * v if nesterov else v
            x = x - d
            yield x

    return each(params, grads, leaf)


def lamb(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    eps_root=0.0,
    weight_decay=0.0,
    decay_where=None,
    trust_where=None,
) -> Steps:
    """You et al. 2020, Algorithm 2, arXiv:1904.00962, phi the identity.

    u = adam_direction + weight_decay x
    x <- x - learning_rate u |x| / |u|,  ratio 1 where a norm is 0
    """

    def leaf(path, x, gs):
        decay = weight_decay if chosen(decay_where, path, x) else 0.0
        trusted = chosen(trust_where, path, x)
        for u in directions(gs, b1=b1, b2=b2, eps=eps, eps_root=eps_root):
            u = u + decay * x
            if trusted and norm(x) > 0 and norm(u) > 0:
                u = norm(x) / norm(u) * u
            x = x - learning_rate * u
            yield x

    return each(params, grads, leaf)


def novograd(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.25,
    eps=1e-6,
    eps_root=0.0,
    weight_decay=0.0,
) -> Steps:
    """Ginsburg et al. 2019, Algorithm 1, arXiv:1905.11286.

    v <- |g|^2 of the whole array at first, then b2 v + (1 - b2) |g|^2
    m <- b1 m + g / (sqrt(v + eps_root) + eps) + weight_decay x
    x <- x - learning_rate m
    """

    def leaf(path, x, gs):
        m, v = 0 * x, norm(gs[0]) ** 2
        for g in gs:
            v = b2 * v + (1 - b2) * norm(g) ** 2
            m = b1 * m + g / (np.sqrt(v + eps_root) + eps) + weight_decay * x
            x = x - learning_rate * m
            yield x

    return each(params, grads, leaf)


ORACLES = {"Fromage": fromage, "LARS": lars, "LAMB": lamb, "NovoGrad": novograd}
