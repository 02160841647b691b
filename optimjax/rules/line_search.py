"""Rules that look at the loss itself to find the size of a step."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimjax.arrays import cast, real_part_dtype, widen, wider, zeros_like
from optimjax.hyper import Hyper
from optimjax.paths import Path, Slots, with_paths
from optimjax.rule import (
    Count,
    PyTree,
    Rule,
    gradients_by_path,
    increment,
    rule,
    spread,
    steps_like,
)
from optimjax.rules.wolfe import backtracking, zoom

__all__ = ["LBFGS", "PolyakSGD"]

Vector = Mapping[Path, Array]


def dot(a: Vector, b: Vector) -> Array:
    """The real inner product of two sets of arrays, a complex number as two reals."""

    def one(a: Array, b: Array) -> Array:
        if jnp.iscomplexobj(a):
            return jnp.sum(a.real * b.real + a.imag * b.imag)
        return jnp.sum(a * b)

    terms = [one(a[path], b[path]) for path in a]
    dtype = reduce(wider, (term.dtype for term in terms))
    return sum((cast(term, dtype) for term in terms), jnp.zeros((), dtype))


def scaled(c: Array, a: Vector) -> dict[Path, Array]:
    return {path: cast(c, x.dtype) * x for path, x in a.items()}


def plus(a: Vector, c: Array, b: Vector) -> dict[Path, Array]:
    """a + c * b"""
    return {path: x + cast(c, x.dtype) * b[path] for path, x in a.items()}


def minus(a: Vector, b: Vector) -> dict[Path, Array]:
    return {path: x - b[path] for path, x in a.items()}


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
        "max_learning_rate": (0.0, float("inf"), False),
        "scaling": (0.0, float("inf"), False),
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
        grads = jax.tree.map(widen, spread(params, grads))
        given = with_paths(grads)
        if not given:  # no update took place, so nothing is counted
            return state, grads
        now = self.at_count(state.count)
        g = scaled(now.scaling, given)
        squares = dot(g, g)
        f_min, eps, most = (
            cast(h, squares.dtype) for h in (now.f_min, now.eps, now.max_learning_rate)
        )
        gap = cast(context["value"], squares.dtype) - f_min
        if self.variant == "sps+":
            gap = jnp.maximum(gap, 0)
        below = squares + eps
        rate = jnp.where(below > 0, gap / jnp.where(below > 0, below, 1), 0)
        rate = jnp.minimum(rate, most) * cast(now.scaling, squares.dtype)
        steps = jax.tree.map(lambda g: g * cast(rate, g.dtype), grads)
        return Count(increment(state.count)), steps_like(params, steps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pairs(Count):
    """What `LBFGS` keeps.

    Attributes:
        x, g: the parameters and gradients of each slot's last update.
        s, y: the last changes of both, (memory, *shape), in a ring.
        part: which slots each of these pairs is of, bool, (memory, slots). What `s` and
            `y` hold of other slots is of an older pair, and is not looked at.
        last: the count after each slot's last update, int32, (slots,).
        newest: the place of the newest pair in the ring, int32, ().
        alpha: the last step along the direction; 0 if the line search found none.
    """

    x: Slots
    g: Slots
    s: Slots
    y: Slots
    part: Array
    last: Array
    newest: Array
    alpha: Array


@rule
class LBFGS(Rule):
    """Quasi-Newton steps, from the last few changes of parameters and gradients.

        s, y    = the changes of x and g since the last update       the newest pair
        gamma   = s.y / y.y of the newest pair                       scale_initial
        H      <- (I - s y' / s.y) H (I - y s' / s.y) + s s' / s.y   oldest pair first,
                                                                     from H = gamma * I
        step    = alpha * H g

    Without a pair gamma is min(1, 1 / |g|); without `scale_initial` it is 1. A pair
    without positive curvature s.y is not kept. A slot without a gradient takes no part:
    products are over the others, and a pair is of the slots that had a gradient at both
    of its updates.

    A line search finds alpha; it starts at `learning_rate` and evaluates `value_fn`:
    `update(state, model, grads, value=loss, value_fn=fn)`, or `make_step`. Under it the
    loss and the gradients must be those of `value_fn`: put no rule before this one in a
    `Chain`. If it finds no step, the step is 0 and all pairs are dropped. The loop of
    the search cannot be differentiated in reverse. Without a line search alpha is the
    learning rate, and neither is needed.

    Args:
        learning_rate: alpha, or the one to be tried first, no unit, >= 0.
        memory: how many pairs are kept, >= 1.
        line_search: "zoom", the strong Wolfe conditions by Nocedal and Wright's
            Algorithms 3.5 and 3.6; "backtracking", enough decrease; or None.
        c1: how much of the expected decrease is enough, in [0, 1).
        c2: how much of the slope may be left for "zoom", in [0, 1), above `c1`.
        max_evaluations: of `value_fn` in one line search, >= 1.
        scale_initial: scale H by gamma before the pairs come in.
        keep_negative: keep pairs of any curvature, as optax does.
    State: `Pairs`: 2 + 2 * memory arrays of the parameter's shape for each slot.
    Raises: ValueError if an argument is outside its range.
    Source: Nocedal and Wright 2006, "Numerical optimization", Algorithms 7.4 and 7.5;
        Liu and Nocedal 1989, "On the limited memory BFGS method".

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> lbfgs = LBFGS(0.1, line_search=None)
    >>> state, _ = lbfgs.apply(lbfgs.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> x = {"w": jnp.array([0.9, -1.5])}
    >>> state, steps = lbfgs.apply(state, x, {"w": jnp.array([0.7, -2.0])})
    >>> steps["w"].tolist()
    [-0.5, 1.0]
    """

    learning_rate: Hyper = 1.0
    memory: int = 10
    line_search: str | None = "zoom"
    c1: Hyper = 1e-4
    c2: Hyper = 0.9
    max_evaluations: int = 20
    scale_initial: bool = True
    keep_negative: bool = False
    ranges: ClassVar = {"c1": (0.0, 1.0, True), "c2": (0.0, 1.0, True)}

    def __post_init__(self):
        super().__post_init__()
        if self.line_search not in ("zoom", "backtracking", None):
            raise ValueError(
                f"LBFGS: line_search is {self.line_search!r}, expected 'zoom', "
                "'backtracking' or None."
            )
        for name in ("memory", "max_evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"LBFGS: {name} is {getattr(self, name)}, expected >= 1."
                )

    @property
    def needs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return () if self.line_search is None else ("value", "value_fn")

    def init(self, params: PyTree) -> Pairs:
        zeros = Slots((path, zeros_like(x)) for path, x in with_paths(params).items())
        rings = [
            Slots((p, jnp.broadcast_to(z, (self.memory, *z.shape)) + 0) for p, z in zeros.items())
            for _ in range(2)
        ]
        kinds = [real_part_dtype(z.dtype) for z in zeros.values()]
        return Pairs(
            count=jnp.zeros((), jnp.int32),
            x=zeros,
            g=Slots((path, jnp.array(z, copy=True)) for path, z in zeros.items()),
            s=rings[0],
            y=rings[1],
            part=jnp.zeros((self.memory, len(zeros)), bool),
            last=jnp.full(len(zeros), -1, jnp.int32),
            newest=jnp.zeros((), jnp.int32),
            alpha=jnp.zeros((), reduce(wider, kinds, jnp.float32)),
        )

    def apply(
        self, state: Pairs, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Pairs, PyTree]:
        named, structure = with_paths(params), jax.tree.structure(params)
        g = {p: widen(each) for p, each in gradients_by_path(named, grads).items()}
        if not g:  # no update took place, so nothing is counted
            return state, structure.unflatten([None] * len(named))
        x = {path: widen(named[path]) for path in g}
        now = self.at_count(state.count)
        state = now._remember(state, x, g)
        d = now._direction(state, g)
        if self.line_search is None:
            alpha = cast(now.learning_rate, dot(g, g).dtype)
        else:
            d, alpha = now._search(params, x, g, d, **context)
            found = alpha > 0
            state = dataclasses.replace(state, part=state.part & found)
        steps = scaled(alpha, d)
        state = dataclasses.replace(state, alpha=cast(alpha, state.alpha.dtype))
        steps = structure.unflatten([steps.get(path) for path in named])
        return state, steps_like(params, steps)
