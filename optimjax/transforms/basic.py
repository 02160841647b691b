"""The rule that does nothing."""

from optimjax.leaf import LeafRule
from optimjax.rule import rule

__all__ = ["Identity"]


@rule
class Identity(LeafRule):
    """Steps that are the gradients.

        step = g

    State: nothing.

    >>> import jax.numpy as jnp
    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> _, steps = Identity().apply(Identity().init(x), x, {"w": jnp.array([0.5, 3.0])})
    >>> steps["w"]
    Array([0.5, 3. ], dtype=float32)
    """

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, g
