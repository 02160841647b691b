"""Quasi-Newton steps with a line search: how far they come, and on what."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimjax as oj
from optimjax.rules.line_search import backtracking, zoom

SEARCHES = ["zoom", "backtracking"]


def rosenbrock(m):
    return 100 * (m["y"] - m["x"] ** 2) ** 2 + (1 - m["x"]) ** 2


def quadratic(seed=5):
    """A loss with a full matrix, and its minimum."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(5, 5))
    a, b = a @ a.T + 0.5 * np.eye(5), rng.normal(size=5)

    def loss(m):
        x = jnp.concatenate([m["u"], m["v"]])
        matrix, vector = (jnp.asarray(c, x.dtype) for c in (a, b))
        return x @ matrix @ x / 2 - vector @ x

    return loss, np.linalg.solve(a, b)


def train(rule, loss, model, steps):
    state = oj.setup(rule, model)
    step = oj.make_step(loss)
    for _ in range(steps):
        state, model, _ = step(state, model)
    return state, model


@pytest.mark.parametrize("search", SEARCHES)
def test_quadratic(search, x64):
    loss, minimum = quadratic()
    model = {"u": jnp.ones(2), "v": jnp.full(3, 0.3)}
    _, model = train(oj.LBFGS(line_search=search), loss, model, 30)
    found = np.concatenate([model["u"], model["v"]])
    np.testing.assert_allclose(found, minimum, rtol=1e-8)


def test_a_round_bowl_takes_two_steps(x64):
    model = {"w": jnp.array([1.0, 2.0, 3.0])}
    _, model = train(oj.LBFGS(), lambda m: jnp.sum((m["w"] - 0.3) ** 2), model, 2)
    np.testing.assert_allclose(model["w"], 0.3, rtol=1e-12)


@pytest.mark.parametrize("search", SEARCHES)
def test_rosenbrock(search, x64):
    model = {"x": jnp.asarray(-1.2), "y": jnp.asarray(1.0)}
    _, model = train(oj.LBFGS(line_search=search), rosenbrock, model, 50)
    assert rosenbrock(model) < 1e-20
    np.testing.assert_allclose([model["x"], model["y"]], 1, atol=1e-10)


@pytest.mark.parametrize("search", SEARCHES)
def test_rosenbrock_in_float32(search):
    model = {"x": jnp.asarray(-1.2), "y": jnp.asarray(1.0)}
    _, model = train(oj.LBFGS(line_search=search), rosenbrock, model, 60)
    np.testing.assert_allclose([model["x"], model["y"]], 1, atol=1e-3)


def test_zoom_ends_where_the_strong_wolfe_conditions_hold(x64):
    """On a loss with a far minimum, a near one, a wall and a wiggle."""
    c1, c2 = 1e-4, 0.1
    for f in (
        lambda a: (a - 37.0) ** 2,
        lambda a: (a - 0.003) ** 2 * 1e3,
        lambda a: -jnp.log1p(-(a * 4)) - 9 * a,
        lambda a: jnp.sin(5 * a) / 5 - 1.7 * a + a**2 / 4,
    ):
        zero = jnp.zeros(())
        value, slope = jax.value_and_grad(f)(zero)
        a = zoom(f, value, slope, jnp.ones(()), c1, c2, 30)
        there, left = jax.value_and_grad(f)(a)
        assert a > 0
        assert there <= value + c1 * a * slope
        assert abs(left) <= c2 * abs(slope)


def test_a_search_that_finds_nothing_returns_0():
    for search, rest in ((zoom, (1e-4, 0.9)), (backtracking, (1e-4,))):
        one = jnp.ones(())
        # The slope is a lie: the loss rises.
        assert search(lambda a: 1 + a, one, -one, one, *rest, 8) == 0


def test_no_step_drops_the_pairs():
    model = {"x": jnp.asarray(-1.2), "y": jnp.asarray(1.0)}
    state, model = train(oj.LBFGS(), rosenbrock, model, 5)
    assert state.inner.part.any() and state.inner.alpha > 0
    uphill = jax.tree.map(jnp.negative, jax.grad(rosenbrock)(model))
    context = {"value": rosenbrock(model), "value_fn": rosenbrock}
    state, same = oj.update(state, model, uphill, **context)
    assert not state.inner.part.any() and state.inner.alpha == 0
    assert same["x"] == model["x"]


