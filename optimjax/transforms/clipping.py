"""Keeping gradients small."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from optimjax.arrays import abs_sq, cast, total, widen, wider
from optimjax.hyper import Hyper
from optimjax.rule import Rule, rule
from optimjax.treewide import Count, PyTree, spread, steps_like

__all__ = ["ClipByGlobalNorm"]


@rule
class ClipByGlobalNorm(Rule):
    """All gradients scaled by one factor, so that together they are not too long.

        norm = sqrt(sum of |g|^2 over all slots)
        step = g * min(1, max_norm / norm)

    The norm is taken over slots: a tied array counts once, with its summed gradient; a
    slot that is frozen or has no gradient does not count. A NaN makes all steps NaN; an
    infinite gradient makes the others 0 and its own NaN.

    Args:
        max_norm: the longest that the gradient may be, in its unit, >= 0.
    State: `count`, updates so far, int32, ().
    Raises: ValueError if `max_norm` is negative.
    Source: Pascanu et al. 2013, Algorithm 1, arXiv:1211.5063.

    >>> x = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    >>> clip = ClipByGlobalNorm(1.0)
    >>> grads = {"a": jnp.array([3.0]), "b": jnp.array([-4.0])}
    >>> _, steps = clip.apply(clip.init(x), x, grads)
    >>> steps["a"], steps["b"]
    (Array([0.6], dtype=float32), Array([-0.8], dtype=float32))
    """

    max_norm: Hyper = 1.0

    def init(self, params: PyTree) -> Count:
        return Count.zero()

    def apply(
        self, state: Count, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Count, PyTree]:
        grads = jax.tree.map(widen, spread(params, grads))
        squares = [total(abs_sq(g)) for g in jax.tree.leaves(grads)]
        if not squares:  # no update took place, so nothing is counted
            return state, grads
        dtype = reduce(wider, [square.dtype for square in squares])
        whole = sum((square.astype(dtype) for square in squares), jnp.zeros((), dtype))
        limit = cast(self.at_count(state.count).max_norm, dtype)
        # The root of 0 has no derivative. And `whole` is used once: XLA on CPU copies a
        # scalar with two uses, all its sums included, into the kernel of every slot.
        length = jnp.sqrt(jnp.maximum(whole, jnp.finfo(dtype).tiny))
        scale = jnp.minimum(limit / length, 1)
        steps = jax.tree.map(lambda g: g * cast(scale, g.dtype), grads)
        return state.next(), steps_like(params, steps)
