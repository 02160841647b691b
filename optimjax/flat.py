"""A model as its trained arrays: by path, or as one vector."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from optimjax.finding import TiesArg, find_ties
from optimjax.paths import Slots, Where

__all__ = ["destructure", "trainables"]


def trainables(
    model: Any, *, ties: TiesArg = "identity", trainable: Where = None
) -> Slots:
    """{path: array}: every array that `setup` would train, once, in the model's order.

    Args and errors: as for `setup`.

    >>> w = jnp.ones(2)
    >>> trainables({"encoder": w, "decoder": w, "steps": 3})
    Slots({'decoder': Array([1., 1.], dtype=float32)})
    """
    found = find_ties(model, ties, trainable, "trainables")
    layout, leaves = found.take_apart("trainables", model)
    arrays = map(jnp.asarray, layout.gather(leaves))
    return Slots(zip(found.names, arrays, strict=True))


def destructure(
    model: Any, *, ties: TiesArg = "identity", trainable: Where = None
) -> tuple[Array, Callable[[Array], Any]]:
    """The trained arrays as one vector, and the way back; both can be differentiated.

    Args and errors: as for `setup`.
    Returns: a vector, (n,), of the dtype to which all slots promote; and
        `rebuild(vector)`, which gives the model with each slot in its own shape and
        dtype, at all its places.

    >>> w = jnp.array([1.0, 2.0])
    >>> vector, rebuild = destructure({"encoder": w, "decoder": w, "act": "tanh"})
    >>> vector
    Array([1., 2.], dtype=float32)
    >>> rebuild(2 * vector)["encoder"]
    Array([2., 4.], dtype=float32)
    """
    found = find_ties(model, ties, trainable, "destructure")
    layout, leaves = found.take_apart("destructure", model)
    arrays = [jnp.asarray(x) for x in layout.gather(leaves)]
    with jax.numpy_dtype_promotion("standard"):  # one vector for all is a mixture
        vector, unravel = ravel_pytree(arrays)

    def rebuild(vector: Array) -> Any:
        arrays = unravel(vector)
        return layout.scatter(dict(zip(found.names, arrays, strict=True)), leaves)

    return vector, rebuild
