"""The gradient between inverse roots of its two covariances."""

from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimjax.arrays import abs_sq, root, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.options import at_least_one, one_of
from optimjax.rule import rule
from optimjax.rules.kronecker import Kronecker
from optimjax.rules.matrix import length, unit

__all__ = ["Shampoo"]

Graft = Literal["rmsprop", "adagrad", "sgd", "sign", "normalized"]


class Blocks(NamedTuple):
    m: Array
    a: Array | None
    left: Array
    right: Array
    root_left: Array
    root_right: Array


@rule
class Shampoo(Kronecker):
    """The gradient between the inverse roots of two running sums of its squares.

        left  <- b2 * left  + w * g g^T                   w = 1 - b2; 1 if b2 is 1
        right <- b2 * right + w * g^T g
        u      = (left + eps * max(left))^(-1/4) g (right + eps * max(right))^(-1/4)
        p      = u * |d| / |u|                            d in the first `start` steps
        m     <- b1 * m + p
        step   = learning_rate * (p + b1 * m if nesterov else m)

    where max(.) is the largest eigenvalue, times the identity, and |.| the norm of the
    matrix. The length of p is that of the step d of another rule:

        d = g / (sqrt(a) + graft_eps), a <- b2 * a + w * g^2     graft="rmsprop"
        d = g / (sqrt(a) + graft_eps), a <- a + g^2              graft="adagrad"
        d = that of "rmsprop" for g / |g|                        graft="normalized"
        d = sign(g)                                              graft="sign"
        d = g                                                    graft="sgd"

    Args:
        learning_rate: factor of all steps, >= 0. As m is a sum, 1 / (1 - b1) times the
            mean, and a begins at 0, it wants to be 10 to 30 times below Adam's: where
            that learns at its 1e-3, give 1e-4.
        b1: decay of the momentum, in [0, 1).
        b2: decay of both factors, in [0, 1]; 1 for sums.
        eps: added to the eigenvalues, relative to the largest, > 0.
        every: steps from one pair of roots to the next, >= 1.
        start: how many steps follow d, while the factors gather.
        graft: the rule that gives the length; None for that of u, and d = g.
        graft_eps: added to the root, in the gradient's unit, >= 0.
        nesterov: look ahead along the momentum.
        block_size: the longest side of blocks into which the matrix is cut, each with
            factors of its own; None for one block.
        aux, matrices, axes: as for `MatrixRule`.
    State: `m`, and `a` where `graft` has one, shape of the parameter; `left`,
        `root_left`, (blocks, rows, rows), `right`, `root_right`, (blocks, columns,
        columns), for each matrix; that of `aux`.
    Raises: ValueError if a number is outside its range, or for another `graft`.
    Source: Gupta et al. 2018, Algorithm 1, arXiv:1802.09568; Anil et al. 2020,
        arXiv:2002.09018, for grafting and blocks.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.ones(2)}
    >>> shampoo = Shampoo(0.1, start=0)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]]), "b": jnp.ones(2)}
    >>> state, _ = shampoo.apply(shampoo.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]]), "b": jnp.ones(2)}
    >>> state, steps = shampoo.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.7117, -0.8149], [3.914, -5.993]]
    """

    shaped: ClassVar = ("m", "a")
    ranges: ClassVar = {
        "b2": (0.0, 1.0, False),
        "graft_eps": NOT_NEGATIVE,
    }
    positive: ClassVar = ("eps",)

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-6
    every: int = 1
    start: int = 5
    graft: Graft | None = "rmsprop"
    graft_eps: Hyper = 1e-10
    nesterov: bool = True
    block_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        at_least_one(self, "every")
        if self.block_size is not None:
            at_least_one(self, "block_size")
        one_of(self, "graft", (*get_args(Graft), None))

    def init_matrix(self, x):
        blocks, rows, columns = cut(x, self.block_size).shape

        def zeros(n: int) -> Array:
            return jnp.zeros((blocks, n, n), x.dtype)

        squares = self.graft in ("rmsprop", "adagrad", "normalized")
        return Blocks(
            m=zeros_like(x),
            a=zeros_like(x) if squares else None,
            left=zeros(rows),
            right=zeros(columns),
            root_left=zeros(rows),
            root_right=zeros(columns),
        )

    def apply_matrix(self, state, x, g, t):
        w = jnp.where(self.b2 == 1, 1.0, 1 - self.b2)
        blocks = cut(g, self.block_size)
        across = blocks.swapaxes(1, 2)
        left = self.b2 * state.left + w * (blocks @ across)
        right = self.b2 * state.right + w * (across @ blocks)
        roots = lax.cond(
            (t - 1) % self.every == 0,
            lambda: (inverse_root(left, self.eps), inverse_root(right, self.eps)),
            lambda: (state.root_left, state.root_right),
        )
        u = joined(roots[0] @ blocks @ roots[1], g)
        a, d = self._grafted(state.a, g, w)
        u = u if self.graft is None else length(d) * unit(u)
        p = jnp.where(t <= self.start, d, u)
        m = self.b1 * state.m + p
        step = self.learning_rate * (p + self.b1 * m if self.nesterov else m)
        return Blocks(m, a, left, right, *roots), step

    def _grafted(self, a: Array | None, g: Array, w: Array) -> tuple[Any, Array]:
        """The other rule's state, and its step."""
        if a is None:
            return None, jnp.sign(g) if self.graft == "sign" else g
        g = unit(g) if self.graft == "normalized" else g
        summed = self.graft == "adagrad"
        new = a + abs_sq(g) if summed else self.b2 * a + w * abs_sq(g)
        size = root(new) + self.graft_eps
        return new, g / jnp.where(size == 0, 1, size)


