"""`ReduceOnPlateau`: the recordings of optax and torch, and what is no improvement."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, same_bits
from recordings import recorded_problem

import optimjax as oj
from optimjax.testing import check_rule
from optimjax.transforms.plateau import ReduceOnPlateau

REFERENCE = Path(__file__).parent / "reference"


def recorded(name):
    return json.loads((REFERENCE / f"{name}.json").read_text())["trajectories"]


OPTAX = recorded("plateau")
TORCH = [r for r in recorded("schedules") if r["schedule"] == "ReduceLROnPlateau"]
MODEL = {"w": jnp.array([0.4, -1.3]), "b": jnp.array([0.9])}
GRADS = {"w": jnp.array([0.7, -0.2]), "b": jnp.array([-1.1])}


def states(plateau, values):
    """What it keeps after each of the values."""
    state = plateau.init(MODEL)
    apply = jax.jit(plateau.apply)
    for value in values:
        state, steps = apply(state, MODEL, GRADS, value=value)
        right = float(state.scale) * np.asarray(GRADS["w"])
        np.testing.assert_allclose(steps["w"], right, rtol=1e-6)
        yield state


def scales(plateau, values):
    return [float(state.scale) for state in states(plateau, values)]


@pytest.mark.parametrize("record", OPTAX, ids=lambda r: r["label"])
def test_recorded_by_optax(record, x64):
    (first, second) = record["settings"]["$chain"]
    words = dict(second["kwargs"])
    if "accumulation_size" in words:
        words["accumulation"] = words.pop("accumulation_size")
    inner = {"sgd": oj.SGD, "adam": oj.Adam}[first["$optimizer"]]
    rule = oj.Chain(inner(**first["kwargs"]), ReduceOnPlateau(**words))
    params, grads, values = recorded_problem(record)
    state, found = oj.setup(rule, params), {name: [] for name in params}
    scale, model = [], params
    for g, value in zip(grads, values, strict=True):
        state, model = oj.update(state, model, g, value=value)
        scale.append(float(state.inner[1].scale))
        for name, path in found.items():
            path.append(model[name])
    np.testing.assert_allclose(scale, record["extra"]["scale"], rtol=1e-14)
    for name, path in record["params"].items():
        np.testing.assert_allclose(found[name], path, rtol=record["rtol"], atol=1e-12)


@pytest.mark.parametrize("record", TORCH, ids=lambda r: r["label"])
def test_recorded_by_torch(record, x64):
    """torch's patience is 1 less, and its rate changes with the step after."""
    words = record["settings"]
    absolute = words.get("threshold_mode") == "abs"
    threshold = words.get("threshold", 1e-4)
    plateau = ReduceOnPlateau(
        words.get("factor", 0.1),
        words["patience"] + 1,
        rtol=0.0 if absolute else threshold,
        atol=threshold if absolute else 0.0,
        cooldown=words.get("cooldown", 0),
        min_scale=words.get("min_lr", 0.0) / record["base_lr"],
    )
    found = record["base_lr"] * np.array([1.0, *scales(plateau, record["metrics"])])
    # torch does not take a reduction by less than its eps, 1e-8.
    np.testing.assert_allclose(found, record["values"], rtol=1e-12, atol=1.1e-8)


def test_keeps_the_promises_of_a_rule():
    plateau = ReduceOnPlateau(0.3, patience=2, cooldown=1, accumulation=2)
    check_rule(oj.Chain(oj.SGD(0.1, momentum=0.9), plateau))


def test_patience_and_cooldown():
    values = [1.0] * 9
    assert scales(ReduceOnPlateau(0.5, 3), values) == [1, 1, 1, *[0.5] * 3, *[0.25] * 3]
    found = scales(ReduceOnPlateau(0.5, 1, cooldown=2), values)
    assert found == [1, 0.5, 0.5, 0.5, *[0.25] * 3, 0.125, 0.125]
    found = scales(ReduceOnPlateau(0.5, 1, min_scale=0.2), values[:4])
    assert found == pytest.approx([1, 0.5, 0.25, 0.2])
    # A good value in between, during a cooldown too, is the best from then on.
    *_, last = states(ReduceOnPlateau(0.5, 1, cooldown=2), [1.0, 1.0, 0.5, 0.7, 0.6])
    assert (float(last.best), float(last.scale)) == (0.5, 0.25)


def test_what_is_an_improvement():
    relative = ReduceOnPlateau(0.5, 1, rtol=0.25, atol=0.0)
    assert scales(relative, [1.0, 0.74, 0.56]) == [1, 1, 0.5]
    absolute = ReduceOnPlateau(0.5, 1, rtol=0.0, atol=0.25)
    assert scales(absolute, [1.0, 0.74, 0.5]) == [1, 1, 0.5]
    # Below 0 the margin is on the same side: a loss that stays is no improvement.
    assert scales(relative, [-1.0, -1.1, -1.3]) == [1, 0.5, 0.5]
    assert scales(relative, [-1.0, -1.0]) == [1, 0.5]
    # With the largest margin the first value is one all the same.
    assert scales(ReduceOnPlateau(0.5, 1, rtol=1.0), [3.0, 2.0]) == [1, 0.5]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_no_improvement(bad):
    *_, last = states(ReduceOnPlateau(0.5, 2), [1.0, bad, 0.9, bad, bad, 0.8])
    assert (float(last.best), float(last.scale)) == (np.float32(0.8), 0.5)
    assert scales(ReduceOnPlateau(0.5, 2), [bad, bad, 1.0]) == [1, 0.5, 0.5]
    *_, last = states(ReduceOnPlateau(0.5, 9, accumulation=2), [1.0, bad, 3.0, 4.0])
    assert (float(last.best), int(last.bad), int(last.seen)) == (3.5, 0, 0)
    *_, last = states(ReduceOnPlateau(0.5, 2), [1.0, -math.inf, 0.5, 0.5])
    assert (float(last.best), float(last.scale)) == (-math.inf, 0.5)


