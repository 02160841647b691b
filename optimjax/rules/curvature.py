"""Steps divided by the curvature: a diagonal of the Hessian, estimated now and then."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimjax.arrays import abs_sq, cast, widen, zeros_like
from optimjax.hyper import NOT_NEGATIVE, Hyper
from optimjax.leaf import LeafRule, LeafState
from optimjax.noise import key_of_slot, nth_key
from optimjax.paths import Path, Slots, complain, with_paths
from optimjax.rule import rule
from optimjax.treewide import LOSSES, PyTree, gradients_by_path, loss_of_slots

__all__ = ["AdaHessian", "Sophia", "gauss_newton_bartlett", "hutchinson"]

Estimator: TypeAlias = Callable[..., Mapping[Path, Array]]


class Curved(NamedTuple):
    m: Array
    h: Array


class SquaredCurvature(NamedTuple):
    m: Array
    v: Array
    weight: Array


def hutchinson(
    key: Array,
    params: Mapping[Path, Array],
    *,
    value_fn: Callable[[Any], Array],
    **context: Any,
) -> dict[Path, Array]:
    """An estimate of the diagonal of the Hessian, right on average.

        estimate = z * (H z),    z = +1 or -1, each number drawn alone

    It costs about two gradients. Where H is diagonal it is exact. A tied array is one
    array: its estimate is of all its places together.

    Args:
        key: what the signs are drawn from.
        params: {path: array}, the slots that have a gradient.
        value_fn: the loss as a function of `params`.
    Source: Hutchinson 1989; Bekas et al. 2007, section 3, for the diagonal.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> hutchinson(
    ...     jax.random.key(0), x, value_fn=lambda x: jnp.sum(x["w"] ** 3)
    ... )["w"].tolist()
    [6.0, -12.0]
    """
    z = {path: _signs(key, path, x) for path, x in params.items()}
    _, product = jax.jvp(jax.grad(value_fn), (dict(params),), (z,))
    return {path: z[path] * product[path] for path in z}


def _signs(key: Array, path: Path, x: Array) -> Array:
    """+1 or -1, the same for a slot whichever others there are, and in any dtype."""
    own = key_of_slot(key, path)
    ones = jnp.ones_like(x)
    return jnp.where(jax.random.bernoulli(own, jnp.float32(0.5), x.shape), ones, -ones)


def gauss_newton_bartlett(batch_size: int) -> Estimator:
    """An estimator of the diagonal of the Gauss-Newton matrix, by Bartlett's identity.

        estimate = batch_size * g * g

    where g is the gradient of the loss with labels drawn from what the model itself
    predicts. It is never negative, and costs one gradient. It needs that loss:
    `make_step(loss, sampled_loss=fn)`, `fn(model, key, *batch)`, or
    `update(..., sampled_value_fn=fn)`, `fn(model, key)`; the loss is a mean over
    `batch_size` examples.

    Args:
        batch_size: how many predictions the loss is a mean of, >= 1: of a language
            model sequences times tokens, not sequences.
    Raises: ValueError if `batch_size` is less.
    Source: Liu et al. 2023, Algorithm 2, arXiv:2305.14342.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> estimate = gauss_newton_bartlett(batch_size=5)
    >>> estimate(
    ...     jax.random.key(0), x, sampled_value_fn=lambda x, key: jnp.sum(x["w"] ** 2)
    ... )["w"].tolist()
    [20.0, 80.0]
    """
    if batch_size < 1:
        raise ValueError(
            f"gauss_newton_bartlett: batch_size is {batch_size}, expected >= 1."
        )
    return GaussNewtonBartlett(batch_size)


@dataclasses.dataclass(frozen=True)
class GaussNewtonBartlett:
    """What `gauss_newton_bartlett` makes: equal where the batch sizes are."""

    batch_size: int

    def __call__(
        self,
        key: Array,
        params: Mapping[Path, Array],
        *,
        sampled_value_fn: Callable[[Any, Array], Array],
        **context: Any,
    ) -> dict[Path, Array]:
        g = jax.grad(lambda params: sampled_value_fn(params, key))(dict(params))
        return {path: self.batch_size * abs_sq(each) for path, each in g.items()}


@lru_cache
def required(estimate: Estimator) -> tuple[str, ...]:
    """The keyword arguments that an estimator cannot do without."""
    taken = inspect.signature(estimate).parameters.values()
    return tuple(
        p.name for p in taken if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    )


class Diagonal(LeafRule):
    """What rules share that divide by an estimate d of a diagonal of the Hessian.

    A rule derives from this class, declares its own `estimate`, `every` and `seed`, and
    writes `curved_leaf`. The estimate is made in the first of `every` updates, and in
    any in which a slot takes its first step; in the others nothing is computed for it.
    """

    complex_ok = False

    estimate: Estimator
    every: int
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if not callable(self.estimate):
            raise TypeError(
                f"{name}: estimate is {self.estimate!r}, expected a function (key, "
                "params, **context) -> {path: diagonal}, such as hutchinson."
            )
        if type(self.every) is not int or self.every < 1:
            raise ValueError(
                f"{name}: every is {self.every!r}, expected a whole number >= 1."
            )

    @property
    def needs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return required(self.estimate)

    def curved_leaf(
        self, state: PyTree, g: Array, d: Array, due: Array | bool, t: Array
    ) -> tuple[PyTree, Array]:
        """The new state of one slot and its step; `d` means nothing unless `due`."""
        raise NotImplementedError(f"{type(self).__name__} has no curved_leaf")

    def apply(
        self, state: LeafState, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[LeafState, PyTree]:
        named, structure = with_paths(params), jax.tree.structure(params)
        given = gradients_by_path(named, grads)
        if not given:
            return super().apply(state, params, grads)
        absent = [name for name in self.needs if name not in context]
        if absent:
            raise TypeError(f"{type(self).__name__}.apply: no {absent[0]} was given.")
        for name in LOSSES:
            if name in context:
                context[name] = loss_of_slots(context[name], params)
        x = {path: widen(named[path]) for path in given}
        key = nth_key(self.seed, state.count)

        def estimate() -> Slots:
            return self._checked(self.estimate(key, x, **context), x)

        def tree(slots: Mapping[Path, Array]) -> PyTree:
            return structure.unflatten([slots.get(path) for path in named])

        if self.every == 1:
            return self._apply_leaves(state, params, grads, tree(estimate()))
        due = state.count % self.every == 0
        for first in {id(t): t == 0 for t in map(state.steps, given)}.values():
            due = due | first
        zeros = Slots((path, zeros_like(each)) for path, each in x.items())
        d = lax.cond(due, estimate, lambda: zeros)
        flags = tree(dict.fromkeys(given, due))
        return self._apply_leaves(state, params, grads, tree(d), flags)

    def _checked(self, d: Mapping[Path, Array], x: Mapping[Path, Array]) -> Slots:
        """The estimates in the order and dtypes of the slots."""
        wrong = {
            path: f"estimate has shape {jnp.shape(d[path])}, expected {each.shape}"
            if path in d
            else "no estimate, expected one for each slot in params"
            for path, each in x.items()
            if path not in d or jnp.shape(d[path]) != each.shape
        }
        if wrong:
            raise ValueError(complain(type(self).__name__, wrong))
        return Slots((path, cast(d[path], each.dtype)) for path, each in x.items())

    def _arithmetic(
        self, state: PyTree, x: Array, arrays: tuple[Array, ...], t: Array
    ) -> tuple[PyTree, Array]:
        g, d, *due = arrays
        return self.curved_leaf(state, g, d, due[0] != 0 if due else True, t)


@rule
class AdaHessian(Diagonal):
    """Adam, with an estimated diagonal of the Hessian in place of the gradient's size.

        m     <- b1 * m + (1 - b1) * g
        v     <- b2 * v + (1 - b2) * d^2      every `every` updates, with d estimated
        m_hat  = m / (1 - b1^t)
        v_hat  = v / (1 - b2^n)               n estimates so far
        step   = learning_rate * m_hat / (sqrt(v_hat)^hessian_power + eps)

    It needs the loss: `update(state, model, grads, value_fn=fn)`, or `make_step`. The
    paper's averages over the places of a convolution are an `estimate` of one's own:
    the mean of |d| over those axes, in the shape of the parameter.

    Args:
        learning_rate: size of a step, as a share of the Newton step, >= 0.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment of the estimates, in [0, 1).
        eps: added to the denominator, in the unit of the Hessian, >= 0.
        hessian_power: how much of the curvature counts, in [0, 1].
        estimate: function (key, params, **context) -> {path: diagonal}, where `params`
            is {path: array} of the slots that have a gradient, and context all that
            `update` is given; what it takes by keyword alone, without a default, it
            needs.
        every: how many updates there are for each estimate, >= 1.
        seed: where the random numbers of the estimates start.
    State: `m` and `v`, shape of the parameter; `weight`, (), which is 1 - b2^n if b2
        stays what it is.
    Raises: ValueError if a number is outside its range; TypeError for a complex
        parameter.
    Source: Yao et al. 2021, Algorithm 1, arXiv:2006.00719.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> def loss(x):
    ...     return jnp.sum(x["w"] ** 4) / 4
    >>> rule = AdaHessian(0.1)
    >>> g = {"w": jnp.array([0.5, -3.0])}
    >>> state, _ = rule.apply(rule.init(x), x, g, value_fn=loss)
    >>> x, g = {"w": jnp.array([0.9, -1.5])}, {"w": jnp.array([-1.0, 2.0])}
    >>> state, steps = rule.apply(state, x, g, value_fn=loss)
    >>> steps["w"].tolist()
    [-0.01060, -0.003785]
    """

    ranges: ClassVar = {"hessian_power": (0.0, 1.0, False)}

    learning_rate: Hyper = 0.15
    b1: Hyper = 0.9
    b2: Hyper = 0.999
    eps: Hyper = 1e-4
    hessian_power: Hyper = 1.0
    estimate: Estimator = hutchinson
    every: int = 1
    seed: int = 0

    def init_leaf(self, x):
        return SquaredCurvature(zeros_like(x), zeros_like(x), jnp.zeros((), x.dtype))

    def curved_leaf(self, state, g, d, due, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        v = jnp.where(due, self.b2 * state.v + (1 - self.b2) * abs_sq(d), state.v)
        weight = self.b2 * state.weight + (1 - self.b2)
        weight = jnp.where(due, weight, state.weight)
        m_hat, size = m / (1 - self.b1**t), jnp.sqrt(v / weight)
        step = self.learning_rate * m_hat / (size**self.hessian_power + self.eps)
        return SquaredCurvature(m, v, weight), step


@rule
class Sophia(Diagonal):
    """Momentum, divided by an estimated diagonal of the Hessian, and clipped.

        m    <- b1 * m + (1 - b1) * g
        h    <- b2 * h + (1 - b2) * d         every `every` updates, with d estimated
        m_hat = m / (1 - b1^t)
        step  = learning_rate * clip(m_hat / max(gamma * h, eps), -clip, clip)

    Where the curvature is small or negative, the step is that of signed momentum. It
    needs the loss: `update(state, model, grads, value_fn=fn)`, or `make_step`; with
    `gauss_newton_bartlett` the loss of sampled labels.

    Args:
        learning_rate: size of the largest step, per unit of `clip`, in the parameter's
            unit, >= 0.
        b1: decay of the momentum, in [0, 1).
        b2: decay of the curvature, per estimate, in [0, 1).
        gamma: factor on the curvature, >= 0: the larger, the fewer steps are clipped.
        eps: the least that the curvature counts, in its unit, > 0.
        clip: the largest that a number of the direction may be, >= 0.
        estimate, every, seed: as for `AdaHessian`; `hutchinson` makes this Sophia-H,
            `gauss_newton_bartlett` Sophia-G.
        stale: divide by the h of before this update's estimate, which is 0 at first, as
            optax does.
    State: `m` and `h`, shape of the parameter.
    Raises: ValueError if a number is outside its range; TypeError for a complex
        parameter.
    Source: Liu et al. 2023, Algorithm 3, arXiv:2305.14342; m_hat of the authors' code.

    >>> x = {"w": jnp.array([1.0, -2.0])}
    >>> def loss(x):
    ...     return jnp.sum(x["w"] ** 4) / 4
    >>> rule = Sophia(0.1, gamma=10.0, every=2)
    >>> g = {"w": jnp.array([0.5, -3.0])}
    >>> state, _ = rule.apply(rule.init(x), x, g, value_fn=loss)
    >>> x, g = {"w": jnp.array([0.9, -1.5])}, {"w": jnp.array([-1.0, 2.0])}
    >>> state, steps = rule.apply(state, x, g, value_fn=loss)
    >>> steps["w"].tolist()
    [-0.08779, -0.03796]
    """

    ranges: ClassVar = {"gamma": NOT_NEGATIVE, "clip": NOT_NEGATIVE}
    positive: ClassVar = ("eps",)

    learning_rate: Hyper = 1e-3
    b1: Hyper = 0.965
    b2: Hyper = 0.99
    gamma: Hyper = 0.01
    eps: Hyper = 1e-12
    clip: Hyper = 1.0
    estimate: Estimator = hutchinson
    every: int = 10
    seed: int = 0
    stale: bool = False

    def init_leaf(self, x):
        return Curved(zeros_like(x), zeros_like(x))

    def curved_leaf(self, state, g, d, due, t):
        m = self.b1 * state.m + (1 - self.b1) * g
        h = jnp.where(due, self.b2 * state.h + (1 - self.b2) * d, state.h)
        m_hat = m / (1 - self.b1**t)
        known = state.h if self.stale else h
        direction = m_hat / jnp.maximum(self.gamma * known, self.eps)
        return Curved(m, h), self.learning_rate * jnp.clip(
            direction, -self.clip, self.clip
        )
