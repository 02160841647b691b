"""optimjax beside optax and a hand-written step: `python -m benchmarks [--quick]`.

One process, interleaved repeats, medians. Results are compared before they are timed.
Times on a busy machine are noise; the ratios are less so.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optimjax as oj

MODELS = {
    "MLP 784-512-512-10": [(784, 512), (512,), (512, 512), (512,), (512, 10), (10,)],
    "148 of (64, 64)": [(64, 64)] * 148,
    "300 of (64,)": [(64,)] * 300,
}
RULES = {
    "SGD, momentum": (oj.SGD(1e-3, momentum=0.9), optax.sgd(1e-3, momentum=0.9)),
    "Adam": (oj.Adam(1e-3), optax.adam(1e-3)),
    "AdamW, clipped": (
        oj.Chain(oj.ClipByGlobalNorm(1.0), oj.AdamW(1e-3)),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    ),
}


def loss(model, scale):
    return scale * sum(jnp.sum(x * x) for x in model.values())


def optimjax_loop(rule, model):
    step, held = oj.make_step(loss, donate=True), [oj.setup(rule, model), model]

    def run():
        held[0], held[1], value = step(held[0], held[1], 0.5)
        return held[1], value

    return run


def optax_loop(rule, model):
    held = [rule.init(model), model]

    @jax.jit
    def step(state, model, scale):
        value, grads = jax.value_and_grad(loss)(model, scale)
        updates, state = rule.update(grads, state, model)
        return state, optax.apply_updates(model, updates), value

    step = jax.jit(step, donate_argnums=(0, 1))

    def run():
        held[0], held[1], value = step(held[0], held[1], 0.5)
        return held[1], value

    return run


def first_call(run):
    """Seconds to trace, compile and run, and the model after it."""
    start = time.perf_counter()
    model, _ = jax.block_until_ready(run())
    return time.perf_counter() - start, jax.tree.map(np.asarray, model)


def step_times(loops, repeats, calls):
    """Median microseconds of a call of each loop, taken in turn."""
    times = {name: [] for name in loops}
    for _ in range(repeats):
        for name, run in loops.items():
            start = time.perf_counter()
            for _ in range(calls):
                out = run()
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few repeats only")
    quick = parser.parse_args(argv).quick
    repeats, calls = (3, 5) if quick else (15, 20)
    header = ("model", "rule", "first call", "optax / ours", "step", "optax / ours")
    print("{:20} {:15} {:>10} {:>13} {:>10} {:>13}".format(*header))
    results = []
    for name, shapes in MODELS.items():
        for title, (ours, theirs) in RULES.items():
            rng = np.random.default_rng(0)
            numbers = [rng.normal(size=s).astype(np.float32) for s in shapes]
            loops, first, after = {}, {}, {}
            for who, make, rule in (
                ("optimjax", optimjax_loop, ours),
                ("optax", optax_loop, theirs),
            ):
                model = {f"x{i}": jnp.array(x) for i, x in enumerate(numbers)}
                loops[who] = make(rule, model)
                first[who], after[who] = first_call(loops[who])
            for key, x in after["optimjax"].items():
                np.testing.assert_allclose(x, after["optax"][key], rtol=1e-4, atol=1e-6)
            step = step_times(loops, repeats, calls)
            results.append((name, title, first, step))
            print(
                f"{name:20} {title:15} {first['optimjax']:8.2f} s "
                f"{first['optax'] / first['optimjax']:12.2f}x "
                f"{step['optimjax']:7.0f} us {step['optax'] / step['optimjax']:12.2f}x",
                flush=True,
            )
    return results


if __name__ == "__main__":
    main()
