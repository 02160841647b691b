"""Adam and its closest kin."""

from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.kernels.fused import Kernel
from optimjax.leaf import LeafRule
from optimjax.rule import Selection, rule
from optimjax.treewide import PyTree

__all__ = ["AMSGrad", "AMSGradW", "Adam", "AdamW", "NAdam", "NAdamW"]


class Moments(NamedTuple):
    m: Array | None
    v: Array


@rule
class Decoupled(LeafRule):
    """Weight decay apart from the gradient, for the rule that stands behind this one.

    `class AdamW(Decoupled, Adam)` takes Adam's steps, and shrinks the parameter.
    """

    weight_decay: Hyper = 1e-4
    couple: bool = True
    decay_where: Selection = None

    def apply_leaf(self, state, x, g, t):
        state, step = super().apply_leaf(state, x, g, t)
        if self.decay_where:
            rate = cast(Any, self).learning_rate if self.couple else 1
            step = step + rate * self.weight_decay * x
        return state, step


def momentum(m, g, b1, t, nesterov):
    """The first moment without its bias to zero; with Nesterov, that of the next step
    if the same gradient comes again."""
    if nesterov:
        return b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
    return m / (1 - b1**t)


@rule
class Adam(LeafRule):
    """Momentum, divided by a running root mean square of the gradient.

        m    <- b1 * m + (1 - b1) * g
        v    <- b2 * v + (1 - b2) * |g|^2
        m_hat = m / (1 - b1^t)
        v_hat = v / (1 - b2^t)
        step  = learning_rate * m_hat / (sqrt(v_hat + eps_root) + eps)

    For a complex parameter v is real, and holds |g|^2: real and imaginary part share
    one scale (as in Optimisers.jl; torch treats them as two parameters).

    Args:
        learning_rate: size of a step when all gradients agree, in the parameter's
            unit, >= 0.
        b1: decay of the first moment, in [0, 1); None for the gradient itself in its
            place, and no memory for a moment.
        b2: decay of the second moment, in [0, 1).
        eps: added outside of the root, in the gradient's unit, >= 0.
        eps_root: added inside of the root, in its square, >= 0; above 0 the step can be
            differentiated where the gradient is 0.
    State: `m` and `v`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Kingma and Ba 2015, Algorithm 1, arXiv:1412.6980.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adam = Adam(learning_rate=0.1)
    >>> state, _ = adam.apply(adam.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adam.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.05110, -0.01445]
    """

    learning_rate: Hyper = 1e-3
    b1: Hyper | None = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-8
    eps_root: Hyper = 0.0

    def init_leaf(self, x) -> PyTree:
        m = None if self.b1 is None else zeros_like(x)
        return Moments(m, zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t) -> tuple[PyTree, Array]:
        m, m_hat = None, g
        if self.b1 is not None:
            m = self.b1 * state.m + (1 - self.b1) * g
            m_hat = m / (1 - self.b1**t)
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        v_hat = v / (1 - self.b2**t)
        root = jnp.sqrt(v_hat + self.eps_root)
        return Moments(m, v), self.learning_rate * m_hat / (root + self.eps)

    def kernel(self):
        return self._loop(False)

    def _loop(self, decays: bool) -> Kernel | None:
        return None if self.b1 is None else Kernel("adam", self._numbers, decays)

    def _numbers(self, t: Array) -> tuple[Any, ...]:
        b1, b2 = cast(Any, self.b1), self.b2
        debias = 1 - b1**t, 1 - b2**t
        return (self.learning_rate, b1, b2, self.eps, self.eps_root, *debias, 0.0)


