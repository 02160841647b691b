"""Rules of optax.contrib, and torch's Muon: step by step where the peer went."""

import inspect

import jax
import pytest
from recordings import OPTAX_SCHEDULES, recorded, recorded_problem, renamed
from test_trajectories import assert_as_recorded, train

import optimjax as oj

RECORDS = {r["id"]: r for r in recorded("contrib")["trajectories"]}


def scheduled(value):
    """A number, or a schedule by the peer's name for it."""
    if isinstance(value, dict) and "$schedule" in value:
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
    return oj.GaLore(rate, rank=s["rank"], scale=1.0, side="longer", aux=oj.Adam(rate))


def decaying(cls):
    """Our rule from the peer's settings, with its decay beside the direction."""

    def make(settings):
        decay = settings.pop("weight_decay", 0.0)
        return oj.Chain(
            cls(**settings), oj.WeightDecay(settings["learning_rate"] * decay)
        )

    return make


def adopt(settings):
    if not settings.pop("use_clipping", True):
        settings["clip_power"] = None
    return oj.ADOPT(**settings)


def madgrad(settings):
    decay = settings.pop("weight_decay", 0.0)
    return oj.Chain(oj.WeightDecay(decay), oj.MADGRAD(**settings))


def rule_in_words(name, **words):
    """A function of the peer's settings, some of which have other names here.

    Decay that our rule does not have comes before it, as an L2 penalty.
    """

    def make(settings):
        ours = renamed(settings, **words)
        takes = inspect.signature(getattr(oj, name)).parameters
        decay = None if "weight_decay" in takes else ours.pop("weight_decay", None)
        rule = getattr(oj, name)(**ours)
        return rule if decay is None else oj.Chain(oj.WeightDecay(decay), rule)

    return make


def dog(settings):
    kind, value = settings.pop("init_step", ("heuristic", 1e-6))
    names = {"heuristic": "reps_rel", "distance": "init_distance"}
    name = names.get(kind, "init_rate")
    return rule_in_words("DoG")({**settings, name: value})


def mechanize(settings):
    inner = settings.pop("base_optimizer")
    rule = {"sgd": oj.SGD, "adam": oj.Adam}[inner["$optimizer"]](**inner["kwargs"])
    return oj.Mechanic(
        rule, **renamed(settings, weight_decay="decay", num_betas="betas")
    )


ESTIMATE = {"betas": ("b1", "b2"), "estim_lr0": "d0"}

# The peer's name -> its settings turned into our rule.
RULES = {
    "contrib.prodigy": rule_in_words(
        "Prodigy", beta3="b3", estim_lr_coef="d_coef", **ESTIMATE
    ),
    "contrib.dadapt_adamw": rule_in_words("DAdaptAdam", **ESTIMATE),
    "contrib.dog": dog,
    "contrib.dowg": rule_in_words("DoWG", init_estim_sq_dist="init_distance_sq"),
    "contrib.momo": rule_in_words("MoMo", beta="b1"),
    "contrib.momo_adam": rule_in_words("MoMoAdam"),
    "contrib.cocob": rule_in_words("COCOB"),
    "contrib.mechanize": mechanize,
    "contrib.muon": optax_muon,
    "contrib.galore": optax_galore,
    "Muon": torch_muon,
    "contrib.acprop": decaying(oj.ACProp),
    "contrib.ademamix": decaying(oj.AdEMAMix),
    "contrib.adopt": adopt,
    "contrib.madgrad": madgrad,
    "contrib.simplified_ademamix": decaying(oj.SimplifiedAdEMAMix),
}


# GaLore around another rule than Adam, which ours cannot be.
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
