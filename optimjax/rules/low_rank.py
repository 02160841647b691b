"""Adam in a subspace of the gradient: moments of a few rows or columns alone."""

import math
from typing import Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from optimjax.arrays import abs_sq, lengths, real_part_dtype, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.noise import gaussian, nth_key
from optimjax.options import at_least_one, one_of
from optimjax.rule import rule
from optimjax.rules.adam import momentum
from optimjax.rules.matrix import MatrixRule, length

__all__ = ["APOLLO", "Fira", "GaLore"]


class Projected(NamedTuple):
    p: Array
    m: Array
    v: Array


class Grown(NamedTuple):
    p: Array
    m: Array
    v: Array
    length: Array


class Drawn(NamedTuple):
    m: Array
    v: Array
    length: Array


@rule
class LowRank(MatrixRule):
    """What rules share that keep Adam's moments of a projected gradient."""

    learning_rate: Hyper = 1e-2
    rank: int = 128
    every: int = 200
    scale: Hyper = 0.25
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-8

    def __post_init__(self):
        super().__post_init__()
        at_least_one(self, "rank", "every")

    def flips(self, inputs: int, outputs: int) -> bool:
        """Whether the outputs are projected: a matrix is transposed then."""
        return inputs > outputs

    def init_matrix(self, x):
        return self.start(x.T if self.flips(*x.shape) else x)

    def apply_matrix(self, state, x, g, t):
        flips = self.flips(*g.shape)
        state, u = self.direction(state, g.T if flips else g, t)
        return state, self.learning_rate * (u.T if flips else u)

    def start(self, x: Array) -> Any:
        """The state of a matrix whose inputs are projected."""
        raise NotImplementedError

    def direction(self, state: Any, g: Array, t: Array) -> tuple[Any, Array]:
        """Its new state, and its step per unit of learning rate."""
        raise NotImplementedError

    def basis(self, x: Array) -> Array:
        """Room for p, (inputs, rank): the first step fills it."""
        return jnp.zeros((x.shape[0], min(self.rank, *x.shape)), x.dtype)

    def moments(self, x: Array) -> tuple[Array, Array]:
        """m and v of a projected matrix, (rank, outputs)."""
        m = jnp.zeros((min(self.rank, *x.shape), x.shape[1]), x.dtype)
        return m, zeros_like(m, real=True)

    def renewed(self, p: Array, g: Array, t: Array) -> Array:
        """`p`, or every so often the gradient's first singular vectors."""
        return lax.cond(
            (t - 1) % self.every == 0, lambda: first_vectors(g, p.shape[1]), lambda: p
        )

    def adam(
        self, m: Array, v: Array, r: Array, t: Array
    ) -> tuple[Array, Array, Array]:
        """The new moments of a projected gradient, and Adam's direction."""
        m = self.b1 * m + (1 - self.b1) * r
        v = self.b2 * v + (1 - self.b2) * abs_sq(r)
        m_hat = momentum(m, r, self.b1, t, False)
        return m, v, m_hat / (jnp.sqrt(v / (1 - self.b2**t)) + self.eps)


@rule
class GaLore(LowRank):
    """Adam on the gradient's few largest singular directions.

        p    = the first `rank` left singular vectors of g      every `every` steps
        r    = p^H g
        n    = Adam's direction for r, from moments m and v of the shape of r
        step = learning_rate * scale * p n

    for a matrix with inputs <= outputs; others are transposed. m and v stay as they are
    when p is renewed. Of each vector the largest number is positive.

    Args:
        learning_rate, b1, b2, eps: as for `Adam`.
        rank: how many directions, >= 1; the shorter side at most.
        every: steps between two decompositions, >= 1.
        scale: factor of the step, >= 0.
        side: "shorter" to project the shorter side, as the paper does; "longer" as
            optax does.
        aux, matrices, axes: as for `MatrixRule`.
    State: for each matrix `p`, (side that is projected, rank); `m` and `v`, (rank,
        other side), v real; that of `aux`.
    Raises: ValueError if a number is outside its range, or for another `side`.
    Source: Zhao et al. 2024, Algorithm 2, arXiv:2403.03507.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]])}
    >>> galore = GaLore(0.1, rank=1)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]])}
    >>> state, _ = galore.apply(galore.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]])}
    >>> state, steps = galore.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.01252, -0.003345], [-0.0001524, 0.00004074]]
    """

    ranges: ClassVar = {"scale": NOT_NEGATIVE}

    side: Literal["shorter", "longer"] = "shorter"

    def __post_init__(self):
        super().__post_init__()
        one_of(self, "side", ("shorter", "longer"))

    def flips(self, inputs, outputs):
        return inputs < outputs if self.side == "longer" else inputs > outputs

    def start(self, x):
        return Projected(self.basis(x), *self.moments(x))

    def direction(self, state, g, t):
        p = self.renewed(state.p, g, t)
        m, v, n = self.adam(state.m, state.v, p.T.conj() @ g, t)
        return Projected(p, m, v), self.scale * p @ n


