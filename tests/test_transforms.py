"""Transforms at their edges, and against optax.

Their trajectories are in `test_trajectories.py`; here is what those do not show.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import close

import optimjax as oj
from optimjax.transforms.clipping import (
    AdaptiveClip,
    ClipByBlockRMS,
    ClipByNorm,
    ClipByValue,
    rms,
)
from optimjax.transforms.decay import CautiousWeightDecay, SignDecay, matrices
from optimjax.transforms.projections import L2Ball, Simplex
from optimjax.transforms.shaping import (
    AddNoise,
    Centralize,
    Normalize,
    Scale,
    ScaleByParamNorm,
    ScaleByParamRMS,
    Smooth,
    TrustRatio,
    ZeroNans,
)

NAN, INF = math.nan, math.inf


def tree(seed, size=1.0):
    """Arrays of 0 to 4 axes, shaped like what they are in a network."""
    rng = np.random.default_rng(seed)
    shapes = {"bias": (3,), "conv": (2, 2, 4, 3), "dense": (4, 3), "scalar": ()}
    return {
        path: jnp.asarray(size * rng.normal(size=shape), jnp.float32)
        for path, shape in shapes.items()
    }


X = tree(1)
GRADS = [tree(2, 0.3), tree(3, 4.0)]


def steps_of(rule, x, *grads):
    """The steps of the last of `grads`."""
    state, steps = rule.init(x), None
    for g in grads:
        state, steps = rule.apply(state, x, g)
    return steps


def step(rule, g, x=None):
    """The step of one array."""
    g = jnp.asarray(g, jnp.float32) if isinstance(g, list) else g
    x = jnp.ones_like(g) if x is None else jnp.asarray(x, g.dtype)
    return steps_of(rule, {"w": x}, {"w": g})["w"]


def peer(transform, x, *grads):
    """What optax makes of the last of `grads`."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state, out = transform.init(x), None
        for g in grads:
            out, state = transform.update(g, state, x)
    return out


SAME = [
    (ClipByValue(0.4), optax.clip(0.4)),
    (ClipByBlockRMS(0.7), optax.clip_by_block_rms(0.7)),
    (AdaptiveClip(0.3, eps=0.2), optax.adaptive_grad_clip(0.3, eps=0.2)),
    (AdaptiveClip(3.0), optax.adaptive_grad_clip(3.0)),
    (TrustRatio(0.3, eps=0.2), optax.scale_by_trust_ratio(0.0, 0.3, 0.2)),
    (TrustRatio(0.3, min_norm=2.5), optax.scale_by_trust_ratio(2.5, 0.3)),
    (ScaleByParamNorm(2.5), optax.scale_by_param_block_norm(2.5)),
    (ScaleByParamRMS(0.7), optax.scale_by_param_block_rms(0.7)),
    (Smooth(0.8), optax.ema(0.8)),
    (Smooth(0.8, debias=False), optax.ema(0.8, debias=False)),
    (Normalize(), optax.contrib.normalize()),
    (Scale(-0.3), optax.scale(-0.3)),
    (Centralize(oj.Axes(0)), optax.centralize()),
]


@pytest.mark.parametrize(("rule", "other"), SAME, ids=[repr(rule) for rule, _ in SAME])
def test_same_as_optax(rule, other):
    close(steps_of(rule, X, *GRADS), peer(other, X, *GRADS), rtol=2e-6)


def test_zero_nans_is_that_of_optax():
    g = {"w": jnp.array([NAN, INF, -INF, 0.25, -0.0])}
    ours, theirs = steps_of(ZeroNans(), g, g), peer(optax.zero_nans(), g, g)
    assert np.array_equal(ours["w"], theirs["w"])
    assert ours["w"].tolist() == [0.0, INF, -INF, 0.25, -0.0]
    half_nan = step(ZeroNans(), jnp.array([complex(NAN, 2), 3 + 4j]))
    assert half_nan.tolist() == [0, 3 + 4j]


# Clipping ---------------------------------------------------------------------------


