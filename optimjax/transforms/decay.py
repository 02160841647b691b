"""Weight decay as a rule of its own."""

from optimjax.hyper import Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import Selection, rule

__all__ = ["WeightDecay"]


@rule
class WeightDecay(LeafRule):
    """A share of the parameter added to what comes in.

        step = g + weight_decay * x

    Before a rule it is an L2 penalty (`Chain(WeightDecay(1e-4), Adam())` is Adam with
    torch's `weight_decay`); after one it is decoupled, and independent of the learning
    rate.

    Args:
        weight_decay: >= 0.
        where: the slots that decay: a glob on paths, several, or a function of
            (path, leaf); None for all.
    State: nothing.
    Raises: ValueError if `weight_decay` is negative.
    Source: Loshchilov and Hutter 2019, section 2, arXiv:1711.05101.

    >>> import jax.numpy as jnp
    >>> x = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    >>> decay = WeightDecay(0.1, where="w")
    >>> grads = {"w": jnp.array([0.5, 3.0]), "b": jnp.array([1.0])}
    >>> _, steps = decay.apply(decay.init(x), x, grads)
    >>> steps["w"], steps["b"]
    (Array([0.6, 2.8], dtype=float32), Array([1.], dtype=float32))
    """

    weight_decay: Hyper = 1e-4
    where: Selection = None

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, g + self.weight_decay * x if self.where else g
