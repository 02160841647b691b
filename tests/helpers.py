"""What several test files share: comparisons to the bit, counters, models."""

import collections
import contextlib
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

COMPILED = "/jax/core/compile/backend_compile_duration"


def same_bits(a, b):
    """Assert that two trees agree in structure, dtype, weak type and every bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    for (path, x), y in pairs:
        where = jax.tree_util.keystr(path)
        assert signature(x) == signature(y), where
        if hasattr(x, "dtype"):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), where
        else:
            assert x is y or x == y, where


def signature(x):
    """All of a leaf on which the compilation of a function of it depends."""
    if not hasattr(x, "dtype"):
        return type(x)
    return (x.shape, x.dtype, getattr(x, "weak_type", False))


def signatures(tree):
    """The structure of `tree`, and the signature of each of its leaves."""
    return jax.tree.structure(tree), [signature(x) for x in jax.tree.leaves(tree)]


def close(actual, expected, rtol=1e-5, atol=1e-7):
    """Assert that two trees of arrays have equal structure and close values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(wide(x), wide(y), rtol=rtol, atol=atol)


def wide(x):
    """`x` as NumPy, in float64 or complex128: NumPy cannot compare bfloat16."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def numpy_adam(x, grads, learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8):
    """Where Adam takes `x`, in float64 or complex128, by the paper's equations."""
    x = wide(x)
    m, v = np.zeros_like(x), np.zeros(x.shape)
    for t, g in enumerate(grads, 1):
        g = wide(g)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * np.abs(g) ** 2
        x = x - learning_rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return x


def buffers(tree):
    """Addresses of the device memory of every non-empty array in `tree`."""
    return [
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(tree)
        if isinstance(x, jax.Array) and x.size
        for shard in x.addressable_shards
    ]


@contextlib.contextmanager
def compilations():
    """A list that grows by one for each program that XLA compiles meanwhile."""
    seen = []

    def listen(event, duration, **_):
        if event == COMPILED:
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Pair(collections.namedtuple("Pair", ["encoder", "decoder"])):
    """A NamedTuple model, whose fields keep their order in paths."""

    __slots__ = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A registered dataclass model with a field that is not data."""

    weight: jax.Array
    bias: jax.Array
    name: str = dataclasses.field(default="layer", metadata={"static": True})

    def __call__(self, x):
        return jnp.tanh(x @ self.weight + self.bias)


class Net(eqx.Module):
    """An Equinox model: one layer object used twice, functions and other leaves."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    activation: object
    scale: float
    steps: jax.Array
    note: str

    def __init__(self, key):
        self.first = self.second = eqx.nn.Linear(3, 3, key=key)
        self.activation = jax.nn.relu
        self.scale = 0.5
        self.steps = jnp.array(7)
        self.note = "tied"

    def __call__(self, x):
        hidden = self.activation(self.first(x))
        return self.scale * self.second(hidden)


class Counter:
    """A function that counts its own traces (or calls, outside of `jit`)."""

    def __init__(self, function):
        self.function = function
        self.traces = 0

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.function(*args, **kwargs)
