"""Rules that divide by an estimate of the Hessian's diagonal, which is given here.

`estimates` holds a dict from path to array for each step, also for those that do not
look at it. They take more than gradients, so they stand in no joint table.
"""

import numpy as np

from oracles.leaves import Params, Steps, abs_sq, each, wide


def adahessian(
    params: Params,
    grads: Steps,
    estimates: Steps,
    *,
    learning_rate=0.15,
    b1=0.9,
    b2=0.999,
    eps=1e-4,
    hessian_power=1.0,
    every=1,
) -> Steps:
    """Yao et al. 2021, Algorithm 1, arXiv:2006.00719, without spatial averaging.

    m <- b1 m + (1 - b1) g
    v <- b2 v + (1 - b2) |D|^2  at t = 1, 1 + every, ...: n times so far
    x <- x - learning_rate m / (1 - b1^t)
             / (sqrt(v / (1 - b2^n))^hessian_power + eps)

    The paper has no eps; it is where the authors' code has it, whose every is 1.
    """
    estimates = [wide(d) for d in estimates]

    def leaf(path, x, gs):
        m, v, n = 0 * x, np.zeros(x.shape), 0
        for t, g in enumerate(gs, 1):
            m = b1 * m + (1 - b1) * g
            if (t - 1) % every == 0:
                v, n = b2 * v + (1 - b2) * abs_sq(estimates[t - 1][path]), n + 1
            root = np.sqrt(v / (1 - b2**n)) ** hessian_power
            x = x - learning_rate * m / (1 - b1**t) / (root + eps)
            yield x

    return each(params, grads, leaf)


def sophia(
    params: Params,
    grads: Steps,
    estimates: Steps,
    *,
    learning_rate=1e-3,
    b1=0.965,
    b2=0.99,
    gamma=0.01,
    eps=1e-12,
    clip=1.0,
    every=10,
    as_optax=False,
) -> Steps:
    """Liu et al. 2023, Algorithm 3, arXiv:2305.14342; clip is 1 in the paper.

    m <- b1 m + (1 - b1) g
    h <- b2 h + (1 - b2) estimate  at t = 1, 1 + every, ...
    u = m / max(gamma h, eps),  made no larger than clip; as it is with clip = None
    x <- x - learning_rate u

    `as_optax`: u of m / (1 - b1^t), and of h before it is renewed, 0 at the first step.
    The authors' code divides the step of Sophia-H by 1 - b1^t after the clipping and
    adds eps to gamma max(h, 0); its Sophia-G has no correction, and gamma and the
    bound inverted.
    """
    estimates = [wide(d) for d in estimates]

    def leaf(path, x, gs):
        m, h = 0 * x, np.zeros(x.shape)
        for t, g in enumerate(gs, 1):
            m, old = b1 * m + (1 - b1) * g, h
            if (t - 1) % every == 0:
                h = b2 * h + (1 - b2) * estimates[t - 1][path]
            numerator, below = (m / (1 - b1**t), old) if as_optax else (m, h)
            u = numerator / np.maximum(gamma * below, eps)
            if clip is not None:
                u = np.clip(u, -clip, clip)
            x = x - learning_rate * u
            yield x

    return each(params, grads, leaf)


ORACLES = {"AdaHessian": adahessian, "Sophia": sophia}