def test_clip_by_value_leaves_nan_and_clips_infinity():
    got = step(ClipByValue(0.75), [NAN, INF, -INF, 0.5, -0.5])
    np.testing.assert_array_equal(got, [NAN, 0.75, -0.75, 0.5, -0.5])
    assert not np.any(step(ClipByValue(0.0), [2.0, -3.0]))


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.5, 2, 3, 40, INF])
def test_clip_by_norm_clips_to_the_norm_of_numpy(p):
    g = np.random.default_rng(4).normal(size=(3, 4))
    g[1, 2] = 0.0
    norm = np.linalg.norm(g.ravel(), ord=p)
    for limit in (0.7 * norm, 1.3 * norm):
        got = step(ClipByNorm(limit, p=p), jnp.asarray(g, jnp.float32), g)
        np.testing.assert_allclose(got, g * min(1, limit / norm), rtol=2e-5)


@pytest.mark.parametrize("p", [0.5, 1, 3, 40, INF])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_clip_by_norm_does_not_overflow(p, size):
    """1e30 to the third power is no float32, and 1e-30 to it is 0."""
    got = step(ClipByNorm(size, p=p), [3 * size, -4 * size])
    norm = np.linalg.norm([3.0, 4.0], ord=p)
    np.testing.assert_allclose(got / size, np.array([3, -4]) / norm, rtol=2e-5)


BY_LENGTH = [
    *(ClipByNorm(0.7, p=p) for p in (0.5, 1, 2, 3, INF)),
    ClipByBlockRMS(0.7),
    AdaptiveClip(0.7),
]
CLIPS = [*BY_LENGTH, ClipByNorm(0.7, p=0)]


@pytest.mark.parametrize("rule", CLIPS, ids=repr)
def test_a_zero_gradient_stays_and_has_a_derivative(rule):
    zero = jnp.zeros((2, 3))
    assert not np.any(step(rule, zero))
    through = jax.grad(lambda g: jnp.sum(step(rule, g)))(zero)
    assert np.all(np.isfinite(through)), through
    assert not np.any(step(type(rule)(0.0), zero))  # nor is 0 / 0 a NaN


@pytest.mark.parametrize("rule", BY_LENGTH, ids=repr)
def test_a_nan_is_seen_in_the_whole_array(rule):
    assert np.all(np.isnan(step(rule, [NAN, 2.0, -3.0])))


@pytest.mark.parametrize("rule", BY_LENGTH, ids=repr)
def test_an_infinite_number_makes_the_others_nothing(rule):
    np.testing.assert_array_equal(step(rule, [INF, 2.0, -3.0]), [NAN, 0.0, -0.0])


@pytest.mark.parametrize(
    "rule", [*CLIPS, ScaleByParamRMS(), Simplex(), L2Ball()], ids=repr
)
def test_empty_arrays_pass(rule):
    empty = {"a": jnp.zeros((0,)), "b": jnp.zeros((3, 0))}
    with jax.debug_nans(True):
        close(steps_of(rule, empty, empty), empty)
    assert float(rms(empty["b"])) == 0  # not 0 / 0, which no array would show


WHOLE = [*CLIPS, TrustRatio(), ScaleByParamNorm(), ScaleByParamRMS(), L2Ball(0.7)]


@pytest.mark.parametrize("rule", WHOLE, ids=repr)
def test_norms_of_a_whole_array_cross_devices(rule):
    """In a `shard_map` each device has a part, and the norm is of them all."""
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    place = jax.NamedSharding(mesh, jax.P("d"))
    x, g = (jax.device_put(tree(s)["bias"][:2], place) for s in (1, 3))
    apart = jax.shard_map(
        lambda x, g: step(rule, g, x),
        mesh=mesh,
        in_specs=jax.P("d"),
        out_specs=jax.P("d"),
    )
    np.testing.assert_allclose(jax.jit(apart)(x, g), step(rule, g, x), rtol=2e-6)


def test_clip_by_norm_takes_a_complex_number_as_one():
    got = step(ClipByNorm(2.5, p=1), jnp.array([3 + 4j, 0j]), [1 + 1j, 1j])
    np.testing.assert_allclose(got, [1.5 + 2j, 0], rtol=1e-6)


def test_clip_by_norm_refuses_a_negative_or_unknown_p():
    for p in (-1, NAN):
        with pytest.raises(ValueError, match=re.escape(f"ClipByNorm: p is {p}")):
            ClipByNorm(0.7, p=p)


