"""Wrappers where they are known to go wrong: cases 13, 21, 39, 40, 42, 48g; float16."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close, same_bits
from jax.sharding import NamedSharding, PartitionSpec

import optimjax as oj

update = jax.jit(oj.update)


def visited(rule, x, *grads):
    """The state, and the one array of the model, after each gradient."""
    model = {"w": jnp.asarray(x)}
    state = oj.setup(rule, model)
    for g in grads:
        state, model = update(state, model, {"w": jnp.asarray(g, jnp.float32)})
        yield state, model["w"]


def last(rule, x, *grads):
    return list(visited(rule, x, *grads))[-1]


# --- 13 and 21: 16-bit parameters -----------------------------------------------------

AROUND = {
    "nothing": lambda rule: rule,
    "chain": lambda rule: oj.Chain(oj.ClipByGlobalNorm(9.0), rule),
    "accumulate": lambda rule: oj.Accumulate(rule, every=1),
    "apply if": lambda rule: oj.ApplyIf(rule, lambda grads, count: count < 5),
    "skip": lambda rule: oj.SkipNonFinite(rule, give_up_after=3),
    "loss scale": lambda rule: oj.LossScaling(rule, scale=1.0),
    "ema": lambda rule: oj.EMA(rule, decay=0.9),
    "swa": oj.SWA,
    "lookahead": lambda rule: oj.Lookahead(rule, period=3),
    "schedule-free": oj.ScheduleFree,
    "mixed": oj.MixedPrecision,
    "monitor": oj.Monitor,
    "masked": lambda rule: oj.Masked(rule, "w"),
}


@pytest.mark.parametrize("around", list(AROUND.values()), ids=AROUND)
def test_hyperparameters_do_not_take_the_precision_of_parameters(around):
    rule = around(oj.Adam(0.01))
    state, x = last(rule, jnp.ones(2, jnp.bfloat16), [1.0, 1.0])
    numbers = jax.tree.leaves(state.rule)
    assert {x.dtype for x in numbers} == {jnp.dtype(jnp.float32)}
    assert any(float(x) == np.float32(0.999) for x in numbers)
    assert x.dtype == jnp.bfloat16
    # 0.99, rounded to 8 bits, whatever the way.
    assert x.tolist() == [jnp.bfloat16(0.99)] * 2


@pytest.mark.parametrize(("dtype", "size"), [(jnp.bfloat16, 1e-3), (jnp.float16, 1e-4)])
def test_small_steps_add_up_in_mixed_precision(dtype, size):
    """100 steps from 1, each of which 16 bits round to nothing."""
    start, grads = jnp.ones(2, dtype), [[size, size]] * 100
    assert last(oj.SGD(1.0), start, *grads)[1].tolist() == [1.0, 1.0]
    ways = list(visited(oj.MixedPrecision(oj.SGD(1.0)), start, *grads))
    copies = [state.inner.params["w"] for state, _ in ways]
    for (_, x), copy in zip(ways, copies, strict=True):
        assert x.dtype == dtype
        same_bits(x, copy.astype(dtype))
    close(copies[-1], jnp.full(2, 1 - 100 * size), rtol=1e-5)


# --- 39: accumulation -----------------------------------------------------------------


def test_accumulate_clips_the_mean():
    rule = oj.Accumulate(oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD(1.0)), every=2)
    (_, first), (_, second) = visited(rule, [0.0, 0.0], [3.0, 0.0], [0.0, 4.0])
    assert first.tolist() == [0.0, 0.0]
    close(second, jnp.array([-0.6, -0.8]))


def test_accumulate_counts_real_steps_for_schedules():
    rule = oj.Accumulate(oj.SGD(lambda count: count + 1.0), every=2)
    ways = list(visited(rule, [0.0], *[[1.0]] * 6))
    assert [float(x[0]) for _, x in ways] == [0, -1, -1, -3, -3, -6]
    assert [int(state.inner.count) for state, _ in ways] == [0, 1, 1, 2, 2, 3]


def test_accumulate_in_a_schedule_of_every():
    """One micro-batch for each of the first two steps, then three."""
    every = oj.Accumulate(oj.SGD(1.0), every=lambda n: jnp.where(n < 2, 1, 3))
    got = [float(x[0]) for _, x in visited(every, [0.0], *[[1.0]] * 8)]
    assert got == [-1, -2, -2, -2, -3, -3, -3, -4]


def test_accumulate_sums_sixteen_bits_in_float32():
    """256 of 1 and 256 of 3: in bfloat16 the sum would stop at 256."""
    model = {"w": jnp.zeros(1, jnp.bfloat16)}
    state = oj.setup(oj.Accumulate(oj.SGD(1.0), every=512), model)

    def body(carry, g):
        state, model = carry
        return oj.update(state, model, {"w": g}), None

    grads = jnp.repeat(jnp.array([[1.0], [3.0]], jnp.bfloat16), 256, axis=0)
    (state, model), _ = jax.lax.scan(body, (state, model), grads)
    assert model["w"].tolist() == [-2.0]
    assert state.inner.sums["w"].dtype == jnp.float32


def test_accumulate_keeps_one_copy_of_the_gradients():
    model = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}
    extra, inner = (
        [x.shape for x in jax.tree.leaves(oj.setup(rule, model).inner)]
        for rule in (oj.Accumulate(oj.Adam(), every=4), oj.Adam())
    )
    for shape in inner:
        extra.remove(shape)
    assert sorted(extra) == [(), (), (3, 4), (4,)]


def test_accumulate_without_any_gradient_is_no_micro_batch():
    model = {"w": jnp.array([1.0]), "b": jnp.array([1.0])}
    rule = oj.Accumulate(oj.SGD(0.5), every=2)
    state, nothing = oj.setup(rule, model), {"w": None, "b": None}
    for g, w in ((1.0, 1.0), (None, 1.0), (3.0, 0.0)):
        grads = nothing if g is None else {"w": jnp.array([g]), "b": None}
        state, model = oj.update(state, model, grads)
        assert model["w"].tolist() == [w]
    assert model["b"].tolist() == [1.0]


def test_accumulate_refuses_what_it_cannot_accumulate():
    with pytest.raises(ValueError, match=re.escape("every is 0.5, expected >= 1")):
        oj.Accumulate(oj.SGD(), every=0.5)
    with pytest.raises(TypeError, match="LBFGS evaluates the loss of a whole batch"):
        oj.Accumulate(oj.Chain(oj.Identity(), oj.LBFGS()))


# --- 40: what is skipped --------------------------------------------------------------

BAD = [[1.0], [np.nan], [np.nan], [np.nan], [np.nan], [1.0]]


def test_a_skipped_step_leaves_all_as_it_was():
    ways = list(visited(oj.SkipNonFinite(oj.Adam(0.1)), [1.0], *BAD))
    np.testing.assert_allclose([x[0] for _, x in ways], [0.9] * 5 + [0.8], rtol=1e-6)
    for state, x in ways[1:5]:
        same_bits(x, ways[0][1])
        same_bits(state.inner.inner, ways[0][0].inner.inner)
        same_bits(state.count, ways[0][0].count)
    kept = [state.inner for state, _ in ways]
    assert [int(s.in_a_row) for s in kept] == [0, 1, 2, 3, 4, 0]
    assert [int(s.skipped) for s in kept] == [0, 1, 2, 3, 4, 4]
    assert [int(s.count) for s in kept] == [1, 1, 1, 1, 1, 2]
    assert not any(s.gave_up for s in kept)


def test_it_gives_up_and_stays_at_the_last_good_parameters():
    rule = oj.SkipNonFinite(oj.Adam(0.1), give_up_after=2)
    ways = list(visited(rule, [1.0], *BAD))
    assert [bool(s.inner.gave_up) for s, _ in ways] == [False] * 2 + [True] * 4
    for state, x in ways[1:]:
        same_bits(x, ways[0][1])
        same_bits(state.inner.inner, ways[0][0].inner.inner)
    assert int(ways[-1][0].inner.skipped) == 5
    assert int(ways[-1][0].inner.in_a_row) == 0


def test_only_bad_gradients_in_a_row_make_it_give_up():
    rule = oj.SkipNonFinite(oj.SGD(1.0), give_up_after=2)
    state, x = last(rule, [0.0], [np.inf], [1.0], [np.nan], [1.0], [-np.inf], [1.0])
    assert x.tolist() == [-3.0]
    assert not state.inner.gave_up


def test_one_bad_leaf_skips_all_leaves():
    model = {"a": jnp.ones(2), "b": jnp.ones((2, 3))}
    state = oj.setup(oj.SkipNonFinite(oj.Adam(0.1)), model)
    grads = {"a": jnp.ones(2), "b": jnp.ones((2, 3)).at[1, 2].set(jnp.nan)}
    after, same = update(state, model, grads)
    same_bits(same, model)
    same_bits(after.inner.inner, state.inner.inner)


# --- 42: norms over groups and devices ------------------------------------------------


def groups(*before):
    def part(rate):
        return oj.Chain(*before, oj.SGD(rate))

    return oj.Partition({"a": part(1.0), "b": part(0.5)}, {"a": "a", "b": "b"})


def test_clip_outside_of_the_groups_has_one_norm_inside_one_each():
    model = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    clip = oj.ClipByGlobalNorm(1.0)
    for rule, steps in (
        (oj.Chain(clip, groups()), (0.6, 0.4)),
        (groups(clip), (1.0, 0.5)),
    ):
        _, new = oj.update(oj.setup(rule, model), model, grads)
        np.testing.assert_allclose([-new["a"][0], -new["b"][0]], steps, rtol=1e-6)


@pytest.mark.parametrize("bad", [False, True])
def test_norms_and_bad_numbers_of_all_devices_count(bad):
    """Four devices, one of which has the large, or bad, number."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    spread = NamedSharding(mesh, PartitionSpec("x"))
    g = jnp.arange(1.0, 9.0).at[5].set(jnp.nan if bad else 40.0)
    rule = oj.SkipNonFinite(oj.Chain(oj.ClipByGlobalNorm(2.0), oj.SGD(0.5)))
    ways = []
    for put in (lambda x: x, lambda x: jax.device_put(x, spread)):
        model = {"w": put(jnp.zeros(8))}
        state = oj.setup(rule, model)
        state, model = update(state, model, {"w": put(g)})
        ways.append((np.asarray(model["w"]), int(state.inner.skipped)))
    assert [skipped for _, skipped in ways] == [int(bad)] * 2
    expected = 0 if bad else -0.5 * 2 * g / jnp.linalg.norm(g)
    for got, _ in ways:
        np.testing.assert_allclose(got, np.broadcast_to(expected, 8), rtol=1e-6)