@rule
class AdamW(Decoupled, Adam):
    """Adam with weight decay apart from the moments.

        step = adam_step + learning_rate * weight_decay * x     couple=True
        step = adam_step + weight_decay * x                     couple=False

    Args:
        learning_rate, b1, b2, eps, eps_root: as for `Adam`.
        weight_decay: share of the parameter taken away, >= 0; per unit of learning rate
            with `couple`, per step without. The default is optax's; torch's is 1e-2.
        couple: multiply the decay by the learning rate, as torch and optax do; False is
            the independent decay of the paper, constant under a schedule.
        decay_where: the slots that decay: a glob on paths, several, or a function of
            (path, leaf) such as `lambda path, x: x.ndim > 1`; None for all.
    State: as for `Adam`.
    Raises: ValueError if a number is outside its range.
    Source: Loshchilov and Hutter 2019, Algorithm 2, arXiv:1711.05101.

    >>> x = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    >>> adamw = AdamW(0.1, weight_decay=0.5, decay_where="w")
    >>> grads = {"w": jnp.array([0.5, -3.0]), "b": jnp.array([0.2])}
    >>> state, steps = adamw.apply(adamw.init(x), x, grads)
    >>> grads = {"w": jnp.array([-0.1, 2.0]), "b": jnp.array([-0.3])}
    >>> state, steps = adamw.apply(state, x, grads)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([0.1011, -0.1145], [-0.02477])
    """

    def kernel(self):
        return self._loop(self.decay_where is not False)

    def _numbers(self, t: Array) -> tuple[Any, ...]:
        rate = self.learning_rate if self.couple else 1
        return (*super()._numbers(t)[:-1], rate * self.weight_decay)


class NesterovMoments(NamedTuple):
    m: Array
    v: Array
    p: Array | None


@rule
class NAdam(Adam):
    """Adam with Nesterov's momentum.

        m    <- b1 * m + (1 - b1) * g
        v    <- b2 * v + (1 - b2) * |g|^2
        d     = mu(t+1) * m / (1 - p(t+1)) + (1 - mu(t)) * g / (1 - p(t))
        step  = learning_rate * d / (sqrt(v / (1 - b2^t) + eps_root) + eps)

        mu(t) = b1                                        momentum_decay=None
        mu(t) = b1 * (1 - 0.96^(t * momentum_decay) / 2)  otherwise
        p(t)  = mu(1) * ... * mu(t)

    Without `momentum_decay` this is optax's; torch's is with it, and its defaults are
    `learning_rate=2e-3, momentum_decay=4e-3`.

    Args:
        learning_rate, b1, b2, eps, eps_root: as for `Adam`.
        momentum_decay: how fast the momentum rises from about b1 / 2 to b1, per step,
            >= 0; None for b1 from the start.
    State: `m` and `v`, as for `Adam`; with `momentum_decay`, `p`, real, ().
    Raises: ValueError if a number is outside its range.
    Source: Dozat 2016, "Incorporating Nesterov momentum into Adam", ICLR workshop; the
        schedule as in torch.optim.NAdam.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> nadam = NAdam(learning_rate=0.1)
    >>> state, _ = nadam.apply(nadam.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = nadam.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.01764, 0.03217]
    """

    ranges: ClassVar = {"momentum_decay": NOT_NEGATIVE}

    b1: Hyper = 0.9  # not None
    momentum_decay: Hyper | None = None

    def init_leaf(self, x):
        m, v = super().init_leaf(x)
        p = None if self.momentum_decay is None else jnp.ones((), v.dtype)
        return NesterovMoments(m, v, p)

    def mu(self, t):
        if self.momentum_decay is None:
            return self.b1
        return self.b1 * (1 - 0.5 * 0.96 ** (t * self.momentum_decay))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        mu, ahead = self.mu(t), self.mu(t + 1)
        p = self.b1**t if state.p is None else state.p * mu
        d = ahead * m / (1 - p * ahead) + (1 - mu) * g / (1 - p)
        root = jnp.sqrt(v / (1 - self.b2**t) + self.eps_root)
        new = NesterovMoments(m, v, None if state.p is None else p)
        return new, self.learning_rate * d / (root + self.eps)


