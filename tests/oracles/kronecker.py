"""Rules with a preconditioner for each side of a matrix; x is (in, out) here.

Steps per unit of learning rate, from which `matrices.on_matrices` makes oracles.
"""

import jax
import numpy as np

from oracles.leaves import norm, rms
from oracles.matrices import ema, on_matrices, with_rate


def eigenvectors(a):
    """Those of the largest eigenvalue first."""
    return np.linalg.eigh(a)[1][:, ::-1]


def soap(
    gs,
    *,
    b1=0.95,
    b2=0.95,
    shampoo_decay=None,
    eps=1e-8,
    every=10,
    max_dim=10000,
    one_sided=False,
    bias_correction=True,
):
    """Vyas et al. 2024, Algorithm 3, arXiv:2409.11321, and the authors' code.

    At first L = (1 - bs) g g^T, R = (1 - bs) g^T g, QL and QR their eigenvectors, no
    step. Then, k from 1,
    h = QL^T g QR
    m <- b1 m + (1 - b1) h                   v <- b2 v + (1 - b2) h^2
    u = sqrt(1 - b2^k) / (1 - b1^k) QL m / (sqrt(v) + eps) QR^T
    L <- bs L + (1 - bs) g g^T               R <- bs R + (1 - bs) g^T g
    and if `every` divides k, the estimates diag(QL^T L QL) are brought in descending
    order, with them the columns of QL and the rows of v; QL <- Q of the QR of L QL,
    likewise QR. m changes its basis whenever QL and QR change.
    A side longer than `max_dim` keeps the identity; `one_sided`, so does the longer.
    """
    bs = b2 if shampoo_decay is None else shampoo_decay
    n_in, n_out = gs[0].shape
    turned = [n_in <= max_dim, n_out <= max_dim]
    if one_sided:
        turned[1 if n_in <= n_out else 0] = False
    q = [np.eye(n_in), np.eye(n_out)]
    grams = [np.zeros((n_in, n_in)), np.zeros((n_out, n_out))]
    m, v = np.zeros(gs[0].shape), np.zeros(gs[0].shape)
    for k, g in enumerate(gs):
        squares = [g @ g.T, g.T @ g]
        if k == 0:
            grams = [ema(bs, a, s) for a, s in zip(grams, squares, strict=True)]
            for side in (0, 1):
                q[side] = eigenvectors(grams[side]) if turned[side] else q[side]
            yield 0 * g
            continue
        h = q[0].T @ g @ q[1]
        m, v = ema(b1, m, h), ema(b2, v, h**2)
        share = np.sqrt(1 - b2**k) / (1 - b1**k) if bias_correction else 1.0
        yield share * q[0] @ (m / (np.sqrt(v) + eps)) @ q[1].T
        whole = q[0] @ m @ q[1].T
        grams = [ema(bs, a, s) for a, s in zip(grams, squares, strict=True)]
        if k % every == 0:
            for side in (0, 1):
                if turned[side]:
                    estimates = np.diag(q[side].T @ grams[side] @ q[side])
                    order = np.argsort(-estimates)
                    v = np.take(v, order, axis=side)
                    q[side] = np.linalg.qr(grams[side] @ q[side][:, order])[0]
        m = q[0].T @ whole @ q[1]


def inverse_fourth_root(a, eps):
    """(A + eps lambda_max I)^(-1/4); zeros for zeros."""
    values, vectors = np.linalg.eigh(a)
    ridge = values + eps * values[-1]
    powers = np.where(ridge > 0, np.abs(ridge) + (ridge <= 0), np.inf) ** -0.25
    return (vectors * powers) @ vectors.T


def blocks(shape, block_size):
    """Pairs of slices."""
    if block_size is None:
        return [(slice(None), slice(None))]

    def cut(n):
        return [slice(k, k + block_size) for k in range(0, n, block_size)]

    return [(rows, columns) for rows in cut(shape[0]) for columns in cut(shape[1])]


