"""A state changed in the middle of a run: adjusted, frozen, thawed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from optimjax.arrays import is_traced, real_dtype
from optimjax.hyper import ByPath, Hyper, PerPath, is_schedule
from optimjax.paths import Path, Where, nearest, selector
from optimjax.rule import PyTree, Rule, walk
from optimjax.ties import Slot, Ties
from optimjax.training import State, as_state, skipping

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
    return dataclasses.replace(skipping(state, found), frozen=frozen)


def thaw(state: State, where: Where = None) -> State:
    """`state`, in which the slots at `where` (None: all) are trained again.

    Their moments and step counts go on from where they stopped.

    Raises: ValueError if `where` matches nothing.

    >>> import optimjax as oj
    >>> state = oj.setup(oj.SGD(0.1), {"body": jnp.ones(2), "head": jnp.ones(2)})
    >>> oj.thaw(oj.freeze(state, "body")).frozen
    ()
    """
    found = select(state, where, "thaw")
    thawed = set(found)
    frozen = tuple(path for path in state.frozen if path not in thawed)
    return dataclasses.replace(state, frozen=frozen)


def select(state: State, where: Where, function: str) -> list[Path]:
    """The slots of which `where` names a place.

    A function is called with (path, slot); a slot has a name, a shape and a dtype.
    """
    as_state(state, function)
    slot_of = {p.path: slot.name for slot in state.ties.slots for p in slot.places}
    if isinstance(where, (list, tuple, set, frozenset)):  # each of them must be found
        names = {slot_of[path] for path in where if path in slot_of}
        for glob in where:
            names.update(() if glob in slot_of else select(state, glob, function))
        return [name for name in state.ties.names if name in names]
    wanted = selector(where, function, slot_of)

    def takes(slot: Slot) -> bool:
        return any(wanted(place.path, slot) for place in slot.places)

    found = [slot.name for slot in state.ties.slots if takes(slot)]
    if not found:
        hint = nearest(where if isinstance(where, str) else "", slot_of)
        raise ValueError(f"{function}: where={where!r} matches no slot.{hint}")
    return found


def adjust(state: State, where: Where = None, **changes: Hyper) -> State:
    """`state` with other hyperparameters; nothing else is touched or compiled again.

    Where rules are nested, every rule that has a hyperparameter of that name and acts
    on a slot at `where` takes the value. A first change for some slots only makes the
    hyperparameter one that differs by path, which compiles once more.

    Args:
        where: a glob on paths, several, or a function of (path, slot); None for all.
        **changes: the new values by name: a number, an array, a schedule, a dict
            {glob: value}.
    Raises:
        TypeError: no rule has a hyperparameter of that name.
        ValueError: a value out of its range; `where` matches nothing.

    >>> import optimjax as oj
    >>> state = oj.setup(oj.Adam(1e-3), {"body": jnp.ones(2), "head": jnp.ones(2)})
    >>> state = oj.adjust(state, where="head", learning_rate=0.01)
    >>> state.rule
    Adam(learning_rate={'body': 0.001, 'head': 0.01}, b1=0.9, ...)
    """
    chosen = set(select(state, where, "adjust"))
    used: set[str] = set()

    def change(rule: Rule, inner: PyTree, slots: list[Path]) -> Rule:
        mine = [path for path in slots if path in chosen]
        parts = rule.parts(inner, slots)
        if parts:
            rule = rule.with_parts([change(*part) for part in parts])
        known = rule.hypers()
        fields = {}
        for name, value in changes.items():
            if name in known and mine:
                value = rule.checked(name, value, "adjust: ")
                if isinstance(value, ByPath):
                    places = _slot_places(state.ties, mine)
                    value = value.bind(places, f"adjust: {name}")
                value = _merged(known[name], value, slots, mine)
                owner = f"adjust: {type(rule).__name__}"
                fields[name] = rule.unless_by_path(name, value, owner)
        used.update(fields)
        return rule.with_fields(**fields)

    rule = change(state.rule, state.inner, list(state.ties.names))
    unknown = [name for name in changes if name not in used]
    if unknown:
        known = {
            name
            for inner, _, slots in walk(state.rule, state.inner, list(state.ties.names))
            if chosen.intersection(slots)
            for name in inner.hypers()
        }
        raise TypeError(
            f"adjust: {where or '*'!r}: no rule there has "
            f"{', '.join(map(repr, unknown))}, expected "
            f"{' or '.join(sorted(known)) or 'nothing: it has no numbers'}. "
            "Structure (and a hyperparameter that is None) is fixed by setup."
        )
    return dataclasses.replace(state, rule=rule)


def _slot_places(ties: Ties, slots: list[Path]) -> dict[Path, dict[Path, Any]]:
    wanted = set(slots)
    return {
        slot.name: {place.path: slot for place in slot.places}
        for slot in ties.slots
        if slot.name in wanted
    }


def _merged(old: Any, new: Any, slots: list[Path], chosen: list[Path]) -> Any:
    """`old` with `new` for the chosen slots: slots that agree share one value."""
    if chosen == slots and not isinstance(old, ByPath) and not isinstance(new, ByPath):
        return _refilled(old, new)

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
            values.append(_refilled(before, value(new, path) if taken else before))
        index[path] = number[key]
    return ByPath(values, PerPath(index))


def _refilled(old: Any, new: Any) -> Any:
    """The value `new` with the dtype, shape and placement of the array `old`."""
    if is_schedule(new):
        return jax.tree.map(lambda x: jnp.array(x, copy=True), new)
    if is_schedule(old):
        return jnp.array(new, real_dtype(), copy=True)
    # A copy: the old state may be donated while the new one lives on.
    new = jnp.broadcast_to(jnp.asarray(new, old.dtype), old.shape)
    array = jnp.array(new, copy=True)
    if is_traced(old) or is_traced(array):
        return array
    return jax.device_put(array, old.sharding) if old.committed else array
