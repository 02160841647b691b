"""Weight decay as a rule of its own."""

from typing import Any

import jax.numpy as jnp

from optimjax.hyper import Hyper
from optimjax.leaf import LeafRule
from optimjax.paths import Path
from optimjax.rule import Selection, rule

__all__ = ["CautiousWeightDecay", "SignDecay", "WeightDecay", "matrices"]


def matrices(path: Path, leaf: Any) -> bool:
    """Whether a parameter has two or more axes; for `where`, to leave biases alone.

    Args:
        path: the slot's, which makes no difference.
        leaf: the parameter.

    Biases and the scales of norms have one axis. Those of layers that are stacked for
    a scan, (layer, feature), have two and count as matrices: give a glob there.

    >>> import optimjax as oj
    >>> x = {"w": jnp.full((1, 2), 3.0), "b": jnp.array([3.0])}
    >>> decay = oj.WeightDecay(0.1, where=matrices)
    >>> _, steps = decay.apply(decay.init(x), x, {"w": x["w"], "b": x["b"]})
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([[3.3, 3.3]], [3.0])
    """
    return leaf.ndim >= 2


@rule
class WeightDecay(LeafRule):
    """A share of the parameter added to what comes in.

        step = g + weight_decay * x

    Before a rule it is an L2 penalty (`Chain(WeightDecay(1e-4), Adam())` is Adam with
    torch's `weight_decay`); after one it is decoupled, and independent of the learning
    rate.

    Args:
        weight_decay: >= 0.
        where: the slots that decay: a glob on paths, several, or a function of
            (path, leaf); None for all.
    State: nothing.
    Raises: ValueError if `weight_decay` is negative.
    Source: Loshchilov and Hutter 2019, section 2, arXiv:1711.05101.

    >>> x = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    >>> decay = WeightDecay(0.1, where="w")
    >>> grads = {"w": jnp.array([0.5, 3.0]), "b": jnp.array([1.0])}
    >>> _, steps = decay.apply(decay.init(x), x, grads)
    >>> steps["w"], steps["b"]
    (Array([0.6, 2.8], dtype=float32), Array([1.], dtype=float32))
    """

    weight_decay: Hyper = 1e-4
    where: Selection = None

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, g + self.weight_decay * x if self.where else g


@rule
class SignDecay(LeafRule):
    """A fixed amount against every parameter's sign added to what comes in.

        step = g + weight_decay * sign(x)

    Before gradient descent it is an L1 penalty. A parameter does not come to rest at 0,
    but walks around it. The sign of 0 is 0, and that of a complex number is x / |x|.

    Args:
        weight_decay: the amount, in the gradient's unit, >= 0.
        where: the slots that decay: a glob on paths, several, or a function of
            (path, leaf) such as `matrices`; None for all.
    State: nothing.
    Raises: ValueError if `weight_decay` is negative.
    Source: Tibshirani 1996, "Regression shrinkage and selection via the lasso".

    >>> x = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    >>> decay = SignDecay(0.1, where="w")
    >>> grads = {"w": jnp.array([0.5, 3.0]), "b": jnp.array([1.0])}
    >>> _, steps = decay.apply(decay.init(x), x, grads)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([0.6, 2.9], [1.0])
    """

    weight_decay: Hyper = 1e-3
    where: Selection = None

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        return None, g + self.weight_decay * jnp.sign(x) if self.where else g


@rule
class CautiousWeightDecay(LeafRule):
    """Decay for those numbers alone that the step makes smaller, too.

        step = g + weight_decay * x       where g * x >= 0, else g

    For after a rule: what comes in is its step. Multiply `weight_decay` by the learning
    rate for the decay of the paper.

    Args:
        weight_decay: >= 0.
        where: the slots that decay: a glob on paths, several, or a function of
            (path, leaf) such as `matrices`; None for all.
    State: nothing.
    Raises: ValueError if `weight_decay` is negative; TypeError for a complex parameter.
    Source: Chen et al. 2025, arXiv:2510.12402.

    >>> x = {"w": jnp.array([1.0, -2.0, -3.0]), "b": jnp.array([3.0])}
    >>> decay = CautiousWeightDecay(0.1, where="w")
    >>> grads = {"w": jnp.array([0.5, -4.0, 2.0]), "b": jnp.array([1.0])}
    >>> _, steps = decay.apply(decay.init(x), x, grads)
    >>> steps["w"].tolist(), steps["b"].tolist()
    ([0.6, -4.2, 2.0], [1.0])
    """

    complex_ok = False

    weight_decay: Hyper = 1e-4
    where: Selection = None

    def init_leaf(self, x):
        return None

    def apply_leaf(self, state, x, g, t):
        if not self.where:
            return None, g
        # Signs are multiplied, not numbers, whose product may underflow to 0.
        smaller = jnp.sign(g) * jnp.sign(x) >= 0
        return None, g + jnp.where(smaller, self.weight_decay * x, 0)
