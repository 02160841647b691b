"""Parameters that stay in a set: steps that end at its nearest point."""

import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, root, total
from optimjax.axes import present
from optimjax.hyper import Hyper
from optimjax.leaf import LeafRule
from optimjax.rule import Selection, rule
from optimjax.transforms.clipping import NOT_NEGATIVE, shortening

__all__ = ["Box", "L2Ball", "NonNegative", "Simplex"]

# All of these are last in a `Chain`: they look at where the step would end, x - g.


def check_axis(rule: Any, x: Array) -> None:
    """ValueError if an array that is held has not the rule's `axis`."""
    if not rule.where or rule.axis is None:
        return
    try:
        present(rule.axis, x.shape)
    except ValueError as error:
        hint = "Leave such arrays out, by `where` or by Masked."
        raise ValueError(f"{type(rule).__name__}: axis: {error}. {hint}") from None


@rule
class NonNegative(LeafRule):
    """Parameters that stay at 0 or above.

        step = x - max(x - g, 0) = min(g, x)

    For the end of a `Chain`. A parameter is 0 or more exactly, in every dtype.

    Args:
        where: the slots that are held there: a glob on paths, several, or a function of
            (path, leaf); None for all.
    State: nothing.
    Raises: TypeError for a complex parameter.
    Source: `keep_params_nonnegative` of optax.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, 0.5]), "b": jnp.array([0.25])}
    >>> rule = oj.Chain(oj.SGD(0.1), NonNegative("w"))
    >>> state, grads = oj.setup(rule, model), {"w": jnp.full(2, 6.0), "b": jnp.ones(1)}
    >>> for _ in range(3):
    ...     state, model = oj.update(state, model, grads)
    >>> model["w"].tolist(), model["b"].tolist()
    ([0.0, 0.0], [-0.05])
    """

    complex_ok = False
    follows: ClassVar[bool] = True

    where: Selection = None

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, jnp.minimum(g, x) if self.where else g


@rule
class Box(LeafRule):
    """Parameters that stay between two numbers.

        step = x - min(max(x - g, lower), upper)

    For the end of a `Chain`. A parameter lies in the interval up to one rounding of
    x - step; a step that ends inside of it is left as it is.

    Args:
        lower, upper: the smallest and the largest that a parameter may be.
        where: the slots that are held there: a glob on paths, several, or a function of
            (path, leaf); None for all.
    State: nothing.
    Raises: ValueError if `lower` is above `upper`; TypeError for a complex parameter.
    Source: `projection_box` of optax.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, 0.5, -0.5])}
    >>> rule = oj.Chain(oj.SGD(0.1), Box(-0.25, 0.75))
    >>> state, grads = oj.setup(rule, model), {"w": jnp.array([-1.0, 0.4, 2.0])}
    >>> for _ in range(3):
    ...     state, model = oj.update(state, model, grads)
    >>> model["w"].tolist()
    [0.75, 0.38, -0.25]
    """

    complex_ok = False
    follows: ClassVar[bool] = True
    ranges: ClassVar = {"lower": None, "upper": None}

    lower: Hyper = -1.0
    upper: Hyper = 1.0
    where: Selection = None

    def __post_init__(self):
        super().__post_init__()
        low, high = self.lower, self.upper
        if isinstance(low, float) and isinstance(high, float) and low > high:
            raise ValueError(f"Box: lower is {low:g}, expected <= {high:g}, the upper.")

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        if not self.where:
            return None, g
        return None, jnp.maximum(jnp.minimum(g, x - self.lower), x - self.upper)


