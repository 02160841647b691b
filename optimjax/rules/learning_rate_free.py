"""Rules that find their own learning rate: by how far they have come, or could."""

import math
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, ratio, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.rule import Selection, rule
from optimjax.together import TogetherRule, product

__all__ = ["DAdaptAdam", "DAdaptLion", "DAdaptSGD", "Prodigy"]


class Distance(NamedTuple):
    d: Array


class ProdigyMoments(NamedTuple):
    x0: Array
    m: Array
    v: Array
    s: Array
    r: Array


def debias(b1, b2, t):
    """What Adam's two corrections make of a learning rate."""
    return jnp.sqrt(1 - b2**t) / (1 - b1**t)


@rule
class Prodigy(TogetherRule):
    """Adam that estimates how far away the solution is, and steps in proportion.

        rate  = learning_rate * sqrt(1 - b2^t) / (1 - b1^t)
        m    <- b1 * m + (1 - b1) * d * g
        v    <- b2 * v + (1 - b2) * d^2 * |g|^2
        r    <- b3 * r + d / d0 * d * rate * <g, x0 - x>
        s    <- b3 * s + d / d0 * d * rate * g           without rate, if safeguarded
        d_new = max(d, min(d_coef * sum(r) / sum(|s|), growth_rate * d))
        step  = d * rate * (m / (sqrt(v) + d_new * eps) + weight_decay * x)
        d    <- d_new

    The sums are over all slots that have a gradient; r is kept slot by slot, so that
    a slot which is missing is missing from both. x0 is where a slot was at `setup`. The
    estimate never falls, so a schedule should: 1.0, falling to 0, is its authors'
    advice.

    Args:
        learning_rate: factor on the estimate, without unit, >= 0.
        b1, b2: decay of the moments, in [0, 1).
        b3: decay of what the estimate is made of, in [0, 1); None for sqrt(b2).
        eps: added outside of the root, in the gradient's unit, >= 0.
        d0: the first estimate, in the parameter's unit, > 0; too small rather than too
            large.
        d_coef: factor on later estimates, >= 0.
        growth_rate: by what the estimate may grow in one update, >= 1.
        bias_correction: as Adam does (optax); False for a rate of `learning_rate`, as
            in its authors' code.
        safeguard_warmup: let no small learning rate raise the estimate.
        weight_decay: share of the parameter taken away per unit of d * rate, >= 0.
        decay_where: the slots that decay: a glob on paths, several, or a function of
            (path, leaf); None for all.
    State: `shared.d`, (); for each slot `x0`, `m`, `v` (real) and `s`, shape of the
        parameter, and `r`, ().
    Raises: ValueError if a number is outside its range.
    Source: Mishchenko and Defazio 2023, Algorithm 4, arXiv:2306.06101.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(Prodigy(d0=0.1, d_coef=9.0), model)
    >>> for g in ([0.5, -3.0], [-0.1, -2.0], [0.4, -1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), state.inner.shared.d
    ([0.6552, -1.549], Array(1.027, dtype=float32))
    """

    ranges: ClassVar = {
        "d_coef": NOT_NEGATIVE,
        "growth_rate": (1.0, math.inf, False),
    }
    positive: ClassVar = ("d0",)

    learning_rate: Hyper = 1.0
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    b3: Hyper | None = None
    eps: Hyper = 1e-8
    d0: Hyper = 1e-6
    d_coef: Hyper = 1.0
    growth_rate: Hyper = math.inf
    bias_correction: bool = True
    safeguard_warmup: bool = False
    weight_decay: Hyper = 0.0
    decay_where: Selection = None

    def init_shared(self, squares):
        return Distance(jnp.asarray(self.d0, squares.dtype))

    def init_leaf(self, x):
        v = zeros_like(x, real=True)
        return ProdigyMoments(
            x, zeros_like(x), v, zeros_like(x), jnp.zeros((), v.dtype)
        )

    def rate(self, t):
        factor = debias(self.b1, self.b2, t) if self.bias_correction else 1
        return self.learning_rate * factor

    def look_leaf(self, shared, state, x, g, t):
        x0, m, v, s, r = state
        b3 = jnp.sqrt(self.b2) if self.b3 is None else self.b3
        d, rate = shared.d, self.rate(t)
        m = self.b1 * m + (1 - self.b1) * d * g
        v = self.b2 * v + (1 - self.b2) * d**2 * abs_sq(g)
        weight = d / self.d0 * d
        r = b3 * r + weight * rate * product(g, x0 - x)
        s = b3 * s + weight * (1 if self.safeguard_warmup else rate) * g
        return ProdigyMoments(x0, m, v, s, r), (r, jnp.abs(s))

    def share(self, shared, sums, t, value):
        r, s = sums
        d = self.d_coef * ratio(r, s)
        return Distance(raised(shared.d, d, self.growth_rate))

    def step_leaf(self, old, shared, state, x, g, t):
        step = ratio(state.m, jnp.sqrt(state.v) + shared.d * self.eps)
        if self.decay_where:
            step = step + self.weight_decay * x
        return state, old.d * self.rate(t) * step


