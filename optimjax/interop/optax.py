"""optax, both ways: rules as its transformations, its transformations as rules."""

import dataclasses
import itertools
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from optimjax.arrays import cast_like, is_inexact, widen
from optimjax.finding import TiesArg
from optimjax.leaf import LeafState
from optimjax.nested import walk
from optimjax.paths import Path, Slots, Where, complain, with_paths
from optimjax.rule import Rule, rule
from optimjax.rules.adagrad import RMSProp
from optimjax.rules.adam import Adam
from optimjax.rules.sgd import SGD
from optimjax.rules.sign import Lion
from optimjax.state import State, as_state
from optimjax.training import move, setup
from optimjax.treewide import Count, PyTree, spread, steps_like

__all__ = ["from_optax", "state_from_optax", "state_to_optax", "to_optax"]


def to_optax(
    rule: Rule, *, ties: TiesArg = "identity", trainable: Where = None
) -> optax.GradientTransformationExtraArgs:
    """A rule as an optax transformation, for what wants one.

    It is the whole of an optimiser, learning rate and sign included: in an
    `optax.chain` it comes last. `update` needs `params`. Leaves that are one array when
    `init` sees them get one slot and equal updates; what `init` cannot see (a model
    that passes through a `jit`, say) is declared.

    Args:
        rule: the rule.
        ties, trainable: as for `setup`.
    Returns: the transformation. Its state is a `State`, so that `adjust`, `freeze` and
        `summary` take it.

    >>> import optax, optimjax as oj
    >>> params = {"w": jnp.array([1.0, 2.0])}
    >>> tx = optax.chain(optax.clip(0.5), to_optax(oj.SGD(0.1)))
    >>> opt_state = tx.init(params)
    >>> updates, opt_state = tx.update({"w": jnp.ones(2)}, opt_state, params)
    >>> optax.apply_updates(params, updates)
    {'w': Array([0.95, 1.95], dtype=float32)}
    """

    def init(params: PyTree) -> Any:
        # optax's partition gives a group nothing but placeholders, if it is empty.
        if not any(is_inexact(x) for x in jax.tree.leaves(params)):
            return optax.EmptyState()
        return setup(rule, _arrays(params), ties=ties, trainable=trainable)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        if isinstance(state, optax.EmptyState):
            return updates, state
        if params is None:
            raise ValueError(
                "to_optax: update was called without params, expected "
                "tx.update(grads, opt_state, params)."
            )
        state, layout, leaves, moved = move(
            state, _arrays(params), _arrays(updates), extra
        )
        new = jax.tree.leaves(layout.scatter(moved, leaves))
        made = [
            y - x if i in layout.trained else jnp.zeros_like(x)
            for i, (x, y) in enumerate(zip(leaves, new, strict=True))
        ]
        return layout.structure.unflatten(made), state

    return optax.GradientTransformationExtraArgs(init, update)


def _arrays(tree: PyTree) -> PyTree:
    """`tree` with arrays for Flax's Variables: `nnx.Optimizer` gives `init` the ones
    and `update` the others, and paths should not tell them apart."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    return (getattr(nnx, "as_pure", None) or nnx.pure)(tree)  # its new name, its old


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept(Count):
    """What `from_optax` keeps: `count`, the number of updates, and the optax state."""

    optax: PyTree


@rule
class FromOptax(Rule):
    """An optax transformation as a rule; `from_optax` makes it."""

    tx: Any

    def init(self, params: PyTree) -> Kept:
        wide = jax.tree.map(widen, with_paths(params))
        with jax.numpy_dtype_promotion("standard"):  # which optax relies upon
            return Kept(Count.zero().count, self.tx.init(wide))

    def apply(
        self, state: Kept, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Kept, PyTree]:
        given = spread(params, grads)
        if not jax.tree.leaves(given):
            return state, given
        wide = jax.tree.map(widen, with_paths(params))
        there = with_paths(given)
        # optax knows no missing gradients: it sees zeros, and what comes of them is
        # left out again, of the updates and of all that it keeps under that path.
        full = {path: there.get(path, jnp.zeros_like(x)) for path, x in wide.items()}
        context.setdefault("grad", full)
        with jax.numpy_dtype_promotion("standard"):
            updates, new = self.tx.update(full, state.optax, wide, **context)
        skipped = wide.keys() - there.keys()

        def settled(keys: Any, old: Any, now: Any) -> Any:
            words = {getattr(key, "key", None) for key in keys}
            return old if words & skipped else cast_like(jnp.asarray(now), old)

        kept = jax.tree_util.tree_map_with_path(settled, state.optax, new)
        steps = {p: None if p in skipped else -u for p, u in updates.items()}
        structure = jax.tree.structure(params)
        out = structure.unflatten([steps[path] for path in wide])
        return Kept(state.next().count, kept), steps_like(params, out)

    def __repr__(self) -> str:
        return "from_optax(...)"


def from_optax(tx: optax.GradientTransformation) -> Rule:
    """An optax transformation as a rule, with ties, missing gradients and freezing.

    It sees the slots as a dict from path to array, of at least float32: labels and
    masks for it are functions of that dict, or dicts of that form. `value`, `value_fn`
    and `grad` are passed on. Its numbers are constants of the compiled program, as they
    are in optax.

    Args:
        tx: any transformation. Its updates are added; the rule's steps are their
            negatives.
    Returns: a rule, for `setup`, `make_step`, `Chain` and the wrappers.

    >>> import optax, optimjax as oj
    >>> w = jnp.array([1.0, 2.0])
    >>> model = {"encoder": w, "decoder": w}
    >>> state = oj.setup(from_optax(optax.adam(0.1)), model)
    >>> grads = {"encoder": jnp.array([1.0, -1.0]), "decoder": None}
    >>> state, model = oj.update(state, model, grads)
    >>> model["decoder"]
    Array([0.9, 2.1], dtype=float32)
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"from_optax: a {type(tx).__name__}, expected an optax transformation."
        )
    return FromOptax(optax.with_extra_args_support(tx))


