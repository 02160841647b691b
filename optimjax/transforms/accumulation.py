"""Several small batches for one step."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimjax.arrays import cast, real_dtype, widen, zeros_like
from optimjax.hyper import Hyper
from optimjax.leaf import counted_alone, skipping
from optimjax.nested import Wrapper, every_rule
from optimjax.paths import Path, Slots, with_paths
from optimjax.rule import rule
from optimjax.treewide import (
    LOSSES,
    Count,
    PyTree,
    gradients_by_path,
    increment,
    steps_like,
)

__all__ = ["Accumulate"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulated(Count):
    """What `Accumulate` keeps. `count` is the number of steps taken.

    Attributes:
        inner: the state of the rule inside.
        batches: micro-batches since the last step, int32, ().
        sums: path -> sum of the gradients since then, at least float32.
        own: path -> micro-batches, for each slot that was ever skipped.
        value: sum of the losses since then, where the rule inside needs the loss.
    """

    inner: PyTree
    batches: Array
    sums: Slots
    own: Slots
    value: Array | None

    def skipping(self, paths: Iterable[Path]) -> "Accumulated":
        paths = list(paths)
        own = counted_alone(self.own, self.batches, self.sums, paths)
        inner = skipping(self.inner, paths)
        return dataclasses.replace(self, inner=inner, own=own)


@rule
class Accumulate(Wrapper):
    """One step for several micro-batches, as one big batch would have taken it.

        sum <- sum + g
        every `every` calls:  steps = inner(sum / every),  sum <- 0
        otherwise:            steps = 0

    The rule inside is run for those steps alone: its counts, schedules and averages see
    nothing of the micro-batches. The loss has to be a mean over the micro-batch; the
    mean of the means is that of the big batch if all are of one size. (Of unequal ones
    give `every * size / total` times the mean as the loss.) A gradient of None adds
    nothing: a slot's sum is divided by the number of gradients it has had, and waits
    for the next step with one. What `value=` says is averaged, too.

    Args:
        inner: the rule that takes the steps.
        every: micro-batches for a step, >= 1; a schedule of it is a function of the
            number of steps taken.
    State: `Accumulated`: beside the inner state one array for each slot, of its shape.
    Raises: ValueError if `every` is less than 1; TypeError for an inner rule that
        evaluates the loss itself, which is the loss of one micro-batch only.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, 1.0])}
    >>> rule = Accumulate(oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD(1.0)), every=2)
    >>> state = oj.setup(rule, model)
    >>> for g in ([3.0, 0.0], [0.0, 4.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    ...     print(model["w"])
    [1. 1.]
    [0.4 0.2]
    """

    ranges: ClassVar = {"every": (1.0, math.inf, False)}
    whole: ClassVar = ("every",)

    every: Hyper = 4

    def __post_init__(self):
        super().__post_init__()
        for each in every_rule(self.inner):
            if not {*LOSSES}.isdisjoint(each.needs):
                raise TypeError(
                    f"Accumulate: {type(each).__name__} evaluates the loss of a whole "
                    "batch, expected a rule of gradients alone."
                )

    def init(self, params: PyTree) -> Accumulated:
        zero = jnp.zeros((), jnp.int32)
        sums = {path: zeros_like(x) for path, x in with_paths(params).items()}
        needed = any("value" in each.needs for each in every_rule(self.inner))
        value = jnp.zeros((), real_dtype()) if needed else None
        inner = self.inner.init(params)
        return Accumulated(zero, inner, zero, Slots(sums), Slots(), value)

    def apply(
        self, state: Accumulated, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Accumulated, PyTree]:
        named, structure = with_paths(params), jax.tree.structure(params)

        def step(inner: PyTree, means: Slots, **context: Any) -> tuple[PyTree, Slots]:
            wide = jax.tree.map(widen, params)
            tree = structure.unflatten([means.get(path) for path in named])
            inner, steps = self.inner.apply(inner, wide, tree, **context)
            return inner, Slots({**zeros, **with_paths(steps)})

        given = gradients_by_path(named, grads)
        zeros = Slots({path: jnp.zeros_like(state.sums[path]) for path in given})
        new, steps = self._after(state, given, step, zeros, context)
        made = structure.unflatten([steps.get(path) for path in named])
        return new, steps_like(params, made)

    def descend(
        self, state: Accumulated, params: Slots, grads: Slots, **context: Any
    ) -> tuple[Accumulated, Slots]:
        """Parameters stand still between the steps, and are not rewritten."""

        def step(inner: PyTree, means: Slots, **context: Any) -> tuple[PyTree, Slots]:
            full = Slots((path, means.get(path)) for path in params)
            return self.inner.descend(inner, params, full, **context)

        given = Slots((path, g) for path, g in grads.items() if g is not None)
        return self._after(state, given, step, params, context)

    def _after(
        self,
        state: Accumulated,
        given: Mapping[Path, Array],
        step: Callable[..., tuple[PyTree, Slots]],
        still: Slots,
        context: dict[str, Any],
    ) -> tuple[Accumulated, Slots]:
        """The state after a micro-batch; and what `step` (inner state, mean gradients)
        returns beside the inner state, or in between `still`."""
        if not given:
            return state, still
        state = state.skipping(path for path in state.sums if path not in given)
        batches = state.batches + 1
        counts = {path: state.own[path] + 1 for path in given if path in state.own}
        sums = Slots(state.sums)
        for path, g in given.items():
            sums[path] = sums[path] + cast(g, sums[path].dtype)
        value = state.value
        if value is not None:
            value = value + cast(context["value"], value.dtype)

        def full() -> Any:
            means = Slots(
                (path, sums[path] / cast(counts.get(path, batches), sums[path].dtype))
                for path in given
            )
            if value is not None:
                context["value"] = value / cast(batches, value.dtype)
            inner, out = step(state.inner, means, **context)
            again = jnp.zeros_like
            return (
                inner,
                increment(state.count),
                again(batches),
                Slots({p: again(s) if p in given else s for p, s in sums.items()}),
                Slots({**state.own, **{p: again(n) for p, n in counts.items()}}),
                None if value is None else again(value),
                out,
            )

        def wait() -> Any:
            own = Slots({**state.own, **counts})
            return state.inner, state.count, batches, sums, own, value, still

        due = cast(batches, jnp.float32) >= cast(
            self.at_count(state.count).every, jnp.float32
        )
        *kept, out = lax.cond(due, full, wait)
        inner, count, batches, sums, own, value = kept
        return Accumulated(count, inner, batches, sums, own, value), out
