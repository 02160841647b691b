"""Figures beside the time of a step: memory, overhead, ties, what wrappers cost."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optimjax as oj
from benchmarks.measure import compiling, in_turn, repeated
from benchmarks.models import MODELS, Model, gpt2, many
from benchmarks.peers import LR, OPTAX, OURS, PEERS, by_optax, donating, optax_


def peak_memory(model: str, rule: str, peer: str) -> int:
    """Bytes that a new process takes at most for three updates (Linux)."""
    command = [sys.executable, "-m", "benchmarks.special", model, rule, peer]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


def _peak(model: str, rule: str, peer: str) -> None:
    def most() -> int:  # getrusage would begin at what the parent took
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])

    # All that is imported and compiled is there before the arrays are.
    small = Model({"x": (8,)}).arrays(seed=0)
    run = PEERS[peer](rule, small)
    assert run is not None
    run.step(run.carry, Model({"x": (8,)}).arrays(seed=1))
    before = most()
    zeros = {
        k: jnp.zeros(s, MODELS[model].dtype) for k, s in MODELS[model].shapes.items()
    }
    run = PEERS[peer](rule, jax.tree.map(jnp.copy, zeros))
    assert run is not None
    carry, grads = run.carry, zeros
    run = run._replace(carry=None)
    for _ in range(3):
        carry = jax.block_until_ready(run.step(carry, grads))
    print(most() - before)


def compilations(rule: str = "AdamW", steps: int = 5) -> dict[str, tuple[int, int]]:
    """Compilations after the first step: with a schedule; each with another rate."""
    model = Model({"x": (8,)})
    grads = model.arrays(seed=1)
    step = jax.jit(oj.update)

    def schedule(count: Any) -> Any:
        return LR / (1 + count)

    def ours(rate: Any, change: bool) -> int:
        params = model.arrays(seed=0)
        state = oj.setup(OURS[rule](rate), params)
        state, params = step(state, params, grads)
        with compiling() as seen:
            for i in range(steps):
                if change:
                    state = oj.adjust(state, learning_rate=LR * (i + 2))
                state, params = step(state, params, grads)
        return len(seen["compile"])

    def theirs(rate: Any, change: bool) -> int:
        params, tx = model.arrays(seed=0), OPTAX[rule](rate)
        run = jax.jit(functools.partial(by_optax, tx))
        carry = run((tx.init(params), params), grads)
        with compiling() as seen:
            for i in range(steps):
                if change:  # a number is a constant of the program
                    tx = OPTAX[rule](LR * (i + 2))
                    run = jax.jit(functools.partial(by_optax, tx))
                carry = run(carry, grads)
        return len(seen["compile"])

    return {
        "optimjax": (ours(schedule, False), ours(LR, True)),
        "optax": (theirs(schedule, False), theirs(LR, True)),
    }


def make_step_overhead(leaves: int) -> tuple[float, float]:
    """Seconds of a call of `make_step`'s step of Adam, on arrays of one number; and of
    the compiled function in it alone."""
    model = Model(many(leaves, (1,))).arrays(seed=0)
    step = oj.make_step(lambda model, scale: scale * sum(x[0] for x in model.values()))
    held: list[Any] = [oj.setup(oj.Adam(LR), model), model]
    compiled, given = step._one, {}

    def ours() -> Any:
        *held[:], value = step(*held, 1.0)
        return value

    def noting(*args: Any, **static: Any) -> Any:
        given.update(args=args, static=static)
        return compiled(*args, **static)

    vars(step)["_one"] = noting
    ours()
    vars(step)["_one"] = compiled
    inner, params, *others = given["args"]
    flat = [inner, params]

    def alone() -> Any:
        *flat[:], value = compiled(*flat, *others, **given["static"])
        return value

    times = in_turn({"ours": ours, "alone": alone}, budget=2.0)
    return min(times["ours"]), min(times["alone"])


@jax.custom_vjp
def given(model: Any, grads: Any) -> Any:
    """A loss of 0 at no cost, whose gradients are `grads`."""
    return jnp.zeros(())


def _backwards(grads: Any, value: Any) -> Any:
    return grads, jax.tree.map(jnp.zeros_like, grads)


given.defvjp(lambda model, grads: (given(model, grads), grads), _backwards)


def tied(budget: float, shapes: Any = None) -> dict[str, Any]:
    """GPT-2 whose head is its embedding: a whole step, donated, where optax has two."""
    shapes = shapes or gpt2()
    model, grads = Model(shapes).arrays(seed=0), Model(shapes).arrays(seed=1)
    model["head"], grads["head"] = model["wte"], grads["wte"]
    apart = jax.tree.map(jnp.copy, model)
    tx, step = OPTAX["AdamW"](), oj.make_step(given, donate=True)
    held = {
        "optimjax": [oj.setup(OURS["AdamW"](), model), model],
        "optax": [tx.init(apart), apart],
    }

    def whole_step(carry: Any, grads: Any) -> Any:
        return by_optax(tx, carry, jax.grad(given)(carry[1], grads))

    def arrays(tree: Any) -> int:
        own = {id(x): x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, "nbytes")}
        return sum(own.values())

    size = {name: [arrays(part) for part in each] for name, each in held.items()}
    calls = {
        "optimjax": repeated(
            lambda carry, grads: step(*carry, grads)[:2], held.pop("optimjax"), grads
        ),
        "optax": repeated(donating(whole_step), held.pop("optax"), grads),
    }
    del model, apart
    for call in calls.values():
        call()
    return {
        "bytes": size,  # of the state and of the model
        "step": in_turn(calls, budget),
        "optax, one array donated twice": donated_twice(),
    }


def donated_twice() -> str:
    """What optax does with one array in two places, when both are donated."""
    w = jnp.ones((4, 4))
    params = {"embedding": w, "head": w}
    run = optax_("AdamW", params)
    try:
        jax.block_until_ready(run.step(run.carry, params))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return "no error"


WRAPPERS: dict[str, Callable[[oj.Rule], oj.Rule]] = {
    "Monitor": oj.Monitor,
    "EMA": oj.EMA,
    "ClipByGlobalNorm": lambda rule: oj.Chain(oj.ClipByGlobalNorm(), rule),
    "SkipNonFinite": oj.SkipNonFinite,
    "Accumulate, of 4": oj.Accumulate,
    "Lookahead": oj.Lookahead,
    "ScheduleFree": oj.ScheduleFree,
    "MixedPrecision": oj.MixedPrecision,
}


OPTAX_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "optax": lambda tx: tx,
    "optax, clip_by_global_norm": lambda tx: optax.chain(
        optax.clip_by_global_norm(1.0), tx
    ),
    "optax, apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "optax, MultiSteps, of 4": lambda tx: optax.MultiSteps(tx, 4),
}


def wrappers(model: Model, budget: float) -> dict[str, list[float]]:
    """Seconds of four updates of AdamW, alone and within each wrapper."""
    update, grads = donating(lambda carry, g: oj.update(*carry, g)), model.arrays(1)
    calls = {}

    def add(name: str, step: Callable[[Any, Any], Any], carry: Any) -> None:
        one = repeated(step, step(carry, grads), grads)
        calls[name] = lambda: [one() for _ in range(4)][-1]

    for name, wrap in {"alone": lambda rule: rule, **WRAPPERS}.items():
        params = model.arrays(seed=0)
        add(name, update, (oj.setup(wrap(OURS["AdamW"]()), params), params))
    for name, wrap in OPTAX_WRAPPERS.items():
        params, tx = model.arrays(seed=0), wrap(OPTAX["AdamW"]())
        add(name, donating(functools.partial(by_optax, tx)), (tx.init(params), params))
    return in_turn(calls, budget)


if __name__ == "__main__":
    _peak(*sys.argv[1:])
