"""What rules for matrices share: which slots those are, and how an array is read as
matrices."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

from optimjax.arrays import (
    abs_sq,
    alike,
    cast,
    cast_like,
    compute_dtype,
    ratio,
    root,
    varying_as,
    widen,
)
from optimjax.axes import hidden_matrices
from optimjax.hyper import PerPath
from optimjax.leaf import LeafRule, LeafState, check_complex, in_compute_dtype
from optimjax.nested import Around
from optimjax.paths import Path, Slots, complain, with_paths
from optimjax.rule import AxesOf, Part, Places, Rule, Selection, rule
from optimjax.rules.adam import Adam
from optimjax.treewide import PyTree, spread

__all__ = ["MatrixRule"]

# Slots of one shape are handled as one stack of matrices, of at most so many numbers: a
# larger one keeps a device busy alone, and a stack is a copy.
MOST_STACKED = 2**24


@rule
class MatrixRule(LeafRule):
    """Arithmetic on each matrix: write `init_matrix` and `apply_matrix`.

        state, step = apply_matrix(state, x, g, t)     for each matrix (inputs, outputs)
        the other slots take the steps of `aux`

    Its author may rely on what a `LeafRule` promises, and on `x` and `g` being one
    matrix with the inputs first, whatever the axes of the array are. `t` is the same
    for all that are handled together, so `lax.cond` on it stays a condition.

    Class attributes:
        shaped: names of the fields of the state that are shaped like the matrix; they
            are kept in the shape, and with the sharding, of the parameter. Others, such
            as (inputs, inputs), are kept as they are; with an axis in front that
            numbers the matrices if there are several; in a tuple if an axis is split
            into unequal parts.

    Args:
        aux: the rule for all other slots.
        matrices: the slots that are matrices: a glob on paths, several, or a function
            of (path, leaf) such as the default, `hidden_matrices`.
        axes: which axes are inputs, outputs and so on: `Axes(...)`, a dict {glob:
            Axes(...)} or a function of (path, leaf); None for `Axes()`, JAX's layout.
    State: `own`, a `LeafState` of the matrices; `inner`, the state of `aux`.
    Raises: ValueError for a slot that is chosen, but has no matrix.

    (Inside a `shard_map` a matrix has to be whole on each device.)

    >>> import jax.numpy as jnp
    >>> import optimjax as oj
    >>> @oj.rule
    ... class RowNormalized(oj.MatrixRule):
    ...     learning_rate: oj.Hyper = 0.1
    ...
    ...     def init_matrix(self, x):
    ...         return None
    ...
    ...     def apply_matrix(self, state, x, g, t):
    ...         unit = g / jnp.linalg.norm(g, axis=0, keepdims=True)
    ...         return None, self.learning_rate * unit
    >>> x = {"w": jnp.array([[3.0, 0.0], [4.0, 1.0]]), "b": jnp.ones(2)}
    >>> rule = RowNormalized(aux=oj.SGD(0.5))
    >>> _, steps = rule.apply(rule.init(x), x, x)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([[0.06, 0.0], [0.08, 0.1]], [0.5, 0.5])
    """

    shaped: ClassVar[tuple[str, ...]] = ()

    aux: Rule = dataclasses.field(
        default=Adam(3e-4, b1=0.9, b2=0.95),
        kw_only=True,
    )
    # As it is kept, so that what is shown is seen to be the default.
    matrices: Selection = dataclasses.field(
        default=PerPath(hidden_matrices), kw_only=True
    )
    axes: AxesOf = dataclasses.field(default=None, kw_only=True)

    def init_matrix(self, x: Array) -> PyTree:
        """The state of one matrix."""
        raise NotImplementedError(f"{type(self).__name__} has no init_matrix")

    def apply_matrix(
        self, state: PyTree, x: Array, g: Array, t: Array
    ) -> tuple[PyTree, Array]:
        """The new state of one matrix, and its step."""
        raise NotImplementedError(f"{type(self).__name__} has no apply_matrix")

    # Which slots --------------------------------------------------------------------

    def _chosen(self, named: Mapping[Path, Any]) -> dict[Path, Any]:
        """The matrices among these arrays, in their order."""
        owner = f"{type(self).__name__}: matrices"
        where: Any = self.matrices
        return {p: x for p, x in named.items() if where is None or where(p, x, owner)}

    def bind(self, places: Places) -> Self:
        owner = f"{type(self).__name__}: matrices"
        everywhere = dict.fromkeys(places, True)
        where: Any = self.matrices
        table = everywhere if where is None else where.bind(places, owner, bool)
        mine = {slot: places[slot] for slot in places if table[slot]}
        rest = {slot: places[slot] for slot in places if not table[slot]}
        bound = self.with_fields(matrices=None, aux=None)
        bound = super(MatrixRule, bound).bind(mine) if mine else bound
        return bound.with_fields(
            aux=self.aux.bind(rest), matrices=type(where)(table) if where else None
        )

    def parts(self, state: PyTree, slots: list[Path]) -> list[Part]:
        return [(self.aux, state.inner, [p for p in slots if p not in state.own.slots])]

    def with_parts(self, rules: list[Rule]) -> Self:
        return self.with_fields(aux=rules[0])

    def own_state(self, state: Any) -> LeafState:
        return state.own

    def at_count(self, count: Any) -> Self:
        # Without what is no matter of a matrix's arithmetic.
        return super().at_count(count).with_fields(aux=None, matrices=None)

    # Arrays as matrices -------------------------------------------------------------

    def init(self, params: PyTree) -> Around:
        named = with_paths(params)
        chosen = self._chosen(named)
        problems = {}
        at = self.at_count(0).by_slot()
        for path, x in chosen.items():
            try:
                at(path, x).axes.check(x.shape)
            except ValueError as error:
                problems[path] = str(error)
        if problems:
            hint = "Leave it out by `matrices`, or say by `axes` how it is a matrix."
            raise ValueError(complain(type(self).__name__, problems, hint))
        own = super().init(Slots(chosen))
        rest = Slots((p, x) for p, x in named.items() if p not in chosen)
        return Around(self.aux.init(rest), own)

    def init_leaf(self, x: Array) -> PyTree:
        return _start_on_mesh(self, x) if explicit(x) else self._start(x)

    def _start(self, x: Array) -> PyTree:
        states = [jax.vmap(self.init_matrix)(block) for block in self.axes.matrices(x)]
        # A condition in the step wants what is kept to differ as what is computed does.
        return jax.tree.map(partial(varying_as, x), self._kept(states, x))

    def _kept(self, states: list[Any], x: Any) -> PyTree:
        """The state of a slot, from those of its blocks of matrices."""
        if states[0] is None:
            return None
        fields, several = {}, self.axes.several(x.shape)
        for name in states[0]._fields:
            blocks = [getattr(state, name) for state in states]
            if blocks[0] is None:
                fields[name] = None
            elif name in self.shaped:
                fields[name] = alike(x, self.axes.array(blocks, x.shape))
            else:
                blocks = (
                    blocks if several else [jax.tree.map(lambda b: b[0], blocks[0])]
                )
                fields[name] = blocks[0] if len(blocks) == 1 else tuple(blocks)
        return type(states[0])(**fields)

    def _states(self, kept: Any, x: Array, blocks: int) -> list[Any]:
        """The states of a slot's blocks of matrices, from what is kept."""
        if kept is None:
            return [None] * blocks
        several = self.axes.several(x.shape)
        fields: dict[str, list[Any]] = {}
        for name, value in zip(kept._fields, kept, strict=True):
            if value is None:
                fields[name] = [None] * blocks
            elif name in self.shaped:
                fields[name] = self.axes.matrices(value)
            elif blocks > 1:
                fields[name] = list(value)
            else:
                fields[name] = [
                    value if several else jax.tree.map(lambda v: v[None], value)
                ]
        return [
            type(kept)(**{n: each[i] for n, each in fields.items()})
            for i in range(blocks)
        ]

    # Steps --------------------------------------------------------------------------

    def apply(
        self, state: Any, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Around, PyTree]:
        named, given = with_paths(params), with_paths(spread(params, grads))
        chosen = state.own.slots
        rest = Slots((p, x) for p, x in named.items() if p not in chosen)
        others = Slots((p, given.get(p)) for p in rest)
        inner, made = self.aux.apply(state.inner, rest, others, **context)
        own, steps = self._step(
            state.own,
            {p: x for p, x in named.items() if p in chosen},
            {p: g for p, g in given.items() if p in chosen and g is not None},
        )
        steps = {**with_paths(made), **steps}
        return Around(inner, own), jax.tree.structure(params).unflatten(
            [steps.get(path) for path in named]
        )

    def descend(
        self,
        state: Any,
        params: Slots,
        grads: Slots,
        scale: Array | None = None,
        **context: Any,
    ) -> tuple[Around, Slots]:
        """As of every rule; the others in a compiled loop where `aux` has one.

        There is never a `scale`, for this rule itself does not fuse.
        """
        chosen, new = state.own.slots, Slots(params)
        rest = Slots((p, x) for p, x in params.items() if p not in chosen)
        others = Slots((p, grads[p]) for p in rest)
        inner, moved = self.aux.descend(state.inner, rest, others, **context)
        new.update(moved)
        xs = {p: widen(x) for p, x in params.items() if p in chosen}
        given = {p: g for p, g in grads.items() if p in chosen and g is not None}
        own, steps = self._step(state.own, xs, given)
        for path, step in steps.items():
            new[path] = cast_like(xs[path] - step, params[path])
        return Around(inner, own), new

    def _step(
        self, state: LeafState, params: Mapping[Path, Array], given: Mapping[Path, Any]
    ) -> tuple[LeafState, dict[Path, Array]]:
        """The new state, and a step for each matrix that has a gradient."""
        if not given:
            return state, {}
        at, state = self.at_count(state.count).by_slot(), state.after(given)
        slots, steps = Slots(state.slots), {}
        check_complex(self, "apply", {path: params[path] for path in given})
        groups: dict[Any, list[list[Path]]] = {}
        rules: dict[Any, tuple[Any, Array]] = {}
        for path in given:
            x = params[path]
            here, t = at(path, x), state.steps(path)
            key = (id(here), id(t), x.shape, x.dtype, jax.tree.structure(slots[path]))
            stacks = groups.setdefault(key, [[]])
            if (len(stacks[-1]) + 1) * x.size > MOST_STACKED and stacks[-1]:
                stacks.append([])
            stacks[-1].append(path)
            rules[key] = here, t
        for key, stacks in groups.items():
            for paths in stacks:
                made = _apply_stack(
                    *rules[key],
                    [params[p] for p in paths],
                    [given[p] for p in paths],
                    [slots[p] for p in paths],
                )
                for path, kept, step in zip(paths, *made, strict=True):
                    slots[path], steps[path] = kept, step
        return dataclasses.replace(state, slots=slots), steps

    def _arithmetic(
        self, state: PyTree, x: Array, arrays: tuple[Array, ...], t: Array
    ) -> tuple[PyTree, Array]:
        (g,) = arrays
        return jax.vmap(self.apply_matrix, (0, 0, 0, None))(state, x, g, t)