def grafts(gs, graft, b2, w2, graft_eps):
    """Steps of which Shampoo takes the length."""
    a = np.zeros(gs[0].shape)
    for g in gs:
        if graft is None or graft == "sgd":
            yield g
        elif graft == "sign":
            yield np.sign(g)
        elif graft == "adagrad":
            a = a + g**2
            yield g / (np.sqrt(a) + graft_eps)
        else:
            g = g / norm(g) if graft == "normalized" else g
            a = b2 * a + w2 * g**2
            yield g / (np.sqrt(a) + graft_eps)


def shampoo(
    gs,
    *,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    every=1,
    start=5,
    graft="rmsprop",
    graft_eps=1e-10,
    nesterov=True,
    block_size=None,
):
    """Gupta et al. 2018, Algorithm 1, arXiv:1802.09568; Anil et al., 2002.09018.

    L <- b2 L + w g g^T                      R <- b2 R + w g^T g
    w = 1 - b2, or 1 if b2 is 1: the sum of the first paper
    PL = (L + eps lambda_max(L) I)^(-1/4), likewise PR, at steps 1, 1 + every, ...
    p = PL g PR,  p <- p |d| / |p|           d: the step of `graft`
    p = d in the first `start` steps
    m <- b1 m + p                            u = p + b1 m, nesterov; else m
    The first paper has eps I at first in place of the ridge, no grafts and no momentum.
    Blocks have an L and R each, and one length together.
    """
    w2 = 1.0 if b2 == 1 else 1 - b2
    parts = blocks(gs[0].shape, block_size)
    kept = [[0.0, 0.0, None, None] for _ in parts]
    m = np.zeros(gs[0].shape)
    steps = grafts(gs, graft, b2, w2, graft_eps)
    for t, (g, d) in enumerate(zip(gs, steps, strict=True), 1):
        p = np.zeros(g.shape)
        for n, part in enumerate(parts):
            piece, (left, right, *roots) = g[part], kept[n]
            left = b2 * left + w2 * piece @ piece.T
            right = b2 * right + w2 * piece.T @ piece
            if (t - 1) % every == 0:
                roots = [inverse_fourth_root(a, eps) for a in (left, right)]
            kept[n] = [left, right, *roots]
            p[part] = roots[0] @ piece @ roots[1]
        if t <= start:
            p = d
        elif graft is not None:
            p = p * norm(d) / norm(p)
        m = b1 * m + p
        yield p + b1 * m if nesterov else m


def splus(gs, *, b1=0.9, b2=0.999, eps=1e-30, every=100, max_dim=10000):
    """Frans et al. 2025, Algorithm 1, arXiv:2506.07254, and the authors' code.

    m <- b1 m + (1 - b1) g
    u = 2 / (in + out) QL sign(QL^T m QR) QR^T,  QL = QR = I at first
    L <- b2 L + (1 - b2) g g^T               R <- b2 R + (1 - b2) g^T g
    QL, QR: the eigenvectors of L + eps I, R + eps I, after steps 1, every, 2 every, ...
    The code in torch has 1 / (in + out) / 2, and 1e-3 for sides above `max_dim`.
    """
    n_in, n_out = gs[0].shape
    m, left, right = (
        np.zeros(gs[0].shape),
        np.zeros((n_in,) * 2),
        np.zeros((n_out,) * 2),
    )
    q_left, q_right = np.eye(n_in), np.eye(n_out)
    for t, g in enumerate(gs, 1):
        m = ema(b1, m, g)
        signs = np.sign(q_left.T @ m @ q_right)
        yield 2 / (n_in + n_out) * q_left @ signs @ q_right.T
        left, right = ema(b2, left, g @ g.T), ema(b2, right, g.T @ g)
        if t == 1 or t % every == 0:
            if n_in <= max_dim:
                q_left = eigenvectors(left + eps * np.eye(n_in))
            if n_out <= max_dim:
                q_right = eigenvectors(right + eps * np.eye(n_out))


def annealed(n):
    return np.clip(np.exp(-0.001 * (n - 500)), 0.03, 1.0)