def tied_model():
    w = jnp.array([[0.4, -0.2], [0.1, 0.7]])
    return {"in": w, "out": (w,), "b": jnp.array([0.2, -0.4])}


def tied_loss(m, x, y):
    hidden = jnp.tanh(x @ m["in"] + m["b"][None])
    return jnp.mean((hidden @ m["out"][0].T - y) ** 2)


@pytest.mark.parametrize("search", SEARCHES)
def test_tied_model(search, rng, x64):
    """A tied array is one coordinate: as if it had been one argument all along."""
    x, y = (jnp.asarray(rng.normal(size=(7, 2))) for _ in range(2))
    rule = oj.LBFGS(line_search=search)
    model = tied_model()
    state = oj.setup(rule, model)
    step = oj.make_step(tied_loss)
    for _ in range(8):
        state, model, value = step(state, model, x, y)
    assert model["in"] is model["out"][0]

    single = {"w": tied_model()["in"], "b": tied_model()["b"]}

    def loss(m):
        return tied_loss({"in": m["w"], "out": (m["w"],), "b": m["b"]}, x, y)

    _, other = train(rule, loss, single, 8)
    np.testing.assert_allclose(model["in"], other["w"], rtol=1e-9)
    np.testing.assert_allclose(model["b"], other["b"], rtol=1e-9)
    assert value < 0.9 * tied_loss(tied_model(), x, y)


def test_scan_is_many_steps(rng):
    x, y = (jnp.asarray(rng.normal(size=(7, 2)), jnp.float32) for _ in range(2))
    step = oj.make_step(lambda m: tied_loss(m, x, y))
    model = tied_model()
    state, many, _ = step.scan(oj.setup(oj.LBFGS(), model), model, length=5)
    _, one = train(oj.LBFGS(), lambda m: tied_loss(m, x, y), model, 5)
    np.testing.assert_allclose(many["in"], one["in"], rtol=1e-4)
    assert state.inner.count == 5


def test_what_it_needs_is_asked_for():
    model = {"w": jnp.ones(2)}
    state = oj.setup(oj.LBFGS(), model)
    wanted = re.escape("LBFGS needs value_fn")
    with pytest.raises(TypeError, match=wanted):
        oj.update(state, model, model, value=1.0)
    rule = oj.LBFGS()
    with pytest.raises(TypeError, match="value or value_fn was not given"):
        rule.apply(rule.init(model), model, model)
    free = oj.LBFGS(0.1, line_search=None)
    oj.update(oj.setup(free, model), model, model)


def test_arguments_are_checked():
    with pytest.raises(
        ValueError, match="line_search is 'armijo', expected one of 'zoom'"
    ):
        oj.LBFGS(line_search="armijo")
    with pytest.raises(ValueError, match=re.escape("memory is 0, expected >= 1")):
        oj.LBFGS(memory=0)
    with pytest.raises(ValueError, match=re.escape("c2 is 1, expected in [0, 1)")):
        oj.LBFGS(c2=1.0)
    with pytest.raises(ValueError, match="variant is 'sps2'"):
        oj.PolyakSGD(variant="sps2")


def without_v(loss):
    """A compiled step in which `v` has no gradient."""

    def step(state, model):
        value, grads = jax.value_and_grad(loss)(model)
        grads = {**grads, "v": None}
        return oj.update(state, model, grads, value=value, value_fn=loss)

    return jax.jit(step)