@rule
class Simplex(LeafRule):
    """Parameters that stay at 0 or above and keep their sum: weights of a mixture.

        y     = x - g
        theta = max over k of (y_1 + ... + y_k - scale) / k     y_1 the largest, and on
        step  = x - max(y - theta, 0)

    which ends at the nearest such point. For the end of a `Chain`. A parameter lies in
    the set up to one rounding of x - step. (Inside a `shard_map`, what has the sum has
    to be whole on each device.)

    Args:
        scale: the sum, in the parameter's unit, >= 0.
        axis: the axis along which numbers have the sum; None for the whole array.
        where: the slots that are held there: a glob on paths, several, or a function of
            (path, leaf); None for all.
    State: nothing.
    Raises: ValueError if `scale` is negative, or for an array that has not this axis;
        TypeError for a complex parameter.
    Source: Duchi et al. 2008, "Efficient projections onto the l1-ball for learning in
        high dimensions", Figure 1.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([0.5, 0.25, 0.25])}
    >>> rule = oj.Chain(oj.SGD(0.1), Simplex())
    >>> state, grads = oj.setup(rule, model), {"w": jnp.array([-3.0, 4.0, 1.0])}
    >>> state, model = oj.update(state, model, grads)
    >>> model["w"].tolist()
    [0.825, 0.0, 0.175]
    """

    complex_ok = False
    follows: ClassVar[bool] = True
    ranges: ClassVar = {"scale": NOT_NEGATIVE}

    scale: Hyper = 1.0
    axis: int | None = None
    where: Selection = None

    def init_leaf(self, x):
        check_axis(self, x)

    def apply_leaf(self, state, x, g, t):
        if not self.where:
            return None, g
        if self.axis is None:
            nearest = self._nearest(jnp.ravel(x - g), 0).reshape(x.shape)
        else:
            nearest = self._nearest(x - g, self.axis)
        return None, x - nearest

    def _nearest(self, y: Array, axis: int) -> Array:
        # The largest is moved to 0, which moves nothing else, so that large numbers
        # whose difference counts lose no digits in the sums.
        y = y - jnp.max(y, axis, keepdims=True, initial=-math.inf)
        falling = jnp.sort(y, axis, descending=True)
        shape = [1] * y.ndim
        shape[axis] = y.shape[axis]
        k = jnp.arange(1, y.shape[axis] + 1, dtype=y.dtype).reshape(shape)
        each = (jnp.cumsum(falling, axis) - self.scale) / k
        theta = jnp.max(each, axis, keepdims=True, initial=-math.inf)
        return jnp.maximum(y - theta, 0)


@rule
class L2Ball(LeafRule):
    """Parameters that stay within a distance of the origin.

        y    = x - g
        step = x - y * min(1, radius / |y|)

    For the end of a `Chain`. A parameter lies in the ball up to one rounding of
    x - step; a step that ends inside of it is left as it is. With `axis=0` on a kernel
    (in, out) it is the max-norm constraint on the weights of each unit.

    Args:
        radius: the longest that a parameter may be, in its unit, >= 0.
        axis: the axes along which length is measured; None for the whole array. (Inside
            a `shard_map`, these have to be whole on each device.)
        where: the slots that are held there: a glob on paths, several, or a function of
            (path, leaf); None for all.
    State: nothing.
    Raises: ValueError if `radius` is negative, or for an array that has not these axes;
        TypeError for a complex parameter.
    Source: Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks
        from overfitting", section 5.1, with `axis=0`.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, 0.5]), "b": jnp.array([0.125])}
    >>> rule = oj.Chain(oj.SGD(0.1), L2Ball(0.25))
    >>> state = oj.setup(rule, model)
    >>> grads = {"w": jnp.array([7.0, 1.0]), "b": jnp.array([0.5])}
    >>> state, model = oj.update(state, model, grads)
    >>> model["w"].tolist(), model["b"].tolist()
    ([0.15, 0.2], [0.075])
    """

    complex_ok = False
    follows: ClassVar[bool] = True
    ranges: ClassVar = {"radius": NOT_NEGATIVE}

    radius: Hyper = 1.0
    axis: int | tuple[int, ...] | None = None
    where: Selection = None

    def init_leaf(self, x):
        check_axis(self, x)

    def apply_leaf(self, state, x, g, t):
        if not self.where:
            return None, g
        y = x - g
        if self.axis is None:
            square = total(abs_sq(y))
        else:
            square = jnp.sum(abs_sq(y), self.axis, keepdims=True)
        share = shortening(root(square), self.radius)
        return None, jnp.where(share == 1, g, x - share * y)
