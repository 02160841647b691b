"""The examples run, and come to what they say."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import drop_in
import tied_lm


@pytest.fixture(autouse=True)
def usual_settings():
    """A reader has JAX's own settings, not the strict ones of these tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_drop_in_ends_in_the_same_parameters(capsys):
    for rule, (difference, by_hand, ours, _) in drop_in.main(["--epochs", "2"]).items():
        assert difference < 1e-4, rule
        assert by_hand == pytest.approx(ours, abs=0.01)
    assert "Adam" in capsys.readouterr().out


def test_tied_language_model_trains_with_one_slot_and_without(tmp_path, capsys):
    out = tmp_path / "tied_lm.png"
    result = tied_lm.main(["--quick", "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    assert set(result["variants"]) == {"one slot", "two steps", "two arrays"}
    assert result["sample"]
    text = capsys.readouterr().out
    assert "head" in text and "state, bytes" in text
