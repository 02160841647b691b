"""Save a run with Orbax, resume it in a new process, and end in the very same bits.

One array of the model is in two places. A restored model has lost that, two equal
arrays are two objects; the state has not.

    pip install -e ".[tests]"
    python examples/with_orbax.py
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import digits
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import optimjax as oj

SAVED, STEPS = 150, 300


def start():
    """A network that uses one layer twice, and its state."""
    keys = jax.random.split(jax.random.key(0), 2)
    w = 0.15 * jax.random.normal(keys[0], (64, 64))
    model = {"encode": w, "again": w, "b": jnp.zeros(64)}
    model["out"] = 0.15 * jax.random.normal(keys[1], (64, 10))
    schedule = oj.schedules.WarmupCosine(peak=5e-3, warmup_steps=20, steps=STEPS)
    return oj.setup(oj.EMA(oj.AdamW(schedule), decay=0.98), model), model


def predict(model, x):
    h = jnp.tanh(x @ model["encode"] + model["b"])
    return jnp.tanh(h @ model["again"] + model["b"]) @ model["out"]


STEP = oj.make_step(lambda m, x, y: digits.cross_entropy(predict(m, x), y))


def train(state, model, since, until):
    for count, (x, y) in enumerate(digits.batches(until)):
        if count >= since:
            state, model, _ = STEP(state, model, x, y)
    return state, model


def resume(folder):
    """What the new process does."""
    state, model = start()  # as at the start of the run, for their structure
    target = jax.eval_shape(lambda: (state, model))
    with ocp.StandardCheckpointer() as checkpointer:
        state, model = checkpointer.restore(folder / "middle", target)
    print("a tie by identity after the restore:", model["encode"] is model["again"])
    state, model = train(state, model, SAVED, STEPS)
    print("and after a step, of the state's ties:", model["encode"] is model["again"])
    np.savez(folder / "end.npz", **model)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.resume:
        return resume(args.resume)
    digits.versions("orbax-checkpoint")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state, model = train(*start(), 0, SAVED)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "middle", (state, model))
        subprocess.run([sys.executable, __file__, "--resume", folder], check=True)
        with np.load(folder / "end.npz") as end:
            resumed = dict(end)
    state, model = train(state, model, SAVED, STEPS)  # as if nothing had happened
    same = all(np.array_equal(model[name], x) for name, x in resumed.items())
    print(f"{STEPS - SAVED} steps in a new process, the very same bits:", same)
    averaged = oj.eval_model(state, model)
    accuracy = digits.report("the average", predict(averaged, digits.x_test))
    return {"same": same, "accuracy": accuracy}


if __name__ == "__main__":
    main()
