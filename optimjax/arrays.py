"""What rules and state ask of arrays: their dtypes, their zeros, their buffers."""

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.experimental.shard_alike import shard_alike
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike, DTypeLike

__all__ = ["abs_sq", "zeros_like"]


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def is_numeric(x: Any) -> bool:
    """Whether `x` is an array that JAX can compute with; one of strings is not."""
    return isinstance(x, jax.Array) or (
        isinstance(x, np.ndarray)
        and (x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.number))
    )


def is_inexact(x: Any) -> bool:
    """Whether `x` is an array that can be trained: floating or complex."""
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def is_traced(x: Any) -> bool:
    return isinstance(x, Tracer)


def real_dtype() -> np.dtype:
    """The dtype of hyperparameters: float32, or float64 where JAX's x64 mode is on."""
    return jax.dtypes.canonicalize_dtype(np.float64)


@lru_cache
def compute_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype in which a parameter's arithmetic is done: at least 32 bits a number.

    >>> compute_dtype(jnp.bfloat16), compute_dtype(jnp.complex64)
    (dtype('float32'), dtype('complex64'))
    """
    if np.dtype(dtype).itemsize < 4:  # 8-bit dtypes have no promotion of their own
        return np.dtype(np.float32)
    return wider(dtype, jnp.float32)


@lru_cache
def wider(a: DTypeLike, b: DTypeLike) -> np.dtype:
    """The dtype that holds both, also where a user has asked for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def real_part_dtype(dtype: DTypeLike) -> np.dtype:
    return jnp.finfo(dtype).dtype


def cast(x: Any, dtype: DTypeLike) -> Array:
    """`x` in `dtype`, strongly typed; complex where it must be real is an error."""
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"a complex array cannot be kept as {np.dtype(dtype).name}: take its real "
            "part, or abs_sq for a squared magnitude."
        )
    return lax.convert_element_type(x, dtype)


def strong(x: ArrayLike) -> Array:
    """`x` as an array that is not weakly typed: the same object if it is one."""
    if isinstance(x, jax.Array) and not x.weak_type:
        return x
    x = jnp.asarray(x)
    return cast(x, x.dtype)


def cast_like(x: Array, like: Any) -> Array:
    """`x` with the dtype of `like`, and weakly typed if `like` is."""
    x = cast(x, like.dtype)
    return weaken(x) if getattr(like, "weak_type", False) else x


def weaken(x: Array) -> Array:
    """`x`, weakly typed as a Python number is: it gives way to what it meets."""
    return convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=None
    )


def widen(x: ArrayLike) -> Array:
    """`x` in its compute dtype; the same object if it has it already."""
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    wide = compute_dtype(x.dtype)
    return x if x.dtype == wide else lax.convert_element_type(x, wide)


def zeros_like(x: ArrayLike, *, real: bool = False, dtype: Any = None) -> Array:
    """An accumulator for `x`: zeros of its shape and sharding, of at least 32 bits.

    Args:
        x: the parameter, any shape.
        real: the accumulator holds magnitudes, so it is real where `x` is complex.
        dtype: the accumulator's dtype, in place of the one that follows from `x`.

    >>> zeros_like(jnp.ones(2, jnp.bfloat16))
    Array([0., 0.], dtype=float32)
    >>> zeros_like(jnp.ones(2, jnp.complex64), real=True)
    Array([0., 0.], dtype=float32)
    """
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    dtype = compute_dtype(x.dtype) if dtype is None else np.dtype(dtype)
    dtype = real_part_dtype(dtype) if real else dtype
    if is_traced(x):
        # Zeros depend on no input, so XLA would place them whole on one device, however
        # the parameter is sharded.
        return shard_alike(x, jnp.zeros_like(x, dtype=dtype))[1]
    return jnp.zeros_like(x, dtype=dtype) if x.committed else _zeros(x.shape, dtype)


def alike(x: ArrayLike, y: Array) -> Array:
    """`y`, which has the shape of `x`, with the sharding of `x`."""
    if is_traced(x) or is_traced(y):
        return shard_alike(x, y)[1]
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return jax.device_put(y, x.sharding) if x.committed else y


@partial(jax.jit, static_argnums=(0, 1))
def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """As `jnp.zeros`, with a tenth of the Python: `setup` calls it for every slot."""
    return jnp.zeros(shape, dtype)