def test_adaptive_clip_has_units_of_any_axes():
    x, g = (np.random.default_rng(s).normal(size=(2, 3, 4)) for s in (5, 6))
    for axes, summed in [(-1, (0, 1)), (1, (0, 2)), ((0, -1), (1,)), ((2, 1), (0,))]:
        lengths = [np.sqrt(np.sum(a**2, summed, keepdims=True)) for a in (x, g)]
        expected = g * np.minimum(1, 0.3 * lengths[0] / lengths[1])
        got = step(AdaptiveClip(0.3, axes=oj.Axes(axes)), jnp.asarray(g, "float32"), x)
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("cls", [AdaptiveClip, Centralize])
def test_an_absent_output_axis_is_named_at_once(cls):
    rule = cls(axes=oj.Axes((0, 2)))
    oj.setup(rule, {"bias": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"axes: shape \(3, 4\), which has no axis 2"):
        oj.setup(rule, {"w": jnp.ones((3, 4))})


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (ClipByValue, "max_value"),
        (ClipByNorm, "max_norm"),
        (ClipByBlockRMS, "max_rms"),
        (AdaptiveClip, "clipping"),
        (TrustRatio, "coefficient"),
        (ScaleByParamNorm, "min_norm"),
        (ScaleByParamRMS, "min_rms"),
        (Normalize, "norm"),
        (AddNoise, "gamma"),
        (SignDecay, "weight_decay"),
        (Simplex, "scale"),
        (L2Ball, "radius"),
    ],
)
def test_negative_numbers_are_refused(cls, name):
    with pytest.raises(ValueError, match=f"{cls.__name__}: {name} is -0.5"):
        cls(**{name: -0.5})


# Decay ------------------------------------------------------------------------------


def test_matrices_are_arrays_of_two_axes_or_more():
    ndims = {path: matrices(path, x) for path, x in X.items()}
    assert ndims == {"bias": False, "conv": True, "dense": True, "scalar": False}
    got = steps_of(oj.WeightDecay(0.3, where=matrices), X, GRADS[0])
    for path, x in X.items():
        moved = 0.3 * x if ndims[path] else 0 * x
        np.testing.assert_allclose(got[path], GRADS[0][path] + moved, rtol=1e-6)


def test_sign_decay_pulls_zero_nowhere_and_complex_numbers_inwards():
    got = step(SignDecay(0.25), [0.5, 0.5, 0.5], [3.0, -2.0, 0.0])
    assert got.tolist() == [0.75, 0.25, 0.5]
    got = step(SignDecay(0.5), jnp.array([1j]), [3 - 4j])
    np.testing.assert_allclose(got, [0.3 + 0.6j], rtol=1e-6)


def test_cautious_decay_looks_at_signs_not_at_products():
    """The product of two small numbers of opposite signs is -0.0, and that is >= 0."""
    g, x = [1e-30, 0.0, NAN, -2.0], [-1e-30, -4.0, 3.0, -2.0]
    got = step(CautiousWeightDecay(0.5), g, x)
    np.testing.assert_array_equal(got, np.float32([1e-30, -2.0, NAN, -3.0]))


# Shaping ----------------------------------------------------------------------------


def test_scale_follows_a_schedule_and_may_differ_by_path():
    rule = Scale({"b*": lambda count: 2.0 + 3 * count, "*": -0.5})
    got = steps_of(rule, X, *GRADS)
    close(got, {p: (5.0 if p == "bias" else -0.5) * g for p, g in GRADS[1].items()})


def test_centralize_takes_the_mean_of_every_output_unit():
    got = steps_of(Centralize(), X, GRADS[1])
    assert np.array_equal(got["bias"], GRADS[1]["bias"])
    assert np.array_equal(got["scalar"], GRADS[1]["scalar"])
    for path in ("conv", "dense"):
        axes = tuple(range(X[path].ndim - 1))
        np.testing.assert_allclose(np.mean(got[path], axes), 0, atol=1e-6)
        spread = got[path] - GRADS[1][path]
        np.testing.assert_allclose(np.ptp(spread, axes), 0, atol=2e-6)


