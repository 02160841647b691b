"""Modifiers around a rule: of the gradient it is given, or of the step it takes.

`inner` makes, for one array, a function from the gradient to the step per unit of
learning rate: `plain` for SGD, `adam` or `partial(adam, b1=0.8)` for Adam, whose `v`
is its second moment. A learning rate is a number, or one for each step.
"""

import numpy as np

from oracles.leaves import Params, Steps, abs_sq, chosen, each, norm, rms, wide


def plain():
    """u = g"""
    return lambda g: g


class adam:
    """Kingma and Ba 2015, Algorithm 1, arXiv:1412.6980, one gradient at a time."""

    def __init__(self, *, b1=0.9, b2=0.999, eps=1e-8):
        self.b1, self.b2, self.eps = b1, b2, eps
        self.t, self.m, self.v = 0, 0.0, 0.0

    def __call__(self, g):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * abs_sq(g)
        m_hat, v_hat = self.m / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
        return m_hat / (np.sqrt(v_hat) + self.eps)


def agree(a, b):
    """a b > 0; of complex numbers, whether they point to the same half of the plane."""
    return (np.conj(a) * b).real > 0


def stepping(params: Params, grads: Steps, inner, learning_rate, modify) -> Steps:
    """x <- x - learning_rate modify(x, g, u, inner),  u = inner(g)"""
    rates = np.broadcast_to(learning_rate, len(grads))

    def leaf(path, x, gs):
        rule, keep = inner(), {}
        for g, rate in zip(gs, rates, strict=True):
            x = x - rate * modify(g, rule(g), rule, keep)
            yield x

    return each(params, grads, leaf)


def decay(
    params: Params,
    grads: Steps,
    inner=plain,
    *,
    learning_rate,
    weight_decay=1e-2,
    how="coupled",
    peak=None,
    where=None,
    cautious=False,
) -> Steps:
    """Weight decay in six forms: rate is the learning rate of the step, u = inner(g).

    l2           u = inner(g + weight_decay x),  x <- x - rate u
    coupled      x <- x - rate u - rate weight_decay x          torch, optax
    independent  x <- x - rate u - weight_decay x
    schedule     x <- x - rate u - rate / peak weight_decay x
                 Loshchilov and Hutter 2019, Algorithm 2, arXiv:1711.05101
    proximal     x <- (x - rate u) / (1 + rate weight_decay)
                 Zhuang et al. 2022, arXiv:2202.00089
    corrected    x <- x - rate u - rate^2 / peak weight_decay x
                 Defazio 2025 (AdamC), arXiv:2506.02285, normalised layers

    `cautious`, not with l2: weight_decay is 0 where rate u and x have different signs;
    Chen et al. 2025, Algorithm 1, arXiv:2510.12402.
    """
    assert how not in ("schedule", "corrected") or peak is not None
    assert how != "l2" or not cautious
    rates = np.broadcast_to(learning_rate, len(grads))

    def leaf(path, x, gs):
        rule = inner()
        for g, rate in zip(gs, rates, strict=True):
            amount = weight_decay if chosen(where, path, x) else 0.0
            u = rule(g + amount * x if how == "l2" else g)
            if cautious:
                amount = amount * ~agree(u, -x)
            if how == "proximal":
                x = (x - rate * u) / (1 + rate * amount)
            else:
                factor = {
                    "l2": 0.0,
                    "coupled": rate,
                    "independent": 1.0,
                    "schedule": rate / peak if peak else 0.0,
                    "corrected": rate**2 / peak if peak else 0.0,
                }[how]
                x = x - rate * u - factor * amount * x
            yield x

    return each(params, grads, leaf)


def cautious(
    params: Params, grads: Steps, inner=adam, *, learning_rate, form="count"
) -> Steps:
    """Liang et al. 2024, arXiv:2411.16085: only where step and gradient agree.

    phi = 1 where u g > 0, else 0            n = size of the array
    count  u <- u phi n / (sum phi + 1)      the paper
    mean   u <- u phi / max(mean phi, 1e-3)  the authors' code; the listing has + eps
    """

    def modify(g, u, rule, keep):
        phi = agree(u, g).astype(float)
        if form == "count":
            return u * phi * phi.size / (np.sum(phi) + 1)
        return u * phi / max(np.mean(phi), 1e-3)

    return stepping(params, grads, inner, learning_rate, modify)


def clip_step(
    params: Params, grads: Steps, inner=adam, *, learning_rate, max_rms=1.0
) -> Steps:
    """Shazeer and Stern 2018, Algorithm 4, arXiv:1804.04235, of any step.

    u <- u / max(1, rms(u) / max_rms),  of each array, u without the learning rate
    """

    def modify(g, u, rule, keep):
        return u / max(1, rms(u) / max_rms)

    return stepping(params, grads, inner, learning_rate, modify)


def ams_bound(params: Params, grads: Steps, inner=adam, *, learning_rate) -> Steps:
    """Reddi et al. 2018, arXiv:1904.09237, of any step that is divided by sqrt(v).

    top <- max(top, v),  v the second moment of this step, its bias not corrected
    u <- u sqrt(v / top),  0 / 0 = 1

    That is Algorithm 2 but for eps, which is divided with the rest here.
    """

    def modify(g, u, rule, keep):
        top = keep["top"] = np.maximum(keep.get("top", 0.0), rule.v)
        return u * np.sqrt(np.where(top > 0, rule.v / np.where(top > 0, top, 1), 1))

    return stepping(params, grads, inner, learning_rate, modify)


def mars(
    params: Params,
    grads: Steps,
    inner=adam,
    *,
    learning_rate,
    old_grads=None,
    gamma=0.025,
    b1=0.95,
    max_norm=1.0,
    zero_first=False,
) -> Steps:
    """Yuan et al. 2024, Algorithm 1 and (for Adam) 2, arXiv:2411.10438.

    c = g + gamma b1 / (1 - b1) (g - old)
    c <- c / max(1, |c| / max_norm),  |c| of each array
    x <- x - learning_rate inner(c)

    `old_grads`: for each step this batch's gradient at the parameters of the step
    before; without them old is the gradient of the step before (the approximate form).
    At first old = g, as x_0 = x_1 in the paper; `zero_first`: old = 0, as in the code.
    """
    if old_grads is None:
        start = grads[0]
        if zero_first:
            start = {path: 0 * g for path, g in start.items()}
        old_grads = [start, *grads[:-1]]
    corrected = []
    for g, old in zip(map(wide, grads), map(wide, old_grads), strict=True):
        c = {p: g[p] + gamma * b1 / (1 - b1) * (g[p] - old[p]) for p in g}
        corrected.append({p: a / max(1, norm(a) / max_norm) for p, a in c.items()})
    return decay(
        params, corrected, inner, learning_rate=learning_rate, weight_decay=0.0
    )
