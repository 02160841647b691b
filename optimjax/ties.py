"""Which leaves of a model are one array: slots, their places, and what they share."""

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jax

from optimjax.arrays import buffer, is_inexact, is_traced
from optimjax.layout import Layout, Structure, Transform
from optimjax.paths import Path, complain, nearest, spell, with_paths

__all__ = ["Place", "Slot", "Ties"]

MOST_LAYOUTS = 32
NOT_THE_MODEL = (
    "This is not the model that setup saw. The order is (state, model, ...). Give the "
    "model that the state was made for, or call setup again."
)


class Place(NamedTuple):
    """Where a slot's array stands in the model, as it is or through a `transform`."""

    path: Path
    transform: Transform | None = None


class Slot(NamedTuple):
    """One array being optimised.

    Attributes:
        name: path of the first place that holds the array as it is.
        places: all places, that one first.
        shape: shape of the array.
        dtype: name of its dtype.
    """

    name: Path
    places: tuple[Place, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Ties:
    """Which leaf of a model belongs to which slot: static, hashable, printable.

    Attributes:
        slots: the arrays being optimised, in the order of the model.
        others: paths of the floating arrays that `trainable=` left out.
        seen: whether the arrays were concrete, so that shared ones could be found.
    """

    slots: tuple[Slot, ...]
    others: tuple[Path, ...]
    seen: bool

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        # Not `seen`: a state made inside a jit, or of shapes, has the same structure.
        return self.slots, self.others

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    @cached_property
    def _layouts(self) -> dict[Structure, Layout]:
        return {}  # a memo: what is computed from `self` and a tree's structure alone

    @cached_property
    def names(self) -> tuple[Path, ...]:
        """The name of each slot."""
        return tuple(slot.name for slot in self.slots)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Ties) or self._hash != other._hash:
            return False
        return self._key == other._key

    def __reduce__(self) -> Any:
        return Ties, (self.slots, self.others, self.seen)  # hashes differ by process

    def __str__(self) -> str:
        lines = [
            f"{place.path} is {through(place.transform, slot.name)}"
            for slot in self.slots
            for place in slot.places[1:]
        ]
        return "\n".join(lines) or "no ties"

    def take_apart(self, function: str, model: Any) -> tuple[Layout, list[Any]]:
        """The leaves of a model, and where the slots stand among them.

        Raises: ValueError if the model has other paths than the one that `setup` saw.
        """
        leaves, structure = jax.tree.flatten(model)
        layout = self._layouts.get(structure)
        if layout is None:
            if len(self._layouts) >= MOST_LAYOUTS:  # a structure that never stays
                self._layouts.clear()
            layout = self._layouts[structure] = self._find(function, model, structure)
        strange = [i for i in layout.untrained if is_inexact(leaves[i])]
        if strange:
            what = "an array that setup did not see"
            problems = {layout.paths[i]: what for i in strange}
            raise ValueError(complain(function, problems, NOT_THE_MODEL))
        return layout, leaves

    def _find(self, function: str, model: Any, structure: Structure) -> Layout:
        keyed, _ = jax.tree_util.tree_flatten_with_path(model)
        paths = spell([keys for keys, _ in keyed])
        index = {path: i for i, path in enumerate(paths)}
        problems = {
            place.path: "no such leaf in this model"
            for slot in self.slots
            for place in slot.places
            if place.path not in index
        }
        if problems:
            hint = nearest(next(iter(problems)), paths)
            raise ValueError(complain(function, problems, NOT_THE_MODEL) + hint)
        positions = tuple(
            tuple((index[place.path], place.transform) for place in slot.places)
            for slot in self.slots
        )
        taken = {i for slot in positions for i, _ in slot}
        rest = tuple(i for i in range(len(paths)) if i not in taken)
        others = {index[path] for path in self.others if path in index}
        untrained = tuple(i for i in rest if i not in others)
        return Layout(self.names, structure, tuple(paths), positions, rest, untrained)

    def confirmed(self, function: str, model: Any) -> "Ties":
        """These ties, checked against concrete arrays if `setup` could not see any.

        Raises: ValueError if leaves of `model` are one array but have a slot each.
        """
        if self.seen:
            return self
        named = with_paths(model)
        places = [place.path for slot in self.slots for place in slot.places]
        if any(is_traced(named[path]) for path in places if path in named):
            return self
        slot_of = {p.path: slot.name for slot in self.slots for p in slot.places}
        problems = {
            path: f"the same array as {group[0]!r}, but trained as another one"
            for group in shared({p: named[p] for p in places if p in named})
            for path in group[1:]
            if slot_of[path] != slot_of[group[0]]
        }
        if problems:
            raise ValueError(
                complain(function, problems)
                + " setup ran inside a jit, where shared arrays cannot be seen: call "
                "it outside, or declare them with ties={...}."
            )
        return dataclasses.replace(self, seen=True)


def through(transform: Transform | None, name: Path) -> str:
    if transform is None:
        return name
    return f"{name_of(transform)}({name})"


def name_of(transform: Transform) -> str:
    return getattr(transform, "__name__", repr(transform))


def shared(leaves: Mapping[Path, Any]) -> list[list[Path]]:
    """The groups of two or more paths whose leaves are one array."""
    objects: dict[int, list[Path]] = {}
    for path, leaf in leaves.items():
        objects.setdefault(id(leaf), []).append(path)
    buffers: dict[Any, list[Path]] = {}
    for paths in objects.values():
        leaf = leaves[paths[0]]
        where = buffer(leaf)
        key = id(leaf) if where is None else (where, leaf.shape, leaf.dtype)
        # One first shard is a hint, not a proof: arrays over several devices can share
        # it and differ elsewhere.
        while key in buffers and not _same_buffers(leaf, leaves[buffers[key][0]]):
            key = (key, "next")
        buffers.setdefault(key, []).extend(paths)
    order = {path: i for i, path in enumerate(leaves)}
    return [sorted(g, key=order.__getitem__) for g in buffers.values() if len(g) > 1]


def _same_buffers(a: Any, b: Any) -> bool:
    if not a.sharding.is_equivalent_to(b.sharding, a.ndim):
        return False
    shards = zip(a.addressable_shards, b.addressable_shards, strict=True)
    return all(
        x.data.unsafe_buffer_pointer() == y.data.unsafe_buffer_pointer()
        for x, y in shards
    )