def test_normalize_leaves_zeros_and_what_has_no_gradient():
    zero = jax.tree.map(jnp.zeros_like, X)
    with jax.debug_nans(True):
        close(steps_of(Normalize(0.7), X, zero), zero)
    grads = {"bias": jnp.array([0.0, 3.0, -4.0]), "dense": None}
    state, got = Normalize(0.5, eps=5.0).apply(oj.Count.zero(), X, grads)
    assert got["dense"] is None
    assert int(state.count) == 1
    np.testing.assert_allclose(got["bias"], [0.0, 0.15, -0.2], rtol=1e-6)


def test_normalize_before_a_fused_rule_is_the_same_as_alone():
    model, grads = {"w": jnp.array([1.5, -0.5])}, {"w": jnp.array([0.3, -0.4])}
    rule = oj.Chain(Normalize(2.0), oj.SGD(0.1, momentum=0.9))
    _, model = oj.update(oj.setup(rule, model), model, grads)
    np.testing.assert_allclose(model["w"], [1.38, -0.34], rtol=1e-6)


def test_trust_ratio_of_zeros_is_one():
    rule = TrustRatio(0.3)
    assert step(rule, [0.5, -2.0], [0.0, 0.0]).tolist() == [0.5, -2.0]
    assert step(rule, [0.0, 0.0], [0.5, -2.0]).tolist() == [0.0, 0.0]


# Noise ------------------------------------------------------------------------------

SETTING = {"eta": 0.3, "gamma": 0.7, "seed": 5}


def noise(rule, x, skipped=()):
    """{slot: (3, *shape)}: the noise of three steps; {(slot, step)} has no gradient."""
    state, drawn = rule.init(x), {path: [] for path in x}
    for t in range(3):
        g = {p: None if (p, t) in skipped else jnp.zeros_like(v) for p, v in x.items()}
        state, steps = rule.apply(state, x, g)
        for path in x:
            if steps[path] is not None:
                drawn[path].append(steps[path])
    return {path: np.stack(each) for path, each in drawn.items()}


def test_noisy_sgd_draws_what_it_always_drew():
    """Recorded before it shared its generator: a seed is a promise."""
    rule, x = oj.NoisySGD(1.0, **SETTING), {"w": jnp.zeros(3)}
    recorded = [
        [-0.689563334, -0.962348521, -1.24333966],
        [-0.093927227, -0.119141869, 0.0459135622],
    ]
    np.testing.assert_allclose(noise(rule, x)["w"][:2], recorded, rtol=2e-6)


def test_added_noise_is_that_of_noisy_sgd_and_comes_from_its_seed():
    x = {"a": jnp.zeros((3, 4)), "b": jnp.zeros(5)}
    first, again = (noise(AddNoise(**SETTING), x) for _ in range(2))
    same = noise(oj.NoisySGD(1.0, **SETTING), x)
    other = noise(AddNoise(**{**SETTING, "seed": 6}), x)
    for path in x:
        assert np.array_equal(first[path], again[path])
        assert np.array_equal(first[path], same[path])
        assert not np.any(first[path] == other[path])
    assert not np.any(noise(AddNoise(0.0), x)["a"])


def test_the_noise_of_a_slot_is_its_own():
    """It goes on where it stood, whoever else comes, goes or is skipped."""
    alone = noise(AddNoise(**SETTING), {"a": jnp.zeros((3, 4))})
    x = {"0": jnp.zeros(5), "a": jnp.zeros((3, 4)), "b": jnp.zeros((3, 4))}
    beside = noise(AddNoise(**SETTING), x, skipped={("b", 1)})
    assert np.array_equal(alone["a"], beside["a"])
    assert not np.any(beside["a"] == noise(AddNoise(**SETTING), x)["b"])
    assert len(beside["b"]) == 2
    assert np.array_equal(beside["b"], noise(AddNoise(**SETTING), x)["b"][:2])


def test_noise_has_its_variance():
    drawn = noise(AddNoise(**SETTING), {"a": jnp.zeros(20_000)})["a"]
    for t, n in enumerate(drawn, 1):
        # 5 standard errors of mean and variance
        assert abs(n.mean()) < 5 * math.sqrt(0.3 / t**0.7 / n.size)
        assert n.var() == pytest.approx(0.3 / t**0.7, rel=5 * math.sqrt(2 / n.size))
