"""The examples with other libraries run, and come to what they say."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import with_equinox
import with_flax
import with_haiku
import with_optax
import with_orbax


@pytest.fixture(autouse=True)
def usual_settings():
    """The libraries rely on JAX's own settings, not the strict ones of these tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_equinox():
    result = with_equinox.main()
    assert result["tied"] and result["accuracy"] > 0.95


def test_flax():
    result = with_flax.main()
    assert len(result) == 4 and min(result.values()) > 0.95
    # The same rule, by two ways into it.
    assert result["linen, make_step"] == pytest.approx(
        result["linen, TrainState"], abs=0.01
    )


def test_haiku():
    result = with_haiku.main()
    assert result["still"] and result["accuracy"] > 0.95


def test_optax():
    result = with_optax.main()
    assert result["there"] < 1e-4 and result["back"] < 1e-4
    assert result["accuracy"] > 0.95


def test_orbax():
    result = with_orbax.main([])
    assert result["same"] and result["accuracy"] > 0.95