def raised(d: Array, estimate: Array, growth_rate: Array) -> Array:
    """What comes after `d`: it never falls, nor grows too fast."""
    return jnp.maximum(d, jnp.minimum(estimate, d * growth_rate))


class DAdaptMoments(NamedTuple):
    m: Array
    v: Array
    s: Array
    r: Array


@rule
class DAdaptAdam(TogetherRule):
    """Adam whose learning rate is a lower bound of the distance to the solution.

        rate  = d * learning_rate * sqrt(1 - b2^t) / (1 - b1^t)
        r    <- b3 * r + (1 - b3) * rate * <g, s / (sqrt(v) + eps)>      b3 = sqrt(b2)
        m    <- b1 * m + (1 - b1) * rate * g
        v    <- b2 * v + (1 - b2) * |g|^2
        s    <- b3 * s + (1 - b3) * rate * g
        step  = m / (sqrt(v) + eps) + weight_decay * rate * x
        d    <- max(d, min(sum(r) / ((1 - b3) * sum(|s|)), growth_rate * d))

    The sums are over all slots that have a gradient; r is kept slot by slot. `Prodigy`
    is the same authors' later rule, whose estimate rises sooner.

    Args:
        learning_rate: factor on the estimate, without unit, >= 0.
        b1, b2: decay of the moments, in [0, 1).
        eps: added outside of the root, in the gradient's unit, >= 0.
        d0: the first estimate, in the parameter's unit, > 0; too small rather than too
            large.
        growth_rate: by what the estimate may grow in one update, >= 1.
        bias_correction: as Adam does (optax); False for a rate of d * learning_rate.
        weight_decay: share of the parameter taken away per unit of rate, >= 0.
        decay_where: the slots that decay, as for `AdamW`.
    State: `shared.d`, (); for each slot `m`, `v` (real) and `s`, shape of the
        parameter, and `r`, ().
    Raises: ValueError if a number is outside its range.
    Source: Defazio and Mishchenko 2023, Algorithm 5, arXiv:2301.07733.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(DAdaptAdam(d0=0.1, b2=0.9), model)
    >>> for g in ([0.5, -3.0], [-0.1, -2.0], [0.4, -1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), state.inner.shared.d
    ([0.6495, -1.621], Array(0.5897, dtype=float32))
    """

    ranges: ClassVar = {"growth_rate": (1.0, math.inf, False)}
    positive: ClassVar = ("d0",)

    learning_rate: Hyper = 1.0
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-8
    d0: Hyper = 1e-6
    growth_rate: Hyper = math.inf
    bias_correction: bool = True
    weight_decay: Hyper = 0.0
    decay_where: Selection = None

    def init_shared(self, squares):
        return Distance(jnp.asarray(self.d0, squares.dtype))

    def init_leaf(self, x):
        v = zeros_like(x, real=True)
        return DAdaptMoments(zeros_like(x), v, zeros_like(x), jnp.zeros((), v.dtype))

    def rate(self, shared, t):
        factor = debias(self.b1, self.b2, t) if self.bias_correction else 1
        return shared.d * self.learning_rate * factor

    def look_leaf(self, shared, state, x, g, t):
        m, v, s, r = state
        rate, b3 = self.rate(shared, t), jnp.sqrt(self.b2)
        r = b3 * r + (1 - b3) * rate * product(g, ratio(s, jnp.sqrt(v) + self.eps))
        m = self.b1 * m + (1 - self.b1) * rate * g
        v = self.b2 * v + (1 - self.b2) * abs_sq(g)
        s = b3 * s + (1 - b3) * rate * g
        return DAdaptMoments(m, v, s, r), (r, jnp.abs(s))

    def share(self, shared, sums, t, value):
        r, s = sums
        d = ratio(r, (1 - jnp.sqrt(self.b2)) * s)
        return Distance(raised(shared.d, d, self.growth_rate))

    def step_leaf(self, old, shared, state, x, g, t):
        step = ratio(state.m, jnp.sqrt(state.v) + self.eps)
        if self.decay_where:
            step = step + self.weight_decay * self.rate(old, t) * x
        return state, step


class DAdaptSums(NamedTuple):
    x0: Array
    s: Array
    r: Array


class Scaled(NamedTuple):
    d: Array
    g0: Array


