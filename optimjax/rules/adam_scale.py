"""Adam with another way from the moments to the step, or a bound on it."""

import math
from typing import ClassVar

import jax.numpy as jnp

from optimjax.arrays import abs_sq, rms, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import Selection, rule
from optimjax.rules.adam import Moments

__all__ = ["ACProp", "AdaBound", "AdamAtan2", "Grams", "StableAdam"]


@rule
class AdamAtan2(LeafRule):
    """Adam with an arc tangent in place of the division, and so without an epsilon.

        m    <- b1 * m + (1 - b1) * g
        v    <- b2 * v + (1 - b2) * g^2
        m_hat = m / (1 - b1^t)
        v_hat = v / (1 - b2^t)
        step  = learning_rate * a * atan2(m_hat, b * sqrt(v_hat))

    Gradients that are all multiplied by one number give the same steps.

    Args:
        learning_rate: size of a step when all gradients agree, in the parameter's
            unit, >= 0; with a * atan(1 / b) = 1, as by default, that of Adam.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        a: factor of the angle, >= 0; no step is longer than learning_rate * a * pi / 2.
        b: factor of the root, >= 0: the larger, the nearer to Adam.
    State: `m` and `v`, shape of the parameter.
    Raises: ValueError if a number is outside its range; TypeError for a complex
        parameter.
    Source: Everett et al. 2024, section 4.3, arXiv:2407.05872.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adam = AdamAtan2(learning_rate=0.1)
    >>> state, _ = adam.apply(adam.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adam.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.06015, -0.01827]
    """

    complex_ok = False
    ranges: ClassVar = dict.fromkeys(("a", "b"), NOT_NEGATIVE)

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    a: Hyper = 4 / math.pi
    b: Hyper = 1.0

    def init_leaf(self, x):
        return Moments(zeros_like(x), zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        m_hat = m / (1 - self.b1**t)
        root = jnp.sqrt(v / (1 - self.b2**t))
        angle = jnp.arctan2(m_hat, self.b * root)
        return Moments(m, v), self.learning_rate * self.a * angle


@rule
class StableAdam(LeafRule):
    """Adam with a shorter step where the gradients are larger than v expects.

        b_hat = b * (1 - b^(t-1)) / (1 - b^t)                  for b1 and b2
        m    <- b1_hat * m + (1 - b1_hat) * g
        v    <- b2_hat * v + (1 - b2_hat) * |g|^2
        rms   = sqrt(mean(|g|^2 / max(v, eps^2)))              over the whole array
        rate  = learning_rate / max(1, rms)
        step  = rate * (m / (sqrt(v) + eps) + weight_decay * x)

    With weight decay, the paper's StableAdamW. The decays of Adafactor stand for a
    correction of bias; the moments come out as those of Adam after its own.

    Args:
        learning_rate: size of a step when all gradients agree, in the parameter's unit,
            >= 0.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added outside of the root, in the gradient's unit, >= 0.
        weight_decay: share of the parameter taken away per unit of the rate, >= 0.
        decay_where: the slots that decay: a glob on paths, several, or a function of
            (path, leaf) such as `lambda path, x: x.ndim > 1`; None for all.
    State: `m` and `v`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Wortsman et al. 2023, Algorithm 2, arXiv:2304.13013.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adam = StableAdam(learning_rate=0.1, weight_decay=0.5)
    >>> state, _ = adam.apply(adam.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adam.apply(state, x, {"w": jnp.array([-0.1, 20.0])})
    >>> steps["w"].tolist()
    [0.1006, -0.03626]
    """

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.99
    eps: Hyper = 1e-8
    weight_decay: Hyper = 0.0
    decay_where: Selection = None

    def init_leaf(self, x):
        return Moments(zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        b1, b2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (self.b1, self.b2))
        m = b1 * state.m + (1 - b1) * g
        v = b2 * state.v + (1 - b2) * abs_sq(g)
        root = jnp.sqrt(v)
        # A number is as large as expected where there is neither gradient nor epsilon.
        least = jnp.maximum(root, self.eps)
        size = rms(jnp.where(least > 0, g / jnp.where(least > 0, least, 1), 1))
        d = m / (root + self.eps)
        if self.decay_where:
            d = d + self.weight_decay * x
        return Moments(m, v), self.learning_rate / jnp.maximum(1, size) * d


@rule
class AdaBound(LeafRule):
    """Adam whose rates are held between two bounds that close in on one: SGD, at last.

        m    <- b1 * m + (1 - b1) * g
        v    <- b2 * v + (1 - b2) * |g|^2
        rate  = learning_rate * sqrt(1 - b2^t) / (1 - b1^t) / (sqrt(v) + eps)
        lower = final_rate * (1 - 1 / (gamma * t + 1))
        upper = final_rate * (1 + 1 / (gamma * t))
        step  = clip(rate, lower, upper) * m

    Args:
        learning_rate: of the Adam that it is at first, in the parameter's unit, >= 0.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        final_rate: of the SGD with momentum that it becomes, step per unit of gradient,
            >= 0. It has a schedule of its own: the authors' code multiplies it by
            that of the learning rate, relative to its start.
        gamma: how fast the bounds close, per step, >= 0; 0 for bounds of 0 and inf.
        eps: added outside of the root, in the gradient's unit, >= 0; no part of the
            correction of bias, as in the authors' code.
    State: `m` and `v`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Luo et al. 2019, Algorithm 2, arXiv:1902.09843; bias and bounds as in the
        authors' code, constant rates in place of those that fall with sqrt(t).

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adabound = AdaBound(0.1, final_rate=0.3, gamma=1.0)
    >>> state, _ = adabound.apply(adabound.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adabound.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.01575, -0.01445]
    """

    ranges: ClassVar = dict.fromkeys(("final_rate", "gamma"), NOT_NEGATIVE)

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    final_rate: Hyper = 0.1
    gamma: Hyper = 1e-3
    eps: Hyper = 1e-8

    def init_leaf(self, x):
        return Moments(zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        debias = jnp.sqrt(1 - self.b2**t) / (1 - self.b1**t)
        rate = self.learning_rate * debias / (jnp.sqrt(v) + self.eps)
        lower = self.final_rate * (1 - 1 / (self.gamma * t + 1))
        upper = self.final_rate * (1 + 1 / (self.gamma * t))
        return Moments(m, v), jnp.clip(rate, lower, upper) * m


@rule
class ACProp(LeafRule):
    """The gradient, divided by how far those before it were from their running mean.

        v_hat = v / (1 - b2^(t-1))                             at t = 1: 1
        step  = learning_rate * g / (sqrt(v_hat) + eps)
        v    <- b2 * v + (1 - b2) * |g - m|^2 + eps_root
        m    <- b1 * m + (1 - b1) * g

    The paper measures g from the mean after it was moved, which is b1 times as far:
    its steps are 1 / b1 times as long, but for eps.

    Args:
        learning_rate: step per unit of normalised gradient, in the parameter's unit,
            >= 0; at t = 1 per unit of gradient.
        b1: decay of the mean, in [0, 1).
        b2: decay of the squared distance, in [0, 1).
        eps: added outside of the root, in the gradient's unit, >= 0.
        eps_root: added to v at every step, in the square of that unit, >= 0.
    State: `m` and `v`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Zhuang et al. 2021, Algorithm 2, arXiv:2110.05454; first step and distance
        as in optax.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> acprop = ACProp(learning_rate=0.1)
    >>> state, _ = acprop.apply(acprop.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = acprop.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [-0.02000, 0.06667]
    """

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-16
    eps_root: Hyper = 1e-16

    def init_leaf(self, x):
        return Moments(zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        before = jnp.maximum(t - 1, 1)
        v_hat = jnp.where(t > 1, state.v / (1 - self.b2**before), 1)
        step = self.learning_rate * g / (jnp.sqrt(v_hat) + self.eps)
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g - state.m) + self.eps_root
        return Moments(m, v), step


@rule
class Grams(LeafRule):
    """Steps of Adam's size, each against the sign of its own gradient.

        m    <- b1 * m + (1 - b1) * g
        v    <- b2 * v + (1 - b2) * |g|^2
        m_hat = m / (1 - b1^t)
        v_hat = v / (1 - b2^t)
        step  = learning_rate * |m_hat| / (sqrt(v_hat) + eps) * sign(g)

    The sign of a complex number is its direction, g / |g|.

    Args:
        learning_rate: size of a step when all gradients agree, in the parameter's unit,
            >= 0.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added outside of the root, in the gradient's unit, >= 0.
    State: `m` and `v`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Cao et al. 2024, Algorithm 1, arXiv:2412.17107.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> grams = Grams(learning_rate=0.1)
    >>> state, _ = grams.apply(grams.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = grams.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [-0.05110, 0.01445]
    """

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-8

    def init_leaf(self, x):
        return Moments(zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        size = jnp.abs(m) / (1 - self.b1**t)
        size = size / (jnp.sqrt(v / (1 - self.b2**t)) + self.eps)
        return Moments(m, v), self.learning_rate * size * jnp.sign(g)