def explicit(x: Array) -> bool:
    """Whether the axes of a mesh are part of the array's type."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


# Where shardings are part of types, arithmetic on matrices would have to say that of
# every product; within `auto_axes` the compiler finds it, as it does elsewhere.


@jax.jit
def _start_on_mesh(rule: Any, x: Array) -> PyTree:
    mesh = jax.typeof(x).sharding.mesh
    made = jax.eval_shape(rule._start, jax.ShapeDtypeStruct(x.shape, x.dtype))
    if made is None:
        return None
    whole, like = NamedSharding(mesh, PartitionSpec()), jax.typeof(x).sharding
    places = type(made)(
        **{
            name: jax.tree.map(lambda _, n=name: like if n in rule.shaped else whole, v)
            for name, v in zip(made._fields, made, strict=True)
        }
    )
    start: Any = auto_axes(lambda rule, x: rule._start(x), out_sharding=places)
    return start(rule, x)


@jax.jit
def _apply_stack(
    rule: Any, t: Array, xs: list[Array], gs: list[Array], kept: list[PyTree]
) -> tuple[list[PyTree], list[Array]]:
    """New states and steps of slots that are alike, as one stack of matrices."""
    apply: Any = _stacked
    if explicit(xs[0]):
        places = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, (kept, xs))
        apply = auto_axes(_stacked, out_sharding=places)
    return apply(rule, t, xs, gs, kept)


def _stacked(
    rule: Any, t: Array, xs: list[Array], gs: list[Array], kept: list[PyTree]
) -> tuple[list[PyTree], list[Array]]:
    axes, shape, wide = rule.axes, xs[0].shape, compute_dtype(xs[0].dtype)
    gs = [cast(g, wide) for g in gs]  # each may be of another dtype
    x_blocks = list(zip(*map(axes.matrices, xs), strict=True))
    g_blocks = list(zip(*map(axes.matrices, gs), strict=True))
    states = [rule._states(k, x, len(x_blocks)) for k, x in zip(kept, xs, strict=True)]
    new: list[list[Any]] = [[] for _ in xs]
    steps: list[list[Array]] = [[] for _ in xs]
    for i, (x_block, g_block) in enumerate(zip(x_blocks, g_blocks, strict=True)):
        each = [state[i] for state in states]
        state, step = in_compute_dtype(
            rule,
            jax.tree.map(lambda *parts: jnp.concatenate(parts), *each),
            jnp.concatenate(x_block),
            (jnp.concatenate(g_block),),
            t,
        )
        n = x_block[0].shape[0]
        for j in range(len(xs)):
            mine = slice(j * n, (j + 1) * n)
            new[j].append(jax.tree.map(lambda leaf, mine=mine: leaf[mine], state))
            steps[j].append(step[mine])
    return (
        [rule._kept(made, x) for made, x in zip(new, xs, strict=True)],
        [axes.array(made, shape) for made in steps],
    )


def length(x: Array) -> Array:
    """The norm of a matrix, which is whole: nothing is summed over a mesh.

    Squares of numbers from 1e19 on are infinite in float32; so none of those is taken.
    """
    scale = largest(x)
    return scale * root(jnp.sum(abs_sq(x / scale)))


def largest(x: Array) -> Array:
    """The largest magnitude, a constant to derivatives; 1 if it is 0 or not finite."""
    most = lax.stop_gradient(jnp.max(jnp.abs(x), initial=0))
    return jnp.where((most > 0) & jnp.isfinite(most), most, 1)


def unit(x: Array) -> Array:
    """`x` with norm 1; zeros stay zeros."""
    return ratio(x, length(x))
