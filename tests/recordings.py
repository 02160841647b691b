"""The recorded trajectories of torch and optax, their words turned into ours."""

import functools
import inspect
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import optimjax as oj

REFERENCE = Path(__file__).parent / "reference"

# Where the peer is wrong, or does what no rule of ours does: it must NOT be followed.
EXCEPTIONS = {
    "optax/rprop": "optax 0.2.8 takes the step of the call before, and none at first; "
    "ours is torch's, recorded as well",
}


@functools.cache
def recorded(peer):
    """All that `reference/README.md` describes of one peer."""
    return json.loads((REFERENCE / f"{peer}.json").read_text())


def recordings():
    """Every (peer, record), as parameters of a test."""
    for peer in ("torch", "optax"):
        for record in recorded(peer)["trajectories"]:
            marks = [
                pytest.mark.xfail(reason=reason, raises=AssertionError)
                for name, reason in EXCEPTIONS.items()
                if record["id"].startswith(name)
            ]
            yield pytest.param(peer, record, id=record["id"], marks=marks)


def plain_recordings():
    """Those of one rule, whose hyperparameters are the same always and everywhere."""
    for case in recordings():
        peer, record = case.values
        parts = parts_of(peer, record)
        values = parts[0][1].values()
        if len(parts) == 1 and not any(callable(v) or type(v) is dict for v in values):
            yield case


def recorded_problem(record=None):
    """The initial parameters, one dict of gradients per step, and values of a loss."""
    name = "p0" if record is None else record.get("problem", "p0")
    data = json.loads((REFERENCE / "problem.json").read_text())[name]
    params = {path: np.array(x) for path, x in data["params"].items()}
    steps = zip(*data["grads"].values(), strict=True)
    names = list(data["grads"])
    grads = [dict(zip(names, map(np.array, gs), strict=True)) for gs in steps]
    return params, grads, data["values"]


def parts_of(peer, record):
    """The rules that make up the peer's: a list of (class, settings)."""
    parts = (from_torch if peer == "torch" else from_optax)(record)
    return [(getattr(oj, name), settings) for name, settings in parts]


def rule_of(peer, record):
    rules = [cls(**settings) for cls, settings in parts_of(peer, record)]
    return rules[0] if len(rules) == 1 else oj.Chain(*rules)


def renamed(settings, **words):
    """`settings` in our words; a pair of theirs becomes two of ours."""
    for theirs, ours in words.items():
        if theirs in settings:
            value = settings.pop(theirs)
            pairs = (
                zip(ours, value, strict=True)
                if type(ours) is tuple
                else [(ours, value)]
            )
            settings |= dict(pairs)
    return settings


# --- torch ----------------------------------------------------------------------------

# Our class, its defaults in torch where ours are different, and torch's words: a word
# may stand for two of ours, or for an option of ours set to a value.
TORCH = {
    "SGD": ("SGD", {"lr": 1e-3}, {}),
    "Adam": ("Adam", {}, {}),
    "AdamW": ("AdamW", {"weight_decay": 1e-2}, {}),
    "NAdam": ("NAdam", {"lr": 2e-3, "momentum_decay": 4e-3}, {}),
    "RAdam": ("RAdam", {"debias_eps": True}, {}),
    "Adamax": ("Adamax", {"lr": 2e-3}, {}),
    "Adadelta": ("AdaDelta", {}, {"rho": "decay"}),
    "Adagrad": (
        "AdaGrad",
        {"initial_accumulator_value": 0.0, "eps": 1e-10, "eps_root": 0.0},
        {
            "initial_accumulator_value": "initial_accumulator",
            "lr_decay": "learning_rate_decay",
        },
    ),
    "RMSprop": (
        "RMSProp",
        {"alpha": 0.99, "eps": 1e-8, "eps_root": 0.0, "rate_inside": False},
        {"alpha": "decay"},
    ),
    "Rprop": (
        "Rprop",
        {},
        {
            "etas": ("eta_minus", "eta_plus"),
            "step_sizes": ("min_step_size", "max_step_size"),
        },
    ),
    "ASGD": ("ASGD", {}, {}),
    "Adafactor": (
        "Adafactor",
        {
            "eps": 0.0,
            "floor": float(np.finfo(np.float64).eps),
            "relative_step": True,
            "couple": True,
            "last_axes": True,
            "min_dim_size_to_factor": 1,
        },
        {"d": "clipping_threshold"},
    ),
}


def from_torch(record):
    cls, defaults, words = TORCH[record["optimizer"]]
    settings = defaults | record["settings"]
    if "param_groups" in record:
        groups = record["param_groups"]
        for name in ("lr", "weight_decay"):
            settings[name] = {
                path: group.get(name, settings.get(name))
                for group in groups
                for path in group["params"]
            }
    settings = renamed(settings, lr="learning_rate", betas=("b1", "b2"), **words)
    if "lr_scheduler" in record:
        scheduler = record["lr_scheduler"]
        base = settings["learning_rate"]
        settings["learning_rate"] = TORCH_SCHEDULES[scheduler["name"]](
            base, **scheduler["kwargs"]
        )
    if settings.pop("amsgrad", False):
        cls = cls.replace("Adam", "AMSGrad")
        settings["debias_v"] = "after"
    if settings.pop("decoupled_weight_decay", False):
        cls += "W"
    if "beta2_decay" in settings:
        settings["decay_rate"] = -settings.pop("beta2_decay")
    if isinstance(settings.get("eps"), list):
        settings["floor"], settings["min_scale"] = settings["eps"]
        settings["eps"] = 0.0
    before = []
    takes = inspect.signature(getattr(oj, cls)).parameters
    if "maximize" in settings and "maximize" not in takes:
        del settings["maximize"]
        before += [("SGD", {"learning_rate": 1.0, "maximize": True})]
    if "weight_decay" in settings and "weight_decay" not in takes:
        before += [("WeightDecay", {"weight_decay": settings.pop("weight_decay")})]
    return [*before, (cls, settings)]


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


