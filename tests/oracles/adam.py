"""Adam and its kin: two running moments, one to follow and one to divide by.

Their steps do not depend on the parameters, so each is a generator of steps from the
gradients of one array; `follow` and `decayed` make oracles of it.
"""

import numpy as np

from oracles.leaves import Params, Steps, abs_sq, chosen, each


def follow(steps):
    """x <- x - step"""

    def oracle(params: Params, grads: Steps, **settings) -> Steps:
        def leaf(path, x, gs):
            for step in steps(gs, **settings):
                x = x - step
                yield x

        return each(params, grads, leaf)

    return oracle


def decayed(steps):
    """Loshchilov and Hutter 2019, Algorithm 2, arXiv:1711.05101, around any steps.

    x <- x - step - learning_rate weight_decay x          couple: torch, optax
    x <- x - step - weight_decay x                        else: the paper's lambda

    `decay_where` names the arrays that decay, or is a function of (path, array).
    """

    def oracle(
        params: Params,
        grads: Steps,
        *,
        learning_rate=1e-3,
        weight_decay=1e-4,
        couple=True,
        decay_where=None,
        **settings,
    ) -> Steps:
        def leaf(path, x, gs):
            decay = weight_decay if chosen(decay_where, path, x) else 0.0
            if couple:
                decay = learning_rate * decay
            for step in steps(gs, learning_rate=learning_rate, **settings):
                x = x - step - decay * x
                yield x

        return each(params, grads, leaf)

    return oracle


def adam(gs, *, learning_rate=1e-3, **settings):
    """Kingma and Ba 2015, Algorithm 1, arXiv:1412.6980; `eps_root` as in optax.

    m <- b1 m + (1 - b1) g                   v <- b2 v + (1 - b2) |g|^2
    m_hat = m / (1 - b1^t)                   v_hat = v / (1 - b2^t)
    step = learning_rate m_hat / (sqrt(v_hat + eps_root) + eps)
    """
    for u in directions(gs, **settings):
        yield learning_rate * u


def directions(gs, *, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, nesterov=False):
    """Adam's steps per unit of learning rate; with `nesterov` those of NAdam."""
    for t, (g, m, v) in enumerate(moments(gs, b1, b2), 1):
        m_hat = corrected(m, g, b1, t, nesterov)
        yield m_hat / (np.sqrt(v / (1 - b2**t) + eps_root) + eps)


def moments(gs, b1, b2):
    m, v = np.zeros_like(gs[0]), np.zeros(gs[0].shape)
    for g in gs:
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * abs_sq(g)
        yield g, m, v


def corrected(m, g, b1, t, nesterov=False):
    """The first moment without its bias; with `nesterov` as Dozat does, b1 constant."""
    if nesterov:
        return b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
    return m / (1 - b1**t)


def nadam(
    gs,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    eps_root=0.0,
    momentum_decay=None,
):
    """Dozat 2016, "Incorporating Nesterov momentum into Adam"; torch.optim.NAdam.

    mu_t = b1 (1 - 0.96^(t momentum_decay) / 2); b1 without a momentum_decay, as optax
    m_bar = mu_(t+1) m / (1 - mu_1 ... mu_(t+1)) + (1 - mu_t) g / (1 - mu_1 ... mu_t)
    step = learning_rate m_bar / (sqrt(v / (1 - b2^t) + eps_root) + eps)
    """

    def mu(t):
        if momentum_decay is None:
            return b1
        return b1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))

    product = 1.0
    for t, (g, m, v) in enumerate(moments(gs, b1, b2), 1):
        product = product * mu(t)
        m_bar = mu(t + 1) * m / (1 - product * mu(t + 1))
        m_bar = m_bar + (1 - mu(t)) * g / (1 - product)
        yield learning_rate * m_bar / (np.sqrt(v / (1 - b2**t) + eps_root) + eps)


