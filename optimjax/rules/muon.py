"""Momentum made orthogonal: every direction of a matrix's step has one length."""

from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from optimjax.arrays import abs_sq, widen, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.options import at_least_one, one_of
from optimjax.rule import rule
from optimjax.rules.adam import momentum
from optimjax.rules.matrix import MatrixRule, largest, length, unit

__all__ = ["AdaMuon", "Muon", "NorMuon", "orthogonalize"]

Triple: TypeAlias = tuple[float, float, float]
Scale = Literal["shape", "spectral", "rms"]
Prescale = Literal["frobenius", "spectral", "schatten", "aol"]

# Of a X + b X X^H X + c (X X^H)^2 X: a triple for each iteration; the last is repeated.
COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    # Jordan et al. 2024: the steepest at 0; singular values end between 0.7 and 1.2.
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # Amsel et al. 2025, arXiv:2505.16932: the best for so many iterations.
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # Ahn et al. 2025, arXiv:2504.05295.
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def orthogonalize(
    x: Array,
    coefficients: str | tuple[Triple, ...] = "quintic",
    iterations: int = 5,
    *,
    prescale: Prescale = "frobenius",
    eps: Any = 1e-7,
) -> Array:
    """Nearly U V^H of the singular value decomposition x = U S V^H, by products alone.

        X <- x / (|x| + eps)                           |x|: root of the sum of squares
        X <- a X + b X X^H X + c (X X^H)^2 X           `iterations` times

    Args:
        x: a matrix, floating or complex, (n, m). Its rank has to show: singular values
            below about 1e-3 of |x| do not come near 1.
        coefficients: "quintic", "polar_express" or "dion", or triples (a, b, c), one
            for each iteration, of which the last is repeated.
        iterations: how many.
        prescale: what divides x. "frobenius": |x|, times 1.02 for "polar_express",
            which asks for singular values a little below 1; "spectral": the largest
            singular value itself, by a decomposition; "schatten": the root of |x x^H|,
            which is nearer to the largest singular value (arXiv:2506.10935); "aol":
            for each row of x, the root of the sum of a row of |x x^H|, which changes
            the directions a little and needs an iteration less (arXiv:2512.04632).
        eps: added to the divisor, so that zeros stay zeros; for "schatten" and "aol"
            the least square of it.
    Returns: (n, m), in the dtype of x.

    >>> x = jnp.array([[3.0, 0.0], [0.0, -0.5]])
    >>> orthogonalize(x).tolist()
    [[0.7136, 0.0], [0.0, -1.0420]]
    """
    named = isinstance(coefficients, str)
    triples = COEFFICIENTS[coefficients] if named else coefficients
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    if prescale == "frobenius":
        room = 1.02 if coefficients == "polar_express" else 1.0
        x = x / (room * length(x) + eps)
    elif prescale == "spectral":
        sigma = jnp.linalg.norm(widen(x), 2)  # there is no decomposition in 16 bits
        x = x / (sigma.astype(x.real.dtype) + eps)
    else:
        scale = largest(x)
        x = x / scale
        gram = x @ x.T.conj()
        if prescale == "schatten":
            square = length(gram)
        else:
            square = jnp.sum(jnp.abs(gram), axis=1, keepdims=True)
        x = x / jnp.sqrt(jnp.maximum(square, eps / scale / scale))
    for i in range(iterations):
        a, b, c = triples[min(i, len(triples) - 1)]
        gram = x @ x.T.conj()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def check_iteration(rule: Any) -> None:
    """`coefficients` by name or as triples of floats, and one iteration at least."""
    at_least_one(rule, "iterations")
    if isinstance(rule.coefficients, str):
        one_of(rule, "coefficients", tuple(COEFFICIENTS))
        return
    triples = tuple(tuple(map(float, each)) for each in rule.coefficients)
    if not triples or any(len(each) != 3 for each in triples):
        raise ValueError(
            f"{type(rule).__name__}: coefficients is {rule.coefficients!r}, expected "
            "triples of numbers, one at least."
        )
    object.__setattr__(rule, "coefficients", triples)


