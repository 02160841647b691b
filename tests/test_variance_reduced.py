"""MARS: gradients corrected by how they have changed."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close, same_bits

import optimjax as oj


def powers(m):
    """A loss with a diagonal Hessian, 3 w^2 and 12 b^2."""
    return jnp.sum(m["w"] ** 4) / 4 + jnp.sum(m["b"] ** 4)


def model():
    return {"w": jnp.array([0.7, -1.3, 0.4]), "b": jnp.array([[0.6], [-0.8]])}


def taken(rule, loss, model, steps=6):
    """The state and the model after some steps."""
    state, step = oj.setup(rule, model), oj.make_step(loss)
    for _ in range(steps):
        state, model, _ = step(state, model)
    return state, model


def tied_loss(m):
    return jnp.sum((m["in"] @ m["out"][0]) ** 2) + jnp.sum(m["out"][0][0] ** 3)


def mars_by_hand(x, grads, before, gamma, b1, max_norm, rate):
    """Gradient descent by corrected gradients, in NumPy; `before` gives g_prev."""
    x, points = np.array(x), []
    for t, g in enumerate(grads):
        c = g + gamma * b1 / (1 - b1) * (g - before(t, points, x))
        c = c / max(1.0, np.linalg.norm(c) / max_norm)
        points.append(x)
        x = x - rate * c
    return x


def test_mars_follows_its_equations(x64):
    g = np.random.default_rng(3).normal(size=(6, 4))
    x = np.array([0.3, -0.7, 1.1, 0.2])
    rule = oj.MARS(oj.SGD(0.1), gamma=0.4, b1=0.7, max_norm=1.9)
    m = {"w": jnp.asarray(x)}
    state = oj.setup(rule, m)
    for each in g:
        state, m = oj.update(state, m, {"w": jnp.asarray(each)})
    right = mars_by_hand(
        x, g, lambda t, points, x: g[max(t - 1, 0)], 0.4, 0.7, 1.9, 0.1
    )
    np.testing.assert_allclose(m["w"], right, rtol=1e-12)


def test_exact_mars_takes_the_old_gradient_of_the_same_batch(x64):
    batches = np.random.default_rng(4).normal(size=(6, 5, 3))

    def loss(m, batch):
        return jnp.mean((batch @ m["w"] - 0.4) ** 4)

    x = np.array([0.3, -0.7, 1.1])
    rule = oj.MARS(oj.SGD(0.1), gamma=0.4, b1=0.7, max_norm=1.3, exact=True)
    m = {"w": jnp.asarray(x)}
    state, step = oj.setup(rule, m), oj.make_step(loss)
    right, last = x, x
    for batch in batches:
        state, m, _ = step(state, m, jnp.asarray(batch))
        g, before = (jax.grad(loss)({"w": at}, batch)["w"] for at in (right, last))
        c = g + 0.4 * 0.7 / 0.3 * (g - before)
        last, right = right, right - 0.1 * c / max(1.0, np.linalg.norm(c) / 1.3)
        np.testing.assert_allclose(m["w"], right, rtol=1e-10)


def test_mars_clips_each_array_and_no_more():
    m = model()
    grads = {"w": jnp.full(3, 4.0), "b": jnp.full((2, 1), 0.1)}
    rule = oj.MARS(oj.SGD(1.0))
    _, steps = rule.apply(rule.init(m), m, grads)
    np.testing.assert_allclose(jnp.linalg.norm(steps["w"]), 1.0, rtol=1e-6)
    close(steps["b"], grads["b"])
    free = oj.MARS(oj.SGD(1.0), max_norm=math.inf)
    close(free.apply(free.init(m), m, grads)[1], grads)


def test_mars_without_correction_is_the_rule_inside():
    inner = oj.AdamW(1e-2)
    _, plain = taken(inner, powers, model())
    _, same = taken(oj.MARS(inner, gamma=0.0, max_norm=math.inf), powers, model())
    close(plain, same)


def test_mars_by_default_is_the_papers():
    assert oj.MARS().inner == oj.Adam(3e-3, b1=0.95, b2=0.99)
    assert oj.MARS().needs == () and oj.MARS(exact=True).needs == ("value_fn",)


@pytest.mark.parametrize("exact", [False, True])
def test_mars_ties_and_scan(exact, x64):
    w = jnp.array([[0.4, -0.2], [0.1, 0.7]])
    tied = {"in": w, "out": (w,)}
    rule = oj.MARS(oj.Adam(0.05), gamma=0.3, b1=0.8, exact=exact)
    _, after = taken(rule, tied_loss, tied)
    step = oj.make_step(tied_loss)
    _, many, _ = step.scan(oj.setup(rule, tied), tied, length=6)
    single = {"in": jnp.array(w, copy=True)}
    _, alone = taken(rule, lambda m: tied_loss({**m, "out": (m["in"],)}), single)
    for x in (after["in"], many["in"]):
        np.testing.assert_allclose(x, alone["in"], rtol=1e-9)


@pytest.mark.parametrize("exact", [False, True])
def test_a_slot_that_rests_is_corrected_by_its_own_last_gradient(exact):
    """Not by that of an update in which it had none."""
    rule = oj.MARS(oj.SGD(0.1), gamma=0.5, b1=0.5, max_norm=100.0, exact=exact)
    m = {"w": jnp.array([0.7]), "b": jnp.array([-0.4])}

    def loss(m):
        return jnp.sum(m["w"] ** 2) + jnp.sum(m["b"] ** 2)

    def step(state, m, skip):
        grads = jax.grad(loss)(m)
        grads = {**grads, "b": None} if skip else grads
        return oj.update(state, m, grads, value_fn=loss)

    state, m = step(oj.setup(rule, m), m, False)
    g_last, kept = -0.8, m["b"]
    for _ in range(2):
        state, m = step(state, m, True)
    same_bits(m["b"], kept)
    g = 2 * float(kept[0])
    state, m = step(state, m, False)
    np.testing.assert_allclose(m["b"], kept - 0.1 * (g + 0.5 * (g - g_last)), rtol=1e-5)


def test_mars_of_complex_parameters(x64):
    """A complex number is two real ones."""
    z = jnp.array([0.4 + 0.3j, -0.2 + 0.9j])

    def loss(m):
        return jnp.sum(jnp.abs(m["z"] - (0.1 - 0.2j)) ** 4)

    def apart(m):
        return loss({"z": jax.lax.complex(m["re"], m["im"])})

    for exact in (False, True):
        rule = oj.MARS(oj.SGD(0.02), gamma=0.5, b1=0.8, max_norm=math.inf, exact=exact)
        _, m = taken(rule, loss, {"z": z})
        _, two = taken(rule, apart, {"re": z.real, "im": z.imag})
        np.testing.assert_allclose(
            m["z"], jax.lax.complex(two["re"], two["im"]), rtol=1e-9
        )


def test_mars_has_its_place():
    with pytest.raises(ValueError, match="MARS would see gradients that are still"):
        oj.MARS(oj.LossScaling(oj.SGD(0.1)))
    with pytest.raises(TypeError, match="MARS evaluates the loss of a whole batch"):
        oj.Accumulate(oj.MARS(exact=True))
    with pytest.raises(ValueError, match="max_norm is 0, expected more"):
        oj.MARS(max_norm=0.0)
    m = model()
    exact = oj.MARS(exact=True)
    with pytest.raises(TypeError, match=re.escape("MARS.apply: no value_fn")):
        exact.apply(exact.init(m), m, m)
    oj.LossScaling(oj.MARS(oj.MixedPrecision(oj.SGD(0.1))))
