"""Rules that scale the step of a whole array by the array's own norm."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, norm, real_part_dtype, total, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import AxesOf, Selection, rule
from optimjax.units import apart

__all__ = ["LAMB", "LARS", "Fromage", "NovoGrad"]


class Velocity(NamedTuple):
    v: Array


class Moments(NamedTuple):
    m: Array
    v: Array


def trust_ratio(
    x_norm: Array,
    d_norm: Array,
    coefficient: Array | float = 1.0,
    eps: Array | float = 0.0,
) -> Array:
    """coefficient * x_norm / (d_norm + eps); 1 where a norm is 0, NaN where it is NaN.

    An array of zeros would stay one for ever otherwise.
    """
    known = (x_norm != 0) & (d_norm != 0)
    return jnp.where(known, coefficient * x_norm / jnp.where(known, d_norm + eps, 1), 1)


@rule
class Fromage(LeafRule):
    """A step of a fixed share of the parameter's norm, which then stays bounded.

        trust = max(|x|, min_norm) / max(|g|, min_norm)     1 if either is 0
        step  = x - (x - learning_rate * trust * g) / sqrt(1 + learning_rate^2)

    where |.| is the norm of the whole array.

    Args:
        learning_rate: length of a step, as a share of the parameter's, >= 0.
        min_norm: the least that a norm counts, in the unit of either, >= 0.
    State: nothing.
    Raises: ValueError if a number is outside its range.
    Source: Bernstein et al. 2020, Algorithm 1, arXiv:2002.03432; `min_norm` of optax.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> fromage = Fromage(0.1)
    >>> state, _ = fromage.apply(fromage.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = fromage.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [-0.0061482, 0.212294]
    """

    ranges: ClassVar = {"min_norm": NOT_NEGATIVE}

    learning_rate: Hyper = 1e-2
    min_norm: Hyper = 1e-6

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        x_norm = jnp.maximum(norm(x), self.min_norm)
        g_norm = jnp.maximum(norm(g), self.min_norm)
        root = jnp.sqrt(1 + self.learning_rate**2)
        # 1 - 1 / root, without the digits that the difference would lose.
        shrink = self.learning_rate**2 / (root * (root + 1))
        d = self.learning_rate / root * trust_ratio(x_norm, g_norm) * g
        return None, d + shrink * x


@rule
class LARS(LeafRule):
    """Momentum on steps of a fixed share of the parameter's norm.

        d     = g + weight_decay * x
        trust = trust_coefficient * |x| / (|d| + eps)       1 if either norm is 0
        v    <- momentum * v + learning_rate * trust * d
        step  = learning_rate * trust * d + momentum * v if nesterov else v

    where |.| is the norm of the whole array. The defaults are optax's numbers; with
    `separate_norms` the ratio is the paper's, |x| / (|g| + weight_decay * |x| + eps).

    Args:
        learning_rate: factor of all steps, inside of the velocity, >= 0.
        weight_decay: L2 penalty added to the gradient, >= 0.
        trust_coefficient: length of a step, as a share of the parameter's, >= 0.
        eps: added to the denominator, in the gradient's unit, >= 0.
        momentum: decay of the velocity, in [0, 1); None for none, and no buffer.
        nesterov: look ahead along the velocity.
        separate_norms: add the norms of gradient and decay, not the arrays.
        decay_where, trust_where: the slots that decay; those that are scaled, while the
            others' trust is 1: a glob on paths, several, or a function of (path, leaf)
            such as `lambda path, x: x.ndim > 1`; None for all.
        axes: as for `MatrixRule`: with `Axes(batch=0)` each of the layers that are
            stacked in an array has a ratio of its own.
    State: `v`, shape of the parameter, with momentum; else nothing.
    Raises: ValueError if a number is outside its range, or for `nesterov` without
        momentum.
    Source: You et al. 2017, Algorithm 1, arXiv:1708.03888.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> lars = LARS(0.5, weight_decay=0.1, trust_coefficient=0.2)
    >>> state, _ = lars.apply(lars.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = lars.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.0370874, 0.0258076]
    """

    ranges: ClassVar = {"trust_coefficient": NOT_NEGATIVE}

    learning_rate: Hyper = 0.1
    weight_decay: Hyper = 0.0
    trust_coefficient: Hyper = 1e-3
    eps: Hyper = 0.0
    momentum: Hyper | None = 0.9
    nesterov: bool = False
    separate_norms: bool = False
    decay_where: Selection = None
    trust_where: Selection = None
    axes: AxesOf = None

    def __post_init__(self):
        super().__post_init__()
        if self.nesterov and self.momentum is None:
            raise ValueError("LARS: nesterov without momentum. Give momentum=0.9, say.")

    def init_leaf(self, x):
        return None if self.momentum is None else Velocity(zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        decay = self.weight_decay if self.decay_where else 0.0
        d = g + decay * x
        if self.trust_where:

            def scaled(x: Array, g: Array, d: Array) -> Array:
                separate = norm(g) + decay * norm(x)
                d_norm = separate if self.separate_norms else norm(d)
                return (
                    trust_ratio(norm(x), d_norm, self.trust_coefficient, self.eps) * d
                )

            d = apart(self.axes, scaled, x, g, d)
        d = self.learning_rate * d
        if self.momentum is None:
            return None, d
        v = self.momentum * state.v + d
        return Velocity(v), d + self.momentum * v if self.nesterov else v


@rule
class LAMB(LeafRule):
    """Adam, with the step of each array as long as the array itself.

        m    <- b1 * m + (1 - b1) * g
        v    <- b2 * v + (1 - b2) * |g|^2
        m_hat = m / (1 - b1^t)
        v_hat = v / (1 - b2^t)
        d     = m_hat / (sqrt(v_hat + eps_root) + eps) + weight_decay * x
        step  = learning_rate * d * |x| / |d|        |x| / |d| is 1 if either is 0

    where |x| and |d| are norms of the whole array.

    Args:
        learning_rate: length of a step, as a share of the parameter's, >= 0.
        b1, b2, eps, eps_root: as for `Adam`.
        weight_decay: added to the direction, before it is scaled, >= 0.
        decay_where, trust_where: the slots that decay; those that are scaled: a glob on
            paths, several, or a function of (path, leaf) such as
            `lambda path, x: x.ndim > 1`; None for all.
        axes: as for `MatrixRule`: with `Axes(batch=0)` each of the layers that are
            stacked in an array has a ratio of its own.
    State: `m` and `v`, shape of the parameter; `v` real.
    Raises: ValueError if a number is outside its range.
    Source: You et al. 2020, Algorithm 2, arXiv:1904.00962, with the identity as phi;
        defaults of optax.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> lamb = LAMB(0.1, weight_decay=0.3)
    >>> state, _ = lamb.apply(lamb.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = lamb.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.164723, -0.151216]
    """

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-6
    eps_root: Hyper = 0.0
    weight_decay: Hyper = 0.0
    decay_where: Selection = None
    trust_where: Selection = None
    axes: AxesOf = None

    def init_leaf(self, x):
        return Moments(zeros_like(x), zeros_like(x, real=True))

    def apply_leaf(self, state, x, g, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = self.b2 * state.v + (1 - self.b2) * abs_sq(g)
        m_hat = m / (1 - self.b1**t)
        v_hat = v / (1 - self.b2**t)
        d = m_hat / (jnp.sqrt(v_hat + self.eps_root) + self.eps)
        if self.decay_where:
            d = d + self.weight_decay * x
        if self.trust_where:
            d = apart(self.axes, lambda x, d: trust_ratio(norm(x), norm(d)) * d, x, d)
        return Moments(m, v), self.learning_rate * d


@rule
class NovoGrad(LeafRule):
    """Momentum on gradients that are divided by the running norm of the whole array.

        v   <- b2 * v + (1 - b2) * |g|^2                    at t = 1: v <- |g|^2
        m   <- b1 * m + g / (sqrt(v + eps_root) + eps) + weight_decay * x
        step = learning_rate * m

    where |g| is the norm of the whole array. The sum in m has no factor 1 - b1: where
    another implementation has it (`grad_averaging`), multiply the learning rate by it.

    Args:
        learning_rate: step per unit of momentum, in the parameter's unit, >= 0.
        b1: decay of the momentum, in [0, 1).
        b2: decay of the squared norm, in [0, 1); the default is optax's, the paper
            has 0.98 with b1=0.95.
        eps: added outside of the root, in the gradient's unit, >= 0.
        eps_root: added inside of the root, in its square, >= 0.
        weight_decay: share of the parameter added to the momentum, >= 0.
    State: `m`, shape of the parameter; `v`, real, ().
    Raises: ValueError if a number is outside its range.
    Source: Ginsburg et al. 2019, Algorithm 1, arXiv:1905.11286.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> novograd = NovoGrad(0.1, weight_decay=0.3)
    >>> state, _ = novograd.apply(novograd.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = novograd.apply(state, x, {"w": jnp.array([-0.1, 2.0])})
    >>> steps["w"].tolist()
    [0.0674604, -0.1160645]
    """

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.9
    b2: Hyper = 0.25
    eps: Hyper = 1e-6
    eps_root: Hyper = 0.0
    weight_decay: Hyper = 0.0

    def init_leaf(self, x):
        return Moments(zeros_like(x), jnp.zeros((), real_part_dtype(x.dtype)))

    def apply_leaf(self, state, x, g, t):
        square = total(abs_sq(g))
        v = jnp.where(t == 1, square, self.b2 * state.v + (1 - self.b2) * square)
        d = g / (jnp.sqrt(v + self.eps_root) + self.eps) + self.weight_decay * x
        m = self.b1 * state.m + d
        return Moments(m, v), self.learning_rate * m
