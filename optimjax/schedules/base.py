"""What a schedule is: a function of the count of updates, whose numbers are data."""

import dataclasses
import math
import typing
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from optimjax.arrays import cast, is_traced, real_dtype, weaken
from optimjax.hyper import (
    ByPath,
    as_value,
    canonical,
    is_schedule,
    register_fields,
    spelled,
)

__all__ = ["Product", "Schedule"]

# What a schedule may hold in place of a number.
Inner: TypeAlias = Callable[[Any], Any] | ArrayLike

HOLDS: dict[str, Callable[[float], bool]] = {
    "> 0": lambda x: x > 0,
    ">= 0": lambda x: x >= 0,
    ">= 1": lambda x: x >= 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
}


@typing.dataclass_transform(frozen_default=True)
class Schedule:
    """A function of the 0-based count of updates, which is a pytree of its numbers.

        value = schedule(count)

    A subclass is a frozen dataclass by itself. It writes `at`, in which its numbers are
    scalars of the real dtype and `count` is an int32 from 0 on, of any shape, weakly
    typed. A field annotated `Hyper` (or a tuple of them) is a number: data, so that
    another value compiles nothing. `bool` and `Literal` are structure, `Inner` is a
    schedule inside.

    A negative count acts as 0. `schedule * x` is the product with a number or with
    another schedule. Schedules are equal if their structure and numbers are.

    Attributes:
        ranges: `{name: range}`, a key of `HOLDS`; tracers are not checked.

    >>> from optimjax import Hyper
    >>> class Halving(Schedule):
    ...     start: Hyper
    ...     every: Hyper = 10
    ...     ranges = {"every": "> 0"}
    ...
    ...     def at(self, count):
    ...         return self.start * 0.5 ** (count / self.every)
    >>> halving = Halving(0.3)
    >>> halving, halving(20)
    (Halving(start=0.3), Array(0.075, dtype=float32))
    """

    ranges: ClassVar[dict[str, str]] = {}
    __array_ufunc__: ClassVar[None] = None  # a NumPy number times a schedule is ours

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        hints = typing.get_type_hints(cls, include_extras=True)
        names = [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
        static = tuple(n for n in names if _options(hints[n]))
        data = tuple(n for n in names if n not in static)
        cls._static = {n: _options(hints[n]) for n in static}
        cls._inner = {n for n in data if Inner in (hints[n], *_args(hints[n]))}
        cls._many = {n for n in data if typing.get_origin(hints[n]) is tuple}
        cls._numbers = tuple(n for n in data if n not in cls._inner)

        register_fields(cls, data, static)

    _static: ClassVar[dict[str, tuple[Any, ...]]] = {}
    _inner: ClassVar[set[str]] = set()
    _many: ClassVar[set[str]] = set()
    _numbers: ClassVar[tuple[str, ...]] = ()

    def at(self, count: Array) -> Any:
        """The value at `count`, int32, from 0 on, of any shape."""
        raise NotImplementedError(f"{type(self).__name__} has no at")

    def __call__(self, count: ArrayLike) -> Array:
        """The value at each count: real, of the shape of `count`."""
        return _evaluate(self, count)

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, options in self._static.items():
            value = getattr(self, field)
            if value not in options:
                expected = " or ".join(map(repr, options))
                raise ValueError(f"{name}: {field} is {value!r}, expected {expected}.")
        for f in dataclasses.fields(typing.cast(Any, self)):
            value = getattr(self, f.name)
            optional = value is None and f.default is None
            if f.name not in self._static and not optional:
                value = self._data(f"{name}: {f.name}", value, f.name)
                object.__setattr__(self, f.name, value)

    def _data(self, owner: str, value: Any, field: str) -> Any:
        """A field in its one form: a float, array or schedule, or a tuple of them."""
        inner, many = field in self._inner, field in self._many
        if many and isinstance(value, (tuple, list, range)):
            return tuple(self._one(owner, each, field) for each in value)
        if many and (inner or np.ndim(value) != 1):
            what = "schedules" if inner else "numbers"
            raise TypeError(f"{owner} is {value!r}, expected a tuple of {what}.")
        return self._one(owner, value, field)

    def _one(self, owner: str, value: Any, field: str) -> Any:
        inner = field in self._inner
        try:
            if is_schedule(value) and not inner:
                raise TypeError
            value = canonical(value, owner)
            if isinstance(value, ByPath):
                raise TypeError
        except TypeError:
            what = "a number or a schedule" if inner else "a number"
            raise TypeError(f"{owner} is {value!r}, expected {what}.") from None
        if is_traced(value) or is_schedule(value):
            return value
        for number in np.ravel(value):
            wanted = self.ranges.get(field, "")
            if not math.isfinite(number):
                raise ValueError(f"{owner} is {number:g}, expected a finite number.")
            if wanted and not HOLDS[wanted](number):
                raise ValueError(f"{owner} is {number:.7g}, expected {wanted}.")
        return value

    def known(self, *names: str) -> bool:
        """Whether these are plain numbers, so that a subclass can compare them."""
        return all(isinstance(getattr(self, name), float) for name in names)

    def ordered(self, low: str, high: str) -> None:
        """ValueError unless the number `low` is at most the number `high`."""
        least, most = getattr(self, low), getattr(self, high)
        if self.known(low, high) and least > most:
            raise ValueError(
                f"{type(self).__name__}: {low} is {least:.7g}, expected at most "
                f"{most:.7g}, which is {high}."
            )

    def __mul__(self, other: Any) -> "Product":
        numeric = isinstance(other, (int, float, np.generic, np.ndarray, jax.Array))
        known = numeric or is_schedule(other)
        return Product(self, typing.cast(Any, other)) if known else NotImplemented

    __rmul__ = __mul__

    def _key(self) -> tuple[Any, ...]:
        return as_value(self)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._key() == typing.cast(Schedule, other)._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        shown = []
        for f in dataclasses.fields(typing.cast(Any, self)):
            text = _spelled(vars(self)[f.name])
            if f.default is dataclasses.MISSING or text != _spelled(f.default):
                shown.append(f"{f.name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _args(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint)


def _options(hint: Any) -> tuple[Any, ...]:
    """The values that a field of this annotation may take; none for one of data."""
    if hint is bool:
        return (False, True)
    return _args(hint) if typing.get_origin(hint) is Literal else ()


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_spelled, value))}{',' if len(value) == 1 else ''})"
    return spelled(value)


