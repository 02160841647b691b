"""Schedules that go one way: from a first value to a last one, or ever nearer to it."""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from optimjax.hyper import Hyper
from optimjax.schedules.base import Schedule
from optimjax.schedules.shapes import after, eased, finite, passed, periods, power, real

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "InverseTime",
    "Linear",
    "Polynomial",
    "Step",
]


class Constant(Schedule):
    """The same value always; for a place where a schedule is asked for.

        value

    Args:
        value: what it gives.
    Raises: ValueError if a number is not finite.

    >>> Constant(0.3)(7)
    Array(0.3, dtype=float32)
    """

    value: Hyper

    def at(self, count: Array) -> Array:
        return self.value


class Linear(Schedule):
    """In a straight line.

        n     = min(max(count - begin, 0), steps)
        value = start + (end - start) * n / steps

    Args:
        start: the value at count 0, and until `begin`.
        end: the value from count `begin + steps` on.
        steps: length of the line, in updates, > 0.
        begin: the count at which it starts, >= 0.
    Raises: ValueError if a number is out of its range.

    >>> linear = Linear(1.0, 0.1, steps=4, begin=2)
    >>> linear(jnp.arange(8)).tolist()
    [1.0, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]
    """

    start: Hyper
    end: Hyper
    steps: Hyper
    begin: Hyper = 0
    ranges: ClassVar = {"steps": "> 0", "begin": ">= 0"}

    def at(self, count: Array) -> Array:
        done, left = passed(after(count, self.begin), self.steps)
        return self.start * left + self.end * done


class Polynomial(Schedule):
    """Along a power of what is left.

        n     = min(max(count - begin, 0), steps)
        value = end + (start - end) * (1 - n / steps)^power

    Args:
        start: the value at count 0, and until `begin`.
        end: the value from count `begin + steps` on.
        power: 1 is a straight line; above, most of the way is at the beginning; > 0.
        steps: length of the way, in updates, > 0.
        begin: the count at which it starts, >= 0.
    Raises: ValueError if a number is out of its range.

    >>> polynomial = Polynomial(1.0, 0.1, power=2, steps=4)
    >>> polynomial(jnp.arange(6)).tolist()
    [1.0, 0.60625, 0.325, 0.15625, 0.1, 0.1]
    """

    start: Hyper
    end: Hyper
    power: Hyper
    steps: Hyper
    begin: Hyper = 0
    ranges: ClassVar = {"power": "> 0", "steps": "> 0", "begin": ">= 0"}

    def at(self, count: Array) -> Array:
        _, left = passed(after(count, self.begin), self.steps)
        share = power(left, self.power)
        return self.start * share + self.end * (1 - share)


class Exponential(Schedule):
    """The same factor in every so many updates.

        p     = max(count - begin, 0) / steps           staircase: rounded down
        value = start * rate^p                          and not past `end`

    Args:
        start: the value at count 0, and until `begin`.
        rate: the factor in `steps` updates, > 0.
        steps: in how many updates, > 0.
        begin: the count at which it starts, >= 0.
        staircase: whether the value stays until `steps` updates are full.
        end: the least value if `rate` is below 1, else the largest; None for none.
    Raises: ValueError if a number is out of its range.

    >>> exponential = Exponential(0.8, rate=0.25, steps=2, end=0.07)
    >>> exponential(jnp.arange(5)).tolist()
    [0.8, 0.4, 0.2, 0.1, 0.07]
    """

    start: Hyper
    rate: Hyper
    steps: Hyper
    begin: Hyper = 0
    staircase: bool = False
    end: Hyper | None = None
    ranges: ClassVar = {"rate": "> 0", "steps": "> 0", "begin": ">= 0"}

    def at(self, count: Array) -> Array:
        n = after(count, self.begin)
        p = periods(n, self.steps)[0] if self.staircase else real(n) / self.steps
        value = self.start * finite(self.rate**p)
        if self.end is None:
            return value
        least, most = jnp.maximum(value, self.end), jnp.minimum(value, self.end)
        return jnp.where(self.rate < 1, least, most)


class InverseTime(Schedule):
    """Falls as one over the time: ever slower, without an end.

        p     = count / steps                           staircase: rounded down
        value = start / (1 + rate * p)

    Args:
        start: the value at count 0.
        rate: how fast it falls; after `steps / rate` updates it is half; >= 0.
        steps: the unit of time, in updates, > 0.
        staircase: whether the value stays until `steps` updates are full.
    Raises: ValueError if a number is out of its range.
    Source: Robbins and Monro 1951, "A stochastic approximation method", for the 1/t.

    >>> InverseTime(0.6, rate=0.5, steps=2)(jnp.arange(5)).tolist()
    [0.6, 0.48, 0.4, 0.342857, 0.3]
    """

    start: Hyper
    rate: Hyper
    steps: Hyper
    staircase: bool = False
    ranges: ClassVar = {"rate": ">= 0", "steps": "> 0"}

    def at(self, count: Array) -> Array:
        p = (
            periods(count, self.steps)[0]
            if self.staircase
            else real(count) / self.steps
        )
        return self.start / (1 + self.rate * p)


class Step(Schedule):
    """Multiplied by a factor at the end of every so many updates.

        value = start * factor^floor(count / steps)

    Args:
        start: the value at count 0.
        steps: how long it stays, in updates, > 0.
        factor: >= 0.
    Raises: ValueError if a number is out of its range.
    Source: torch's StepLR; for steps of different lengths see `Piecewise`.

    >>> Step(0.8, steps=2, factor=0.5)(jnp.arange(6)).tolist()
    [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]
    """

    start: Hyper
    steps: Hyper
    factor: Hyper = 0.1
    ranges: ClassVar = {"steps": "> 0", "factor": ">= 0"}

    def at(self, count: Array) -> Array:
        return self.start * finite(self.factor ** periods(count, self.steps)[0])


class Cosine(Schedule):
    """Along half a period of a cosine, and then constant.

        x     = min(count / steps, 1)
        value = end + (start - end) * ((1 + cos(pi * x)) / 2)^power

    Args:
        start: the value at count 0.
        steps: length of the way, in updates, > 0.
        end: the value from count `steps` on. It is absolute: optax's `alpha` is
            `end / start`.
        power: above 1 it is nearer to `end` all the way; > 0.
    Raises: ValueError if a number is out of its range.
    Source: Loshchilov and Hutter 2016, equation 5, arXiv:1608.03983. torch's
        CosineAnnealingLR goes up again after `steps`: that is `CosineCycle`.

    >>> cosine = Cosine(0.5, steps=4, end=0.1)
    >>> cosine(jnp.arange(6)).tolist()
    [0.5, 0.441421, 0.3, 0.158579, 0.1, 0.1]
    """

    start: Hyper
    steps: Hyper
    end: Hyper = 0.0
    power: Hyper = 1.0
    ranges: ClassVar = {"steps": "> 0", "power": "> 0"}

    def at(self, count: Array) -> Array:
        _, share = eased(*passed(count, self.steps), "cosine")
        share = power(share, self.power)
        return self.start * share + self.end * (1 - share)