@rule
class NAdamW(Decoupled, NAdam):
    """NAdam with weight decay apart from the moments, as `AdamW` has it.

    optax's nadamw; torch's NAdam with `decoupled_weight_decay` has the defaults of its
    NAdam, and no decay.

    Args:
        learning_rate, b1, b2, eps, eps_root, momentum_decay: as for `NAdam`.
        weight_decay, couple, decay_where: as for `AdamW`.
    State: as for `NAdam`.
    Raises: ValueError if a number is outside its range.
    Source: Dozat 2016, as for `NAdam`; Loshchilov and Hutter 2019, arXiv:1711.05101.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> nadamw = NAdamW(0.1, momentum_decay=0.3, weight_decay=0.5)
    >>> state, _ = nadamw.apply(nadamw.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = nadamw.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.03609, -0.04789]
    """


class MaxMoments(NamedTuple):
    m: Array
    v: Array
    v_max: Array


Debias = Literal["before", "after", "never"]


@rule
class AMSGrad(Adam):
    """Adam whose second moment never falls.

        m     <- b1 * m + (1 - b1) * g
        v     <- b2 * v + (1 - b2) * |g|^2
        v_max <- max(v_max, v / (1 - b2^t))
        m_hat  = m / (1 - b1^t)
        step   = learning_rate * m_hat / (sqrt(v_max + eps_root) + eps)

    The paper corrects no bias. Of the ways to do it, the default, optax's, is the one
    that keeps what the paper proves: the step per unit of momentum never grows. torch
    takes the maximum first, and divides it by a 1 - b2^t that still rises.

    Args:
        learning_rate, b1, b2, eps, eps_root: as for `Adam`.
        debias_m: divide m by 1 - b1^t.
        debias_v: divide v by 1 - b2^t "before" the maximum is taken (optax), "after" it
            (torch), or "never" (the paper, optax with `bias_correction_nu=False`).
    State: `m`, `v` and `v_max`, shape of the parameter; `v` and `v_max` real.
    Raises: ValueError if a number is outside its range, or for another `debias_v`.
    Source: Reddi et al. 2018, Algorithm 2, arXiv:1904.09237.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> amsgrad = AMSGrad(learning_rate=0.1, b2=0.9)
    >>> state, _ = amsgrad.apply(amsgrad.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = amsgrad.apply(state, x, {"w": jnp.array([-0.1, 4.0])})
    >>> steps["w"].tolist()
    [0.03684, 0.01921]
    """

    b1: Hyper = 0.9  # not None
    debias_m: bool = True
    debias_v: Debias = "before"

    def __post_init__(self):
        super().__post_init__()
        if self.debias_v not in get_args(Debias):
            raise ValueError(
                f"{type(self).__name__}: debias_v is {self.debias_v!r}, expected "
                "'before', 'after' or 'never'."
            )

    def init_leaf(self, x):
        m, v = super().init_leaf(x)
        return MaxMoments(m, v, zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        bias = 1 - self.b2**t
        v_max = jnp.maximum(state.v_max, v / bias if self.debias_v == "before" else v)
        v_hat = v_max / bias if self.debias_v == "after" else v_max
        m_hat = m / (1 - self.b1**t) if self.debias_m else m
        root = jnp.sqrt(v_hat + self.eps_root)
        return MaxMoments(m, v, v_max), self.learning_rate * m_hat / (root + self.eps)


@rule
class AMSGradW(Decoupled, AMSGrad):
    """AMSGrad with weight decay apart from the moments, as `AdamW` has it.

    torch's AdamW with `amsgrad=True` is `AMSGradW(weight_decay=1e-2,
    debias_v="after")`.

    Args:
        learning_rate, b1, b2, eps, eps_root, debias_m, debias_v: as for `AMSGrad`.
        weight_decay, couple, decay_where: as for `AdamW`.
    State: as for `AMSGrad`.
    Raises: ValueError if a number is outside its range, or for another `debias_v`.
    Source: Reddi et al. 2018, arXiv:1904.09237; Loshchilov and Hutter 2019,
        arXiv:1711.05101.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> amsgradw = AMSGradW(0.1, b2=0.9, debias_v="after", weight_decay=0.5)
    >>> state, _ = amsgradw.apply(amsgradw.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = amsgradw.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.1008, -0.1146]
    """
