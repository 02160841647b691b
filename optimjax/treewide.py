"""What rules over whole trees share: a count, gradients beside parameters, dtypes."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, cast, total, widen, wider
from optimjax.paths import Path, complain, with_paths

__all__ = ["Count", "spread", "steps_like"]

PyTree: TypeAlias = Any

# What `update` is given as functions of the model, and rules as functions of the slots.
LOSSES = ("value_fn", "sampled_value_fn")


def loss_of_slots(loss: Callable[..., Array], params: PyTree) -> Callable[..., Array]:
    """A function of a tree as one of `{path: array}`; slots not in it are as they are.

    Args:
        loss: function of `params` and perhaps more.
    """
    named, structure = with_paths(params), jax.tree.structure(params)

    def of_slots(slots: Mapping[Path, Array], *args: Any) -> Array:
        leaves = [slots.get(path, leaf) for path, leaf in named.items()]
        return loss(structure.unflatten(leaves), *args)

    return of_slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Count:
    """The state of a rule that keeps nothing but the number of updates, int32, ().

    Schedules are evaluated at it.
    """

    count: Array

    @classmethod
    def zero(cls) -> "Count":
        return cls(jnp.zeros((), jnp.int32))

    def next(self) -> "Count":
        return Count(increment(self.count))


def increment(count: Array) -> Array:
    """`count + 1`, staying at the largest int32 rather than turning negative."""
    return jnp.where(count < jnp.iinfo(count.dtype).max, count + 1, count)


def gradients_by_path(params: Mapping[Path, Any], grads: PyTree) -> dict[Path, Any]:
    """The gradients that there are, in the order of `params`; None drops out.

    Raises: ValueError for a gradient that belongs to no parameter.
    """
    given = with_paths(grads)
    unknown = {p: "a gradient without a parameter" for p in given if p not in params}
    if unknown:
        raise ValueError(complain("apply", unknown))
    return {path: given[path] for path in params if path in given}


def spread(params: PyTree, grads: PyTree) -> PyTree:
    """`grads` in the structure of `params`, with None at every leaf that has none.

    Raises: ValueError for a gradient without a parameter.

    >>> spread({"a": {"b": 1.0, "c": 2.0}}, {"a": None})
    {'a': {'b': None, 'c': None}}
    """
    named = with_paths(params)
    given = gradients_by_path(named, grads)
    return jax.tree.structure(params).unflatten([given.get(path) for path in named])


def arrays_by_path(
    params: Mapping[Path, Any], trees: Iterable[PyTree]
) -> dict[Path, tuple[Array, ...]]:
    """{path: its array in each tree}, of the slots that have one in all of them."""
    given = [gradients_by_path(params, tree) for tree in trees]
    return {
        path: tuple(each[path] for each in given)
        for path in params
        if all(path in each for each in given)
    }


def squared_length(tree: PyTree) -> Array:
    """The sum of |g|^2 over all of a tree, in the widest dtype."""
    squares = [total(abs_sq(widen(g))) for g in jax.tree.leaves(tree)]
    dtype = reduce(wider, [square.dtype for square in squares], jnp.float32)
    return sum((square.astype(dtype) for square in squares), jnp.zeros((), dtype))


def steps_like(params: PyTree, steps: PyTree) -> PyTree:
    """`steps` in the dtypes of `params`; None stays None.

    >>> x = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)}
    >>> steps_like(x, {"a": jnp.zeros(2), "b": None})
    {'a': Array([0, 0], dtype=bfloat16), 'b': None}
    """
    return jax.tree.map(
        lambda x, s: None if s is None else cast(s, jnp.asarray(x).dtype), params, steps
    )
