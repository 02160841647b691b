"""Rules around rules go where their equations say, step by step.

Three sources again: the NumPy functions of `oracles/wrappers.py`, trajectories that
optax recorded, and other rules that have to come to the same.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close, same_bits
from oracles import wrappers as oracle
from oracles.descent import sgd
from recordings import recorded_problem
from test_trajectories import RTOL, assert_same_way, problem

import optimjax as oj

RATE: dict[str, Any] = {"learning_rate": 0.05, "momentum": 0.85}
INNER = oj.SGD(**RATE)

update = jax.jit(oj.update)


@pytest.fixture(params=[64, 32])
def bits(request):
    with jax.enable_x64(request.param == 64):
        yield request.param


def way(rule, params, grads):
    """After each step: the model, the model to evaluate, and the state."""
    model = jax.tree.map(jnp.asarray, params)
    state, ways = oj.setup(rule, model), ([], [], [])
    for g in grads:
        g = {path: jnp.asarray(g[path]) if path in g else None for path in model}
        state, model = update(state, model, g)
        average = oj.eval_model(state, model)
        for visited, tree in zip(ways, (model, average, state), strict=True):
            visited.append(tree)
    return ways


def follows(got, expected, start, bits):
    eps = np.finfo(f"f{bits // 8}").eps
    assert_same_way(numbers(got), expected, start, RTOL[bits], eps)


def numbers(trees):
    return [jax.tree.map(np.asarray, tree) for tree in trees]


def micro_batches(bits):
    """36 gradients, which make 12 steps of 3."""
    params, *_ = problem("real", bits)
    return params, [g for seed in (1, 2, 3) for g in problem("real", bits, seed)[1]]


# --- The oracles ----------------------------------------------------------------------


def test_accumulate(bits):
    params, micro = micro_batches(bits)
    models, *_ = way(oj.Accumulate(INNER, every=3), params, micro)
    expected = oracle.accumulate_sgd_momentum(params, micro, 3, **RATE)
    follows(models, expected, params, bits)


def test_accumulate_waits_for_slots_without_a_gradient(bits):
    """Some micro-batches miss `b`: among them now and then the one before a step."""
    params, micro = micro_batches(bits)
    micro = [g if k % 4 else {"w": g["w"]} for k, g in enumerate(micro)]
    models, *_ = way(oj.Accumulate(INNER, every=3), params, micro)
    expected = oracle.accumulate_sgd_momentum(params, micro, 3, **RATE)
    follows(models, expected, params, bits)


def test_apply_if(bits):
    params, grads, _ = problem("real", bits)
    rule = oj.ApplyIf(INNER, lambda grads, count: count % 3 != 1)
    models, *_ = way(rule, params, grads)
    taken = [k % 3 != 1 for k in range(len(grads))]
    follows(models, oracle.sgd_if(params, grads, taken, **RATE), params, bits)


def test_skip_non_finite(bits):
    """One bad number, in either array, of either kind, leaves all as it was."""
    params, grads, _ = problem("real", bits)
    for k, path, bad in ((0, "w", np.nan), (4, "b", np.inf), (5, "w", -np.inf)):
        grads[k] = {**grads[k], path: grads[k][path].copy()}
        grads[k][path].flat[1] = bad
    models, _, states = way(oj.SkipNonFinite(INNER), params, grads)
    taken = [k not in (0, 4, 5) for k in range(len(grads))]
    follows(models, oracle.sgd_if(params, grads, taken, **RATE), params, bits)
    assert [int(s.inner.skipped) for s in states] == list(np.cumsum(np.invert(taken)))
    assert [int(s.inner.in_a_row) for s in states[:7]] == [1, 0, 0, 0, 1, 2, 0]


def test_loss_scaling(bits):
    """Gradients times the scale, which grows after 3 good steps and falls at once."""
    params, grads, _ = problem("real", bits)
    scales = [6.0] * 3 + [9.0, 9.0, 1.8, 1.8, 1.8, 2.7, 2.7, 2.7, 4.05]
    scaled = [
        {path: (scale * x).astype(x.dtype) for path, x in g.items()}
        for g, scale in zip(grads, scales, strict=True)
    ]
    scaled[4]["b"][2] = np.inf
    rule = oj.LossScaling(INNER, scale=6.0, growth=1.5, backoff=0.2, period=3)
    models, _, states = way(rule, params, scaled)
    taken = [k != 4 for k in range(len(grads))]
    follows(models, oracle.sgd_if(params, grads, taken, **RATE), params, bits)
    read = [oj.loss_scale(state) for state in states]
    np.testing.assert_allclose(read[:-1], scales[1:], rtol=1e-6)


@pytest.mark.parametrize("debias", [False, True])
def test_ema(bits, debias):
    params, grads, _ = problem("real", bits)
    models, averages, _ = way(oj.EMA(INNER, decay=0.7, debias=debias), params, grads)
    path = sgd(params, grads, **RATE)
    follows(models, path, params, bits)
    follows(averages, oracle.ema(path, params, 0.7, debias), params, bits)


@pytest.mark.parametrize(("start", "every"), [(1, 1), (3, 1), (4, 3)])
def test_swa(bits, start, every):
    params, grads, _ = problem("real", bits)
    rule = oj.SWA(INNER, start=start, every=every)
    models, averages, _ = way(rule, params, grads)
    path = sgd(params, grads, **RATE)
    follows(models, path, params, bits)
    follows(averages, oracle.swa(path, start, every), params, bits)


def test_lookahead(bits):
    params, grads, _ = problem("real", bits)
    rule = oj.Lookahead(INNER, period=3, slow_step=0.3)
    models, averages, _ = way(rule, params, grads)
    fast, slow = oracle.lookahead_sgd(params, grads, 3, 0.3, **RATE)
    follows(models, fast, params, bits)
    follows(averages, slow, params, bits)


def warm(count):
    """A learning rate that is 0 at first, rises and falls again."""
    return 0.02 * count * (1 - 0.06 * count)


@pytest.mark.parametrize("rate", [0.07, warm], ids=["constant", "warm-up"])
@pytest.mark.parametrize(("b1", "power"), [(0.9, 2.0), (0.7, 1.5), (1.0, 0.0)])
def test_schedule_free(bits, rate, b1, power):
    params, grads, _ = problem("real", bits)
    rule = oj.ScheduleFree(oj.SGD(rate), b1=b1, power=power)
    models, averages, states = way(rule, params, grads)
    rates = [rate(k) if callable(rate) else rate for k in range(len(grads))]

    def base_step(y, g, k):
        return {path: rates[k] * g[path] for path in g}

    y, x, z = oracle.schedule_free(params, grads, base_step, rates, b1, power)
    follows(models, y, params, bits)
    follows(averages, x, params, bits)
    kept = [{p: s.z for p, s in state.inner.own.slots.items()} for state in states]
    follows(kept, z, params, bits)


def test_schedule_free_takes_its_steps_at_y(bits):
    params, grads, _ = problem("real", bits)
    rule = oj.ScheduleFree(oj.SGD(0.07, weight_decay=0.6), b1=0.8)

    def base_step(y, g, k):
        return {path: 0.07 * (g[path] + 0.6 * y[path]) for path in g}

    rates = [0.07] * len(grads)
    y, x, _ = oracle.schedule_free(params, grads, base_step, rates, 0.8, 2.0)
    models, averages, _ = way(rule, params, grads)
    follows(models, y, params, bits)
    follows(averages, x, params, bits)


def test_monitor(bits):
    params, grads, _ = problem("real", bits)
    models, _, states = way(oj.Monitor(INNER, decay=0.7), params, grads)
    path = sgd(params, grads, **RATE)
    follows(models, path, params, bits)
    expected = oracle.monitored(params, grads, path, 0.7)
    for state, right in zip(states, expected, strict=True):
        got = {p: np.stack(list(norms)) for p, norms in oj.norms(state).items()}
        close(got, right, rtol=RTOL[bits], atol=0)


def coupled(model):
    """Not quadratic, and each array matters to the gradient of the other."""
    w, b = model["w"], model["b"]
    return jnp.sum(w**4) / 4 + jnp.sum(b**2) / 2 + 0.1 * jnp.sum(w) * jnp.sum(b)


def coupled_gradient(model):
    w, b = model["w"], model["b"]
    return {"w": w**3 + 0.1 * np.sum(b), "b": b + 0.1 * np.sum(w)}


@pytest.mark.parametrize("radius", [0.3, warm], ids=["constant", "schedule"])
def test_sam(bits, radius):
    params, grads, _ = problem("real", bits)
    step = oj.make_step(coupled, sam=radius)
    model = jax.tree.map(jnp.asarray, params)
    state, models = oj.setup(INNER, model), []
    for _ in grads:
        before = coupled(model)
        state, model, value = step(state, model)
        models.append(model)
        np.testing.assert_allclose(value, before, rtol=RTOL[bits])
    rhos = [radius(k) if callable(radius) else radius for k in range(len(grads))]
    expected = oracle.sam_sgd(params, coupled_gradient, rhos, **RATE)
    follows(models, expected, params, bits)


# --- Recorded from optax --------------------------------------------------------------

RECORDED = json.loads(
    (Path(__file__).parent / "reference" / "schedule_free.json").read_text()
)


def rising(settings, default):
    """optax's warm-up as its base reads it, from count 0, and as its weight does."""
    rate, steps = settings.get("learning_rate", default), settings.get("warmup_steps")
    if steps is None:
        return rate, rate
    return tuple(
        lambda count, first=first: rate * jnp.minimum((count + first) / steps, 1.0)
        for first in (0, 1)
    )


