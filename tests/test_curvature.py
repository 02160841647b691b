"""Rules that divide by an estimate of the curvature, and the estimators."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, close, same_bits
from recordings import recorded, recorded_problem
from test_trajectories import assert_as_recorded

import optimjax as oj
from optimjax.rules.curvature import required

A = np.array([[3.0, 0.7, -0.4], [0.7, 2.0, 0.3], [-0.4, 0.3, 1.5]])


def bowl(m):
    """A quadratic whose Hessian is `A`."""
    a = jnp.asarray(A, m["w"].dtype)
    return 0.5 * m["w"] @ a @ m["w"]


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


# Estimators -------------------------------------------------------------------------


def test_hutchinson_is_right_on_average(x64):
    x = {"w": jnp.array([0.7, -1.3, 0.4])}
    keys = jax.random.split(jax.random.key(3), 20_000)
    d = jax.vmap(lambda key: oj.hutchinson(key, x, value_fn=bowl)["w"])(keys)
    spread = np.sqrt((A**2).sum(1) - np.diag(A) ** 2)
    error = np.abs(d.mean(0) - np.diag(A)) / (spread / math.sqrt(len(keys)))
    assert error.max() < 4
    np.testing.assert_allclose(d.std(0), spread, rtol=0.03)


def test_hutchinson_is_exact_where_the_hessian_is_diagonal():
    d = oj.hutchinson(jax.random.key(1), model(), value_fn=powers)
    close(d, {"w": 3 * model()["w"] ** 2, "b": 12 * model()["b"] ** 2})


def test_signs_of_a_slot_do_not_depend_on_the_others_nor_on_the_dtype(x64):
    def mixed(m):
        w = m["w"].astype(jnp.float32)
        return jnp.sum(w) ** 2 * (1 + jnp.sum(m["b"].astype(jnp.float32)))

    key, m = jax.random.key(5), model()
    both = oj.hutchinson(key, m, value_fn=mixed)["w"]
    m64 = jax.tree.map(lambda x: x.astype(jnp.float64), m)
    double = oj.hutchinson(key, m64, value_fn=mixed)["w"]
    np.testing.assert_allclose(both, double, rtol=1e-5)

    def alone(m):
        return jnp.sum(m["w"]) ** 2

    with_b = oj.hutchinson(key, m, value_fn=alone)["w"]
    same_bits(with_b, oj.hutchinson(key, {"w": m["w"]}, value_fn=alone)["w"])


def test_gauss_newton_bartlett_squares_the_gradient_of_sampled_labels():
    def sampled(m, key):
        return jax.random.normal(key) * jnp.sum(m["w"] ** 2)

    key = jax.random.key(2)
    d = oj.gauss_newton_bartlett(7)(key, {"w": model()["w"]}, sampled_value_fn=sampled)
    g = jax.random.normal(key) * 2 * model()["w"]
    close(d, {"w": 7 * g**2})


def test_gauss_newton_bartlett_is_the_hessian_of_logistic_regression_on_average(x64):
    """Where the model is linear in its parameters the two are one."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(6, 3)), {"w": jnp.asarray(rng.normal(size=3))}

    def loss(m, y):
        z = x @ m["w"]
        return jnp.mean(jax.nn.softplus(z) - y * z)

    def sampled(m, key):
        p = jax.lax.stop_gradient(jax.nn.sigmoid(x @ m["w"]))
        return loss(m, jax.random.bernoulli(key, p).astype(p.dtype))

    keys = jax.random.split(jax.random.key(0), 20_000)
    estimate = oj.gauss_newton_bartlett(len(x))
    d = jax.vmap(lambda k: estimate(k, w, sampled_value_fn=sampled)["w"])(keys)
    exact = np.diag(jax.hessian(lambda v: loss({"w": v}, 0.0))(w["w"]))
    np.testing.assert_allclose(d.mean(0), exact, rtol=0.04)


def test_estimators_of_one_batch_size_are_equal():
    rules = [oj.Sophia(estimate=oj.gauss_newton_bartlett(n)) for n in (7, 7, 8)]
    assert rules[0] == rules[1] != rules[2]
    with pytest.raises(ValueError, match="batch_size is 0, expected >= 1"):
        oj.gauss_newton_bartlett(0)


def test_what_an_estimator_needs_is_read_from_its_arguments():
    assert required(oj.hutchinson) == ("value_fn",)
    assert required(oj.gauss_newton_bartlett(3)) == ("sampled_value_fn",)
    assert required(lambda key, params, *, a, b=1, **context: params) == ("a",)