def kron_draws(seed, n, shape):
    """The probe, and the two numbers in [0, 1) that decide, at count n."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), n), 3)
    probe = jax.random.normal(keys[0], shape, np.float32)
    return np.asarray(probe, np.float64), *(
        float(jax.random.uniform(key, (), np.float32)) for key in keys[1:]
    )


def lower_bound(s):
    """Of the spectral norm of a symmetric s: one power iteration from a column."""
    top = np.max(np.abs(s))
    if top == 0:
        return np.inf  # the numerator is zero, too
    s = s / top
    y = s[:, np.argmax(np.sum(s**2, axis=0))] @ s
    return top * norm(s @ (y / norm(y)))


def psgd_kron(
    gs,
    *,
    b1=0.9,
    precond_rate=0.1,
    update_probability=annealed,
    balance_probability=0.01,
    max_rms=1.1,
    init_scale=1.0,
    max_dim=8192,
    momentum_into=True,
    seed=0,
    draws=None,
):
    """Li 2015, arXiv:1512.04202, and Pooladzandi and Li 2024, 2402.04553; PSGD Kron.

    m <- b1 m + (1 - b1) g,  m_hat = m / (1 - b1^t)
    QL, QR upper triangular, sqrt(init_scale) I at first; a diagonal where a side is
    longer than `max_dim`.
    with balance_probability, of the updates: max |QL| = max |QR|, by one factor each
    with update_probability, V normal:
        a = QL m_hat QR^T  (g in place of m_hat, not momentum_into)
        b = QL^-T V QR^-1
        QL <- QL - precond_rate triu(a a^T - b b^T) / |a a^T + b b^T| QL
        QR <- QR - precond_rate triu(a^T a - b^T b) / |a^T a + b^T b| QR
        |.|: a lower bound of the spectral norm; the maximum for a diagonal
    u = QL^T QL m_hat QR^T QR,  u <- u min(1, max_rms / (rms(u) + 1e-6))
    `draws`: (V, two numbers in [0, 1)) for each step.
    """
    shape = gs[0].shape
    q = [np.sqrt(init_scale) * np.eye(n) for n in shape]
    m = np.zeros(shape)
    for t, g in enumerate(gs, 1):
        probe, to_update, to_balance = (
            kron_draws(seed, t - 1, shape) if draws is None else draws[t - 1]
        )
        m = ema(b1, m, g)
        m_hat = m / (1 - b1**t)
        chance = update_probability
        chance = chance(t - 1) if callable(chance) else chance
        if to_update < chance:
            if to_balance < balance_probability:
                tops = [np.max(np.abs(each)) for each in q]
                mean = np.sqrt(tops[0] * tops[1])
                q = [each * mean / top for each, top in zip(q, tops, strict=True)]
            a = q[0] @ (m_hat if momentum_into else g) @ q[1].T
            b = np.linalg.inv(q[0]).T @ probe @ np.linalg.inv(q[1])
            pairs = [(a @ a.T, b @ b.T), (a.T @ a, b.T @ b)]
            q = [
                improved(each, *pair, precond_rate, each.shape[0] > max_dim)
                for each, pair in zip(q, pairs, strict=True)
            ]
        u = q[0].T @ q[0] @ m_hat @ q[1].T @ q[1]
        yield u * min(1, max_rms / (rms(u) + 1e-6))


def improved(q, one, two, rate, diagonal):
    """A step of one side; only the diagonal of the matrices counts for a diagonal."""
    if diagonal:
        one, two = np.diag(np.diag(one)), np.diag(np.diag(two))
        top = np.max(one + two)
        return q - rate * (one - two) / (top if top > 0 else np.inf) @ q
    return q - rate * np.triu(one - two) / lower_bound(one + two) @ q


ORACLES = {
    "SOAP": with_rate(on_matrices(soap), 3e-3),
    "Shampoo": with_rate(on_matrices(shampoo), 1e-3),
    "SPlus": with_rate(on_matrices(splus), 0.1),
    "PSGDKron": with_rate(on_matrices(psgd_kron), 1e-3),
}
