"""What cannot stand around, before or after what; and what can be told apart inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close

import optimjax as oj

MODEL = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}


@pytest.mark.parametrize(
    "after",
    [oj.Scale(0.5), oj.WeightDecay(0.1), oj.NonNegative(), oj.ReduceOnPlateau()],
    ids=repr,
)
@pytest.mark.parametrize(
    "around", [lambda r: r, oj.SkipNonFinite, oj.Accumulate, oj.EMA]
)
def test_nothing_changes_a_step_of_mixed_precision(around, after):
    """Its copy would not know of it, and the next step would undo it."""
    inside = oj.SGD(0.1)
    with pytest.raises(ValueError, match=r"which says where|Put it after"):
        oj.Chain(around(oj.MixedPrecision(inside)), after)
    oj.MixedPrecision(oj.Chain(inside, after))


@pytest.mark.parametrize("wrapper", [oj.Lookahead, oj.ScheduleFree])
def test_nor_does_a_wrapper(wrapper):
    with pytest.raises(ValueError, match="Put MixedPrecision around it"):
        wrapper(oj.SkipNonFinite(oj.MixedPrecision(oj.SGD(0.1))))
    for watching in (oj.EMA, oj.SWA, oj.Monitor):
        watching(oj.MixedPrecision(wrapper(oj.SGD(0.1))))


def test_loss_scaling_goes_around_all_else():
    scaled = oj.LossScaling(oj.SGD(0.1))
    with pytest.raises(ValueError, match="would see gradients that are still scaled"):
        oj.Chain(oj.ClipByGlobalNorm(1.0), scaled)
    for wrapper in (
        oj.SkipNonFinite,
        oj.Monitor,
        lambda rule: oj.ApplyIf(rule, lambda grads, count: True),
    ):
        with pytest.raises(ValueError, match="Put LossScaling around it"):
            wrapper(oj.EMA(scaled))
        oj.LossScaling(wrapper(oj.SGD(0.1)))
    with pytest.raises(ValueError, match="Masked: LossScaling in one group"):
        oj.Masked(scaled, "a", outside=oj.SGD(0.1))
    oj.Masked(scaled, "a")  # all else is frozen


def test_whole_numbers():
    for make, name in (
        (lambda n: oj.SWA(oj.SGD(), start=n), "SWA: start"),
        (lambda n: oj.Lookahead(oj.SGD(), period=n), "Lookahead: period"),
        (lambda n: oj.Accumulate(oj.SGD(), every=n), "Accumulate: every"),
        (lambda n: oj.SkipNonFinite(oj.SGD(), n), "SkipNonFinite: give_up_after"),
        (lambda n: oj.ReduceOnPlateau(patience=n), "ReduceOnPlateau: patience"),
    ):
        with pytest.raises(ValueError, match=f"{name} is 2.5, expected a whole number"):
            make(2.5)
        make(3.0)


def test_one_of_two_hyperparameters_of_one_name():
    state = oj.setup(oj.EMA(oj.Monitor(oj.RMSProp(1e-3))), MODEL)
    state = oj.adjust(state, **{"EMA.decay": 0.5, "RMSProp.decay": 0.25})
    found = oj.hyperparams(state)["a"]
    assert (found["EMA.decay"], found["RMSProp.decay"]) == (0.5, 0.25)
    np.testing.assert_allclose(found["Monitor.decay"], 0.9, rtol=1e-6)
    with pytest.raises(TypeError, match=r"no rule there has 'Adam.decay'"):
        oj.adjust(state, **{"Adam.decay": 0.5})
    with pytest.raises(TypeError, match=r"RMSProp\.decay"):  # says how to write it
        oj.adjust(state, rate=0.5)


def test_what_an_average_is_worked_out_from_cannot_be_adjusted():
    state = oj.setup(oj.ScheduleFree(oj.AdamW(0.1)), MODEL)
    state, model = oj.update(state, MODEL, MODEL)
    before = oj.eval_model(state, model)
    state = oj.adjust(state, b1=0.5)  # AdamW's
    close(oj.eval_model(state, model), before)
    assert oj.hyperparams(state)["a"]["AdamW.b1"] == 0.5
    with pytest.raises(TypeError, match=r"'ScheduleFree\.b1' cannot change"):
        oj.adjust(state, **{"ScheduleFree.b1": 0.5})
    with pytest.raises(TypeError, match="'scale' cannot change"):
        oj.adjust(oj.setup(oj.LossScaling(oj.SGD()), MODEL), scale=2.0)
    with pytest.raises(ValueError, match="expected a single one"):
        oj.adjust(state, "a", learning_rate=0.5)


def test_skips_are_counted_wherever_they_are():
    rule = oj.EMA(oj.Accumulate(oj.SkipNonFinite(oj.SGD(0.1)), every=1))
    state = oj.setup(rule, MODEL)
    bad = {"a": jnp.array([1.0, jnp.inf]), "b": jnp.array([1.0])}
    for _ in range(2):
        state, _ = oj.update(state, MODEL, bad)
    assert oj.skipped(state) == 2
    with pytest.raises(ValueError, match="no SkipNonFinite in SGD"):
        oj.skipped(oj.setup(oj.SGD(), MODEL))


def test_norms_come_back_after_an_infinite_gradient():
    for decay in (0.0, 0.5):
        rule = oj.Monitor(oj.SkipNonFinite(oj.SGD(0.1)), decay=decay)
        state, model = oj.setup(rule, MODEL), MODEL
        for scale in (1.0, jnp.inf, 2.0):
            grads = jax.tree.map(lambda x, s=scale: s * jnp.ones_like(x), model)
            state, model = oj.update(state, model, grads)
        np.testing.assert_allclose(oj.norms(state)["b"].gradient, 2.0)


def test_labels_of_several_types():
    with pytest.raises(TypeError, match="Partition: the labels"):
        oj.Partition({0: oj.SGD(), "x": oj.SGD()}, {"a": 0, "*": "x"})


def test_a_gradient_for_integers():
    model = {"n": jnp.array([1, 2]), "w": jnp.ones(2)}
    state = oj.setup(oj.SGD(), model)
    with pytest.raises(TypeError, match="'n': a gradient for a leaf of type int32"):
        oj.update(state, model, {"n": jnp.ones(2), "w": jnp.ones(2)})
    oj.update(state, model, {"n": jnp.array([0, 0]), "w": jnp.ones(2)})


def test_a_loss_is_a_function():
    with pytest.raises(TypeError, match="loss is a Adam, expected a function"):
        oj.make_step(oj.Adam())


def test_one_radius():
    with pytest.raises(TypeError, match="expected one radius"):
        oj.make_step(lambda model: 0.0, sam={"*": 0.05})


def moments(state):
    nodes = jax.tree.leaves(state.inner, is_leaf=lambda node: hasattr(node, "m"))
    return [node for node in nodes if hasattr(node, "m")]


def test_a_rule_of_another_class_starts_afresh_inside_the_same_rules():
    """It has no use for what one with fields of the same names kept."""
    momentum = oj.SGD(0.1, momentum=0.9)
    for around in (
        lambda r: oj.Chain(oj.ClipByGlobalNorm(9.0), r),
        lambda r: oj.Accumulate(r, every=1),
        lambda r: oj.EMA(r),
    ):
        state = oj.setup(around(momentum), MODEL)
        state, model = oj.update(state, MODEL, jax.tree.map(jnp.negative, MODEL))
        rule = around(oj.Adam(0.1))
        moved, _ = oj.transfer(state, model, rule=rule)
        new, _ = oj.update(moved, model, MODEL)
        fresh, _ = oj.update(oj.setup(rule, model), model, MODEL)
        close(moments(new), moments(fresh))


def test_slots_named_like_fields_in_a_transfer():
    model = {"count": jnp.ones(2), "w": jnp.ones(1)}
    state = oj.setup(oj.EMA(oj.Adam(0.1)), model)
    state, model = oj.update(state, model, model)
    moved, _ = oj.transfer(state, model)
    assert jax.tree.structure(moved) == jax.tree.structure(state)
    close(moved, state)


def test_a_debiased_average_whose_decay_changes():
    """The average of what stays the same is the same."""
    still = oj.SGD(0.0)
    adjusted = oj.setup(oj.EMA(still, decay=0.9, debias=True), MODEL)
    close(oj.eval_model(adjusted, MODEL), MODEL)  # nothing seen yet
    adjusted, _ = oj.update(adjusted, MODEL, MODEL)
    adjusted = oj.adjust(adjusted, decay=0.99)
    rule = oj.EMA(
        still, decay=lambda count: jnp.where(count < 1, 0.0, 0.9), debias=True
    )
    scheduled, _ = oj.update(oj.setup(rule, MODEL), MODEL, MODEL)
    for state in (adjusted, scheduled):
        state, _ = oj.update(state, MODEL, MODEL)
        close(oj.eval_model(state, MODEL), MODEL, rtol=1e-6)


def test_a_copy_outlives_what_the_parameter_cannot_hold():
    """An overflow of float16, and a value put into the model by hand."""
    model = {"w": jnp.array([60000.0], jnp.float16)}
    state = oj.setup(oj.MixedPrecision(oj.SGD(1.0)), model)
    for g, expected in ((-10000.0, np.inf), (20000.0, 50000.0), (10000.0, 40000.0)):
        state, model = oj.update(state, model, {"w": jnp.array([g])})
        assert model["w"] == np.float16(expected)
    state = oj.setup(oj.MixedPrecision(oj.SGD(0.1)), {"w": jnp.ones(1, jnp.bfloat16)})
    for value in (1e6, 1e9, np.nan):
        model = {"w": jnp.array([value], jnp.bfloat16)}
        _, model = oj.update(state, model, {"w": jnp.ones(1)})
        assert model["w"] == jnp.bfloat16(0.9)


def test_copies_of_float32_can_be_donated():
    state = oj.setup(oj.MixedPrecision(oj.SGD(0.1)), MODEL)
    state, model = oj.update(state, MODEL, MODEL)
    step = oj.make_step(lambda m: jnp.sum(m["a"]) + jnp.sum(m["b"]), donate=True)
    for _ in range(3):
        state, model, _ = step(state, model)
    assert model["b"] < 3.0


def test_what_frozen_owns_is_not_thawed():
    """It would weigh in the global norm."""
    rule = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.Masked(oj.SGD(0.1), "a"))
    state = oj.thaw(oj.freeze(oj.setup(rule, MODEL), "a"))
    assert state.frozen == ("b",)
    grads = {"a": jnp.array([0.6, 0.8]), "b": jnp.array([100.0])}
    _, model = oj.update(state, MODEL, grads)
    np.testing.assert_allclose(model["a"], [0.94, 1.92], rtol=1e-6)


def test_a_schedule_of_updates_that_are_no_whole_numbers():
    model = {"w": jnp.array([1.0])}
    state = oj.setup(oj.SWA(oj.SGD(0.1), start=lambda count: 2.5), model)
    for _ in range(5):
        state, model = oj.update(state, model, {"w": jnp.array([1.0])})
    np.testing.assert_allclose(oj.eval_model(state, model)["w"], 0.6, rtol=1e-6)


@pytest.mark.parametrize(
    "average", [oj.EMA, oj.SWA, oj.Lookahead, oj.ScheduleFree], ids=lambda c: c.__name__
)
def test_a_projection_is_no_afterthought_of_an_average(average):
    """The average would be of points that were never visited."""
    with pytest.raises(ValueError, match=r"Put it after|Put ScheduleFree around it"):
        oj.Chain(average(oj.SGD(0.1)), oj.NonNegative())
    oj.Chain(oj.SGD(0.1), oj.NonNegative(), oj.EMA(oj.Identity()))


def test_nothing_moves_what_schedule_free_says():
    with pytest.raises(ValueError, match="Put ScheduleFree around it"):
        oj.Lookahead(oj.ScheduleFree(oj.SGD(0.1)))
    with pytest.raises(ValueError, match="ScheduleFree: b1 is 0, expected more"):
        oj.ScheduleFree(oj.SGD(0.1), b1=0.0)
    with pytest.raises(ValueError, match="backoff is 0, expected more"):
        oj.LossScaling(oj.SGD(0.1), backoff=0.0)


def test_a_running_mean_whose_decay_changes():
    state = oj.setup(oj.Chain(oj.Smooth(0.9), oj.SGD(1.0)), MODEL)
    ones = jax.tree.map(jnp.ones_like, MODEL)
    state, model = oj.update(state, MODEL, ones)
    _, model = oj.update(oj.adjust(state, decay=0.99), model, ones)
    np.testing.assert_allclose(model["b"], [1.0], rtol=1e-6)
    with pytest.raises(TypeError, match="'every' cannot change"):
        oj.adjust(oj.setup(oj.SWA(oj.SGD()), MODEL), every=2)


def test_the_longest_new_name_counts():
    old = {"b": {"x": jnp.ones(2), "y": jnp.ones(2)}, "c": jnp.ones(2)}
    state, old = oj.update(oj.setup(oj.SGD(0.1, momentum=0.9), old), old, old)
    new = {"a": {"x": jnp.ones(2), "y": jnp.ones(2)}}
    for names in ({"a": "b", "a/x": "c"}, {"a/x": "c", "a": "b"}):
        _, report = oj.transfer(state, new, renamed=names)
        assert report.kept == ("a/x", "a/y") and report.dropped == ("b/x",)
