"""Rules whose step size is where a model of the loss reaches the least it can be."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, ratio, zeros_like
from optimjax.hyper import Hyper
from optimjax.rule import rule
from optimjax.together import TogetherRule, product

__all__ = ["MoMo", "MoMoAdam"]


class Model(NamedTuple):
    m: Array
    gamma: Array


class AdamModel(NamedTuple):
    m: Array
    v: Array
    gamma: Array


class Bounded(NamedTuple):
    f: Array
    lower_bound: Array
    rate: Array


class Bounding(TogetherRule):
    """What both share: the largest step at which the loss is above its bound.

    A rule derives from this class and declares its own `learning_rate`, `lower_bound`,
    `adapt_lower_bound` and `weight_decay`.
    """

    needs: ClassVar = ("value",)
    ranges: ClassVar = {"lower_bound": None}

    learning_rate: Hyper
    lower_bound: Hyper
    adapt_lower_bound: bool
    weight_decay: Hyper

    def init_shared(self, squares):
        zero = jnp.zeros_like(squares)
        return Bounded(zero, zero + self.lower_bound, zero)

    def bounded(self, f, shared, sums, bias):
        """The rate, and the bound of the next step. Args: `bias`, the weight of all the
        losses in `f`."""
        squares, along, gamma = sums
        decay = 1 + self.learning_rate * self.weight_decay
        bound = shared.lower_bound if self.adapt_lower_bound else self.lower_bound
        cap = decay * (f - gamma) + along
        if self.adapt_lower_bound:
            lowered = jnp.maximum(cap / (2 * decay * bias), self.lower_bound)
            bound = jnp.where(cap < decay * bias * bound, lowered, bound)
        gap = jnp.maximum(cap - decay * bias * bound, 0)
        rate = jnp.minimum(self.learning_rate / bias, ratio(gap, squares))
        if self.adapt_lower_bound:
            least = (f + along - gamma - rate * squares / 2) / bias
            bound = jnp.maximum(least, self.lower_bound)
        return Bounded(f, bound, rate)

    def decayed(self, x):
        decay = self.learning_rate * self.weight_decay
        return decay / (1 + decay) * x


@rule
class MoMo(Bounding):
    """Momentum whose step size is that at which a model of the loss is at its least.

        f     <- b * f + (1 - b) * value                       b: 0 at first, then b1
        m     <- b * m + (1 - b) * g
        gamma <- b * gamma + (1 - b) * <g, x>
        decay  = learning_rate * weight_decay
        gap    = max((1 + decay) * (f - lower_bound - gamma) + <m, x>, 0)
        rate   = min(learning_rate, gap / |m|^2)
        step   = rate * m + decay / (1 + decay) * x

    Products and norms are over all slots that have a gradient; gamma is kept slot by
    slot. f + <m, x> - gamma is what the gradients so far say of the loss at x. It needs
    the loss: `update(state, model, grads, value=loss)`, or `make_step`.

    With `adapt_lower_bound` the gap is that to an estimate, `lower_bound` at first:

        cap    = (1 + decay) * (f - gamma) + <m, x>
        bound  = max(cap / (2 + 2 * decay), lower_bound)  if cap < (1 + decay) * bound
        gap    = max(cap - (1 + decay) * bound, 0)
        bound <- max(f + <m, x> - gamma - rate / 2 * |m|^2, lower_bound)

    Args:
        learning_rate: the largest rate, in the parameter's unit per gradient's, >= 0.
        b1: decay of the momentum and of the loss, in [0, 1).
        lower_bound: the least that the loss can be, in its unit; 0 is right for most.
        adapt_lower_bound: estimate it on the way, from `lower_bound` upwards.
        weight_decay: as above, >= 0.
    State: `shared.f`, `shared.lower_bound` and `shared.rate`, (); for each slot `m`,
        shape of the parameter, and `gamma`, ().
    Raises: ValueError if a number is outside its range.
    Source: Schaipp et al. 2023, Algorithms 1 and 3, arXiv:2305.07583; the decay as in
        optax.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(MoMo(lower_bound=0.5), model)
    >>> for g, value in (([0.5, -3.0], 4.0), ([-0.1, -2.0], 3.0)):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)}, value=value)
    >>> model["w"].tolist(), state.inner.shared.rate
    ([0.7980, -0.7806], Array(0.02906, dtype=float32))
    """

    learning_rate: Hyper = 1.0
    b1: Hyper = 0.9
    lower_bound: Hyper = 0.0
    adapt_lower_bound: bool = False
    weight_decay: Hyper = 0.0

    def init_leaf(self, x):
        return Model(zeros_like(x), jnp.zeros((), x.real.dtype))

    def look_leaf(self, shared, state, x, g, t):
        b = jnp.where(t == 1, 0, self.b1)
        m = b * state.m + (1 - b) * g
        gamma = b * state.gamma + (1 - b) * product(g, x)
        return Model(m, gamma), (abs_sq(m), product(m, x), gamma)

    def share(self, shared, sums, t, value):
        b = jnp.where(t == 1, 0, self.b1)
        f = b * shared.f + (1 - b) * value
        return self.bounded(f, shared, sums, jnp.ones_like(f))

    def step_leaf(self, old, shared, state, x, g, t):
        return state, shared.rate * state.m + self.decayed(x)


@rule
class MoMoAdam(Bounding):
    """Adam whose step size is that at which a model of the loss is at its least.

        f     <- b1 * f + (1 - b1) * value
        m     <- b1 * m + (1 - b1) * g
        v     <- b2 * v + (1 - b2) * |g|^2
        gamma <- b1 * gamma + (1 - b1) * <g, x>
        c      = 1 - b1^t
        scale  = sqrt(v / (1 - b2^t)) + eps
        decay  = learning_rate * weight_decay
        gap    = max((1 + decay) * (f - c * lower_bound - gamma) + <m, x>, 0)
        rate   = min(learning_rate / c, gap / <m, m / scale>)
        step   = rate * m / scale + decay / (1 + decay) * x

    Products are over all slots that have a gradient; gamma is kept slot by slot. It
    needs the loss: `update(state, model, grads, value=loss)`, or `make_step`.

    Args:
        learning_rate: the largest rate, but for c, in the parameter's unit, >= 0.
        b1: decay of the first moment and of the loss, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added outside of the root, in the gradient's unit, >= 0.
        lower_bound, adapt_lower_bound, weight_decay: as for `MoMo`; the bound counts c
            times.
    State: as for `MoMo`, and for each slot `v`, real, shape of the parameter.
    Raises: ValueError if a number is outside its range.
    Source: Schaipp et al. 2023, Algorithm 2, arXiv:2305.07583; the decay as in optax.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(MoMoAdam(0.5, lower_bound=0.5), model)
    >>> for g, value in (([0.5, -3.0], 4.0), ([-0.1, -2.0], 3.0)):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)}, value=value)
    >>> model["w"].tolist(), state.inner.shared.rate
    ([0.2445, -1.015], Array(2.632, dtype=float32))
    """

    learning_rate: Hyper = 1e-2
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-8
    lower_bound: Hyper = 0.0
    adapt_lower_bound: bool = False
    weight_decay: Hyper = 0.0

    def init_leaf(self, x):
        v = zeros_like(x, real=True)
        return AdamModel(zeros_like(x), v, jnp.zeros((), v.dtype))

    def scale(self, v, t):
        return jnp.sqrt(v / (1 - self.b2**t)) + self.eps

    def look_leaf(self, shared, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        gamma = self.b1 * state.gamma + (1 - self.b1) * product(g, x)
        squares = ratio(abs_sq(m), self.scale(v, t))
        return AdamModel(m, v, gamma), (squares, product(m, x), gamma)

    def share(self, shared, sums, t, value):
        f = self.b1 * shared.f + (1 - self.b1) * value
        return self.bounded(f, shared, sums, 1 - self.b1**t)

    def step_leaf(self, old, shared, state, x, g, t):
        step = shared.rate * ratio(state.m, self.scale(state.v, t))
        return state, step + self.decayed(x)
