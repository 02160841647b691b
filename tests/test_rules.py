"""Every rule keeps every promise, and the suite that says so can say otherwise."""

import re
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from cases import ALL, HOLDING, SETTINGS, rule_classes

import optimjax as oj
from optimjax import testing


@pytest.mark.parametrize("rule", ALL, ids=repr)
def test_rule_keeps_its_promises(rule):
    testing.check_rule(rule)


def test_every_odd_case_is_of_a_public_rule():
    assert {*SETTINGS, *HOLDING} <= set(rule_classes())


class M(NamedTuple):
    m: jax.Array


class Base(oj.LeafRule):
    def init_leaf(self, x):
        return M(jnp.zeros(x.shape, x.dtype))

    def apply_leaf(self, state, x, g, t):
        m = 0.5 * state.m + g
        return M(m), 0.1 * m


class ForgetsTheState(Base):
    def apply_leaf(self, state, x, g, t):
        return state.m, 0.1 * g


class GrowsTheState(Base):
    def apply_leaf(self, state, x, g, t):
        return M(jnp.concatenate([state.m, state.m])), 0.1 * g


class SquaresComplexNumbers(Base):
    def init_leaf(self, x):
        return M(jnp.zeros(x.shape, x.real.dtype))

    def apply_leaf(self, state, x, g, t):
        return M(0.9 * state.m + g * g), 0.1 * g


class CountsInPython(Base):
    """Traced once for each dtype, so each takes another step."""

    calls: ClassVar = []

    def apply_leaf(self, state, x, g, t):
        self.calls.append(1)
        return state, 0.1 * len(self.calls) * g


class BreaksOnEmpty(Base):
    def apply_leaf(self, state, x, g, t):
        return state, 0.1 * g / jnp.max(jnp.abs(g))


class MixesPlaces(oj.Rule):
    """Not a leaf rule, and it forgets that a gradient may be missing."""

    def init(self, params):
        return None

    def apply(self, state, params, grads, **context):
        return state, {path: 0.1 * g for path, g in grads.items()}


class KeepsSixteenBits(Base):
    def init_leaf(self, x):
        return M(jnp.zeros(x.shape, jnp.bfloat16))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (ForgetsTheState, "apply_leaf: state has structure"),
        (GrowsTheState, "an array of the state has shape (8,), expected (4,)"),
        (SquaresComplexNumbers, "takes complex parameters"),
        (CountsInPython, "computes in float64"),
        (BreaksOnEmpty, "takes empty and scalar arrays"),
        (MixesPlaces, "leaves a skipped slot as it is"),
        (KeepsSixteenBits, "kept in 16 bits: .slots['b'].m"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_the_suite_names_what_is_wrong(wrong, complaint):
    """A rule's author learns which promise is broken, and how."""
    with pytest.raises(testing.RuleError, match=re.escape(complaint)) as caught:
        testing.check_rule(oj.rule(wrong)())
    assert f"{wrong.__name__}(" in str(caught.value)


def test_the_suite_wants_a_rule():
    with pytest.raises(TypeError, match="expected a rule"):
        testing.check_rule(oj.Adam)
