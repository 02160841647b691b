"""What a run looks like, slot by slot."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, total
from optimjax.hyper import Hyper
from optimjax.nested import LeafWrapper, sees_gradients
from optimjax.rule import rule

__all__ = ["Monitor", "Norms"]


class Norms(NamedTuple):
    """Running means of the norms of one slot, each a real scalar.

    Attributes:
        gradient: of the gradient, as it comes to the rule.
        step: of the step.
        parameter: of the parameter before the step.
        ratio: of step to parameter; 1e-3 is a common rule of thumb.
    """

    gradient: Array
    step: Array
    parameter: Array
    ratio: Array


@rule
class Monitor(LeafWrapper):
    """Running norms of gradient, step and parameter of each slot; steps as they are.

        norms <- decay * norms + (1 - decay) * (|g|, |step|, |x|, |step| / |x|)

    At the first step, and after one that was not finite, they are the values
    themselves. `oj.norms(state)` reads them.

    Args:
        inner: the rule that takes the steps.
        decay: what is kept of the last mean, in [0, 1); 0 for the last step's norms.
    State: `Norms`, four scalars for each slot.
    Raises: ValueError if `decay` is outside its range.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([3.0, 4.0])}
    >>> state = oj.setup(Monitor(oj.SGD(0.1), decay=0.8), model)
    >>> for g in ([3.0, -4.0], [0.0, 2.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> {name: round(float(x), 4) for name, x in oj.norms(state)["w"]._asdict().items()}
    {'gradient': 4.4, 'step': 0.44, 'parameter': 5.0325, 'ratio': 0.0877}
    """

    watches: ClassVar[bool] = True

    decay: Hyper = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        sees_gradients("Monitor", self.inner)

    def init_leaf(self, x):
        zero = jnp.zeros((), x.real.dtype)
        return Norms(zero, zero, zero, zero)

    def after_leaf(self, state, x, g, step, t):
        g_norm, step_norm, x_norm = (jnp.sqrt(total(abs_sq(a))) for a in (g, step, x))
        ratio = jnp.where(x_norm > 0, step_norm / jnp.where(x_norm > 0, x_norm, 1), 0)
        now = Norms(g_norm, step_norm, x_norm, ratio)

        def mean(old: Array, new: Array) -> Array:
            # An infinite norm shows for one step, not for ever.
            fresh = (t == 1) | ~jnp.isfinite(old)
            return jnp.where(fresh, new, self.decay * old + (1 - self.decay) * new)

        return Norms(*map(mean, state, now)), step
