"""Gradient descent: with momentum, averaging, noise or optimism."""

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.kernels.fused import Kernel
from optimjax.leaf import LeafRule
from optimjax.noise import Noisy
from optimjax.rule import rule

__all__ = ["ASGD", "SGD", "Momentum", "NoisySGD", "OptimisticGradientDescent"]


class Velocity(NamedTuple):
    v: Array


@rule
class SGD(LeafRule):
    """Stochastic gradient descent, with classical or Nesterov momentum.

        g    = (-g if maximize else g) + weight_decay * x      None: without
        v   <- momentum * v + (1 - dampening) * g      at t = 1 without dampening
        d    = g + momentum * v if nesterov else v     without momentum: d = g
        step = learning_rate * d

    The convention is that of torch and optax: the learning rate is outside of the
    buffer (`Momentum` has it inside), and the weight decay is L2, coupled.

    Args:
        learning_rate: step per unit of gradient, >= 0.
        momentum: decay of the velocity, in [0, 1); None for none, and no buffer.
        dampening: what is kept back of each gradient but the first, in [0, 1].
        nesterov: look ahead along the velocity.
        weight_decay: L2 penalty added to the gradient, >= 0; None for none, which saves
            a look at the parameter.
        maximize: ascend.
    State: `v`, shape of the parameter, with momentum; else nothing.
    Raises: ValueError if a number is outside its range, or for `nesterov` without
        momentum.
    Source: Sutskever et al. 2013, "On the importance of initialization and momentum in
        deep learning"; dampening and first step as in torch.optim.SGD.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> sgd = SGD(0.1, momentum=0.9, nesterov=True)
    >>> state, _ = sgd.apply(sgd.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = sgd.apply(state, x, {"w": jnp.array([-1.0, 2.0])})
    >>> steps["w"].tolist()
    [-0.1495, 0.137]
    """

    learning_rate: Hyper = 1e-2
    momentum: Hyper | None = None
    dampening: Hyper = 0.0
    nesterov: bool = False
    weight_decay: Hyper | None = None
    maximize: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.nesterov and self.momentum is None:
            raise ValueError("SGD: nesterov without momentum. Give momentum=0.9, say.")

    def init_leaf(self, x):
        return None if self.momentum is None else Velocity(zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        g = -g if self.maximize else g
        if self.weight_decay is not None:
            g = g + self.weight_decay * x
        if self.momentum is None:
            return None, self.learning_rate * g
        v = self.momentum * state.v + self._taken(t) * g
        d = g + self.momentum * v if self.nesterov else v
        return Velocity(v), self.learning_rate * d

    def kernel(self):
        if self.momentum is None or self.maximize:  # one loop for XLA, too; or rare
            return None
        return Kernel("momentum", self._numbers, self.nesterov)

    def _numbers(self, t: Array) -> tuple[Any, ...]:
        mu: Any = self.momentum
        decay = 0.0 if self.weight_decay is None else self.weight_decay
        return self.learning_rate, mu, self._taken(t), decay

    def _taken(self, t: Array) -> Array:
        """The factor of the gradient in the velocity, which starts from 0."""
        return jnp.where(t == 1, 1, 1 - self.dampening)


@rule
class Momentum(LeafRule):
    """Gradient descent with the learning rate inside of the velocity.

        v   <- momentum * v + learning_rate * g
        step = learning_rate * g + momentum * v if nesterov else v

    While the learning rate stays the same this is `SGD` with the same momentum. When it
    falls, steps of the past keep the size that they were taken with. Optimisers.jl's
    `Momentum`, and with `nesterov` its `Nesterov`.

    Args:
        learning_rate: step per unit of gradient, >= 0.
        momentum: decay of the velocity, in [0, 1).
        nesterov: look ahead along the velocity.
    State: `v`, shape of the parameter, in its unit.
    Raises: ValueError if a number is outside its range.
    Source: Sutskever et al. 2013, "On the importance of initialization and momentum in
        deep learning", equations 1 to 4.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> descent = Momentum(lambda count: 0.1 / (count + 1), momentum=0.8)
    >>> state, _ = descent.apply(descent.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = descent.apply(state, x, {"w": jnp.array([-1.0, 2.0])})
    >>> steps["w"].tolist()
    [-0.01, -0.14]
    """

    learning_rate: Hyper = 1e-2
    momentum: Hyper = 0.9
    nesterov: bool = False

    def init_leaf(self, x):
        return Velocity(zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        v = self.momentum * state.v + self.learning_rate * g
        step = self.learning_rate * g + self.momentum * v if self.nesterov else v
        return Velocity(v), step


class Averaged(NamedTuple):
    average: Array


@rule
class ASGD(LeafRule):
    """Gradient descent with a falling rate, and the average of where it went.

        g       = g + weight_decay * x
        eta     = learning_rate / (1 + lambd * learning_rate * (t - 1))^alpha
        step    = eta * (g + lambd * x)
        average <- average + (x - step - average) / max(1, t - 1 - t0)

    The average is the last parameter until t0 steps are over. It is for evaluation
    only: the steps do not depend on it. A learning rate that is a schedule acts at
    once, where torch's acts one step later.

    Args:
        learning_rate: the first step's, per unit of gradient, >= 0.
        lambd: L2 penalty that falls with the rate, which it also makes fall, >= 0.
        alpha: power with which the rate falls, >= 0.
        t0: number of steps before averaging starts, >= 0.
        weight_decay: L2 penalty added to the gradient, >= 0.
    State: `average`, shape of the parameter; at first the parameter itself.
    Raises: ValueError if a number is outside its range.
    Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by
        averaging"; the rate of Xu 2011, arXiv:1107.2490; both as in torch.optim.ASGD.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> asgd = ASGD(0.1, lambd=0.5, alpha=0.75, t0=0)
    >>> state = asgd.init(x)
    >>> for g in ([0.5, -3.0], [-1.0, 2.0], [0.25, 1.0]):
    ...     state, steps = asgd.apply(state, x, {"w": jnp.array(g)})
    ...     x = {"w": x["w"] - steps["w"]}
    >>> steps["w"].tolist(), state.slots["w"].average.tolist()
    ([0.067639, 0.0132349], [0.919204, -1.722306])
    """

    ranges: ClassVar = dict.fromkeys(("lambd", "alpha", "t0"), NOT_NEGATIVE)

    learning_rate: Hyper = 1e-2
    lambd: Hyper = 1e-4
    alpha: Hyper = 0.75
    t0: Hyper = 1e6
    weight_decay: Hyper = 0.0

    def init_leaf(self, x):
        return Averaged(x)

    def apply_leaf(self, state, x, g, t):
        g = g + self.weight_decay * x
        fall = (1 + self.lambd * self.learning_rate * (t - 1)) ** self.alpha
        step = self.learning_rate / fall * (g + self.lambd * x)
        share = 1 / jnp.maximum(1, t - 1 - self.t0)
        average = state.average + (x - step - state.average) * share
        return Averaged(average), step


@rule
class NoisySGD(Noisy):
    """Gradient descent with Gaussian noise, of a variance that falls.

        n    ~ Normal(0, eta / t^gamma)
        step = learning_rate * (g + n)

    Each slot has a generator of its own, started from `seed` and the slot's path: the
    noise of one does not change when others come, go or are skipped, and is the same in
    every dtype and on every device. optax has the law of `noisy_sgd`, not its numbers.

    Args:
        learning_rate: step per unit of gradient, >= 0.
        eta: variance of the first step's noise, in the gradient's unit squared, >= 0.
        gamma: power with which the variance falls, >= 0.
        seed: where the generators start.
    State: `key`, data of a threefry key, uint32, (2,).
    Raises: ValueError if a number is outside its range; TypeError for a complex
        parameter.
    Source: Neelakantan et al. 2015, section 3, arXiv:1511.06807.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> noisy = NoisySGD(0.1, eta=0.04, seed=3)
    >>> state, _ = noisy.apply(noisy.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = noisy.apply(state, x, {"w": jnp.array([-1.0, 2.0])})
    >>> steps["w"].tolist()
    [-0.12338, 0.18552]
    """

    complex_ok = False
    ranges: ClassVar = dict.fromkeys(("eta", "gamma"), NOT_NEGATIVE)

    learning_rate: Hyper = 1e-2
    eta: Hyper = 0.01
    gamma: Hyper = 0.55
    seed: int = 0

    def apply_leaf(self, state, x, g, t):
        state, n = self.noise(state, x, t)
        return state, self.learning_rate * (g + n)


class Previous(NamedTuple):
    g: Array


@rule
class OptimisticGradientDescent(LeafRule):
    """Gradient descent along a guess of the next gradient, for games.

        step = learning_rate * ((alpha + beta) * g - beta * g_previous)

    At t = 1 the previous gradient is g itself.

    Args:
        learning_rate: step per unit of gradient, >= 0.
        alpha: weight of the gradient, >= 0.
        beta: weight of its change since the last step, >= 0.
    State: `g`, the last gradient, shape of the parameter.
    Raises: ValueError if a number is outside its range.
    Source: Mokhtari et al. 2019, generalized OGDA, arXiv:1901.08511.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> ogd = OptimisticGradientDescent(0.1, alpha=0.9, beta=0.7)
    >>> state, _ = ogd.apply(ogd.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = ogd.apply(state, x, {"w": jnp.array([-1.0, 2.0])})
    >>> steps["w"].tolist()
    [-0.195, 0.53]
    """

    ranges: ClassVar = dict.fromkeys(("alpha", "beta"), NOT_NEGATIVE)

    learning_rate: Hyper = 1e-2
    alpha: Hyper = 1.0
    beta: Hyper = 1.0

    def init_leaf(self, x):
        return Previous(zeros_like(x))

    def apply_leaf(self, state, x, g, t):
        previous = jnp.where(t == 1, g, state.g)
        d = (self.alpha + self.beta) * g - self.beta * previous
        return Previous(g), self.learning_rate * d
