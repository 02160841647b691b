"""The compiled loops do what XLA does, and step aside where they cannot."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimjax as oj
from optimjax import kernels

pytestmark = pytest.mark.skipif(
    not kernels.status().startswith("compiled"), reason=kernels.status()
)

RULES = [
    oj.Adam(0.03, b1=0.8, b2=0.95, eps=1e-3),
    oj.AdamW(0.03, b2=0.95, weight_decay=0.2, decay_where="*1*"),
    oj.AdamW({"w1": 0.03, "*": 0.01}, eps_root=1e-3, weight_decay=0.1, couple=False),
    oj.SGD(0.05, momentum=0.8),
    oj.SGD(0.05, momentum=0.8, nesterov=True, dampening=0.3, weight_decay=0.2),
    oj.Lion(0.02, b1=0.8, weight_decay=0.2),
    oj.Chain(oj.ClipByGlobalNorm(0.7), oj.AdamW(0.03, weight_decay=0.1)),
    oj.Chain(oj.ClipByGlobalNorm(0.7), oj.WeightDecay(0.1), oj.SGD(0.1, momentum=0.9)),
]
SIZES = (1, 7, 33, 16_383, 16_384, 16_385, 40_001)  # about a vector, about a piece


def both_ways(function, *args):
    """What a function of arrays gives when it is traced with the loops, and without."""
    fast = jax.jit(lambda *a: function(*a))
    text = fast.lower(*args).as_text()
    with kernels.off():
        plain = jax.jit(lambda *a: function(*a))
        assert "optimjax_" not in plain.lower(*args).as_text()
        expected = plain(*args)
    return fast(*args), expected, "optimjax_" in text


def close(a, b, rtol=3e-6, atol=0.0):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        wide = (np.asarray(z, np.float64) for z in (x, y))
        np.testing.assert_allclose(*wide, rtol=rtol, atol=atol)


def model_of(rng, sizes, dtype=jnp.float32, scale=1.0):
    return {
        f"w{i}": jnp.asarray(scale * rng.normal(size=size), dtype)
        for i, size in enumerate(sizes)
    }


@pytest.mark.parametrize("dtypes", ["ff", "bf", "bb"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_steps_are_those_of_xla(rule, dtypes, rng):
    kinds = {"f": jnp.float32, "b": jnp.bfloat16}
    params, of_grads = (kinds[d] for d in dtypes)
    sizes = SIZES if dtypes == "ff" else SIZES[:4]
    model = model_of(rng, sizes, params)
    state = oj.setup(rule, model)

    def run(state, model, *grads):
        for each in grads:
            state, model = oj.update(state, model, each)
        return state, model

    grads = [model_of(rng, sizes, of_grads) for _ in range(3)]
    grads[1]["w2"] = None
    state = oj.align(state, grads[1])
    (state, model), expected, compiled = both_ways(run, state, model, *grads)
    assert compiled
    # 16-bit parameters may fall to either side of a tie: half of 2^-8 of them, and as
    # much of what weight decay takes from them into the state. Without that: roundings
    # of terms of about 1, which may cancel.
    rounded = dtypes[0] == "b"
    close(state.inner, expected[0].inner, 2e-5, 1e-3 if rounded else 1e-6)
    close(model, expected[1], *((8e-3, 1e-3) if rounded else (2e-5, 2e-6)))


FINITE = (0.0, -0.0, 1e-45, -1e-40, 1e-38, 1e-20, 1.0, -3e4, 1e18, 3e38)
EXTREMES = np.array([*FINITE, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize("rule", RULES[:6], ids=repr)
def test_extreme_numbers_come_out_as_in_xla(rule):
    """Every pair of parameter and gradient, of which many give NaN or infinity."""
    x, g = (a.ravel() for a in np.meshgrid(EXTREMES, EXTREMES))
    model, grads = {"w1": jnp.asarray(x)}, {"w1": jnp.asarray(g)}
    state = oj.setup(rule, model)

    def run(state, model, grads):
        state, model = oj.update(state, model, grads)
        return oj.update(state, model, jax.tree.map(lambda g: 0.5 * g, grads))

    (state, model), expected, _ = both_ways(run, state, model, grads)
    for a, b in ((state.slots["w1"], expected[0].slots["w1"]), (model, expected[1])):
        for new, old in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            new, old = np.asarray(new), np.asarray(old)
            np.testing.assert_array_equal(np.isnan(new), np.isnan(old))
            # What overflows one rounding earlier or later is no matter.
            fine = np.isfinite(new) & np.isfinite(old)
            # XLA may flush denormal numbers to 0.
            np.testing.assert_allclose(new[fine], old[fine], rtol=2e-5, atol=2e-38)


def test_bfloat16_is_rounded_to_nearest_even_as_in_xla(rng):
    """All 65,536 numbers as parameters; a step of almost nothing, so they stay."""
    bits = np.arange(2**16, dtype=np.uint16)
    x = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)
    state = oj.setup(oj.SGD(0.5, momentum=0.8), {"w": x})
    g = jnp.asarray(rng.normal(size=2**16), jnp.float32)
    (_, model), (_, expected), _ = both_ways(oj.update, state, {"w": x}, {"w": g})
    new, old = (np.asarray(m["w"]) for m in (model, expected))
    both_nan = np.isnan(new.astype(np.float32)) & np.isnan(old.astype(np.float32))
    tiny = np.abs(new.astype(np.float32)) < 2e-38
    same = new.view(np.uint16) == old.view(np.uint16)
    assert np.all(same | both_nan | tiny)


def test_transformations_step_aside_and_give_the_same(rng):
    """vmap, grad, checkpoint and scan of a step that has a loop."""
    rule, model = oj.Adam(0.1, eps_root=1e-3), model_of(rng, (3, 5))
    grads = model_of(rng, (3, 5))
    state = oj.setup(rule, model)

    def after(rate, state, model, grads):
        state = oj.adjust(state, learning_rate=rate)
        return oj.update(state, model, grads)[1]["w1"]

    rates = jnp.array([0.1, 0.2])
    swept = jax.vmap(after, (0, None, None, None))
    result, expected, _ = both_ways(swept, rates, state, model, grads)
    close(result, expected)
    slope = jax.grad(lambda *a: jnp.sum(jax.checkpoint(after)(*a) ** 2))
    result, expected, _ = both_ways(slope, rates[0], state, model, grads)
    close(result, expected, 1e-5)

    def scanned(state, model, grads):
        def body(carry, _):
            return oj.update(*carry, grads), None

        return jax.lax.scan(body, (state, model), None, 5)[0]

    result, expected, compiled = both_ways(scanned, state, model, grads)
    assert compiled
    close(result, expected, 1e-5)


def test_several_devices_use_xla(rng):
    """A call that the partitioner cannot split would gather the arrays, in silence."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    here = jax.NamedSharding(mesh, jax.P("x"))
    model = {"w1": jax.device_put(jnp.asarray(rng.normal(size=64), jnp.float32), here)}
    state = oj.setup(oj.Adam(0.1), model)
    text = jax.jit(oj.update).lower(state, model, model).compile().as_text()
    assert "optimjax_" not in text and "all-gather" not in text
    step = jax.shard_map(
        lambda m: oj.update(oj.setup(oj.Adam(0.1), m), m, m)[1],
        mesh=mesh,
        in_specs=jax.P("x"),
        out_specs=jax.P("x"),
    )
    assert "optimjax_" not in jax.jit(step).lower(model).as_text()
    close(jax.jit(step)(model), oj.update(state, model, model)[1])


