"""Weight decay as a rule of its own."""

import dataclasses
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp

from optimjax.arrays import agreement, widen
from optimjax.hyper import Hyper
from optimjax.leaf import LeafRule
from optimjax.nested import sees_gradients
from optimjax.options import one_of
from optimjax.paths import Path
from optimjax.rates import RateWrapper
from optimjax.rule import Selection, rule
from optimjax.treewide import PyTree, spread, steps_like

__all__ = ["CautiousWeightDecay", "Decay", "SignDecay", "WeightDecay", "matrices"]


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
        return None, g + jnp.where(agreement(g, x) >= 0, self.weight_decay * x, 0)


How = Literal["l2", "coupled", "independent", "schedule", "proximal", "corrected"]


@rule
class Decay(RateWrapper):
    """Weight decay around any rule, in any of the forms that are in use.

        step = inner step of g + weight_decay * x              "l2"
        step = inner step + rate * weight_decay * x            "coupled": torch, optax
        step = inner step + weight_decay * x                   "independent"
        step = inner step + rate / peak * weight_decay * x     "schedule": AdamW's paper
        step = (inner step + rate * weight_decay * x) / (1 + rate * weight_decay)
                                                               "proximal": Adan
        step = inner step + rate^2 / peak * weight_decay * x   "corrected": AdamC

    `rate` is the learning rate of the rule inside for that slot and that update: chosen
    by path or group, and of its schedule at its own count. What else scales a step (a
    line search, a trust ratio) does not scale its decay. Rules that find their rate by
    themselves (Prodigy, DoG) are refused, but for "l2" and "independent".
    `Decay(Adam(1e-3), 1e-2)` is `AdamW(1e-3, weight_decay=1e-2)`.

    "corrected" is for layers behind which there is a norm: it keeps their size, and so
    their gradient's, from drifting while the learning rate falls. The others decay
    "coupled", by a second `Decay` with the other `where`. A slot without a gradient
    does not decay. Guards, `Accumulate`, averages and what else has to see the step
    that is taken go around it.

    Args:
        inner: the rule that takes the steps.
        weight_decay: >= 0; per step for "independent", per step at the peak for
            "schedule", in the gradient's unit per unit of x for "l2", otherwise per
            unit of learning rate.
        how: one of the above.
        peak: the highest learning rate, > 0, for "schedule" and "corrected".
        where: the slots that decay: a glob on paths, several, or a function of
            (path, leaf) such as `matrices`; None for all.
        cautious: only those numbers decay that the inner step makes smaller, too.
    State: nothing of its own.
    Raises: ValueError if a number is outside its range, for another `how`, for
        `cautious` with "l2", for a `peak` too many or too few; by `setup`, if a slot
        that decays does not have one learning rate.
    Source: Loshchilov and Hutter 2019, arXiv:1711.05101; proximal: Xie et al. 2024,
        arXiv:2208.06677; corrected: Defazio 2025, arXiv:2506.02285; cautious: Chen et
        al. 2025, arXiv:2510.12402.

    >>> import optimjax as oj
    >>> model = {"w": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    >>> rule = Decay(oj.SGD(lambda count: 0.1 / (count + 1)), 0.5, where="w")
    >>> state = oj.setup(rule, model)
    >>> for g in (1.0, -2.0):
    ...     grads = {"w": jnp.array([g, g]), "b": jnp.array([g])}
    ...     state, model = oj.update(state, model, grads)
    >>> model["w"].tolist(), model["b"].tolist()
    ([0.9288, -1.85], [3.0])
    """

    positive: ClassVar = ("peak",)

    weight_decay: Hyper = 1e-2
    how: How = "coupled"
    peak: Hyper | None = None
    where: Selection = None
    cautious: bool = False

    def __post_init__(self):
        super().__post_init__()
        sees_gradients("Decay", self.inner)
        one_of(self, "how", get_args(How))
        if (self.how in ("schedule", "corrected")) != (self.peak is not None):
            much = "nothing" if self.peak is None else "a number"
            raise ValueError(
                f"Decay: peak is {much} with how={self.how!r}, expected the highest "
                "learning rate for 'schedule' and 'corrected', nothing for the others."
            )
        if self.cautious and self.how == "l2":
            raise ValueError(
                "Decay: cautious with how='l2', whose decay goes into the step and "
                "cannot be compared to it. Choose another."
            )

    def init_leaf(self, x):
        return None

    def needs_rate(self, path, x):
        decays = self.where is None or self.where(path, x, "Decay: where")
        return decays and self.how not in ("l2", "independent")

    def apply(
        self, state: Any, params: PyTree, grads: PyTree, **context: Any
    ) -> tuple[Any, PyTree]:
        if self.how != "l2":
            return super().apply(state, params, grads, **context)
        wide, grads = jax.tree.map(widen, params), spread(params, grads)
        rates = self._rates(state.inner, wide)
        own, decayed = self._apply_leaves(state.own, wide, grads, grads, rates)
        inner, steps = self.inner.apply(state.inner, wide, decayed, **context)
        return dataclasses.replace(state, inner=inner, own=own), steps_like(
            params, steps
        )

    def at_rate(self, state, x, g, step, rate, t):
        if not self.where:
            return None, step
        share = self.weight_decay
        if self.how not in ("l2", "independent"):
            share = share * rate / (1 if self.peak is None else self.peak)
        if self.how == "corrected":
            share = share * rate
        if self.cautious:
            share = jnp.where(agreement(step, x) >= 0, share, 0)
        scale = 1 + share if self.how == "proximal" else 1
        return None, (step + share * x) / scale
