"""How far to go, judged by the loss: Polyak's step size, and line searches.

Both searches are given `phi`, the loss as a function of the step size, its value `f`
and its slope `df` < 0 at 0, and the step size to try first; they return 0 where they
find none.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimjax.arrays import cast, widen, wider
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.paths import Path, with_paths
from optimjax.rule import Rule, rule
from optimjax.treewide import Count, PyTree, increment, spread, steps_like

__all__ = ["PolyakSGD"]

Vector = Mapping[Path, Array]
Phi = Callable[[Array], Array]

# Two losses whose relative difference is less than this are compared by their slopes:
# rounding hides a decrease long before it hides the slope (Hager and Zhang 2005).
CLOSE = 1e-6
# How near to an end of the interval the next trial may be, in parts of its length.
MARGIN = 0.1


def dot(a: Vector, b: Vector) -> Array:
    """The real inner product of two sets of arrays, a complex number as two reals."""

    def one(a: Array, b: Array) -> Array:
        if jnp.iscomplexobj(a):
            return jnp.sum(a.real * b.real + a.imag * b.imag)
        return jnp.sum(a * b)

    terms = [one(a[path], b[path]) for path in a]
    dtype = reduce(wider, (term.dtype for term in terms))
    return sum((cast(term, dtype) for term in terms), jnp.zeros((), dtype))


@rule
class PolyakSGD(Rule):
    """Gradient descent whose step size follows from how far the loss is from its least.

        g    = scaling * g
        gap  = value - f_min                          sps
        gap  = max(value - f_min, 0)                  sps+
        step = min(gap / (|g|^2 + eps), max_learning_rate) * g

    |g| is over all slots that have a gradient; where |g|^2 + eps is 0 the step is 0. It
    needs the loss: `update(state, model, grads, value=loss)`, or `make_step`.

    Args:
        max_learning_rate: the largest step per unit of gradient, >= 0.
        scaling: factor on the gradients, beforehand, >= 0.
        f_min: the least that the loss can be, or a guess of it, in its unit.
        eps: added to the squared norm, >= 0.
        variant: "sps", which ascends where the loss is below `f_min`, or "sps+", which
            stays.
    State: `count`, updates so far, int32, ().
    Raises: ValueError if a number is outside its range, or for another variant.
    Source: Loizou et al. 2021, SPS_max, arXiv:2002.10542; sps+: Garrigos et al. 2023,
        arXiv:2307.14528.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> polyak = PolyakSGD(f_min=0.5)
    >>> g = {"w": jnp.array([0.5, -3.0])}
    >>> state, _ = polyak.apply(polyak.init(x), x, g, value=4.0)
    >>> g = {"w": jnp.array([-1.0, 2.0])}
    >>> state, steps = polyak.apply(state, x, g, value=3.0)
    >>> steps["w"].tolist()
    [-0.5, 1.0]
    """

    max_learning_rate: Hyper = 1.0
    scaling: Hyper = 1.0
    f_min: Hyper = 0.0
    eps: Hyper = 0.0
    variant: str = "sps"
    needs = ("value",)
    ranges: ClassVar = {
        "max_learning_rate": NOT_NEGATIVE,
        "scaling": NOT_NEGATIVE,
    }

    def __post_init__(self):
        super().__post_init__()
        if self.variant not in ("sps", "sps+"):
            raise ValueError(
                f"PolyakSGD: variant is {self.variant!r}, expected 'sps' or 'sps+'."
            )

    def init(self, params: PyTree) -> Count:
        return Count.zero()

    def apply(
        self, state: Count, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Count, PyTree]:
        grads = spread(params, grads)
        if not jax.tree.leaves(grads):  # no update took place, so nothing is counted
            return state, grads
        now = self.at_count(state.count)
        g = jax.tree.map(lambda g: widen(g) * cast(now.scaling, widen(g).dtype), grads)
        squares = dot(with_paths(g), with_paths(g))
        f_min, eps, most = (
            cast(h, squares.dtype) for h in (now.f_min, now.eps, now.max_learning_rate)
        )
        gap = cast(context["value"], squares.dtype) - f_min
        if self.variant == "sps+":
            gap = jnp.maximum(gap, 0)
        below = squares + eps
        rate = jnp.where(below > 0, gap / jnp.where(below > 0, below, 1), 0)
        rate = jnp.minimum(rate, most)
        steps = jax.tree.map(lambda g: g * cast(rate, g.dtype), g)
        return Count(increment(state.count)), steps_like(params, steps)


class Point(NamedTuple):
    """A step size, and the loss and its slope there."""

    a: Array
    f: Array
    df: Array


class Zoom(NamedTuple):
    """A search under way.

    Attributes:
        tried: the number of evaluations, int32.
        low: the best point with enough decrease; a step size that fulfils all lies
            between it and `high`.
        high: the other end; at infinity until one is found.
        trial: the step size to evaluate next.
        done: whether `low` fulfils all.
    """

    tried: Array
    low: Point
    high: Point
    trial: Array
    done: Array


def zoom(
    phi: Phi, f: Array, df: Array, first: Array, c1: Array, c2: Array, limit: int
) -> Array:
    """A step size that fulfils the strong Wolfe conditions.

        phi(a) <= phi(0) + c1 * a * phi'(0)     enough decrease
        |phi'(a)| <= c2 * |phi'(0)|             flat enough

    Where rounding hides the decrease, `phi'(a) <= (2 * c1 - 1) * phi'(0)` stands in for
    the first (the approximate condition of Hager and Zhang).

    Args:
        limit: the largest number of evaluations of `phi` and its slope; then the best
            point with enough decrease is taken.

    Source: Nocedal and Wright 2006, Algorithms 3.5 and 3.6.
    """

    def advance(s: Zoom) -> Zoom:
        here = Point(s.trial, *jax.value_and_grad(phi)(s.trial))
        decreases = (here.f <= f + c1 * here.a * df) & (here.f < s.low.f)
        close = here.f <= f + CLOSE * jnp.abs(f)
        # A value that is not finite fails both, and becomes the upper end.
        good = decreases | (close & (here.df <= (2 * c1 - 1) * df))
        # Up to the first `high`, this asks whether the loss rises again at the trial.
        turned = here.df * jnp.where(s.high.a >= s.low.a, 1, -1) >= 0
        low = _where(good, here, s.low)
        high = _where(good, _where(turned, s.low, s.high), here)
        trial = jnp.where(jnp.isinf(high.a), 2 * here.a, _between(low, high))
        done = good & (jnp.abs(here.df) <= -c2 * df)
        return Zoom(s.tried + 1, low, high, trial, done)

    nowhere = jnp.full_like(first, jnp.inf)
    start = Zoom(
        jnp.zeros((), jnp.int32),
        Point(jnp.zeros_like(first), f, df),
        Point(nowhere, nowhere, nowhere),
        first,
        jnp.zeros((), bool),
    )
    end = lax.while_loop(lambda s: ~s.done & (s.tried < limit), advance, start)
    return end.low.a


def _where(condition: Array, a: Point, b: Point) -> Point:
    return Point(*(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True)))


def _between(low: Point, high: Point) -> Array:
    """The minimum of the cubic through two points, kept off the ends."""
    width = high.a - low.a
    d1 = low.df + high.df - 3 * (high.f - low.f) / width
    d2 = jnp.sign(width) * jnp.sqrt(d1**2 - low.df * high.df)
    part = 1 - (high.df + d2 - d1) / (high.df - low.df + 2 * d2)
    part = jnp.where(jnp.isnan(part), 0.5, jnp.clip(part, MARGIN, 1 - MARGIN))
    return low.a + part * width


def backtracking(
    phi: Phi, f: Array, df: Array, first: Array, c1: Array, limit: int
) -> Array:
    """The first of ever shorter step sizes with enough decrease.

        phi(a) <= phi(0) + c1 * a * phi'(0)

    Each is the minimum of the parabola through what is known, and between a tenth and
    a half of the one before. No slope is evaluated.

    Args:
        limit: the largest number of evaluations of `phi`.

    Source: Nocedal and Wright 2006, Algorithm 3.1 and section 3.5.
    """
    rounding = 10 * jnp.finfo(f.dtype).eps * jnp.abs(f)

    def enough(a: Array, value: Array) -> Array:
        return value <= f + c1 * a * df + rounding

    def shorten(s: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tried, a, value = s
        lowest = -df * a**2 / (2 * (value - f - df * a))
        lowest = jnp.where(jnp.isfinite(value), lowest, 0)
        a = jnp.clip(lowest, MARGIN * a, 0.5 * a)
        return tried + 1, a, phi(a)

    _, a, value = lax.while_loop(
        lambda s: ~enough(*s[1:]) & (s[0] < limit),
        shorten,
        (jnp.ones((), jnp.int32), first, phi(first)),
    )
    return jnp.where(enough(a, value), a, 0)