@pytest.mark.parametrize("donate", [False, True])
def test_in_place_only_where_arrays_are_donated(donate):
    model = {"w": jnp.ones(1000)}
    state = oj.setup(oj.Adam(0.1), model)
    jitted = jax.jit(oj.update, donate_argnums=(0, 1) if donate else ())
    text = jitted.lower(state, model, model).as_text()
    assert ("output_operand_alias" in text) is donate
    if not donate:
        _state_2, model_2 = jitted(state, model, {"w": jnp.ones(1000)})
        np.testing.assert_array_equal(model["w"], 1.0)  # not overwritten
        np.testing.assert_allclose(model_2["w"], 0.9, rtol=1e-6)


@pytest.mark.parametrize(
    ("rule", "calls"),
    [
        (oj.Adam(0.1), 2),
        (oj.AdamW(0.1), 2),
        (oj.AdamW(0.1, decay_where=lambda path, x: path == "x00"), 3),
        (oj.AdamW({"x0?": 0.1, "*": 0.2}), 2),
    ],
    ids=repr,
)
def test_slots_alike_share_a_call(rule, calls):
    """Twenty slots are two calls, of 16 and 4 or 10 and 10; three where one differs."""
    model = {f"x{i:02}": jnp.ones(3) for i in range(20)}
    state = oj.setup(rule, model)
    text = jax.jit(oj.update).lower(state, model, model).as_text()
    assert text.count("@optimjax_adam") == calls


def test_another_apply_leaf_has_no_loop():
    """Whoever derives from Adam and changes the arithmetic gets that arithmetic."""

    @oj.rule
    class Doubled(oj.Adam):
        def apply_leaf(self, state, x, g, t):
            state, step = super().apply_leaf(state, x, g, t)
            return state, 2 * step

    assert oj.Adam().fuses() and oj.AdamW().fuses() and not Doubled().fuses()
    assert not oj.NAdam().fuses() and not oj.AMSGradW().fuses()
    model = {"w": jnp.ones(3)}
    _, new = oj.update(oj.setup(Doubled(0.1), model), model, model)
    np.testing.assert_allclose(new["w"], 0.8, rtol=1e-6)


def test_two_threads_train_at_once(rng):
    """Both use one pool; each must end where it ends alone."""
    model = model_of(rng, (60_001, 40_001, 20_001))
    grads = model_of(rng, (60_001, 40_001, 20_001))
    jitted = jax.jit(oj.update)

    def train(results, key):
        state, m = oj.setup(oj.Adam(0.01), model), model
        for _ in range(30):
            state, m = jitted(state, m, grads)
        results[key] = jax.block_until_ready(m)

    results = {}
    train(results, "alone")
    threads = [threading.Thread(target=train, args=(results, i)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key in range(2):
        for path in model:
            np.testing.assert_array_equal(results[key][path], results["alone"][path])


def test_half_kept_state_and_wide_parameters_use_xla(rng):
    with jax.enable_x64(True):
        double = {"w": jnp.asarray(rng.normal(size=5))}
        state = oj.setup(oj.Adam(0.1), double)
        text = jax.jit(oj.update).lower(state, double, double).as_text()
        assert "optimjax_" not in text
    single = {"w": jnp.asarray(rng.normal(size=5), jnp.float32)}
    state = oj.setup(oj.Adam(0.1, state_dtype="bfloat16"), single)
    text = jax.jit(oj.update).lower(state, single, single).as_text()
    assert "optimjax_" not in text