# Rules ------------------------------------------------------------------------------


def given(key, params, *, hessian, **context):
    """An estimator that is told."""
    return hessian


def test_adahessian_follows_its_equations(x64):
    """Three updates with an estimate every second one."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=4)
    g, d = rng.normal(size=(2, 5, 4))
    settings = {"learning_rate": 0.3, "b1": 0.7, "b2": 0.9, "eps": 0.02}
    rule = oj.AdaHessian(**settings, hessian_power=0.6, estimate=given, every=2)
    m = {"w": jnp.asarray(x)}
    state = oj.setup(rule, m)
    first = second = 0.0
    n = 0
    for t in range(5):
        state, m = oj.update(state, m, {"w": g[t]}, hessian={"w": jnp.asarray(d[t])})
        first = 0.7 * first + 0.3 * g[t]
        if t % 2 == 0:
            second, n = 0.9 * second + 0.1 * d[t] ** 2, n + 1
        size = np.sqrt(second / (1 - 0.9**n)) ** 0.6
        x = x - 0.3 * first / (1 - 0.7 ** (t + 1)) / (size + 0.02)
        np.testing.assert_allclose(m["w"], x, rtol=1e-12)


@pytest.mark.parametrize("stale", [False, True])
def test_sophia_follows_its_equations(stale, x64):
    rng = np.random.default_rng(2)
    x = rng.normal(size=4)
    g, d = rng.normal(size=(2, 7, 4))
    rule = oj.Sophia(
        0.3,
        b1=0.7,
        b2=0.6,
        gamma=1.7,
        eps=0.1,
        clip=0.8,
        estimate=given,
        every=3,
        stale=stale,
    )
    m = {"w": jnp.asarray(x)}
    state = oj.setup(rule, m)
    first, h = 0.0, np.zeros(4)
    for t in range(7):
        state, m = oj.update(state, m, {"w": g[t]}, hessian={"w": jnp.asarray(d[t])})
        first = 0.7 * first + 0.3 * g[t]
        old = h
        if t % 3 == 0:
            h = 0.6 * h + 0.4 * d[t]
        m_hat = first / (1 - 0.7 ** (t + 1))
        ratio = m_hat / np.maximum(1.7 * (old if stale else h), 0.1)
        x = x - 0.3 * np.clip(ratio, -0.8, 0.8)
        np.testing.assert_allclose(m["w"], x, rtol=1e-12)


SOPHIA = [r for r in recorded("contrib")["trajectories"] if "sophia" in r["id"]]


@pytest.mark.parametrize("record", SOPHIA, ids=lambda r: r["id"])
def test_sophia_goes_where_optax_went(record):
    words = {"update_interval": "every", "clip_threshold": "clip"}
    settings = {words.get(k, k): v for k, v in record["settings"].items()}
    rate, decay = settings.pop("learning_rate"), settings.pop("weight_decay", 1e-4)
    squared = settings.pop("hessian_diagonal_fn")["$fn"] == "grad_squared"
    params, grads, _ = recorded_problem(record)
    hess = {k: np.array(h) for k, h in recorded("contrib")["hess"].items()}
    sophia = oj.Sophia(1.0, **{"eps": 1e-8, **settings}, estimate=given, stale=True)
    rule, got = oj.Chain(sophia, oj.WeightDecay(decay), oj.Scale(rate)), []
    with jax.enable_x64(True):
        m = jax.tree.map(jnp.asarray, params)
        state = oj.setup(rule, m)
        for t, g in enumerate(grads):
            d = {k: g[k] ** 2 if squared else hess[k][t] for k in g}
            d = jax.tree.map(jnp.asarray, d)
            state, m = oj.update(state, m, jax.tree.map(jnp.asarray, g), hessian=d)
            got.append(jax.tree.map(np.asarray, m))
    assert_as_recorded({**record, "id": "contrib/"}, got, params)


@pytest.mark.parametrize("rule", [oj.AdaHessian(), oj.Sophia(eps=1e-4)], ids=repr)
def test_newtons_step_on_a_diagonal_quadratic(rule):
    """With no memory, and what is true of the curvature, one step is to the minimum."""
    settings = {"learning_rate": 1.0, "b1": 0.0, "b2": 0.0}
    more = {"gamma": 1.0, "clip": 10.0} if isinstance(rule, oj.Sophia) else {"eps": 0.0}
    rule = type(rule)(**settings, **more)
    scale = {"w": jnp.array([2.0, 0.3, 7.0]), "b": jnp.array([[1.5], [0.2]])}

    def loss(m):
        return sum(jnp.sum(scale[k] * (m[k] - 0.3) ** 2) for k in m)

    _, after = taken(rule, loss, model(), 1)
    close(after, jax.tree.map(lambda x: jnp.full_like(x, 0.3), after), rtol=1e-5)


def tied_loss(m):
    return jnp.sum((m["in"] @ m["out"][0]) ** 2) + jnp.sum(m["out"][0][0] ** 3)


def test_a_tied_array_is_one_coordinate(x64):
    """The estimate is of the Hessian in the shared array: cross terms are in it."""
    w = jnp.array([[0.4, -0.2], [0.1, 0.7]])
    tied = {"in": w, "out": (w,)}
    rule = oj.AdaHessian(0.1, seed=3)
    _, after = taken(rule, tied_loss, tied)
    assert after["in"] is after["out"][0]
    single = {"in": jnp.array(w, copy=True)}
    _, alone = taken(rule, lambda m: tied_loss({**m, "out": (m["in"],)}), single)
    np.testing.assert_allclose(after["in"], alone["in"], rtol=1e-9)


@pytest.mark.parametrize("rule", [oj.AdaHessian(every=3), oj.Sophia(0.1, every=3)])
def test_update_takes_the_loss_as_a_function_of_the_model(rule):
    m = other = model()
    state, same = oj.setup(rule, m), oj.setup(rule, other)
    step = oj.make_step(powers)
    for _ in range(4):
        state, m, _ = step(state, m)
        grads = jax.grad(powers)(other)
        same, other = oj.update(same, other, grads, value_fn=powers)
    close(m, other)
    close(state, same)


def test_scan_and_donation_are_steps():
    rule = oj.Sophia(0.1, every=3)
    _, one = taken(rule, powers, model(), 7)
    step = oj.make_step(powers, donate=True)
    m = model()
    _, many, _ = step.scan(oj.setup(rule, m), m, length=7)
    close(one, many)


def test_estimates_are_made_every_so_many_updates():
    """Counted when they run, not when they are traced."""
    calls = []

    def counting(key, params, *, value_fn, **context):
        jax.debug.callback(lambda: calls.append(1))
        return oj.hutchinson(key, params, value_fn=value_fn)

    m = model()
    step = oj.make_step(powers)
    jax.block_until_ready(
        step.scan(oj.setup(oj.Sophia(estimate=counting, every=4), m), m, length=10)
    )
    jax.effects_barrier()
    assert len(calls) == 3  # updates 0, 4, 8


def test_nothing_is_compiled_anew():
    loss = Counter(powers)
    state, m = oj.setup(oj.Sophia(0.1, every=2), model()), model()
    step = oj.make_step(loss)
    state, m, _ = step(state, m)
    traces = loss.traces
    for rate in (0.2, 0.3, 0.4):
        state, m, _ = step(oj.adjust(state, learning_rate=rate, gamma=0.5), m)
    assert loss.traces == traces


def test_each_estimate_draws_anew_and_a_seed_repeats_them(x64):
    seen = []

    def watching(key, params, *, value_fn):
        seen.append(np.asarray(jax.random.key_data(key)))
        return oj.hutchinson(key, params, value_fn=value_fn)

    w = {"w": jnp.array([0.7, -1.3, 0.4])}
    for seed in (1, 1, 2):
        rule = oj.AdaHessian(estimate=watching, seed=seed)
        state, m = oj.setup(rule, w), w
        for _ in range(3):
            state, m = oj.update(state, m, jax.grad(bowl)(m), value_fn=bowl)
    runs = [[k.tolist() for k in seen[i : i + 3]] for i in (0, 3, 6)]
    assert runs[0] == runs[1]
    everything = [tuple(k) for k in itertools.chain(runs[0], runs[2])]
    assert len({*everything}) == 6


def test_a_slot_without_a_gradient_is_no_matter_of_the_estimate():
    """It stays as it is, and the estimator is not shown it."""

    def looking(key, params, *, value_fn):
        assert [*params] == ["w"]
        return oj.hutchinson(key, params, value_fn=value_fn)

    m = model()
    state = oj.setup(oj.AdaHessian(estimate=looking), m)
    grads = {"w": jax.grad(powers)(m)["w"], "b": None}
    state, after = oj.update(state, m, grads, value_fn=powers)
    same_bits(after["b"], m["b"])
    assert not np.array_equal(after["w"], m["w"])
    assert float(state.slots["b"].weight) == 0


@pytest.mark.parametrize("cls", [oj.AdaHessian, oj.Sophia])
def test_a_slot_that_starts_later_gets_an_estimate_at_once(cls):
    m = model()
    state = oj.freeze(oj.setup(cls(1e-2, every=100), m), "b")
    step = oj.make_step(powers)
    for _ in range(3):
        state, m, _ = step(state, m)
    state = oj.thaw(state)
    state, after, _ = step(state, m)
    h = state.slots["b"]
    assert np.all(np.asarray(h.h if cls is oj.Sophia else h.v) > 0)
    assert np.abs(after["b"] - m["b"]).max() < 0.1


def test_a_rule_for_a_part_of_the_model():
    """It moves that part alone; the estimate is of the whole loss."""
    parts = {"w": oj.AdaHessian(0.1), "b": oj.SGD(0.1)}
    rule = oj.Partition(parts, lambda path, x: path)
    _, after = taken(rule, powers, model(), 3)
    _, alone = taken(oj.AdaHessian(0.1), powers, model(), 3)
    close(after["w"], alone["w"])
    m = model()
    state = oj.setup(rule, m)
    for _ in range(3):
        state, m = oj.update(state, m, jax.grad(powers)(m), value_fn=powers)
    close(m, after)


def test_sophia_g_learns_from_labels_of_its_own(rng):
    x = jnp.asarray(rng.normal(size=(40, 3)), jnp.float32)
    y = (x @ jnp.array([1.0, -2.0, 0.5]) > 0).astype(jnp.float32)

    def loss(m, x, y):
        z = x @ m["w"]
        return jnp.mean(jax.nn.softplus(z) - y * z)

    def sampled(m, key, x, y):
        p = jax.lax.stop_gradient(jax.nn.sigmoid(x @ m["w"]))
        return loss(m, x, jax.random.bernoulli(key, p).astype(p.dtype))

    rule = oj.Sophia(0.1, gamma=0.5, estimate=oj.gauss_newton_bartlett(len(x)), every=2)
    m = {"w": jnp.zeros(3)}
    step = oj.make_step(loss, sampled_loss=sampled)
    state = oj.setup(rule, m)
    values = []
    for _ in range(30):
        state, m, value = step(state, m, x, y)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    assert np.all(np.asarray(state.slots["w"].h) > 0)
    # And by hand.
    other = {"w": jnp.zeros(3)}
    same = oj.setup(rule, other)
    for _ in range(3):
        same, other = oj.update(
            same,
            other,
            jax.grad(loss)(other, x, y),
            sampled_value_fn=lambda m, key: sampled(m, key, x, y),
        )
    again = oj.setup(rule, {"w": jnp.zeros(3)})
    m = {"w": jnp.zeros(3)}
    for _ in range(3):
        again, m, _ = step(again, m, x, y)
    close(m, other)


def test_what_is_missing_is_said():
    m = model()
    grads = jax.grad(powers)(m)
    state = oj.setup(oj.Sophia(), m)
    with pytest.raises(TypeError, match="Sophia needs value_fn"):
        oj.update(state, m, grads)
    with pytest.raises(TypeError, match=re.escape("Sophia.apply: no value_fn")):
        oj.Sophia().apply(oj.Sophia().init(m), m, grads)
    rule = oj.Sophia(estimate=oj.gauss_newton_bartlett(3))
    with pytest.raises(TypeError, match="Sophia needs sampled_value_fn"):
        oj.make_step(powers)(oj.setup(rule, m), m)
    with pytest.raises(TypeError, match="evaluates the loss of a whole batch"):
        oj.Accumulate(rule)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="every is 0, expected a whole number >= 1"):
        oj.AdaHessian(every=0)
    with pytest.raises(TypeError, match=re.escape("every is 2.5, expected a whole")):
        oj.Sophia(every=2.5)
    with pytest.raises(TypeError, match="estimate is 3, expected a function"):
        oj.Sophia(estimate=3)
    with pytest.raises(ValueError, match="eps is 0, expected more"):
        oj.Sophia(eps=0.0)
    with pytest.raises(ValueError, match=re.escape("hessian_power is 1.5, expected")):
        oj.AdaHessian(hessian_power=1.5)


def test_an_estimate_that_does_not_fit_is_refused():
    def short(key, params):
        return {"w": params["w"][:2]}

    m = model()
    state = oj.setup(oj.AdaHessian(estimate=short), m)
    with pytest.raises(ValueError, match=re.escape("estimate has shape (2,)")) as e:
        oj.update(state, m, m)
    assert "'b': no estimate, expected one" in str(e.value)
