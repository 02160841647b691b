"""Gradient descent whose learning rate is the distance come, over gradients."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import abs_sq, ratio
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.rule import rule
from optimjax.together import TogetherRule

__all__ = ["DoG", "DoWG"]


class Start(NamedTuple):
    x0: Array


class Distances(NamedTuple):
    distance: Array
    squares: Array
    rate: Array


@rule
class DoG(TogetherRule):
    """Distance over gradients.

        distance <- max(distance, |x - x0|)
        squares  <- squares + |g|^2
        rate      = distance / sqrt(squares + eps)
        step      = learning_rate * rate * g

    Norms are over all slots that have a gradient; x0 is where a slot was at `setup`.
    The first distance is reps_rel * (1 + |x0|), unless another is given. Its authors
    evaluate an average of the parameters: `EMA(DoG(), debias=True)`.

    Args:
        learning_rate: factor on the rate, without unit, >= 0.
        reps_rel: the first distance as a share of 1 + |x0|, >= 0; the authors' advice
            is 1e-4 with batch normalisation, else 1e-6.
        eps: added to the sum of squares, in the gradient's unit squared, >= 0.
        by_layer: give each slot a distance, a sum and a rate of its own ("L-DoG").
        init_distance: the first distance, in the parameter's unit, >= 0; None for that
            by `reps_rel`.
        init_rate: the rate of the first update, >= 0, after a distance of 0; None for
            that by the distance.
    State: `shared.distance`, `shared.squares` and `shared.rate`, (); with `by_layer`
        `shared` is {path: these}. For each slot `x0`, shape of the parameter.
    Raises: ValueError if a number is outside its range, or with two for the first
        update.
    Source: Ivgi et al. 2023, equation DoG and section 3.3, arXiv:2302.12022.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(DoG(init_distance=0.1), model)
    >>> for g in ([0.5, -3.0], [-0.1, 2.0], [0.4, 1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), state.inner.shared.rate
    ([0.9758, -1.983], Array(0.02633, dtype=float32))
    """

    ranges: ClassVar = dict.fromkeys(
        ("reps_rel", "init_distance", "init_rate"), NOT_NEGATIVE
    )

    learning_rate: Hyper = 1.0
    reps_rel: Hyper = 1e-6
    eps: Hyper = 1e-8
    by_layer: bool = False
    init_distance: Hyper | None = None
    init_rate: Hyper | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.init_distance is not None and self.init_rate is not None:
            raise ValueError(
                "DoG: init_distance and init_rate are both given, expected one: each "
                "says how the first update goes."
            )

    def init_shared(self, squares):
        zero = jnp.zeros_like(squares)
        if self.init_rate is not None:
            first = zero
        elif self.init_distance is not None:
            first = zero + self.init_distance
        else:
            first = self.reps_rel * (1 + jnp.sqrt(squares))
        return Distances(first, zero, zero)

    def init_leaf(self, x):
        return Start(x)

    def look_leaf(self, shared, state, x, g, t):
        return state, (abs_sq(x - state.x0), abs_sq(g))

    def share(self, shared, sums, t, value):
        distance = jnp.maximum(shared.distance, jnp.sqrt(sums[0]))
        squares = shared.squares + sums[1]
        rate = ratio(distance, jnp.sqrt(squares + self.eps))
        if self.init_rate is not None:
            rate = jnp.where(t == 1, self.init_rate, rate)
        return Distances(distance, squares, rate)

    def step_leaf(self, old, shared, state, x, g, t):
        return state, self.learning_rate * shared.rate * g


class SquaredDistances(NamedTuple):
    distance_sq: Array
    squares: Array
    rate: Array


@rule
class DoWG(TogetherRule):
    """Distance over weighted gradients: those that came late, far away, weigh more.

        distance_sq <- max(distance_sq, |x - x0|^2)
        squares     <- squares + distance_sq * |g|^2
        rate         = distance_sq / (sqrt(squares) + eps)
        step         = learning_rate * rate * g

    Norms are over all slots that have a gradient; x0 is where a slot was at `setup`.

    Args:
        learning_rate: factor on the rate, without unit, >= 0.
        init_distance_sq: the first squared distance, >= 0; None for `eps`.
        eps: added to the root, >= 0.
    State: `shared.distance_sq`, `shared.squares` and `shared.rate`, (); for each slot
        `x0`, shape of the parameter.
    Raises: ValueError if a number is outside its range.
    Source: Khaled et al. 2023, Algorithm 1, arXiv:2305.16284; eps as in optax.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0])}
    >>> state = oj.setup(DoWG(init_distance_sq=0.01), model)
    >>> for g in ([0.5, -3.0], [-0.1, 2.0], [0.4, 1.0]):
    ...     state, model = oj.update(state, model, {"w": jnp.array(g)})
    >>> model["w"].tolist(), state.inner.shared.rate
    ([0.9758, -1.983], Array(0.02633, dtype=float32))
    """

    ranges: ClassVar = {"init_distance_sq": NOT_NEGATIVE}

    learning_rate: Hyper = 1.0
    init_distance_sq: Hyper | None = None
    eps: Hyper = 1e-4

    def init_shared(self, squares):
        zero = jnp.zeros_like(squares)
        first = self.eps if self.init_distance_sq is None else self.init_distance_sq
        return SquaredDistances(zero + first, zero, zero)

    def init_leaf(self, x):
        return Start(x)

    def look_leaf(self, shared, state, x, g, t):
        return state, (abs_sq(x - state.x0), abs_sq(g))

    def share(self, shared, sums, t, value):
        distance_sq = jnp.maximum(shared.distance_sq, sums[0])
        squares = shared.squares + distance_sq * sums[1]
        rate = ratio(distance_sq, jnp.sqrt(squares) + self.eps)
        return SquaredDistances(distance_sq, squares, rate)

    def step_leaf(self, old, shared, state, x, g, t):
        return state, self.learning_rate * shared.rate * g
