"""What wrappers keep: under jit and scan, of ties, skipped slots, and to evaluate."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, close, same_bits, signatures

import optimjax as oj

SGD = oj.SGD(0.05, momentum=0.85)
ADAM = oj.AdamW(0.02, weight_decay=0.07)
CLIP = oj.ClipByGlobalNorm(1.3)

update = jax.jit(oj.update)


def sometimes(grads, count, **context):
    return count % 3 != 1


WRAPPERS = {
    "accumulate": oj.Accumulate(SGD, every=2),
    "apply if": oj.ApplyIf(SGD, sometimes),
    "skip": oj.SkipNonFinite(SGD, give_up_after=3),
    "loss scale": oj.LossScaling(SGD, scale=4.0, period=3),
    "ema": oj.EMA(SGD, decay=0.7),
    "ema debiased": oj.EMA(SGD, decay=0.7, debias=True),
    "swa": oj.SWA(SGD, start=2),
    "lookahead": oj.Lookahead(SGD, period=2),
    "schedule-free": oj.ScheduleFree(SGD),
    "mixed": oj.MixedPrecision(SGD),
    "monitor": oj.Monitor(SGD),
    "partition": oj.Partition({"a": SGD, "b": ADAM}, {"w": "a", "*": "b"}),
    "masked": oj.Masked(SGD, "w", outside=ADAM),
    "chain": oj.Chain(CLIP, oj.WeightDecay(0.1), SGD),
}

# Three deep, and in orders that people use.
NESTED = {
    "skip ema accumulate": oj.SkipNonFinite(
        oj.EMA(oj.Accumulate(oj.Chain(CLIP, ADAM), every=2), decay=0.7)
    ),
    "accumulate skip lookahead": oj.Accumulate(
        oj.SkipNonFinite(oj.Lookahead(ADAM, period=2)), every=2
    ),
    "scale mixed ema": oj.LossScaling(
        oj.MixedPrecision(oj.EMA(SGD, decay=0.7, debias=True)), scale=4.0, period=2
    ),
    "mixed monitor free": oj.MixedPrecision(oj.Monitor(oj.ScheduleFree(SGD))),
    "partition of wrappers": oj.Chain(
        CLIP,
        oj.Partition(
            {"a": oj.Accumulate(oj.SWA(SGD, start=2), every=2), "b": oj.EMA(ADAM)},
            {"w": "a", "*": "b"},
        ),
    ),
    "if lookahead accumulate": oj.ApplyIf(
        oj.Lookahead(oj.Accumulate(SGD, every=2), period=3), sometimes
    ),
}

EVERY = {**WRAPPERS, **NESTED}
every_wrapper = pytest.mark.parametrize("rule", list(EVERY.values()), ids=EVERY)


def arrays(seed, *lead):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=(*lead, *shape)), jnp.float32)

    return {"w": draw(3, 4), "b": draw(4)}


def nth(stacked, n):
    return jax.tree.map(lambda x: x[n], stacked)


# --- jit, scan, values ----------------------------------------------------------------


@every_wrapper
def test_scan_is_a_loop_and_changes_nothing_but_values(rule):
    model, grads = arrays(1), arrays(2, 7)
    start = oj.setup(rule, model)

    def body(carry, g):
        state, model = carry
        return oj.update(state, model, g), None

    scanned = jax.jit(lambda *carry: jax.lax.scan(body, carry, grads)[0])(start, model)
    looped = start, model
    for n in range(7):
        looped = update(*looped, nth(grads, n))
        assert signatures(looped[0]) == signatures(start)
    close(scanned, looped, rtol=1e-5, atol=1e-6)
    assert not jnp.array_equal(looped[1]["w"], model["w"])


@every_wrapper
def test_another_value_is_no_new_trace(rule):
    model, grads = arrays(1), arrays(2, 2)
    counted = Counter(oj.update)
    step = jax.jit(counted)
    state = oj.setup(rule, model)
    state, moved = step(state, model, nth(grads, 0))
    other = jax.tree.map(lambda x: 0.9 * x, state.rule)
    state, moved = step(dataclasses.replace(state, rule=other), moved, nth(grads, 1))
    state, moved = step(oj.adjust(state, learning_rate=0.3), moved, nth(grads, 1))
    assert counted.traces == 1


# --- Ties -----------------------------------------------------------------------------


def along(model, grads):
    """A loss of which `grads` is the gradient."""
    return sum(map(jnp.vdot, jax.tree.leaves(model), jax.tree.leaves(grads)))


@every_wrapper
def test_tied_places_stay_one_array_and_take_the_summed_gradient(rule):
    alone, grads, more = arrays(1), arrays(2, 5), arrays(3, 5)
    tied = {"b": alone["b"], "w": alone["w"], "z": [alone["w"]]}
    alone_state, state = oj.setup(rule, alone), oj.setup(rule, tied)
    assert list(state.slots) == ["b", "w"]
    step = oj.make_step(along)
    for n in range(5):
        g, second = nth(grads, n), nth(more, n)
        state, tied, _ = step(state, tied, {**g, "z": [second["w"]]})
        summed = {**g, "w": g["w"] + second["w"]}
        alone_state, alone, _ = step(alone_state, alone, summed)
        for model in (tied, oj.eval_model(state, tied)):
            assert model["w"] is model["z"][0]
    close({"b": tied["b"], "w": tied["w"]}, alone, rtol=1e-6)
    close(state.inner, alone_state.inner, rtol=1e-6, atol=1e-6)


# --- Slots without a gradient, and frozen ones ----------------------------------------


def kept_for(state, path):
    """All that the state holds under the path of one slot."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.inner)
    of_path = re.compile(rf"\[{path!r}\]")
    return [x for keys, x in leaves if of_path.search(jax.tree_util.keystr(keys))]


