"""Rules that follow the gradient, or only its sign."""

import numpy as np

from oracles.leaves import Params, Steps, chosen, each


def sgd(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-2,
    momentum=None,
    dampening=0.0,
    nesterov=False,
    weight_decay=0.0,
    maximize=False,
) -> Steps:
    """torch.optim.SGD, the algorithm box of its page.

    g <- -gradient if maximize else gradient
    g <- g + weight_decay x
    buf <- g at the first step, then momentum buf + (1 - dampening) g
    g <- g + momentum buf if nesterov else buf
    x <- x - learning_rate g
    """

    def leaf(path, x, gs):
        buf = None
        for g in gs:
            if maximize:
                g = -g
            g = g + weight_decay * x
            if momentum is not None:
                buf = g if buf is None else momentum * buf + (1 - dampening) * g
                g = g + momentum * buf if nesterov else buf
            x = x - learning_rate * g
            yield x

    return each(params, grads, leaf)


def momentum(
    params: Params, grads: Steps, *, learning_rate=1e-2, momentum=0.9, nesterov=False
) -> Steps:
    """Sutskever et al. 2013, eq. 1 to 4: the learning rate is inside of the velocity.

    v <- momentum v - learning_rate gradient at x
    x <- x + v, the gradient being given at x                   classical
    x <- x - momentum v_before + (1 + momentum) v               Nesterov: x is the point
                                                                looked ahead to
    """

    def leaf(path, x, gs):
        v = 0 * x
        for g in gs:
            before, v = v, momentum * v - learning_rate * g
            x = x + ((1 + momentum) * v - momentum * before if nesterov else v)
            yield x

    return each(params, grads, leaf)


def asgd(params: Params, grads: Steps, **settings) -> Steps:
    return [x for x, _ in zip(*averaged(params, grads, **settings), strict=True)]


def averaged(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-2,
    lambd=1e-4,
    alpha=0.75,
    t0=1e6,
    weight_decay=0.0,
) -> tuple[Steps, Steps]:
    """torch.optim.ASGD, after Polyak and Juditsky 1992: parameters, and averages.

    eta_t = learning_rate / (1 + lambd learning_rate (t - 1))^alpha
    x <- (1 - lambd eta_t) x - eta_t (g + weight_decay x)
    ax <- ax + (x - ax) mu_t,   mu_1 = 1,  mu_t = 1 / max(1, t - 1 - t0)
    """

    def leaf(path, x, gs):
        ax = x
        for t, g in enumerate(gs, 1):
            eta = learning_rate / (1 + lambd * learning_rate * (t - 1)) ** alpha
            mu = 1 / max(1, t - 1 - t0)
            x = (1 - lambd * eta) * x - eta * (g + weight_decay * x)
            ax = ax + (x - ax) * mu
            yield x, ax

    both = each(params, grads, leaf)
    return tuple([{p: pair[i] for p, pair in s.items()} for s in both] for i in (0, 1))


def noisy_sgd(
    params: Params, grads: Steps, *, learning_rate=1e-2, eta=0.0, gamma=0.55, seed=0
) -> Steps:
    """Neelakantan et al. 2015, arXiv:1511.06807, as far as it can be foretold: eta = 0.

    x <- x - learning_rate (g + noise of variance eta / t^gamma)
    """
    assert eta == 0, "an oracle knows no noise"
    return sgd(params, grads, learning_rate=learning_rate)


def optimistic_gradient_descent(
    params: Params, grads: Steps, *, learning_rate=1e-2, alpha=1.0, beta=1.0
) -> Steps:
    """Mokhtari et al. 2020, eq. 9, arXiv:1901.08511; the first step as in optax.

    x <- x - learning_rate ((alpha + beta) g - beta g_before),  g_before = g at first
    """

    def leaf(path, x, gs):
        for g, before in zip(gs, [gs[0], *gs], strict=False):
            x = x - learning_rate * ((alpha + beta) * g - beta * before)
            yield x

    return each(params, grads, leaf)


def sign_sgd(params: Params, grads: Steps, *, learning_rate=1e-3) -> Steps:
    """Bernstein et al. 2018, arXiv:1802.04434: x <- x - learning_rate sign(g)."""
    return signum(params, grads, learning_rate=learning_rate, momentum=0.0)


def signum(params: Params, grads: Steps, *, learning_rate=1e-3, momentum=0.9) -> Steps:
    """Bernstein et al. 2018, Algorithm 2, arXiv:1802.04434.

    m <- momentum m + (1 - momentum) g
    x <- x - learning_rate sign(m)
    """

    def leaf(path, x, gs):
        m = 0 * x
        for g in gs:
            m = momentum * m + (1 - momentum) * g
            x = x - learning_rate * np.sign(m)
            yield x

    return each(params, grads, leaf)


def lion(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-4,
    b1=0.9,
    b2=0.99,
    weight_decay=1e-3,
    decay_where=None,
) -> Steps:
    """Chen et al. 2023, Algorithm 2, arXiv:2302.06675.

    c = b1 m + (1 - b1) g
    m <- b2 m + (1 - b2) g
    x <- x - learning_rate (sign(c) + weight_decay x)
    """

    def leaf(path, x, gs):
        decay = weight_decay if chosen(decay_where, path, x) else 0.0
        m = 0 * x
        for g in gs:
            c = b1 * m + (1 - b1) * g
            m = b2 * m + (1 - b2) * g
            x = x - learning_rate * (np.sign(c) + decay * x)
            yield x

    return each(params, grads, leaf)


def rprop(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-2,
    eta_minus=0.5,
    eta_plus=1.2,
    min_step_size=1e-6,
    max_step_size=50.0,
) -> Steps:
    """torch.optim.Rprop: Riedmiller and Braun 1993 without going back.

    size <- learning_rate at first, and times eta_plus where g g_before > 0, eta_minus
            where it is < 0, kept between min_step_size and max_step_size
    g <- 0 where g g_before < 0, also as the next g_before
    x <- x - sign(g) size
    """

    def leaf(path, x, gs):
        before, size = 0 * x, np.full(x.shape, learning_rate)
        for g in gs:
            turn = np.sign(g * before)
            factor = np.where(turn > 0, eta_plus, np.where(turn < 0, eta_minus, 1.0))
            size = np.clip(size * factor, min_step_size, max_step_size)
            before = np.where(turn < 0, 0, g)
            x = x - np.sign(before) * size
            yield x

    return each(params, grads, leaf)


ORACLES = {
    "SGD": sgd,
    "Momentum": momentum,
    "ASGD": asgd,
    "NoisySGD": noisy_sgd,
    "OptimisticGradientDescent": optimistic_gradient_descent,
    "SignSGD": sign_sgd,
    "Signum": signum,
    "Lion": lion,
    "Rprop": rprop,
}
