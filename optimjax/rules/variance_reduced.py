"""Gradients with less variance: each corrected by how it has changed."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from optimjax.arrays import cast, norm, widen, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.nested import Around, LeafWrapper, sees_gradients
from optimjax.paths import Slots, with_paths
from optimjax.rule import Rule, rule
from optimjax.rules.adam import Adam
from optimjax.treewide import (
    PyTree,
    gradients_by_path,
    loss_of_slots,
    spread,
    steps_like,
)

__all__ = ["MARS"]


class Gradient(NamedTuple):
    g: Array


class Parameter(NamedTuple):
    x: Array


@rule
class MARS(LeafWrapper):
    """A rule that is given gradients corrected by how they have changed.

        c    = g + gamma * b1 / (1 - b1) * (g - g_prev)          first: c = g
        c   <- c / max(1, |c| / max_norm)                        for each array
        step = inner(c)

    g_prev is the gradient of the update before, of another batch; with `exact` it is
    that of the same batch at the parameters of the update before, which costs a second
    gradient and needs the loss: `update(state, model, grads, value_fn=fn)`, or
    `make_step`.

    Around `Adam` or `AdamW` it is the paper's MARS-AdamW; around `Signum(momentum=b1)`
    its MARS-Lion, whose sign is that of the momentum.

    Args:
        inner: the rule; the default is the paper's.
        gamma: how much of the correction is made, >= 0.
        b1: decay of the momentum, in [0, 1): give the inner rule the same.
        max_norm: the longest that the corrected gradient of an array may be, in the
            gradient's unit, > 0; `math.inf` for no limit.
        exact: take g_prev of the same batch.
    State: `inner`; `own`, for each slot `g`, the last gradient, or with `exact` `x`,
        the last parameter.
    Raises: ValueError if a number is outside its range, or for `LossScaling` inside.
    Source: Yuan et al. 2024, Algorithms 1 and 2, arXiv:2411.10438. The authors' code
        takes 0 for the first g_prev.

    >>> import optimjax as oj
    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> mars = MARS(oj.SGD(0.1), gamma=0.5, b1=0.8, max_norm=1.5)
    >>> state, _ = mars.apply(mars.init(x), x, {"w": jnp.array([0.5, -3.0])})
    >>> state, steps = mars.apply(state, x, {"w": jnp.array([-0.1, -2.5])})
    >>> steps["w"].tolist()
    [-0.09824, -0.1134]
    """

    watches: ClassVar[bool] = True  # it changes gradients, never steps
    ranges: ClassVar = {"gamma": NOT_NEGATIVE}
    positive: ClassVar = ("max_norm",)

    inner: Rule = Adam(3e-3, b1=0.95, b2=0.99)
    gamma: Hyper = 0.025
    b1: Hyper = 0.95
    max_norm: Hyper = 1.0
    exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        sees_gradients("MARS", self.inner)

    @property
    def needs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("value_fn",) if self.exact else ()

    def init_leaf(self, x):
        if self.exact:  # a buffer of its own: the parameter may be donated
            return Parameter(cast(jnp.array(x, copy=True), x.dtype))
        return Gradient(zeros_like(x))

    def apply(
        self, state: Around, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Around, PyTree]:
        wide, grads = jax.tree.map(widen, params), spread(params, grads)
        before = self._before(state, wide, grads, context) if self.exact else ()
        own, corrected = self._apply_leaves(state.own, wide, grads, *before)
        inner, steps = self.inner.apply(state.inner, wide, corrected, **context)
        return Around(inner, own), steps_like(params, steps)

    def _before(
        self, state: Around, params: PyTree, grads: PyTree, context: dict[str, Any]
    ) -> tuple[PyTree]:
        """The gradients of this batch at the parameters of the update before."""
        if "value_fn" not in context:
            raise TypeError("MARS.apply: no value_fn was given.")
        named, structure = with_paths(params), jax.tree.structure(params)
        loss = loss_of_slots(context["value_fn"], params)
        given = gradients_by_path(named, grads)
        x = Slots((p, cast(state.own.slots[p].x, named[p].dtype)) for p in given)
        g = jax.grad(loss)(x) if x else x
        # JAX's complex gradients are the conjugates of what goes downhill.
        return (structure.unflatten([g[p].conj() if p in g else None for p in named]),)

    def _arithmetic(
        self, state: PyTree, x: Array, arrays: tuple[Array, ...], t: Array
    ) -> tuple[PyTree, Array]:
        g, before = arrays if self.exact else (*arrays, state.g)
        change = jnp.where(t == 1, 0, g - before)
        c = g + self.gamma * self.b1 / (1 - self.b1) * change
        c = c / jnp.maximum(1, norm(c) / self.max_norm)
        return Parameter(x) if self.exact else Gradient(g), c
