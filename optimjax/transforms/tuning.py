"""Wrappers that find how large the steps of the rule inside should be."""

import math
from typing import Any, ClassVar, NamedTuple, cast

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, ratio
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.options import at_least_one
from optimjax.rule import rule
from optimjax.together import TogetherWrapper, product

__all__ = ["TRAC", "Mechanic"]


class Reference(NamedTuple):
    x0: Array
    scale: Array


class Wealth(NamedTuple):
    s: Array
    m: Array
    v: Array
    r: Array


@rule
class Tuned(TogetherWrapper):
    """What both have in common: a scale for the sum of all the inner rule's steps.

        delta  = (x0 - x) / (scale + eps)
        x     <- x0 - sum(s) * (delta + step)

    `scale` is the sum of s with which the slot was moved last.
    """

    def scale(self, shared) -> Array:
        """The scale in effect, ()."""
        raise NotImplementedError(f"{type(self).__name__} has no scale")

    def init_leaf(self, x):
        return Reference(x, jnp.zeros((), x.real.dtype))

    def delta(self, state, x):
        return ratio(state.x0 - x, state.scale + cast(Any, self).eps)

    def step_after(self, old, shared, state, x, g, t, step):
        scale = self.scale(shared)
        delta = self.delta(state, x) + step
        return Reference(state.x0, scale), x - (state.x0 - scale * delta)


@rule
class Mechanic(Tuned):
    """A scale for the steps of any rule, from how well they did so far.

        delta   = (x0 - x) / (sum(s) + eps)
        h       = <g + decay * sum(s) * |g| / (|x| + eps) * x, delta>
        m      <- max(beta * m, |h| + eps)
        v      <- beta^2 * v + h^2
        r      <- beta * r + clip(h, m_old) * s
        s      <- (s_init / betas * m + max(r, 0)) / (sqrt(v) + eps)
        step    = x - (x0 - sum(s) * (delta + inner step))

    h, m, v, r and s are numbers; of m, v, r and s there are `betas` each, for beta =
    1 - 10^-1, 1 - 10^-2, ... Products and norms are over all slots that have a
    gradient; x0 is where a slot was at `setup`. Give the rule inside the schedule that
    it would have, with 1 for its highest learning rate. The first steps are small
    beside x, so 16-bit parameters want `MixedPrecision` around it; guards and
    `Accumulate` go around it, too.

    Args:
        inner: the rule that takes the steps.
        decay: a decay of the parameters that only h knows of, >= 0.
        eps: against division by 0, >= 0.
        s_init: what each s is at first, in the learning rate's unit, >= 0.
        betas: how many betas there are, >= 1.
    State: `inner`; `own.shared`: `s`, `m`, `v` and `r`, (betas,); for each slot `x0`,
        shape of the parameter, and `scale`, (), sum(s) as it was moved last.
    Raises: ValueError if a number is outside its range, or for a rule that says itself
        where parameters go.
    Source: Cutkosky et al. 2023, Algorithm 1, arXiv:2306.00144, and its authors' code,
        from which the clipping is.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(Mechanic(oj.SGD(1.0), s_init=0.01, betas=3), model)
    >>> for g in ([0.5, -3.0], [-0.1, -2.0], [0.4, -1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), state.inner.own.shared.s.tolist()
    ([0.9887, -1.915], [0.004713, 0.004704, 0.004702])
    """

    ranges: ClassVar = {"decay": NOT_NEGATIVE, "s_init": NOT_NEGATIVE}

    decay: Hyper = 0.01
    eps: Hyper = 1e-8
    s_init: Hyper = 1e-6
    betas: int = 6

    def __post_init__(self):
        super().__post_init__()
        at_least_one(self, "betas")

    def init_shared(self, squares):
        zeros = jnp.zeros(self.betas, squares.dtype)
        return Wealth(zeros + self.s_init, zeros, zeros, zeros)

    def scale(self, shared):
        return jnp.sum(shared.s)

    def look_after(self, shared, state, x, g, t, step):
        delta = self.delta(state, x)
        return state, (abs_sq(g), abs_sq(x), product(g, delta), product(x, delta))

    def share(self, shared, sums, t, value):
        s, m, v, r = shared
        g, x, g_delta, x_delta = sums
        share = ratio(jnp.sqrt(g), jnp.sqrt(x) + self.eps)
        h = g_delta + self.decay * self.scale(shared) * share * x_delta
        beta = 1 - 0.1 ** jnp.arange(1, self.betas + 1, dtype=h.dtype)
        r = beta * r + jnp.clip(h, -m, m) * s
        m = jnp.maximum(beta * m, jnp.abs(h) + self.eps)
        v = beta**2 * v + h**2
        wealth = self.s_init / self.betas * m + jnp.maximum(r, 0)
        return Wealth(ratio(wealth, jnp.sqrt(v) + self.eps), m, v, r)