class Told(NamedTuple):
    """How one of our rules is written in optax: its states, and `{ours: theirs}`."""

    states: tuple[str, ...]
    fields: dict[str, str]


TOLD: dict[type[Rule], Told] = {
    Adam: Told(("ScaleByAdamState",), {"m": "mu", "v": "nu"}),
    SGD: Told(("TraceState",), {"v": "trace"}),
    Lion: Told(("ScaleByLionState",), {"m": "mu"}),
    RMSProp: Told(("ScaleByRmsState", "ScaleByRmsWithCountState"), {"v": "nu"}),
}
STATES = {name for told in TOLD.values() for name in told.states}
STATES.add("ScaleByScheduleState")


def state_to_optax(state: State, model: PyTree, opt_state: PyTree) -> PyTree:
    """An optax state that goes on where ours is.

    For Adam, AdamW, SGD with momentum, Lion, and RMSProp without momentum or centring:
    moments and counts are those of `state`, all else is as in `opt_state`. Each place
    of a tied array gets what its slot has.

    Args:
        state, model: ours.
        opt_state: what `init` of optax's rule of that name gives for parameters that
            have the paths of `model`.
    Returns: `opt_state` with other arrays.
    Raises: TypeError for another rule; ValueError if the two do not fit.

    >>> import optax, optimjax as oj
    >>> model = {"w": jnp.array([1.0, 2.0])}
    >>> state = oj.setup(oj.Lion(0.1), model)
    >>> state, model = oj.update(state, model, {"w": jnp.array([1.0, -1.0])})
    >>> state_to_optax(state, model, optax.lion(0.1).init(model))[0].mu["w"]
    Array([ 0.01, -0.01], dtype=float32)
    """
    ours: dict[str, dict[Path, Any]] = {}  # optax's state and field -> {place: array}
    for told, kept in _told(state, "state_to_optax"):
        for slot in state.ties.slots:
            if slot.name not in kept.slots:
                continue
            for own, theirs in told.fields.items():
                array = getattr(kept.slots[slot.name], own)
                for name, (path, transform) in itertools.product(
                    told.states, slot.places
                ):
                    here = array if transform is None else transform(array)
                    ours.setdefault(f"{name}.{theirs}", {})[path] = here
    filled: set[str] = set()
    # A wrapper may count calls, or batches: optax's counts are of the rule's own steps.
    walked = walk(state.rule, state.inner, list(state.ties.names))
    known = (kept.count for each, kept, _ in walked if isinstance(each, tuple(TOLD)))
    count = next(known, state.count)

    def fill(node: Any) -> Any:
        if type(node).__name__ not in STATES:
            return node
        fields: dict[str, Any] = {}
        for name in node._fields:
            old, field = getattr(node, name), f"{type(node).__name__}.{name}"
            if name == "count":
                fields[name] = cast_like(count, old)
            elif field in ours:
                filled.add(field)
                arrays = _fitting(with_paths(old), ours[field], "state_to_optax")
                fields[name] = jax.tree.structure(old).unflatten(arrays)
        return node._replace(**fields)

    new = jax.tree.map(fill, opt_state, is_leaf=_known)
    if ours and not filled:
        raise ValueError(
            f"state_to_optax: no {' or '.join(sorted(ours))} in opt_state. Give what "
            "init of optax's rule of the same name returns."
        )
    return new


