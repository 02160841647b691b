"""Preconditioners of a matrix that are fitted to random probes."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

from optimjax.arrays import cast, ratio, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.noise import gaussian, nth_key
from optimjax.rule import rule
from optimjax.rules.kronecker import Kronecker
from optimjax.rules.matrix import length, unit

__all__ = ["PSGDKron"]


class Factors(NamedTuple):
    m: Array
    q_left: Array
    q_right: Array


def seldom(count: Array) -> Array:
    """How probable an update of the factors is: always at first, 3 % in the end."""
    return jnp.clip(jnp.exp(-0.001 * (count - 500)), 0.03, 1.0)


@rule
class PSGDKron(Kronecker):
    """Momentum between two factors that whiten it, fitted step by step.

        m    <- b1 * m + (1 - b1) * g
        m_hat = m / (1 - b1^t)
        u     = Q_left^T Q_left m_hat Q_right^T Q_right
        step  = learning_rate * u * min(1, max_rms / (rms(u) + 1e-6))

    with a probability of `update_probability` after both Q, upper triangular, are

        A  = Q_left m_hat Q_right^T                       g if not momentum_into
        B  = Q_left^-T V Q_right^-1                       V ~ Normal(0, 1)
        S  = A A^T;  Z = B B^T                            A^T A, B^T B for Q_right
        Q <- Q - precond_rate * triu(S - Z) Q / |S + Z|   for each Q

    where |.| is a lower bound of the largest singular value. Q of an axis that is
    longer than `max_dim` is a diagonal.

    Args:
        learning_rate: factor of all steps, in the parameter's unit, >= 0.
        b1: decay of the momentum, in [0, 1).
        precond_rate: size of the changes of both Q, in [0, 1].
        update_probability: of a change of both Q at a step, in [0, 1]; the default is a
            schedule that falls from 1 to 0.03.
        balance_probability: that they are scaled to one largest number before a change,
            in [0, 1]; the steps stay the same, but for what overflows.
        max_rms: the largest root of a mean square of a step per unit of learning rate.
        init_scale: of which both Q together start as a multiple of the identity, > 0.
        max_dim: the longest axis whose Q is a triangle.
        momentum_into: fit to the momentum, not to the gradient.
        seed: starts the random generator, together with the number of the step.
        aux, matrices, axes: as for `MatrixRule`.
    State: `m`, shape of the parameter; `q_left`, (inputs, inputs) or (inputs,),
        `q_right`, (outputs, outputs) or (outputs,), for each matrix; that of `aux`.
    Raises: ValueError if a number is outside its range.
    Source: Li 2018, arXiv:1512.04202; the authors' code.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.ones(2)}
    >>> kron = PSGDKron(0.1)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]]), "b": jnp.ones(2)}
    >>> state, _ = kron.apply(kron.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]]), "b": jnp.ones(2)}
    >>> state, steps = kron.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.01551, -0.02529], [0.05506, -0.1496]]
    """

    shaped: ClassVar = ("m",)
    ranges: ClassVar = {
        "precond_rate": (0.0, 1.0, False),
        "update_probability": (0.0, 1.0, False),
        "balance_probability": (0.0, 1.0, False),
        "max_rms": NOT_NEGATIVE,
    }
    positive: ClassVar = ("init_scale",)

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    precond_rate: Hyper = 0.1
    update_probability: Hyper = seldom
    balance_probability: Hyper = 0.01
    max_rms: Hyper = 1.1
    init_scale: Hyper = 1.0
    max_dim: int = 8192
    momentum_into: bool = True
    seed: int = 0

    def init_matrix(self, x):
        def factor(n: int) -> Array:
            one = jnp.ones(n, x.dtype)
            one = one if n > self.max_dim else jnp.diag(one)
            return jnp.sqrt(self.init_scale) * one

        return Factors(zeros_like(x), *map(factor, x.shape))

    def apply_matrix(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        m_hat = m / (1 - self.b1**t)
        # One key a step, for all matrices, so that what is drawn is no batch of them.
        key = nth_key(self.seed, (t - 1).astype(jnp.uint32))
        of_v, of_update, of_balance = jax.random.split(key, 3)
        kept = state.q_left, state.q_right
        left, right = lax.cond(
            happens(of_update, self.update_probability),
            lambda: self._fitted(
                balanced(*kept, happens(of_balance, self.balance_probability)),
                m_hat if self.momentum_into else g,
                gaussian(of_v, x.shape, x.dtype),
            ),
            lambda: kept,
        )
        u = m_hat
        for q in (left, right):  # one side after the other
            u = times(q, u, transposed=False)
            u = times(q, u, transposed=True).T
        rms = length(u) / max(u.size, 1) ** 0.5
        u = u * jnp.minimum(1, self.max_rms / (rms + 1e-6))
        return Factors(m, left, right), self.learning_rate * u

    def _fitted(
        self, qs: tuple[Array, Array], g: Array, v: Array
    ) -> tuple[Array, Array]:
        left, right = qs
        a = times(right, times(left, g).T).T
        b = over(right, over(left, v).T).T
        return self._changed(left, a, b), self._changed(right, a.T, b.T)

    def _changed(self, q: Array, a: Array, b: Array) -> Array:
        if q.ndim == 1:
            t1, t2 = (jnp.sum(x**2, axis=1) for x in (a, b))
            bound = jnp.max(t1 + t2, initial=0)
            change = (t1 - t2) * q
        else:
            t1, t2 = (x @ x.T for x in (a, b))
            bound = lower_bound(t1 + t2)
            change = jnp.triu(t1 - t2) @ q
        return q - self.precond_rate * ratio(change, bound)


def happens(key: Array, probability: Any) -> Array:
    drawn = jax.random.uniform(key, (), jnp.float32)
    return cast(drawn, probability.dtype) < probability


def times(q: Array, x: Array, transposed: bool = False) -> Array:
    """q x, or q^T x; of a vector q the diagonal matrix."""
    if q.ndim == 1:
        return q[:, None] * x
    return (q.T if transposed else q) @ x


def over(q: Array, x: Array) -> Array:
    """q^-T x of an upper triangular q."""
    return x / q[:, None] if q.ndim == 1 else solve_triangular(q, x, trans="T")


def balanced(left: Array, right: Array, wanted: Array) -> tuple[Array, Array]:
    """Both with one largest number, and the product that they had."""
    sizes = [jnp.max(jnp.abs(q), initial=0) for q in (left, right)]
    # From the root of a ratio, which overflows later than the product.
    factor = jnp.sqrt(ratio(sizes[1], sizes[0]))
    factor = jnp.where(wanted & (factor > 0), factor, 1)
    return left * factor, right / factor


def lower_bound(s: Array) -> Array:
    """Of the largest singular value of a symmetric matrix, by a step from a column."""
    largest = jnp.max(jnp.abs(s), initial=0)
    s = ratio(s, largest)
    column = s[:, jnp.argmax(jnp.sum(s**2, axis=0))] if s.size else s.sum(0)
    return largest * length(s @ unit(column @ s))
