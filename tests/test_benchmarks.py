"""The benchmarks run; that all peers come to equal results, they check themselves."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import figures, measure, special
from benchmarks.models import MODELS, Model, many
from benchmarks.peers import OURS, PEERS

SMALL = {"w": (8, 5), "b": (5,), "one": ()}


@pytest.fixture(autouse=True)
def usual_settings():
    """The peers rely on JAX's own settings, not the strict ones of these tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_models_are_the_ones_they_are_called_after():
    sizes = {name: (len(m.shapes), m.numbers) for name, m in MODELS.items()}
    assert sizes["GPT-2"] == (148, 124_439_808)
    assert sizes["ResNet-50"] == (161, 25_557_032)
    assert sizes["MLP"] == (6, 669_706)


def test_cases_are_measured_and_shown(tmp_path):
    cases = [
        measure.case("small", Model(SMALL, dtype), rule, PEERS, budget=0.01)
        for rule in OURS
        for dtype in ("float32", "bfloat16")
    ]
    for case in cases:
        assert {"optimjax", "optimjax, XLA", "optax", "by hand"} <= case["step"].keys()
        assert "floor" not in case["step"]  # all is in a cache
        assert all(t > 0 for times in case["step"].values() for t in times)
    assert cases[0]["state_bytes"]["by hand"] == 4 * 46
    assert "SGDm" in figures.steps(cases) and "Lion" in figures.compiles(cases)
    figures.chart(cases, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_unequal_results_are_not_timed():
    peers = dict(PEERS)
    peers["optax"] = lambda rule, model: PEERS["by hand"]("SGDm", model)
    with pytest.raises(SystemExit, match="optax and optimjax differ"):
        measure.case("small", Model(SMALL), "Adam", peers, budget=0.01)


def test_special_figures():
    assert special.compilations() == {"optimjax": (0, 0), "optax": (0, 5)}
    whole, compiled = special.make_step_overhead(3)
    assert compiled > 0 and whole > 0
    times = special.wrappers(Model(SMALL), budget=0.01)
    assert times.keys() == {
        "alone",
        *special.WRAPPERS,
        *special.OPTAX_WRAPPERS,
    }
    some = {name: PEERS[name] for name in ("optimjax", "optax")}
    assert measure.scans(Model(SMALL), "Adam", some, budget=0.01).keys() == some.keys()
    found = special.tied(0.01, {"wte": (6, 4), **many(2, (4,))})
    state, model = found["bytes"]["optimjax"]
    assert (state, model) == (2 * 4 * 32 + 4 + 6 * 4, 4 * 32)
    assert found["bytes"]["optax"] == [2 * 4 * 56 + 4, 4 * 56]
    assert "donate the same buffer twice" in found["optax, one array donated twice"]
