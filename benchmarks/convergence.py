"""Which rule to try first: `python -m benchmarks.convergence [--quick]`.

Two problems: a small transformer with a tied head on the source of Python's library
("text"), and a small convolutional net on scikit-learn's digits ("digits"). Every rule
takes the same number of steps, from the same initial models, on the same batches, each
at a learning rate of its own, which rises for 5 % of the steps and then falls to 0 as a
cosine.

The budget for tuning is small: three learning rates around the centre in
`benchmarks/contenders.py`, a factor of sqrt(10) apart, one run each, and up to four
more where the best is at an edge. No other hyperparameter is tuned. The best rate is
then run with other seeds (3), and those are what is reported; so the seed did not
choose the rate, but the held-out data did: they are validation losses, not test losses.

Runs are made one by one, not by `vmap`, which is no faster on few cores (the matrices
keep both busy) and would take both branches of what a rule does every few steps. A rule
is compiled once for each problem: learning rates are data.

Each finished run is written to `convergence.json` in --out, and never made again for
the same problem, rule, learning rate, seed and number of steps; remove the file when
rules or problems have changed. `convergence.png` has the curves.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from tqdm import tqdm

import optimjax as oj
from benchmarks import ranking
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.problems import PROBLEMS, Problem

LOOKS = 20  # at the validation loss, in a run
TIMED = (4, 9, 14)  # looks at which a stretch is timed beside one of `BASE`
GRID = (-1, 0, 1)  # factors of sqrt(10) from the centre
MORE = 4  # learning rates beyond the grid, at most
TUNING_SEED = 0  # of no run that is reported
BASE = "AdamW"  # what all are compared with
QUICK_STEPS = 60
QUICK = [BASE, "SGD, momentum", "Lion"]


class Key(NamedTuple):
    """What makes a run the same as another."""

    problem: str
    rule: str
    learning_rate: float
    seed: int
    steps: int


class Runs:
    """All runs there are, in a file that is whole at any time."""

    def __init__(self, path: Path):
        self.path = path
        found = json.loads(path.read_text())["runs"] if path.exists() else []
        self.by_key = {Key(*(r[name] for name in Key._fields)): r for r in found}

    def get(self, key: Key, make: Callable[[Key], dict[str, Any]]) -> dict[str, Any]:
        if key not in self.by_key:
            self.by_key[key] = key._asdict() | make(key)
            self.write()
        return self.by_key[key]

    def write(self, **more: Any) -> None:
        beside = self.path.with_suffix(".part")
        contents = {**more, "runs": list(self.by_key.values())}
        beside.write_text(json.dumps(contents, indent=1, allow_nan=False))
        beside.replace(self.path)


def falling(peak: Any, steps: Any, count: Any) -> Any:
    return rising(peak, steps, count) * (0.5 + 0.5 * jnp.cos(jnp.pi * count / steps))


def rising(peak: Any, steps: Any, count: Any) -> Any:
    return peak * jnp.minimum((count + 1) / (0.05 * steps), 1)


class Trainer:
    """Trains one problem by one rule, in stretches of steps between two looks."""

    def __init__(self, problem: Problem, contender: Contender, steps: int):
        self.problem, self.contender, self.steps = problem, contender, steps
        self.step = oj.make_step(problem.loss)
        self.evaluate = jax.jit(problem.loss)
        self.batches = jax.jit(partial(problem.batches, count=steps // LOOKS))
        self.carry = self.start(contender.centre, TUNING_SEED)
        self.stretch(*self.carry, jax.random.key(TUNING_SEED))  # compiles

    def start(self, rate: float, seed: int) -> tuple[oj.State, Any]:
        """At a learning rate that is data: another compiles nothing."""
        schedule = falling if self.contender.falls else rising
        rule = self.contender.make(Partial(schedule, rate, float(self.steps)))
        model = self.problem.init(jax.random.key(seed))
        return oj.setup(rule, model), model

    def stretch(self, state: Any, model: Any, key: Any) -> tuple[Any, Any, Any, float]:
        """(state, model, mean training loss, seconds of a step)."""
        batches = jax.block_until_ready(self.batches(key))
        begin = time.perf_counter()
        state, model, values = self.step.scan(state, model, *batches)
        jax.block_until_ready((state, values))
        seconds = (time.perf_counter() - begin) / (self.steps // LOOKS)
        return state, model, float(values.mean()), seconds

    def bytes_each(self) -> float:
        """Bytes of state for each number that is trained."""
        state, model = self.carry
        kept = sum(x.nbytes for x in jax.tree.leaves(state.inner))
        return kept / sum(x.size for x in oj.trainables(model).values())

    def run(self, key: Key, base: "Trainer") -> dict[str, Any]:
        """One run: losses at each look, until one is not finite; `final` is then None.

        `times` are seconds of a step, and of one of `base` right after it, because what
        else the machine does changes within minutes.
        """
        state, model = self.start(key.learning_rate, key.seed)
        training, validation, times = [], [], []
        keys = jax.random.split(jax.random.fold_in(jax.random.key(key.seed), 1), LOOKS)
        for i, batch_key in enumerate(keys):
            state, model, loss, seconds = self.stretch(state, model, batch_key)
            if i in TIMED:
                times.append([seconds, base.stretch(*base.carry, batch_key)[-1]])
            averaged = oj.eval_model(state, model)
            held_out = float(self.evaluate(averaged, *self.problem.held_out))
            if not (math.isfinite(loss) and math.isfinite(held_out)):
                break
            training.append(loss)
            validation.append(held_out)
        return {
            "final": validation[-1] if len(validation) == LOOKS else None,
            "training": training,
            "validation": validation,
            "times": times,
            "state_bytes": self.bytes_each(),
        }


def rate_at(centre: float, k: int) -> float:
    """k factors of sqrt(10) from the centre, to 3 digits, so that it is one key."""
    return float(f"{centre * 10 ** (k / 2):.3g}")


def tuned(final: Callable[[int], float]) -> int:
    """The k whose final loss is the least: of three, and beyond while at an edge."""
    finals = {k: final(k) for k in GRID}

    def best() -> int:
        return min(sorted(finals), key=finals.__getitem__)

    for _ in range(MORE):
        if min(finals) < best() < max(finals):
            break
        beyond = best() + (1 if best() == max(finals) else -1)
        finals[beyond] = final(beyond)
    return best()


def compare(
    runs: Runs, name: str, rule: str, steps: int, seeds: int, bar: Any, trainers: Any
) -> list[dict[str, Any]]:
    """The reported runs of one rule on one problem, at its best learning rate."""
    problem, contender = PROBLEMS[name](), CONTENDERS[rule]

    def trainer(of: str) -> Trainer:
        if (name, of) not in trainers:
            for each in [each for each in trainers if each != (name, BASE)]:
                del trainers[each]  # its compiled programs
            trainers[name, of] = Trainer(problem, CONTENDERS[of], steps)
        return trainers[name, of]

    def run(rate: float, seed: int) -> dict[str, Any]:
        bar.set_postfix_str(f"{name}, {rule}, {rate:g}", refresh=True)
        found = runs.get(
            Key(name, rule, rate, seed, steps),
            lambda key: trainer(rule).run(key, trainer(BASE)),
        )
        bar.update()
        return found

    def final(k: int) -> float:
        bar.total += k not in GRID  # those are planned
        found = run(rate_at(contender.centre, k), TUNING_SEED)["final"]
        return math.inf if found is None else found

    rate = rate_at(contender.centre, tuned(final) if contender.tuned else 0)
    return [run(rate, TUNING_SEED + 1 + seed) for seed in range(seeds)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rules, few steps")
    parser.add_argument("--rules", nargs="+", choices=CONTENDERS, metavar="RULE")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=[*PROBLEMS])
    parser.add_argument(
        "--steps", type=int, help=f"rounded up to a multiple of {LOOKS}"
    )
    parser.add_argument("--seeds", type=int, help="of the reported runs")
    parser.add_argument("--out", type=Path, default=Path())
    args = parser.parse_args(argv)
    args.rules = args.rules or (QUICK if args.quick else list(CONTENDERS))
    args.rules = list(dict.fromkeys([BASE, *args.rules]))  # it comes first, and always
    args.seeds = args.seeds or (2 if args.quick else 3)
    args.steps = args.steps or (QUICK_STEPS if args.quick else None)
    return args


def machine() -> dict[str, Any]:
    device = str(jax.devices()[0])
    return {"device": device, "cores": os.cpu_count(), "jax": jax.__version__}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(args.out / "convergence.json")
    tried = sum(CONTENDERS[rule].tuned for rule in args.rules)
    planned = len(args.problems) * (len(GRID) * tried + args.seeds * len(args.rules))
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    steps = {
        name: LOOKS * math.ceil((args.steps or PROBLEMS[name]().steps) / LOOKS)
        for name in args.problems
    }
    with tqdm(total=planned, unit="run") as bar:
        for name in args.problems:
            trainers: dict[tuple[str, str], Trainer] = {}
            results[name] = {
                rule: compare(runs, name, rule, steps[name], args.seeds, bar, trainers)
                for rule in args.rules
            }
    summary = {name: ranking.rows(each, BASE) for name, each in results.items()}
    runs.write(machine=machine(), summary=summary)
    print(*(f"{key}: {value}" for key, value in machine().items()), sep="\n")
    for name, rows in summary.items():
        unit = PROBLEMS[name]().unit
        print(f"\n{name}: {steps[name]} steps, {args.seeds} seeds\n")
        print(ranking.table(rows, unit, BASE))
    units = {name: PROBLEMS[name]().unit for name in results}
    ranking.chart(results, summary, units, args.out / "convergence.png")
    print(f"\nconvergence.json and convergence.png are in {args.out.resolve()}")
    return summary


if __name__ == "__main__":
    main()
