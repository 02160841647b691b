"""Adam with another momentum: normalised before it is averaged, or with more memory."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import rule
from optimjax.rules.adam import Moments

__all__ = ["ADOPT", "AdEMAMix", "LaProp", "SimplifiedAdEMAMix"]


@rule
class ADOPT(LeafRule):
    """Momentum of gradients that are divided by the root mean square of those before.

        c    = g / max(sqrt(v), eps)
        c    = c * min(1, (t - 1)^clip_power / |c|)            None: without
        m   <- b1 * m + (1 - b1) * c                           at t = 1: m <- 0
        v   <- b2 * v + (1 - b2) * |g|^2                       at t = 1: v <- |g|^2
        step = learning_rate * (b1 * m + (1 - b1) * c if nesterov else m)

    The first step is 0: it only measures the gradient. As v does not know the gradient
    that it divides, the rule converges with any b2.

    Args:
        learning_rate: size of a step when all gradients agree, in the parameter's unit,
            >= 0.
        b1: decay of the momentum, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: the least that a gradient is divided by, in its unit, >= 0.
        clip_power: power of the number of steps before this one to which numbers of c
            are clipped, >= 0; None for no clipping, as in the paper's first version.
        nesterov: look ahead along the momentum.
    State: `m` and `v`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Taniguchi et al. 2024, Algorithm 2 and its clipped form, arXiv:2411.02853.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adopt = ADOPT(learning_rate=0.1)
    >>> state, _ = adopt.apply(adopt.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adopt.apply(state, x, {"w": jnp.array([-0.1, 4.0])})
    >>> steps["w"].tolist()
    [-0.00200, 0.01000]
    """

    ranges: ClassVar = {"clip_power": NOT_NEGATIVE}

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.9999
    eps: Hyper = 1e-6
    clip_power: Hyper | None = 0.25
    nesterov: bool = False

    def init_leaf(self, x):
        return Moments(zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        c = g / jnp.maximum(jnp.sqrt(state.v), self.eps)
        if self.clip_power is not None:
            size, limit = jnp.abs(c), (t - 1) ** self.clip_power
            long = size > limit
            c = c * jnp.where(long, limit / jnp.where(long, size, 1), 1)
        c = jnp.where(t > 1, c, 0)
        m = d = self.b1 * state.m + (1 - self.b1) * c
        if self.nesterov:
            d = self.b1 * m + (1 - self.b1) * c
        square = abs_sq(g)
        v = jnp.where(t > 1, self.b2 * state.v + (1 - self.b2) * square, square)
        return Moments(m, v), self.learning_rate * d


class ThreeMoments(NamedTuple):
    m: Array
    slow: Array
    v: Array


@rule
class AdEMAMix(LeafRule):
    """Adam with a second, slow momentum that remembers thousands of gradients.

        m    <- b1 * m + (1 - b1) * g
        slow <- b3(t) * slow + (1 - b3(t)) * g
        v    <- b2 * v + (1 - b2) * |g|^2
        m_hat = m / (1 - b1^t)
        v_hat = v / (1 - b2^t)
        d     = m_hat + alpha(t) * slow
        step  = learning_rate * d / (sqrt(v_hat + eps_root) + eps)

        alpha(t) = alpha * s                                   s = min(t / warmup, 1)
        b3(t)    = min(exp(1 / ((1 - s) / ln b1 + s / ln b3)), b3)

    where alpha and b3 are what they are from the start if `warmup` is None. The slow
    momentum has no correction of its bias to zero: it is to fill slowly.

    Args:
        learning_rate, b1, b2, eps, eps_root: as for `Adam`; b1 is not None.
        b3: decay of the slow momentum, in [0, 1).
        alpha: weight of the slow momentum, >= 0.
        warmup: steps in which alpha rises from 0, and b3 from b1, >= 0; the paper has
            the length of the whole training. None for no rise.
    State: `m`, `slow` and `v`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Pagliardini et al. 2024, Algorithm 1 and section 3, arXiv:2409.03137.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> ademamix = AdEMAMix(learning_rate=0.1, b3=0.99, warmup=4)
    >>> state, _ = ademamix.apply(ademamix.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = ademamix.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.06032, -0.01977]
    """

    ranges: ClassVar = dict.fromkeys(("alpha", "warmup"), NOT_NEGATIVE)

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    b3: Hyper = 0.9999
    alpha: Hyper = 5.0
    eps: Hyper = 1e-8
    eps_root: Hyper = 0.0
    warmup: Hyper | None = None

    def init_leaf(self, x):
        return ThreeMoments(zeros_like(x), zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        alpha, b3 = self._slow(t)
        m = self.b1 * state.m + (1 - self.b1) * g
        slow = b3 * state.slow + (1 - b3) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        d = m / (1 - self.b1**t) + alpha * slow
        root = jnp.sqrt(v / (1 - self.b2**t) + self.eps_root)
        return ThreeMoments(m, slow, v), self.learning_rate * d / (root + self.eps)

    def _slow(self, t):
        """alpha and b3 at step t."""
        if self.warmup is None:
            return self.alpha, self.b3
        s = jnp.minimum(t / self.warmup, 1)
        rate = (1 - s) / jnp.log(self.b1) + s / jnp.log(self.b3)
        return s * self.alpha, jnp.minimum(jnp.exp(1 / rate), self.b3)


@rule
class SimplifiedAdEMAMix(LeafRule):
    """AdEMAMix with one momentum, a sum, and the last gradient beside it.

        m   <- b1 * m + g
        v   <- b2 * v + (1 - b2) * |g|^2
        v_hat = v / (1 - b2^t)
        step = learning_rate * (m + alpha * g) / (sqrt(v_hat + eps_root) + eps)

    The sum has no factor 1 - b1, so steps are up to (1 / (1 - b1) + alpha) times as
    long as those of Adam: divide the learning rate by that.

    Args:
        learning_rate: step per unit of normalised momentum, in the parameter's unit,
            >= 0.
        b1: decay of the momentum, in [0, 1).
        b2, eps, eps_root: as for `Adam`.
        alpha: weight of the gradient, >= 0: large for small batches; 0 for large ones.
    State: `m` and `v`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Morwani et al. 2025, section 5, arXiv:2502.02431; defaults of optax.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> rule = SimplifiedAdEMAMix(learning_rate=0.1, alpha=2.0)
    >>> state, _ = rule.apply(rule.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = rule.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.05473, 0.1194]
    """

    ranges: ClassVar = {"alpha": NOT_NEGATIVE}

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.99
    b2: Hyper = 0.95
    alpha: Hyper = 0.0
    eps: Hyper = 1e-8
    eps_root: Hyper = 0.0

    def init_leaf(self, x):
        return Moments(zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        root = jnp.sqrt(v / (1 - self.b2**t) + self.eps_root)
        step = self.learning_rate * (m + self.alpha * g) / (root + self.eps)
        return Moments(m, v), step


@rule
class LaProp(LeafRule):
    """Momentum of gradients that are divided by their root mean square first.

        v    <- b2 * v + (1 - b2) * |g|^2
        v_hat = v / (1 - b2^t)
        m    <- b1 * m + (1 - b1) * g / (sqrt(v_hat) + eps)
        step  = learning_rate * m / (1 - b1^t)

    In Adam a gradient of long ago is divided by the root of today; here by that of its
    own time, so any b1 and b2 go together.

    Args:
        learning_rate: size of a step when all gradients agree, in the parameter's unit,
            >= 0.
        b1: decay of the momentum, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added outside of the root, in the gradient's unit, >= 0.
    State: `m` and `v`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Ziyin et al. 2020, Algorithm 1, arXiv:2002.04839.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> laprop = LaProp(learning_rate=0.1)
    >>> state, _ = laprop.apply(laprop.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = laprop.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.03277, -0.006077]
    """

    learning_rate: Hyper = 4e-4
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-15

    def init_leaf(self, x):
        return Moments(zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        c = g / (jnp.sqrt(v / (1 - self.b2**t)) + self.eps)
        m = self.b1 * state.m + (1 - self.b1) * c
        return Moments(m, v), self.learning_rate * m / (1 - self.b1**t)