@partial(jax.jit, inline=True)
def _evaluate(schedule: Schedule, count: Array) -> Array:
    """Jitted, so that one call outside of `jit` is one program, not twenty."""
    name = type(schedule).__name__
    if not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(
            f"{name}: count is {count.dtype.name}, expected an integer, the 0-based "
            "number of updates."
        )
    dtype = real_dtype()
    made = object.__new__(type(schedule))
    vars(made).update(vars(schedule))
    for field in schedule._numbers:
        value = vars(schedule)[field]
        vars(made)[field] = jax.tree.map(lambda x: cast(x, dtype), value)
    # Weakly typed, so that it may be mixed with numbers under strict promotion, too.
    value = cast(made.at(weaken(_whole(count))), dtype)
    if value.shape not in ((), count.shape):
        raise ValueError(
            f"{name}: numbers of shape {value.shape}, expected scalars. To sweep one, "
            "use jax.vmap over the schedule."
        )
    return jnp.broadcast_to(value, count.shape)


def _whole(count: Array) -> Array:
    """Any integers as int32 from 0 on."""
    if count.dtype.itemsize >= 4:
        count = jnp.minimum(count, jnp.iinfo(jnp.int32).max)
    return jnp.maximum(lax.convert_element_type(count, jnp.int32), 0)


def value_at(schedule: Any, count: Array) -> Array:
    """A schedule inside, or the number in its place, at `count`, int32."""
    if not is_schedule(schedule):
        return cast(schedule, real_dtype())
    return lax.convert_element_type(schedule(weaken(count)), real_dtype())


class Product(Schedule):
    """Two schedules, or a schedule and a number, multiplied: `a * b`.

        value = a(count) * b(count)

    It stands for torch's ChainedScheduler, with the base rate in one of the two.

    Args:
        a: a schedule or a number.
        b: likewise.
    Raises: TypeError if one is neither.

    >>> from optimjax import schedules
    >>> product = 0.5 * schedules.Linear(0.1, 0.3, steps=4)
    >>> product, product(3)
    (Product(a=Linear(start=0.1, end=0.3, steps=4), b=0.5), Array(0.125, dtype=float32))
    """

    a: Inner
    b: Inner

    def at(self, count: Array) -> Array:
        return value_at(self.a, count) * value_at(self.b, count)
