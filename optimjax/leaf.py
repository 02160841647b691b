"""Rules that are arithmetic on each array alone, and what they need not care for."""

import dataclasses
import typing
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike

from optimjax.arrays import (
    cast,
    cast_like,
    compute_dtype,
    real_part_dtype,
    strong,
    widen,
)
from optimjax.kernels import available
from optimjax.kernels.fused import Kernel, fits, fused_update
from optimjax.paths import Path, Slots, complain, parts, with_paths
from optimjax.rule import Rule, rule
from optimjax.treewide import Count, PyTree, arrays_by_path, increment

__all__ = ["LeafRule", "LeafState"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LeafState(Count):
    """What a `LeafRule` keeps.

    Attributes:
        slots: path -> what `init_leaf` made.
        own: path -> number of steps, int32, (), of each slot that was ever skipped. All
            others have taken `count` steps: one scalar crosses the `jit` for them all.
    """

    slots: Slots
    own: Slots

    def skipping(self, paths: Iterable[Path]) -> Self:
        """The same state, with room for these slots' own number of steps."""
        own = counted_alone(self.own, self.count, self.slots, paths)
        return dataclasses.replace(self, own=own)

    def after(self, moving: Collection[Path]) -> Self:
        """The same state, with one step more counted for the slots that take one."""
        state = self.skipping(path for path in self.slots if path not in moving)
        own = {p: increment(n) if p in moving else n for p, n in state.own.items()}
        return dataclasses.replace(state, count=increment(state.count), own=Slots(own))

    def steps(self, path: Path) -> Array:
        """How many steps this slot has taken, int32, ()."""
        return self.own.get(path, self.count)


def counted_alone(
    own: Slots, count: Array, slots: Slots, paths: Iterable[Path]
) -> Slots:
    """`own`, with `count` for those of `paths` that had none of their own.

    In the order of the slots, in whatever order they came to be skipped; and copies,
    for a state of which two leaves are one buffer could not be donated.
    """
    wanted = {*own, *paths}
    if len(wanted) == len(own):
        return own
    return Slots(
        (path, own[path] if path in own else jnp.array(count, copy=True))
        for path in slots
        if path in wanted
    )


def skipping(state: PyTree, paths: Iterable[Path]) -> PyTree:
    """The state of a rule, with room for what slots that are skipped count alone."""
    paths = list(paths)
    return jax.tree.map(
        lambda node: node.skipping(paths) if hasattr(node, "skipping") else node,
        state,
        is_leaf=lambda node: hasattr(node, "skipping"),
    )


def own_counts(state: PyTree) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """Where slots have counts of their own, and where instead those of others are.

    What counts alone in one rule may count with the others in the next. A slot may be
    called "own", too; the field is no key of a dict.
    """
    keyed, _ = jax.tree_util.tree_flatten_with_path(state)
    found = [
        parts(keys)
        for keys, _ in keyed
        if keys[-2:-1] == (GetAttrKey("own"),) and not isinstance(keys[-1], GetAttrKey)
    ]
    return {w: [(*w[:-2], name) for name in ("batches", "count")] for w in found}


@rule
class LeafRule(Rule):
    """Arithmetic on each array alone: write `init_leaf` and `apply_leaf`.

    What their author may rely on, and need not repeat:

    * `x`, `g` and the floating leaves of `state` arrive in the compute dtype (at least
      float32; float64 stays; complex stays complex, real state stays real); what is
      returned is cast back to the dtypes that are stored;
    * hyperparameters arrive as scalars of the matching real dtype, schedules evaluated,
      values by path chosen, and a `Where` as True or False for this slot;
    * `t` is the slot's own number of steps, from 1, as a real scalar;
    * a slot without a gradient is never passed in, and its state stays as it is.

    Args:
        state_dtype: dtype in which floating state is kept; None for at least float32.
    State: `LeafState`.
    """

    by_path: ClassVar[bool] = True

    state_dtype: DTypeLike | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_dtype is not None:
            dtype = np.dtype(self.state_dtype)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(
                    f"{type(self).__name__}: state_dtype is {dtype.name}, expected a "
                    "floating dtype."
                )
            object.__setattr__(self, "state_dtype", dtype)

    def init_leaf(self, x: Array) -> PyTree:
        """The state of one slot. Args: `x`, the parameter in its compute dtype."""
        raise NotImplementedError(f"{type(self).__name__} has no init_leaf")

    def apply_leaf(
        self, state: PyTree, x: Array, g: Array, t: Array
    ) -> tuple[PyTree, Array]:
        """The new state of one slot, and the step to subtract from `x`."""
        raise NotImplementedError(f"{type(self).__name__} has no apply_leaf")

    def eval_leaf(self, state: PyTree, x: Array, t: Array) -> Array:
        """The parameter to evaluate the model at; for a rule that keeps an average."""
        return x

    def init(self, params: PyTree) -> Any:
        at = self.at_count(0).by_slot()
        casts: dict[Any, Rule] = {}  # thousands of slots share a few
        slots = Slots()
        named = with_paths(params)
        check_complex(self, "init", named)
        for path, x in named.items():
            x = widen(x)
            here = at(path, x)
            key = (id(here), x.dtype)
            if key not in casts:
                casts[key] = to_compute(here, x.dtype)
            made = typing.cast(LeafRule, casts[key]).init_leaf(x)
            slots[path] = jax.tree.map(self._stored, made)
        return LeafState(Count.zero().count, slots, Slots())

    def _stored(self, leaf: Any) -> Array:
        leaf = strong(leaf)
        if self.state_dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return cast(leaf, self.state_dtype)

    def apply(
        self, state: Any, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Any, PyTree]:
        return self._apply_leaves(state, params, grads)

    def _apply_leaves(
        self, state: LeafState, params: PyTree, *trees: PyTree
    ) -> tuple[LeafState, PyTree]:
        """`apply` with one or more arrays for each slot; each None there is skipped."""
        named, structure = with_paths(params), jax.tree.structure(params)
        inputs = arrays_by_path(named, trees)
        if not inputs:  # no update took place, so nothing is counted
            return state, structure.unflatten([None] * len(named))
        at, state = self.at_count(state.count).by_slot(), state.after(inputs)
        slots, steps = Slots(state.slots), {}
        check_complex(self, "apply", {path: named[path] for path in inputs})
        for path, arrays in inputs.items():
            x = named[path]
            slots[path], steps[path] = in_compute_dtype(
                at(path, x), slots[path], x, arrays, state.steps(path)
            )
        return dataclasses.replace(state, slots=slots), structure.unflatten(
            [steps.get(path) for path in named]
        )

    def kernel(self) -> Kernel | None:
        """The compiled loop that does what `apply_leaf` does, if there is one."""
        return None

    def descend(
        self,
        state: Any,
        params: Slots,
        grads: Slots,
        scale: Array | None = None,
        **context: Any,
    ) -> tuple[Any, Slots]:
        """As of every rule, with gradients times `scale` if one is given."""
        given = {path: g for path, g in grads.items() if g is not None}
        if not given or not self.fuses():
            return super().descend(state, params, grads, **context)
        at, state = self.at_count(state.count).by_slot(), state.after(given)
        slots, new = Slots(state.slots), Slots(params)
        groups: dict[Any, tuple[Any, Array, list[Path]]] = {}
        for path, g in given.items():
            x = params[path]
            here, t = at(path, x), state.steps(path)
            if fits(x, g, slots[path]):
                key = (id(here), id(t), x.dtype, g.dtype)
                groups.setdefault(key, (here, t, []))[2].append(path)
            else:
                new[path], slots[path] = _descend_leaf(
                    here, t, scale, x, g, slots[path]
                )
        for here, t, paths in groups.values():
            xs, gs, kept = ([d[p] for p in paths] for d in (params, given, slots))
            xs, kept = fused_update(_descend_leaf, here, t, scale, xs, gs, kept)
            new.update(zip(paths, xs, strict=True))
            slots.update(zip(paths, kept, strict=True))
        return dataclasses.replace(state, slots=slots), new

    def fuses(self) -> bool:
        """Whether a compiled loop does what this rule does, and can be used."""
        return available() and _knows_its_loop(type(self)) and self.kernel() is not None

    def _arithmetic(
        self, state: PyTree, x: Array, arrays: tuple[Array, ...], t: Array
    ) -> tuple[PyTree, Array]:
        (g,) = arrays
        return self.apply_leaf(state, x, g, t)

    def eval_params(self, state: Any, params: Slots) -> Slots:
        if type(self).eval_leaf is LeafRule.eval_leaf:
            return super().eval_params(state, params)
        at = self.at_count(jnp.maximum(state.count - 1, 0)).by_slot()
        averages = Slots(params)
        for path, kept in state.slots.items():
            x, t = params[path], state.steps(path)
            average = _eval_leaf(at(path, x), kept, x, t)
            averages[path] = jnp.where(t > 0, average, widen(x))
        return averages


def check_complex(rule: Rule, function: str, named: Mapping[Path, Any]) -> None:
    """TypeError for complex parameters of a rule that is for real ones."""
    if rule.complex_ok:
        return
    what = "a complex parameter, expected a real one"
    found = {path: what for path, x in named.items() if jnp.iscomplexobj(x)}
    if found:
        raise TypeError(
            complain(f"{type(rule).__name__}.{function}", found)
            + " Train its real and imaginary parts as two arrays."
        )


def promotion_in(dtype: DTypeLike) -> AbstractContextManager[Any]:
    """In which a rule computes in `dtype`.

    A complex leaf meets its own real hyperparameters and magnitudes; that is the one
    mixture that strict promotion, where a user has asked for it, would refuse.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.numpy_dtype_promotion("standard")
    return nullcontext()


@lru_cache
def _knows_its_loop(cls: type[LeafRule]) -> bool:
    """Whoever writes another `apply_leaf` has not thereby written another loop."""

    def written(name: str) -> int:
        return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))

    others = map(written, ("apply_leaf", "_arithmetic", "apply"))
    return all(written("kernel") <= other for other in others)


def to_compute(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """The floating leaves in the real, the complex ones in the complex `dtype`."""

    def one(leaf: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            return cast(leaf, dtype)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return cast(leaf, real_part_dtype(dtype))
        return leaf

    return jax.tree.map(one, tree)


def _descend_leaf(
    rule: LeafRule, t: Array, scale: Array | None, x: Array, g: Array, state: PyTree
) -> tuple[Array, PyTree]:
    wide = widen(x)
    g = cast(g, wide.dtype)
    g = g if scale is None else g * cast(scale, wide.dtype)
    state, step = in_compute_dtype(rule, state, wide, (g,), t)
    return cast_like(wide - step, x), state


@jax.jit
def in_compute_dtype(
    rule: LeafRule, state: PyTree, x: Array, arrays: tuple[Array, ...], t: Array
) -> tuple[PyTree, Array]:
    """`rule.apply_leaf` in the compute dtype, and back to the stored dtypes.

    Jitted on its own, so that slots of one shape are traced once, not once each.
    """
    dtype, name = compute_dtype(x.dtype), type(rule).__name__
    with promotion_in(dtype):
        out = typing.cast(LeafRule, to_compute(rule, dtype))._arithmetic(
            to_compute(state, dtype),
            cast(x, dtype),
            tuple(cast(each, dtype) for each in arrays),
            cast(t, real_part_dtype(dtype)),
        )
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"{name}.apply_leaf: {out!r}, expected (state, step).")
    new, step = out
    if jax.tree.structure(new) != jax.tree.structure(state):
        raise ValueError(
            f"{name}.apply_leaf: state has structure {jax.tree.structure(new)}, "
            f"expected {jax.tree.structure(state)}, which init_leaf made."
        )
    made, kept = [*jax.tree.leaves(new), step], [*jax.tree.leaves(state), x]
    for after, before in zip(made, kept, strict=True):
        if jnp.shape(after) != before.shape:
            what = "the step" if before is x else "an array of the state"
            raise ValueError(
                f"{name}.apply_leaf: {what} has shape {jnp.shape(after)}, expected "
                f"{before.shape}. (Hyperparameters must be scalars: to sweep one, use "
                "jax.vmap over the rule.)"
            )
    return jax.tree.map(lambda n, old: cast(n, old.dtype), new, state), cast(
        step, x.dtype
    )


@jax.jit
def _eval_leaf(rule: LeafRule, state: PyTree, x: Array, t: Array) -> Array:
    """`rule.eval_leaf` in the compute dtype."""
    dtype = compute_dtype(x.dtype)
    with promotion_in(dtype):
        return typing.cast(LeafRule, to_compute(rule, dtype)).eval_leaf(
            to_compute(state, dtype), cast(x, dtype), cast(t, real_part_dtype(dtype))
        )