def amsgrad(
    gs,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    eps_root=0.0,
    debias_m=True,
    debias_v="before",
):
    """Reddi et al. 2018, Algorithm 2, arXiv:1904.09237: "never", and no debias_m.

    top <- max(top, v / (1 - b2^t))          v_hat = top                 "before": optax
    top <- max(top, v)                       v_hat = top / (1 - b2^t)    "after": torch
    top <- max(top, v)                       v_hat = top                 "never"
    step = learning_rate m / (1 - b1^t) / (sqrt(v_hat + eps_root) + eps)
    """
    top = np.zeros(gs[0].shape)
    for t, (_, m, v) in enumerate(moments(gs, b1, b2), 1):
        bias = 1 - b2**t
        top = np.maximum(top, v / bias if debias_v == "before" else v)
        v_hat = top / bias if debias_v == "after" else top
        m_hat = m / (1 - b1**t) if debias_m else m
        yield learning_rate * m_hat / (np.sqrt(v_hat + eps_root) + eps)


def adamax(gs, *, learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8, eps_outside=False):
    """Kingma and Ba 2015, Algorithm 2, arXiv:1412.6980, which has no eps.

    u <- max(b2 u, |g| + eps)       step = learning_rate m / (1 - b1^t) / u
    u <- max(b2 u, |g|)             step = learning_rate m / (1 - b1^t) / (u + eps)
    The first is that of torch and optax; `eps_outside` that of Optimisers.jl.
    """
    u, outside, inside = np.zeros(gs[0].shape), *((eps, 0) if eps_outside else (0, eps))
    for t, (g, m, _) in enumerate(moments(gs, b1, b2), 1):
        u = np.maximum(b2 * u, np.abs(g) + inside)
        yield learning_rate * m / (1 - b1**t) / (u + outside)


def radam(
    gs,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    eps_root=0.0,
    threshold=5.0,
    nesterov=False,
    debias_eps=False,
):
    """Liu et al. 2020, Algorithm 2, arXiv:1908.03265; options as in optax and torch.

    rho_inf = 2 / (1 - b2) - 1               rho = rho_inf - 2 t b2^t / (1 - b2^t)
    r^2 = (rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho)
    u = r m_hat / (sqrt(v_hat + eps_root) + eps) if rho >= threshold else m_hat
    u = r m_hat sqrt(1 - b2^t) / (sqrt(v) + eps), with debias_eps: torch
    step = learning_rate u
    """
    top = 2 / (1 - b2) - 1
    for t, (g, m, v) in enumerate(moments(gs, b1, b2), 1):
        u, bias = corrected(m, g, b1, t, nesterov), 1 - b2**t
        rho = top - 2 * t * b2**t / bias
        if rho >= threshold:
            r = np.sqrt((rho - 4) * (rho - 2) * top / ((top - 4) * (top - 2) * rho))
            if debias_eps:
                u = r * u * np.sqrt(bias) / (np.sqrt(v + eps_root * bias) + eps)
            else:
                u = r * u / (np.sqrt(v / bias + eps_root) + eps)
        yield learning_rate * u


def adabelief(
    gs,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-16,
    eps_root=1e-16,
    nesterov=False,
):
    """Zhuang et al. 2020, Algorithm 2, arXiv:2010.07468, where both eps are one.

    s <- b2 s + (1 - b2) |g - m|^2 + eps_root,  m the new one
    step = learning_rate m / (1 - b1^t) / (sqrt(s / (1 - b2^t)) + eps)
    """
    s = np.zeros(gs[0].shape)
    for t, (g, m, _) in enumerate(moments(gs, b1, b2), 1):
        s = b2 * s + (1 - b2) * abs_sq(g - m) + eps_root
        m_hat = corrected(m, g, b1, t, nesterov)
        yield learning_rate * m_hat / (np.sqrt(s / (1 - b2**t)) + eps)


