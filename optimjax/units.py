"""Arrays read as matrices by rules that take any array, those of one axis included."""

from collections.abc import Callable

import jax
from jax import Array

from optimjax.axes import Axes, present

__all__ = []


def has_inputs(axes: Axes, shape: tuple[int, ...]) -> bool:
    """Whether an array is matrices: axes are left that are not of outputs or batch.

    Raises: ValueError if it is to be split, or has two axes or more, and lacks one.
    """
    return len(_reading(axes, shape)[1]) == len(shape)


def blocks(axes: Axes, x: Array) -> list[Array]:
    """`x` as blocks of equal matrices, each (matrices, inputs, outputs).

    An array without inputs, such as a bias, is a matrix of one input.
    """
    read, shape = _reading(axes, x.shape)
    return read.matrices(x.reshape(shape))


def joined(axes: Axes, parts: list[Array], like: Array) -> Array:
    """What `blocks` took apart, put together again."""
    read, shape = _reading(axes, like.shape)
    return read.array(parts, shape).reshape(like.shape)


def each_matrix(axes: Axes, function: Callable[..., Array], *arrays: Array) -> Array:
    """What `function` makes of each matrix of arrays that are alike, in their shape."""
    several = zip(*(blocks(axes, x) for x in arrays), strict=True)
    made = [jax.vmap(function)(*each) for each in several]
    return joined(axes, made, arrays[0])


def each_unit(axes: Axes, function: Callable[..., Array], *arrays: Array) -> Array:
    """`function(*arrays, inputs)` of arrays that are alike, which keeps their shape.

    `inputs` are the axes to sum over for each output unit of each matrix; the arrays
    have such.
    """
    if axes.split is None:  # left in shape: a mesh may have it in parts
        return function(*arrays, axes.of(arrays[0].shape)[0])
    several = zip(*(blocks(axes, x) for x in arrays), strict=True)
    return joined(axes, [function(*each, (1,)) for each in several], arrays[0])


def apart(axes: Axes, function: Callable[..., Array], *arrays: Array) -> Array:
    """`function` of whole arrays, or, if `axes` tells several in one, of each."""
    if axes.batch == () and axes.split is None:
        return function(*arrays)  # left in shape: a mesh may have it in parts
    return each_matrix(axes, function, *arrays)


def _reading(axes: Axes, shape: tuple[int, ...]) -> tuple[Axes, tuple[int, ...]]:
    """Axes counted from the first, and a shape that leaves inputs and outputs."""
    try:
        batch, split = present(axes.batch, shape), axes.split
        if split is not None:
            split = (present(split[0], shape)[0], split[1])
        outputs = present(axes.outputs, shape) if len(shape) > 1 else ()
    except ValueError as error:
        hint = "Give such arrays other axes: a dict {glob: Axes(...)}."
        raise ValueError(f"axes: {error} of {axes}. {hint}") from None
    if len(shape) == 1 and not batch:
        outputs = (0,)
    missing = len(outputs) + len(batch) == len(shape), not outputs
    read = Axes(outputs or (len(shape),), batch, split)
    wide = (*shape, *[1] * sum(missing))
    read.check(wide)
    return read, wide
