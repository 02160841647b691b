"""Times of several peers on one model and rule, side by side in one process."""

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.monitoring
import numpy as np

from benchmarks.models import Model
from benchmarks.peers import Peer, Run

SCANNED = 64  # steps in one dispatch
SPINNING = 0.03  # seconds that threads may go on to spin


@contextlib.contextmanager
def compiling() -> Iterator[dict[str, list[float]]]:
    """Seconds of each tracing, lowering and compilation inside."""
    seen: dict[str, list[float]] = {"trace": [], "lower": [], "compile": []}
    names = {
        "/jax/core/compile/jaxpr_trace_duration": "trace",
        "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
        "/jax/core/compile/backend_compile_duration": "compile",
    }

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event in names:
            seen[names[event]].append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class First(NamedTuple):
    """Seconds of the first call; `trace` is with lowering to XLA's language."""

    trace: float
    compile: float
    whole: float


def first_call(run: Run, grads: Any) -> tuple[First, Any]:
    with compiling() as seen, (run.tracing or contextlib.nullcontext)():
        start = time.perf_counter()
        carry = jax.block_until_ready(run.step(run.carry, grads))
        whole = time.perf_counter() - start
    # Inner functions are traced within the outermost, whose time is the longest.
    trace = max(seen["trace"], default=0.0) + sum(seen["lower"])
    return First(trace, sum(seen["compile"]), whole), carry


def in_turn(
    calls: Mapping[str, Callable[[], Any]], budget: float, rounds: int = 31
) -> dict[str, list[float]]:
    """Seconds of a call of each, taken in turn until `budget` seconds are gone.

    What is short is called several times at once, for 10 ms at least. Five rounds are
    taken, however long. The order is another in each round, and before each peer there
    is a call that is not timed, because whoever comes next would pay for what the last
    one left behind: torch's threads spin for milliseconds after their work.
    """
    often = {}
    for name, call in calls.items():
        start = time.perf_counter()
        jax.block_until_ready(call())
        often[name] = max(1, round(0.01 / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    names, shuffle = list(calls), random.Random(0)
    begin = time.perf_counter()
    for done in range(rounds):
        if done >= 5 and time.perf_counter() - begin > budget:
            break
        for name in shuffle.sample(names, len(names)):
            call = calls[name]
            jax.block_until_ready(call())
            start = time.perf_counter()
            for _ in range(often[name]):
                out = call()
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / often[name])
            if "torch" in name:
                time.sleep(SPINNING)
    return times


def repeated(step: Callable[[Any, Any], Any], carry: Any, grads: Any) -> Any:
    """A call that makes the next step."""
    held = [carry]

    def call() -> Any:
        held[0] = step(held[0], grads)
        return held[0]

    return call


def ratio(times: Mapping[str, list[float]], who: str, to: str) -> list[float] | None:
    """How many times as fast `who` is as `to`: median and quartiles over rounds."""
    if who not in times or to not in times:
        return None
    ratios = [b / a for a, b in zip(times[who], times[to], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [middle, low, high]


def check(title: str, ends: Mapping[str, Any], first: str, tolerance: float) -> None:
    """Parameters are equal before anything is timed."""
    for name, params in ends.items():
        for key, x in params.items():
            a, b = np.asarray(x, np.float32), np.asarray(ends[first][key], np.float32)
            apart = float(np.max(np.abs(a - b)))
            if not apart <= tolerance:
                raise SystemExit(
                    f"{title}: {name} and {first} differ by {apart:.1e} in {key}, "
                    f"expected {tolerance:.0e} at most"
                )


def case(
    title: str, model: Model, rule: str, peers: Mapping[str, Peer], budget: float
) -> dict[str, Any]:
    """All figures of one rule on one model."""
    jax.clear_caches()
    grads = model.arrays(seed=1)
    start = {name: np.asarray(x) for name, x in model.arrays(seed=0).items()}
    runs, calls, first, state = {}, {}, {}, {}
    ends = {}
    for name, peer in peers.items():
        run = peer(rule, {key: jax.numpy.array(x) for key, x in start.items()})
        if run is None:
            continue
        first[name], carry = first_call(run, grads)
        run = runs[name] = run._replace(carry=carry)
        for _ in range(2):
            carry = run.step(carry, grads)
        params = run.params(carry)
        if params is not None:
            ends[name] = {key: np.array(x) for key, x in params.items()}
            kept = sum(x.nbytes for x in jax.tree.leaves(carry) if hasattr(x, "nbytes"))
            state[name] = kept - sum(x.nbytes for x in params.values())
        calls[name] = repeated(run.step, carry, grads)
    # Three steps of 1e-3 in float32. In bfloat16 optax keeps 16-bit moments, and a
    # parameter of 1 may be rounded the other way, by 2 ** -7.
    check(title, ends, "optimjax", 1e-5 if model.dtype == "float32" else 0.04)
    del ends
    step = in_turn(calls, budget)
    step = {name: [runs[name].scale * t for t in times] for name, times in step.items()}
    return {
        "model": title,
        "rule": rule,
        "first": {name: each._asdict() for name, each in first.items()},
        "step": step,
        "state_bytes": {name: n for name, n in state.items() if "torch" not in name},
    }


def scans(
    model: Model, rule: str, peers: Mapping[str, Peer], budget: float
) -> dict[str, list[float]]:
    """Seconds of a step, of 64 in one dispatch."""
    grads, calls = model.arrays(seed=1), {}
    for name, peer in peers.items():
        run = peer(rule, model.arrays(seed=0))
        assert run is not None

        def many(carry: Any, grads: Any, run: Run = run) -> Any:
            def body(carry: Any, _: Any) -> Any:
                return run.step(carry, grads), None

            return jax.lax.scan(body, carry, None, SCANNED)[0]

        step = jax.jit(many, donate_argnums=0)
        calls[name] = repeated(step, step(run.carry, grads), grads)
    times = in_turn(calls, budget)
    return {name: [t / SCANNED for t in each] for name, each in times.items()}
