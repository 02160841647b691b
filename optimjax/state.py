"""What the user holds: a rule in the middle of a run, its state and its ties."""

import dataclasses
from typing import Any

import jax
from jax import Array

from optimjax.arrays import is_traced
from optimjax.leaf import LeafState
from optimjax.nested import walk
from optimjax.paths import Path, Slots
from optimjax.rule import Rule
from optimjax.show import tree
from optimjax.ties import Ties
from optimjax.treewide import Count, PyTree

__all__ = ["State"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class State:
    """A rule in the middle of a run: a pytree that the user holds and passes on.

    Attributes:
        rule: the rule; its hyperparameters are arrays, so that a change of value
            compiles nothing.
        inner: what the rule keeps, as its own `init` made it.
        ties: which leaves of the model are one array. Static.
        frozen: names of the slots that take no step, sorted. Static.
    """

    rule: Rule
    inner: PyTree
    ties: Ties = dataclasses.field(metadata={"static": True})
    frozen: tuple[Path, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def count(self) -> Array:
        """Updates so far, int32, (), as the first rule that counts has them."""
        nodes = jax.tree.leaves(self.inner, is_leaf=lambda x: isinstance(x, Count))
        return next(node.count for node in nodes if isinstance(node, Count))

    @property
    def slots(self) -> Slots:
        """{path: what the rule keeps for that slot}; a tuple where several rules do."""
        kept: dict[Path, list[PyTree]] = {name: [] for name in self.ties.names}
        for _, state, _ in walk(self.rule, self.inner, list(self.ties.names)):
            if isinstance(state, LeafState):
                for path, leaf in state.slots.items():
                    if jax.tree.leaves(leaf):
                        kept[path].append(leaf)
        return Slots(
            {p: each[0] if len(each) == 1 else tuple(each) for p, each in kept.items()}
        )

    def __repr__(self) -> str:
        return tree(self)


def as_state(state: Any, function: str) -> State:
    if not isinstance(state, State):
        raise TypeError(
            f"{function}: state is a {type(state).__name__}, expected a State from "
            "setup. The state comes first, in and out."
        )
    for x in jax.tree.leaves(state)[:1]:
        if isinstance(x, jax.Array) and not is_traced(x) and x.is_deleted():
            raise ValueError(
                f"{function}: the state was donated to an earlier step. Use the state "
                "that the step returned, or make_step(..., donate=False)."
            )
    return state