@every_wrapper
def test_a_slot_without_a_gradient_stays_bit_for_bit(rule):
    model, grads = arrays(1), arrays(2, 6)
    state = oj.setup(rule, model)
    for n in range(3):
        state, model = update(state, model, nth(grads, n))
    unaligned = state, model
    state = oj.align(state, {"w": model["w"], "b": None})
    before, start = kept_for(state, "b"), model
    for n in range(3, 6):
        state, model = update(state, model, {**nth(grads, n), "b": None})
        unaligned = update(*unaligned, {**nth(grads, n), "b": None})
        same_bits(model["b"], start["b"])
        same_bits(kept_for(state, "b"), before)
    assert not jnp.array_equal(model["w"], start["w"])
    # A group without any gradient counts nothing, so it needs no room: compare models.
    same_bits(
        update(*unaligned, nth(grads, 0))[1], update(state, model, nth(grads, 0))[1]
    )


@every_wrapper
def test_a_frozen_slot_stays_and_weighs_nothing(rule):
    """Although its gradient is given, and is not even finite."""
    model, grads = arrays(1), arrays(2, 6)
    state = oj.setup(rule, model)
    for n in range(2):
        state, model = update(state, model, nth(grads, n))
    frozen, state = oj.freeze(state, "b"), oj.align(state, {"w": model["w"], "b": None})
    before, start, other = kept_for(frozen, "b"), model, model
    for n in range(2, 6):
        g = nth(grads, n)
        frozen, model = update(frozen, model, {**g, "b": jnp.full(4, jnp.nan)})
        state, other = update(state, other, {**g, "b": None})
        same_bits(model["b"], start["b"])
        same_bits(kept_for(frozen, "b"), before)
    same_bits(model, other)
    same_bits(frozen.inner, state.inner)


@every_wrapper
def test_a_slot_frozen_from_the_start_is_as_if_it_were_not_there(rule):
    model, grads = arrays(1), arrays(2, 5)
    held = oj.Partition({"on": rule, "off": oj.Frozen()}, {"still": "off", "*": "on"})
    state = oj.setup(rule, model)
    with_more = {**model, "still": jnp.ones(5)}
    more_state = oj.setup(held, with_more)
    assert more_state.frozen == ("still",)
    for n in range(5):
        g = nth(grads, n)
        state, model = update(state, model, g)
        more_state, with_more = update(
            more_state, with_more, {**g, "still": jnp.full(5, jnp.inf)}
        )
    same_bits(with_more.pop("still"), jnp.ones(5))
    close(with_more, model, rtol=1e-6)
    assert kept_for(more_state, "still") == []


# --- Models to evaluate ---------------------------------------------------------------


def trained(rule, steps=5, dtype=jnp.float32):
    model = jax.tree.map(lambda x: x.astype(dtype), arrays(1))
    state = oj.setup(rule, model)
    for n in range(steps):
        state, model = update(state, model, nth(arrays(2, steps), n))
    return state, model


OUTERMOST = {
    "ema of swa": (lambda rule: oj.EMA(rule, decay=0.7), oj.SWA),
    "swa of ema": (lambda rule: oj.SWA(rule, start=2), oj.EMA),
    "ema of lookahead": (lambda rule: oj.EMA(rule, decay=0.7), oj.Lookahead),
    "ema of free": (
        lambda rule: oj.EMA(rule, decay=0.7),
        lambda rule: oj.ScheduleFree(rule, learning_rate=0.1),
    ),
}


