"""Preconditioners of a matrix: one factor for its inputs, and one for its outputs."""

from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimjax.arrays import abs_sq, zeros_like
from optimjax.hyper import Hyper
from optimjax.options import at_least_one
from optimjax.rule import rule
from optimjax.rules.matrix import MatrixRule
from optimjax.treewide import PyTree

__all__ = ["SOAP", "SPlus"]

Pair: TypeAlias = tuple[Array | None, Array | None]


@rule
class Kronecker(MatrixRule):
    """What rules with a factor for each axis of a matrix share."""

    complex_ok: ClassVar = False

    def _arithmetic(
        self, state: PyTree, x: Array, arrays: tuple[Array, ...], t: Array
    ) -> tuple[PyTree, Array]:
        # Roots and inverses magnify what products in TF32 or bfloat16 lose.
        with jax.default_matmul_precision("highest"):
            return super()._arithmetic(state, x, arrays, t)


# A factor, or a rotation, is None where an axis has none: the identity.


def grams(g: Array, left: Array | None, right: Array | None, decay: Any) -> Pair:
    """Running means of g g^T and of g^T g."""

    def mean(old: Array | None, x: Array) -> Array | None:
        return None if old is None else decay * old + (1 - decay) * (x @ x.T)

    return mean(left, g), mean(right, g.T)


def eigenvectors(s: Array | None) -> Array | None:
    """Those of a symmetric matrix as columns, the largest eigenvalue's first."""
    return None if s is None else jnp.linalg.eigh(s)[1][:, ::-1]


def rotated(x: Array, left: Array | None, right: Array | None) -> Array:
    """left^T x right"""
    x = x if left is None else left.T @ x
    return x if right is None else x @ right


def rotated_back(x: Array, left: Array | None, right: Array | None) -> Array:
    """left x right^T"""
    x = x if left is None else left @ x
    return x if right is None else x @ right.T


class Eigenbasis(NamedTuple):
    m: Array
    v: Array
    left: Array | None
    right: Array | None
    q_left: Array | None
    q_right: Array | None


@rule
class SOAP(Kronecker):
    """Adam in the eigenbasis of Shampoo's two factors, which is renewed now and then.

        G     = Q_left^T g Q_right
        m    <- b1 * m + (1 - b1) * G
        v    <- b2 * v + (1 - b2) * G^2
        c     = sqrt(1 - b2^k) / (1 - b1^k)               1 without bias_correction
        step  = learning_rate * c * Q_left (m / (sqrt(v) + eps)) Q_right^T
        left  <- shampoo_decay * left  + (1 - shampoo_decay) * g g^T
        right <- shampoo_decay * right + (1 - shampoo_decay) * g^T g

    for k = t - 1 > 0: the first gradient gives both Q, the eigenvectors of its `left`
    and `right`, and no step. When `every` divides k, the columns of each Q are put in
    the order of the diagonal of Q^T left Q, the largest first, v with them, Q becomes
    the orthogonal factor of left Q, and m is turned into the new basis.

    Args:
        learning_rate: size of a step when all gradients agree, in the parameter's
            unit, >= 0.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        shampoo_decay: decay of both factors, in [0, 1); None for b2.
        eps: added to the root, in the gradient's unit, >= 0.
        every: steps from one basis to the next, >= 1.
        max_dim: the longest axis that has a factor; a longer one is not turned.
        one_sided: turn the shorter axis only, the inputs if both are as long.
        bias_correction: make up for moments that start at 0.
        aux, matrices, axes: as for `MatrixRule`.
    State: `m` (in the basis) and `v`, shape of the parameter; `left` and `q_left`,
        (inputs, inputs), `right` and `q_right`, (outputs, outputs), for each matrix;
        None for an axis that is not turned; that of `aux`.
    Raises: ValueError if a number is outside its range.
    Source: Vyas et al. 2024, Algorithm 3, arXiv:2409.11321; the first step of their
        code.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.ones(2)}
    >>> soap = SOAP(0.1, every=1)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]]), "b": jnp.ones(2)}
    >>> state, _ = soap.apply(soap.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]]), "b": jnp.ones(2)}
    >>> state, steps = soap.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.08166, 0.1133], [-0.08367, -0.1161]]
    >>> g = {"w": jnp.array([[-0.7, 1.0], [0.6, 1.5]]), "b": jnp.ones(2)}
    >>> state, steps = soap.apply(state, x, g)
    >>> steps["w"].tolist()
    [[-0.06861, 0.0626], [0.03914, -0.03201]]
    """

    shaped: ClassVar = ("m", "v")
    ranges: ClassVar = {"shampoo_decay": (0.0, 1.0, True)}

    learning_rate: Hyper = 3e-3
    b1: Hyper = 0.95
    b2: Hyper = 0.95
    shampoo_decay: Hyper | None = None
    eps: Hyper = 1e-8
    every: int = 10
    max_dim: int = 10_000
    one_sided: bool = False
    bias_correction: bool = True

    def __post_init__(self):
        super().__post_init__()
        at_least_one(self, "every")

    def init_matrix(self, x):
        inputs, outputs = x.shape
        left = inputs <= self.max_dim and not (self.one_sided and inputs > outputs)
        right = outputs <= self.max_dim and not (self.one_sided and inputs <= outputs)

        def square(n: int, turned: bool) -> Array | None:
            return jnp.zeros((n, n), x.dtype) if turned else None

        return Eigenbasis(
            m=zeros_like(x),
            v=zeros_like(x),
            left=square(inputs, left),
            right=square(outputs, right),
            q_left=square(inputs, left),
            q_right=square(outputs, right),
        )

    def apply_matrix(self, state, x, g, t):
        return lax.cond(t == 1, self._first, self._later, state, g, t)

    def _first(self, state: Eigenbasis, g: Array, t: Array) -> tuple[Eigenbasis, Array]:
        left, right = self._factors(state, g)
        bases = eigenvectors(left), eigenvectors(right)
        return Eigenbasis(state.m, state.v, left, right, *bases), jnp.zeros_like(g)

    def _later(self, state: Eigenbasis, g: Array, t: Array) -> tuple[Eigenbasis, Array]:
        bases, k = (state.q_left, state.q_right), t - 1
        turned = rotated(g, *bases)
        m = self.b1 * state.m + (1 - self.b1) * turned
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(turned)
        c = 1.0
        if self.bias_correction:
            c = jnp.sqrt(1 - self.b2**k) / (1 - self.b1**k)
        u = rotated_back(m / (jnp.sqrt(v) + self.eps), *bases)
        left, right = self._factors(state, g)
        state = Eigenbasis(m, v, left, right, *bases)
        state = lax.cond(k % self.every == 0, in_new_basis, lambda same: same, state)
        return state, self.learning_rate * c * u

    def _factors(self, state: Eigenbasis, g: Array) -> Pair:
        decay = self.b2 if self.shampoo_decay is None else self.shampoo_decay
        return grams(g, state.left, state.right, decay)


