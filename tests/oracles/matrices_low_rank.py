"""Rules that keep less than a matrix: of low rank, factored, or one number a block.

x is (in, out). Steps per unit of learning rate where `matrices.on_matrices` makes the
oracle.
"""

import math

import jax
import numpy as np

from oracles.adam import directions, follow
from oracles.leaves import Params, Steps, abs_sq, each, norm, rms
from oracles.matrices import ema, on_matrices, with_rate


def draw(seed, n, shape):
    """The n-th normal draw of a rule with `seed`."""
    key = jax.random.fold_in(jax.random.key(seed), n)
    return np.asarray(jax.random.normal(key, shape, np.float32), np.float64)


def dion(gs, *, momentum=0.95, rank=1.0, eps=1e-8, seed=0, start=None):
    """Ahn et al. 2025, Algorithm 1, arXiv:2504.05295, transposed.

    M <- M + g
    P = Q of the QR of M^T Q                 R = M P
    M <- M - (1 - momentum) R P^T
    Q <- R / (|R| + eps), by column
    u = sqrt(out / in) Q P^T
    Q is normal at first, or `start`. `rank`: r, or if it is no integer the share of the
    shorter side, rounded up.
    """
    n_in, n_out = gs[0].shape
    shorter = min(n_in, n_out)
    r = rank if isinstance(rank, int) else math.ceil(rank * shorter)
    m = np.zeros(gs[0].shape)
    q = draw(seed, 0, (n_in, min(r, shorter))) if start is None else start
    for g in gs:
        m = m + g
        p = np.linalg.qr(m.conj().T @ q)[0]
        right = m @ p
        m = m - (1 - momentum) * right @ p.conj().T
        q = right / (np.sqrt(np.sum(abs_sq(right), axis=0)) + eps)
        yield math.sqrt(n_out / n_in) * q @ p.conj().T


def singular_vectors(g, rank):
    """The first left ones, in columns; the largest entry of each is positive."""
    u = np.linalg.svd(g, full_matrices=False)[0][:, :rank]
    largest = np.argmax(np.abs(u), axis=0)
    top = u[largest, np.arange(u.shape[1])]
    return u * top.conj() / np.abs(top)


def projections(gs, rank, every):
    """P of each step, (in, r), from the gradient at steps 1, 1 + every, ..."""
    for n, g in enumerate(gs):
        if n % every == 0:
            p = singular_vectors(g, rank)
        yield p


def along(side, gs):
    """Whether the second axis of the gradients is to be projected."""
    n_in, n_out = gs[0].shape
    return n_out < n_in if side == "shorter" else n_out > n_in


def galore(
    gs,
    *,
    rank=128,
    every=200,
    scale=0.25,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    side="shorter",
    inner=None,
):
    """Zhao et al. 2024, Algorithm 2, arXiv:2403.03507; `side`: "longer" in optax.

    P: the first `rank` left singular vectors of g at steps 1, 1 + every, ...
    r = P^T g                                if in is the side; else g P, P right ones
    n = Adam's step for the r's so far, per unit of learning rate
    u = scale P n
    The authors' code adds eps to the root of a second moment that has its bias still.
    """
    if along(side, gs):
        settings = {"rank": rank, "every": every, "scale": scale, "inner": inner}
        settings |= {"b1": b1, "b2": b2, "eps": eps}
        for u in galore([g.conj().T for g in gs], side=side, **settings):
            yield u.conj().T
        return
    ps = list(projections(gs, rank, every))
    low = [p.conj().T @ g for p, g in zip(ps, gs, strict=True)]
    ns = directions(low, b1=b1, b2=b2, eps=eps) if inner is None else inner(low)
    for p, n in zip(ps, ns, strict=True):
        yield scale * p @ n


def limited(updates, max_growth):
    """The norm-growth limiter: |u| <= max_growth |u before|, but for 1e-8."""
    before = None
    for u in updates:
        length = norm(u)
        if before is not None:
            factor = max(length / (before + 1e-8), max_growth) / max_growth
            u, length = u / factor, length / factor
        before = length
        yield u


def fira(
    gs,
    *,
    rank=128,
    every=200,
    scale=1.0,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    max_growth=1.01,
):
    """Chen et al. 2024, Algorithm 1, arXiv:2410.01623.

    P, r, n as in GaLore, the shorter side
    s = (g - P r) |n| / (|r| + 1e-8)         norms over the axis of r: by column
    s <- s limited to max_growth times its last norm
    u = scale P n + s
    The authors' code limits s before Adam's bias is taken from |n|, and has
    g - scale P r.
    """
    n_in, n_out = gs[0].shape
    if n_out < n_in:
        settings = {"rank": rank, "every": every, "scale": scale, "b1": b1, "b2": b2}
        settings |= {"eps": eps, "max_growth": max_growth}
        for u in fira([g.conj().T for g in gs], **settings):
            yield u.conj().T
        return
    ps = list(projections(gs, rank, every))
    low = [p.conj().T @ g for p, g in zip(ps, gs, strict=True)]
    ns = list(directions(low, b1=b1, b2=b2, eps=eps))
    rests = []
    for g, p, r, n in zip(gs, ps, low, ns, strict=True):
        lengths = [np.sqrt(np.sum(abs_sq(array), axis=0)) for array in (n, r)]
        rests.append((g - p @ r) * lengths[0] / (lengths[1] + 1e-8))
    for p, n, s in zip(ps, ns, limited(rests, max_growth), strict=True):
        yield scale * p @ n + s


