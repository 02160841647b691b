"""What changes the step of any rule: cautious, clipped, with a bound as in AMSGrad."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from optimjax.arrays import agreement, rms, size, total, zeros_like
from optimjax.hyper import Hyper
from optimjax.leaf import LeafState
from optimjax.nested import LeafWrapper, sees_gradients, walk
from optimjax.options import one_of
from optimjax.paths import Path, Slots, complain, with_paths
from optimjax.rates import RateWrapper
from optimjax.rule import Rule, rule
from optimjax.rules.learning_rate_free import Prodigy
from optimjax.rules.matrix import MatrixRule
from optimjax.rules.optimistic import Adan
from optimjax.transforms.clipping import NOT_NEGATIVE, shortening
from optimjax.treewide import PyTree

__all__ = ["AMSBound", "Cautious", "ClipStep"]

Form = Literal["count", "mean"]


@rule
class Cautious(LeafWrapper):
    """Steps of another rule only where the gradient points the same way.

        phi  = 1 where step * g > 0, else 0            number by number
        step = step * phi * n / (sum of phi + 1)       form="count": the paper
        step = step * phi / max(mean of phi, 1e-3)     form="mean": its authors' code

    `n` is how many numbers the array has: those that are left make up for the others.
    With "count" a single number takes half its step. A complex number agrees with its
    gradient if their angle is below 90 degrees. Decay belongs around it, so that it is
    not left out too: `Decay(Cautious(Adam(1e-3)), 0.1)`.

    Args:
        inner: the rule that takes the steps, with momentum: without, all agree.
        form: "count" or "mean".
    State: nothing of its own.
    Raises: ValueError for another `form`, or if a `LossScaling` is inside.
    Source: Liang et al. 2024, Algorithms 1 and 2, arXiv:2411.16085.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(Cautious(oj.SGD(0.1, momentum=0.9), form="mean"), model)
    >>> for g in ([1.0, 2.0], [0.5, -1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist()
    [0.62, -2.2]
    """

    form: Form = "count"

    def __post_init__(self):
        super().__post_init__()
        sees_gradients("Cautious", self.inner)
        one_of(self, "form", get_args(Form))

    def init_leaf(self, x):
        return None

    def after_leaf(self, state, x, g, step, t):
        phi = (agreement(step, g) > 0).astype(x.real.dtype)
        left, n = total(phi), size(x)
        scale = 1 / jnp.maximum(left / n, 1e-3)
        if self.form == "count":
            scale = n / (left + 1)
        # Multiplied, not chosen: a NaN is to be seen.
        return None, step * (phi * scale)


@rule
class ClipStep(RateWrapper):
    """Steps of another rule, whose root mean square is bounded by the learning rate.

        rms  = sqrt(mean of |step|^2) / rate
        step = step / max(1, rms / max_rms)

    `rate` is the learning rate of the rule inside for that slot and that update: chosen
    by path or group, and of its schedule at its own count. A step of Adam has an `rms`
    of about 1 or less, but for a gradient that is much larger than those before it.

    Args:
        inner: the rule that takes the steps.
        max_rms: the largest root mean square of a step, per unit of learning rate,
            >= 0.
    State: nothing of its own.
    Raises: ValueError if `max_rms` is negative; by `setup`, if a slot does not have one
        learning rate.
    Source: Shazeer and Stern 2018, section 6, arXiv:1804.04235, which has it in
        Adafactor; around Adam: Wortsman et al. 2023, section 3.5, arXiv:2304.13013.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(ClipStep(oj.Adam(0.1, b2=0.9), max_rms=0.8), model)
    >>> for g in ([1.0, 2.0], [30.0, -1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist()
    [0.8453, -2.1071]
    """

    ranges: ClassVar = {"max_rms": NOT_NEGATIVE}

    max_rms: Hyper = 1.0

    def init_leaf(self, x):
        return None

    def at_rate(self, state, x, g, step, rate, t):
        return None, step * shortening(rms(step), self.max_rms * rate)


class Bound(NamedTuple):
    v_max: Array


@rule
class AMSBound(LeafWrapper):
    """Steps of another rule as if its second moment had never fallen.

        v_max <- max(v_max, v)
        step   = step * sqrt(v / v_max)                1 where v_max is 0

    `v` is the second moment that the rule inside has just updated, without correction
    of its bias. Around Adam with eps=0 this is `AMSGrad(debias_v="after")`, torch's;
    with eps it is a little shorter where `v` is small. Slots for which no rule inside
    keeps a `v` of their shape take the inner step as it is.

    Args:
        inner: the rule that takes the steps: Adam, AdaBelief, RMSProp, or any with a
            `v` in its state and `b2` or `decay` for it.
    State: `v_max`, shape of the parameter, real; nothing where there is no `v`.
    Raises: by `setup`, ValueError if no rule inside keeps a second moment, or if two
        keep one for the same slot.
    Source: Reddi et al. 2018, Algorithm 2, arXiv:1904.09237.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(AMSBound(oj.Adam(0.1, b2=0.9)), model)
    >>> for g in ([0.5, -3.0], [-0.1, 4.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), state.slots["w"][0].v_max.tolist()
    ([0.8492, -1.9192], [0.025, 2.41])
    """

    def init(self, params: PyTree) -> Any:
        state, named = super().init(params), with_paths(params)
        moments = second_moments(self.inner, state.inner, named)
        several = [path for path, found in moments.items() if len(found) > 1]
        if several or (named and not moments):
            much = "two second moments, expected one" if several else "no second moment"
            paths = several or named
            remedy = (
                "It goes around one rule that keeps a `v`, such as Adam or RMSProp."
            )
            raise ValueError(complain("AMSBound", dict.fromkeys(paths, much), remedy))
        slots = Slots(state.own.slots)
        for path, (v,) in moments.items():
            slots[path] = jax.tree.map(self._stored, Bound(zeros_like(v)))
        own = dataclasses.replace(state.own, slots=slots)
        return dataclasses.replace(state, own=own)

    def init_leaf(self, x):
        return None

    def _inside(
        self, inner: PyTree, params: PyTree, grads: PyTree, context: Any
    ) -> tuple[PyTree, ...]:
        inner, steps = super()._inside(inner, params, grads, context)
        named = with_paths(params)
        moments = second_moments(self.inner, inner, named)
        none = jnp.zeros(())
        vs = [moments[path][0] if path in moments else none for path in named]
        return inner, steps, jax.tree.structure(params).unflatten(vs)

    def _arithmetic(
        self, state: PyTree, x: Array, arrays: tuple[Array, ...], t: Array
    ) -> tuple[PyTree, Array]:
        _, step, v = arrays
        if state is None:
            return None, step
        v_max = jnp.maximum(state.v_max, v.real)
        fallen = v.real != v_max  # else 1, also where both are infinite
        share = v.real / jnp.where(fallen, v_max, 1)
        return Bound(v_max), step * jnp.where(fallen, jnp.sqrt(share), 1)


def second_moments(
    inner: Rule, state: PyTree, params: Mapping[Path, Any]
) -> dict[Path, list[Array]]:
    """{slot: the running means of |g|^2 that the rules inside keep of it}."""
    found: dict[Path, list[Array]] = {}
    for each, own, slots in walk(inner, state, Slots(params)):
        # SGD's `v` is a velocity, Adan's of differences; AMSGrad's has its bound. That
        # of a matrix rule is in another basis, and that of Prodigy grows with d.
        others = isinstance(each, (Adan, MatrixRule, Prodigy))
        running = {"b2", "decay"} & each.hypers().keys() and not others
        for path in slots if running and isinstance(own, LeafState) else ():
            slot, shape = own.slots[path], jnp.shape(params[path])
            v = None if hasattr(slot, "v_max") else getattr(slot, "v", None)
            if isinstance(v, jax.Array) and v.shape == shape:
                found.setdefault(path, []).append(v)
    return found
