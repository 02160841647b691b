"""The learning rates at which the rules inside another one are about to act."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from optimjax.arrays import real_dtype, widen
from optimjax.hyper import ByPath, evaluate
from optimjax.nested import LeafWrapper
from optimjax.paths import Path, Slots, complain, with_paths
from optimjax.rule import Rule, rule
from optimjax.together import TogetherRule
from optimjax.treewide import PyTree

__all__ = []


def learning_rates(
    owner: str, rule: Rule, state: PyTree, params: Mapping[Path, Any]
) -> Slots:
    """{slot: the learning rate of its next step}, each real, ().

    That of the innermost rule with a `learning_rate` which acts on the slot, chosen by
    path, its schedule evaluated at that rule's own count; 0 for a slot that never
    moves. What else scales a step (a line search, a trust ratio) is not in it.

    Args:
        owner: who asks, for the error.
        rule, state: the rule inside, and its state before the update.
        params: {slot: array}, of the slots in question.
    Raises: ValueError for slots on which no such rule acts, or more than one.

    >>> import optimjax as oj
    >>> x = {"w": jnp.ones(2), "b": jnp.ones(2)}
    >>> adam = oj.Adam({"w": lambda count: 0.5 / (count + 1), "*": 0.25})
    >>> state, _ = adam.apply(adam.init(x), x, x)
    >>> rates = learning_rates("doc", oj.Chain(oj.Scale(2.0), adam), (None, state), x)
    >>> {path: float(rate) for path, rate in rates.items()}
    {'w': 0.25, 'b': 0.25}
    """
    found = _rates(rule, state, params)
    problems = {
        path: f"{len(rates) or 'no'} learning rates, expected one"
        for path, rates in found.items()
        if len(rates) != 1
    }
    if problems:
        remedy = (
            "Inside it, one rule with a `learning_rate` is to act on each of them. A "
            "rule that finds its own, such as Prodigy, has a `weight_decay` or takes "
            "one with how='independent'; a wrapper that does, such as Mechanic, goes "
            "around."
        )
        raise ValueError(complain(owner, problems, remedy))
    arrays: dict[int, Array] = {}  # one for all slots that share a rate
    for (rate,) in found.values():
        if id(rate) not in arrays:
            arrays[id(rate)] = jnp.asarray(rate, real_dtype())
    return Slots((path, arrays[id(found[path][0])]) for path in params)


def _rates(
    rule: Rule, state: PyTree, slots: Mapping[Path, Any]
) -> dict[Path, list[Any]]:
    found: dict[Path, list[Any]] = {path: [] for path in slots}
    if isinstance(rule, TogetherRule):
        return found  # its learning rate is a factor on one that it finds by itself
    for inner, own, mine in rule.parts(state, Slots(slots)):
        of_part = _rates(inner, own, {path: slots[path] for path in mine})
        for path, rates in of_part.items():
            found[path] += rates
    own = 0.0 if rule.freezes else rule.hypers().get("learning_rate")
    missing = [path for path, rates in found.items() if not rates]
    if own is None or not missing:
        return found
    count: Any = getattr(rule.own_state(state), "count", None)
    rate = evaluate(own, count)
    for path in missing:
        here = rate
        if isinstance(rate, ByPath):
            here = rate.at(path, slots[path], f"{type(rule).__name__}: learning_rate")
        found[path] = [here]
    return found


@rule
class RateWrapper(LeafWrapper):
    """A `LeafWrapper` that is told the learning rate: write `init_leaf`, `at_rate`.

        state.inner, steps = inner.apply(state.inner, params, grads)
        state, step        = at_rate(state, x, g, step, rate, t)    for each slot

    `rate` is the one of `learning_rates`, real, (), at which `step` was taken.
    """

    def at_rate(
        self, state: PyTree, x: Array, g: Array, step: Array, rate: Array, t: Array
    ) -> tuple[PyTree, Array]:
        """The new state of one slot, and the step in place of the inner rule's."""
        raise NotImplementedError(f"{type(self).__name__} has no at_rate")

    def needs_rate(self, path: Path, x: Any) -> bool:
        """Whether `at_rate` looks at the rate of this slot; it is 0 if not."""
        return True

    def init(self, params: PyTree) -> Any:
        state = super().init(params)
        self._rates(state.inner, params)  # there is one, or an error
        return state

    def _rates(self, inner: PyTree, params: PyTree) -> PyTree:
        named, zero = with_paths(params), jnp.zeros((), real_dtype())
        asked = {path: x for path, x in named.items() if self.needs_rate(path, x)}
        rates = learning_rates(type(self).__name__, self.inner, inner, asked)
        structure = jax.tree.structure(params)
        return structure.unflatten([rates.get(path, zero) for path in named])

    def _inside(
        self, inner: PyTree, params: PyTree, grads: PyTree, context: Any
    ) -> tuple[PyTree, ...]:
        rates = self._rates(inner, jax.tree.map(widen, params))
        return *super()._inside(inner, params, grads, context), rates

    def _arithmetic(
        self, state: PyTree, x: Array, arrays: tuple[Array, ...], t: Array
    ) -> tuple[PyTree, Array]:
        g, step, rate = arrays
        return self.at_rate(state, x, g, step, rate.real, t)