def apollo(
    gs,
    *,
    rank=256,
    every=200,
    scale=1.0,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    by="channel",
    max_growth=1.01,
    seed=0,
    probes=None,
):
    """Zhu et al. 2024, Algorithm 1, arXiv:2412.05270.

    P normal, (shorter side, rank), over sqrt(rank); anew at steps 1, 1 + every, ...
    r = P^T g                                g P if out is the shorter
    n = Adam's step for the r's so far, per unit of learning rate
    s = |n| / (|r| + 1e-8)                   over the axis of r; "array": over all
    u = sqrt(scale) s g, limited to max_growth times its last norm
    The authors' code limits u before Adam's bias is taken from it.
    """
    n_in, n_out = gs[0].shape
    if n_out < n_in:
        settings = {"rank": rank, "every": every, "scale": scale, "b1": b1, "b2": b2}
        settings |= {"eps": eps, "by": by, "max_growth": max_growth, "seed": seed}
        for u in apollo([g.conj().T for g in gs], probes=probes, **settings):
            yield u.conj().T
        return
    low, r = [], min(rank, n_in)
    for n, g in enumerate(gs):
        k = n // every
        p = draw(seed, k, (n_in, r)) if probes is None else probes[k]
        low.append(p.conj().T @ g / math.sqrt(r))
    updates = []
    ns = directions(low, b1=b1, b2=b2, eps=eps)
    axis = 0 if by == "channel" else None
    for g, r, n in zip(gs, low, ns, strict=True):
        top, bottom = (np.sqrt(np.sum(abs_sq(array), axis=axis)) for array in (n, r))
        updates.append(math.sqrt(scale) * g * top / (bottom + 1e-8))
    yield from limited(updates, max_growth)


def block_means(a, blocks):
    """The mean of each block, in the places of its members."""
    if blocks == "elements":
        return a
    if blocks == "array" or a.ndim < 2:
        return np.mean(a) + 0 * a
    if blocks == "inputs":
        return np.mean(a, axis=tuple(range(1, a.ndim)), keepdims=True) + 0 * a
    units = np.mean(a, axis=tuple(range(a.ndim - 1)))
    if blocks == "outputs":
        return units + 0 * a
    groups = np.mean(units.reshape(blocks, -1), axis=1)
    return np.repeat(groups, len(units) // blocks) + 0 * a


def adam_mini(
    params: Params,
    grads: Steps,
    *,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    blocks="outputs",
) -> Steps:
    """Zhang et al. 2024, Algorithms 1 to 3, arXiv:2406.16793.

    Adam with v <- b2 v + (1 - b2) (mean of |g|^2 over the block)
    `blocks` may be a dict of paths: one number for each output, input (tokens of an
    embedding), array, element, or one for each of so many groups of outputs (heads).
    Of a vector there is one block, except for "elements".
    """

    def leaf(path, x, gs):
        kind = blocks(path, x) if callable(blocks) else blocks
        kind = kind[path] if isinstance(kind, dict) else kind
        m, v = 0 * x, np.zeros(x.shape)
        for t, g in enumerate(gs, 1):
            m, v = ema(b1, m, g), ema(b2, v, block_means(abs_sq(g), kind))
            m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
            x = x - learning_rate * m_hat / (np.sqrt(v_hat) + eps)
            yield x

    return each(params, grads, leaf)


class Factored:
    """A running mean of positive arrays; of matrices by row and column."""

    def __init__(self):
        self.rows = self.columns = self.whole = 0.0

    def add(self, b, array):
        if array.ndim < 2:
            self.whole = ema(b, self.whole, array)
            return self.whole
        self.rows = ema(b, self.rows, np.mean(array, axis=-1))
        self.columns = ema(b, self.columns, np.mean(array, axis=-2))
        shares = self.rows / np.mean(self.rows, axis=-1, keepdims=True)
        return shares[..., :, None] * self.columns[..., None, :]


def came(
    gs,
    *,
    learning_rate=2e-4,
    b1=0.9,
    b2=0.999,
    b3=0.9999,
    eps=1e-30,
    eps_instability=1e-16,
    clipping_threshold=1.0,
):
    """Luo et al. 2023, Algorithm 2, arXiv:2307.02047, and the authors' code.

    v <- b2 v + (1 - b2) (|g|^2 + eps)       by row r and column c: v = r c / mean(r)
    u = g / sqrt(v),  u <- u / max(1, rms(u) / clipping_threshold)
    m <- b1 m + (1 - b1) u
    q <- b3 q + (1 - b3) (|u - m|^2 + eps_instability), factored likewise
    step = learning_rate m / sqrt(q)
    Vectors have a whole v, no q, and step = learning_rate m.
    """
    seconds, instability, m = Factored(), Factored(), np.zeros(gs[0].shape)
    for g in gs:
        u = g / np.sqrt(seconds.add(b2, abs_sq(g) + eps))
        u = u / max(1, rms(u) / clipping_threshold)
        m = ema(b1, m, u)
        if g.ndim >= 2:
            q = instability.add(b3, abs_sq(u - m) + eps_instability)
            yield learning_rate * m / np.sqrt(q)
        else:
            yield learning_rate * m


ORACLES = {
    "Dion": with_rate(on_matrices(dion), 0.02),
    "GaLore": with_rate(on_matrices(galore), 1e-2),
    "Fira": with_rate(on_matrices(fira), 1e-2),
    "APOLLO": with_rate(on_matrices(apollo), 1e-2),
    "AdamMini": adam_mini,
    "CAME": follow(came),
}