# --- 48g: an average of what does not move --------------------------------------------


def test_debiased_average_of_a_constant_is_the_constant():
    model = {"w": jnp.array([1.0, -3.0])}
    state = oj.setup(oj.EMA(oj.SGD(0.1), decay=0.9, debias=True), model)
    for _ in range(10):
        state, model = update(state, model, {"w": jnp.zeros(2)})
        close(oj.eval_model(state, model), model, rtol=1e-6)


# --- Loss scaling in float16 ----------------------------------------------------------


def linear(model, x):
    """Of which the gradient is x, in float16."""
    return jnp.sum(model["w"] * x)


def scaling(**settings):
    rule = oj.LossScaling(oj.SGD(0.5, momentum=0.5), **settings)
    model = {"w": jnp.array([1.0, 2.0], jnp.float16)}
    return oj.setup(rule, model), model, oj.make_step(linear)


def test_loss_scale_backs_off_and_grows():
    """4 times 32768, and 16384, is more than float16 holds."""
    state, model, step = scaling(scale=32768.0, period=2)
    before, scales, taken = model, [], []
    x = jnp.array([4.0, 0.5], jnp.float16)
    for _ in range(6):
        state, model, value = step(state, model, x)
        assert float(value) == float(linear(before, x))  # neither scaled nor lost
        taken.append(bool(jnp.any(model["w"] != before["w"])))
        scales.append(float(oj.loss_scale(state)))
        before = model
    assert scales == [16384.0, 8192.0, 8192.0, 16384.0, 8192.0, 8192.0]
    assert taken == [False, False, True, True, False, True]
    # Three steps of SGD with momentum 1/2 along x: 1, 1.5, 1.75 times 0.5 x.
    assert model["w"].dtype == jnp.float16
    assert model["w"].tolist() == [1 - 0.5 * 4 * 4.25, 2 - 0.5 * 0.5 * 4.25]


