"""optimjax beside optax, torch and loops by hand: `python -m benchmarks [--quick]`.

Every peer makes the same updates (checked before they are timed), in one process and in
turn. Times on a busy machine are noise; ratios are less so, and are given with their
quartiles. `benchmarks.json`, written case by case, and `benchmarks.png` go to --out
DIR; with --resume a run goes on from the cases that are there.
"""

import argparse
import json
import os
import platform
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

import optimjax as oj
from benchmarks import figures, special
from benchmarks.measure import case, ratio, scans
from benchmarks.models import MODELS
from benchmarks.peers import OURS, PEERS

QUICK = {"models": ["MLP", "300x(64,64)"], "rules": ["SGDm", "Adam"]}


def machine() -> dict[str, Any]:
    return {
        "device": str(jax.devices()[0]),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "optax": version("optax"),
        "torch": version("torch") if "torch fused" in PEERS else None,
        "kernels": oj.kernels.status(),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models, two rules")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL")
    parser.add_argument("--rules", nargs="+", choices=OURS, metavar="RULE")
    parser.add_argument("--budget", type=float, help="seconds for each table cell")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--resume", action="store_true", help="keep cases of --out")
    args = parser.parse_args(argv)
    models = args.models or (QUICK["models"] if args.quick else list(MODELS))
    rules = args.rules or (QUICK["rules"] if args.quick else list(OURS))
    budget = args.budget or (2.0 if args.quick else 3.0)
    results: dict[str, Any] = {"machine": machine(), "cases": []}
    print(*(f"{key}: {value}" for key, value in results["machine"].items()), sep="\n")
    args.out.mkdir(parents=True, exist_ok=True)
    written = args.out / "benchmarks.json"
    if args.resume and written.exists():
        results["cases"] = json.loads(written.read_text())["cases"]
    kept = {(each["model"], each["rule"]) for each in results["cases"]}

    wanted = [(name, rule) for name in models for rule in rules]
    for name, rule in tqdm([each for each in wanted if each not in kept], unit="case"):
        results["cases"].append(case(name, MODELS[name], rule, PEERS, budget))
        written.write_text(json.dumps(results, indent=1))
    print("\nA step: median, and how many times as long others take (quartiles)\n")
    print(figures.steps(results["cases"]))
    print("\nTracing + compilation (the whole first call), seconds\n")
    print(figures.compiles(results["cases"]))

    some = {name: PEERS[name] for name in ("optimjax", "optax", "by hand")}
    results["scan"] = {}
    for name in models:
        if MODELS[name].numbers < 3e7:
            times = scans(MODELS[name], "Adam", some, budget)
            results["scan"][name] = times
    print("\nA step of Adam among 64 in one scan; optax's, one by one, in proportion\n")
    print(
        figures.table(
            ("model", *some, "optax's step / our scan"),
            (
                [
                    name,
                    *(figures.seconds(statistics.median(t)) for t in times.values()),
                    one_by_one(results, name),
                ]
                for name, times in results["scan"].items()
            ),
        )
    )
    extra(results, args.quick, budget)
    written.write_text(json.dumps(results, indent=1))
    figures.chart(results["cases"], args.out / "benchmarks.png")
    print(f"\nbenchmarks.json and benchmarks.png are in {args.out.resolve()}")
    return results


def one_by_one(results: dict[str, Any], model: str) -> str:
    for each in results["cases"]:
        if (each["model"], each["rule"]) == (model, "Adam"):
            ours = statistics.median(results["scan"][model]["optimjax"])
            return f"{statistics.median(each['step']['optax']) / ours:.2f}x"
    return "–"


def extra(results: dict[str, Any], quick: bool, budget: float) -> None:
    counts = results["compilations"] = special.compilations()
    print("\nCompilations in five more steps, with a schedule / with other rates:")
    print(*(f"  {who}: {a} / {b}" for who, (a, b) in counts.items()), sep="\n")

    results["make_step"] = {}
    print("\nA call of make_step's step / of the compiled function in it (shortest):")
    for leaves in (6, 148) if quick else (6, 148, 1000):
        ours, bare = results["make_step"][leaves] = special.make_step_overhead(leaves)
        print(
            f"  {leaves} leaves: {figures.seconds(ours)} / {figures.seconds(bare)}; "
            f"{figures.seconds(max(ours - bare, 0))} more"
        )

    name = "MLP" if quick else "ResNet-50"
    times = results["wrappers"] = special.wrappers(MODELS[name], budget)
    print(
        f"\nAdamW on {name} within a wrapper, in proportion to AdamW alone (quartiles):"
    )
    for wrapper in (*special.WRAPPERS, *special.OPTAX_WRAPPERS):
        print(f"  {wrapper}: {figures.spread(ratio(times, 'alone', wrapper))}")
    if quick:
        return

    results["peak_memory"] = {}
    print("\nPeak memory of a process with Adam on 20 M numbers, above its start:")
    for peer in ("optimjax", "optimjax, XLA", "optax", "by hand"):
        most = special.peak_memory("20M", "Adam", peer)
        results["peak_memory"][peer] = most
        print(f"  {peer}: {most / 1e6:.0f} MB")

    found = results["tied"] = special.tied(budget)
    print("\nGPT-2 whose head is its embedding, AdamW, the whole step donated:")
    for who, (state, model) in found["bytes"].items():
        time = figures.seconds(statistics.median(found["step"][who]))
        print(
            f"  {who}: {time}, state {state / 1e6:.0f} MB, model {model / 1e6:.0f} MB"
        )
    print(
        "  optax takes", figures.spread(ratio(found["step"], "optimjax", "optax")), "x"
    )
    print("  one array donated twice:", found["optax, one array donated twice"])


if __name__ == "__main__":
    main()
