"""Which axes of an array are a matrix's inputs, outputs, and which number matrices."""

import dataclasses
import math
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array

from optimjax.paths import Path

__all__ = ["Axes", "hidden_matrices"]

Shape: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Axes:
    """How an array is read as one matrix (inputs, outputs), or as several.

    The default is JAX's layout, in which kernels are (..., in, out): the last axis
    numbers the outputs, and all others the inputs, the window of a convolution
    included. What is stacked (the layers of a scan, experts, heads) has to be named.

    Args:
        outputs: the axis or axes of the output units; 0 for kernels (out, in).
        batch: axes that number matrices, each of which stands for itself.
        split: (axis, n) for n equal parts of an axis, such as heads that are merged
            into it, or (axis, lengths) for parts of these lengths, such as a query, key
            and value in one; each part is a matrix of its own.
    Raises: TypeError for anything else.

    >>> Axes().of((3, 3, 16, 32))
    ((0, 1, 2), (3,), ())
    >>> attention = Axes(batch=1)  # (width, heads, width of a head): head by head
    >>> [block.shape for block in attention.matrices(jnp.ones((64, 4, 16)))]
    [(4, 64, 16)]
    >>> merged = Axes(split=(-1, (64, 16, 16)))  # (width, query + key + value)
    >>> [block.shape for block in merged.matrices(jnp.ones((64, 96)))]
    [(1, 64, 64), (1, 64, 16), (1, 64, 16)]
    """

    outputs: int | tuple[int, ...] = -1
    batch: int | tuple[int, ...] = ()
    split: tuple[int, int | tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        for name in ("outputs", "batch"):
            axes = getattr(self, name)
            several = whole_numbers(axes if isinstance(axes, list | tuple) else [axes])
            if several is None or len(set(several)) < len(several):
                expected = "an axis, or a tuple of different ones"
                raise TypeError(f"Axes: {name} is {axes!r}, expected {expected}.")
            one = not isinstance(axes, list | tuple)
            object.__setattr__(self, name, several[0] if one else several)
        if self.split is not None:
            object.__setattr__(self, "split", _checked_split(self.split))

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)
        values = {f.name: getattr(self, f.name) for f in fields}
        changed = [f.name for f in fields if values[f.name] != f.default]
        return f"Axes({', '.join(f'{name}={values[name]}' for name in changed)})"

    def of(self, shape: Shape) -> tuple[Shape, Shape, Shape]:
        """The axes of inputs, outputs and batch, counted from the first.

        Raises: ValueError if an array of this shape has them not.
        """
        outputs, batch = (present(a, shape) for a in (self.outputs, self.batch))
        if set(outputs) & set(batch):
            raise ValueError(f"{self}: an axis is of outputs and of batch")
        inputs = tuple(
            axis for axis in range(len(shape)) if axis not in (*outputs, *batch)
        )
        if not (inputs and outputs):
            raise ValueError(f"shape {shape}, which {self} leaves without a matrix")
        return inputs, outputs, batch

    def check(self, shape: Shape) -> None:
        """Raises: ValueError if an array of this shape cannot be read like this."""
        self.of(shape)
        self._lengths(shape)

    def several(self, shape: Shape) -> bool:
        """Whether an array is more than one matrix."""
        return self.split is not None or bool(self.of(shape)[2])

    def matrices(self, x: Array) -> list[Array]:
        """`x` as blocks of equal matrices, each (matrices, inputs, outputs)."""
        return [_flat(part, self.of(x.shape)) for part in self._parts(x)]

    def array(self, blocks: Sequence[Array], shape: Shape) -> Array:
        """What `matrices` took apart, put together again."""
        axes, shapes = self.of(shape), self._part_shapes(shape)
        return self._joined(
            [_unflat(b, s, axes) for b, s in zip(blocks, shapes, strict=True)], shape
        )

    def _parts(self, x: Array) -> list[Array]:
        """Parts of an axis: equal ones one behind the other, on a new first axis."""
        axis, lengths = self._lengths(x.shape)
        if axis is None:
            return [x[None]]
        if len(set(lengths)) == 1:
            split = x.reshape(
                *x.shape[:axis], len(lengths), lengths[0], *x.shape[axis + 1 :]
            )
            return [jnp.moveaxis(split, axis, 0)]
        ends = [sum(lengths[: n + 1]) for n in range(len(lengths) - 1)]
        return [part[None] for part in jnp.split(x, ends, axis)]

    def _part_shapes(self, shape: Shape) -> list[Shape]:
        axis, lengths = self._lengths(shape)
        if axis is None:
            return [(1, *shape)]

        def part(n: int, length: int) -> Shape:
            return (n, *shape[:axis], length, *shape[axis + 1 :])

        if len(set(lengths)) == 1:
            return [part(len(lengths), lengths[0])]
        return [part(1, length) for length in lengths]

    def _joined(self, parts: list[Array], shape: Shape) -> Array:
        axis, lengths = self._lengths(shape)
        if axis is None:
            return parts[0][0]
        if len(set(lengths)) == 1:
            return jnp.moveaxis(parts[0], 0, axis).reshape(shape)
        return jnp.concatenate([part[0] for part in parts], axis)

    def _lengths(self, shape: Shape) -> tuple[int | None, tuple[int, ...]]:
        if self.split is None:
            return None, ()
        (axis,), parts = present(self.split[0], shape), self.split[1]
        if isinstance(parts, int):
            parts = (shape[axis] // parts,) * parts
        if sum(parts) != shape[axis]:
            raise ValueError(
                f"shape {shape}, whose axis {axis} cannot be split into {self.split[1]}"
            )
        return axis, parts


def whole_numbers(numbers: Iterable[Any]) -> tuple[int, ...] | None:
    """As Python's `int`; None if one is no whole number."""
    try:
        return tuple(map(operator.index, numbers))
    except TypeError:
        return None


def _checked_split(split: Any) -> tuple[int, int | tuple[int, ...]]:
    """Raises: TypeError for anything else than (axis, n) or (axis, lengths)."""
    if isinstance(split, list | tuple) and len(split) == 2:
        axis, parts = split
        single = not isinstance(parts, list | tuple)
        numbers = whole_numbers([axis, *([parts] if single else parts)])
        if numbers is not None and min(numbers[1:], default=0) > 0:
            return numbers[0], numbers[1] if single else numbers[1:]
    raise TypeError(
        f"Axes: split is {split!r}, expected (axis, number of equal parts) or (axis, "
        "(length, length, ...)), each at least 1."
    )


def present(axes: int | tuple[int, ...], shape: Shape) -> Shape:
    """`axes`, counted from the first. Raises: ValueError if the shape has one not."""
    wanted = (axes,) if isinstance(axes, int) else tuple(axes)
    absent = [axis for axis in wanted if not -len(shape) <= axis < len(shape)]
    if absent:
        raise ValueError(f"shape {shape}, which has no axis {absent[0]}")
    counted = tuple(axis % len(shape) for axis in wanted)
    if len(set(counted)) < len(counted):
        raise ValueError(f"shape {shape}, of which {wanted} are not different axes")
    return counted


def _size(shape: Shape, axes: Shape) -> int:
    return math.prod(shape[axis] for axis in axes)


def _flat(x: Array, axes: tuple[Shape, Shape, Shape]) -> Array:
    """(parts, *shape) as (matrices, inputs, outputs); `axes` are those of the shape."""
    shape = x.shape[1:]
    inputs, outputs, batch = axes
    order = (0, *(axis + 1 for axis in (*batch, *inputs, *outputs)))
    count = x.shape[0] * _size(shape, batch)
    return x.transpose(order).reshape(
        count, _size(shape, inputs), _size(shape, outputs)
    )


def _unflat(block: Array, shape: Shape, axes: tuple[Shape, Shape, Shape]) -> Array:
    inputs, outputs, batch = axes
    order = (0, *(axis + 1 for axis in (*batch, *inputs, *outputs)))
    back = sorted(range(len(order)), key=order.__getitem__)
    return block.reshape([shape[axis] for axis in order]).transpose(back)


# Of words in a path, those of layers whose matrices are tables or read out the result.
NOT_HIDDEN = re.compile(
    r"(^|[/_.])(\w*embed\w*|emb|wte|wpe|lm_?head|head|logits|classifier|readout"
    r"|output_layer)(_?\d+)?($|[/.])",
    re.IGNORECASE,
)


def hidden_matrices(path: Path, leaf: Any) -> bool:
    """Whether a parameter is a matrix within a network: what matrix rules are made for.

    It has two axes or more, and no part of its path is named as an embedding, head or
    last layer is: no part has `embed` in it, and none is, or ends after an underscore
    in, `emb`, `wte`, `wpe`, `head`, `lm_head`, `logits`, `classifier`, `readout` or
    `output_layer`, with or without a number. A table called `pos` counts as a matrix,
    and weights called `attn_head` do not: give `matrices=` there. Biases and scales of
    norms have one axis; where they are stacked for a scan, (layer, feature), say by a
    glob what the matrices are.

    Args:
        path: the slot's.
        leaf: the parameter.

    >>> hidden_matrices("layers/0/attention/query/kernel", jnp.ones((4, 4)))
    True
    >>> hidden_matrices("lm_head/kernel", jnp.ones((4, 4)))
    False
    """
    return leaf.ndim >= 2 and not NOT_HIDDEN.search(path)
