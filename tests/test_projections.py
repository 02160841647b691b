"""Projections end at the nearest point of their set: optax's, or brute force's.

Their trajectories are in `test_trajectories.py`; here is what those do not show.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import close
from test_transforms import GRADS, X, peer, step, steps_of

import optimjax as oj
from optimjax.transforms.decay import matrices
from optimjax.transforms.projections import Box, L2Ball, NonNegative, Simplex


def project(rule, y):
    """Where a step from afar to `y` ends: P(y), by `update`."""
    y = jax.tree.map(jnp.asarray, y)
    x = jax.tree.map(lambda a: a + jnp.asarray(0.5, a.dtype), y)
    grads = jax.tree.map(lambda a, b: a - b, x, y)
    return oj.update(oj.setup(oj.Chain(oj.Identity(), rule), x), x, grads)[1]


PROJECTIONS = [
    (NonNegative(), optax.projections.projection_non_negative),
    (Box(-0.4, 0.7), lambda y: optax.projections.projection_box(y, -0.4, 0.7)),
    (Simplex(1.7), lambda y: optax.projections.projection_simplex(y, 1.7)),
    (L2Ball(0.7), lambda y: optax.projections.projection_l2_ball(y, 0.7)),
    (L2Ball(70.0), lambda y: optax.projections.projection_l2_ball(y, 70.0)),
]


@pytest.mark.parametrize(
    ("rule", "other"), PROJECTIONS, ids=[repr(rule) for rule, _ in PROJECTIONS]
)
def test_projections_are_those_of_optax(rule, other):
    for path, y in GRADS[1].items():
        with jax.numpy_dtype_promotion("standard"):
            expected = {path: other(y)}
        close(project(rule, {path: y}), expected, rtol=2e-6, atol=1e-6)


def test_non_negative_is_keep_params_nonnegative_and_exact():
    """Not one number falls below 0 by a rounding, in any dtype, from anywhere."""
    transform = optax.keep_params_nonnegative()
    downhill = jax.tree.map(jnp.negative, GRADS[1])
    start = jax.tree.map(jnp.abs, X)
    theirs = peer(transform, start, downhill)
    close(steps_of(NonNegative(), start, GRADS[1]), jax.tree.map(jnp.negative, theirs))
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        rng = np.random.default_rng(8)
        x, g = ({"w": jnp.asarray(rng.normal(size=500), dtype)} for _ in "xg")
        _, new = oj.update(oj.setup(NonNegative(), x), x, g)
        assert np.all(new["w"] >= 0)
        assert 0 < np.sum(new["w"] == 0) < 500


def nearest_of_simplex(y, scale):
    """By trying every set of numbers that may be above 0; float64."""
    found, best = None, math.inf
    for support in itertools.product([False, True], repeat=len(y)):
        kept = np.array(support)
        if not kept.any():
            continue
        point = np.where(kept, y - (y[kept].sum() - scale) / kept.sum(), 0)
        distance = np.sum((point - y) ** 2)
        if np.all(point >= 0) and distance < best:
            found, best = point, distance
    return found


@pytest.mark.parametrize("scale", [0.3, 2.5])
def test_simplex_is_the_nearest_point(scale):
    y = np.random.default_rng(9).normal(size=(6, 5))
    expected = np.stack([nearest_of_simplex(row, scale) for row in y])
    assert np.any(expected == 0)
    got = project(Simplex(scale, axis=1), {"w": jnp.asarray(y, jnp.float32)})["w"]
    np.testing.assert_allclose(got, expected, atol=1e-6)
    got = project(Simplex(scale, axis=-2), {"w": jnp.asarray(y.T, jnp.float32)})["w"]
    np.testing.assert_allclose(got, expected.T, atol=1e-6)
    whole = project(Simplex(scale), {"w": jnp.asarray(y[:2], jnp.float32)})["w"]
    expected = nearest_of_simplex(y[:2].ravel(), scale).reshape(2, 5)
    np.testing.assert_allclose(whole, expected, atol=1e-6)


def test_simplex_at_its_corners():
    def nearest(y, scale=1.5):
        return project(Simplex(scale), {"w": jnp.array(y)})["w"].tolist()

    assert nearest([2.0, 2.0, 2.0]) == [0.5, 0.5, 0.5]  # ties
    assert nearest([0.25, 1.25, 0.0]) == [0.25, 1.25, 0.0]  # there already
    assert nearest([-7.0, -7.5]) == [1.0, 0.5]
    assert nearest([3.0, -2.0], scale=0.0) == [0.0, 0.0]
    assert nearest(0.25) == 1.5


def test_simplex_loses_no_digits_of_large_numbers():
    """The sums of 1e6 + y are rounded to eighths and worse, were they taken."""
    y = np.array([5, 0, 3, 4, 7, 1, 6]) / 16
    far = jnp.asarray(1e6 + y, jnp.float32)
    got = -step(Simplex(1.3), -far, jnp.zeros(7))
    np.testing.assert_allclose(got, nearest_of_simplex(y, 1.3), atol=1e-6)


def test_simplex_has_a_derivative_that_keeps_the_sum():
    y = jnp.array([0.9, 0.3, -2.0, 0.7])

    def nearest(y):
        return jnp.zeros(4) - step(Simplex(1.5), -y, jnp.zeros(4))

    matrix = jax.jacobian(nearest)(y)
    kept = np.array([1.0, 1.0, 0.0, 1.0])
    np.testing.assert_allclose(matrix, np.diag(kept) - np.outer(kept, kept) / 3, 1e-6)


def test_l2_ball_along_axes():
    y = np.random.default_rng(10).normal(size=(3, 4, 2)).astype(np.float32)
    for axis in (0, -1, (0, 1), (0, 1, 2)):
        lengths = np.sqrt(np.sum(y**2, axis, keepdims=True))
        got = project(L2Ball(1.3, axis=axis), {"w": y})["w"]
        np.testing.assert_allclose(got, y * np.minimum(1, 1.3 / lengths), rtol=2e-6)
    assert not np.any(project(L2Ball(0.7), {"w": jnp.zeros(3)})["w"])
    assert not np.any(project(L2Ball(0.0), {"w": y})["w"])


def test_l2_ball_has_a_derivative_at_the_origin():
    zero = jnp.zeros(3)
    through = jax.grad(lambda g: jnp.sum(step(L2Ball(), g, zero)))(zero)
    assert through.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("rule", [NonNegative(), Box(-9.0, 9.0), L2Ball(9.0)], ids=repr)
def test_a_step_that_ends_inside_is_left_as_it_is(rule):
    """x - (x - g) would have lost most of its digits."""
    g = jnp.array([1e-9, -3e-8])
    assert step(rule, g, [2.0, 3.0]).tolist() == g.tolist()


@pytest.mark.parametrize("cls", [NonNegative, Box, Simplex, L2Ball])
def test_projections_leave_other_slots_and_stand_last(cls):
    got = steps_of(
        cls(where="w"), *({"w": 9 * y, "b": 9 * y} for y in (X["bias"],) * 2)
    )
    assert np.array_equal(got["b"], 9 * X["bias"])
    oj.Chain(oj.SGD(0.1), cls(), oj.EMA(Box()))
    with pytest.raises(ValueError, match=cls.__name__):
        oj.Chain(cls(), oj.SGD(0.1))
    with pytest.raises(TypeError, match="a complex parameter"):
        oj.setup(cls(), {"w": jnp.ones(2, jnp.complex64)})


def test_projections_name_an_absent_axis_and_crossed_limits():
    for rule in (Simplex(axis=1), L2Ball(axis=(0, 1))):
        with pytest.raises(
            ValueError, match=r"axis: shape \(3,\), which has no axis 1"
        ):
            oj.setup(rule, {"w": jnp.ones(3)})
    oj.setup(Simplex(axis=1, where=matrices), {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="Box: lower is 2, expected <= 1"):
        Box(2.0)
    Box(lambda count: 2.0)  # who knows


def test_a_training_run_stays_in_the_simplex():
    """And ends where the constrained minimum is, not the free one."""
    target = jnp.array([0.9, 0.8, -0.7, 0.1])
    x = {"w": jnp.full(4, 0.25)}
    rule = oj.Chain(oj.SGD(0.3, momentum=0.5), Simplex())
    state = oj.setup(rule, x)
    update = jax.jit(oj.update)
    for _ in range(60):
        state, x = update(state, x, {"w": x["w"] - target})
        assert np.all(x["w"] >= 0)
        assert float(jnp.sum(x["w"])) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(x["w"], [0.55, 0.45, 0.0, 0.0], atol=1e-5)
