"""A state carried over to a model, or a rule, that has changed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax import Array

from optimjax.arrays import cast_like
from optimjax.finding import TiesArg, find_ties
from optimjax.hyper import ByPath, PerPath
from optimjax.leaf import own_counts, skipping
from optimjax.nested import walk
from optimjax.paths import Path, Where, by_words, complain, nearest, parts
from optimjax.rule import Rule, is_rule
from optimjax.state import State, as_state
from optimjax.ties import Ties
from optimjax.training import setup
from optimjax.treewide import PyTree

__all__ = ["Transferred", "transfer"]


@dataclasses.dataclass(frozen=True)
class Transferred:
    """What became of each slot, by name; `print` it.

    Attributes:
        kept: all that was kept for it is as it was.
        resized: kept where old and new array overlap, fresh elsewhere.
        new: starts fresh, with a step count of its own.
        dropped: no longer there; names of the old state.
    """

    kept: tuple[Path, ...]
    resized: tuple[Path, ...]
    new: tuple[Path, ...]
    dropped: tuple[Path, ...]

    def __str__(self) -> str:
        return "\n".join(
            f"{word}: {', '.join(paths)}"
            for word, paths in dataclasses.asdict(self).items()
            if paths
        )


def transfer(
    state: State,
    model: PyTree,
    *,
    rule: Rule | None = None,
    renamed: Mapping[Path, Path] | None = None,
    ties: TiesArg = "identity",
    trainable: Where = None,
) -> tuple[State, Transferred]:
    """A state for another model, with all that was kept for the slots that stay.

    A slot that has the path of an old one goes on where that was: moments, its step
    count, whether it is frozen. An array that was resized (a vocabulary that has grown)
    keeps what is kept for the numbers that both have, in the leading corner; that of
    the others is fresh. A slot that is new starts from nothing, at step 1. With another
    `rule` what is kept by the rules of the same class stays, so that a clip can be put
    before an Adam, or AdamW in its place, in the middle of a run. A rule that has no
    old one of its kind starts at count 0.

    Args:
        state: of the old model.
        model: the new one.
        rule: another rule; None for the same, with the numbers that it has now. Where
            those, or its choices, differ by path, there is none for a new path: then
            give the rule.
        renamed: `{new path: old path}`, of leaves or branches.
        ties, trainable: as for `setup`.
    Returns: the new state, and what became of each slot.
    Raises: ValueError for a path in `renamed` that does not exist, and for a new slot
        without a number or a choice.

    >>> import jax.numpy as jnp
    >>> import optimjax as oj
    >>> old = {"embed": jnp.ones((3, 2)), "out": jnp.ones(2)}
    >>> state = oj.setup(oj.SGD(0.1, momentum=0.9), old)
    >>> state, old = oj.update(state, old, old)
    >>> new = {"embed": jnp.ones((4, 2)), "head": old["out"], "bias": jnp.zeros(2)}
    >>> state, report = transfer(state, new, renamed={"head": "out"})
    >>> print(report)
    kept: head
    resized: embed
    new: bias
    >>> state.slots["embed"].v[2:]
    Array([[1., 1.], [0., 0.]], dtype=float32)
    """
    as_state(state, "transfer")
    found = find_ties(model, ties, trainable, "transfer")
    old_of = _origins(state, found, renamed or {})
    if rule is None:
        rule = _rebased(state.rule, old_of, found.names)
    target = setup(rule, model, ties=found)
    shapes = {slot.name: slot.shape for slot in state.ties.slots}
    resized = {
        slot.name
        for slot in found.slots
        if slot.name in old_of and slot.shape != shapes[old_of[slot.name]]
    }
    new = [name for name in found.names if name not in old_of]
    frozen = {name for name, old in old_of.items() if old in state.frozen}
    # All that is new or frozen counts alone, and so does what did so before.
    counting = {words[-1] for words in own_counts(state.inner)}
    shared = {name for name, old in old_of.items() if old not in counting} - frozen
    alone = [name for name in found.names if name not in shared]
    inner = _filled(skipping(target.inner, alone), target, state, old_of)
    result = dataclasses.replace(
        target, inner=inner, frozen=tuple(sorted({*target.frozen, *frozen}))
    )
    taken = set(old_of.values())
    return result, Transferred(
        kept=tuple(n for n in found.names if n in old_of and n not in resized),
        resized=tuple(n for n in found.names if n in resized),
        new=tuple(new),
        dropped=tuple(n for n in state.ties.names if n not in taken),
    )


def _origins(
    state: State, found: Ties, renamed: Mapping[Path, Path]
) -> dict[Path, Path]:
    """{slot: the old slot that it goes on from}, for those that there were."""
    slot_of = {p.path: slot.name for slot in state.ties.slots for p in slot.places}
    used: set[Path] = set()
    nearest_first = sorted(renamed.items(), key=lambda pair: -len(pair[0]))

    def before(path: Path) -> Path:
        for new, old in nearest_first:
            if path == new or path.startswith(f"{new}/"):
                used.add(new)
                return old + path[len(new) :]
        return path

    origins: dict[Path, Path] = {}
    taken: set[Path] = set()
    for slot in found.slots:
        olds = [before(place.path) for place in slot.places]
        first = next((slot_of[old] for old in olds if old in slot_of), None)
        if first is not None and first not in taken:
            origins[slot.name] = first
            taken.add(first)
    problems = {
        new: "renamed= names it, but there is no such slot in the new model"
        for new in renamed
        if new not in used
    }
    problems |= {
        old: "renamed= names it, but there was no such slot"
        for old in renamed.values()
        if not any(path == old or path.startswith(f"{old}/") for path in slot_of)
    }
    if problems:
        hint = nearest(next(iter(problems)), slot_of)
        raise ValueError(complain("transfer", problems) + hint)
    return origins


def _rebased(rule: Rule, old_of: Mapping[Path, Path], names: tuple[Path, ...]) -> Rule:
    """A bound rule with its choices by path written for the new slots."""

    def table(owner: str, pick: PerPath) -> PerPath:
        options = list(dict.fromkeys(pick.source.values()))
        new, problems = {}, {}
        for name in names:
            if old_of.get(name) in pick.source:
                new[name] = pick.source[old_of[name]]
            elif name not in old_of and len(options) == 1:
                new[name] = options[0]
            elif name not in old_of:
                problems[name] = f"new, and {owner} differs by path"
        if problems:
            raise ValueError(
                complain("transfer", problems, "Give rule=, as for setup.")
            )
        return PerPath(new)

    def moved(value: Any, owner: str) -> Any:
        if isinstance(value, ByPath):
            return ByPath(value.values, table(owner, value.pick))
        if isinstance(value, PerPath):
            return table(owner, value)
        if is_rule(value):
            return _rebased(value, old_of, names)
        if isinstance(value, dict):
            return {key: moved(each, owner) for key, each in value.items()}
        if isinstance(value, tuple) and any(map(is_rule, value)):
            return tuple(moved(each, owner) for each in value)
        return value

    name = type(rule).__name__
    fields = {n: moved(x, f"the {n} of {name}") for n, x in vars(rule).items()}
    return rule.with_fields(**fields)


def _filled(
    template: PyTree, target: State, state: State, old_of: Mapping[Path, Path]
) -> PyTree:
    """The inner state of `target`, with what `state` kept at the same places."""
    old, moves = by_words(state.inner), _moves(target, state)
    shared = own_counts(template)
    names = set(target.ties.names)

    def fill(keys: Any, fresh: Array) -> Array:
        words = parts(keys)
        # A field or a label may be called like a slot; the slot is the innermost key.
        at = [i for i, k in enumerate(keys) if getattr(k, "key", None) in names][-1:]
        if at and words[at[0]] not in old_of:
            return fresh
        # Of the rules around it the innermost, whose state this is.
        around = [n for n in range(len(words) + 1) if words[:n] in moves]
        above = moves[words[: around[-1]]] if around else None
        if above is None:
            return fresh
        here = [old_of[word] if [i] == at else word for i, word in enumerate(words)]
        places = [(*above, *here[around[-1] :])]
        places += [(*above, *other[around[-1] :]) for other in shared.get(words, ())]
        value = next((old[place] for place in places if place in old), None)
        return fresh if value is None else _overlaid(fresh, value)

    return jax.tree_util.tree_map_with_path(fill, template)


def _moves(
    target: State, state: State
) -> dict[tuple[str, ...], tuple[str, ...] | None]:
    """Where the state of each rule stands, and stood (None: nowhere): rules of one
    class, in order."""

    def standing(state: State) -> list[tuple[type[Rule], tuple[str, ...]]]:
        found = []
        for rule, own, _ in walk(state.rule, state.inner, list(state.ties.names)):
            keyed, _ = jax.tree_util.tree_flatten_with_path(
                state.inner, is_leaf=lambda node, own=own: node is own
            )
            at = next((parts(keys) for keys, node in keyed if node is own), None)
            if at is not None:
                found.append((type(rule), at))
        return found

    before, moves = standing(state), {}
    for cls, at in standing(target):
        # Of one class; or of one that derives from the other, as AdamW from Adam.
        kin = [p for p in before if issubclass(p[0], cls) or issubclass(cls, p[0])]
        match = next((pair for pair in kin if pair[0] is cls), kin[0] if kin else None)
        if match is not None:
            before.remove(match)
        moves[at] = match and match[1]
    return moves


def _overlaid(fresh: Array, value: Array) -> Array:
    """`value` in place of `fresh`; where shapes differ, in the corner they share."""
    if fresh.shape == value.shape:
        return cast_like(value, fresh)
    if fresh.ndim != value.ndim:
        return fresh
    both = zip(fresh.shape, value.shape, strict=True)
    corner = tuple(slice(min(a, b)) for a, b in both)
    return fresh.at[corner].set(cast_like(value[corner], fresh))
