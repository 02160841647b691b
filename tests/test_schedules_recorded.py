"""Schedules against the peers and the papers: recorded values, equations in NumPy."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optimjax as oj
from optimjax import schedules as s

RECORDED = json.loads(
    (Path(__file__).parent / "reference" / "schedules.json").read_text()
)["trajectories"]

# --- The peers' words, turned into ours -----------------------------------------------


def optax_piecewise(init_value, boundaries_and_scales, interpolate_type=None):
    """Theirs are factors; ours are the values themselves."""
    pairs = boundaries_and_scales["$intmap"]
    values = np.cumprod([init_value, *(scale for _, scale in pairs)])
    return s.Piecewise(values.tolist(), [at for at, _ in pairs], interpolate_type)


def optax_onecycle(shape):
    def make(
        transition_steps,
        peak_value,
        pct_start=0.3,
        div_factor=25.0,
        final_div_factor=1e4,
        pct_final=0.85,
    ):
        turns = {"warmup": pct_start} | (
            {"back": pct_final} if shape == "linear" else {}
        )
        turns = {
            k: int(p * transition_steps) / transition_steps for k, p in turns.items()
        }
        return s.OneCycle(
            peak_value,
            transition_steps,
            div=div_factor,
            final_div=final_div_factor,
            shape=shape,
            **turns,
        )

    return make


WORDS = {
    "init_value": "start",
    "end_value": "end",
    "peak_value": "peak",
    "transition_steps": "steps",
    "transition_begin": "begin",
    "decay_steps": "steps",
    "decay_rate": "rate",
    "exponent": "power",
}


def optax_words(cls, **settings):
    """A class of ours whose fields are theirs by other names."""
    return cls(**{WORDS.get(word, word): value for word, value in settings.items()})


def optax_warmup_exponential(init_value, peak_value, warmup_steps, **rest):
    decay = optax_words(s.Exponential, init_value=peak_value, **rest)
    return s.Warmup(decay, warmup_steps, init_value)


OPTAX = {
    "constant_schedule": s.Constant,
    "linear_schedule": partial(optax_words, s.Linear),
    "polynomial_schedule": partial(optax_words, s.Polynomial),
    "exponential_decay": partial(optax_words, s.Exponential),
    "cosine_decay_schedule": lambda init_value, decay_steps, alpha=0.0, exponent=1.0: (
        s.Cosine(init_value, decay_steps, alpha * init_value, exponent)
    ),
    "cosine_onecycle_schedule": optax_onecycle("cosine"),
    "linear_onecycle_schedule": optax_onecycle("linear"),
    "piecewise_constant_schedule": optax_piecewise,
    "piecewise_interpolate_schedule": optax_piecewise,
    "warmup_constant_schedule": lambda init_value, peak_value, warmup_steps: s.Warmup(
        peak_value, warmup_steps, init_value
    ),
    "warmup_cosine_decay_schedule": partial(optax_words, s.WarmupCosine),
    "warmup_exponential_decay_schedule": optax_warmup_exponential,
    "sgdr_schedule": lambda cosine_kwargs: s.Join(
        [optax_words(s.WarmupCosine, **kw) for kw in cosine_kwargs],
        np.cumsum([kw["decay_steps"] for kw in cosine_kwargs[:-1]]).tolist(),
    ),
    "join_schedules": lambda schedules, boundaries: s.Join(
        [OPTAX[each["$schedule"]](**each["kwargs"]) for each in schedules], boundaries
    ),
}


def torch_onecycle(
    base,
    max_lr,
    total_steps=None,
    epochs=None,
    steps_per_epoch=None,
    pct_start=0.3,
    anneal_strategy="cos",
    div_factor=25.0,
    final_div_factor=1e4,
    three_phase=False,
):
    total = total_steps or epochs * steps_per_epoch
    last = total - 1
    return s.OneCycle(
        max_lr,
        last,
        warmup=(pct_start * total - 1) / last,
        div=div_factor,
        final_div=final_div_factor,
        shape={"cos": "cosine"}.get(anneal_strategy, anneal_strategy),
        back=(2 * pct_start * total - 2) / last if three_phase else None,
    )


def torch_cyclic(
    base,
    base_lr,
    max_lr,
    step_size_up,
    step_size_down=None,
    mode="triangular",
    gamma=1.0,
    cycle_momentum=True,
):
    return s.Cyclic(base_lr, max_lr, step_size_up, step_size_down, mode, gamma)


def torch_lambda(base, lr_lambda):
    """Plain functions are schedules too; only their precision is their own."""
    assert lr_lambda == {"$lambda": "1.0/(1.0+0.1*t)"}
    return lambda count: base / (1.0 + 0.1 * count)


def torch_multiplicative(base, lr_lambda):
    """A recursion in the count: a table of the values, up to the last one needed."""
    assert lr_lambda == {"$lambda": "0.95 if t % 2 else 0.9"}
    factors = [0.95 if t % 2 else 0.9 for t in range(1, 31)]
    return s.Piecewise(np.cumprod([base, *factors]).tolist(), range(1, 31))


def torch_of(name, base, settings):
    return TORCH[name](base, **settings)


TORCH = {
    "StepLR": lambda base, step_size, gamma=0.1: s.Step(base, step_size, gamma),
    "MultiStepLR": lambda base, milestones, gamma=0.1: s.Piecewise(
        [base * gamma**i for i in range(len(milestones) + 1)], milestones
    ),
    "ConstantLR": lambda base, factor=1 / 3, total_iters=5: s.Piecewise(
        (base * factor, base), (total_iters,)
    ),
    "LinearLR": lambda base, start_factor=1 / 3, end_factor=1.0, total_iters=5: (
        s.Linear(base * start_factor, base * end_factor, total_iters)
    ),
    "ExponentialLR": lambda base, gamma: s.Exponential(base, gamma, steps=1),
    "CosineAnnealingLR": lambda base, T_max, eta_min=0.0: s.CosineCycle(
        base, T_max, eta_min
    ),
    "CosineAnnealingWarmRestarts": lambda base, T_0, T_mult=1, eta_min=0.0: (
        s.CosineRestarts(base, T_0, T_mult, eta_min)
    ),
    "PolynomialLR": lambda base, total_iters=5, power=1.0: s.Polynomial(
        base, 0.0, power, total_iters
    ),
    "CyclicLR": torch_cyclic,
    "OneCycleLR": torch_onecycle,
    "LambdaLR": torch_lambda,
    "MultiplicativeLR": torch_multiplicative,
    "SequentialLR": lambda base, schedulers, milestones: s.Join(
        [torch_of(name, base, kw) for name, kw in schedulers], milestones
    ),
    "ChainedScheduler": lambda base, schedulers: (
        torch_of(schedulers[0][0], base, schedulers[0][1])
        * torch_of(schedulers[1][0], 1.0, schedulers[1][1])
    ),
}


def ours(record):
    name, settings = record["schedule"], record["settings"]
    if record["peer"] == "optax":
        return OPTAX[name](**settings)
    return torch_of(name, record["base_lr"], settings)


# Plateaus depend on the loss, not on the count: they are a rule, in test_plateau.py.
SCHEDULES = [r for r in RECORDED if r["schedule"] != "ReduceLROnPlateau"]


def evaluated(schedule, counts):
    """The values as a rule sees them, which is how a plain function is run, too."""
    sgd = oj.SGD(schedule)
    one = jax.jit(lambda count: sgd.at_count(count).learning_rate)
    return np.array([one(count) for count in counts], np.float64)


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("record", SCHEDULES, ids=lambda r: r["id"])
def test_recorded_values(record, wide):
    with jax.enable_x64(wide):
        found = evaluated(ours(record), record["steps"])
        right = record.get("values_f64", record["values"])
        np.testing.assert_allclose(
            found, right, rtol=1e-12 if wide else 1e-6, atol=1e-16 if wide else 1e-9
        )


@pytest.mark.parametrize(
    "record", [r for r in SCHEDULES if "momentum" in r], ids=lambda r: r["id"]
)
def test_recorded_momentum(record, x64):
    """A momentum that goes against the learning rate is a schedule of its own."""
    words = record["settings"]
    if record["schedule"] == "CyclicLR":
        momentum = s.Cyclic(0.9, 0.8, words["step_size_up"])
    else:
        turned = {"max_lr": 0.85, "div_factor": 0.85 / 0.95, "final_div_factor": 1.0}
        momentum = torch_onecycle(None, **(words | turned))
    sgd = oj.SGD(0.1, momentum=momentum)
    found = [sgd.at_count(count).momentum for count in record["steps"]]
    np.testing.assert_allclose(found, record["momentum"], rtol=1e-12)


def test_every_recording_is_used():
    assert len(RECORDED) == 50
    assert len(SCHEDULES) == 48


# --- Against the equations, in NumPy --------------------------------------------------


def numpy_restarts(count, start, steps, factor, end, decay):
    length, peak = steps, start
    while count >= length:
        count, length, peak = count - length, length * factor, peak * decay
    return end + (peak - end) * (1 + np.cos(np.pi * count / length)) / 2


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("factor", [1, 1.01, 1.5, 2, 3.7])
def test_cosine_restarts(factor, wide):
    settings = {"start": 0.7, "steps": 5, "factor": factor, "end": 0.06, "decay": 0.9}
    counts = np.arange(700)
    with jax.enable_x64(wide):
        found = s.CosineRestarts(**settings)(counts)
        right = [numpy_restarts(count, **settings) for count in counts]
        # (The phase is what float32 loses: late in a cycle there is little left.)
        rtol, atol = (1e-11, 1e-15) if wide else (1e-4, 1e-5)
        np.testing.assert_allclose(found, right, rtol=rtol, atol=atol)
    # Where cycles begin on whole counts, float32 knows which count is the first.
    if factor in (1, 2):
        begins = 5 * (2 ** np.arange(20) - 1) if factor == 2 else 5 * np.arange(300)
        peaks = 0.7 * 0.9 ** np.arange(len(begins))
        found = s.CosineRestarts(**settings)(begins)
        np.testing.assert_allclose(found, peaks, rtol=1e-5)


@pytest.mark.parametrize("shape", ["linear", "1-sqrt", "cosine"])
def test_trapezoid(shape, x64):
    fall = {
        "linear": lambda x: 1 - x,
        "1-sqrt": lambda x: 1 - x**0.5,
        "cosine": lambda x: (1 + np.cos(np.pi * x)) / 2,
    }[shape]
    counts = np.arange(30)
    x = np.clip((counts - 13) / 9, 0, 1)
    right = np.where(counts < 13, 0.3, 0.02 + (0.3 - 0.02) * fall(x))
    right = np.where(counts < 4, 0.05 + (0.3 - 0.05) * counts / 4, right)
    found = s.Trapezoid(0.3, 4, 22, 9, start=0.05, end=0.02, shape=shape)(counts)
    np.testing.assert_allclose(found, right, rtol=1e-12)


@pytest.mark.parametrize("staircase", [False, True])
def test_inverse_time(staircase, x64):
    counts = np.arange(30)
    p = counts / 7
    right = 0.3 / (1 + 0.4 * (np.floor(p) if staircase else p))
    found = s.InverseTime(0.3, 0.4, 7, staircase)(counts)
    np.testing.assert_allclose(found, right, rtol=1e-12)


def test_inverse_sqrt(x64):
    t = np.arange(1, 40)
    right = 0.3 * np.minimum(t / 7, (7 / t) ** 0.5)
    found = s.InverseSqrt(0.3, 7)(t - 1)
    np.testing.assert_allclose(found, right, rtol=1e-12)
    # The paper's: width^-0.5 * min(t^-0.5, t * warmup^-1.5).
    paper = 512**-0.5 * np.minimum(t**-0.5, t * 7**-1.5)
    np.testing.assert_allclose(s.InverseSqrt((512 * 7) ** -0.5, 7)(t - 1), paper)


# --- The two of CASES.md --------------------------------------------------------------


def test_the_first_update_sees_count_0():
    state = oj.setup(oj.SGD(s.Linear(0.0, 1.0, 4)), model := {"w": jnp.zeros(())})
    path = []
    for _ in range(6):
        state, new = oj.update(state, model, {"w": jnp.ones(())})
        path.append(float(new["w"] - model["w"]))
        model = new
    assert path == [0, -0.25, -0.5, -0.75, -1, -1]


def test_warmup_and_cosine():
    schedule = s.WarmupCosine(1.0, warmup_steps=10, steps=100)
    found = schedule(np.array([0, 1, 9, 10, 55, 99, 100, 101]))
    right = [0, 0.1, 0.9, 1, 0.5, (1 + np.cos(np.pi * 89 / 90)) / 2, 0, 0]
    np.testing.assert_allclose(found, right, rtol=2e-6)
    assert round(float(found[5]), 6) == 0.000305
