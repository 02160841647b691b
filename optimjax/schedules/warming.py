"""Schedules that rise before they fall, because first steps should be small."""

from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from optimjax.hyper import Hyper
from optimjax.schedules.base import Inner, Schedule, value_at
from optimjax.schedules.shapes import after, eased, passed, power, real, way

__all__ = ["InverseSqrt", "OneCycle", "Trapezoid", "Warmup", "WarmupCosine"]


class Warmup(Schedule):
    """In a straight line to where another schedule begins, and then along that one.

        value = start + (schedule(0) - start) * count / steps       count < steps
                schedule(count - steps)                             from there on

    Args:
        schedule: what follows, in counts of its own from 0; a number for a constant.
        steps: length of the warm-up, in updates, >= 0. With 0 there is none. (optax
            then stays at the first value for ever.)
        start: the value at count 0.
    Raises: ValueError if a number is out of its range; TypeError for a `schedule` that
        is none.
    Source: Goyal et al. 2017, section 2.2, arXiv:1706.02677.

    >>> from optimjax.schedules import Exponential
    >>> warmup = Warmup(Exponential(0.8, rate=0.5, steps=1), steps=3, start=0.2)
    >>> warmup(jnp.arange(6)).tolist()
    [0.2, 0.4, 0.6, 0.8, 0.4, 0.2]
    """

    schedule: Inner
    steps: Hyper
    start: Hyper = 0.0
    ranges: ClassVar = {"steps": ">= 0"}

    def at(self, count: Array) -> Array:
        done, left = passed(count, jnp.ceil(self.steps))
        return (
            self.start * left + value_at(self.schedule, after(count, self.steps)) * done
        )


