"""The noise of `NoisySGD` has the law that its paper gives, and comes from its seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimjax as oj

ETA, GAMMA, RATE, STEPS, SIZE = 0.3, 0.7, 0.1, 50, 20_000
RULE = oj.NoisySGD(RATE, eta=ETA, gamma=GAMMA, seed=5)


def noise(rule, params, steps=STEPS, gradient=0.0):
    """{slot: (steps, *shape)}: what stands beside the gradient, step by step."""
    grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), params)

    def step(state, _):
        state, steps = rule.apply(state, params, grads)
        return state, steps

    _, taken = jax.lax.scan(step, rule.init(params), length=steps)
    taken = {path: np.asarray(x, np.float64) for path, x in taken.items()}
    return {path: x / RATE - gradient for path, x in taken.items()}


@pytest.fixture(scope="module")
def drawn():
    params = {"a": jnp.zeros(SIZE), "b": jnp.zeros((SIZE // 4, 4))}
    return noise(RULE, params, gradient=2.0)


def test_mean_is_the_gradient(drawn):
    for n in drawn.values():
        spread = np.sqrt(ETA / np.arange(1, STEPS + 1) ** GAMMA)
        means = n.reshape(STEPS, -1).mean(axis=1) / spread * np.sqrt(SIZE)
        assert np.all(np.abs(means) < 5)  # in standard errors
        assert means.std() > 0.5  # and there is some: it is drawn anew each time


@pytest.mark.parametrize("t", [1, 2, 7, 50])
def test_variance_falls_as_a_power_of_the_count(drawn, t):
    for n in drawn.values():
        # 5 standard errors of the variance of SIZE normal numbers
        assert n[t - 1].var() == pytest.approx(
            ETA / t**GAMMA, rel=5 * np.sqrt(2 / SIZE)
        )


def test_noise_is_normal(drawn):
    z = drawn["a"][0] / np.sqrt(ETA)
    inside = [np.mean(np.abs(z) < k) for k in (1, 2, 3)]
    assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.015)


def test_slots_and_steps_are_independent(drawn):
    series = [
        drawn["a"][0],
        drawn["a"][1],
        drawn["b"][0].ravel(),
        drawn["b"][1].ravel(),
    ]
    correlation = np.corrcoef(series) - np.eye(4)
    assert np.all(np.abs(correlation) < 5 / np.sqrt(SIZE))


def test_seed_decides():
    params = {"a": jnp.zeros((3, 4)), "b": jnp.zeros(5)}
    first, again = (noise(RULE, params, 3) for _ in range(2))
    other = noise(oj.NoisySGD(RATE, eta=ETA, gamma=GAMMA, seed=6), params, 3)
    for path in params:
        assert np.array_equal(first[path], again[path])
        assert not np.any(first[path] == other[path])


def test_a_slots_noise_does_not_depend_on_other_slots():
    alone = noise(RULE, {"a": jnp.zeros((3, 4))}, 3)
    beside = noise(RULE, {"a": jnp.zeros((3, 4)), "0": jnp.zeros(5)}, 3)
    assert np.array_equal(alone["a"], beside["a"])


def test_noise_is_scaled_by_the_learning_rate_and_may_be_none():
    params = {"a": jnp.zeros((3, 4))}
    half = oj.NoisySGD(RATE / 2, eta=ETA, gamma=GAMMA, seed=5)
    np.testing.assert_allclose(
        2 * noise(half, params, 3)["a"], noise(RULE, params, 3)["a"], rtol=1e-6
    )
    assert not np.any(noise(oj.NoisySGD(RATE, eta=0.0), params, 3)["a"])
