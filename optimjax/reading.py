"""What is read from a state besides its table: averages, norms, skips, scale."""

import functools
import operator

import jax.numpy as jnp
from jax import Array

from optimjax.arrays import cast_like
from optimjax.leaf import LeafState
from optimjax.nested import walk
from optimjax.paths import Slots
from optimjax.state import State, as_state
from optimjax.training import named_params
from optimjax.transforms.guarding import SkipNonFinite
from optimjax.transforms.monitor import Monitor
from optimjax.treewide import PyTree

__all__ = ["eval_model", "loss_scale", "norms", "skipped"]


def eval_model(state: State, model: PyTree) -> PyTree:
    """The model to evaluate: with the averages that a rule keeps, where one does.

    For `EMA`, `SWA`, `Lookahead`, `ScheduleFree`, `ASGD`, and whatever holds them; of
    nested averages the outermost. Tied places hold one array, as in the model, and
    parameters keep their dtype. Train on with the model itself, not with this one.

    Args:
        state: the state.
        model: the model that goes with it.
    Returns: a model like it. Without any average it has the same numbers, in arrays
        that a donating step may take: copy what is to outlive that.
    Raises: ValueError if `model` is not the one of `setup`.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0]), "name": "mine"}
    >>> state = oj.setup(oj.EMA(oj.SGD(0.5), decay=0.75), model)
    >>> grads = {"w": jnp.array([1.0]), "name": None}
    >>> state, model = oj.update(state, model, grads)
    >>> eval_model(state, model)
    {'name': 'mine', 'w': Array([0.875], dtype=float32)}
    """
    ties = as_state(state, "eval_model").ties
    layout, leaves = ties.take_apart("eval_model", model)
    params = named_params(layout, leaves)
    averages = state.rule.eval_params(state.inner, params)
    new = Slots((path, cast_like(averages[path], x)) for path, x in params.items())
    return layout.scatter(new, leaves)


def norms(state: State) -> Slots:
    """{path: `Norms`}, the running norms that a `Monitor` keeps of each slot.

    Raises: ValueError if the state's rule has no `Monitor`.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([3.0, 4.0])}
    >>> state = oj.setup(oj.Monitor(oj.SGD(0.1)), model)
    >>> state, model = oj.update(state, model, {"w": jnp.array([0.0, 2.0])})
    >>> float(norms(state)["w"].parameter)
    5.0
    """
    as_state(state, "norms")
    found = Slots()
    for rule, own, _ in walk(state.rule, state.inner, list(state.ties.names)):
        if isinstance(rule, Monitor) and isinstance(own, LeafState):
            found.update(own.slots)
    if not found:
        raise ValueError(f"norms: no Monitor in {state.rule!r}. Put one around a rule.")
    return found


def loss_scale(state: State) -> Array:
    """What the loss has to be multiplied by before it is differentiated.

    It is 1 without a `LossScaling`. `make_step` multiplies by itself.

    >>> import optimjax as oj
    >>> state = oj.setup(oj.LossScaling(oj.SGD(0.1), scale=128.0), {"w": jnp.ones(2)})
    >>> loss_scale(state)
    Array(128., dtype=float32)
    """
    as_state(state, "loss_scale")
    scale = scale_of(state)
    return jnp.ones((), jnp.float32) if scale is None else scale


def skipped(state: State) -> Array:
    """How many updates a `SkipNonFinite` in the state's rule has skipped: int32, ().

    Raises: ValueError if there is none.

    >>> import optimjax as oj
    >>> model = {"w": jnp.ones(2)}
    >>> state = oj.setup(oj.EMA(oj.SkipNonFinite(oj.SGD(0.1))), model)
    >>> state, model = oj.update(state, model, {"w": jnp.array([1.0, jnp.nan])})
    >>> skipped(state)
    Array(1, dtype=int32)
    """
    as_state(state, "skipped")
    walked = walk(state.rule, state.inner, list(state.ties.names))
    found = [own.skipped for rule, own, _ in walked if isinstance(rule, SkipNonFinite)]
    if not found:
        raise ValueError(f"skipped: no SkipNonFinite in {state.rule!r}.")
    return functools.reduce(operator.add, found)


def scale_of(state: State) -> Array | None:
    """The product of all the scales that rules ask for; None if none does."""
    product = None
    for rule, own, _ in walk(state.rule, state.inner, list(state.ties.names)):
        scale = rule.loss_scale(own)
        if scale is not None:
            product = scale if product is None else product * scale
    return product