@rule
class Fira(LowRank):
    """`GaLore`, and the rest of the gradient scaled as Adam scales the projected part.

        p, r, n as for `GaLore`
        s    = |n_j| / (|r_j| + 1e-8) * (g - p r)_j             for each column j
        s    = s / (max(|s| / (|s of before| + 1e-8), max_growth) / max_growth)
        step = learning_rate * (scale * p n + s)

    for a matrix with inputs <= outputs; others are transposed. The first step,
    and one after a step of 0, has no limit.

    Args:
        learning_rate, b1, b2, eps: as for `Adam`.
        rank, every: as for `GaLore`.
        scale: factor of the projected part, >= 0.
        max_growth: the most that |s| may grow in a step, >= 1.
        aux, matrices, axes: as for `MatrixRule`.
    State: for each matrix `p`, (shorter side, rank); `m` and `v`, (rank, longer side),
        v real; `length`, |s|, real, (); that of `aux`.
    Raises: ValueError if a number is outside its range.
    Source: Chen et al. 2024, Algorithm 1, arXiv:2410.01623.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]])}
    >>> fira = Fira(0.1, rank=1)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]])}
    >>> state, _ = fira.apply(fira.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]])}
    >>> state, steps = fira.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.05182, -0.01370], [0.1437, -0.02581]]
    """

    ranges: ClassVar = {
        "scale": NOT_NEGATIVE,
        "max_growth": (1.0, math.inf, False),
    }

    scale: Hyper = 1.0
    max_growth: Hyper = 1.01

    def start(self, x):
        return Grown(self.basis(x), *self.moments(x), zero_length(x))

    def direction(self, state, g, t):
        p = self.renewed(state.p, g, t)
        r = p.T.conj() @ g
        m, v, n = self.adam(state.m, state.v, r, t)
        s = lengths(n, 0) / (lengths(r, 0) + TINY) * (g - p @ r)
        s, long = limited(s, state.length, self.max_growth)
        return Grown(p, m, v, long), self.scale * p @ n + s


@rule
class APOLLO(LowRank):
    """The gradient itself, scaled as Adam would scale a random projection of it.

        p    = Gaussian numbers / sqrt(rank), others every `every` steps
        r    = p^H g
        n    = Adam's direction for r, from moments m and v of the shape of r
        s    = |n_j| / (|r_j| + 1e-8) for each column j         by="channel"
        s    = |n| / (|r| + 1e-8)                               by="array"
        u    = sqrt(scale) * s * g
        u    = u / (max(|u| / (|u of before| + 1e-8), max_growth) / max_growth)
        step = learning_rate * u

    for a matrix with inputs <= outputs; others are transposed. The first step,
    and one after a step of 0, has no limit.
    APOLLO-Mini: `APOLLO(rank=1, scale=128.0, by="array")`. The authors' code debiases n
    after the limit, not before.

    Args:
        learning_rate, b1, b2, eps: as for `Adam`.
        rank, every: as for `GaLore`.
        scale: the square of a factor of all steps, >= 0.
        by: what has a factor of its own: each "channel" or the whole "array".
        max_growth: the most that |u| may grow in a step, >= 1.
        seed: where the generator of p starts.
        aux, matrices, axes: as for `MatrixRule`.
    State: for each matrix `m` and `v`, (rank, longer side), v real; `length`, |u|,
        real, (); that of `aux`. p is drawn anew in each step.
    Raises: ValueError if a number is outside its range, or for another `by`.
    Source: Zhu et al. 2024, Algorithm 1, arXiv:2412.05270.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]])}
    >>> apollo = APOLLO(0.1, rank=1)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]])}
    >>> state, _ = apollo.apply(apollo.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]])}
    >>> state, steps = apollo.apply(state, x, g)
    >>> steps["w"].tolist()
    [[-0.02678, 0.01126], [0.08034, -0.02252]]
    """

    ranges: ClassVar = Fira.ranges

    rank: int = 256
    scale: Hyper = 1.0
    eps: Hyper = 1e-6
    by: Literal["channel", "array"] = "channel"
    max_growth: Hyper = 1.01
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        one_of(self, "by", ("channel", "array"))

    def start(self, x):
        return Drawn(*self.moments(x), zero_length(x))

    def direction(self, state, g, t):
        n_th = (t.astype(jnp.int32) - 1) // self.every
        rank = min(self.rank, *g.shape)
        p = gaussian(nth_key(self.seed, n_th), (g.shape[0], rank), g.dtype)
        p = p / math.sqrt(rank or 1)
        r = p.T @ g
        m, v, n = self.adam(state.m, state.v, r, t)
        to, of = (lengths(y, 0) if self.by == "channel" else length(y) for y in (n, r))
        u = jnp.sqrt(self.scale) * to / (of + TINY) * g
        u, long = limited(u, state.length, self.max_growth)
        return Drawn(m, v, long), u


TINY = 1e-8  # beside lengths that may be 0, in the authors' code of Fira and of APOLLO


def first_vectors(g: Array, rank: int) -> Array:
    """The first left singular vectors, (inputs, rank), each with one sign.

    The number that is largest in magnitude is made real and positive.
    """
    if rank == 0:
        return jnp.zeros((g.shape[0], 0), g.dtype)
    p = jnp.linalg.svd(g, full_matrices=False)[0][:, :rank]
    largest = jnp.take_along_axis(p, jnp.argmax(jnp.abs(p), 0, keepdims=True), 0)
    return p * jnp.sign(largest).conj()


def zero_length(x: Array) -> Array:
    return jnp.zeros((), real_part_dtype(x.dtype))


def limited(u: Array, before: Array, max_growth: Any) -> tuple[Array, Array]:
    """`u`, at most so many times as long as the one before; and its length."""
    long = length(u)
    factor = jnp.maximum(long / (before + TINY), max_growth) / max_growth
    # From 0, as of a layer behind one that starts with zeros, it would take thousands
    # of steps to grow.
    factor = jnp.where(before != 0, factor, 1)
    return u / factor, long / factor
