"""`StochasticRounding` goes as far on average as float32, in bfloat16 steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import same_bits

import optimjax as oj

SIZE = 40_000
RULE = oj.Chain(oj.SGD(1.0), oj.StochasticRounding(seed=3))


def wide(x):
    return np.asarray(x, np.float64)


def trained(rule, model, grads, steps):
    """The model after some steps with the same gradients."""

    def one(carry, _):
        return oj.update(*carry, grads), None

    run = jax.jit(lambda *carry: jax.lax.scan(one, carry, length=steps)[0])
    return run(oj.setup(rule, model), model)[1]


@pytest.mark.parametrize("start", [1.0, -1.0, 3.0, 1e-30, -1e-30])
@pytest.mark.parametrize("part", [0.2, 0.5, 0.9])
def test_one_step_ends_at_a_neighbour_and_is_right_on_average(start, part):
    x = jnp.full(SIZE, start, jnp.bfloat16)
    below = jnp.nextafter(x[0], jnp.asarray(-np.inf, x.dtype))
    gap = float(wide(x[0]) - wide(below))
    g = jnp.full(SIZE, part * gap, jnp.float32)
    after = wide(trained(RULE, {"w": x}, {"w": g}, 1)["w"])
    np.testing.assert_array_equal(np.unique(after), [wide(below), wide(x[0])])
    moved = np.mean((wide(x) - after) / gap)
    spread = np.sqrt(part * (1 - part) / SIZE)
    assert abs(moved - part) < 5 * spread


def test_mean_of_many_small_steps_is_that_of_float32():
    """Rounded to nearest, not one of them would be taken."""
    steps, small = 200, 1e-3
    model = {"w": jnp.full(SIZE, 2.0, jnp.bfloat16)}
    grads = {"w": jnp.full(SIZE, small, jnp.float32)}
    nearest = trained(oj.SGD(1.0), model, grads, steps)
    same_bits(nearest, model)
    after = wide(trained(RULE, model, grads, steps)["w"])
    # Each step is a whole gap of 2^-7 (from 2 downwards) with probability small / gap.
    error = np.sqrt(steps * small * 2.0**-7 / SIZE)
    assert abs(after.mean() - (2.0 - steps * small)) < 5 * error
    assert after.std() > 0.01


def test_what_bfloat16_can_hold_is_not_rounded():
    model = {"w": jnp.asarray([1.0, -2.0, 0.0, 96.0], jnp.bfloat16)}
    grads = {"w": jnp.asarray([0.5, 4.0, 0.0, -32.0])}
    same_bits(trained(RULE, model, grads, 3), trained(oj.SGD(1.0), model, grads, 3))


def test_other_dtypes_are_left_alone():
    grads = {"h": jnp.full(3, 0.123), "s": jnp.full(3, 0.123)}
    model = {"h": jnp.ones(3, jnp.float16), "s": jnp.ones(3)}
    same_bits(trained(RULE, model, grads, 3), trained(oj.SGD(1.0), model, grads, 3))
    assert jax.tree.leaves(oj.StochasticRounding().init(model).slots) == []


def test_nan_and_infinity_stay_what_they_are():
    model = {"w": jnp.ones(3, jnp.bfloat16)}
    grads = {"w": jnp.asarray([np.nan, np.inf, -np.inf], jnp.float32)}
    after = trained(RULE, model, grads, 1)["w"]
    np.testing.assert_array_equal(wide(after), [np.nan, -np.inf, np.inf])


def test_draws_differ_by_slot_step_and_seed_and_repeat_by_seed():
    model = {k: jnp.ones(500, jnp.bfloat16) for k in "ab"}
    grads = {k: jnp.full(500, 2.0**-9) for k in "ab"}
    first, again, two = (trained(RULE, model, grads, n) for n in (1, 1, 2))
    other = trained(
        oj.Chain(oj.SGD(1.0), oj.StochasticRounding(seed=4)), model, grads, 1
    )
    same_bits(first, again)
    assert np.any(first["a"] != first["b"])
    assert np.any(first["a"] != other["a"])
    # A second draw like the first would move what has moved, and nothing else.
    assert len(np.unique(wide(two["a"]))) == 3


def test_tied_places_are_rounded_together():
    w = jnp.ones(500, jnp.bfloat16)
    g = jnp.full(500, 2.0**-10)
    tied = trained(RULE, {"a": w, "b": [w]}, {"a": g, "b": [g]}, 1)
    alone = trained(RULE, {"a": w}, {"a": 2 * g}, 1)
    same_bits((tied["a"], tied["b"][0]), (alone["a"], alone["a"]))


def test_nothing_that_changes_the_step_may_come_after_it():
    with pytest.raises(ValueError, match="SGD would still change that step"):
        oj.Chain(oj.StochasticRounding(), oj.SGD(0.1))


def test_inside_wrappers_the_average_is_of_what_was_rounded():
    model = {"w": jnp.ones(500, jnp.bfloat16)}
    grads = {"w": jnp.full(500, 2.0**-10)}
    state = oj.setup(oj.SWA(RULE), model)
    for _ in range(2):
        state, model = oj.update(state, model, grads)
        gaps = (1 - wide(model["w"])) / 2.0**-8
        assert np.all(gaps == np.round(gaps))
    assert len(np.unique(gaps)) > 1
    assert oj.eval_model(state, model)["w"].dtype == jnp.bfloat16
