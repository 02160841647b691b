"""Rules that divide by the root of summed or averaged squares of the gradient."""

from functools import reduce
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import rule

__all__ = ["SM3", "AdaDelta", "AdaGrad", "RMSProp"]


class Squares(NamedTuple):
    v: Array


@rule
class AdaGrad(LeafRule):
    """Each number's step is divided by the root of all its squared gradients so far.

        g    = g + weight_decay * x
        v   <- v + |g|^2                              v = initial_accumulator at first
        rate = learning_rate / (1 + (t - 1) * learning_rate_decay)
        step = rate * g / (sqrt(v + eps_root) + eps)  0 where v is 0

    The defaults are optax's, whose `eps` is `eps_root` here. torch's are
    `AdaGrad(1e-2, initial_accumulator=0, eps=1e-10, eps_root=0)`.

    Args:
        learning_rate: size of the first step, in the parameter's unit, >= 0.
        initial_accumulator: where the sum starts, in the gradient's unit squared, >= 0.
        eps: added outside of the root, in the gradient's unit, >= 0.
        eps_root: added inside of the root, in its square, >= 0.
        learning_rate_decay: how fast the rate itself falls, as in torch, >= 0.
        weight_decay: L2 penalty added to the gradient, >= 0.
    State: `v`, shape of the parameter, real.
    Raises: ValueError if a number is outside its range.
    Source: Duchi et al. 2011, "Adaptive subgradient methods for online learning and
        stochastic optimization", JMLR 12, Figure 1.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adagrad = AdaGrad(0.1, learning_rate_decay=0.5)
    >>> state, _ = adagrad.apply(adagrad.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adagrad.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [-0.01111, 0.03683]
    """

    learning_rate: Hyper = 1e-2
    initial_accumulator: Hyper = 0.1
    eps: Hyper = 0.0
    eps_root: Hyper = 1e-7
    learning_rate_decay: Hyper = 0.0
    weight_decay: Hyper = 0.0
    ranges: ClassVar = {
        "initial_accumulator": NOT_NEGATIVE,
        "learning_rate_decay": NOT_NEGATIVE,
    }

    def init_leaf(self, x):
        return Squares(zeros_like(x, real=True) + self.initial_accumulator)

    def apply_leaf(self, state, x, g, t):
        g = g + self.weight_decay * x
        v = state.v + abs_sq(g)
        rate = self.learning_rate / (1 + (t - 1) * self.learning_rate_decay)
        # A number whose gradients were all 0 has no scale, and 0 / 0 is no step.
        root = jnp.sqrt(jnp.where(v > 0, v + self.eps_root, 1)) + self.eps
        return Squares(v), jnp.where(v > 0, rate * g / root, 0)


class Deltas(NamedTuple):
    v: Array
    u: Array


