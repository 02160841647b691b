"""Quasi-Newton steps."""

import dataclasses
from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optimjax.arrays import cast, real_part_dtype, widen, wider, zeros_like
from optimjax.hyper import Hyper
from optimjax.options import at_least_one, one_of
from optimjax.paths import Path, Slots, with_paths
from optimjax.rule import Rule, rule
from optimjax.rules.line_search import Vector, backtracking, dot, zoom
from optimjax.treewide import Count, PyTree, gradients_by_path, increment, steps_like

__all__ = ["LBFGS"]


def scaled(c: Array, a: Vector) -> dict[Path, Array]:
    return {path: cast(c, x.dtype) * x for path, x in a.items()}


def plus(a: Vector, c: Array, b: Vector) -> dict[Path, Array]:
    """a + c * b"""
    return {path: x + cast(c, x.dtype) * b[path] for path, x in a.items()}


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

        s, y  = the changes of x and g since the last update         a new pair
        gamma = s.y / y.y of the newest pair, or min(1, 1 / |g|)     with scale_initial
        H    <- (I - s y' / s.y) H (I - y s' / s.y) + s s' / s.y     for each pair, from
                                                                     H = gamma * I
        step  = alpha * H g

    A pair without positive curvature s.y is not kept. A slot without a gradient takes
    no part: products and pairs are of the others.

    A line search finds alpha by means of the loss: `update(state, model, grads,
    value=loss, value_fn=fn)`, or `make_step`. The gradients must be those of
    `value_fn`: in a `Chain` this rule is the first. If no alpha is found, the step is 0
    and all pairs are dropped. The search cannot be differentiated.

    Args:
        learning_rate: the alpha to try first; the only one without a line search, >= 0.
        memory: how many pairs are kept, >= 1.
        line_search: "zoom", for the strong Wolfe conditions; "backtracking", for enough
            decrease; None, which needs no loss.
        c1: share of the expected decrease that is enough, in [0, 1).
        c2: share of the slope that may be left, in [0, 1), above `c1`.
        max_evaluations: of `value_fn` in one search, >= 1.
        scale_initial: let gamma be as above.
        keep_negative: keep pairs of any curvature, as optax does.
    State: `Pairs`: 2 + 2 * memory arrays of each parameter's shape.
    Raises: ValueError if an argument is outside its range.
    Source: Nocedal and Wright 2006, "Numerical optimization", Algorithms 3.5, 3.6 and
        7.4, after Liu and Nocedal 1989.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> lbfgs = LBFGS(0.1, line_search=None)
    >>> state, _ = lbfgs.apply(lbfgs.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> x = {"w": jnp.array([0.9, -1.5])}
    >>> state, steps = lbfgs.apply(state, x, {"w": jnp.array([0.7, -2.0])})
    >>> steps["w"].tolist()
    [0.07958, -0.1229]
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
        one_of(self, "line_search", ("zoom", "backtracking", None))
        at_least_one(self, "memory", "max_evaluations")

    @property
    def needs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return () if self.line_search is None else ("value", "value_fn")

    def init(self, params: PyTree) -> Pairs:
        zeros = Slots((path, zeros_like(x)) for path, x in with_paths(params).items())
        rings = [
            Slots(
                (p, jnp.broadcast_to(z, (self.memory, *z.shape)) + 0)
                for p, z in zeros.items()
            )
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

    def _remember(self, state: Pairs, x: Vector, g: Vector) -> Pairs:
        """The state with the pair that ends here, if that is worth keeping."""
        here = np.array([path in g for path in state.s])
        joins = (state.last == state.count) & here
        joined = dict(zip(state.s, joins, strict=True))
        s = {p: jnp.where(joined[p], x[p] - state.x[p], 0) for p in g}
        y = {p: jnp.where(joined[p], g[p] - state.g[p], 0) for p in g}
        useful = jnp.any(joins) if self.keep_negative else self._weight(s, y) > 0
        newest = jnp.where(useful, (state.newest + 1) % self.memory, state.newest)

        def put(ring: Array, new: Array) -> Array:
            return ring.at[newest].set(jnp.where(useful, new, ring[newest]))

        count = increment(state.count)
        return dataclasses.replace(
            state,
            count=count,
            x=Slots({**state.x, **{p: _copy(x[p]) for p in g}}),
            g=Slots({**state.g, **{p: _copy(g[p]) for p in g}}),
            s=Slots({**state.s, **{p: put(state.s[p], s[p]) for p in g}}),
            y=Slots({**state.y, **{p: put(state.y[p], y[p]) for p in g}}),
            part=put(state.part, joins),
            last=jnp.where(here, count, state.last),
            newest=newest,
        )

    def _weight(self, s: Vector, y: Vector) -> Array:
        """1 / s.y; 0 for a pair that is not to be used."""
        sy = dot(s, y)
        if self.keep_negative:
            used = sy != 0
        else:
            size = jnp.sqrt(dot(s, s)) * jnp.sqrt(dot(y, y))
            used = sy > jnp.finfo(sy.dtype).eps * size
        return jnp.where(used, 1 / jnp.where(used, sy, 1), 0)

    def _direction(self, state: Pairs, g: Vector) -> Vector:
        """H g, by the two loops of Algorithm 7.4."""
        column = {path: n for n, path in enumerate(state.s)}

        def pair(i: Array) -> tuple[Vector, Vector]:
            def at(ring: Slots) -> Vector:
                return {
                    p: jnp.where(state.part[i, column[p]], ring[p][i], 0) for p in g
                }

            return at(state.s), at(state.y)

        def down(q: Vector, i: Array) -> tuple[Vector, tuple[Array, Array]]:
            s, y = pair(i)
            weight = self._weight(s, y)
            a = weight * dot(s, q)
            return plus(q, -a, y), (weight, a)

        def up(r: Vector, each: tuple[Array, Array, Array]) -> tuple[Vector, None]:
            i, weight, a = each
            s, y = pair(i)
            return plus(r, a - weight * dot(y, r), s), None

        age = jnp.arange(self.memory, dtype=state.newest.dtype)
        newest_first = (state.newest - age) % self.memory
        q, (weights, a) = lax.scan(down, dict(g), newest_first)
        if self.scale_initial:
            _, y = pair(state.newest)
            yy, weight = dot(y, y), weights[0]
            known = (weight != 0) & (yy > 0)
            gamma = 1 / jnp.where(known, weight * yy, 1)
            q = scaled(jnp.where(known, gamma, _cautious(g)), q)
        return lax.scan(up, q, (newest_first, weights, a), reverse=True)[0]

    def _search(
        self,
        params: PyTree,
        x: Vector,
        g: Vector,
        d: Vector,
        value: Array | None = None,
        value_fn: Callable[[PyTree], Array] | None = None,
        **context: Any,
    ) -> tuple[Vector, Array]:
        """The direction and how far to go: x - alpha * d."""
        if value is None or value_fn is None:
            raise TypeError(
                "LBFGS.apply: value or value_fn was not given. A line search needs the "
                "loss and a function of the parameters that gives it."
            )
        named, structure = with_paths(params), jax.tree.structure(params)
        falls = dot(g, d) > 0  # rounding, or negative curvature that was kept
        steepest = scaled(_cautious(g), g)
        d = {path: jnp.where(falls, d[path], steepest[path]) for path in d}
        slope = -dot(g, d)

        def phi(alpha: Array) -> Array:
            moved = plus(x, -alpha, d)
            there = [
                cast(moved[path], leaf.dtype) if path in moved else leaf
                for path, leaf in named.items()
            ]
            return cast(value_fn(structure.unflatten(there)), slope.dtype)

        first, c1, c2 = (
            cast(h, slope.dtype) for h in (self.learning_rate, self.c1, self.c2)
        )
        f = cast(value, slope.dtype)
        if self.line_search == "zoom":
            return d, zoom(phi, f, slope, first, c1, c2, self.max_evaluations)
        return d, backtracking(phi, f, slope, first, c1, self.max_evaluations)


def _copy(x: Array) -> Array:
    """`x` in a buffer of its own: the caller may donate his, or the state."""
    return cast(jnp.array(x, copy=True), x.dtype)


def _cautious(g: Vector) -> Array:
    """min(1, 1 / |g|): without a pair the step is no longer than 1."""
    return 1 / jnp.maximum(jnp.sqrt(dot(g, g)), 1)
