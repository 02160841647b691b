"""Steps of one length in every direction: by power iteration, and in a chosen norm."""

import math
from typing import ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from optimjax.arrays import lengths, ratio, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper, PerPath
from optimjax.leaf import LeafRule
from optimjax.noise import gaussian, nth_key
from optimjax.options import one_of
from optimjax.rule import AxesOf, Option, rule
from optimjax.rules.matrix import MatrixRule, length
from optimjax.rules.muon import Triple, check_iteration, orthogonalize
from optimjax.units import blocks, has_inputs, joined

__all__ = ["Dion", "Scion"]


class Powered(NamedTuple):
    m: Array
    q: Array


class Averaged(NamedTuple):
    d: Array


@rule
class Dion(MatrixRule):
    """Momentum made orthogonal in a few directions, by one power iteration a step.

        m   <- m + g
        p    = Q of the QR decomposition of m^H q              (outputs, rank)
        r    = m p                                             (inputs, rank)
        m   <- m - (1 - momentum) * r p^H
        q   <- r / (norm of each column + eps)
        step = learning_rate * sqrt(outputs / inputs) * q p^H

    What the `rank` directions leave of the moment stays in it. q starts from Gaussian
    numbers, the same for all matrices of a shape.

    Args:
        learning_rate: length of the step in each direction, in the unit of the
            parameter's singular values, >= 0.
        momentum: decay of the moment, in those directions, in [0, 1).
        rank: how many directions: an int, >= 1; a share of the shorter side, in (0, 1];
            None for all.
        eps: added to the norms of the columns, in the moment's unit, >= 0.
        seed: where the generator of q starts.
        aux, matrices, axes: as for `MatrixRule`.
    State: `m`, shape of the parameter; `q`, (inputs, rank) for each matrix; that of
        `aux`.
    Raises: ValueError if a number is outside its range.
    Source: Ahn et al. 2025, Algorithm 1, arXiv:2504.05295.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]])}
    >>> dion = Dion(0.1, rank=1)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]])}
    >>> state, _ = dion.apply(dion.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]])}
    >>> state, steps = dion.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.01260, -0.01982], [0.05214, -0.08204]]
    """

    shaped: ClassVar = ("m",)

    learning_rate: Hyper = 0.02
    momentum: Hyper = 0.95
    rank: int | float | None = None
    eps: Hyper = 1e-8
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        rank = self.rank
        share = isinstance(rank, float)
        if rank is not None and not (0 < rank <= 1 if share else rank >= 1):
            expected = "a share in (0, 1]" if share else ">= 1"
            raise ValueError(f"Dion: rank is {rank!r}, expected {expected}.")
        if share and rank == 1:  # else it would be equal to the int
            object.__setattr__(self, "rank", None)

    def init_matrix(self, x):
        rank, most = self.rank, min(x.shape)
        if rank is None:
            rank = most
        elif isinstance(rank, float):
            rank = math.ceil(rank * most)
        shape = (x.shape[0], min(rank, most))
        return Powered(zeros_like(x), gaussian(nth_key(self.seed, 0), shape, x.dtype))

    def apply_matrix(self, state, x, g, t):
        m = state.m + g
        p, _ = jnp.linalg.qr(m.T.conj() @ state.q)
        r = m @ p
        m = m - (1 - self.momentum) * r @ p.T.conj()
        q = ratio(r, lengths(r, 0) + self.eps)
        scale = math.sqrt(x.shape[1] / max(x.shape[0], 1))
        return Powered(m, q), self.learning_rate * scale * q @ p.T.conj()


Norm = Literal["auto", "spectral", "sign", "bias", "rows", "columns"]


@rule
class Scion(LeafRule):
    """The longest step that a norm of the array allows, along the momentum.

        d   <- (1 - alpha) * d + alpha * g
        step = learning_rate * radius * lmo(d)                  constrained=False
        step = learning_rate * (x + radius * lmo(d))            constrained=True

    where lmo(d) depends on the norm; d_j are the weights of output j, d_i of input i:

        "spectral"  sqrt(outputs / inputs) * orthogonalize(d)   matrices within
        "columns"   d_i / (|d_i| / sqrt(outputs) + eps)         embeddings
        "sign"      sign(d) / inputs                            the last layer
        "rows"      d_j / (|d_j| * sqrt(inputs) + eps)          the last layer, too
        "bias"      d / (rms(d) + eps)                          vectors
        "auto"      "spectral", and "bias" for arrays that have no inputs

    With `constrained` no array grows beyond `radius` in its norm.

    Args:
        learning_rate: share of the radius in a step, in [0, 1] if constrained.
        alpha: weight of the new gradient in the momentum, in (0, 1].
        radius: size of a step per unit of learning rate, >= 0; by path,
            `{"lm_head*": 3000.0, "*": 50.0}`.
        norm: one name, a dict {glob: name}, "auto" for all others, or a function of
            (path, leaf).
        constrained: shrink the parameter, too.
        iterations, coefficients: as for `orthogonalize`.
        eps: added to norms, in the gradient's unit, >= 0.
        axes: as for `MatrixRule`.
    State: `d`, shape of the parameter.
    Raises: ValueError if a number is outside its range, or for another norm.
    Source: Pethick et al. 2025, Algorithms 1 and 2 and table 4, arXiv:2502.07529.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.ones(2)}
    >>> scion = Scion(0.01, radius={"w": 5.0, "*": 1.0}, norm={"w": "sign"})
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]]), "b": jnp.array([3.0, 4.0])}
    >>> _, steps = scion.apply(scion.init(x), x, g)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([[0.025, -0.025], [0.025, 0.025]], [0.008485, 0.01131])
    """

    ranges: ClassVar = {"alpha": (0.0, 1.0, False), "radius": NOT_NEGATIVE}
    positive: ClassVar = ("alpha",)

    learning_rate: Hyper = 2.0**-12
    alpha: Hyper = 0.1
    radius: Hyper = 50.0
    norm: Option = "auto"
    constrained: bool = False
    iterations: int = 5
    coefficients: str | tuple[Triple, ...] = "quintic"
    eps: Hyper = 1e-8
    axes: AxesOf = None

    def __post_init__(self):
        super().__post_init__()
        check_iteration(self)
        if not isinstance(self.norm, PerPath):
            one_of(self, "norm", get_args(Norm))

    def init_leaf(self, x):
        one_of(self, "norm", get_args(Norm))
        has_inputs(self.axes, x.shape)  # complain at once
        return Averaged(zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        d = (1 - self.alpha) * state.d + self.alpha * g
        name = self.norm
        if name == "auto":
            name = "spectral" if has_inputs(self.axes, x.shape) else "bias"
        longest = jax.vmap(lambda d: self.longest(d, name))
        u = self.radius * joined(self.axes, [*map(longest, blocks(self.axes, d))], x)
        return Averaged(d), self.learning_rate * (u + x if self.constrained else u)

    def longest(self, d: Array, name: str) -> Array:
        """The matrix of norm 1 that has the largest product with `d`."""
        inputs, outputs = max(d.shape[0], 1), max(d.shape[1], 1)
        if name == "spectral":
            o = orthogonalize(d, self.coefficients, self.iterations, eps=self.eps)
            return math.sqrt(outputs / inputs) * o
        if name == "sign":
            return jnp.sign(d) / inputs
        if name == "rows":
            return ratio(d, lengths(d, 0) * math.sqrt(inputs) + self.eps)
        if name == "columns":
            return ratio(d, lengths(d, 1) / math.sqrt(outputs) + self.eps)
        return ratio(d, length(d) / max(d.size, 1) ** 0.5 + self.eps)
