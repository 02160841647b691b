"""A random generator for each slot, and what is drawn from it."""

import dataclasses
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from optimjax.arrays import cast
from optimjax.hyper import Hyper
from optimjax.leaf import LeafRule, LeafState
from optimjax.paths import Path, Slots
from optimjax.treewide import PyTree

__all__ = []

THREEFRY = "threefry2x32"  # named, so that a user's default changes no numbers


class Key(NamedTuple):
    key: Array


class Keyed(LeafRule):
    """What rules that draw random numbers share: a key for each slot.

    A key is started from `seed` and the slot's path, so that the numbers of one slot do
    not change when others come, go or are skipped. A rule derives from this class and
    declares its own field `seed`.

    State: `key`, data of a threefry key, uint32, (2,).
    """

    seed: int

    def init(self, params: PyTree) -> LeafState:
        """As of every `LeafRule`; here, because the key needs the slot's path."""
        state = super().init(params)
        root = jax.random.key(self.seed, impl=THREEFRY)

        def start(path: Path) -> Key:
            return Key(jax.random.key_data(key_of_slot(root, path)))

        slots = Slots({path: start(path) for path in state.slots})
        return dataclasses.replace(state, slots=slots)

    def init_leaf(self, x):
        return None

    def draw(self, state: Key) -> tuple[Key, Array]:
        """The next key to keep, and one to draw from."""
        key, here = jax.random.split(jax.random.wrap_key_data(state.key, impl=THREEFRY))
        return Key(jax.random.key_data(key)), here


class Noisy(Keyed):
    """What rules with Gaussian noise share.

        n ~ Normal(0, eta / t^gamma)

    A rule derives from this class and declares its own `eta`, `gamma` and `seed`.
    """

    eta: Hyper
    gamma: Hyper

    def noise(self, state: Key, x: Array, t: Array) -> tuple[Key, Array]:
        """The next key, and noise of the shape and dtype of `x`."""
        state, here = self.draw(state)
        unit = gaussian(here, x.shape, x.dtype)
        return state, jnp.sqrt(self.eta / t**self.gamma) * unit


def nth_key(seed: int, n: Any) -> Array:
    """The n-th key of a generator; it depends on no path."""
    return jax.random.fold_in(jax.random.key(seed, impl=THREEFRY), n)


def key_of_slot(key: Array, path: Path) -> Array:
    """A key for one slot, the same whichever others there are."""
    return jax.random.fold_in(key, np.uint32(zlib.crc32(path.encode())))


def gaussian(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Drawn in float32 always: float64 would be other numbers, not more digits."""
    return cast(jax.random.normal(key, shape, jnp.float32), dtype)