@rule
class AdaDelta(LeafRule):
    """A running root mean square of the steps, over that of the gradients.

        g    = g + weight_decay * x
        v   <- decay * v + (1 - decay) * |g|^2
        d    = g * sqrt(u + eps) / sqrt(v + eps)
        u   <- decay * u + (1 - decay) * |d|^2
        step = learning_rate * d

    The step has the parameter's unit by itself, so the learning rate is a plain factor:
    the paper and optax have none, torch has 1.

    Args:
        learning_rate: factor on every step, no unit, >= 0.
        decay: rho, of both averages, in [0, 1).
        eps: inside of both roots, >= 0; the first step is about sqrt(eps) for any
            gradient, and 0 never starts.
        weight_decay: L2 penalty added to the gradient, >= 0.
    State: `v` of the gradients and `u` of the steps, shape of the parameter, real.
    Raises: ValueError if a number is outside its range.
    Source: Zeiler 2012, Algorithm 1, arXiv:1212.5701.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adadelta = AdaDelta(decay=0.8, eps=1e-2)
    >>> state, _ = adadelta.apply(adadelta.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adadelta.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [-0.05938, 0.1883]
    """

    learning_rate: Hyper = 1.0
    decay: Hyper = 0.9
    eps: Hyper = 1e-6
    weight_decay: Hyper = 0.0

    def init_leaf(self, x):
        return Deltas(zeros_like(x, real=True), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        g = g + self.weight_decay * x
        v = self.decay * state.v + (1 - self.decay) * abs_sq(g)
        d = g * (jnp.sqrt(state.u + self.eps) / jnp.sqrt(v + self.eps))
        u = self.decay * state.u + (1 - self.decay) * abs_sq(d)
        return Deltas(v, u), self.learning_rate * d


class Scaled(NamedTuple):
    v: Array
    m: Array | None
    b: Array | None


@rule
class RMSProp(LeafRule):
    """The gradient divided by its running root mean square, or standard deviation.

        g    = g + weight_decay * x
        v   <- (1 - w) * v + w * |g|^2              w = 1 - decay
        v   <- (1 - w) * (v + w * |g - m|^2)        centered: the variance, which is
        m   <- m + w * (g - m)                          not below 0, however rounded
        d    = learning_rate * g / (sqrt(v + eps_root) + eps)
        b   <- momentum * b + d                     without momentum: b = d
        step = d + momentum * b if nesterov else b

    `bias_correction` makes it w = (1 - decay) / (1 - decay^t). The defaults are
    optax's, whose `eps` is `eps_root` here. torch's are `RMSProp(1e-2, decay=0.99,
    eps=1e-8, eps_root=0, rate_inside=False)`.

    Args:
        learning_rate: step while all gradients agree, in the parameter's unit, >= 0.
        decay: of v and m, in [0, 1).
        eps, eps_root: added outside and inside of the root, in the gradient's unit and
            in its square, >= 0.
        initial_scale: where v starts, in the gradient's unit squared, >= 0.
        centered: divide by the standard deviation.
        bias_correction: do not count the zeros that v and m start from.
        momentum: decay of the buffer, in [0, 1); None for none.
        nesterov: look ahead along the buffer.
        rate_inside: the learning rate is in the buffer; False: it multiplies the step,
            as in torch and `SGD`. It matters where the rate changes.
        weight_decay: L2 penalty added to the gradient, >= 0.
    State: `v`, shape of the parameter, real; `m` if centred; `b` with momentum.
    Raises: ValueError for a number outside its range, or `nesterov` without momentum.
    Source: Tieleman and Hinton 2012, COURSERA lecture 6.5; centred: Graves 2013,
        equations 38 to 45, arXiv:1308.0850.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> rmsprop = RMSProp(0.1, decay=0.8, centered=True, momentum=0.9)
    >>> state, _ = rmsprop.apply(rmsprop.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = rmsprop.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.1740, -0.09118]
    """

    learning_rate: Hyper = 1e-2
    decay: Hyper = 0.9
    eps: Hyper = 0.0
    eps_root: Hyper = 1e-8
    initial_scale: Hyper = 0.0
    centered: bool = False
    bias_correction: bool = False
    momentum: Hyper | None = None
    nesterov: bool = False
    rate_inside: bool = True
    weight_decay: Hyper = 0.0
    ranges: ClassVar = {"initial_scale": NOT_NEGATIVE}

    def __post_init__(self):
        super().__post_init__()
        if self.nesterov and self.momentum is None:
            raise ValueError(
                "RMSProp: nesterov without momentum. Give momentum=0.9, say."
            )

    def init_leaf(self, x):
        m = zeros_like(x) if self.centered else None
        b = None if self.momentum is None else zeros_like(x)
        return Scaled(zeros_like(x, real=True), m, b)

    def apply_leaf(self, state, x, g, t):
        g, rate = g + self.weight_decay * x, self.learning_rate
        left, w = self.decay**t, 1 - self.decay
        if self.bias_correction:
            left, w = left / (1 - left), jnp.where(t == 1, 1, w / (1 - left))
        v, m = _averages(state, g, w)
        # Of where v started so much is left. It is not in v, as a w of 1 forgets it.
        v_hat = v + left * self.initial_scale
        d = g / (jnp.sqrt(v_hat + self.eps_root) + self.eps)
        d = rate * d if self.rate_inside else d
        b, step = None, d
        if self.momentum is not None:
            b = self.momentum * state.b + d
            step = d + self.momentum * b if self.nesterov else b
        return Scaled(v, m, b), step if self.rate_inside else rate * step


def _averages(state: Scaled, g: Array, w: Array) -> tuple[Array, Array | None]:
    """The mean square of the gradients, or their variance and mean."""
    if state.m is None:
        return (1 - w) * state.v + w * abs_sq(g), None
    v = (1 - w) * (state.v + w * abs_sq(g - state.m))
    return v, state.m + w * (g - state.m)


class Cover(NamedTuple):
    v: tuple[Array, ...]
    m: Array | None


@rule
class SM3(LeafRule):
    """AdaGrad in the memory of one vector per axis.

        v    = min over axes a of v_a, broadcast along all axes but a
        v    = v + |g|^2                                with b2: b2 * v + (1 - b2) |g|^2
        v_a <- max of v over all axes but a
        u    = g / sqrt(v + eps_root)                   0 where v is 0
        m   <- momentum * m + (1 - momentum) * u        without momentum: m = u
        step = learning_rate * m

    A vector or a scalar keeps all of its v: there it is AdaGrad.

    Args:
        learning_rate: size of the first steps, in the parameter's unit, >= 0.
        momentum: decay of the average of steps, in [0, 1); None for none.
        b2: decay of the squares, in [0, 1); None for their sum, as in the paper.
        eps_root: added inside of the root (optax's `eps`), in the gradient's unit
            squared, >= 0.
    State: `v`, a tuple of one vector per axis, real; `m`, shape of the parameter, with
        momentum.
    Raises: ValueError if a number is outside its range.
    Source: Anil et al. 2019, SM3-II, arXiv:1901.11150; momentum as in optax.

    >>> x = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]])}
    >>> sm3 = SM3(0.1, momentum=0.8)
    >>> g = {"w": jnp.array([[0.5, -3.0], [1.0, 0.2]])}
    >>> state, _ = sm3.apply(sm3.init(x), x, g)
    >>> g = {"w": jnp.array([[-0.1, 2.0], [0.3, -4.0]])}
    >>> state, steps = sm3.apply(state, x, g)
    >>> steps["w"].tolist()
    [[0.01401, -0.004906], [0.02175, -0.003403]]
    """

    learning_rate: Hyper = 1e-2
    momentum: Hyper | None = 0.9
    b2: Hyper | None = None
    eps_root: Hyper = 1e-8

    def init_leaf(self, x):
        zeros = zeros_like(x, real=True)
        v = tuple(jnp.sum(zeros, other) for other in _other_axes(x))
        return Cover(v, None if self.momentum is None else zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        others = _other_axes(x)
        wide = map(jnp.expand_dims, state.v, others)
        old, kept, new = reduce(jnp.minimum, wide), 1, 1
        if self.b2 is not None:
            kept, new = self.b2, 1 - self.b2
        v = kept * old + new * abs_sq(g)
        vs = tuple(jnp.max(v, other, initial=0) for other in others)
        root = jnp.sqrt(jnp.where(v > 0, v + self.eps_root, 1))
        u = jnp.where(v > 0, g / root, 0)
        if self.momentum is None:
            return Cover(vs, None), self.learning_rate * u
        m = self.momentum * state.m + (1 - self.momentum) * u
        return Cover(vs, m), self.learning_rate * m


def _other_axes(x: Array) -> list[tuple[int, ...]]:
    """For each axis of `x` all the others; for a scalar, one without any."""
    axes = range(x.ndim)
    return [tuple(b for b in axes if b != a) for a in axes] or [()]