def recorded_rule(record):
    settings = record["settings"]
    decay = settings.get("weight_decay") or 0.0
    if record["optimizer"] == "contrib.schedule_free":
        base = oj.Adam(settings["base_optimizer"]["kwargs"]["learning_rate"], b1=0.0)
        weigh = settings["learning_rate"]
    elif record["optimizer"] == "contrib.schedule_free_sgd":
        rate, weigh = rising(settings, 1.0)
        base = oj.SGD(rate, weight_decay=decay)
    else:
        rate, weigh = rising(settings, 0.0025)
        b2 = settings.get("b2", 0.999)
        second = {"decay": b2, "eps": 1e-8, "eps_root": 0.0, "bias_correction": True}
        # The decay of AdamW is added to the direction, before the learning rate.
        base = oj.Chain(oj.RMSProp(1.0, **second), oj.WeightDecay(decay), oj.SGD(rate))
    b1, power = settings.get("b1", 0.9), settings.get("weight_lr_power", 2.0)
    return oj.ScheduleFree(base, b1=b1, power=power, learning_rate=weigh)


@pytest.mark.parametrize("record", RECORDED["trajectories"], ids=lambda r: r["id"])
def test_schedule_free_goes_as_optax_recorded(x64, record):
    params, grads, _ = recorded_problem(record)
    models, averages, states = way(recorded_rule(record), params, grads)
    kept = [{p: s.z for p, s in state.inner.own.slots.items()} for state in states]
    for name, ours in (("params", models), ("x", averages), ("z", kept)):
        for path, x0 in params.items():
            right = np.array(record[name][path])
            got = np.stack([ours[step - 1][path] for step in RECORDED["steps"]])
            moved, size = (np.max(np.abs(a), axis=0) for a in (right - x0, right))
            allowed = record["rtol"] * moved + 1e-14 * (1 + size)
            error = np.max(np.abs(got - right) / allowed)
            assert error <= 1, f"{name} of {path}: {error:.3g} times too far away"