class Bets(NamedTuple):
    s: Array
    sigma: Array
    v: Array


@rule
class TRAC(Tuned):
    """A scale for the steps of any rule, for tasks that change in the middle of a run.

        delta   = (x0 - x) / (scale + eps)               scale: max(sum(s), 0), before
        h       = <g, delta>
        v      <- beta^2 * v + h^2
        sigma  <- beta * sigma + h                       eps at first
        s      <- s_init * erfi(sigma / (sqrt(2 * v) + eps)) / erfi(1 / sqrt(2))
        step    = x - (x0 - max(sum(s), 0) * (delta + inner step))

    h, v, sigma and s are numbers; of v, sigma and s there is one for each beta.
    Products are over all slots that have a gradient; x0 is where a slot was at `setup`,
    and it goes back there when what it learned no longer holds. Give the rule inside
    its usual learning rate. The first steps are small beside x, so 16-bit parameters
    want `MixedPrecision` around it; guards and `Accumulate` go around it, too.

    Args:
        inner: the rule that takes the steps.
        betas: how much of the past counts: numbers in [0, 1).
        s_init: the size of each s at first, without unit, >= 0.
        eps: against division by 0, >= 0.
    State: `inner`; `own.shared`: `s`, `sigma` and `v`, a number for each beta; for each
        slot `x0`, shape of the parameter, and `scale`, (), as it was moved last.
    Raises: ValueError if a number is outside its range, or for a rule that says itself
        where parameters go.
    Source: Muppidi et al. 2024, Algorithms 1 and 2, arXiv:2405.16642.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(TRAC(oj.SGD(0.1), s_init=0.1), model)
    >>> for g in ([0.5, -3.0], [-0.1, -2.0], [0.4, -1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), float(state.inner.own.slots["w"].scale)
    ([0.9172, -1.379], 1.035)
    """

    ranges: ClassVar = {"s_init": NOT_NEGATIVE}

    betas: tuple[float, ...] = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
    s_init: Hyper = 1e-8
    eps: Hyper = 1e-8

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))
        if not (self.betas and all(0 <= beta < 1 for beta in self.betas)):
            raise ValueError(
                f"TRAC: betas is {self.betas}, expected one or more in [0, 1)."
            )

    def init_shared(self, squares):
        zeros = jnp.zeros(len(self.betas), squares.dtype)
        # Not 0: at the first update h is 0, and no step would ever be taken.
        return Bets(zeros, zeros + self.eps, zeros)

    def scale(self, shared):
        return jnp.maximum(jnp.sum(shared.s), 0)

    def look_after(self, shared, state, x, g, t, step):
        return state, (product(g, self.delta(state, x)),)

    def share(self, shared, sums, t, value):
        (h,) = sums
        beta = jnp.asarray(self.betas, h.dtype)
        v = beta**2 * shared.v + h**2
        sigma = beta * shared.sigma + h
        bet = erfi(ratio(sigma, jnp.sqrt(2 * v) + self.eps))
        unit = erfi(jnp.asarray(math.sqrt(0.5), h.dtype))
        return Bets(self.s_init * bet / unit, sigma, v)


def erfi(x: Array) -> Array:
    """The imaginary error function, 2 / sqrt(pi) times the integral of exp(y^2).

    erfi(x) = 4 / pi * sum over odd n > 0 of exp(-(n h)^2) * sinh(2 n h x) / n, which is
    exact but for exp(-(pi / 2h)^2): Rybicki's sum for Dawson's integral (Press et al.,
    "Numerical recipes", section 6.10), times exp(x^2).

    >>> erfi(jnp.array([-0.1, 0.0, 1.0, 3.0])).tolist()
    [-0.1132, 0.0, 1.65, 1630.0]
    """
    h, size = 0.25, jnp.abs(x)[..., None]
    n = jnp.expand_dims(jnp.arange(1, 161, 2, dtype=x.dtype), range(x.ndim))
    # sinh as a difference, with its factor inside: where x^2 is no overflow nothing is.
    terms = jnp.exp(n * h * (2 * size - n * h)) * -jnp.expm1(-4 * n * h * size) / n
    return jnp.sign(x) * 2 / jnp.pi * jnp.sum(terms, axis=-1)