class WarmupCosine(Schedule):
    """In a straight line to the peak, and down along half a period of a cosine.

        value = start + (peak - start) * count / warmup_steps
                                                    count < warmup_steps
        x     = min((count - warmup_steps) / (steps - warmup_steps), 1)
        value = end + (peak - end) * ((1 + cos(pi * x)) / 2)^power
                                                    from there on

    Args:
        peak: the value at count `warmup_steps`.
        warmup_steps: length of the warm-up, in updates, >= 0.
        steps: length of it all, the warm-up INCLUDED, in updates, > 0.
        start: the value at count 0, if there is a warm-up.
        end: the value from count `steps` on, absolute.
        power: above 1 it is nearer to `end` all the way down; > 0.
    Raises: ValueError if a number is out of its range, or for more steps of warm-up
        than there are.
    Source: Goyal et al. 2017, arXiv:1706.02677, and Loshchilov and Hutter 2016,
        arXiv:1608.03983.

    >>> warmup = WarmupCosine(0.8, warmup_steps=2, steps=6, end=0.1)
    >>> warmup(jnp.arange(8)).tolist()
    [0.0, 0.4, 0.8, 0.697487, 0.45, 0.202513, 0.1, 0.1]
    """

    peak: Hyper
    warmup_steps: Hyper
    steps: Hyper
    start: Hyper = 0.0
    end: Hyper = 0.0
    power: Hyper = 1.0
    ranges: ClassVar = {"warmup_steps": ">= 0", "steps": "> 0", "power": "> 0"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ordered("warmup_steps", "steps")

    def at(self, count: Array) -> Array:
        n = real(count)
        done, left = passed(n, self.warmup_steps)
        up = self.start * left + self.peak * done
        far = passed(n - self.warmup_steps, self.steps - self.warmup_steps)
        share = power(eased(*far, "cosine")[1], self.power)
        down = self.peak * share + self.end * (1 - share)
        return jnp.where(n < self.warmup_steps, up, down)


class InverseSqrt(Schedule):
    """In a straight line to the peak, and then down as one over the square root.

        t     = count + 1
        value = peak * min(t / warmup_steps, sqrt(warmup_steps / t))

    The count is that of the paper, from 1: the first update already takes a step, of
    `peak / warmup_steps`, and the peak is reached at count `warmup_steps - 1`.

    Args:
        peak: the largest value. The paper's is 1 / sqrt(width * warmup_steps).
        warmup_steps: length of the warm-up, in updates, > 0; 1 for none.
    Raises: ValueError if a number is out of its range.
    Source: Vaswani et al. 2017, equation 3, arXiv:1706.03762 ("Noam").

    >>> InverseSqrt(0.6, warmup_steps=3)(jnp.array([0, 1, 2, 3, 11])).tolist()
    [0.2, 0.4, 0.6, 0.519615, 0.3]
    """

    peak: Hyper
    warmup_steps: Hyper
    ranges: ClassVar = {"warmup_steps": "> 0"}

    def at(self, count: Array) -> Array:
        t = real(count) + 1
        up, down = t / self.warmup_steps, jnp.sqrt(self.warmup_steps / t)
        return self.peak * jnp.minimum(up, down)


class Trapezoid(Schedule):
    """Warm-up, a long stable stretch, and a decay at the end ("WSD").

        rise  = start + (peak - start) * count / warmup_steps
        x     = (count - (steps - decay_steps)) / decay_steps, at most 1
        value = rise                            count < warmup_steps
                peak                            count < steps - decay_steps
                end + (peak - end) * fall(x)    from there on
        fall(x) = 1 - x,  1 - sqrt(x),  or  (1 + cos(pi * x)) / 2

    Args:
        peak: the value of the stable stretch.
        warmup_steps: length of the warm-up, in updates, >= 0.
        steps: length of it all, in updates, > 0.
        decay_steps: length of the decay, in updates, >= 0.
        start: the value at count 0, if there is a warm-up.
        end: the value from count `steps` on.
        shape: of the decay, "linear", "1-sqrt" or "cosine".
    Raises: ValueError if a number is out of its range, or if warm-up and decay are
        longer than it all.
    Source: Hu et al. 2024, section 4, arXiv:2404.06395; the shape "1-sqrt": Hägele et
        al. 2024, section 3, arXiv:2405.18392.

    >>> wsd = Trapezoid(0.8, 2, 8, decay_steps=4, shape="1-sqrt")
    >>> wsd(jnp.arange(10)).tolist()
    [0.0, 0.4, 0.8, 0.8, 0.8, 0.4, 0.2343146, 0.1071797, 0.0, 0.0]
    """

    peak: Hyper
    warmup_steps: Hyper
    steps: Hyper
    decay_steps: Hyper
    start: Hyper = 0.0
    end: Hyper = 0.0
    shape: Literal["linear", "1-sqrt", "cosine"] = "linear"
    ranges: ClassVar = {
        "warmup_steps": ">= 0",
        "steps": "> 0",
        "decay_steps": ">= 0",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.known("warmup_steps", "steps", "decay_steps")
        if known and self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                "Trapezoid: warmup_steps + decay_steps is "
                f"{self.warmup_steps + self.decay_steps:g}, expected at most "
                f"{self.steps:g}, which is steps."
            )

    def at(self, count: Array) -> Array:
        n, stable = real(count), self.steps - self.decay_steps
        done, left = passed(n, self.warmup_steps)
        up = self.start * left + self.peak * done
        down = way(n - stable, self.decay_steps, self.peak, self.end, self.shape)
        return jnp.where(n < stable, up, down)


class OneCycle(Schedule):
    """Up to the peak and down below the start, in one run.

        value: start = peak / div  at count 0
               peak                at count warmup * steps
               start               at count back * steps, if `back` is given
               start / final_div   at count `steps`, and from there on

    In between along half a period of a cosine each, or in straight lines.

    Args:
        peak: the largest value.
        steps: the count from which on the value is the last one, > 0.
        warmup: share of `steps` until the peak, in [0, 1].
        div: by what the first value is smaller than the peak, > 0.
        final_div: by what the last value is smaller than the first, > 0.
        shape: "cosine" or "linear".
        back: share of `steps` until the first value is reached again; None to go from
            the peak to the last value at once.
    Raises: ValueError if a number is out of its range, or if `back` is before `warmup`.
    Source: Smith and Topin 2017, arXiv:1708.07120. optax rounds `warmup * steps` (and
        its `pct_final`, our `back`) down. torch's OneCycleLR of T steps is this one
        with `steps=T - 1` and `warmup=(pct_start * T - 1) / (T - 1)`, three_phase with
        `back=(2 * pct_start * T - 2) / (T - 1)`; and it rises again after its end.

    >>> cycle = OneCycle(0.8, steps=6, div=4, final_div=10, warmup=1/3, shape="linear")
    >>> cycle(jnp.arange(8)).tolist()
    [0.2, 0.5, 0.8, 0.605, 0.41, 0.215, 0.02, 0.02]
    """

    peak: Hyper
    steps: Hyper
    warmup: Hyper = 0.3
    div: Hyper = 25.0
    final_div: Hyper = 1e4
    shape: Literal["cosine", "linear"] = "cosine"
    back: Hyper | None = None
    ranges: ClassVar = {
        "steps": "> 0",
        "warmup": "in [0, 1]",
        "div": "> 0",
        "final_div": "> 0",
        "back": "in [0, 1]",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.back is not None:
            self.ordered("warmup", "back")

    def at(self, count: Array) -> Array:
        n, top = real(count), self.warmup * self.steps
        low = self.peak / self.div
        last = low / self.final_div
        up = way(n, top, low, self.peak, self.shape)
        if self.back is None:
            down = way(n - top, self.steps - top, self.peak, last, self.shape)
        else:
            turn = self.back * self.steps
            down = way(n - top, turn - top, self.peak, low, self.shape)
            out = way(n - turn, self.steps - turn, low, last, self.shape)
            down = jnp.where(n < turn, down, out)
        return jnp.where(n < top, up, down)
