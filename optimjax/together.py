"""Rules that look at all slots together, and keep something of each."""

import dataclasses
from functools import partial, reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from optimjax.arrays import (
    cast,
    compute_dtype,
    real_part_dtype,
    strong,
    total,
    widen,
    wider,
)
from optimjax.leaf import LeafState, check_complex, promotion_in, to_compute
from optimjax.nested import Around, Wrapper, sees_gradients, steps_stay
from optimjax.paths import Slots, with_paths
from optimjax.rule import Rule, rule
from optimjax.treewide import (
    PyTree,
    arrays_by_path,
    spread,
    squared_length,
    steps_like,
)

__all__ = []


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TogetherState(LeafState):
    """What a `TogetherRule` keeps.

    Attributes:
        shared: what it keeps of all slots together, scalars by name; with `by_layer`
            path -> that of each.
    """

    shared: PyTree


@rule
class TogetherRule(Rule):
    """Arithmetic on each slot that needs sums over all of them.

        state, terms  = look_leaf(shared, state, x, g, t)         for each slot
        sums          = the terms summed, within and over slots
        shared       <- share(shared, sums, t)
        state, step   = step_leaf(old, shared, state, x, g, t)    for each slot

    What their author may rely on is as for a `LeafRule`; the scalars, and the rule's
    numbers in `share`, are in the widest dtype of all slots. A slot without a gradient
    takes no part in any sum. What has a past and is summed (a numerator, say) is best
    kept slot by slot, so that a slot which is missing once is missing from all the sums
    that belong together.

    Attributes:
        by_layer: whether each slot is alone, in place of all together.
    State: `TogetherState`.
    """

    # Not annotated: a field that overrides it would come before all others.
    by_layer = False
    _on_slots: ClassVar[tuple[str, str]] = ("look_leaf", "step_leaf")

    def init_leaf(self, x):
        """The state of one slot."""
        raise NotImplementedError(f"{type(self).__name__} has no init_leaf")

    def init_shared(self, squares: Array) -> Any:
        """What is kept of all slots, a NamedTuple of scalars.

        Args:
            squares: the sum of |x|^2 over all parameters, ().
        """
        raise NotImplementedError(f"{type(self).__name__} has no init_shared")

    def look_leaf(self, shared, state, x, g, t):
        """The state of one slot after this gradient, and the terms of the sums.

        The state may hold more than is kept, for `step_leaf`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no look_leaf")

    def share(self, shared, sums, t, value):
        """What is kept of all slots after this update.

        Args:
            t: the number of this update, from 1.
            value: the loss, for a rule that `needs` it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no share")

    def step_leaf(self, old, shared, state, x, g, t):
        """The state of one slot that is kept, and its step.

        Args:
            old, shared: what was and what is kept of all slots.
            state: as `look_leaf` has left it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step_leaf")

    def init(self, params: PyTree) -> Any:
        named = {path: widen(x) for path, x in with_paths(params).items()}
        check_complex(self, "init", named)
        now = self.at_count(0)

        def begun(method: str, x: Array) -> PyTree:
            return jax.tree.map(strong, _called(method, now, x.dtype, x))

        def shared(xs: PyTree) -> PyTree:
            return begun("init_shared", squared_length(xs))

        slots = Slots((path, begun("init_leaf", x)) for path, x in named.items())
        kept = (
            Slots((path, shared(x)) for path, x in named.items())
            if self.by_layer
            else shared(named)
        )
        return TogetherState(jnp.zeros((), jnp.int32), slots, Slots(), kept)

    def apply(
        self, state: Any, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Any, PyTree]:
        return self._apply_together(state, params, grads, **context)

    def _apply_together(
        self, state: TogetherState, params: PyTree, *trees: PyTree, **context: Any
    ) -> tuple[TogetherState, PyTree]:
        """`apply` with one or more arrays for each slot; each None there is skipped."""
        named, structure = with_paths(params), jax.tree.structure(params)
        given = arrays_by_path(named, trees)
        if not given:  # no update took place, so nothing is counted
            return state, structure.unflatten([None] * len(named))
        check_complex(self, "apply", {path: named[path] for path in given})
        now, state = self.at_count(state.count), state.after(given)
        at = now.by_slot()
        slots, steps = Slots(state.slots), {}
        shared = Slots(state.shared) if self.by_layer else state.shared
        look, step = self._on_slots
        for group in [[path] for path in given] if self.by_layer else [list(given)]:
            old = shared[group[0]] if self.by_layer else shared
            seen, terms = {}, []
            for path in group:
                x = widen(named[path])
                g, *others = (cast(each, x.dtype) for each in given[path])
                t = cast(state.steps(path), real_part_dtype(x.dtype))
                here = at(path, x)
                kept = (old, slots[path], x, g, t, *others)
                slots[path], found = _called(look, here, x.dtype, *kept)
                terms.append([total(term) for term in found])
                seen[path] = here, x, (g, t, *others)
            sums = summed(terms)
            count = state.steps(group[0]) if self.by_layer else state.count
            value = cast(context["value"], sums[0].dtype) if self.needs else None
            t = cast(count, sums[0].dtype)
            new = _called("share", now, sums[0].dtype, old, sums, t, value)
            for path, (here, x, rest) in seen.items():
                kept = (old, new, slots[path], x, *rest)
                made, steps[path] = _called(step, here, x.dtype, *kept)
                slots[path] = jax.tree.map(_as_before, made, state.slots[path])
            new = jax.tree.map(_as_before, new, old)
            if self.by_layer:
                shared[group[0]] = new
            else:
                shared = new
        state = dataclasses.replace(state, slots=slots, shared=shared)
        taken = structure.unflatten([steps.get(path) for path in named])
        return state, steps_like(params, taken)


@rule
class TogetherWrapper(Wrapper, TogetherRule):
    """A `TogetherRule` around another one: write `look_after` and `step_after`.

    They are `look_leaf` and `step_leaf`, and given the inner rule's step, too.

    State: `Around`: `inner`, and `own`, a `TogetherState`.
    """

    _on_slots: ClassVar[tuple[str, str]] = ("look_after", "step_after")

    def look_after(self, shared, state, x, g, t, step) -> tuple[Any, Any]:
        raise NotImplementedError(f"{type(self).__name__} has no look_after")

    def step_after(self, old, shared, state, x, g, t, step) -> tuple[Any, Array]:
        raise NotImplementedError(f"{type(self).__name__} has no step_after")

    def __post_init__(self) -> None:
        super().__post_init__()
        steps_stay(type(self).__name__, self.inner)
        sees_gradients(type(self).__name__, self.inner)

    def init(self, params: PyTree) -> Any:
        return Around(self.inner.init(params), super().init(params))

    def apply(
        self, state: Any, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Any, PyTree]:
        wide, grads = jax.tree.map(widen, params), spread(params, grads)
        inner, steps = self.inner.apply(state.inner, wide, grads, **context)
        own, steps = self._apply_together(state.own, wide, grads, steps)
        return Around(inner, own), steps_like(params, steps)

    def at_count(self, count: Any) -> Any:
        # Without the rule inside, whose numbers are no matter of the slot's arithmetic.
        return super().at_count(count).with_fields(inner=None)

    def own_state(self, state: Any) -> Any:
        return state.own


def product(a: Array, b: Array) -> Array:
    """The real inner product of two arrays, a complex number as two reals."""
    if jnp.iscomplexobj(a):
        return total(a.real * b.real + a.imag * b.imag)
    return total(a * b)


def summed(terms: list[list[Array]]) -> list[Array]:
    """The sums over slots of the terms that each has, in the widest dtype of all."""
    dtype = reduce(wider, (term.dtype for each in terms for term in each), jnp.float32)
    return [
        sum((cast(term, dtype) for term in of_each), jnp.zeros((), dtype))
        for of_each in zip(*terms, strict=True)
    ]


@partial(jax.jit, static_argnums=(0, 2))
def _called(method: str, rule: Rule, dtype: Any, *args: Any) -> Any:
    """A method of the rule, with all floating numbers in the real part's dtype.

    Jitted on its own, so that slots of one shape are traced once, not once each.
    """
    dtype = compute_dtype(dtype)
    with promotion_in(dtype):
        return getattr(to_compute(rule, dtype), method)(*to_compute(args, dtype))


def _as_before(new: Array, old: Array) -> Array:
    return cast(new, old.dtype)
