"""Small numerical traps that optimisers have fallen into, each with its own test."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimjax as oj


def walk(rule, x, gs):
    """Where a number goes."""
    model = {"x": jnp.asarray(x)}
    state = oj.setup(rule, model)
    visited = []
    for g in gs:
        state, model = oj.update(state, model, {"x": jnp.asarray(g)})
        visited.append(float(model["x"]))
    return visited


def first_step(rule, g):
    return 2.0 - walk(rule, 2.0, [g])[0]


@pytest.mark.parametrize(
    ("debias_v", "way"),
    [
        ("after", [0.9, 0.82592, 0.76260, 0.70526, 0.65167]),  # torch
        ("before", [0.9, 0.84737, 0.81047, 0.78139, 0.75697]),  # optax
    ],
)
def test_amsgrad_says_where_the_maximum_is_taken(debias_v, way):
    """One name for two methods: their steps differ after a large gradient."""
    got = walk(oj.AMSGrad(0.1, debias_v=debias_v), 1.0, [1.0, 0.1, 0.1, 0.1, 0.1])
    assert got == pytest.approx(way, abs=1e-5)


def test_amsgrad_of_the_paper_corrects_no_bias():
    rule = oj.AMSGrad(0.1, b1=0.9, b2=0.99, debias_m=False, debias_v="never")
    assert first_step(rule, 3.0) == pytest.approx(0.1 * 0.1 / np.sqrt(0.01), rel=1e-5)


def test_the_default_of_amsgrad_is_said():
    assert oj.AMSGrad() == oj.AMSGrad(debias_m=True, debias_v="before")


@pytest.mark.parametrize("eps", [{}, {"eps": 1e-8, "eps_root": 0.0}], ids=str)
def test_centred_rmsprop_stays_finite(eps):
    """E[g^2] - E[g]^2 is rounding for a constant gradient, and rounding may be < 0."""
    g = {"x": jnp.logspace(-3, 6, 4096)}
    rule = oj.RMSProp(1e-3, centered=True, **eps)

    def step(state, _):
        state, steps = rule.apply(state, g, g)
        return state, jnp.all(jnp.isfinite(steps["x"]))

    finite = jax.lax.scan(step, rule.init(g), length=400)[1]
    assert np.all(finite)


# sqrt(v), the bias corrected where the rule does so, is |g| after one step.
@pytest.mark.parametrize("g", [0.3, -4.0])
@pytest.mark.parametrize(
    ("rule", "root"),
    [
        (oj.Adam(0.1, eps=0.5), lambda g: g + 0.5),
        (oj.Adam(0.1, eps=0.0, eps_root=0.5), lambda g: np.sqrt(g**2 + 0.5)),
        (oj.Adamax(0.1, eps=0.5), lambda g: g + 0.5),
        (oj.RMSProp(0.1, decay=0.75, eps=0.5, eps_root=0.0), lambda g: g / 2 + 0.5),
        (
            oj.RMSProp(0.1, decay=0.75, eps=0.0, eps_root=0.5),
            lambda g: np.sqrt(g**2 / 4 + 0.5),
        ),
        (
            oj.AdaGrad(0.1, initial_accumulator=0.0, eps=0.5, eps_root=0.0),
            lambda g: g + 0.5,
        ),
        (
            oj.AdaGrad(0.1, initial_accumulator=0.0, eps=0.0, eps_root=0.5),
            lambda g: np.sqrt(g**2 + 0.5),
        ),
    ],
)
def test_eps_is_inside_or_outside_of_the_root(rule, root, g):
    assert first_step(rule, g) == pytest.approx(0.1 * g / root(abs(g)), rel=1e-5)


@pytest.mark.parametrize("rule", [oj.Adam, oj.Adamax, oj.RMSProp, oj.AdaGrad])
def test_docstring_says_where_eps_is(rule):
    for part in rule.__doc__.split("Args:"):
        assert re.search(r"\beps\b", part)


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_adafactor_with_an_offset_is_finite(offset):
    """The count includes the steps of a training before, and starts below them."""
    rule = oj.Adafactor(0.1, decay_offset=offset)
    way = walk(rule, 1.0, [0.3, -0.2, 0.5, 0.4, 0.1])
    assert np.all(np.isfinite(way))
    assert len({*way}) == 5


@pytest.mark.parametrize("momentum", [None, 0.0, 0.9])
def test_weight_decay_does_not_need_momentum(momentum):
    rule = oj.SGD(0.1, momentum=momentum, weight_decay=0.1)
    assert walk(rule, 1.0, [0.0]) == pytest.approx([0.99], rel=1e-6)