# --- The same by another way ----------------------------------------------------------


def regression(bits, rows=12):
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(rows, 3)), rng.normal(size=(rows, 4))
    return jnp.asarray(x, f"f{bits // 8}"), jnp.asarray(y, f"f{bits // 8}")


def squares(model, x, y):
    return jnp.mean((jnp.tanh(x @ model["w"]) + model["b"][None] - y) ** 2)


@pytest.mark.parametrize("n", [1, 3])
def test_accumulated_micro_batches_are_one_big_batch(bits, n):
    """With clipping that cuts the mean, and moments, and decay."""
    x, y = regression(bits)
    params = jax.tree.map(jnp.asarray, problem("real", bits)[0])
    inner = oj.Chain(oj.ClipByGlobalNorm(0.3), oj.AdamW(0.1, weight_decay=0.07))
    small, big = oj.make_step(squares), oj.make_step(squares)
    state, model = oj.setup(oj.Accumulate(inner, every=n), params), params
    big_state, big_model = oj.setup(inner, params), params
    for _ in range(10):
        means = []
        for part in zip(jnp.split(x, n), jnp.split(y, n), strict=True):
            state, model, value = small(state, model, *part)
            means.append(value)
        big_state, big_model, value = big(big_state, big_model, x, y)
        np.testing.assert_allclose(np.mean(means), value, rtol=RTOL[bits])
        close(model, big_model, rtol=RTOL[bits], atol=RTOL[bits])


