"""Modifiers around any rule: decay in all its forms, caution, bounds.

Each is compared to a rule that comes to the same, or to its equation in NumPy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close, same_bits

import optimjax as oj
from optimjax.arrays import norm, rms, size
from optimjax.rates import learning_rates

RATE, WD = 0.05, 0.3


def falling(count):
    return 0.2 / (count + 2)


def model(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"b": (3,), "w": (3, 2)}
    return {path: jnp.asarray(rng.normal(size=s), dtype) for path, s in shapes.items()}


GRADS = [model(seed=seed) for seed in (1, 2, 3, 4)]


def run(rule, grads=GRADS, x=None):
    x = model() if x is None else x
    state = oj.setup(rule, x)
    for g in grads:
        state, x = oj.update(state, x, g)
    return x


def matrices(path, x):
    return x.ndim == 2


def groups(**rules):
    """The rule `w` for matrices, `b` for the others, by a function of the leaf."""
    return oj.Partition(rules, lambda path, x: "w" if x.ndim == 2 else "b")


# Decay: what it is the same as ------------------------------------------------------


SAME = {
    "coupled": (
        oj.Decay(oj.Adam(RATE), WD),
        oj.AdamW(RATE, weight_decay=WD),
    ),
    "coupled where": (
        oj.Decay(oj.Adam(RATE), WD, where="w"),
        oj.AdamW(RATE, weight_decay=WD, decay_where="w"),
    ),
    "independent": (
        oj.Decay(oj.Adam(RATE), WD, "independent"),
        oj.AdamW(RATE, weight_decay=WD, couple=False),
    ),
    "l2": (
        oj.Decay(oj.Adam(RATE), WD, "l2", where=matrices),
        oj.Chain(oj.WeightDecay(WD, where=matrices), oj.Adam(RATE)),
    ),
    "schedule at its peak": (
        oj.Decay(oj.Adam(RATE), WD, "schedule", peak=RATE),
        oj.AdamW(RATE, weight_decay=WD, couple=False),
    ),
    "corrected at its peak": (
        oj.Decay(oj.Adam(RATE), WD, "corrected", peak=RATE),
        oj.AdamW(RATE, weight_decay=WD),
    ),
    "cautious": (
        oj.Decay(oj.Adam(RATE), WD, cautious=True),
        oj.Chain(oj.Adam(RATE), oj.CautiousWeightDecay(RATE * WD)),
    ),
    "cautious independent": (
        oj.Decay(oj.Adam(RATE), WD, "independent", where="w", cautious=True),
        oj.Chain(oj.Adam(RATE), oj.CautiousWeightDecay(WD, where="w")),
    ),
    "coupled, by a schedule": (
        oj.Decay(oj.Adam(falling), WD),
        oj.AdamW(falling, weight_decay=WD),
    ),
    "a scheduled decay": (
        oj.Decay(oj.Adam(RATE), falling),
        oj.AdamW(RATE, weight_decay=falling),
    ),
    "rates and decays by path": (
        oj.Decay(oj.Adam({"w": RATE, "*": falling}), {"b": 0.1, "*": WD}),
        oj.AdamW({"w": RATE, "*": falling}, weight_decay={"b": 0.1, "*": WD}),
    ),
    "a rate by a function of the leaf": (
        oj.Decay(oj.SGD(oj.by_path(lambda path, x: 0.1 * x.ndim)), WD),
        oj.SGD({"w": 0.2, "b": 0.1}, weight_decay=WD),
    ),
    "groups": (
        oj.Decay(groups(w=oj.Adam(falling), b=oj.SGD(0.7)), WD),
        groups(w=oj.AdamW(falling, weight_decay=WD), b=oj.SGD(0.7, weight_decay=WD)),
    ),
    "a chain": (
        oj.Decay(oj.Chain(oj.ClipByGlobalNorm(0.5), oj.Adam(falling)), WD),
        oj.Chain(oj.ClipByGlobalNorm(0.5), oj.AdamW(falling, weight_decay=WD)),
    ),
    "two for two parts": (
        oj.Decay(oj.Decay(oj.Adam(RATE), 0.1, where="b"), WD, where="w"),
        oj.AdamW(RATE, weight_decay={"b": 0.1, "w": WD}),
    ),
    "frozen slots": (
        oj.Decay(oj.Masked(oj.Adam(RATE), "w"), WD),
        oj.Masked(oj.AdamW(RATE, weight_decay=WD), "w"),
    ),
    "nothing": (oj.Decay(oj.Adam(RATE), 0.0, "proximal"), oj.Adam(RATE)),
    "around a clipped step": (
        oj.Decay(oj.ClipStep(oj.Adam(falling), max_rms=9.0), WD),
        oj.AdamW(falling, weight_decay=WD),
    ),
}


@pytest.mark.parametrize("decayed, same", SAME.values(), ids=SAME)
def test_decay_is_the_same_as(decayed, same):
    close(run(decayed), run(same), rtol=2e-6)


OUTSIDE = {
    "free": lambda inner: oj.ScheduleFree(inner, learning_rate=RATE),
    "ema": lambda inner: oj.EMA(inner, decay=0.5),
    "accumulate": lambda inner: oj.Accumulate(inner, every=2),
    "lookahead": lambda inner: oj.Lookahead(inner, period=2),
    "precision": oj.MixedPrecision,
    "skip": oj.SkipNonFinite,
    "chain": lambda inner: oj.Chain(oj.Centralize(), inner, oj.NonNegative()),
}


@pytest.mark.parametrize("outside", OUTSIDE.values(), ids=OUTSIDE)
def test_decay_works_inside(outside):
    got = run(outside(oj.Decay(oj.Adam(falling), WD)))
    close(got, run(outside(oj.AdamW(falling, weight_decay=WD))), rtol=2e-6)


def test_decay_takes_a_single_rate_to_schedule_free():
    rule = oj.ScheduleFree(oj.Decay(oj.SGD(falling), WD))
    close(run(rule), run(oj.ScheduleFree(oj.SGD(falling, weight_decay=WD))), rtol=2e-6)


# Decay: closed forms ----------------------------------------------------------------


def by_hand(decayed):
    """Gradient descent at the `falling` rate, with `decayed` (x, step, rate)."""
    x = {path: np.float64(a) for path, a in model().items()}
    for t, g in enumerate(GRADS):
        rate = 0.2 / (t + 2)
        x = {p: decayed(x[p], rate * np.float64(g[p]), rate) for p in x}
    return x


CLOSED = {
    "l2": lambda x, step, rate: x - step - rate * WD * x,
    "coupled": lambda x, step, rate: (1 - rate * WD) * x - step,
    "independent": lambda x, step, rate: (1 - WD) * x - step,
    "schedule": lambda x, step, rate: (1 - rate / 0.1 * WD) * x - step,
    "proximal": lambda x, step, rate: (x - step) / (1 + rate * WD),
    "corrected": lambda x, step, rate: (1 - rate**2 / 0.1 * WD) * x - step,
}


@pytest.mark.parametrize("how", CLOSED)
def test_each_form_of_decay_by_hand(how):
    peak = 0.1 if how in ("schedule", "corrected") else None
    got = run(oj.Decay(oj.SGD(falling), WD, how, peak=peak))
    close(got, by_hand(CLOSED[how]), rtol=1e-5)


def test_proximal_decay_is_that_of_adan():
    got = run(oj.Decay(oj.Adan(RATE), WD, "proximal"))
    close(got, run(oj.Adan(RATE, weight_decay=WD)), rtol=2e-6)


def test_cautious_proximal_decay_leaves_some_numbers_alone():
    x, g = {"w": jnp.array([1.0, 1.0])}, {"w": jnp.array([1.0, -1.0])}
    got = run(oj.Decay(oj.SGD(0.1), 5.0, "proximal", cautious=True), [g], x)
    np.testing.assert_allclose(got["w"], [0.9 / 1.5, 1.1], rtol=1e-6)


def test_cautious_decay_does_not_fail_on_small_numbers():
    x, g = {"w": jnp.full(2, 1e-30)}, {"w": jnp.array([1e-30, -1e-30])}
    got = run(oj.Decay(oj.SGD(0.0), 0.5, "independent", cautious=True), [g], x)
    # A step of 0 makes nothing larger.
    np.testing.assert_allclose(got["w"], [5e-31, 5e-31], rtol=1e-6)
    got = run(oj.Decay(oj.SGD(1e-5), 0.5, "independent", cautious=True), [g], x)
    assert got["w"][0] < 0.6e-30 and got["w"][1] > 0.9e-30


def test_cautious_decay_takes_a_complex_number_as_one():
    x = {"w": jnp.array([1 + 1j, 1 + 1j])}
    g = {"w": jnp.array([2 - 1j, -2 + 1j])}
    got = run(oj.Decay(oj.SGD(0.1), 0.5, "independent", cautious=True), [g], x)
    np.testing.assert_allclose(got["w"], [0.3 + 0.6j, 1.2 + 0.9j], rtol=1e-6)


def test_complex_parameters_decay():
    x = {"w": jnp.array([1 + 2j])}
    got = run(oj.Decay(oj.SGD(0.1), 0.5), [{"w": jnp.array([1j])}], x)
    np.testing.assert_allclose(got["w"], [0.95 + 1.8j], rtol=1e-6)


# Decay: counts, skipped slots, live changes -----------------------------------------


def test_rates_are_those_at_the_count_of_the_rule_inside():
    """The outer rule goes on counting where the inner is held up."""
    missing = [{**GRADS[0], "w": None}, *GRADS[1:]]
    separate = groups(w=oj.Adam(falling), b=oj.Adam(falling))
    expected = groups(w=oj.AdamW(falling, weight_decay=WD), b=oj.Adam(falling))
    got = run(oj.Decay(separate, WD, where="w"), missing)
    close(got["w"], run(expected, missing)["w"], rtol=2e-6)


def test_a_skipped_slot_does_not_decay():
    for how in ("l2", "coupled", "independent", "proximal"):
        x = model()
        got = run(oj.Decay(oj.Adam(RATE), WD, how), [{"w": None, "b": x["b"]}], x)
        same_bits(got["w"], x["w"])
        assert not np.array_equal(got["b"], x["b"])


def test_nothing_at_all_is_no_update():
    x = model()
    state = oj.setup(oj.Decay(oj.Adam(RATE), WD, "l2"), x)
    same_bits(oj.update(state, x, {"w": None, "b": None}), (state, x))


@pytest.mark.parametrize("how", ["l2", "coupled", "schedule"])
def test_a_change_of_rate_or_decay_compiles_nothing(how):
    peak = 0.1 if how == "schedule" else None
    x, traces = model(), []
    state = oj.setup(oj.Decay(oj.SGD(0.1), WD, how, peak=peak), x)
    step = jax.jit(lambda *args: (traces.append(1), oj.update(*args))[1])
    zero = jax.tree.map(jnp.zeros_like, x)
    for rate, decay in [(0.1, WD), (0.2, 0.4), (0.3, 0.5)]:
        state = oj.adjust(state, learning_rate=rate, weight_decay=decay)
        state, new = step(state, x, zero)
        share = decay * rate / (peak or 1)
        close(new, jax.tree.map(lambda a, share=share: a * (1 - share), x), rtol=1e-5)
    assert len(traces) == 1


def test_a_change_of_one_slots_rate_changes_its_decay():
    x = model()
    state = oj.setup(oj.Decay(oj.SGD(0.1), WD), x)
    state = oj.adjust(state, where="w", learning_rate=0.0)
    _, new = oj.update(state, x, GRADS[0])
    same_bits(new["w"], x["w"])
    assert not np.array_equal(new["b"], x["b"])


def test_another_schedule_is_taken_over_live():
    x = model()
    state = oj.setup(oj.Decay(oj.SGD(0.1), WD), x)
    state = oj.adjust(state, learning_rate=lambda count: 0.2 / (count + 2))
    for g in GRADS:
        state, x = oj.update(state, x, g)
    close(x, by_hand(CLOSED["coupled"]), rtol=1e-5)


def test_decay_under_scan_and_vmap():
    rule, x = oj.Decay(groups(w=oj.Adam(falling), b=oj.SGD(0.1)), WD), model()
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *GRADS)

    def trained(decay):
        state = oj.setup(rule, x)
        state = oj.adjust(state, weight_decay=decay)

        def body(carry, g):
            return oj.update(*carry, g), None

        return jax.lax.scan(body, (state, x), stacked)[0][1]

    swept = jax.jit(jax.vmap(trained))(jnp.array([WD, 0.1]))
    close(jax.tree.map(lambda a: a[0], swept), run(rule), rtol=2e-6)


def test_bfloat16_takes_the_decayed_step_rounded_once():
    x = {"w": jnp.full(2, 1.0, jnp.bfloat16)}
    g = {"w": jnp.full(2, 0.01, jnp.bfloat16)}
    got = run(oj.Decay(oj.SGD(0.1), 0.03), [g], x)["w"]
    # 0.001 + 0.003: neither alone moves a bfloat16 of 1.
    assert got.dtype == jnp.bfloat16 and float(got[0]) == 1 - 2**-8


# Decay: mistakes --------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule, words",
    [
        (lambda: oj.Decay(oj.SGD(), how="l1"), "how is 'l1', expected one of 'l2'"),
        (lambda: oj.Decay(oj.SGD(), how="schedule"), "peak is nothing"),
        (lambda: oj.Decay(oj.SGD(), peak=1.0), "peak is a number"),
        (lambda: oj.Decay(oj.SGD(), how="corrected", peak=0.0), "peak is 0"),
        (lambda: oj.Decay(oj.SGD(), how="l2", cautious=True), "cautious with how='l2'"),
        (lambda: oj.Decay(oj.SGD(), -1.0), "weight_decay is -1"),
        (lambda: oj.Decay(oj.MixedPrecision(oj.SGD())), "Put MixedPrecision around"),
        (lambda: oj.Decay(oj.EMA(oj.SGD())), "Put EMA around it"),
        (lambda: oj.Cautious(oj.Chain(oj.SGD(), oj.NonNegative())), "after it in a"),
        (lambda: oj.Decay(oj.LossScaling(oj.SGD())), "still scaled"),
        (lambda: oj.Cautious(oj.SGD(), form="median"), "form is 'median'"),
        (lambda: oj.ClipStep(oj.SGD(), max_rms=-1.0), "max_rms is -1"),
    ],
)
def test_mistakes_are_seen_at_once(rule, words):
    with pytest.raises(ValueError) as error:
        rule()
    assert words in str(error.value)


@pytest.mark.parametrize("wrapper", [oj.Decay, oj.ClipStep])
@pytest.mark.parametrize(
    "inner, much",
    [
        (oj.Identity(), "no learning rates, expected one"),
        (oj.Chain(oj.SGD(), oj.Adam()), "2 learning rates, expected one"),
        (groups(w=oj.SGD(), b=oj.Scale(0.1)), "'b': no learning rates"),
    ],
)
def test_setup_names_slots_without_one_rate(wrapper, inner, much):
    with pytest.raises(ValueError, match=much) as error:
        oj.setup(wrapper(inner), model())
    assert wrapper.__name__ in str(error.value)


def test_what_needs_no_rate_takes_any_rule():
    for how in ("l2", "independent"):
        run(oj.Decay(oj.Scale(0.1), WD, how))
    run(oj.Decay(groups(w=oj.SGD(), b=oj.Scale(0.1)), WD, where="w"))


# Learning rates ---------------------------------------------------------------------


def test_the_innermost_rate_is_the_one():
    rule = oj.ScheduleFree(oj.SGD({"w": 0.1, "b": falling}), learning_rate=7.0)
    state = oj.setup(rule, model())
    found = learning_rates("test", state.rule, state.inner, model())
    close(dict(found), {"w": jnp.asarray(0.1), "b": jnp.asarray(0.1)})


def test_slots_of_one_rate_share_one_array():
    state = oj.setup(oj.Adam(falling), model())
    found = learning_rates("test", state.rule, state.inner, model())
    assert found["w"] is found["b"]


# Cautious ---------------------------------------------------------------------------

AGAINST = [{"w": jnp.array([1.0, 2.0, -1.0])}, {"w": jnp.array([-0.5, 1.0, -1.0])}]


@pytest.mark.parametrize("form", ["count", "mean"])
def test_cautious_steps_by_hand(form):
    x = {"w": jnp.zeros(3)}
    got = run(oj.Cautious(oj.SGD(0.1, momentum=0.9), form=form), AGAINST, x)["w"]
    scales = {"count": (3 / 4, 3 / 3), "mean": (1, 3 / 2)}[form]
    velocity = np.array([0.4, 2.8, -1.9])  # the first points against its gradient
    first, second = np.array([1.0, 2, -1]), velocity * [0, 1, 1]
    expected = -0.1 * (scales[0] * first + scales[1] * second)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("form, factor", [("count", 5000.0), ("mean", 1000.0)])
def test_a_single_number_that_is_left_makes_up_for_so_much(form, factor):
    x = {"w": jnp.zeros(10_000)}
    first, then = jnp.ones(10_000), -0.1 * jnp.ones(10_000).at[0].set(-10.0)
    state = oj.setup(oj.Cautious(oj.SGD(1.0, momentum=0.5), form=form), x)
    state, x = oj.update(state, x, {"w": first})
    _, new = oj.update(state, x, {"w": then})
    assert float(new["w"][1]) == float(x["w"][1])
    np.testing.assert_allclose(x["w"][0] - new["w"][0], 1.5 * factor, rtol=1e-5)


def test_cautious_steps_show_a_nan():
    got = run(
        oj.Cautious(oj.SGD(0.1)),
        [{"w": jnp.array([jnp.nan, 1.0])}],
        {"w": jnp.zeros(2)},
    )
    assert np.isnan(got["w"][0])


def test_cautious_takes_a_complex_number_as_one():
    x = {"w": jnp.zeros(2, jnp.complex64)}
    grads = [{"w": jnp.array([2 + 0j, 2 + 0j])}, {"w": jnp.array([-1 + 3j, -1 + 0j])}]
    state = oj.setup(oj.Cautious(oj.SGD(1.0, momentum=0.9), form="mean"), x)
    state, x = oj.update(state, x, grads[0])
    _, new = oj.update(state, x, grads[1])
    np.testing.assert_allclose(x["w"] - new["w"], [2 * (0.8 + 3j), 0], rtol=1e-6)


def test_cautious_gradient_descent_always_agrees():
    close(run(oj.Cautious(oj.SGD(0.1), form="mean")), run(oj.SGD(0.1)), rtol=1e-6)


# ClipStep ---------------------------------------------------------------------------


def test_clipped_steps_by_hand():
    x, g = {"w": jnp.zeros(2), "b": jnp.zeros(())}, jnp.array([3.0, -4.0])
    rule = oj.ClipStep(oj.SGD({"w": falling, "b": 0.5}), max_rms=0.5)
    got = run(rule, [{"w": g, "b": jnp.asarray(0.4)}] * 2, x)
    length = np.sqrt(12.5)
    np.testing.assert_allclose(got["w"], -(0.1 + 0.2 / 3) * 0.5 / length * g, rtol=1e-6)
    np.testing.assert_allclose(got["b"], -2 * 0.5 * 0.4, rtol=1e-6)


def test_a_short_step_is_not_clipped():
    same_bits(run(oj.ClipStep(oj.SGD(0.1), max_rms=9.0)), run(oj.SGD(0.1)))


def test_clipping_at_a_rate_of_zero_is_finite():
    x = model()
    same_bits(run(oj.ClipStep(oj.Adam(0.0)), x=x), x)


def test_clipping_follows_a_changed_rate():
    x = model()
    state = oj.setup(oj.ClipStep(oj.SGD(0.1), max_rms=0.1), x)
    moved = []
    for rate in (0.1, 0.2):
        _, new = oj.update(oj.adjust(state, learning_rate=rate), x, GRADS[0])
        moved.append(jax.tree.map(jnp.subtract, x, new))
    close(moved[1], jax.tree.map(lambda d: 2 * d, moved[0]), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rms(moved[0]["w"]), 0.01, rtol=1e-4)


# AMSBound ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
def test_the_bound_around_adam_is_amsgrad(dtype):
    x = model(dtype)
    grads = [
        jax.tree.map(lambda g, s=s: (s * g).astype(dtype), g)
        for g, s in zip(GRADS, (1.0, 5.0, 0.1, 0.2), strict=True)
    ]
    bound = oj.AMSBound(oj.Adam(RATE, b2=0.7, eps=0.0))
    same = oj.AMSGrad(RATE, b2=0.7, eps=0.0, debias_v="after")
    close(run(bound, grads, x), run(same, grads, x), rtol=1e-5)


def test_only_slots_with_a_second_moment_are_bound():
    grads = [jax.tree.map(lambda g, s=s: s * g, GRADS[0]) for s in (1.0, 0.1)]
    sgd = oj.SGD(0.1, momentum=0.9)
    got = run(oj.AMSBound(groups(w=oj.Adam(RATE, b2=0.5, eps=0.0), b=sgd)), grads)
    same = oj.AMSGrad(RATE, b2=0.5, eps=0.0, debias_v="after")
    close(got, run(groups(w=same, b=sgd), grads), rtol=1e-5)


def test_zero_gradients_stay_finite_under_the_bound():
    x = model()
    got = run(oj.AMSBound(oj.Adam(RATE)), [jax.tree.map(jnp.zeros_like, x)], x)
    same_bits(got, x)


@pytest.mark.parametrize(
    "inner, words",
    [
        (oj.SGD(0.1, momentum=0.9), "no second moment"),
        (oj.Adan(0.1), "no second moment"),
        (oj.AMSGrad(0.1), "no second moment"),
        (oj.Chain(oj.Adam(), oj.RMSProp()), "two second moments"),
    ],
)
def test_setup_refuses_a_bound_of_nothing(inner, words):
    with pytest.raises(ValueError, match=f"AMSBound: 'b': {words}"):
        oj.setup(oj.AMSBound(inner), model())


# Sums over whole arrays -------------------------------------------------------------


def test_norms_of_nan_are_nan():
    bad = jnp.array([1.0, jnp.nan])
    assert np.isnan(norm(bad)) and np.isnan(rms(bad))
    assert np.isnan(run(oj.Fromage(0.1), [{"w": bad}], {"w": jnp.ones(2)})["w"]).all()


def test_norms_of_zeros_have_a_derivative():
    for function in (norm, rms):
        assert not jax.grad(function)(jnp.zeros(3)).any()
        assert function(jnp.zeros((0, 2))) == 0


WHOLE = {
    "cautious count": oj.Cautious(oj.SGD(0.1, momentum=0.9)),
    "cautious mean": oj.Cautious(oj.SGD(0.1, momentum=0.9), form="mean"),
    "clipped": oj.ClipStep(oj.SGD(0.1), max_rms=0.2),
    "adafactor": oj.Adafactor(0.1, eps=1e-3, min_dim_size_to_factor=None),
}


@pytest.mark.parametrize("rule", WHOLE.values(), ids=WHOLE)
def test_whole_arrays_cross_devices(rule):
    """In a `shard_map` each device has a part, and sums are over them all."""
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    x = jnp.array([1.0, 2.0, -3.0, 0.5])
    grads = jnp.array([[1.0, 1.0, 0.1, 9.0], [-0.1, 1.0, -0.3, 1.0]])

    def trained(x, grads):
        return run(rule, [{"w": g} for g in grads], {"w": x})["w"]

    apart = jax.shard_map(
        trained,
        mesh=mesh,
        in_specs=(jax.P("d"), jax.P(None, "d")),
        out_specs=jax.P("d"),
    )
    expected = trained(x, grads)
    parts = [(x, jax.P("d")), (grads, jax.P(None, "d"))]
    x, grads = (jax.device_put(a, jax.NamedSharding(mesh, p)) for a, p in parts)
    np.testing.assert_allclose(jax.jit(apart)(x, grads), expected, rtol=2e-6)


def test_size_counts_an_empty_array_as_one():
    assert size(jnp.zeros((0, 3))) == 1 and size(jnp.zeros((2, 3))) == 6


def test_accumulate_sums_the_loss_in_float64_under_x64():
    with jax.enable_x64(True):
        x = {"w": jnp.ones(2, jnp.float64)}
        state = oj.setup(oj.Accumulate(oj.PolyakSGD(), every=2), x)
        assert state.inner.value.dtype == jnp.float64
        value = jnp.asarray(1 + 1e-12, jnp.float64)
        state, _ = oj.update(state, x, x, value=value)
        assert float(state.inner.value) == 1 + 1e-12


@pytest.mark.parametrize(
    "inner", [oj.Prodigy(), oj.DoG(), oj.Mechanic(oj.Adam(1.0))], ids=repr
)
def test_a_rule_that_finds_its_rate_is_refused(inner):
    """Its learning rate is a factor of 1: decay by that would take 10 % a step."""
    with pytest.raises(ValueError, match="finds its own, such as Prodigy"):
        oj.setup(oj.Decay(inner, 0.1), {"w": jnp.ones(2)})
    oj.setup(oj.Decay(inner, 0.1, "independent"), {"w": jnp.ones(2)})
