"""Gradients from which little can be learnt about any one example."""

from collections.abc import Mapping
from functools import reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, cast, root, widen, wider
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafState
from optimjax.noise import Keyed, gaussian
from optimjax.paths import Path, with_paths
from optimjax.rule import rule
from optimjax.transforms.clipping import shortening
from optimjax.treewide import (
    PyTree,
    count_examples,
    gradients_by_path,
    spread,
    steps_like,
)

__all__ = ["PrivateGradients"]


@rule
class PrivateGradients(Keyed):
    """The mean of the examples' gradients, each clipped, with noise: DP-SGD.

        g_i <- g_i * min(1, max_norm / |g_i|)               for each example
        n    ~ Normal(0, (noise_multiplier * max_norm)^2)
        step = (sum of g_i + n) / examples

    |g_i| is over all slots: a tied array counts once, with its summed gradient; a slot
    that is frozen or has no gradient does not count. The gradients have a first axis
    more than the parameters, which numbers the examples: `make_step(loss,
    per_example=True)` takes them, and `update` accepts them. It is the first rule of a
    `Chain`, or stands alone: `Chain(PrivateGradients(1.0, 1.1), SGD(0.1))`.

    How much privacy (epsilon, delta) a run gives is not counted here: that follows from
    `noise_multiplier`, the share of the examples in a batch, how they were drawn, and
    the number of steps, by an accountant of your choice. The loss that the step returns
    is that of the examples themselves, and is not private; nor are rules after this one
    that look at it. A NaN in one example makes all steps NaN.

    Args:
        max_norm: the longest that one example's gradient may be, in its unit, >= 0.
        noise_multiplier: standard deviation of the noise on the sum, as a multiple of
            `max_norm`, >= 0.
        seed: where the generators start; whoever knows it can take the noise away.
    State: `key`, for each slot, data of a threefry key, uint32, (2,).
    Raises: ValueError if a number is outside its range, or for gradients without an
        axis of examples; TypeError for a complex parameter.
    Source: Abadi et al. 2016, Algorithm 1, arXiv:1607.00133.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> private = PrivateGradients(1.0, noise_multiplier=0.1, seed=3)
    >>> g = {"w": jnp.array([[0.3, -0.4], [-6.0, 8.0]])}
    >>> state, _ = private.apply(private.init(x), x, g)
    >>> g = {"w": jnp.array([[0.5, 0.2], [3.0, 4.0]])}
    >>> state, steps = private.apply(state, x, g)
    >>> steps["w"].tolist()
    [0.4793, 0.4562]
    """

    complex_ok = False
    by_path: ClassVar[bool] = False
    per_example: ClassVar[bool] = True
    ranges: ClassVar = {"noise_multiplier": NOT_NEGATIVE}

    max_norm: Hyper
    noise_multiplier: Hyper
    seed: int = 0

    def apply(
        self, state: LeafState, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[LeafState, PyTree]:
        wide = jax.tree.map(widen, params)
        named = with_paths(wide)
        given = gradients_by_path(named, grads)
        if not given:
            return state, spread(params, grads)
        examples = count_examples("PrivateGradients.apply", named, given)
        lengths = root(_squared_lengths(given))
        limit = cast(self.at_count(state.count).max_norm, lengths.dtype)
        factor = shortening(lengths, limit)
        sums = {path: _weighted_sum(factor, widen(g)) for path, g in given.items()}
        made = jax.tree.structure(params).unflatten([sums.get(path) for path in named])
        state, noisy = self._apply_leaves(state, wide, made)
        return state, steps_like(params, jax.tree.map(lambda s: s / examples, noisy))

    def apply_leaf(self, state, x, g, t):
        state, here = self.draw(state)
        unit = gaussian(here, x.shape, x.dtype)
        return state, g + self.noise_multiplier * self.max_norm * unit


def _squared_lengths(grads: Mapping[Path, Array]) -> Array:
    """The sum of |g|^2 over all slots, for each example: (examples,)."""
    squares = [
        jnp.sum(abs_sq(widen(g)), tuple(range(1, g.ndim))) for g in grads.values()
    ]
    dtype = reduce(wider, [square.dtype for square in squares])
    return reduce(jnp.add, [square.astype(dtype) for square in squares])


def _weighted_sum(factor: Array, g: Array) -> Array:
    """The sum over the first axis, each member times its factor."""
    factor = cast(factor, g.dtype).reshape(-1, *(1,) * (g.ndim - 1))
    return jnp.sum(factor * g, axis=0)