def abs_sq(x: ArrayLike) -> Array:
    """|x|^2, elementwise and real, without the square root that `abs` would take.

    >>> abs_sq(jnp.array([3 - 4j]))
    Array([25.], dtype=float32)
    """
    x = jnp.asarray(x)
    if jnp.iscomplexobj(x):
        return lax.square(x.real) + lax.square(x.imag)
    return lax.square(x)


def agreement(a: Array, b: Array) -> Array:
    """Real, above 0 where two numbers point to one side, below 0 where they do not.

    Signs are multiplied, not numbers, whose product may underflow to 0.
    """
    return (jnp.sign(a).conj() * jnp.sign(b)).real


def varying_axes(x: Array) -> tuple[str, ...]:
    """Along which axes of the mesh a `shard_map` shows other parts; none elsewhere."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # before jax 0.10 it was `vma`
    return tuple(sorted(getattr(aval, "vma", ()) if manual is None else manual.varying))


def varying_as(x: Array, y: Array) -> Array:
    """`y` as one that may differ from device to device where `x` does."""
    axes = tuple(axis for axis in varying_axes(x) if axis not in varying_axes(y))
    return lax.pcast(y, axes, to="varying") if axes else y


def total(x: ArrayLike) -> Array:
    """The sum of a whole array, also where a `shard_map` shows a part of it.

    There JAX knows along which axes of the mesh the parts differ (unless it is told
    not to look, by `check_vma=False`), and over those the partial sums are added.

    >>> total(jnp.ones((2, 3)))
    Array(6., dtype=float32)
    """
    part = jnp.sum(x)
    axes = varying_axes(part)
    return lax.psum(part, axes) if axes else part


def root(square: Array) -> Array:
    """The square root; at 0 its derivative is 0, not NaN."""
    return jnp.where(square == 0, 0, jnp.sqrt(jnp.where(square == 0, 1, square)))


def norm(x: Array) -> Array:
    """Euclidean norm of a whole array, real; NaN if a number is."""
    return root(total(abs_sq(x)))


def size(x: Array) -> Array:
    """How many numbers a whole array has, real, at least 1; in a `shard_map`, too."""
    part = jnp.sum(abs_sq(x))  # differs along the same axes of the mesh
    return total(jnp.full_like(part, max(x.size, 1)))


def rms(x: Array) -> Array:
    """Root of the mean of |x|^2 over a whole array, real; 0 if it is empty."""
    return root(total(abs_sq(x)) / size(x))


def lengths(x: Array, axes: int | tuple[int, ...]) -> Array:
    """Euclidean norms along axes, which are kept, real."""
    return root(jnp.sum(abs_sq(x), axes, keepdims=True))


def ratio(a: Array, b: Array) -> Array:
    """a / b, number by number; 0 where b is, NaN where it is NaN."""
    return jnp.where(b != 0, a / jnp.where(b != 0, b, 1), 0)


def buffer(x: Any) -> int | None:
    """Where a concrete array's first shard lies in memory; None if nowhere known."""
    if not isinstance(x, jax.Array) or is_traced(x) or x.size == 0 or x.is_deleted():
        return None
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return None
    try:
        return (
            x.unsafe_buffer_pointer()
            if len(x.sharding.device_set) == 1
            else x.addressable_data(0).unsafe_buffer_pointer()
        )
    except Exception:  # a backend that shows no pointers: identity of objects is left
        return None


def placement(arrays: Any) -> Sharding | None:
    """The sharding of a scalar that lives where all `arrays` live; None if anywhere."""
    committed = [
        x.sharding
        for x in arrays
        if isinstance(x, jax.Array) and not is_traced(x) and x.committed
    ]
    if len({frozenset(sharding.device_set) for sharding in committed}) != 1:
        return None
    for sharding in committed:
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return committed[0] if len(committed[0].device_set) == 1 else None


def placed(x: Any, sharding: Sharding | None) -> Array:
    """`x` as a new array of its own, at `sharding` unless it has a place already."""
    if is_traced(x):
        return jnp.asarray(x)
    if sharding is None or (isinstance(x, jax.Array) and x.committed):
        return jnp.array(x, copy=True)
    return jax.device_put(jnp.array(x, copy=True), sharding)
