"""Adam with another measure of the gradient's size, or of the trust in it."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, cast, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import rule
from optimjax.rules.adam import Adam, Decoupled, Moments, momentum

__all__ = [
    "AdaBelief",
    "AdaBeliefW",
    "Adamax",
    "AdamaxW",
    "RAdam",
    "RAdamW",
    "Yogi",
]


class MaxNorm(NamedTuple):
    m: Array
    u: Array


@rule
class Adamax(LeafRule):
    """Adam with the largest recent gradient in place of the root mean square.

        m   <- b1 * m + (1 - b1) * g
        u   <- max(b2 * u, |g| + eps)
        step = learning_rate * m / (1 - b1^t) / u

    Args:
        learning_rate: bound on each step, in the parameter's unit, >= 0; torch's
            default is 2e-3.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the largest gradient, in [0, 1).
        eps: added to |g|, in the gradient's unit, >= 0 (torch, optax; the paper has
            none).
        eps_outside: add eps to u where the step is divided by it, and not to |g|, as
            Optimisers.jl does.
    State: `m` and `u`, shape of the parameter; `u` real.
    Raises: ValueError if a number is outside its range.
    Source: Kingma and Ba 2015, Algorithm 2, arXiv:1412.6980.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adamax = Adamax(learning_rate=0.1, b2=0.9)
    >>> state, _ = adamax.apply(adamax.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adamax.apply(state, x, {"w": jnp.array([-0.1, 4.0])})
    >>> steps["w"].tolist()
    [0.04094, 0.01711]
    """

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-8
    eps_outside: bool = False

    def init_leaf(self, x):
        return MaxNorm(zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        inside, outside = (0, self.eps) if self.eps_outside else (self.eps, 0)
        m = self.b1 * state.m + (1 - self.b1) * g
        u = jnp.maximum(self.b2 * state.u, jnp.abs(g) + inside)
        m_hat = m / (1 - self.b1**t)
        return MaxNorm(m, u), self.learning_rate * m_hat / (u + outside)


@rule
class AdamaxW(Decoupled, Adamax):
    """Adamax with weight decay apart from the moments, as `AdamW` has it.

    Args:
        learning_rate, b1, b2, eps, eps_outside: as for `Adamax`.
        weight_decay, couple, decay_where: as for `AdamW`.
    State: as for `Adamax`.
    Raises: ValueError if a number is outside its range.
    Source: Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019,
        arXiv:1711.05101.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adamaxw = AdamaxW(0.1, eps=0.2, eps_outside=True, weight_decay=0.5)
    >>> state, _ = adamaxw.apply(adamaxw.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adamaxw.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.07633, -0.1115]
    """


def average_length(b2, t):
    """RAdam's rho: how many gradients the second moment averages over, after t steps
    and in the end."""
    rho_inf = 2 / (1 - b2) - 1
    rate = -jnp.log(b2)
    few = t * rate < 0.3

    def series(a):  # of 2 / expm1(a) - 2 / a + 1
        return a / 6 - a**3 / 360 + a**5 / 15120 - a**7 / 604800

    # The paper's formula is the second one. While t is small its terms are large and
    # nearly the same: in float32 rho near 5, where the rule switches, would be wrong by
    # 0.01 with b2 = 0.999, and by 4 with 0.99999.
    rho = jnp.where(
        few,
        t + series(rate) - t * series(t * rate),
        rho_inf - 2 * t / jnp.expm1(t * rate),
    )
    return rho, rho_inf


@rule
class RAdam(Adam):
    """Adam that takes steps of plain momentum until its second moment can be trusted.

        m      <- b1 * m + (1 - b1) * g
        v      <- b2 * v + (1 - b2) * |g|^2
        m_hat   = m / (1 - b1^t)
        v_hat   = v / (1 - b2^t)
        rho_inf = 2 / (1 - b2) - 1
        rho     = rho_inf - 2 * t * b2^t / (1 - b2^t)
        r^2     = (rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho)
        step    = learning_rate * r * m_hat / (sqrt(v_hat + eps_root) + eps)
                  learning_rate * m_hat                        where rho < threshold

    Args:
        learning_rate, b1, b2, eps, eps_root: as for `Adam`.
        threshold: least rho for an adaptive step, >= 0: 5 for optax and torch, 4 for
            the paper and Optimisers.jl; less counts as 4, below which r^2 < 0.
        nesterov: m_hat as in `NAdam`, without `momentum_decay`.
        debias_eps: eps, too, is divided by sqrt(1 - b2^t), as torch does, which adds it
            to the root of v before it corrects the bias.
    State: as for `Adam`.
    Raises: ValueError if a number is outside its range.
    Source: Liu et al. 2020, Algorithm 2, arXiv:1908.03265.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> radam = RAdam(learning_rate=0.1, b2=0.95)
    >>> grads = [jnp.array([0.5 - 0.1 * i, (-2.0) ** i]) for i in range(6)]
    >>> state = radam.init(x)
    >>> for g in grads:
    ...     state, steps = radam.apply(state, x, {"w": g})
    >>> steps["w"].tolist()
    [0.01379, -0.005351]
    """

    ranges: ClassVar = {"threshold": NOT_NEGATIVE}

    b1: Hyper = 0.9  # not None
    threshold: Hyper = 5.0
    nesterov: bool = False
    debias_eps: bool = False

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        m_hat = momentum(m, g, self.b1, t, self.nesterov)
        bias = 1 - self.b2**t
        eps = self.eps / jnp.sqrt(bias) if self.debias_eps else self.eps
        rho, rho_inf = average_length(self.b2, t)
        trusted = rho >= jnp.maximum(self.threshold, 4)
        rho = jnp.where(trusted, rho, rho_inf)  # the root of a negative r^2 is NaN
        r = jnp.sqrt(
            (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
        )
        adaptive = r * m_hat / (jnp.sqrt(v / bias + self.eps_root) + eps)
        step = self.learning_rate * jnp.where(trusted, adaptive, m_hat)
        return Moments(m, v), step


@rule
class RAdamW(Decoupled, RAdam):
    """RAdam with weight decay apart from the moments, as `AdamW` has it.

    torch's RAdam with `decoupled_weight_decay` is this with `debias_eps`.

    Args:
        learning_rate, b1, b2, eps, eps_root, threshold, nesterov, debias_eps: as for
            `RAdam`.
        weight_decay, couple, decay_where: as for `AdamW`.
    State: as for `Adam`.
    Raises: ValueError if a number is outside its range.
    Source: Liu et al. 2020, arXiv:1908.03265; Loshchilov and Hutter 2019,
        arXiv:1711.05101.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> radamw = RAdamW(0.1, weight_decay=0.5)
    >>> state, _ = radamw.apply(radamw.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = radamw.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.06842, -0.1368]
    """


class Belief(NamedTuple):
    m: Array
    s: Array


@rule
class AdaBelief(Adam):
    """Adam scaled by how far the gradients are from their running mean.

        m   <- b1 * m + (1 - b1) * g
        s   <- b2 * s + (1 - b2) * |g - m|^2 + eps_root
        m_hat = m / (1 - b1^t)
        s_hat = s / (1 - b2^t)
        step  = learning_rate * m_hat / (sqrt(s_hat) + eps)

    Args:
        learning_rate, b1, b2: as for `Adam`.
        eps: added outside of the root, in the gradient's unit, >= 0.
        eps_root: added to s at every step, in the square of the gradient's unit, >= 0;
            the paper has one epsilon for both, optax these two.
        nesterov: m_hat as in `NAdam`, without `momentum_decay`.
    State: `m` and `s`, shape of the parameter; `s` real.
    Raises: ValueError if a number is outside its range.
    Source: Zhuang et al. 2020, Algorithm 2, arXiv:2010.07468.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adabelief = AdaBelief(learning_rate=0.1)
    >>> state, _ = adabelief.apply(adabelief.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adabelief.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.05546, -0.01532]
    """

    b1: Hyper = 0.9  # not None
    eps: Hyper = 1e-16
    eps_root: Hyper = 1e-16
    nesterov: bool = False

    def init_leaf(self, x):
        return Belief(zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        s = self.b2 * state.s + (1 - self.b2) * abs_sq(g - m) + self.eps_root
        m_hat = momentum(m, g, self.b1, t, self.nesterov)
        s_hat = s / (1 - self.b2**t)
        step = self.learning_rate * m_hat / (jnp.sqrt(s_hat) + self.eps)
        return Belief(m, s), step


@rule
class AdaBeliefW(Decoupled, AdaBelief):
    """AdaBelief with weight decay apart from the moments, as `AdamW` has it.

    Args:
        learning_rate, b1, b2, eps, eps_root, nesterov: as for `AdaBelief`.
        weight_decay, couple, decay_where: as for `AdamW`.
    State: as for `AdaBelief`.
    Raises: ValueError if a number is outside its range.
    Source: Zhuang et al. 2020, arXiv:2010.07468, whose code decays like this;
        Loshchilov and Hutter 2019, arXiv:1711.05101.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> rule = AdaBeliefW(0.1, nesterov=True, weight_decay=0.5)
    >>> state, _ = rule.apply(rule.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = rule.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.06915, -0.06591]
    """


@rule
class Yogi(Adam):
    """Adam whose second moment moves by no more than the squared gradient.

        m    <- b1 * m + (1 - b1) * g
        v    <- v - (1 - b2) * sign(v - |g|^2) * |g|^2
        m_hat = m / (1 - b1^t)
        v_hat = v / (1 - b2^t)
        step  = learning_rate * m_hat / (sqrt(v_hat + eps_root) + eps)

    Args:
        learning_rate, b1, b2, eps, eps_root: as for `Adam`; eps is large, as in the
            paper's experiments.
        initial_v: v before the first step, >= 0; used by `init` alone. 0 in the paper's
            Algorithm 2.
        initial_m: m before the first step, used by `init` alone; optax puts 1e-6 into
            both, so that parameters without a gradient move.
        debias: divide m and v as above, like optax and the authors' TensorFlow code;
            False is Algorithm 2.
    State: as for `Adam`.
    Raises: ValueError if a number is outside its range.
    Source: Zaheer et al. 2018, "Adaptive methods for nonconvex optimization",
        Algorithm 2.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> yogi = Yogi(learning_rate=0.1)
    >>> state, _ = yogi.apply(yogi.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = yogi.apply(state, x, {"w": jnp.array([-0.01, 2.0])})
    >>> steps["w"].tolist()
    [0.06518, -0.01444]
    """

    ranges: ClassVar = {"initial_v": NOT_NEGATIVE}

    learning_rate: Hyper = 1e-2
    b1: Hyper = 0.9  # not None
    eps: Hyper = 1e-3
    initial_v: Hyper = 1e-6
    initial_m: Hyper = 0.0
    debias: bool = True

    def init_leaf(self, x):
        m, v = super().init_leaf(x)
        return Moments(m + cast(self.initial_m, m.dtype), v + self.initial_v)

    def apply_leaf(self, state, x, g, t):
        square = abs_sq(g)
        m = self.b1 * state.m + (1 - self.b1) * g
        v = state.v - (1 - self.b2) * jnp.sign(state.v - square) * square
        m_hat = m / (1 - self.b1**t) if self.debias else m
        v_hat = v / (1 - self.b2**t) if self.debias else v
        root = jnp.sqrt(v_hat + self.eps_root)
        return Moments(m, v), self.learning_rate * m_hat / (root + self.eps)