def test_accumulate_gives_the_rule_the_mean_of_the_losses(bits):
    """A rule that needs the loss gets that of the big batch."""
    params, grads, values = problem("real", bits)
    inner = oj.PolyakSGD(max_learning_rate=3.0)
    model = big = jax.tree.map(jnp.asarray, params)
    state = oj.setup(oj.Accumulate(inner, every=2), model)
    big_state = oj.setup(inner, big)
    for k in range(0, len(grads), 2):
        for i in (k, k + 1):
            value = jnp.asarray(values[i])
            state, model = update(state, model, grads[i], value=value)
        mean = jax.tree.map(lambda a, b: (a + b) / 2, grads[k], grads[k + 1])
        value = jnp.asarray((values[k] + values[k + 1]) / 2)
        big_state, big = update(big_state, big, mean, value=value)
        close(model, big, rtol=1e-5)


ONE_RULE = {
    "partition": lambda inner: oj.Partition({"all": inner}, {"*": "all"}),
    "masked": lambda inner: oj.Masked(inner, "*"),
    "two groups": lambda inner: oj.Partition(
        {"a": inner, "b": inner}, {"w": "a", "*": "b"}
    ),
    "outside": lambda inner: oj.Masked(inner, "w", outside=inner),
    "chain": oj.Chain,
    "chain in chain": lambda inner: oj.Chain(oj.Identity(), oj.Chain(inner)),
    "monitor": oj.Monitor,
    "accumulate": lambda inner: oj.Accumulate(inner, every=1),
    "skip": oj.SkipNonFinite,
    "apply if": lambda inner: oj.ApplyIf(inner, lambda grads, count: count >= 0),
    "loss scale": lambda inner: oj.LossScaling(inner, scale=1.0, growth=1.0),
    "mixed": oj.MixedPrecision,
    "lookahead": lambda inner: oj.Lookahead(inner, period=1, slow_step=1.0),
    "ema": lambda inner: oj.EMA(inner, decay=0.7),
    "swa": lambda inner: oj.SWA(inner, start=3),
}


@pytest.mark.parametrize("around", list(ONE_RULE.values()), ids=ONE_RULE)
def test_wrapper_that_does_nothing_is_the_rule(bits, around):
    inner = oj.AdamW(0.11, b1=0.7, b2=0.95, weight_decay=0.07)
    params, grads, _ = problem("real", bits)
    models, *_ = way(around(inner), params, grads)
    expected, *_ = way(inner, params, grads)
    follows(models, numbers(expected), params, bits)


def test_groups_follow_each_their_own_rule(bits):
    params, grads, _ = problem("real", bits)
    groups = {"slow": oj.SGD(0.02, momentum=0.7), "fast": INNER, "still": oj.Frozen()}
    params["c"], c = np.ones(2, f"f{bits // 8}"), np.ones(2, f"f{bits // 8}")
    rule = oj.Partition(groups, {"w": "slow", "c": "still", "*": "fast"})
    models, *_ = way(rule, params, [{**g, "c": c} for g in grads])
    pair = {path: params[path] for path in ("w", "b")}
    slow = sgd(pair, grads, learning_rate=0.02, momentum=0.7)
    fast = sgd(pair, grads, **RATE)
    for model in models:
        same_bits(model["c"], jnp.asarray(c))
    expected = [{"w": a["w"], "b": b["b"]} for a, b in zip(slow, fast, strict=True)]
    follows(models, expected, pair, bits)
