"""The state that the user holds: set up, updated, aligned."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Sharding

from optimjax.arrays import (
    buffer,
    cast_like,
    is_array,
    is_inexact,
    is_traced,
    placed,
    placement,
    real_dtype,
)
from optimjax.examples import per_example, sums_of_examples
from optimjax.finding import TiesArg, find_ties
from optimjax.hyper import is_schedule
from optimjax.layout import NOT_THE_TREE, Layout, is_float0
from optimjax.leaf import skipping
from optimjax.nested import every_rule, walk
from optimjax.paths import (
    Path,
    Slots,
    Where,
    branches,
    complain,
    spell,
)
from optimjax.rule import Rule, is_rule
from optimjax.state import State, as_state
from optimjax.ties import Ties
from optimjax.treewide import LOSSES, PyTree

__all__ = ["align", "setup", "update"]


def setup(
    rule: Rule, model: PyTree, *, ties: TiesArg = "identity", trainable: Where = None
) -> State:
    """The state with which `rule` starts to train `model`.

    Leaves that are one array get one slot, named by the path of the first. Arrays of a
    floating or complex dtype are trained; all other leaves are carried through.

    Args:
        rule: what is to be done with the gradients.
        model: any pytree with at least one trainable leaf; a `jax.ShapeDtypeStruct` may
            stand for an array, and the state then takes its sharding.
        ties: "identity": leaves are one array if they are one object or share their
            device buffers. None: every leaf apart. `{place: source}` or
            `{place: (source, transform)}`, paths: ties that identity cannot show,
            beside those that it can; the source's array is what is trained, and
            `transform` (any JAX function of it) gives the place's.
        trainable: what to train: a glob on paths, several, or a function of
            (path, leaf) that says True; None for every floating or complex array.
    Raises:
        ValueError: nothing to train; a rule for the gradients of each example that is
            not shown them; a path in `ties` that does not exist, or shapes
            that cannot be tied; an array trained in one place and not in another; two
            places of one array given different hyperparameters.
        TypeError: `rule` is no rule; a leaf holds arrays but is no pytree.

    >>> import optimjax as oj
    >>> w = jnp.ones((2, 3))
    >>> state = oj.setup(oj.Adam(1e-3), {"encoder": w, "decoder": w, "name": "tied"})
    >>> list(state.slots), str(state.ties)
    (['decoder'], 'encoder is decoder')
    """
    if not is_rule(rule):
        raise TypeError(
            f"setup: rule is a {type(rule).__name__}, expected an optimjax rule such "
            "as Adam(1e-3). The order is setup(rule, model)."
        )
    first = per_example(rule)
    hidden = [r for r in every_rule(rule) if r.per_example][first:]
    if hidden:
        name = type(hidden[0]).__name__
        raise ValueError(
            f"setup: {rule!r} would show {name} gradients that are summed over "
            f"examples. Let it come first: Chain({name}(...), ...), and once. (It "
            "does not go with LossScaling.)"
        )
    shapes = [isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model)]
    model = jax.tree.map(_as_array, model) if any(shapes) else model
    found = find_ties(model, ties, trainable, "setup")
    if any(shapes):  # which of them will be one array, the first step sees
        found = dataclasses.replace(found, seen=False)
    layout, leaves = found.take_apart("setup", model)
    params = named_params(layout, leaves)
    rule = rule.bind(
        {
            slot.name: {place.path: params[slot.name] for place in slot.places}
            for slot in found.slots
        }
    )
    place = placement(params.values())
    rule = jax.tree.map(
        lambda hyper: as_data(hyper, "setup", rule, place), rule, is_leaf=is_schedule
    )
    others = [*params.values(), *jax.tree.leaves(rule)]
    inner = rule.init(params)
    still = never(rule, inner, found.names)
    inner = _own_buffers(skipping(inner, still), others, place)
    return State(rule, inner, found, tuple(sorted(still)))


def never(rule: Rule, inner: PyTree, names: Iterable[Path]) -> list[Path]:
    """The slots that belong to a rule that moves none."""
    walked = walk(rule, inner, list(names))
    return [path for each, _, slots in walked if each.freezes for path in slots]


def _as_array(x: Any) -> Any:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    zeros = jnp.zeros(x.shape, x.dtype, device=x.sharding)
    if not is_traced(zeros) or x.sharding is None:
        return zeros
    # Inside a jit without arguments `device=` alone is not obeyed.
    axes = getattr(getattr(x.sharding, "mesh", None), "axis_types", ())
    if AxisType.Explicit in axes:
        return jax.sharding.reshard(zeros, x.sharding)
    return jax.lax.with_sharding_constraint(zeros, x.sharding)


def as_data(hyper: Any, function: str, rule: Rule, place: Sharding | None) -> Any:
    """A hyperparameter, or all that a schedule holds, in buffers of its own."""

    def number(x: Any) -> Array:
        whole = is_array(x) and not is_inexact(x)  # a table of steps, say
        return placed(jnp.asarray(x, None if whole else real_dtype()), place)

    if is_schedule(hyper):
        return jax.tree.map(number, hyper)
    return placed(as_scalar(hyper, function, rule), place)


def as_scalar(hyper: Any, function: str, rule: Rule) -> Array:
    """A hyperparameter as the array that crosses every `jit` from now on."""
    if np.ndim(hyper) != 0:
        raise ValueError(
            f"{function}: a hyperparameter of {rule!r} has shape {np.shape(hyper)}, "
            "expected a scalar. To sweep one, use jax.vmap from setup on; to give "
            "paths different values, use a dict {glob: value}."
        )
    return jnp.asarray(hyper, real_dtype())


def named_params(layout: Layout, leaves: list[Any]) -> Slots:
    """{slot: its array}, as it is in the model."""
    arrays = map(jnp.asarray, layout.gather(leaves))
    return Slots(zip(layout.names, arrays, strict=True))


def _own_buffers(
    state: PyTree, others: Iterable[Any], place: Sharding | None
) -> PyTree:
    """`state`, each array in a buffer of its own, so that all of it can be donated, and
    on the devices of the parameters, so that the second step compiles nothing."""
    kept = list(others)  # alive to the end: an id or an address is used once only
    seen = {id(x) for x in kept} | {buffer(x) for x in kept}

    def own(x: Any) -> Any:
        if is_traced(x):
            return x
        x = jnp.asarray(x)
        where = buffer(x)
        shared = id(x) in seen or (where is not None and where in seen)
        if shared or (place is not None and not x.committed):
            x = placed(x, place)
        seen.update((id(x), buffer(x)))
        kept.append(x)
        return x

    return jax.tree.map(own, state)


def update(
    state: State, model: PyTree, grads: PyTree, **context: Any
) -> tuple[State, PyTree]:
    """One step: the gradients of each slot summed over its places, one step taken.

    Pure: nothing is mutated or donated, and a mistake is found before anything is
    computed. Works eagerly and under `jit`, `vmap`, `grad`, `scan`, `shard_map`.

    Args:
        state: from `setup` or the last `update`.
        model: the model, with the paths that `setup` saw.
        grads: a tree like it. None, for a leaf or a branch, means no step there: the
            parameter and all that is kept for it stay bit for bit as they are. A
            complex gradient is a direction to go against, which is the CONJUGATE of
            what `jax.grad` gives (`make_step` conjugates by itself). For
            `PrivateGradients` each has a first axis more, which numbers the examples.
        **context: what some rules need besides, such as `value=` (the loss),
            `value_fn=` (a function of the model) or `sampled_value_fn=` (one of the
            model and a key, as `gauss_newton_bartlett` needs it).
    Returns: the new state, of the same structure, shapes and dtypes; and the new model,
        in which tied places hold one object.
    Raises:
        ValueError: `model` is not the one of `setup`, or `grads` does not fit it.
        TypeError: a gradient for integers or a Python number; a needed `context` is
            missing.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, 2.0]), "act": jnp.tanh}
    >>> state = oj.setup(oj.SGD(0.1), model)
    >>> grads = {"w": jnp.array([10.0, 0.0]), "act": None}
    >>> state, model = oj.update(state, model, grads)
    >>> model["w"]
    Array([0., 2.], dtype=float32)
    """
    state, layout, leaves, moved = move(state, model, grads, context)
    return state, layout.scatter(moved, leaves)


def move(
    state: State, model: PyTree, grads: PyTree, context: dict[str, Any]
) -> tuple[State, Layout, list[Any], Slots]:
    """`update`, but for putting the model together.

    Returns: the new state, the model's layout and leaves, and `{slot: new array}` of
    the slots that are not frozen.
    """
    ties = as_state(state, "update").ties.confirmed("update", model)
    state = dataclasses.replace(state, ties=ties)
    layout, leaves = state.ties.take_apart("update", model)
    check_shapes("update", ties, layout.gather(leaves))
    if per_example(state.rule):
        summed = sums_of_examples(layout, leaves, grads)
    else:
        summed = layout.accumulate(leaves, grads)
    for name in context.keys() & {*LOSSES}:

        def of_slots(slots: Any, *args: Any, of_model: Any = context[name]) -> Any:
            return of_model(layout.scatter(slots, leaves), *args)

        context[name] = of_slots
    state, new = descend(state, named_params(layout, leaves), summed, **context)
    still = set(state.frozen)
    moved = Slots((path, x) for path, x in new.items() if path not in still)
    return state, layout, leaves, moved


def descend(
    state: State, params: Slots, grads: Slots, **context: Any
) -> tuple[State, Slots]:
    """`update` over slots: `{path: array}` and `{path: summed gradient or None}`."""
    missing = {
        name: type(rule).__name__
        for rule in every_rule(state.rule)
        for name in rule.needs
        if name not in context
    }
    if missing:
        wanted = "; ".join(f"{rule} needs {name}" for name, rule in missing.items())
        call = ", ".join(f"{name}=..." for name in missing)
        step = "use make_step"
        if "sampled_value_fn" in missing:
            step = "make_step(loss, sampled_loss=...)"
        raise TypeError(
            f"update: {wanted}, not given. Call update(state, model, grads, {call}), "
            f"or {step}."
        )
    for name in context.keys() & {*LOSSES}:
        # Rules work on wide arrays, the loss on the model's own.
        def of_wide(slots: Any, *args: Any, of_slots: Any = context[name]) -> Any:
            own = Slots({p: cast_like(x, params[p]) for p, x in slots.items()})
            return of_slots(own, *args)

        context[name] = of_wide
    frozen = set(state.frozen)
    moving = Slots((p, None if p in frozen else g) for p, g in grads.items())
    inner, new = state.rule.descend(state.inner, params, moving, **context)
    return dataclasses.replace(state, inner=inner), new


def check_shapes(
    function: str, ties: Ties, arrays: Iterable[Any], *, whole: bool = False
) -> None:
    """ValueError where the array of a slot has another shape than `setup` saw.

    Args:
        whole: traced arrays have their whole shape, too. Elsewhere they are not looked
            at: inside a user's `vmap` or `shard_map` they show a part of it.
    """
    problems = {}
    for slot, x in zip(ties.slots, arrays, strict=True):
        if not is_array(x):
            problems[slot.name] = f"a {type(x).__name__}, expected an array"
        elif not jnp.issubdtype(x.dtype, jnp.inexact):
            problems[slot.name] = f"dtype {x.dtype.name}, expected {slot.dtype}"
        elif x.shape != slot.shape and (whole or not is_traced(x)):
            problems[slot.name] = f"shape {x.shape}, expected {slot.shape}"
    if problems:
        raise ValueError(
            complain(function, problems)
            + " The state was set up for another model: call setup again."
        )


def align(state: State, grads: PyTree) -> State:
    """`state`, with room for the slots that `grads` (with its Nones) will skip.

    A slot that is skipped for the first time gets a step count of its own, which is the
    only time that `update` changes the structure of a state. A `lax.scan` cannot have
    that: align before it.

    Args:
        grads: a tree like the model; only where it is None matters.

    >>> import optimjax as oj
    >>> model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    >>> state = oj.setup(oj.Adam(), model)
    >>> grads = {"a": jnp.ones(2), "b": None}
    >>> aligned = oj.align(state, grads)
    >>> after, _ = oj.update(aligned, model, grads)
    >>> jax.tree.structure(after) == jax.tree.structure(aligned)
    True
    """
    ties = as_state(state, "align").ties
    keyed, _ = jax.tree_util.tree_flatten_with_path(grads, is_leaf=lambda x: x is None)
    paths = spell([keys for keys, _ in keyed])
    leaves = zip(paths, (g for _, g in keyed), strict=True)
    given = {path: g is not None and not is_float0(g) for path, g in leaves}
    places = {place.path: slot.name for slot in ties.slots for place in slot.places}
    covered = {tuple(path.split("/")) if path else () for path in paths}
    problems = {
        path: "no gradient, expected one, or None"
        for path in places
        if covered.isdisjoint(branches(tuple(path.split("/"))))
    }
    if problems:
        raise ValueError(complain("align", problems, NOT_THE_TREE))
    moving = {name for path, name in places.items() if given.get(path)}
    still = [name for name in ties.names if name not in moving]
    return dataclasses.replace(state, inner=skipping(state.inner, still))
