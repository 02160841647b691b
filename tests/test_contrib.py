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
}


@pytest.mark.parametrize(
    "name", [n for n, r in RECORDS.items() if r["optimizer"] in RULES]
)
def test_recorded_trajectory(name):
    record = RECORDS[name]
    settings = {key: scheduled(value) for key, value in record["settings"].items()}
    params, grads, values = recorded_problem(record)
    with jax.enable_x64(True):
        got = train(RULES[record["optimizer"]](settings), params, grads, values)
    assert_as_recorded({**record, "id": "contrib/"}, got, params)