def test_accumulation_takes_the_mean():
    values = [1.0, 3.0, 2.0, 0.0, 5.0, -1.0, 1.0]  # means 2, 1 and 2
    kept = list(states(ReduceOnPlateau(0.5, 1, accumulation=2), values))
    assert [float(s.scale) for s in kept] == [1, 1, 1, 1, 1, 0.5, 0.5]
    assert [int(s.seen) for s in kept] == [1, 0, 1, 0, 1, 0, 1]
    assert [float(s.best) for s in kept[1::2]] == [2, 1, 1]
    assert [int(s.count) for s in kept] == [1, 2, 3, 4, 5, 6, 7]


def test_without_a_gradient_nothing_changes():
    plateau = ReduceOnPlateau(0.5, 1)
    state = next(states(plateau, [1.0]))
    after, steps = plateau.apply(state, MODEL, dict.fromkeys(MODEL), value=9.0)
    assert after is state
    assert steps == dict.fromkeys(MODEL)
    half = {"w": GRADS["w"], "b": None}
    after, steps = plateau.apply(state, MODEL, half, value=9.0)
    assert (float(after.scale), steps["b"]) == (0.5, None)


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
def test_the_type_of_the_value_does_not_matter(wide):
    with jax.enable_x64(wide):
        model = {"w": jnp.ones(2, jnp.bfloat16), "z": jnp.ones(2, jnp.complex64)}
        grads = {"w": jnp.ones(2, jnp.bfloat16), "z": jnp.full(2, 1j, jnp.complex64)}
        plateau = ReduceOnPlateau(0.5, 1)
        first = plateau.init(model)
        for value in (
            2,
            2.0,
            np.float32(2),
            np.array(2.0),
            jnp.asarray(2.0, "bfloat16"),
        ):
            state, _ = plateau.apply(first, model, grads, value=value)
            state, steps = plateau.apply(state, model, grads, value=value)
            assert float(state.scale) == 0.5
            same_bits(
                jax.tree.map(jnp.zeros_like, state), jax.tree.map(jnp.zeros_like, first)
            )
            assert steps["w"].dtype == jnp.bfloat16
            assert steps["z"].tolist() == [0.5j, 0.5j]


def test_another_number_compiles_nothing():
    rule = oj.Chain(oj.SGD(0.1), ReduceOnPlateau(0.5, 2))
    state, step = oj.setup(rule, MODEL), jax.jit(counter := Counter(oj.update))
    changes = [
        {},
        {"patience": 1},
        {"factor": 0.25, "cooldown": 3},
        {"accumulation": 2},
    ]
    found = []
    for change in changes:
        state = oj.adjust(state, **change) if change else state
        state, _ = step(state, MODEL, GRADS, value=1.0)
        found.append(float(state.inner[1].scale))
    assert counter.traces == 1
    assert found == [1, 0.5, 0.125, 0.125]
    assert (int(state.inner[1].seen), int(state.inner[1].cooldown)) == (1, 3)


def test_a_schedule_as_factor():
    plateau = ReduceOnPlateau(lambda count: 0.5 / (1 + count), 1)
    assert scales(plateau, [1.0] * 3) == pytest.approx([1, 0.25, 0.25 / 6])


def test_make_step_gives_the_loss():
    def loss(model):
        return jnp.sum(model["w"] ** 2) + 3.0

    step = oj.make_step(loss)
    rule = oj.Chain(oj.SGD(0.0), ReduceOnPlateau(0.5, 2))
    model = {"w": jnp.array([0.4, -1.3])}
    state = oj.setup(rule, model)
    for _ in range(3):
        state, model, _ = step(state, model)
    assert float(state.inner[1].scale) == 0.5
    assert float(state.inner[1].best) == pytest.approx(float(loss(model)))


def test_before_a_rule_with_a_compiled_loop():
    rule = oj.Chain(ReduceOnPlateau(0.5, 1), oj.SGD(0.1, momentum=0.9))
    assert rule.rules[1].fuses() or pytest.skip("no compiled loops here")
    oj.update(oj.setup(rule, MODEL), MODEL, GRADS, value=1.0)


MISTAKES = [
    (lambda: ReduceOnPlateau(1.0), "factor is 1, expected in [0, 1)"),
    (lambda: ReduceOnPlateau(patience=0), "patience is 0, expected >= 1"),
    (lambda: ReduceOnPlateau(rtol=1.5), "rtol is 1.5, expected in [0, 1]"),
    (lambda: ReduceOnPlateau(atol=-1), "atol is -1, expected >= 0"),
    (lambda: ReduceOnPlateau(accumulation=0), "accumulation is 0, expected >= 1"),
    (lambda: next(states(ReduceOnPlateau(), [jnp.ones(1)])), "value has shape (1,)"),
]


@pytest.mark.parametrize("case", range(len(MISTAKES)))
def test_mistakes(case):
    make, text = MISTAKES[case]
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


def test_without_a_value():
    state = oj.setup(ReduceOnPlateau(), MODEL)
    with pytest.raises(TypeError, match="ReduceOnPlateau needs value, not given"):
        oj.update(state, MODEL, GRADS)
