"""A run that was saved and restored goes on as if nothing had happened."""

import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import same_bits

import optimjax as oj

RULE = oj.EMA(
    oj.Chain(
        oj.ClipByGlobalNorm(1.0), oj.AdamW({"bias": 1e-2, "*": 1e-3}, weight_decay=0.1)
    ),
    decay=0.9,
)


def model_of(seed=0):
    rng = np.random.default_rng(seed)
    w = jnp.asarray(rng.normal(size=(3, 3)), jnp.float32)
    return {"embed": w, "head": w, "bias": jnp.ones(3, jnp.bfloat16), "act": jnp.tanh}


def loss(model, x):
    h = model["act"](x @ model["embed"]) @ model["head"]
    return jnp.mean((h + model["bias"].astype(jnp.float32)[None] - 1.0) ** 2)


def batches(steps, seed=1):
    x = np.random.default_rng(seed).normal(size=(steps, 4, 3))
    return jnp.asarray(x, jnp.float32)


STEP = oj.make_step(loss)


def run(state, model, steps):
    for x in steps:
        state, model, _ = STEP(state, model, x)
    return state, model


def middle():
    """A state in the middle of a run, in which one slot once was skipped."""
    model = model_of()
    state = oj.setup(RULE, model)
    state, model = run(state, model, batches(3))
    grads = {"embed": jnp.ones((3, 3)), "head": None, "bias": None, "act": None}
    return oj.update(state, model, grads)


@pytest.mark.parametrize("flat", [False, True])
def test_there_and_back(flat):
    state, _ = middle()
    again = oj.state_from_dict(
        oj.setup(RULE, model_of()), oj.state_to_dict(state, flat=flat)
    )
    same_bits(again, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)