@rule
class Orthogonal(MatrixRule):
    """What rules that make a moment orthogonal share."""

    learning_rate: Hyper = 0.02
    momentum: Hyper = 0.95
    nesterov: bool = True
    coefficients: str | tuple[Triple, ...] = "quintic"
    iterations: int = 5
    prescale: Prescale = "frobenius"
    eps: Hyper = 1e-7
    dtype: DTypeLike | None = None

    def __post_init__(self):
        super().__post_init__()
        one_of(self, "prescale", get_args(Prescale))
        check_iteration(self)

    def look_ahead(self, m: Array, g: Array) -> tuple[Array, Array]:
        """The new moment, and what is made orthogonal."""
        m = self.momentum * m + (1 - self.momentum) * g
        ahead = self.momentum * m + (1 - self.momentum) * g
        return m, ahead if self.nesterov else m

    def orthogonal(self, w: Array) -> Array:
        made = orthogonalize(
            w if self.dtype is None else w.astype(self.dtype),
            self.coefficients,
            self.iterations,
            prescale=self.prescale,
            eps=self.eps if self.dtype is None else self.eps.astype(self.dtype),
        )
        return made.astype(w.dtype)


class Velocity(NamedTuple):
    m: Array


@rule
class Muon(Orthogonal):
    """Momentum, made orthogonal: all singular values of a matrix's step are about 1.

        m   <- momentum * m + (1 - momentum) * g
        w    = momentum * m + (1 - momentum) * g if nesterov else m
        o    = orthogonalize(w)                           U V^H of w = U S V^H
        step = learning_rate * s * o

        s = sqrt(max(1, outputs / inputs))                scale="shape"
        s = sqrt(outputs / inputs)                        scale="spectral"
        s = 0.2 * sqrt(max(inputs, outputs))              scale="rms"
        s = 1                                             scale=None

    Slots that are no hidden matrices (embeddings, heads, biases, scales of norms) take
    the steps of `aux`. With scale="rms" numbers move as far as with AdamW, so that its
    learning rates serve. Weight decay: `Decay(Muon(), 0.1)`.

    Args:
        learning_rate: length of the step in each direction, in the unit of the
            parameter's singular values, >= 0.
        momentum: decay of the moment, in [0, 1).
        nesterov: look ahead along the moment.
        coefficients, iterations, prescale, eps: as for `orthogonalize`.
        scale: what a matrix's shape does to its step.
        debias: divide both terms by their sums of weights, as optax does; this changes
            the direction of `nesterov` alone.
        dual_norm: multiply by the product <w, o>, so that the step knows how long the
            gradient is (arXiv:2409.20325).
        dtype: in which `orthogonalize` computes, such as bfloat16 on a GPU or TPU; None
            for the compute dtype.
        aux, matrices, axes: as for `MatrixRule`. Heads and blocks of a merged matrix:
            `axes={"*/qkv": Axes(split=(-1, 3))}`.
    State: `m`, shape of the parameter; that of `aux`.
    Raises: ValueError if a number is outside its range, or for another `scale`,
        `prescale` or name of coefficients.
    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural
        networks"; Liu et al. 2025, arXiv:2502.16982, for scale="rms".

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.ones(2)}
    >>> muon = Muon(0.1, coefficients="polar_express")
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]]), "b": jnp.ones(2)}
    >>> state, _ = muon.apply(muon.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]]), "b": jnp.ones(2)}
    >>> state, steps = muon.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.0925, 0.03324], [0.03371, -0.1043]]
    """

    shaped: ClassVar = ("m",)

    scale: Scale | None = "shape"
    debias: bool = False
    dual_norm: bool = False

    def __post_init__(self):
        super().__post_init__()
        one_of(self, "scale", (*get_args(Scale), None))

    def init_matrix(self, x) -> Any:
        return Velocity(zeros_like(x))

    def aim(self, m: Array, g: Array, t: Array) -> tuple[Array, Array]:
        """`look_ahead`, with `debias` as optax has it."""
        m, w = self.look_ahead(m, g)
        if self.debias:
            w = momentum(m, g, self.momentum, t, self.nesterov)
        return m, w

    def apply_matrix(self, state, x, g, t) -> tuple[Any, Array]:
        m, w = self.aim(state.m, g, t)
        return Velocity(m), self.scaled(self.orthogonal(w), w)

    def scaled(self, o: Array, w: Array) -> Array:
        inputs, outputs = o.shape
        ratio = outputs / max(inputs, 1)
        factors = {
            "shape": max(1, ratio) ** 0.5,
            "spectral": ratio**0.5,
            "rms": 0.2 * max(inputs, outputs) ** 0.5,
            None: 1.0,
        }
        step = self.learning_rate * factors[self.scale] * o
        return jnp.sum((w.conj() * o).real) * step if self.dual_norm else step


