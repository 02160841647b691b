"""Schedules that come back: with restarts, or up and down for ever."""

from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from optimjax.hyper import Hyper
from optimjax.schedules.base import Schedule
from optimjax.schedules.shapes import eased, passed, periods, real, way

__all__ = ["CosineCycle", "CosineRestarts", "Cyclic"]


class CosineCycle(Schedule):
    """Down and up along a cosine, for ever.

        value = end + (start - end) * (1 + cos(pi * count / steps)) / 2

    Args:
        start: the value at counts 0, 2 * steps, 4 * steps, ...
        steps: length of the way down, and of the way up, in updates, > 0.
        end: the value at counts steps, 3 * steps, ...
    Raises: ValueError if a number is out of its range.
    Source: torch's CosineAnnealingLR, which goes on so after its T_max.

    >>> CosineCycle(0.5, steps=3, end=0.1)(jnp.arange(8)).tolist()
    [0.5, 0.4, 0.2, 0.1, 0.2, 0.4, 0.5, 0.4]
    """

    start: Hyper
    steps: Hyper
    end: Hyper = 0.0
    ranges: ClassVar = {"steps": "> 0"}

    def at(self, count: Array) -> Array:
        _, n = periods(count, 2 * self.steps)
        left, done = passed(jnp.abs(self.steps - n), self.steps)
        rise, fall = eased(done, left, "cosine")
        return self.start * fall + self.end * rise


class CosineRestarts(Schedule):
    """Down along half a period of a cosine, again and again from the top ("SGDR").

        cycle k has length  L = steps * factor^k  and peak  start * decay^k
        value = end + (peak - end) * (1 + cos(pi * n / L)) / 2

    where n counts from the beginning of the cycle.

    Args:
        start: the value at count 0.
        steps: length of the first cycle, in updates, > 0.
        factor: by what each cycle is longer than the one before, >= 1.
        end: what each cycle comes down to; never reached, for the next one begins.
        decay: by what the peak of each cycle is smaller, in (0, 1].
    Raises: ValueError if a number is out of its range.
    Source: Loshchilov and Hutter 2016, equation 5, arXiv:1608.03983.

    >>> restarts = CosineRestarts(0.8, steps=2, factor=2, end=0.1, decay=0.5)
    >>> restarts(jnp.arange(8)).tolist()
    [0.8, 0.45, 0.4, 0.356066, 0.25, 0.143934, 0.2, 0.1961940]
    """

    start: Hyper
    steps: Hyper
    factor: Hyper = 1.0
    end: Hyper = 0.0
    decay: Hyper = 1.0
    ranges: ClassVar = {"steps": "> 0", "factor": ">= 1", "decay": "in (0, 1]"}

    def at(self, count: Array) -> Array:
        same, rest = periods(count, self.steps)
        grows = self.factor > 1
        longer = jnp.where(grows, self.factor, 2)  # 2: any number, for derivatives
        k, n = self._cycle(real(count), longer)
        k, n = jnp.where(grows, k, same), jnp.where(grows, n, rest)
        peak, steps = self.start * self.decay**k, self.steps * self.factor**k
        return way(n, steps, peak, self.end, "cosine")

    def _cycle(self, count: Array, factor: Array) -> tuple[Array, Array]:
        """The number of the cycle, and what of it is past, if cycles grow."""

        def begin(k: Array) -> Array:
            # Whole numbers where they are meant: a rounding error would put the first
            # update of a cycle at the end of the one before.
            x = self.steps * jnp.expm1(k * log) / (factor - 1)
            near = jnp.round(x)
            return jnp.where(
                jnp.abs(x - near) <= 32 * jnp.finfo(x.dtype).eps * x, near, x
            )

        log = jnp.log1p(factor - 1)
        k = jnp.floor(jnp.log1p(count / self.steps * (factor - 1)) / log)
        k = jnp.where(count < begin(k), k - 1, k)
        k = jnp.where(count >= begin(k + 1), k + 1, k)
        return k, count - begin(k)


class Cyclic(Schedule):
    """Up and down in straight lines, for ever.

        x     = n / up_steps           n < up_steps: updates since the cycle began
                (up_steps + down_steps - n) / down_steps            from there on
        value = low + (high - low) * x * s
        s     = 1                      mode "triangular"
                1 / 2^cycle            mode "triangular2", cycles from 0
                decay^count            mode "exp_range"

    Args:
        low: the value at count 0. For a momentum that goes against the learning rate it
            is the larger one.
        high: the value at count `up_steps`, before `s`.
        up_steps: length of the way from low to high, in updates, > 0.
        down_steps: length of the way back, > 0; None for `up_steps`.
        mode: how cycles become flatter: "triangular" (not), "triangular2", "exp_range".
        decay: of the mode "exp_range", per update, in (0, 1].
    Raises: ValueError if a number is out of its range.
    Source: Smith 2015, section 3, arXiv:1506.01186.

    >>> cyclic = Cyclic(0.1, 0.9, up_steps=2, mode="triangular2")
    >>> cyclic(jnp.arange(8)).tolist()
    [0.1, 0.5, 0.9, 0.5, 0.1, 0.3, 0.5, 0.3]
    """

    low: Hyper
    high: Hyper
    up_steps: Hyper
    down_steps: Hyper | None = None
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    decay: Hyper = 1.0
    ranges: ClassVar = {"up_steps": "> 0", "down_steps": "> 0", "decay": "in (0, 1]"}

    def at(self, count: Array) -> Array:
        down_steps = self.up_steps if self.down_steps is None else self.down_steps
        cycle, n = periods(count, self.up_steps + down_steps)
        up, _ = passed(n, self.up_steps)
        _, down = passed(n - self.up_steps, down_steps)
        x = jnp.where(n < self.up_steps, up, down)
        if self.mode == "triangular2":
            x = x * jnp.exp2(-cycle)
        elif self.mode == "exp_range":
            x = x * self.decay ** real(count)
        return self.low * (1 - x) + self.high * x
