"""16-bit parameters that still learn by small steps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optimjax.arrays import cast, compute_dtype
from optimjax.nested import Wrapper
from optimjax.paths import Slots, with_paths
from optimjax.rule import rule
from optimjax.treewide import PyTree, gradients_by_path, steps_like

__all__ = ["MixedPrecision"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Master:
    """What `MixedPrecision` keeps: the state inside, and wide copies of parameters."""

    inner: PyTree
    params: Slots


@rule
class MixedPrecision(Wrapper):
    """A rule that trains wide copies of the parameters; the model holds them rounded.

        wide, step = inner on the float32 copy
        wide      <- wide - step
        step       = x - wide                 so that x becomes the rounded copy

    1 - 0.001 is 1 in bfloat16, a thousand times over; in the copy it is not. The copy
    is what counts: a value put into the model by hand is overwritten.

    Args:
        inner: the rule. All that it keeps is of the copies.
    State: `inner`, and `params`: path -> the parameter in at least float32.
    Source: Micikevicius et al. 2018, section 3.1, arXiv:1710.03740.

    >>> import optimjax as oj
    >>> model = {"w": jnp.ones(2, jnp.bfloat16)}
    >>> state = oj.setup(MixedPrecision(oj.SGD(1.0)), model)
    >>> for _ in range(100):
    ...     state, model = oj.update(state, model, {"w": jnp.full(2, 1e-3)})
    >>> model["w"], state.inner.params["w"].tolist()
    (Array([0.898438, 0.898438], dtype=bfloat16), [0.90000, 0.90000])
    """

    def init(self, params: PyTree) -> Master:
        # Cast, not widened: a weakly typed copy would not stay one.
        wide = Slots(
            (path, cast(x, compute_dtype(jnp.result_type(x))))
            for path, x in with_paths(params).items()
        )
        return Master(self.inner.init(wide), wide)

    def apply(
        self, state: Master, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Master, PyTree]:
        named, structure = with_paths(params), jax.tree.structure(params)
        given = gradients_by_path(named, grads)
        wide = Slots(
            (path, cast(g, state.params[path].dtype)) for path, g in given.items()
        )
        inner, made = self.inner.apply(state.inner, state.params, wide, **context)
        kept, steps = Slots(state.params), {}
        for path, step in with_paths(made).items():
            kept[path] = state.params[path] - step
            steps[path] = cast(named[path], kept[path].dtype) - kept[path]
        out = structure.unflatten([steps.get(path) for path in named])
        return Master(inner, kept), steps_like(params, out)

    def eval_params(self, state: Master, params: Slots) -> Slots:
        mine = Slots((path, state.params[path]) for path in params)
        return self.inner.eval_params(state.inner, mine)
