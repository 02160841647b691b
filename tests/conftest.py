"""Strict settings for all tests: 8 CPU devices, no silent promotion, fixed seeds."""

import os

# Before jax is imported: the number of devices is fixed by then.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def fixed_seed():
    """NumPy's global generator starts from the same place in every test."""
    np.random.seed(0)


@pytest.fixture
def x64():
    """The test runs with 64-bit dtypes enabled."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng():
    """A generator of its own for each test, always from one seed."""
    return np.random.default_rng(20240229)


def pytest_make_parametrize_id(config, val):
    """A function by its name: its address differs between the workers of xdist."""
    return getattr(val, "__name__", None) if callable(val) else None