@pytest.mark.parametrize(("outer", "inner"), list(OUTERMOST.values()), ids=OUTERMOST)
def test_of_nested_averages_the_outermost_is_evaluated(outer, inner):
    """Which averages the parameters that the inner rule visits, not its average."""
    rule = outer(inner(SGD))
    state, model = trained(rule)
    got = oj.eval_model(state, model)
    for path, x in model.items():
        own = rule.eval_leaf(state.inner.own.slots[path], x, 5.0)
        np.testing.assert_allclose(got[path], own, rtol=1e-6)
        assert not np.allclose(got[path], x, rtol=1e-3)


HIDES_NOTHING = {
    "chain": lambda rule: oj.Chain(CLIP, rule),
    "accumulate": lambda rule: oj.Accumulate(rule, every=1),
    "skip": oj.SkipNonFinite,
    "apply if": lambda rule: oj.ApplyIf(rule, lambda grads, count: count >= 0),
    "loss scale": lambda rule: oj.LossScaling(rule, scale=1.0),
    "mixed": oj.MixedPrecision,
    "monitor": oj.Monitor,
    "masked": lambda rule: oj.Masked(rule, "*"),
    "three": lambda rule: oj.Chain(
        CLIP, oj.MixedPrecision(oj.SkipNonFinite(oj.Monitor(rule)))
    ),
}


@pytest.mark.parametrize("around", list(HIDES_NOTHING.values()), ids=HIDES_NOTHING)
def test_an_average_inside_is_evaluated(around):
    rule = around(oj.EMA(SGD, decay=0.7))
    state, model = trained(rule)
    clipped = "ClipByGlobalNorm" in repr(rule)
    alone = oj.Chain(CLIP, SGD) if clipped else SGD
    expected = oj.eval_model(*trained(oj.EMA(alone, decay=0.7)))
    close(oj.eval_model(state, model), expected, rtol=1e-5, atol=1e-6)


def test_slots_without_an_average_are_evaluated_as_they_are():
    rule = oj.Masked(oj.EMA(SGD, decay=0.7), "w", outside=SGD)
    state, model = trained(rule)
    averages = oj.eval_model(state, model)
    same_bits(averages["b"], model["b"])
    assert not np.allclose(averages["w"], model["w"], rtol=1e-3)
    state, model = trained(oj.Chain(CLIP, SGD))
    same_bits(oj.eval_model(state, model), model)


@every_wrapper
def test_evaluated_parameters_keep_their_dtype(rule):
    state, model = trained(rule, steps=2, dtype=jnp.bfloat16)
    for x in (*model.values(), *oj.eval_model(state, model).values()):
        assert x.dtype == jnp.bfloat16


def test_average_in_mixed_precision_is_of_the_wide_copies():
    """In 16 bits neither the parameters nor their average would move."""
    rule = oj.MixedPrecision(oj.EMA(oj.SGD(1.0), decay=0.5))
    model = {"w": jnp.ones(2, jnp.bfloat16)}
    state, grads = oj.setup(rule, model), {"w": jnp.full(2, 1e-3, jnp.float32)}
    wide, average = 1.0, 1.0
    for _ in range(50):
        state, model = update(state, model, grads)
        wide -= 1e-3
        average = 0.5 * average + 0.5 * wide
    kept = state.inner.inner.own.slots["w"].average
    np.testing.assert_allclose(kept, [average] * 2, rtol=1e-5)
    got = oj.eval_model(state, model)["w"]
    same_bits(got, jnp.full(2, average, jnp.float32).astype(jnp.bfloat16))


def test_schedule_free_in_mixed_precision_is_evaluated_from_the_copies():
    """x comes from the parameters, whose rounding a small b1 makes ten times larger."""
    rule = oj.ScheduleFree(oj.SGD(0.05), b1=0.1)
    state, model = trained(oj.MixedPrecision(rule), dtype=jnp.bfloat16)
    got = oj.eval_model(state, model)
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype("float32"), arrays(1))
    state = oj.setup(rule, model)
    for n in range(5):
        state, model = update(state, model, nth(arrays(2, 5), n))
    expected = oj.eval_model(state, model)
    for path, x in got.items():
        np.testing.assert_allclose(x.astype("f4"), expected[path], rtol=2**-8)


def test_tied_places_are_evaluated_as_one_object():
    w = jnp.ones((2, 3))
    model = {"in": w, "out": {"w": w}, "f": jnp.tanh}
    rule = oj.Monitor(oj.EMA(oj.Lookahead(SGD, period=2), decay=0.7))
    state = oj.setup(rule, model)
    grads = {"in": jnp.ones((2, 3)), "out": {"w": 2 * jnp.ones((2, 3))}, "f": None}
    for _ in range(3):
        state, model = oj.update(state, model, grads)
    read = oj.eval_model(state, model)
    assert read["in"] is read["out"]["w"]
    assert read["f"] is jnp.tanh
    assert float(read["in"][0, 0]) > float(model["in"][0, 0])
