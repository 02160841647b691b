"""The recorded trajectories of torch and optax, their words turned into ours."""

import functools
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import optimjax as oj

REFERENCE = Path(__file__).parent / "reference"


@functools.cache
def recorded(peer):
    """All that `reference/README.md` describes of one peer."""
    return json.loads((REFERENCE / f"{peer}.json").read_text())


def recordings():
    """Every (peer, record), as parameters of a test."""
    for peer in ("torch", "optax"):
        for record in recorded(peer)["trajectories"]:
            yield pytest.param(peer, record, id=record["id"])


def plain_recordings():
    """Those of one rule, whose hyperparameters are the same always and everywhere."""
    for case in recordings():
        peer, record = case.values
        parts = parts_of(peer, record)
        values = parts[0][1].values()
        if len(parts) == 1 and not any(callable(v) or type(v) is dict for v in values):
            yield case


def recorded_problem():
    """The initial parameters, and one dict of gradients per step."""
    data = json.loads((REFERENCE / "problem.json").read_text())
    params = {path: np.array(x) for path, x in data["params"].items()}
    steps = zip(*data["grads"].values(), strict=True)
    names = list(data["grads"])
    return params, [dict(zip(names, map(np.array, gs), strict=True)) for gs in steps]


def parts_of(peer, record):
    """The rules that make up the peer's: a list of (class, settings)."""
    return (from_torch if peer == "torch" else from_optax)(record)


def rule_of(peer, record):
    rules = [cls(**settings) for cls, settings in parts_of(peer, record)]
    return rules[0] if len(rules) == 1 else oj.Chain(*rules)


def from_torch(record):
    """torch's words in ours; its defaults where ours are different."""
    ours = {"SGD": {"lr": 1e-3}, "Adam": {}, "AdamW": {"weight_decay": 1e-2}}
    settings = ours[record["optimizer"]] | record["settings"]
    if "param_groups" in record:
        groups = record["param_groups"]
        for name in ("lr", "weight_decay"):
            settings[name] = {
                path: group.get(name, settings.get(name))
                for group in groups
                for path in group["params"]
            }
    if "betas" in settings:
        settings["b1"], settings["b2"] = settings.pop("betas")
    if "lr" in settings:
        settings["learning_rate"] = settings.pop("lr")
    if "lr_scheduler" in record:
        scheduler = record["lr_scheduler"]
        base = settings["learning_rate"]
        settings["learning_rate"] = TORCH_SCHEDULES[scheduler["name"]](
            base, **scheduler["kwargs"]
        )
    if record["optimizer"] == "SGD":
        return [(oj.SGD, settings)]
    if record["optimizer"] == "AdamW" or settings.pop("decoupled_weight_decay", False):
        return [(oj.AdamW, settings)]
    decay = settings.pop("weight_decay", None)
    adam = [(oj.Adam, settings)]
    return adam if decay is None else [(oj.WeightDecay, {"weight_decay": decay}), *adam]


# Functions of the count as anyone writes them: they come out in float64 nonetheless.


def step_lr(base, step_size, gamma):
    return lambda count: base * gamma ** (count // step_size)


def cosine_annealing_lr(base, T_max, eta_min):
    def schedule(count):
        return eta_min + (base - eta_min) * (1 + jnp.cos(math.pi * count / T_max)) / 2

    return schedule


def lambda_lr(base, lr_lambda):
    assert lr_lambda == {"$lambda": "0.8**t"}
    return lambda count: base * 0.8**count


TORCH_SCHEDULES = {
    "StepLR": step_lr,
    "CosineAnnealingLR": cosine_annealing_lr,
    "LambdaLR": lambda_lr,
}


def from_optax(record):
    settings = dict(record["settings"])
    settings.pop("accumulator_dtype", None)  # float64, which is what we do
    if isinstance(settings["learning_rate"], dict):
        schedule = settings["learning_rate"]
        name, kwargs = schedule["$schedule"], schedule["kwargs"]
        settings["learning_rate"] = OPTAX_SCHEDULES[name](**kwargs)
    if "mask" in settings:
        mask = settings.pop("mask")
        settings["decay_where"] = [path for path, decays in mask.items() if decays]
    cls = {"sgd": oj.SGD, "adam": oj.Adam, "adamw": oj.AdamW}[record["optimizer"]]
    return [(cls, settings)]


def linear_schedule(init_value, end_value, transition_steps):
    def schedule(count):
        done = jnp.minimum(count, transition_steps) / transition_steps
        return init_value + (end_value - init_value) * done

    return schedule


def exponential_decay(init_value, transition_steps, decay_rate):
    return lambda count: init_value * decay_rate ** (count / transition_steps)


def warmup_cosine_decay_schedule(
    init_value, peak_value, warmup_steps, decay_steps, end_value
):
    warmup = linear_schedule(init_value, peak_value, warmup_steps)
    length = decay_steps - warmup_steps

    def schedule(count):
        done = jnp.minimum(count - warmup_steps, length) / length
        fall = (1 + jnp.cos(math.pi * done)) / 2
        decay = end_value + (peak_value - end_value) * fall
        return jnp.where(count < warmup_steps, warmup(count), decay)

    return schedule


OPTAX_SCHEDULES = {
    "linear_schedule": linear_schedule,
    "exponential_decay": exponential_decay,
    "warmup_cosine_decay_schedule": warmup_cosine_decay_schedule,
}
