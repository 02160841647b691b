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


# The peer's name -> its settings turned into our rule.
RULES = {
    "contrib.acprop": decaying(oj.ACProp),
    "contrib.ademamix": decaying(oj.AdEMAMix),
    "contrib.adopt": adopt,
    "contrib.madgrad": madgrad,
    "contrib.simplified_ademamix": decaying(oj.SimplifiedAdEMAMix),
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
