"""A model that changes keeps the state of what stayed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close, same_bits

import optimjax as oj


def model_of(rng, **shapes):
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def trained(rule, model, steps=3, **kwargs):
    state = oj.setup(rule, model, **kwargs)
    for i in range(steps):
        grads = jax.tree.map(lambda x, i=i: jnp.sin(x + i), model)
        state, model = oj.update(state, model, grads)
    return state, model


RULES = [
    oj.Adam(0.1),
    oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD(0.1, momentum=0.9)),
    oj.EMA(oj.Accumulate(oj.AdamW(0.1), every=2), decay=0.9),
    oj.MixedPrecision(oj.Adam(0.1)),
    oj.Adafactor(0.1, min_dim_size_to_factor=2),
    oj.SM3(0.1),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_same_model_keeps_all(rule, rng):
    state, model = trained(rule, model_of(rng, a=(3, 2), b=(4,)))
    again, report = oj.transfer(state, model)
    same_bits(again, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert report.kept == ("a", "b") and not report.new + report.dropped


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_what_stays_goes_on_and_what_is_new_begins(rule, rng):
    """CASES 44: a's moments exactly, b fresh with its own count, c gone."""
    state, model = trained(rule, model_of(rng, a=(3, 2), c=(4,)))
    grown = {"a": model["a"], "b": jnp.ones(2)}
    state, report = oj.transfer(state, grown)
    assert (report.kept, report.new, report.dropped) == (("a",), ("b",), ("c",))
    fresh = oj.setup(rule, {"b": grown["b"]})
    # From now on each goes where it would go alone.
    alone = oj.transfer(state, {"a": model["a"]})[0]
    both, a, b = grown, {"a": grown["a"]}, {"b": grown["b"]}
    if "Clip" in repr(rule):
        return  # its norm is over both
    for _ in range(4):
        state, both = oj.update(state, both, both)
        alone, a = oj.update(alone, a, a)
        fresh, b = oj.update(fresh, b, b)
    close(both["a"], a["a"], rtol=1e-6)
    if "Accumulate" not in repr(rule):  # of which the old one was in the middle
        close(both["b"], b["b"], rtol=1e-6)


def test_renamed_leaves_and_branches(rng):
    old = {"enc": model_of(rng, w=(2, 3), b=(3,)), "head": jnp.ones(2)}
    state, old = trained(oj.Adam(0.1), old)
    state = oj.freeze(state, "head")
    new = {"body": {"enc": old["enc"]}, "out": old["head"]}
    after, report = oj.transfer(state, new, renamed={"body/enc": "enc", "out": "head"})
    assert set(report.kept) == {"body/enc/w", "body/enc/b", "out"}
    same_bits(after.slots["body/enc/w"], state.slots["enc/w"])
    assert after.frozen == ("out",)
    for wrong, match in (({"x": "enc"}, "'x'.*no such slot"), ({"out": "y"}, "'y'")):
        with pytest.raises(ValueError, match=match):
            oj.transfer(state, new, renamed=wrong)


def test_slots_named_like_fields_labels_and_each_other(rng):
    """Names that swap, and names that stand in the state for something else."""
    names = ("m", "v", "count", "own", "slots", "x")
    old = {name: jnp.full(2, i + 1.0) for i, name in enumerate(names)}
    rule = oj.Partition({"x": oj.Adam(0.1), "m": oj.Adam(0.2)}, {"x": "m", "*": "x"})
    state, old = trained(rule, old)
    swapped = {"m": "v", "v": "m", "count": "own", "own": "count"}
    new = {name: old[swapped.get(name, name)] for name in names}
    after, report = oj.transfer(state, new, renamed=swapped)
    assert set(report.kept) == set(names)
    for name in names:
        same_bits(after.slots[name], state.slots[swapped.get(name, name)])
    same_bits(oj.transfer(after, old, renamed=swapped)[0], state)


def test_a_vocabulary_grows(rng):
    state, old = trained(oj.Adam(0.1), model_of(rng, embed=(5, 3), b=(2,)))
    grown = jnp.concatenate([old["embed"], jnp.zeros((2, 3))])
    after, report = oj.transfer(state, {**old, "embed": grown})
    assert report.resized == ("embed",)
    for new, was in zip(after.slots["embed"], state.slots["embed"], strict=True):
        same_bits(new[:5], was)
        same_bits(new[5:], jnp.zeros((2, 3)))


def test_ties_are_found_anew(rng):
    state, old = trained(oj.Adam(0.1), model_of(rng, a=(2, 2), b=(2,)))
    tied = {**old, "c": old["a"]}
    after, report = oj.transfer(state, tied)
    assert str(after.ties) == "c is a" and report.kept == ("a", "b")
    untied, report = oj.transfer(after, {**tied, "c": jnp.copy(old["a"])})
    assert report.new == ("c",) and str(untied.ties) == "no ties"


def test_another_rule_keeps_what_its_kin_kept(rng):
    """CASES 44: a clip before Adam, AdamW in place of Adam."""
    state, model = trained(oj.Adam(0.1), model_of(rng, a=(3, 2), b=(4,)))
    rule = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.AdamW(0.2, weight_decay=0.1))
    after, _ = oj.transfer(state, model, rule=rule)
    same_bits(after.slots["a"], state.slots["a"])
    np.testing.assert_allclose(oj.hyperparams(after)["a"]["learning_rate"], 0.2)
    back, _ = oj.transfer(after, model, rule=oj.Adam(0.1))
    same_bits(back.inner, state.inner)


def test_numbers_stay_as_they_were_adjusted(rng):
    state, model = trained(oj.Adam({"a": 0.1, "*": 0.2}), model_of(rng, a=(2,), b=(2,)))
    state = oj.adjust(state, where="a", learning_rate=0.5)
    after, _ = oj.transfer(state, {"x": model["a"]}, renamed={"x": "a"})
    np.testing.assert_allclose(oj.hyperparams(after)["x"]["learning_rate"], 0.5)
    with pytest.raises(ValueError, match="'c': new, and the learning_rate of Adam"):
        oj.transfer(state, {**model, "c": jnp.ones(1)})
    after, _ = oj.transfer(
        state, {**model, "c": jnp.ones(1)}, rule=oj.Adam({"c": 0.3, "*": 0.1})
    )
    np.testing.assert_allclose(oj.hyperparams(after)["c"]["learning_rate"], 0.3)


def test_the_state_can_be_donated_and_scanned_afterwards(rng):
    state, old = trained(oj.Adam(0.1), model_of(rng, a=(3, 2)))
    new = {"a": old["a"], "b": jnp.ones(3)}
    state, _ = oj.transfer(state, new)
    step = oj.make_step(lambda m: sum(jnp.sum(x**2) for x in m.values()), donate=True)
    state, new, values = step.scan(state, new, length=5)
    assert values[-1] < values[0]