class Normed(NamedTuple):
    m: Array
    v: Array


@rule
class NorMuon(Muon):
    """Muon whose output units all move as far, by their own second moment.

        o    = orthogonalize(w)                           as for `Muon`
        v   <- b2 * v + (1 - b2) * mean of |o|^2 over the inputs
        u    = o / (sqrt(v) + eps_v)
        step = learning_rate * s * u * |o| / |u|

    where v holds one number for each output, and |.| is the norm of the matrix.

    Args:
        learning_rate, momentum, nesterov, coefficients, iterations, prescale, eps,
            scale, debias, dual_norm, dtype, aux, matrices, axes: as for `Muon`.
        b2: decay of the second moment, in [0, 1).
        eps_v: added to its root, >= 0.
    State: `m`, shape of the parameter; `v`, real, (outputs,) for each matrix; that of
        `aux`.
    Raises: ValueError as `Muon`.
    Source: Li et al. 2025, Algorithm 1, arXiv:2510.05491.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.ones(2)}
    >>> rule = NorMuon(0.1)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]]), "b": jnp.ones(2)}
    >>> state, _ = rule.apply(rule.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]]), "b": jnp.ones(2)}
    >>> state, steps = rule.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.08334, 0.03508], [0.02314, -0.0809]]
    """

    ranges: ClassVar = {"eps_v": NOT_NEGATIVE}

    b2: Hyper = 0.95
    eps_v: Hyper = 1e-8

    def init_matrix(self, x):
        return Normed(zeros_like(x), zeros_like(jnp.sum(x, axis=0), real=True))

    def apply_matrix(self, state, x, g, t):
        m, w = self.aim(state.m, g, t)
        o = self.orthogonal(w)
        mean = jnp.sum(abs_sq(o), axis=0) / max(o.shape[0], 1)
        v = self.b2 * state.v + (1 - self.b2) * mean
        u = o / (jnp.sqrt(v) + self.eps_v)[None]
        return Normed(m, v), self.scaled(length(o) * unit(u), w)


@rule
class AdaMuon(Orthogonal):
    """Muon with a second moment of each number of the orthogonal matrix.

        m   <- momentum * m + (1 - momentum) * g
        w    = momentum * m + (1 - momentum) * g if nesterov else m
        o    = orthogonalize(sign(w))                     w itself with sign=False
        v   <- b2 * v + (1 - b2) * |o|^2
        u    = o / (sqrt(v) + eps_v)
        step = learning_rate * rms * sqrt(inputs * outputs) * u / |u|

    where |u| is the norm of the matrix: numbers move by `learning_rate * rms` in the
    root of their mean square, as those of AdamW do with its learning rate.

    Args:
        learning_rate, momentum, nesterov, coefficients, iterations, prescale, eps,
            dtype, aux, matrices, axes: as for `Muon`.
        b2: decay of the second moment, in [0, 1).
        eps_v: added to its root, >= 0.
        sign: take the signs of the moment first, as the paper's later versions do.
        rms: root of the mean square of a step per unit of learning rate, >= 0.
    State: `m` and `v`, shape of the parameter; `v` real; that of `aux`.
    Raises: ValueError as `Muon`.
    Source: Si et al. 2025, Algorithm 1, arXiv:2507.11005.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.ones(2)}
    >>> rule = AdaMuon(0.1, sign=False)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]]), "b": jnp.ones(2)}
    >>> state, _ = rule.apply(rule.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]]), "b": jnp.ones(2)}
    >>> state, steps = rule.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.02844, 0.002938], [0.001619, -0.02793]]
    """

    shaped: ClassVar = ("m", "v")
    ranges: ClassVar = dict.fromkeys(("eps_v", "rms"), NOT_NEGATIVE)

    nesterov: bool = False
    b2: Hyper = 0.95
    eps_v: Hyper = 1e-8
    sign: bool = True
    rms: Hyper = 0.2

    def init_matrix(self, x):
        return Normed(zeros_like(x), zeros_like(x, real=True))

    def apply_matrix(self, state, x, g, t):
        m, w = self.look_ahead(state.m, g)
        o = self.orthogonal(jnp.sign(w) if self.sign else w)
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(o)
        u = unit(o / (jnp.sqrt(v) + self.eps_v))
        return Normed(m, v), self.learning_rate * self.rms * x.size**0.5 * u
