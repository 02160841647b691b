"""Strict settings for all tests: 8 CPU devices, no silent promotion, fixed seeds."""

import os

# Before jax is imported: these are read once. The tests compile thousands of tiny
# programs, and run each a few times: XLA at its quickest to compile halves their time.
# XLA_FLAGS of your own come last, and win: `--xla_backend_optimization_level=3
# --xla_cpu_use_fusion_emitters=true` is what users have.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 "
    "--xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1 " + os.environ.get("XLA_FLAGS", "")
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
