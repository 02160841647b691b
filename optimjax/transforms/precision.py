"""16-bit parameters that still learn by small steps."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from optimjax.arrays import cast, cast_like, compute_dtype
from optimjax.leaf import LeafState
from optimjax.nested import Wrapper
from optimjax.noise import Keyed
from optimjax.paths import Slots, with_paths
from optimjax.rule import rule
from optimjax.treewide import PyTree, gradients_by_path, steps_like

__all__ = ["MixedPrecision", "StochasticRounding"]


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
    is what counts: a value put into the model by hand is overwritten, and nothing may
    come after it in a `Chain`; what changes steps (decay, a projection) goes inside.

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

    ends: ClassVar[bool] = True

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

    def descend(
        self, state: Master, params: Slots, grads: Slots, **context: Any
    ) -> tuple[Master, Slots]:
        """The copy rounded, whatever the parameter was: no difference of the two, which
        of a float16 that has overflowed is NaN."""
        inner, wide = self.inner.descend(state.inner, state.params, grads, **context)
        new = Slots(params)
        for path, g in grads.items():
            if g is not None:  # a buffer of its own, even of the same dtype
                new[path] = jnp.copy(cast_like(wide[path], params[path]))
        return Master(inner, wide), new

    def eval_params(self, state: Master, params: Slots) -> Slots:
        mine = Slots((path, state.params[path]) for path in params)
        return self.inner.eval_params(state.inner, mine)


@rule
class StochasticRounding(Keyed):
    """bfloat16 parameters that are rounded up or down at random, right on average.

        y    = x - g                                   in float32
        r    = the bfloat16 below y or the one above it; that which is nearer is the
               likelier, so that the mean of r is y
        step = x - r

    For the end of a `Chain`. Steps too small for bfloat16, which rounding to nearest
    loses every time, are taken now and then, whole: as far on average, without the
    float32 copies of `MixedPrecision`, but with noise. Slots of other dtypes are left
    alone. Two of one `seed` are rounded alike only under one path.

    Args:
        seed: where the generators start.
    State: for each bfloat16 slot `key`, data of a threefry key, uint32, (2,).
    Source: Gupta et al. 2015, section 3, arXiv:1502.02551; for bfloat16 parameters
        Zamirai et al. 2020, arXiv:2010.06192.

    >>> import optimjax as oj
    >>> model = {"w": jnp.ones(10_000, jnp.bfloat16)}
    >>> state = oj.setup(oj.Chain(oj.SGD(1.0), StochasticRounding()), model)
    >>> for _ in range(100):
    ...     state, model = oj.update(state, model, {"w": jnp.full(10_000, 1e-3)})
    >>> round(float(model["w"].astype(jnp.float32).mean()), 2)  # to nearest: 1.0
    0.9
    """

    follows: ClassVar[bool] = True

    seed: int = 0

    def init(self, params: PyTree) -> LeafState:
        # Rules are shown wide parameters: which of them are kept in bfloat16, the
        # structure of the state remembers.
        state, named = super().init(params), with_paths(params)
        slots = Slots(
            (path, key if jnp.result_type(named[path]) == jnp.bfloat16 else None)
            for path, key in state.slots.items()
        )
        return dataclasses.replace(state, slots=slots)

    def apply_leaf(self, state, x, g, t):
        if state is None:
            return state, g
        state, key = self.draw(state)
        y = x - g
        # A bfloat16 is the upper half of a float32: a carry out of the lower half is
        # as likely as that half is large.
        bits = lax.bitcast_convert_type(y, jnp.uint32)
        bits = bits + jax.random.bits(key, y.shape, jnp.uint16).astype(jnp.uint32)
        rounded = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        return state, jnp.where(jnp.isfinite(y), x - rounded, g)
