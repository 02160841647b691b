"""What is static of a model in a compiled step, and how to put the model together."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from optimjax.arrays import is_numeric
from optimjax.layout import Layout, Places, put
from optimjax.paths import Path, picker
from optimjax.ties import Ties

__all__ = []


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """What is static of a model in a step: its layout, and the leaves without arrays.

    Attributes:
        ties: of the state, and its frozen slots: what is static of that.
        layout: where the slots are.
        trained, frozen: which slots, by their number.
        arrays: positions of the other arrays.
        constants: the leaves that are no arrays, by position.
    """

    ties: Ties
    still: tuple[Path, ...]
    layout: Layout
    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    arrays: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]

    @property
    def names(self) -> tuple[Path, ...]:
        return self.layout.names

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        # 1, 1.0 and True are equal, but a loss may tell them apart.
        constants = tuple((i, type(x), _hashable(x)) for i, x in self.constants)
        return (
            self.ties,
            self.still,
            self.layout.structure,
            self.arrays,
            constants,
        )

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Frame) and self._key == other._key)

    def build(self, params: Any, others: Any, rest: Any) -> Any:
        """The model, inside the compiled function."""
        leaves: list[Any] = [None] * len(self.layout.paths)
        for i, x in zip(self.arrays, rest, strict=True):
            leaves[i] = x
        for i, x in self.constants:
            leaves[i] = x
        return self.layout.scatter(self.slots(params, others), leaves)

    @cached_property
    def _first(self) -> list[int]:
        """The leaf that is the first place of each trained slot."""
        return [self.layout.firsts[i] for i in self.trained]

    @cached_property
    def _tied(self) -> list[tuple[int, Places]]:
        """(number among the trained, places) of the slots that have several."""
        every = [self.layout.positions[i] for i in self.trained]
        return [(n, places) for n, places in enumerate(every) if len(places) > 1]

    @cached_property
    def _pickers(self) -> list[Callable[[list[Any]], tuple[Any, ...]]]:
        frozen = [self.layout.firsts[i] for i in self.frozen]
        return [picker(each) for each in (self._first, frozen, self.arrays)]

    def take(self, leaves: list[Any]) -> list[tuple[Any, ...]]:
        """The arrays of the trained slots, of the frozen ones, and all others."""
        return [pick(leaves) for pick in self._pickers]

    def rebuild(self, params: tuple[Any, ...], leaves: list[Any]) -> Any:
        """The model, outside: everything that was not trained is the object it was."""
        leaves = list(leaves)
        for i, x in zip(self._first, params, strict=True):
            leaves[i] = x
        for n, places in self._tied:
            put(params[n], places, leaves)
        return self.layout.structure.unflatten(leaves)

    def slots(
        self, params: tuple[Any, ...], others: tuple[Any, ...]
    ) -> dict[Path, Any]:
        """{path: array} of the trained slots and then the frozen."""
        numbers, arrays = (*self.trained, *self.frozen), (*params, *others)
        return {self.names[i]: x for i, x in zip(numbers, arrays, strict=True)}


class _ById:
    """An unhashable constant, compared by identity (and kept alive by the key)."""

    def __init__(self, x: Any):
        self.x = x

    def __hash__(self) -> int:
        return id(self.x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.x is other.x


def _hashable(x: Any) -> Any:
    if isinstance(x, (float, np.floating)):
        return float(x).hex()  # 0.0 == -0.0, and NaN != NaN
    try:
        hash(x)
    except TypeError:
        return _ById(x)
    return x


def framed(
    ties: Ties, layout: Layout, leaves: list[Any], frozen: tuple[Path, ...]
) -> Frame:
    """The frame of this model: the one of the last call, if nothing in it changed."""
    last = layout.frames.get(frozen)
    if last is not None:
        same = all(leaves[i] is x for i, x in last.constants)
        if same and all(is_numeric(leaves[i]) for i in last.arrays):
            return last
    still = set(frozen)
    numbered = list(enumerate(layout.names))
    frame = Frame(
        ties,
        frozen,
        layout,
        tuple(i for i, name in numbered if name not in still),
        tuple(i for i, name in numbered if name in still),
        tuple(i for i in layout.rest if is_numeric(leaves[i])),
        tuple((i, leaves[i]) for i in layout.rest if not is_numeric(leaves[i])),
    )
    layout.frames[frozen] = frame
    return frame