def cut(x: Array, size: int | None) -> Array:
    """A matrix as blocks of at most size x size numbers, (blocks, rows, columns).

    Those at its ends are filled up with zeros, which stay alone in every product.
    """
    rows, columns = (max(n if size is None else min(n, size), 1) for n in x.shape)
    down, along = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    missing = (down * rows - x.shape[0], along * columns - x.shape[1])
    x = jnp.pad(x, [(0, n) for n in missing])
    x = x.reshape(down, rows, along, columns).swapaxes(1, 2)
    return x.reshape(down * along, rows, columns)


def joined(blocks: Array, like: Array) -> Array:
    """What `cut` took apart, put together again."""
    inputs, outputs = like.shape
    _, rows, columns = blocks.shape
    down, along = -(-inputs // rows), -(-outputs // columns)
    x = blocks.reshape(down, along, rows, columns).swapaxes(1, 2)
    return x.reshape(down * rows, along * columns)[:inputs, :outputs]


@jax.custom_jvp
def inverse_root(s: Array, eps: Array) -> Array:
    """(s + eps * max(s) * 1)^(-1/4) of symmetric matrices; of zeros the identity."""
    powers, vectors, _, scale = _powers(s, eps)
    return (vectors * (powers * scale)[..., None, :]) @ vectors.swapaxes(-1, -2)


def _powers(s: Array, eps: Array) -> tuple[Array, Array, Array, Array]:
    """The root's eigenvalues but for a scale, its eigenvectors, the largest eigenvalue
    of s (0: 1), and the scale: eps times a tiny one may be 0 in float32."""
    values, vectors = jnp.linalg.eigh(s)
    zero = values[..., -1:] == 0
    largest = jnp.where(zero, 1, values[..., -1:])
    powers = (jnp.maximum(values / largest, 0) + eps) ** -0.25
    return jnp.where(zero, 1, powers), vectors, largest, largest**-0.25


@inverse_root.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    # The root is smooth where the eigenvectors are not, at equal eigenvalues, which
    # every factor of low rank has. Between p = a^(-1/4) and q = b^(-1/4), the quotient
    # (p - q) / (a - b) is -(p q)^4 / ((p + q) (p^2 + q^2)): nothing cancels.
    (s, eps), (ds, deps) = primals, tangents
    powers, vectors, largest, scale = _powers(s, eps)
    p, q = powers[..., :, None], powers[..., None, :]
    pq = p * q
    quotient = -pq * (pq / (p + q)) * (pq**2 / (p**2 + q**2))
    back = vectors.swapaxes(-1, -2)
    inside = back @ (ds / largest[..., None]) @ vectors
    shift = deps + eps * inside[..., -1, -1:]
    one = jnp.broadcast_to(jnp.eye(s.shape[-1], dtype=s.dtype), s.shape)
    inside = quotient * (inside + shift[..., None] * one)
    inside = jnp.where(jnp.any(s != 0, (-2, -1), keepdims=True), inside, 0)
    scale = scale[..., None]
    return (vectors * (q * scale)) @ back, vectors @ (inside * scale) @ back
