"""A state changed in the middle of a run: adjusted, frozen, thawed."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding

from optimjax.arrays import placed, placement
from optimjax.hyper import ByPath, Hyper, PerPath, canonical, is_schedule
from optimjax.leaf import skipping
from optimjax.nested import walk
from optimjax.paths import Path, Where, nearest, selector
from optimjax.rule import Rule
from optimjax.state import State, as_state
from optimjax.ties import Slot
from optimjax.training import as_data, as_scalar, never
from optimjax.treewide import PyTree

__all__ = ["adjust", "freeze", "thaw"]


def freeze(state: State, where: Where) -> State:
    """`state`, in which the slots at `where` take no step; what is kept stays kept.

    The array is frozen in all its places, if `where` names one of them. The parameter,
    its moments and its step count stay bit for bit as they are, it does not weigh in a
    global norm, and `make_step` computes no gradient for it.

    Args:
        where: a glob on paths, several, or a function of (path, slot).
    Raises: ValueError if `where` matches nothing.

    >>> import optimjax as oj
    >>> state = oj.setup(oj.SGD(0.1), {"body": jnp.ones(2), "head": jnp.ones(2)})
    >>> oj.freeze(state, "body").frozen
    ('body',)
    """
    found = select(state, where, "freeze")
    frozen = tuple(sorted({*state.frozen, *found}))
    inner = skipping(state.inner, found)
    return dataclasses.replace(state, inner=inner, frozen=frozen)


def thaw(state: State, where: Where = None) -> State:
    """`state`, in which the slots at `where` (None: all) are trained again.

    Their moments and step counts go on from where they stopped. The slots of a `Frozen`
    rule stay as they are.

    Raises: ValueError if `where` matches nothing.

    >>> import optimjax as oj
    >>> state = oj.setup(oj.SGD(0.1), {"body": jnp.ones(2), "head": jnp.ones(2)})
    >>> oj.thaw(oj.freeze(state, "body")).frozen
    ()
    """
    found = select(state, where, "thaw")
    thawed = set(found).difference(never(state.rule, state.inner, state.ties.names))
    frozen = tuple(path for path in state.frozen if path not in thawed)
    return dataclasses.replace(state, frozen=frozen)


def select(state: State, where: Where, function: str) -> list[Path]:
    """The slots of which `where` names a place.

    A function is called with (path, slot); a slot has a name, a shape and a dtype.
    """
    as_state(state, function)
    slot_of = {p.path: slot.name for slot in state.ties.slots for p in slot.places}
    wanted = selector(where, function, slot_of)

    def takes(slot: Slot) -> bool:
        return any(wanted(place.path, slot) for place in slot.places)

    found = [slot.name for slot in state.ties.slots if takes(slot)]
    if not found:
        hint = nearest(where if isinstance(where, str) else "", slot_of)
        raise ValueError(f"{function}: where={where!r} matches no slot.{hint}")
    return found


def adjust(state: State, where: Where = None, **changes: Hyper) -> State:
    """`state` with other hyperparameters; nothing else is touched.

    Where rules are nested, every rule that has a hyperparameter of that name and acts
    on a slot at `where` takes the value. A new value compiles nothing; a new grouping
    of slots, or another schedule function, compiles once. To change it in rules of one
    class alone, write that before the name, as `hyperparams` does:
    `adjust(state, **{"EMA.decay": 0.99})`.

    Args:
        where: a glob on paths, several, or a function of (path, slot); None for all.
        **changes: the new values by name: a number, an array, a schedule, a dict
            {glob: value}.
    Raises:
        TypeError: no rule has a hyperparameter of that name, or none may change it.
        ValueError: a value out of its range; `where` matches nothing.

    >>> import optimjax as oj
    >>> state = oj.setup(oj.Adam(1e-3), {"body": jnp.ones(2), "head": jnp.ones(2)})
    >>> state = oj.adjust(state, where="head", learning_rate=0.01)
    >>> state.rule
    Adam(learning_rate={'body': 0.001, 'head': 0.01}, b1=0.9, ...)
    """
    chosen = set(select(state, where, "adjust"))
    places = {
        slot.name: {place.path: slot for place in slot.places}
        for slot in state.ties.slots
        if slot.name in chosen
    }
    for name, value in changes.items():
        if isinstance(value, (Mapping, ByPath)):
            value = canonical(value, f"adjust: {name}")
            changes[name] = value.bind(places, f"adjust: {name}")
    place = placement(jax.tree.leaves(state.inner))
    used: set[str] = set()
    settled: dict[str, str] = {}

    def change(rule: Rule, inner: PyTree, slots: list[Path]) -> Rule:
        mine = [path for path in slots if path in chosen]
        parts = rule.parts(inner, slots)
        if parts:
            rule = rule.with_parts([change(*part) for part in parts])
        known = rule.hypers()
        fields = {}
        for full, value in changes.items():
            owner, _, name = full.rpartition(".")
            wanted = name in known and owner in ("", type(rule).__name__)
            if wanted and name in rule.settled:
                settled[full] = f"{type(rule).__name__}: {rule.settled[name]}"
            elif wanted and mine:
                used.add(full)
                value = rule.checked(name, value, "adjust: ")
                new = _merged(known[name], value, slots, mine)
                value = _filled(new, rule, place)
                owner = f"adjust: {type(rule).__name__}"
                fields[name] = rule.unless_by_path(name, value, owner)
        return rule.with_fields(**fields)

    rule = change(state.rule, state.inner, list(state.ties.names))
    unknown = [name for name in changes if name not in used]
    if unknown and unknown[0] in settled:
        raise TypeError(f"adjust: {unknown[0]!r} cannot change. {settled[unknown[0]]}.")
    if unknown:
        found = {
            (name, type(inner).__name__)
            for inner, _, slots in walk(state.rule, state.inner, list(state.ties.names))
            if chosen.intersection(slots)
            for name in inner.hypers()
        }
        owners = Counter(name for name, _ in found)
        known = [*sorted(owners)]
        known += sorted(f"{o}.{name}" for name, o in found if owners[name] > 1)
        raise TypeError(
            f"adjust: {where or '*'!r}: no rule there has "
            f"{', '.join(map(repr, unknown))}, expected "
            f"{', '.join(known) or 'nothing: it has no numbers'}. "
            "Structure (and a hyperparameter that is None) is fixed by setup."
        )
    return dataclasses.replace(state, rule=rule)


class Refill(NamedTuple):
    """A new value (or the old one again, for a group of slots that parts) and the old,
    whose shape and place it takes."""

    new: Any
    old: Any


def _merged(old: Any, new: Any, slots: list[Path], chosen: list[Path]) -> Any:
    """`old` with `new` for the chosen slots: slots that agree share one value."""
    if chosen == slots and not isinstance(old, ByPath) and not isinstance(new, ByPath):
        return Refill(new, old)

    def group(hyper: Any, path: Path) -> int:
        return hyper.pick.source[path] if isinstance(hyper, ByPath) else 0

    def value(hyper: Any, path: Path) -> Any:
        return hyper.values[group(hyper, path)] if isinstance(hyper, ByPath) else hyper

    values: list[Any] = []
    number: dict[Any, int] = {}
    index = {}
    taking = set(chosen)
    for path in slots:
        # Old groups stay apart even where they now agree: the structure, and so the
        # compiled program, is the same for the next change.
        taken = path in taking
        key = (taken, group(old, path), taken and group(new, path))
        if key not in number:
            number[key] = len(values)
            before = value(old, path)
            values.append(Refill(value(new, path) if taken else before, before))
        index[path] = number[key]
    return ByPath(values, PerPath(index))


def _filled(refill: Any, rule: Rule, place: Sharding | None) -> Any:
    """The values of `_merged` as arrays, each in a buffer of its own."""
    if isinstance(refill, ByPath):
        return refill.map(lambda each: _filled(each, rule, place))
    new, old = refill

    def scalar(x: Any) -> Array:
        swept = np.ndim(x) and np.shape(x) == np.shape(old)  # one value a run, by vmap
        return jnp.asarray(x) if swept else as_scalar(x, "adjust", rule)

    if is_schedule(new):
        return as_data(new, "adjust", rule, place)
    shape = () if is_schedule(old) else np.shape(old)
    return placed(jnp.broadcast_to(scalar(new), shape), place)