def test_a_skipped_slot_takes_no_part(x64):
    """While `v` has no gradient, `u` moves as if it were alone; `v` keeps its pairs."""
    loss, _ = quadratic()
    model = {"u": jnp.ones(2), "v": jnp.full(3, 0.3)}
    rule = oj.LBFGS()
    state, model = train(rule, loss, model, 4)
    kept = {name: getattr(state.inner, name)["v"] for name in ("x", "g", "s", "y")}
    # From here on alone, with the memory of nothing but `u`'s own pairs.
    alone = oj.setup(rule, {"u": model["u"]})
    fixed, moving = model["v"], {"u": model["u"]}

    def of_u(m):
        return loss({"u": m["u"], "v": fixed})

    skip, step = without_v(loss), oj.make_step(of_u)
    for i in range(6):
        state, model = skip(state, model)
        alone, moving, _ = step(alone, moving)
        if i == 0:
            assert not jnp.array_equal(model["u"], moving["u"])  # it has a memory
    np.testing.assert_allclose(model["u"], moving["u"], rtol=1e-6)
    assert np.array_equal(model["v"], fixed)
    for name, array in kept.items():
        assert np.array_equal(getattr(state.inner, name)["v"], array)


def test_a_slot_that_comes_back_is_no_part_of_the_pair_in_between(x64):
    loss, minimum = quadratic()
    model = {"u": jnp.ones(2), "v": jnp.full(3, 0.3)}
    state = oj.setup(oj.LBFGS(memory=4), model)
    step, skip = oj.make_step(loss), without_v(loss)
    for i in range(60):
        state, model = (skip if i % 7 == 3 else step)(state, model)[:2]
        if i in (3, 4):  # skipped; back, without a change since its last update
            newest = state.inner.part[state.inner.newest]
            assert newest.tolist() == [True, False]
    found = np.concatenate([model["u"], model["v"]])
    np.testing.assert_allclose(found, minimum, rtol=1e-7)


@pytest.mark.parametrize("search", SEARCHES)
def test_complex_parameters(search, x64):
    """A complex number is a point in the plane: as real and imaginary part."""
    target = jnp.array([1 + 2j, -0.5j, 0.3])
    scale = jnp.array([1.0, 5.0, 20.0])

    def loss(m):
        error = m["z"] - target
        real = error.real**2 + 2 * error.imag**2 + error.real * error.imag
        return jnp.sum(scale * real)

    def of_parts(m):
        return loss({"z": jax.lax.complex(m["re"], m["im"])})

    z = jnp.array([0.1 + 0.2j, 1.0, -2j])
    rule = oj.LBFGS(line_search=search)
    _, got = train(rule, loss, {"z": z}, 12)
    _, parts = train(rule, of_parts, {"re": z.real, "im": z.imag}, 12)
    np.testing.assert_allclose(
        got["z"], jax.lax.complex(*map(parts.get, ("re", "im"))), rtol=1e-7
    )
    _, got = train(rule, loss, {"z": z}, 40)
    np.testing.assert_allclose(got["z"], target, atol=1e-7)


def test_frozen_slots_stay_in_the_loss(x64):
    loss, _ = quadratic()
    model = {"u": jnp.ones(2), "v": jnp.full(3, 0.3)}
    state = oj.freeze(oj.setup(oj.LBFGS(), model), "v")
    step = oj.make_step(loss)
    for _ in range(12):
        state, model, _ = step(state, model)
    assert np.array_equal(model["v"], np.full(3, 0.3))
    np.testing.assert_allclose(jax.grad(loss)(model)["u"], 0, atol=1e-9)


def test_a_loss_that_is_not_finite_on_the_way(x64):
    """The first trial leaves the domain; the search comes back into it."""

    def loss(m):
        return jnp.sum(20 * m["w"] - jnp.log(m["w"]))

    for search in SEARCHES:
        model = {"w": jnp.array([0.9, 0.4])}
        _, model = train(oj.LBFGS(line_search=search), loss, model, 30)
        np.testing.assert_allclose(model["w"], 1 / 20, rtol=1e-6)


def test_donation(x64):
    model = {"x": jnp.asarray(-1.2), "y": jnp.asarray(1.0)}
    state = oj.setup(oj.LBFGS(), model)
    step = oj.make_step(rosenbrock, donate=True)
    for _ in range(50):
        state, model, _ = step(state, model)
    assert rosenbrock(model) < 1e-20
