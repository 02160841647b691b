"""The state that the user holds: set up, updated, aligned."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding

from optimjax.arrays import (
    buffer,
    cast_like,
    is_array,
    is_traced,
    placed,
    placement,
    real_dtype,
    widen,
)
from optimjax.finding import TiesArg, find_ties
from optimjax.layout import Layout
from optimjax.paths import Path, Slots, Where, complain, with_paths
from optimjax.rule import Count, LeafState, PyTree, Rule, every_rule, is_rule, walk
from optimjax.ties import Ties

__all__ = ["State", "align", "setup", "update"]


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
        from optimjax.show import tree  # it shows states, so it imports this module

        return tree(self)


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
        ValueError: nothing to train; a path in `ties` that does not exist, or shapes
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
    shapes = [isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model)]
    model = jax.tree.map(_as_array, model) if any(shapes) else model
    found = find_ties(model, ties, trainable, "setup")
    if any(shapes):  # which of them will be one array, the first step sees
        found = dataclasses.replace(found, seen=False)
    layout, leaves = found.take_apart("setup", model)
    params = _params(layout, leaves)
    rule = rule.bind(
        {
            slot.name: {place.path: params[slot.name] for place in slot.places}
            for slot in found.slots
        }
    )
    place = placement(params.values())
    rule = jax.tree.map(lambda h: placed(_scalar(rule, h), place), rule)
    others = [*params.values(), *jax.tree.leaves(rule)]
    return State(rule, _own_buffers(rule.init(params), others, place), found)


def _as_array(x: Any) -> Any:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jnp.zeros(x.shape, x.dtype, device=x.sharding)


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


def _scalar(rule: Rule, hyper: Any) -> Array:
    """A hyperparameter as the array that crosses every `jit` from now on."""
    if np.ndim(hyper) != 0:
        raise ValueError(
            f"setup: a hyperparameter of {rule!r} has shape {np.shape(hyper)}, "
            "expected a scalar. To sweep one, use jax.vmap from setup on; to give "
            "paths different values, use a dict {glob: value}."
        )
    return jnp.asarray(hyper, real_dtype())


def _params(layout: Layout, leaves: list[Any]) -> Slots:
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
            what `jax.grad` gives (`make_step` conjugates by itself).
        **context: what some rules need besides, such as `value=` (the loss) or
            `value_fn=` (a function of the model).
    Returns: the new state, of the same structure, shapes and dtypes; and the new model,
        in which tied places hold one object.
    Raises:
        ValueError: `model` is not the one of `setup`, or `grads` does not fit it.
        TypeError: a gradient for a Python number; a needed `context` is missing.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, 2.0]), "act": jnp.tanh}
    >>> state = oj.setup(oj.SGD(0.1), model)
    >>> grads = {"w": jnp.array([10.0, 0.0]), "act": None}
    >>> state, model = oj.update(state, model, grads)
    >>> model["w"]
    Array([0., 2.], dtype=float32)
    """
    ties = as_state(state, "update").ties.confirmed("update", model)
    state = dataclasses.replace(state, ties=ties)
    layout, leaves = state.ties.take_apart("update", model)
    check_shapes("update", ties, layout.gather(leaves))
    grads = layout.accumulate(leaves, grads)
    if "value_fn" in context:
        of_model = context["value_fn"]
        context["value_fn"] = lambda params: of_model(layout.scatter(params, leaves))
    params = _params(layout, leaves)
    state, params = descend(state, params, grads, **context)
    return state, layout.scatter(params, leaves)


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
    for name, rule in missing.items():
        raise TypeError(
            f"update: {rule} needs {name}, which was not given. Call "
            f"update(state, model, grads, {name}=...), or use make_step."
        )
    frozen = set(state.frozen)
    grads = Slots({p: None if p in frozen else g for p, g in grads.items()})
    # Steps stay in the compute dtype until they are subtracted: one rounding, not two.
    wide = Slots({path: widen(x) for path, x in params.items()})
    inner, steps = state.rule.apply(state.inner, wide, grads, **context)
    new = Slots(params)
    for path, step in steps.items():
        if step is not None:
            new[path] = cast_like(wide[path] - step, params[path])
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
    as_state(state, "align")
    given = set(with_paths(grads))
    skipped = [
        slot.name
        for slot in state.ties.slots
        if given.isdisjoint(place.path for place in slot.places)
    ]
    return skipping(state, skipped)


def skipping(state: State, paths: Iterable[Path]) -> State:
    paths = list(paths)

    def one(inner: PyTree) -> PyTree:
        return inner.skipping(paths) if isinstance(inner, LeafState) else inner

    inner = jax.tree.map(one, state.inner, is_leaf=lambda x: isinstance(x, LeafState))
    return dataclasses.replace(state, inner=inner)