def test_overflow_leaves_parameters_and_moments_as_they_were():
    state, model, step = scaling(scale=32768.0)
    after, same, _ = step(state, model, jnp.array([4.0, 0.5], jnp.float16))
    same_bits(same, model)
    same_bits(after.inner.inner, state.inner.inner)
    assert int(after.count) == 0


def test_small_gradients_survive_only_scaled():
    def loss(model):
        return jnp.sum((model["w"] * 1e-4) ** 2)

    for rule, moved in ((oj.SGD(1e7), False), (oj.LossScaling(oj.SGD(1e7)), True)):
        model = {"w": jnp.ones(2, jnp.float16)}
        _, new, _ = oj.make_step(loss)(oj.setup(rule, model), model)
        assert bool(jnp.all(new["w"] < 0.9)) == moved
        assert moved or new["w"].tolist() == [1.0, 1.0]


def test_the_scale_stays_a_number():
    """It neither grows to infinity nor falls to 0."""
    big, small = 3e38, 1e-44
    state, _ = last(oj.LossScaling(oj.SGD(0.1), scale=big, period=1), [1.0], [1.0])
    assert float(oj.loss_scale(state)) == np.float32(big)
    rule = oj.LossScaling(oj.SGD(0.1), scale=small, backoff=1e-3)
    state, _ = last(rule, [1.0], [np.inf])
    assert float(oj.loss_scale(state)) > 0


def test_loss_scale_found_at_any_depth():
    """Also with the value and aux of the loss as it is, and in a step by hand."""
    rule = oj.EMA(oj.MixedPrecision(oj.LossScaling(oj.SGD(0.5), scale=64.0)), decay=0.5)
    model = {"w": jnp.array([1.0, 2.0], jnp.float16)}
    x = jnp.array([0.25, -0.5], jnp.float16)
    state = oj.setup(rule, model)
    assert float(oj.loss_scale(state)) == 64.0
    step = oj.make_step(lambda model, x: (linear(model, x), x), has_aux=True)
    _, new, (value, aux) = step(state, model, x)
    assert float(value) == -0.75
    same_bits(aux, x)
    grads = jax.grad(lambda m: oj.loss_scale(state) * linear(m, x).astype("f4"))(model)
    _, by_hand = oj.update(state, model, grads)
    same_bits(new, by_hand)
    assert new["w"].tolist() == [0.875, 2.25]


def test_without_a_loss_scale_it_is_one():
    assert float(oj.loss_scale(oj.setup(oj.SGD(), {"w": jnp.ones(2)}))) == 1.0