# --- optax ----------------------------------------------------------------------------

# Our class, its defaults in optax where ours are different, and optax's words.
OPTAX = {
    "adabelief": ("AdaBelief", {}, {}),
    "adadelta": ("AdaDelta", {}, {"rho": "decay"}),
    "adafactor": (
        "Adafactor",
        {"learning_rate": 1.0},
        {
            "multiply_by_parameter_scale": "parameter_scale",
            "weight_decay_rate": "weight_decay",
        },
    ),
    "adagrad": (
        "AdaGrad",
        {},
        {"eps": "eps_root", "initial_accumulator_value": "initial_accumulator"},
    ),
    "adam": ("Adam", {}, {}),
    "adamax": ("Adamax", {}, {}),
    "adamaxw": ("AdamaxW", {}, {}),
    "adamw": ("AdamW", {}, {}),
    "adan": ("Adan", {"eps_root": 1e-8, "proximal": False}, {}),
    "amsgrad": ("AMSGrad", {}, {"bias_correction_mu": "debias_m"}),
    "fromage": ("Fromage", {}, {}),
    "lamb": ("LAMB", {}, {}),
    "lars": (
        "LARS",
        {},
        {"weight_decay_mask": "decay_where", "trust_ratio_mask": "trust_where"},
    ),
    "lbfgs": (
        "LBFGS",
        {"keep_negative": True},
        {
            "linesearch": "line_search",
            "memory_size": "memory",
            "scale_init_precond": "scale_initial",
        },
    ),
    "lion": ("Lion", {}, {}),
    "nadam": ("NAdam", {}, {}),
    "nadamw": ("NAdamW", {}, {}),
    "noisy_sgd": ("NoisySGD", {}, {}),
    "novograd": ("NovoGrad", {}, {}),
    "optimistic_adam": ("OptimisticAdam", {"nesterov": True}, {}),
    "optimistic_adam_v2": ("OptimisticAdam", {"nesterov": True}, {}),
    "optimistic_gradient_descent": ("OptimisticGradientDescent", {}, {}),
    "polyak_sgd": ("PolyakSGD", {}, {}),
    "radam": ("RAdam", {}, {}),
    "rmsprop": ("RMSProp", {}, {}),
    "rprop": ("Rprop", {}, {}),
    "sgd": ("SGD", {}, {}),
    "sign_sgd": ("SignSGD", {}, {}),
    "signum": ("Signum", {}, {"beta": "momentum"}),
    "sm3": ("SM3", {}, {}),
    "yogi": ("Yogi", {"initial_m": 1e-6}, {}),
}


def from_optax(record):
    cls, defaults, words = OPTAX[record["optimizer"]]
    settings = renamed(defaults | record["settings"], mask="decay_where", **words)
    for name in ("accumulator_dtype", "dtype_momentum"):
        settings.pop(name, None)  # float64, which is what we do
    if isinstance(settings.get("learning_rate"), dict):
        schedule = settings["learning_rate"]
        name, kwargs = schedule["$schedule"], schedule["kwargs"]
        settings["learning_rate"] = OPTAX_SCHEDULES[name](**kwargs)
    for name in ("decay_where", "trust_where"):
        if name in settings:
            mask = settings[name]
            settings[name] = [path for path, chosen in mask.items() if chosen]
    if not settings.pop("bias_correction_nu", True):
        settings["debias_v"] = "never"
    if not settings.pop("factored", True):
        settings["min_dim_size_to_factor"] = None
    if cls == "Adan":
        settings["lookahead"] = 1 - settings.get("b2", 0.92)  # the paper: b2
    if cls == "RMSProp" and not settings.pop("eps_in_sqrt", True):
        settings |= {"eps": settings.get("eps", 1e-8), "eps_root": 0.0}
    elif cls == "RMSProp" and "eps" in settings:
        settings["eps_root"] = settings.pop("eps")
    if cls == "OptimisticAdam":
        # ((alpha + beta) u - beta u_before): ours is alpha times 1 and this optimism
        if record["optimizer"] == "optimistic_adam":
            alpha = settings["learning_rate"]
            beta = settings.pop("optimism", alpha)
        else:
            alpha, beta = settings.pop("alpha", 1.0), settings.pop("beta", 1.0)
            settings["learning_rate"] = settings["learning_rate"] * alpha
        settings["optimism"] = beta / alpha
    if cls in ("Adam", "AdamW") and settings.pop("nesterov", False):
        cls = "N" + cls
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