@rule
class DAdaptSGD(TogetherRule):
    """Gradient descent by dual averaging, with an estimate of the distance to go.

        rate  = d * learning_rate                        g0: the norm of the first g
        r    <- r + rate * <g, s>
        s    <- s + rate * g
        step  = (1 - momentum) * (x - (x0 - s / g0))
        d    <- max(d, min(2 * sum(r) / (g0 * |s|), growth_rate * d))

    Norms and sums are over all slots that have a gradient; x0 is where a slot was at
    `setup`. It says where parameters go: a step that is changed afterwards is undone.

    Args:
        learning_rate: factor on the estimate, without unit, >= 0.
        momentum: how much of the way to x0 - s / g0 is left for later, in [0, 1).
        d0: the first estimate, in the parameter's unit, > 0; too small rather than too
            large.
        growth_rate: by what the estimate may grow in one update, >= 1.
    State: `shared.d` and `shared.g0`, (); for each slot `x0` and `s`, shape of the
        parameter, and `r`, ().
    Raises: ValueError if a number is outside its range.
    Source: Defazio and Mishchenko 2023, Algorithm 4, arXiv:2301.07733; the momentum is
        that of its authors' code.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(DAdaptSGD(momentum=0.5, d0=0.1), model)
    >>> for g in ([0.5, -3.0], [-0.1, -2.0], [0.4, -1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), state.inner.shared.d
    ([0.9815, -1.848], Array(0.1207, dtype=float32))
    """

    ends: ClassVar[bool] = True
    ranges: ClassVar = {"growth_rate": (1.0, math.inf, False)}
    positive: ClassVar = ("d0",)

    learning_rate: Hyper = 1.0
    momentum: Hyper = 0.0
    d0: Hyper = 1e-6
    growth_rate: Hyper = math.inf

    def init_shared(self, squares):
        return Scaled(jnp.asarray(self.d0, squares.dtype), jnp.zeros_like(squares))

    def init_leaf(self, x):
        return DAdaptSums(x, zeros_like(x), jnp.zeros((), x.real.dtype))

    def look_leaf(self, shared, state, x, g, t):
        x0, s, r = state
        rate = shared.d * self.learning_rate
        r = r + rate * product(g, s)
        s = s + rate * g
        return DAdaptSums(x0, s, r), (abs_sq(g), r, abs_sq(s))

    def share(self, shared, sums, t, value):
        g, r, s = sums
        # The first that is not 0: before it nothing moves.
        g0 = jnp.where(shared.g0 > 0, shared.g0, jnp.sqrt(g))
        d = ratio(2 * r, g0 * jnp.sqrt(s))
        return Scaled(raised(shared.d, d, self.growth_rate), g0)

    def step_leaf(self, old, shared, state, x, g, t):
        z = state.x0 - ratio(state.s, shared.g0)
        return state, (1 - self.momentum) * (x - z)


class DAdaptSigns(NamedTuple):
    m: Array
    s: Array
    r: Array


@rule
class DAdaptLion(TogetherRule):
    """Lion whose learning rate is an estimate of the distance to the solution.

        rate  = d * learning_rate                                   b3 = sqrt(b2)
        u     = sign(b1 * m + (1 - b1) * g)
        m    <- b2 * m + (1 - b2) * rate * g
        r    <- b3 * r + (1 - b3) * rate * <u, s>
        s    <- b3 * s + (1 - b3) * rate * u
        step  = rate * u
        d    <- max(d, sum(r) / ((1 - b3) * sum(|s|)))

    The sums are over all slots that have a gradient; r is kept slot by slot. The
    momentum holds rate * g and the sign is taken with g itself, so that momentum weighs
    little until the estimate is large: so its authors have it.

    Args:
        learning_rate: factor on the estimate, without unit, >= 0.
        b1: weight of the old momentum in the direction, in [0, 1).
        b2: decay of the momentum, in [0, 1).
        d0: the first estimate, in the parameter's unit, > 0; too small rather than too
            large.
    State: `shared.d`, (); for each slot `m` and `s`, shape of the parameter, and `r`,
        ().
    Raises: ValueError if a number is outside its range.
    Source: Defazio's code, github.com/facebookresearch/dadaptation, dadapt_lion.py; the
        estimate is that of Defazio and Mishchenko 2023, arXiv:2301.07733.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(DAdaptLion(3.0, b2=0.8, d0=0.1), model)
    >>> for g in ([0.5, -3.0], [-0.1, -2.0], [0.4, -1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), state.inner.shared.d
    ([-0.07508, -0.9249], Array(0.3564, dtype=float32))
    """

    positive: ClassVar = ("d0",)

    learning_rate: Hyper = 1.0
    b1: Hyper = 0.9
    b2: Hyper = 0.99
    d0: Hyper = 1e-6

    def init_shared(self, squares):
        return Distance(jnp.asarray(self.d0, squares.dtype))

    def init_leaf(self, x):
        return DAdaptSigns(zeros_like(x), zeros_like(x), jnp.zeros((), x.real.dtype))

    def look_leaf(self, shared, state, x, g, t):
        m, s, r = state
        rate, b3 = shared.d * self.learning_rate, jnp.sqrt(self.b2)
        u = jnp.sign(self.b1 * m + (1 - self.b1) * g)
        m = self.b2 * m + (1 - self.b2) * rate * g
        r = b3 * r + (1 - b3) * rate * product(u, s)
        s = b3 * s + (1 - b3) * rate * u
        return (DAdaptSigns(m, s, r), u), (r, jnp.abs(s))

    def share(self, shared, sums, t, value):
        r, s = sums
        d = ratio(r, (1 - jnp.sqrt(self.b2)) * s)
        return Distance(jnp.maximum(shared.d, d))

    def step_leaf(self, old, shared, state, x, g, t):
        state, u = state
        return state, old.d * self.learning_rate * u
