"""A state as a person reads it: a tree, a table, its hyperparameters."""

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from optimjax.arrays import is_traced
from optimjax.axes import Axes
from optimjax.hyper import ByPath, evaluate
from optimjax.leaf import LeafState
from optimjax.nested import walk
from optimjax.paths import Path, Slots
from optimjax.rule import Rule
from optimjax.ties import Ties, through
from optimjax.treewide import Count

if TYPE_CHECKING:  # a state shows itself by means of this module
    from optimjax.state import State

__all__ = ["hyperparams", "summary"]

SHORT = {"float": "f", "bfloat": "bf", "complex": "c", "uint": "u", "int": "i"}
MOST_LINES = 60


def spec(x: Any) -> str:
    """An array as `f32[3,4]`; a state can hold anything, while JAX maps over it."""
    if not hasattr(x, "dtype"):
        return type(x).__name__
    name = jnp.result_type(x).name
    word = name.rstrip("0123456789")
    return (
        f"{SHORT.get(word, word)}{name[len(word) :]}[{','.join(map(str, np.shape(x)))}]"
    )


def sized(count: float) -> str:
    """A number of bytes as `1.5 MB` (powers of 1,000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")


def nbytes(tree: Any) -> int:
    arrays = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def _ties(state: "State", function: str) -> Ties:
    ties = getattr(state, "ties", None)
    if not isinstance(ties, Ties):
        raise TypeError(
            f"{function}: state is a {type(state).__name__}, expected the State that "
            "setup returns."
        )
    return ties


def _acting(state: "State") -> dict[Path, list[tuple[Rule, Any]]]:
    """For each slot the rules with something of their own to do there, with state."""
    names = list(_ties(state, "summary").names)
    acting: dict[Path, list[tuple[Rule, Any]]] = {name: [] for name in names}
    for rule, inner, slots in walk(state.rule, state.inner, names):
        if isinstance(inner, LeafState) or "rule" not in rule._kinds.values():
            for path in slots:
                acting[path].append((rule, inner))
    return acting


def _choices(rule: Rule, path: Path) -> list[str]:
    """What a rule does at a slot otherwise than at most, by its choices by path."""
    return [
        f"{name}={chosen}"
        for name, chosen in rule.choices(path, None).items()
        if rule._kinds[name] != "hyper" and chosen not in (True, Axes())
    ]


def _kept(inner: Any, path: Path) -> Any:
    return inner.slots[path] if isinstance(inner, LeafState) else None


def hyperparams(state: "State") -> Slots:
    """{path: {name: value}}: the hyperparameters at each place, schedules evaluated.

    Values are those of the step that was taken last, or of the first if none was. Where
    two rules have a hyperparameter of one name, it is written `Adam.learning_rate`.

    >>> import optimjax as oj
    >>> rule = oj.SGD(learning_rate=lambda count: 0.5 / (count + 1))
    >>> model = {"w": jnp.ones(2)}
    >>> state = oj.setup(rule, model)
    >>> for _ in range(2):
    ...     state, model = oj.update(state, model, {"w": jnp.ones(2)})
    >>> hyperparams(state)["w"]["learning_rate"]
    Array(0.25, dtype=float32)
    """
    names = list(_ties(state, "hyperparams").names)
    found: dict[Path, list[tuple[str, str, Any]]] = {name: [] for name in names}
    for rule, inner, slots in walk(state.rule, state.inner, names):
        last = jnp.maximum(inner.count - 1, 0) if isinstance(inner, Count) else 0
        for name, hyper in rule.hypers().items():
            value = evaluate(hyper, last)
            for path in slots:
                here = value
                if isinstance(value, ByPath):
                    here = value.at(path, None, type(rule).__name__)
                found[path].append((type(rule).__name__, name, here))
    result = Slots()
    for slot in state.ties.slots:
        entries = found[slot.name]
        names = [name for _, name, _ in entries]
        values = {
            name if names.count(name) == 1 else f"{rule}.{name}": value
            for rule, name, value in entries
        }
        result.update((place.path, values) for place in slot.places)
    return result


def summary(state: "State") -> str:
    """A table for `print`: slot, shape, dtype, rule, bytes of state, ties, frozen.

    What a rule does by path in another way than usual is among the notes, such as
    `decay_where=False` for a slot that does not decay.

    >>> import optimjax as oj
    >>> w = jnp.ones((2, 3))
    >>> state = oj.setup(oj.Adam(), {"encoder": w, "decoder": w, "bias": jnp.ones(3)})
    >>> print(summary(oj.freeze(state, "bias")))
    slot     shape   dtype    rule  state  notes
    bias     (3,)    float32  Adam   24 B  frozen
    decoder  (2, 3)  float32  Adam   48 B  = encoder
    2 slots for 3 places, 6 numbers trained, state 80 B
    """
    acting = _acting(state)
    rows = [("slot", "shape", "dtype", "rule", "state", "notes")]
    for slot in state.ties.slots:
        rules = acting[slot.name]
        kept = [_kept(inner, slot.name) for _, inner in rules]
        notes = [f"= {_tied(place, slot.name)}" for place in slot.places[1:]]
        if slot.name in state.frozen:
            notes.append("frozen")
        notes += [note for rule, _ in rules for note in _choices(rule, slot.name)]
        rows.append(
            (
                slot.name or "(the model)",
                str(slot.shape),
                slot.dtype,
                ", ".join(type(rule).__name__ for rule, _ in rules),
                sized(nbytes(kept)),
                ", ".join(notes),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i == 4 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    places = sum(len(slot.places) for slot in state.ties.slots)
    numbers = sum(
        math.prod(slot.shape)
        for slot in state.ties.slots
        if slot.name not in state.frozen
    )
    lines.append(
        f"{plural(len(state.ties.slots), 'slot')} for {plural(places, 'place')}, "
        f"{numbers:,} numbers trained, state {sized(nbytes(state.inner))}"
    )
    return "\n".join(lines)


def _tied(place: Any, name: Path) -> str:
    """Another place of slot `name`, and how its array comes from the slot's."""
    if place.transform is None:
        return place.path
    return f"{place.path} by {through(place.transform, name)}"