def state_from_optax(state: State, opt_state: PyTree) -> State:
    """`state`, going on where an optax state is; `state_to_optax` the other way.

    Of the places of a tied array, which optax keeps apart, the first counts. Where
    optax counts no updates (SGD without a schedule) the count becomes 1.

    Args:
        state: from `setup`, for the same rule and a model with the same paths.
        opt_state: of optax's rule of that name.
    Raises: TypeError for another rule; ValueError if the two do not fit.

    >>> import optax, optimjax as oj
    >>> params, tx = {"w": jnp.array([1.0, 2.0])}, optax.sgd(0.1, momentum=0.9)
    >>> _, opt_state = tx.update({"w": jnp.array([1.0, -1.0])}, tx.init(params), params)
    >>> state = oj.setup(oj.SGD(0.1, momentum=0.9), params)
    >>> state_from_optax(state, opt_state).slots["w"].v
    Array([ 1., -1.], dtype=float32)
    """
    counts, theirs = [], {}  # and optax's state and field -> {path: array}
    for node in jax.tree.leaves(opt_state, is_leaf=_known):
        if type(node).__name__ in STATES:
            for name in node._fields:
                value = getattr(node, name)
                if name == "count":
                    counts.append(value)
                else:
                    field = f"{type(node).__name__}.{name}"
                    theirs.setdefault(field, {}).update(with_paths(value))
    # optax's sgd counts nothing, but our first step would take its velocity for empty.
    count = counts[0] if counts else 1
    new: dict[int, LeafState] = {}
    for told, kept in _told(state, "state_from_optax"):
        slots = Slots(kept.slots)
        for own, name in told.fields.items():
            fields = [f"{each}.{name}" for each in told.states]
            given = next((theirs[f] for f in fields if f in theirs), {})
            old = {path: getattr(slot, own) for path, slot in slots.items()}
            arrays = _fitting(old, given, "state_from_optax")
            for path, array in zip(old, arrays, strict=True):
                slots[path] = slots[path]._replace(**{own: array})
        new[id(kept)] = dataclasses.replace(kept, slots=slots)

    def counted(node: Any) -> Any:
        node = new.get(id(node), node)
        if not isinstance(node, Count):
            return node
        node = dataclasses.replace(node, count=jnp.asarray(count, jnp.int32))
        more = {"inner": filled(node.inner)} if hasattr(node, "inner") else {}
        if isinstance(node, LeafState):  # optax has one count for all
            more["own"] = Slots((p, jnp.array(count, jnp.int32)) for p in node.own)
        return dataclasses.replace(node, **more)

    def filled(tree: PyTree) -> PyTree:
        return jax.tree.map(counted, tree, is_leaf=lambda x: isinstance(x, Count))

    return dataclasses.replace(state, inner=filled(state.inner))


def _known(node: Any) -> bool:
    return type(node).__name__ in STATES


def _told(state: State, function: str) -> list[tuple[Told, LeafState]]:
    """The parts of a state that optax has a word for; all that keep arrays must be."""
    found = []
    as_state(state, function)
    for rule_, kept, _ in walk(state.rule, state.inner, list(state.ties.names)):
        if not jax.tree.leaves(getattr(kept, "slots", None)):
            continue
        told = next((t for cls, t in TOLD.items() if isinstance(rule_, cls)), None)
        first = next(slot for slot in kept.slots.values() if slot is not None)
        held = {name for name in first._fields if getattr(first, name) is not None}
        if told is None or held != told.fields.keys():
            known = ", ".join(cls.__name__ for cls in TOLD)
            raise TypeError(
                f"{function}: {rule_!r} keeps {', '.join(sorted(held))}, expected one "
                f"of {known} (without extras), whose state optax has in the same form."
            )
        found.append((told, kept))
    return found


def _fitting(
    old: Mapping[Path, Any], new: Mapping[Path, Any], function: str
) -> list[Array]:
    """The arrays of `new` at the paths of `old`, in its dtypes."""
    problems = {}
    for path, x in old.items():
        if path not in new:
            problems[path] = "nothing is known of it on the other side"
        elif jnp.shape(new[path]) != jnp.shape(x):
            problems[path] = f"shape {jnp.shape(new[path])}, expected {jnp.shape(x)}"
    if problems:
        raise ValueError(complain(function, problems))
    return [cast_like(jnp.asarray(new[path]), x) for path, x in old.items()]
