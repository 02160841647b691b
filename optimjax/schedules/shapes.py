"""What schedules are written with: shares of a way, shapes of it, whole counts."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from optimjax.arrays import real_dtype

__all__ = []


def real(count: Array) -> Array:
    return lax.convert_element_type(count, real_dtype())


def whole(boundary: Array) -> Array:
    """The first count that is not before `boundary`, int32."""
    most = 2**31 - 128  # float32 has no number between this and 2^31
    return lax.convert_element_type(jnp.clip(jnp.ceil(boundary), 0, most), jnp.int32)


def after(count: Array, boundary: Array) -> Array:
    """Counts since `boundary`, int32, 0 before it."""
    return jnp.maximum(count - whole(boundary), 0)


def passed(count: Array, steps: Array) -> tuple[Array, Array]:
    """Which share of `steps` is done at `count`, and which is left, both in [0, 1].

    Each is computed without the other, so that neither loses digits near 0, and 0 and 1
    are exact. Of 0 steps all are done.
    """
    n = count if jnp.issubdtype(count.dtype, jnp.floating) else real(count)
    some = steps > 0
    n, safe = jnp.clip(n, 0, steps), jnp.where(some, steps, 1)
    return jnp.where(some, n / safe, 1), jnp.where(some, (steps - n) / safe, 0)


def eased(done: Array, left: Array, shape: str) -> tuple[Array, Array]:
    """Weights of the end and of the start, on a way of which `done` is done.

    Their sum is 1; that of the start falls as a line, as half a period of a cosine, or
    as 1 - sqrt(done).
    """
    if shape == "cosine":  # (1 + cos(pi * done)) / 2, without its cancellation
        half = jnp.pi / 2
        return jnp.sin(half * done) ** 2, jnp.sin(half * left) ** 2
    if shape == "1-sqrt":
        # No root of 0, which has no derivative; the fall as a quotient for its digits.
        rise = jnp.sqrt(jnp.maximum(done, jnp.finfo(done.dtype).tiny))
        return rise, left / (1 + rise)
    return done, left


def way(n: Array, steps: Array, start: Any, end: Any, shape: str) -> Array:
    """The value after `n` of `steps` from `start` to `end`, which holds afterwards."""
    rise, fall = eased(*passed(n, steps), shape)
    return start * fall + end * rise


def power(base: Array, exponent: Array) -> Array:
    """base^exponent, with 0 at 0, where derivatives are 0 too."""
    some = base > 0
    return jnp.where(some, jnp.where(some, base, 1) ** exponent, 0)


def periods(count: Array, steps: Array) -> tuple[Array, Array]:
    """How many times `steps` fits into `count`, int32, and what remains, both real.

    In two parts, each exact in float32: the remainder is right to the last count.
    """
    high, low = real(count & ~0xFFFF), real(count & 0xFFFF)
    rest = lax.rem(lax.rem(high, steps) + low, steps)
    return jnp.round((real(count) - rest) / steps), rest


def finite(x: Array) -> Array:
    """`x`, where it is larger than any number the largest: 0 times that is 0."""
    return jnp.minimum(x, jnp.finfo(x.dtype).max)