def in_new_basis(state: Eigenbasis) -> Eigenbasis:
    """The state, with both bases a step of the power iteration nearer."""
    v_left, q_left = nearer(state.left, state.q_left, state.v)
    v_right, q_right = nearer(state.right, state.q_right, v_left.T)
    m = rotated_back(state.m, state.q_left, state.q_right)
    m = rotated(m, q_left, q_right)
    return Eigenbasis(m, v_right.T, state.left, state.right, q_left, q_right)


def nearer(s: Array | None, q: Array | None, v: Array) -> tuple[Array, Array | None]:
    """The rows of `v`, and the columns of `q` nearer to the eigenvectors of `s`."""
    if s is None or q is None:
        return v, q
    order = jnp.argsort(jnp.sum(q * (s @ q), axis=0), descending=True)
    return v[order], jnp.linalg.qr(s @ q[:, order])[0]


class Signs(NamedTuple):
    m: Array
    left: Array | None
    right: Array | None
    q_left: Array | None
    q_right: Array | None


@rule
class SPlus(Kronecker):
    """Signs of the momentum in the eigenbasis of Shampoo's two factors.

        m    <- b1 * m + (1 - b1) * g
        u     = Q_left sign(Q_left^T m Q_right) Q_right^T
        step  = learning_rate * 2 / (inputs + outputs) * u
        left  <- b2 * left  + (1 - b2) * g g^T
        right <- b2 * right + (1 - b2) * g^T g

    Both Q, the identity at first, become the eigenvectors of `left` and `right` after
    the first step, and then after each whose number `every` divides. The paper
    evaluates a model at an average of the parameters: `EMA(SPlus(), 0.999)`.

    Args:
        learning_rate: how far a matrix moves in each direction, times half the sum of
            its sides, >= 0. (The authors' torch code has a quarter of this factor.)
        b1: decay of the momentum, in [0, 1).
        b2: decay of both factors, in [0, 1).
        every: steps from one basis to the next, >= 1.
        max_dim: the longest axis that has a factor; a longer one is not turned.
        aux, matrices, axes: as for `MatrixRule`.
    State: `m`, shape of the parameter; `left` and `q_left`, (inputs, inputs), `right`
        and `q_right`, (outputs, outputs), for each matrix, None for an axis that is not
        turned; that of `aux`.
    Raises: ValueError if a number is outside its range.
    Source: Frans et al. 2025, Algorithm 1, arXiv:2506.07254.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.ones(2)}
    >>> splus = SPlus(0.1)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]]), "b": jnp.ones(2)}
    >>> state, _ = splus.apply(splus.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]]), "b": jnp.ones(2)}
    >>> state, steps = splus.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.05807, -0.04183], [0.05667, -0.04083]]
    """

    shaped: ClassVar = ("m",)

    learning_rate: Hyper = 0.1
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    every: int = 100
    max_dim: int = 10_000

    def __post_init__(self):
        super().__post_init__()
        at_least_one(self, "every")

    def init_matrix(self, x):
        def factor(make: Any, n: int) -> Array | None:
            return make((n, n), dtype=x.dtype) if n <= self.max_dim else None

        inputs, outputs = x.shape
        return Signs(
            m=zeros_like(x),
            left=factor(jnp.zeros, inputs),
            right=factor(jnp.zeros, outputs),
            q_left=factor(identity, inputs),
            q_right=factor(identity, outputs),
        )

    def apply_matrix(self, state, x, g, t):
        bases = state.q_left, state.q_right
        m = self.b1 * state.m + (1 - self.b1) * g
        u = rotated_back(jnp.sign(rotated(m, *bases)), *bases)
        left, right = grams(g, state.left, state.right, self.b2)
        bases = lax.cond(
            (t == 1) | (t % self.every == 0),
            lambda: (eigenvectors(left), eigenvectors(right)),
            lambda: bases,
        )
        step = self.learning_rate * 2 / max(sum(x.shape), 1) * u
        return Signs(m, left, right, *bases), step


def identity(shape: tuple[int, int], dtype: Any) -> Array:
    return jnp.eye(shape[0], dtype=dtype)
