"""Schedules put together: values by stretches, and schedules one after another."""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optimjax.arrays import is_traced
from optimjax.hyper import Hyper
from optimjax.schedules.base import Inner, Schedule, value_at
from optimjax.schedules.shapes import real, way, whole

__all__ = ["Join", "Piecewise"]


class Piecewise(Schedule):
    """Values that change at boundaries; or ways between them.

        value = values[i],  i: how many boundaries are <= count
        with `interpolate`: through (0, values[0]), (boundaries[i], values[i + 1]), and
        constant after the last

    The new value is that of its boundary: with boundary 5, count 5 has it.

    Args:
        values: the values, absolute (not factors); a tuple of numbers or a 1-d array,
            one longer than `boundaries`.
        boundaries: counts, in rising order, >= 0; equal ones make an empty stretch. A
            tuple of numbers or a 1-d array.
        interpolate: None for steps; "linear"; "cosine", half a period each.
    Raises: ValueError for lengths that do not fit, boundaries that fall, or numbers out
        of their range.

    >>> values = (0.8, 0.4, 0.1)
    >>> Piecewise(values, (2, 4))(jnp.arange(6)).tolist()
    [0.8, 0.8, 0.4, 0.4, 0.1, 0.1]
    >>> Piecewise(values, (2, 4), "linear")(jnp.arange(6)).tolist()
    [0.8, 0.6, 0.4, 0.25, 0.1, 0.1]
    """

    values: tuple[Hyper, ...]
    boundaries: tuple[Hyper, ...]
    interpolate: Literal[None, "linear", "cosine"] = None
    ranges: ClassVar = {"boundaries": ">= 0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        fitting(self, "values")

    def at(self, count: Array) -> Array:
        values, bounds = row(self.values), whole(row(self.boundaries))
        i = jnp.searchsorted(bounds, count, side="right", method="compare_all")
        if self.interpolate is None:
            return values[i]
        knots = jnp.concatenate([jnp.zeros_like(bounds, shape=1), bounds])
        j = jnp.minimum(i + 1, len(knots) - 1)
        steps = real(knots[j] - knots[i])
        return way(count - knots[i], steps, values[i], values[j], self.interpolate)


class Join(Schedule):
    """Schedules one after another, each in counts of its own.

        value = schedules[i](count - boundaries[i - 1]),
                i: how many boundaries are <= count

    At its boundary a schedule is given 0. None is ever given a count that is not its
    own: before and after its turn it is evaluated at the first or the last of those.

    Args:
        schedules: schedules, functions or numbers; one more than `boundaries`.
        boundaries: counts, in rising order, >= 0.
    Raises: ValueError for lengths that do not fit, or boundaries that fall; TypeError
        for what is no schedule.

    >>> from optimjax.schedules import Linear
    >>> join = Join((Linear(0.0, 0.8, steps=2), lambda count: 0.5 / (1 + count)), (3,))
    >>> join(jnp.arange(6)).tolist()
    [0.0, 0.4, 0.8, 0.5, 0.25, 0.1666667]
    """

    schedules: tuple[Inner, ...]
    boundaries: tuple[Hyper, ...]
    ranges: ClassVar = {"boundaries": ">= 0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        fitting(self, "schedules")

    def at(self, count: Array) -> Array:
        bounds = whole(row(self.boundaries))
        begins = [jnp.zeros_like(count), *(bounds[i] for i in range(len(bounds)))]
        lasts = [*(begin - 1 for begin in begins[1:]), count]
        turns = zip(self.schedules, begins, lasts, strict=True)
        values = [
            value_at(schedule, jnp.maximum(jnp.minimum(count, last) - begin, 0))
            for schedule, begin, last in turns
        ]
        value = values[0]
        for begin, after in zip(begins[1:], values[1:], strict=True):
            value = jnp.where(count < begin, value, after)
        return value


def fitting(schedule: Any, name: str) -> None:
    """ValueError unless boundaries rise, and there is one more of `name` than those."""
    owner, bounds = type(schedule).__name__, schedule.boundaries
    many = len(getattr(schedule, name))
    if many != len(bounds) + 1:
        raise ValueError(
            f"{owner}: {many} {name} for {len(bounds)} boundaries, expected "
            f"{len(bounds) + 1}."
        )
    if not any(map(is_traced, jax.tree.leaves(bounds))):
        falls = np.flatnonzero(np.diff(np.asarray(bounds, float)) < 0)
        if falls.size:
            i = falls[0]
            raise ValueError(
                f"{owner}: boundaries has {bounds[i]:g} before {bounds[i + 1]:g}, "
                "expected rising counts."
            )


def row(numbers: Any) -> Array:
    """Numbers as one array."""
    if not isinstance(numbers, tuple):
        return numbers
    return jnp.stack(numbers) if numbers else jnp.zeros(0, np.float32)
