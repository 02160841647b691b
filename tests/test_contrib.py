"""Rules of optax.contrib, and torch's Muon: step by step where the peer went."""

import jax
import pytest
from recordings import OPTAX_SCHEDULES, recorded, recorded_problem
from test_trajectories import assert_as_recorded, train

import optimjax as oj

RECORDS = {r["id"]: r for r in recorded("contrib")["trajectories"]}


def scheduled(value):
    """A number, or a schedule by the peer's name for it."""
    if isinstance(value, dict):
        return OPTAX_SCHEDULES[value["$schedule"]](**value["kwargs"])
    return value


def optax_muon(s):
    rate, eps = s["learning_rate"], 1e-8
    muon = oj.Muon(
        rate,
        momentum=s.get("beta", 0.95),
        nesterov=s.get("nesterov", True),
        iterations=s.get("ns_steps", 5),
        prescale=s.get("preconditioning", "frobenius"),
        scale="rms" if "consistent_rms" in s else "shape",
        dual_norm=s.get("adaptive", False),
        debias=True,
        eps=eps,
        aux=(oj.NAdamW if s.get("nesterov", True) else oj.AdamW)(
            s.get("adam_learning_rate", rate),
            weight_decay=s.get("adam_weight_decay", 0.0),
        ),
    )
    assert s.get("consistent_rms", 0.2) == 0.2
    decay = oj.WeightDecay(rate * s.get("weight_decay", 0.0), where="w")
    return oj.Chain(muon, decay)


def torch_muon(s):
    """torch's kernels are (out, in); it divides by max(norm, eps)."""
    rate, decay = s.get("lr", 1e-3), s.get("weight_decay", 0.1)
    muon = oj.Muon(
        rate,
        momentum=s.get("momentum", 0.95),
        nesterov=s.get("nesterov", True),
        scale="rms" if s.get("adjust_lr_fn") == "match_rms_adamw" else "shape",
        eps=0.0,
        axes=oj.Axes(outputs=0),
    )
    return oj.Chain(muon, oj.WeightDecay(rate * decay, where="w"))


def optax_galore(s):
    """optax projects the longer side; other slots take the same Adam."""
    rate = s["learning_rate"]
    return oj.GaLore(
        rate,
        rank=s["rank"],
        every=s.get("update_proj_gap", 200),
        scale=s.get("scale", 1.0),
        side="longer",
        aux=oj.Adam(rate),
    )


# The peer's name -> its settings turned into our rule.
RULES = {
    "contrib.muon": optax_muon,
    "contrib.galore": optax_galore,
    "Muon": torch_muon,
}
# A GaLore that is not on Adam: no rule of ours.
OTHERS = {"optax/contrib.galore/01"}


@pytest.mark.parametrize(
    "name",
    [n for n, r in RECORDS.items() if r["optimizer"] in RULES and n not in OTHERS],
)
def test_recorded_trajectory(name):
    record = RECORDS[name]
    settings = {key: scheduled(value) for key, value in record["settings"].items()}
    params, grads, values = recorded_problem(record)
    with jax.enable_x64(True):
        got = train(RULES[record["optimizer"]](settings), params, grads, values)
    start = {path: params[path] for path in record["params"]}  # torch's Muon: matrices
    assert_as_recorded({**record, "id": "contrib/"}, got, start)
