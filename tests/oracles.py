"""What each rule must compute, in float64 NumPy, from the papers and torch's pages.

An oracle takes the rule's hyperparameters by name, the parameters (a dict from path to
array) and one dict of gradients per step, and returns the parameters after each step.
It is written without a look at the rule, so that the two cannot share a mistake: copy
the equations from the source named in the docstring, one after the other, and spend no
thought on speed. A new rule needs a function here and its name in `ORACLES`.

Gradients of complex parameters are directions to go against, and |g|^2 is their squared
magnitude: one complex entry is one quantity with one scale.
"""

from collections.abc import Callable

import numpy as np

Params = dict[str, np.ndarray]
Steps = list[Params]


def wide(tree: Params) -> Params:
    """Every array in float64 or complex128: the oracle's own rounding is no matter."""
    return {
        path: np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)
        for path, x in tree.items()
    }


def each(params: Params, grads: Steps, leaf: Callable) -> Steps:
    """A rule on each array alone: `leaf(path, x, gs)` lists all its values."""
    grads = [wide(g) for g in grads]
    values = {
        path: leaf(path, x, [g[path] for g in grads])
        for path, x in wide(params).items()
    }
    return [
        {path: xs[step] for path, xs in values.items()} for step in range(len(grads))
    ]


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
        xs = []
        buf = None
        for g in gs:
            if maximize:
                g = -g
            g = g + weight_decay * x
            if momentum is not None:
                buf = g if buf is None else momentum * buf + (1 - dampening) * g
                g = g + momentum * buf if nesterov else buf
            x = x - learning_rate * g
            xs.append(x)
        return xs

    return each(params, grads, leaf)


def adam(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    eps_root=0.0,
) -> Steps:
    """Kingma and Ba 2015, Algorithm 1, arXiv:1412.6980; `eps_root` as in optax.

    m <- b1 m + (1 - b1) g                   v <- b2 v + (1 - b2) |g|^2
    m_hat = m / (1 - b1^t)                   v_hat = v / (1 - b2^t)
    x <- x - learning_rate m_hat / (sqrt(v_hat + eps_root) + eps)
    """

    def leaf(path, x, gs):
        xs = []
        for step in adam_steps(gs, learning_rate, b1, b2, eps, eps_root):
            x = x - step
            xs.append(x)
        return xs

    return each(params, grads, leaf)


def adam_steps(gs, learning_rate, b1, b2, eps, eps_root):
    m = np.zeros_like(gs[0])
    v = np.zeros(gs[0].shape)
    for t, g in enumerate(gs, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * np.abs(g) ** 2
        m_hat = m / (1 - b1**t)
        v_hat = v / (1 - b2**t)
        yield learning_rate * m_hat / (np.sqrt(v_hat + eps_root) + eps)


def adamw(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    eps_root=0.0,
    weight_decay=1e-4,
    couple=True,
    decay_where=None,
) -> Steps:
    """Loshchilov and Hutter 2019, Algorithm 2, arXiv:1711.05101; torch.optim.AdamW.

    x <- x - adam_step - learning_rate weight_decay x     couple: torch, optax
    x <- x - adam_step - weight_decay x                   else: the paper's lambda

    `decay_where` names the arrays that decay, or is a function of (path, array).
    """

    def leaf(path, x, gs):
        decay = weight_decay if chosen(decay_where, path, x) else 0.0
        if couple:
            decay = learning_rate * decay
        xs = []
        for step in adam_steps(gs, learning_rate, b1, b2, eps, eps_root):
            x = x - step - decay * x
            xs.append(x)
        return xs

    return each(params, grads, leaf)


def chosen(where, path, x) -> bool:
    if where is None:
        return True
    if callable(where):
        return where(path, x)
    return path in ([where] if isinstance(where, str) else where)


def weight_decay(
    params: Params, grads: Steps, *, weight_decay=1e-4, where=None
) -> Steps:
    """x <- x - (g + weight_decay x): the gradient of an L2 penalty of half of it."""

    def leaf(path, x, gs):
        decay = weight_decay if chosen(where, path, x) else 0.0
        xs = []
        for g in gs:
            x = x - (g + decay * x)
            xs.append(x)
        return xs

    return each(params, grads, leaf)


def clip_by_global_norm(params: Params, grads: Steps, *, max_norm=1.0) -> Steps:
    """Pascanu et al. 2013, Algorithm 1, arXiv:1211.5063, over all arrays together.

    norm = sqrt(sum of |g|^2)
    g <- g max_norm / norm if norm >= max_norm else g
    x <- x - g
    """
    x = wide(params)
    xs = []
    for step in grads:
        g = wide(step)
        norm = np.sqrt(sum(np.sum(np.abs(array) ** 2) for array in g.values()))
        factor = max_norm / norm if norm >= max_norm else 1.0
        x = {path: x[path] - factor * g[path] for path in x}
        xs.append(x)
    return xs


def identity(params: Params, grads: Steps) -> Steps:
    """x <- x - g."""

    def leaf(path, x, gs):
        return [x - sum(gs[: n + 1]) for n in range(len(gs))]

    return each(params, grads, leaf)


ORACLES: dict[str, Callable[..., Steps]] = {
    "SGD": sgd,
    "Adam": adam,
    "AdamW": adamw,
    "WeightDecay": weight_decay,
    "ClipByGlobalNorm": clip_by_global_norm,
    "Identity": identity,
}