RULES = [
    oj.SGD(0.1),
    oj.Identity(),
    oj.Adafactor(),
    oj.SM3(),
    oj.LBFGS(),
    oj.Adam(state_dtype="bfloat16"),
    oj.MixedPrecision(oj.Lion()),
    oj.Accumulate(oj.SkipNonFinite(oj.Adam()), every=2),
    oj.Partition(
        {"a": oj.Adam(), "b": oj.SGD(0.1, momentum=0.9)}, {"w": "a", "*": "b"}
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_kind_of_state_through_a_file(rule, tmp_path):
    model = {"w": jnp.ones((3, 2)), "b": jnp.ones(2, jnp.bfloat16)}
    state = oj.setup(rule, model)
    grads = jax.tree.map(lambda x: 0.5 * x, model)
    context = {"value": jnp.ones(()), "value_fn": lambda m: jnp.sum(m["w"] ** 2)}
    state, _ = oj.update(state, model, grads, **context)
    np.savez(tmp_path / "state.npz", **oj.state_to_dict(state, flat=True))
    with np.load(tmp_path / "state.npz") as saved:
        again = oj.state_from_dict(oj.setup(rule, model), saved)
    same_bits(again, state)
    for new, old in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert new.dtype == old.dtype


def test_slots_named_like_fields_of_the_state():
    names = ("m", "v", "count", "own", "slots", "batches")
    model = {name: jnp.full(2, i + 1.0) for i, name in enumerate(names)}
    rule = oj.Accumulate(oj.Adam(0.1), every=2)
    state, model = oj.update(oj.setup(rule, model), model, model)
    for skip in ({}, {"own": None}, {"count": None, "m": None}):
        state, model = oj.update(state, model, {**model, **skip})
        for flat in (False, True):
            saved = oj.state_to_dict(state, flat=flat)
            again = oj.state_from_dict(oj.setup(rule, model), saved)
            same_bits(again, state)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np, jax.numpy as jnp
import optimjax as oj
from test_checkpoint import RULE, batches, model_of, run

model = model_of()
state = oj.setup(RULE, model)
with np.load({folder!r} + "/state.npz") as saved:
    state = oj.state_from_dict(state, saved)
with np.load({folder!r} + "/model.npz") as saved:
    model["embed"] = model["head"] = jnp.asarray(saved["embed"])
    model["bias"] = jnp.asarray(saved["bias"].view(jnp.bfloat16))
state, model = run(state, model, batches(50, seed=2))
assert model["head"] is model["embed"]
np.savez({folder!r} + "/after.npz", **oj.state_to_dict(state, flat=True))
np.savez({folder!r} + "/last.npz", **{{k: model[k] for k in ("embed", "bias")}})
"""


def test_fifty_steps_in_a_new_process_are_bit_identical(tmp_path):
    """CASES 43. The other process knows the code, and what is on the disk."""
    state, model = middle()
    np.savez(tmp_path / "state.npz", **oj.state_to_dict(state, flat=True))
    np.savez(tmp_path / "model.npz", embed=model["embed"], bias=model["bias"])
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    state, model = run(state, model, batches(50, seed=2))
    with np.load(tmp_path / "after.npz") as saved:
        for key, x in oj.state_to_dict(state, flat=True).items():
            assert np.asarray(x).tobytes() == saved[key].tobytes(), key
    with np.load(tmp_path / "last.npz") as saved:
        for key in ("embed", "bias"):
            assert np.asarray(model[key]).tobytes() == saved[key].tobytes(), key


def test_orbax_saves_and_restores_with_the_ties(tmp_path):
    """Identity is gone after a restore: the state's own ties carry it."""
    state, model = middle()
    arrays = oj.trainables(model)
    tree = {"state": state, "model": arrays}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", tree)
        checkpointer.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        restored = checkpointer.restore(tmp_path / "run", target)
    same_bits(restored["state"], state)
    loaded = {**restored["model"], "act": jnp.tanh}
    loaded["head"] = jnp.copy(loaded["embed"])  # two objects now
    after = run(restored["state"], loaded, batches(3, seed=4))
    expected = run(state, model, batches(3, seed=4))
    assert after[1]["head"] is after[1]["embed"]
    same_bits(after[0], expected[0])
    same_bits(after[1]["embed"], expected[1]["embed"])


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # of orbax
def test_orbax_restores_plain_dicts_without_a_target(tmp_path):
    state, _ = middle()
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", oj.state_to_dict(state))
        saved = checkpointer.restore(tmp_path / "run")
    same_bits(oj.state_from_dict(oj.setup(RULE, model_of()), saved), state)


def test_restored_into_another_sharding():
    state, _ = middle()
    saved = oj.state_to_dict(state)
    mesh = jax.make_mesh((3,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    here = jax.NamedSharding(mesh, jax.P("x"))
    model = model_of()
    model["embed"] = model["head"] = jax.device_put(model["embed"], here)
    model["bias"] = jax.device_put(model["bias"], here)
    again = oj.state_from_dict(oj.setup(RULE, model), saved)
    same_bits(again, state)
    moment = again.slots["embed"][-1].m
    assert moment.sharding.is_equivalent_to(here, 2)


def test_a_state_can_be_pickled():
    state, _ = middle()
    again = pickle.loads(pickle.dumps(state))
    same_bits(again, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)


def test_what_does_not_fit_is_named():
    """Nothing is half restored: one error lists all of it."""
    state, _ = middle()
    saved = oj.state_to_dict(state, flat=True)
    fresh = oj.setup(RULE, model_of())
    missing = {k: v for k, v in saved.items() if not k.endswith("embed/v")}
    odd = {**saved, "inner/own/slots/embed/average": np.zeros(2, np.float32)}
    wide = {**saved, "inner/own/slots/bias/average": np.zeros(3, np.float64)}
    for wrong, complaint in (
        (missing, "slots/embed/v': nothing saved"),
        ({**saved, "inner/x": np.zeros(2)}, "'inner/x': saved, but nothing"),
        (odd, "embed/average': float32[2], expected float32[3, 3]"),
        (wide, "bias/average': float64[3], expected float32[3]"),
        ({**saved, "version": np.int32(99)}, "version 99, expected 1"),
        ({}, "version 0, expected 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(complaint)):
            oj.state_from_dict(fresh, wrong)
    untied = model_of()
    untied["head"] = jnp.copy(untied["head"])
    with pytest.raises(ValueError, match="'head': was one array with 'embed'"):
        oj.state_from_dict(oj.setup(RULE, untied), saved)
    reverse = oj.state_to_dict(oj.setup(RULE, untied))
    with pytest.raises(ValueError, match="'head': is one array with 'embed', and was"):
        oj.state_from_dict(fresh, reverse)
