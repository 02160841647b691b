"""Rules whose step looks at the sign of a gradient, not at its size."""

import math
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.kernels.fused import Kernel
from optimjax.leaf import LeafRule
from optimjax.rule import Selection, rule

__all__ = ["Lion", "Rprop", "SignSGD", "Signum", "Tiger"]


class Moment(NamedTuple):
    m: Array


@rule
class SignSGD(LeafRule):
    """A step of one size for every number, against the sign of its gradient.

        step = learning_rate * sign(g)

    The sign of 0 is 0, and that of a complex number is its direction, g / |g|.

    Args:
        learning_rate: size of every step, in the parameter's unit, >= 0.
    State: nothing.
    Raises: ValueError if a number is outside its range.
    Source: Bernstein et al. 2018, Algorithm 1, arXiv:1802.04434.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> signs = SignSGD(0.1)
    >>> state, _ = signs.apply(signs.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = signs.apply(state, x, {"w": jnp.array([-0.1, 0.0])})
    >>> steps["w"].tolist()
    [-0.1, 0.0]
    """

    learning_rate: Hyper = 1e-3

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, self.learning_rate * jnp.sign(g)


@rule
class Signum(LeafRule):
    """A step of one size for every number, against the sign of its momentum.

        m   <- momentum * m + (1 - momentum) * g
        step = learning_rate * sign(m)

    Args:
        learning_rate: size of every step, in the parameter's unit, >= 0.
        momentum: decay of the momentum, in [0, 1); `beta` in optax.
    State: `m`, shape of the parameter.
    Raises: ValueError if a number is outside its range.
    Source: Bernstein et al. 2018, Algorithm 2, arXiv:1802.04434.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> signum = Signum(0.1, momentum=0.4)
    >>> state, _ = signum.apply(signum.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = signum.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist(), state.slots["w"].m.tolist()
    ([0.1, 0.1], [0.06, 0.48])
    """

    learning_rate: Hyper = 1e-3
    momentum: Hyper = 0.9

    def init_leaf(self, x):
        return Moment(zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        m = self.momentum * state.m + (1 - self.momentum) * g
        return Moment(m), self.learning_rate * jnp.sign(m)


@rule
class Lion(LeafRule):
    """Sign of an interpolated momentum; one array of state per parameter.

        c    = b1 * m + (1 - b1) * g
        m   <- b2 * m + (1 - b2) * g
        step = learning_rate * (sign(c) + weight_decay * x)

    Args:
        learning_rate: size of every step, in the parameter's unit, >= 0; a tenth to a
            third of what suits Adam.
        b1: weight of the old momentum in the direction, in [0, 1).
        b2: decay of the momentum, in [0, 1); its memory is about 1 / (1 - b2) steps.
        weight_decay: share of the parameter taken away per unit of learning rate, >= 0.
        decay_where: the slots that decay: a glob on paths, several, or a function of
            (path, leaf) such as `lambda path, x: x.ndim > 1`; None for all.
    State: `m`, shape of the parameter.
    Raises: ValueError if a number is outside its range.
    Source: Chen et al. 2023, Algorithm 2, arXiv:2302.06675; defaults of optax.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> lion = Lion(0.1, b1=0.8, b2=0.95, weight_decay=0.3)
    >>> state, _ = lion.apply(lion.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = lion.apply(state, x, {"w": jnp.array([-0.08, 2.0])})
    >>> steps["w"].tolist(), state.slots["w"].m.tolist()
    ([0.13, 0.04], [0.01975, -0.0425])
    """

    learning_rate: Hyper = 1e-4
    b1: Hyper = 0.9
    b2: Hyper = 0.99
    weight_decay: Hyper = 1e-3
    decay_where: Selection = None

    def init_leaf(self, x):
        return Moment(zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        d = jnp.sign(self.b1 * state.m + (1 - self.b1) * g)
        m = self.b2 * state.m + (1 - self.b2) * g
        if self.decay_where:
            d = d + self.weight_decay * x
        return Moment(m), self.learning_rate * d

    def kernel(self):
        return Kernel("lion", self._numbers, self.decay_where is not False)

    def _numbers(self, t: Array) -> tuple[Any, ...]:
        decay = self.learning_rate * self.weight_decay
        return self.learning_rate, self.b1, self.b2, decay


@rule
class Tiger(LeafRule):
    """Sign of one momentum: Lion with both of its decays the same.

        m   <- b1 * m + (1 - b1) * g
        step = learning_rate * sign(m)

    Args:
        learning_rate: size of every step, in the parameter's unit, >= 0. The author
            gives each array one of its own, in proportion to its root mean square.
        b1: decay of the momentum, in [0, 1).
    State: `m`, shape of the parameter.
    Raises: ValueError if a number is outside its range.
    Source: Su 2023, "Tiger: a tight-fisted optimizer", github.com/bojone/tiger.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> tiger = Tiger(0.1, b1=0.6)
    >>> state, _ = tiger.apply(tiger.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = tiger.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist(), state.slots["w"].m.tolist()
    ([0.1, 0.1], [0.0800, 0.0800])
    """

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.965

    def init_leaf(self, x):
        return Moment(zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        return Moment(m), self.learning_rate * jnp.sign(m)


class Resilient(NamedTuple):
    sign: Array
    size: Array


@rule
class Rprop(LeafRule):
    """A step size for every number, which grows while its gradient keeps its sign.

        size <- learning_rate                 at t = 1
        s     = sign(g)
        size <- clip(size * eta_plus)         where s = sign
        size <- clip(size * eta_minus), s = 0 where s = -sign
        sign <- s
        step  = size * s

    and clip(.) keeps it in [min_step_size, max_step_size]. Where the sign has turned
    the number rests for one step. For whole batches: noise turns signs, too.

    Args:
        learning_rate: size of the first step, in the parameter's unit, >= 0. Sizes find
            their own way from there: a schedule is read at a slot's first step only.
        eta_minus: factor where the sign turns, in [0, 1).
        eta_plus: factor where the sign stays, >= 1.
        min_step_size: the smallest step size, >= 0.
        max_step_size: the largest one, >= 0.
    State: `sign` and `size`, shape of the parameter.
    Raises: ValueError if a number is outside its range; TypeError for a complex
        parameter.
    Source: Riedmiller and Braun 1993, "A direct adaptive method for faster
        backpropagation learning", in the form iRprop- of Igel and Hüsken 2003, which
        torch and Optimisers.jl have; optax applies the step of the call before.

    >>> x = {"w": jnp.array([1.0, -2.0, 3.0])}
    >>> rprop = Rprop(0.1)
    >>> state, _ = rprop.apply(rprop.init(x), x, {"w": jnp.array([0.5, -3.0, 0.0])})
    >>> state, steps = rprop.apply(state, x, {"w": jnp.array([0.1, 2.0, -1.0])})
    >>> steps["w"].tolist(), state.slots["w"].size.tolist()
    ([0.12, 0.0, -0.1], [0.12, 0.05, 0.1])
    """

    complex_ok = False
    ranges: ClassVar = {
        "eta_minus": (0.0, 1.0, True),
        "eta_plus": (1.0, math.inf, False),
        "min_step_size": NOT_NEGATIVE,
        "max_step_size": NOT_NEGATIVE,
    }

    learning_rate: Hyper = 1e-2
    eta_minus: Hyper = 0.5
    eta_plus: Hyper = 1.2
    min_step_size: Hyper = 1e-6
    max_step_size: Hyper = 50.0

    def init_leaf(self, x):
        return Resilient(zeros_like(x), zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        # Signs are multiplied, not gradients, whose product may underflow to 0.
        same = jnp.sign(g) * state.sign
        factor = jnp.where(same > 0, self.eta_plus, self.eta_minus)
        size = jnp.where(t == 1, self.learning_rate, state.size)
        size = size * jnp.where(same == 0, 1, factor)
        size = jnp.clip(size, self.min_step_size, self.max_step_size)
        s = jnp.where(same < 0, 0, jnp.sign(g))
        return Resilient(s, size), size * s