def yogi(
    gs,
    *,
    learning_rate=1e-2,
    b1=0.9,
    b2=0.999,
    eps=1e-3,
    eps_root=0.0,
    initial_v=1e-6,
    initial_m=0.0,
    debias=True,
):
    """Zaheer et al. 2018, "Adaptive methods for nonconvex optimization", Algorithm 2.

    m <- b1 m + (1 - b1) g                   initial_m, initial_v at first:
    v <- v - (1 - b2) sign(v - |g|^2) |g|^2  optax has 1e-6 for both
    step = learning_rate m / (1 - b1^t) / (sqrt(v / (1 - b2^t) + eps_root) + eps),
    without the two corrections in the paper
    """
    m = np.full_like(gs[0], initial_m)
    v = np.full(gs[0].shape, initial_v)
    for t, g in enumerate(gs, 1):
        m = b1 * m + (1 - b1) * g
        v = v - (1 - b2) * np.sign(v - abs_sq(g)) * abs_sq(g)
        m_hat, v_hat = (m / (1 - b1**t), v / (1 - b2**t)) if debias else (m, v)
        yield learning_rate * m_hat / (np.sqrt(v_hat + eps_root) + eps)


def optimistic_adam(
    gs, *, learning_rate=1e-3, optimism=1.0, double_first=False, **settings
):
    """Daskalakis et al. 2018, Algorithm 1, arXiv:1711.00141.

    u: the direction of Adam, with `nesterov` of NAdam
    step = learning_rate (u + optimism (u - u_before))
    u_before = 0 at first in the paper: `double_first`; in optax the first u
    """
    before = None
    for u in directions(gs, **settings):
        if before is None:
            before = 0 * u if double_first else u
        yield learning_rate * (u + optimism * (u - before))
        before = u


def adan(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-3,
    b1=0.98,
    b2=0.92,
    b3=0.99,
    eps=1e-8,
    eps_root=0.0,
    weight_decay=0.0,
    decay_where=None,
    proximal=True,
    lookahead=None,
) -> Steps:
    """Xie et al. 2022, Algorithm 1, arXiv:2208.06677; each b is 1 - the paper's beta.

    d = g - g_before, 0 at first
    m <- b1 m + (1 - b1) g                   v <- b2 v + (1 - b2) d
    n <- b3 n + (1 - b3) |g + w d|^2         w = b2 in the paper, 1 - b2 in optax
    u = (m_hat + w v_hat) / (sqrt(n_hat + eps_root) + eps),  each hat by 1 - b^t
    x <- (x - learning_rate u) / (1 + learning_rate weight_decay)         proximal
    x <- x - learning_rate (u + weight_decay x)                           else: optax
    """
    w = b2 if lookahead is None else lookahead

    def leaf(path, x, gs):
        decay = learning_rate * weight_decay if chosen(decay_where, path, x) else 0.0
        m, v, n, before = 0 * x, 0 * x, np.zeros(x.shape), gs[0]
        for t, g in enumerate(gs, 1):
            d = g - before
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * d
            n = b3 * n + (1 - b3) * abs_sq(g + w * d)
            m_hat, v_hat, n_hat = m / (1 - b1**t), v / (1 - b2**t), n / (1 - b3**t)
            u = (m_hat + w * v_hat) / (np.sqrt(n_hat + eps_root) + eps)
            if proximal:
                x = (x - learning_rate * u) / (1 + decay)
            else:
                x = x - learning_rate * u - decay * x
            before = g
            yield x

    return each(params, grads, leaf)


ORACLES = {
    "Adam": follow(adam),
    "AdamW": decayed(adam),
    "NAdam": follow(nadam),
    "NAdamW": decayed(nadam),
    "AMSGrad": follow(amsgrad),
    "AMSGradW": decayed(amsgrad),
    "Adamax": follow(adamax),
    "AdamaxW": decayed(adamax),
    "RAdam": follow(radam),
    "RAdamW": decayed(radam),
    "AdaBelief": follow(adabelief),
    "AdaBeliefW": decayed(adabelief),
    "Yogi": follow(yogi),
    "OptimisticAdam": follow(optimistic_adam),
    "Adan": adan,
}
