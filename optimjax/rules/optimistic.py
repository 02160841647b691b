"""Adams that extrapolate from the change since the last step."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import Selection, rule
from optimjax.rules.adam import Adam, momentum

__all__ = ["Adan", "OptimisticAdam"]


class AdanMoments(NamedTuple):
    m: Array
    v: Array
    n: Array
    g: Array


@rule
class Adan(LeafRule):
    """Nesterov's momentum from the change of the gradient, scaled as in Adam.

        c    = g - (last g)                                    at t = 1: 0
        m   <- b1 * m + (1 - b1) * g
        v   <- b2 * v + (1 - b2) * c
        n   <- b3 * n + (1 - b3) * |g + lookahead * c|^2
        m_hat, v_hat, n_hat = m / (1 - b1^t), v / (1 - b2^t), n / (1 - b3^t)
        d    = (m_hat + lookahead * v_hat) / (sqrt(n_hat + eps_root) + eps)
        step = learning_rate * (d + weight_decay * x)
        step = step / (1 + learning_rate * weight_decay)       proximal=True

    Decays are what is kept: each is 1 minus the paper's. The defaults are those of the
    authors' code, but for the decay. optax has `lookahead=1 - b2, eps_root=1e-8,
    proximal=False`: there b2 is what is kept in v, and what is not in `lookahead`.

    Args:
        learning_rate: step where gradients agree, in the parameter's unit, >= 0.
        b1, b2, b3: decays of the gradient, its change and its square, in [0, 1).
        eps, eps_root: added outside and inside of the root, >= 0.
        weight_decay: share of the parameter taken away per unit of learning rate, >= 0.
        decay_where: the slots that decay, as for `AdamW`.
        proximal: the decay is implicit, as in the paper, rather than that of `AdamW`.
        lookahead: weight of the change, >= 0; None for b2, as in the paper.
    State: `m`, `v`, `n` and the last `g`, shape of the parameter; `n` real.
    Raises: ValueError if a number is outside its range.
    Source: Xie et al. 2022, Algorithm 1, arXiv:2208.06677.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> adan = Adan(learning_rate=0.1, weight_decay=0.5)
    >>> state, _ = adan.apply(adan.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = adan.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.03279, -0.05961]
    """

    ranges: ClassVar = {"lookahead": NOT_NEGATIVE}

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.98
    b2: Hyper = 0.92
    b3: Hyper = 0.99
    eps: Hyper = 1e-8
    eps_root: Hyper = 0.0
    weight_decay: Hyper = 0.0
    decay_where: Selection = None
    proximal: bool = True
    lookahead: Hyper | None = None

    def init_leaf(self, x):
        n = zeros_like(x, real=True)
        return AdanMoments(zeros_like(x), zeros_like(x), n, zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        lookahead = self.b2 if self.lookahead is None else self.lookahead
        c = jnp.where(t == 1, 0, g - state.g)
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * c
        n = self.b3 * state.n + (1 - self.b3) * abs_sq(g + lookahead * c)
        d = m / (1 - self.b1**t) + lookahead * v / (1 - self.b2**t)
        root = jnp.sqrt(n / (1 - self.b3**t) + self.eps_root)
        step = self.learning_rate * d / (root + self.eps)
        if self.decay_where:
            decay = self.learning_rate * self.weight_decay
            step = (step + decay * x) / (1 + decay if self.proximal else 1)
        return AdanMoments(m, v, n, g), step


class Directions(NamedTuple):
    m: Array
    v: Array
    d: Array


@rule
class OptimisticAdam(Adam):
    """Adam that goes on by the change of its own direction.

        m   <- b1 * m + (1 - b1) * g
        v   <- b2 * v + (1 - b2) * |g|^2
        d    = m / (1 - b1^t) / (sqrt(v / (1 - b2^t) + eps_root) + eps)
        step = learning_rate * (d + optimism * (d - last d))   at t = 1: last d = d

    optax's optimistic_adam_v2 with `alpha` and `beta` is this with
    `learning_rate * alpha`, `optimism=beta / alpha` and, by default, `nesterov`. The
    last direction is kept without its learning rate, so a schedule does not mix the
    two; Optimisers.jl keeps it with, which is the same while the rate is constant.

    Args:
        learning_rate, b1, b2, eps, eps_root: as for `Adam`; b1=0.5 and b2=0.9 in the
            paper's experiments with GANs, and in Optimisers.jl.
        optimism: weight of the change of direction, >= 0; 1 in the paper.
        nesterov: the first moment as in `NAdam`, without `momentum_decay`.
        double_first: the last direction is 0 at t = 1, so that the first step is twice
            as long with optimism 1: the paper's Algorithm 1, Optimisers.jl.
    State: `m`, `v` and the last `d`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: Daskalakis et al. 2018, Algorithm 1, arXiv:1711.00141.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> rule = OptimisticAdam(learning_rate=0.1)
    >>> state, _ = rule.apply(rule.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = rule.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.002205, 0.0711]
    """

    ranges: ClassVar = {"optimism": NOT_NEGATIVE}

    b1: Hyper = 0.9  # not None
    optimism: Hyper = 1.0
    nesterov: bool = False
    double_first: bool = False

    def init_leaf(self, x):
        m, v = super().init_leaf(x)
        return Directions(m, v, zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        root = jnp.sqrt(v / (1 - self.b2**t) + self.eps_root)
        d = momentum(m, g, self.b1, t, self.nesterov) / (root + self.eps)
        last = state.d if self.double_first else jnp.where(t == 1, d, state.d)
        step = self.learning_rate * (d + self.optimism * (d - last))
        return Directions(m, v, d), step