def tree(state: "State") -> str:
    """The state as an indented tree, shaped like the model."""
    acting = _acting(state)
    counts = [i.count for r in acting.values() for _, i in r if isinstance(i, Count)]
    lines = [f"State of {state.rule!r}", f"updates: {_number(counts)}"]
    above: list[str] = []
    for slot in state.ties.slots:
        *branch, name = slot.name.split("/")
        shared = 0
        while shared < min(len(branch), len(above)) and branch[shared] == above[shared]:
            shared += 1
        lines += [f"{'  ' * i}{part}" for i, part in enumerate(branch)][shared:]
        above = branch
        parts = [f"{slot.dtype}{list(slot.shape)}"]
        for rule, inner in acting[slot.name]:
            kept = _kept(inner, slot.name)
            keyed, _ = jax.tree_util.tree_flatten_with_path(kept)
            held = [
                f"{jax.tree_util.keystr(keys, simple=True, separator='/')} {spec(x)}"
                for keys, x in keyed
            ]
            own = getattr(inner, "own", {}).get(slot.name)
            if own is not None:
                held.append(f"own steps: {_number([own])}")
            parts.append(" ".join([type(rule).__name__, ", ".join(held)]).strip())
        parts += [f"= {_tied(place, slot.name)}" for place in slot.places[1:]]
        if slot.name in state.frozen:
            parts.append("frozen")
        lines.append(
            f"{'  ' * len(branch)}{name or '(the model)'}: {' | '.join(parts)}"
        )
    if len(lines) > MOST_LINES:
        left = len(lines) - MOST_LINES
        lines[MOST_LINES:] = [f"... {left} more lines; summary(state) has them all"]
    return "\n".join(lines)


def _number(counts: list[Any]) -> str:
    """A count as text, if it has a value: not while it is traced, swept or deleted."""
    for count in counts[:1]:
        if isinstance(count, jax.Array) and count.ndim == 0 and not is_traced(count):
            return "deleted" if count.is_deleted() else str(int(count))
    return "unknown"
