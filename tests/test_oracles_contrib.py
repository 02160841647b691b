"""The oracles of newer rules go where optax.contrib and torch's Muon went."""

import jax
import numpy as np
import pytest
from oracles import learning_rate_free as free
from oracles import tuning
from oracles.adam import moments
from oracles.leaves import Params, Steps, wide
from oracles.matrices import ORACLES as MATRICES
from oracles.matrices_low_rank import ORACLES as LOW_RANK
from recordings import OPTAX_SCHEDULES, recorded, recorded_problem, renamed
from test_trajectories import assert_as_recorded

RECORDS = {r["id"]: r for r in recorded("contrib")["trajectories"]}
ADAM_STATE = {"b1": 0.9, "b2": 0.999}


def scheduled(value):
    """A number, or a function of the count by the peer's name for it."""
    if isinstance(value, dict) and "$schedule" in value:
        schedule = OPTAX_SCHEDULES[value["$schedule"]](**value["kwargs"])
        with jax.enable_x64(True):
            numbers = [float(schedule(count)) for count in range(100)]
        return numbers.__getitem__
    return value


def way_of(record, params: Params, grads: Steps, values) -> Steps:
    settings = {name: scheduled(value) for name, value in record["settings"].items()}
    return PEERS[record["optimizer"]](params, grads, values, settings)


def renaming(oracle, needs_values=False, **words):
    def way(params, grads, values, settings):
        context = {"values": values} if needs_values else {}
        settings = renamed(settings, **words)
        return oracle(params, grads, **context, **settings)

    return way


def on_decayed(oracle, **words):
    """With weight_decay x added to each gradient beforehand."""

    def way(params, grads, values, settings):
        settings = renamed(settings, **words)
        decay = settings.pop("weight_decay", 0.0)
        x, seen = wide(params), []
        for g in grads:
            seen.append({path: g[path] + decay * x[path] for path in x})
            visited = oracle(params, seen, **settings)
            x = visited[-1]
        return visited

    return way


def decayed(params: Params, steps: Steps, shares: dict) -> Steps:
    """x <- x - step - share x"""
    x, visited = wide(params), []
    for step in steps:
        x = {path: (1 - shares[path]) * a - step[path] for path, a in x.items()}
        visited.append(x)
    return visited


def torch_muon(params, grads, values, settings):
    """torch bounds the norm by eps from below, where ours adds it: 0 does neither.

    Its matrices are (out, in), and so is its sense of the shape.
    """
    settings = {"lr": 1e-3, "weight_decay": 0.1, **settings}
    lr = settings["lr"]
    scales = {"original": "shape", "match_rms_adamw": "rms"}

    def turned(tree):
        return {path: tree[path].T for path in params}

    steps = tuning.steps_of(
        lambda start: MATRICES["Muon"](
            start,
            [turned(g) for g in grads],
            learning_rate=lr,
            momentum=settings.get("momentum", 0.95),
            nesterov=settings.get("nesterov", True),
            scale=scales[settings.get("adjust_lr_fn", "original")],
            eps=0.0,
        ),
        [turned(g) for g in grads],
    )
    shares = dict.fromkeys(params, lr * settings["weight_decay"])
    return decayed(params, [turned(step) for step in steps], shares)


def optax_muon(params, grads, values, settings):
    """Its auxiliary rule is NAdamW if `nesterov`, and of the same rate."""
    lr = settings["learning_rate"]
    adam_lr = settings.pop("adam_learning_rate", lr)
    decay = settings.pop("weight_decay", 0.0)
    adam_decay = settings.pop("adam_weight_decay", 0.0)
    scale = "shape" if settings.pop("consistent_rms", None) is None else "rms"
    settings = renamed(settings, beta="momentum", ns_steps="iterations")
    settings = renamed(settings, preconditioning="prescale", adaptive="dual_norm")
    nesterov = settings.get("nesterov", True)
    aux = {"learning_rate": adam_lr, "nesterov": nesterov, **ADAM_STATE}
    settings |= {"aux": aux, "scale": scale, "debias": True}
    steps = tuning.steps_of(
        lambda start: MATRICES["Muon"](start, grads, **{"eps": 1e-8, **settings}),
        grads,
    )
    shares = {
        path: lr * decay if x.ndim == 2 else adam_lr * adam_decay
        for path, x in params.items()
    }
    return decayed(params, steps, shares)


def rms_steps(gs):
    """optax's scale_by_rms: of RMSProp, without a rate."""
    for g, _, v in moments(gs, 0.0, 0.9):
        yield g / np.sqrt(v + 1e-8)


def optax_galore(params, grads, values, settings):
    lr, decay = settings["learning_rate"], settings.pop("weight_decay", 0.0)
    settings = renamed(settings, update_proj_gap="every")
    base = settings.pop("base_optimizer", None)
    settings = {"scale": 1.0, "side": "longer", **settings}
    if base is not None:
        assert base["$optimizer"] == "scale_by_rms"
        settings["inner"] = rms_steps
    settings["aux"] = {"learning_rate": lr, **ADAM_STATE}
    steps = tuning.steps_of(
        lambda start: LOW_RANK["GaLore"](start, grads, **settings), grads
    )
    if base is not None:
        steps = [
            {**step, "b": lr * u}
            for step, u in zip(steps, rms_steps([g["b"] for g in grads]), strict=True)
        ]
    return decayed(params, steps, dict.fromkeys(params, lr * decay))


def optax_dog(params, grads, values, settings):
    kind, size = settings.pop("init_step", ("heuristic", 1e-6))
    word = {"heuristic": "reps_rel", "distance": "init_distance"}
    settings[word.get(kind, "init_rate")] = size
    return on_decayed(free.dog)(params, grads, values, settings)


def optax_mechanize(params, grads, values, settings):
    base = settings.pop("base_optimizer")
    steps = {"sgd": tuning.sgd_steps, "adam": tuning.adam_steps}[base["$optimizer"]]
    settings = renamed(settings, weight_decay="decay", num_betas="betas")
    return tuning.mechanic(
        params, grads, steps=steps(grads, **base["kwargs"]), **settings
    )


ESTIMATES = {"estim_lr0": "d0", "estim_lr_coef": "d_coef", "betas": ("b1", "b2")}

PEERS = {
    "Muon": torch_muon,
    "contrib.muon": optax_muon,
    "contrib.galore": optax_galore,
    "contrib.prodigy": renaming(free.prodigy, beta3="b3", **ESTIMATES),
    "contrib.dadapt_adamw": renaming(free.dadapt_adam, **ESTIMATES),
    "contrib.dog": optax_dog,
    "contrib.dowg": on_decayed(free.dowg, init_estim_sq_dist="init_distance_sq"),
    "contrib.momo": renaming(free.momo, needs_values=True, beta="b1"),
    "contrib.momo_adam": renaming(free.momo_adam, needs_values=True),
    "contrib.cocob": on_decayed(free.cocob),
    "contrib.mechanize": optax_mechanize,
}


@pytest.mark.parametrize(
    "name", [name for name, r in RECORDS.items() if r["optimizer"] in PEERS]
)
def test_oracle_agrees_with_the_recording(name):
    record = RECORDS[name]
    params, grads, values = recorded_problem(record)
    params = {path: params[path] for path in record["params"]}
    got = way_of(record, params, grads, values)
    assert_as_recorded({**record, "id": "contrib/"}, got, params)
