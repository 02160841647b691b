"""Every rule at work: where it goes on two landscapes, and how fast on digits.

    python examples/gallery.py [--out DIR]

draws two pictures:

* paths.png: the way of each rule over a narrow bowl and through the curved valley of
  Rosenbrock, from the same start to the minimum;
* digits.png: the loss of logistic regression on scikit-learn's digits, less the least
  there is, step by step, for each family of rules beside all the others.

It takes about a minute on two CPU cores. The hyperparameters are in `TUNED`, found by a
sweep over learning rates 1, 2, 3, 5 times powers of ten. They show that each rule gets
there, not which one is best: three problems this small, none of them stochastic, say
nothing about that. A rule that needs no tuning (Rprop, L-BFGS) or one for large batches
and deep networks (LARS, LAMB, NovoGrad) looks as good here as its rivals, no better.

All learning rates fall in a straight line to 0. Rules whose steps have a length of
their own (signs, trust ratios) would circle around the minimum for ever without.
"""

import argparse
import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from matplotlib.figure import Figure  # not pyplot: it needs no display
from scipy.optimize import minimize
from sklearn.datasets import load_digits

import optimjax as oj

# Problems ---------------------------------------------------------------------------

START = np.array([-1.2, 1.0], np.float32)
MINIMA = {"bowl": (1.0, 0.5), "valley": (1.0, 1.0)}


def landscape(model, valley):
    """The loss, the valley's or the bowl's; and the point, which makes the path."""
    x = model["x"] if len(model["x"]) == 2 else model["x"][0]  # a matrix of one row
    a, b = x
    rosenbrock = (1 - a) ** 2 + 100 * (b - a**2) ** 2
    along, across = turned(a - 1.0, b - 0.5)
    bowl = 0.5 * along**2 + 50 * across**2  # condition number 100
    return jnp.where(valley, rosenbrock, bowl), x


def turned(a, b):
    """The coordinates of a point along axes that are turned by 30 degrees."""
    cos, sin = np.sqrt(0.75).item(), 0.5
    return a * cos + b * sin, b * cos - a * sin


def pixels():
    """Every sixth of scikit-learn's digits: images (300, 64) in [0, 1], and digits."""
    digits = load_digits()
    return digits.data[::6].astype(np.float32) / 16, digits.target[::6]


def first_weights():
    rng = np.random.default_rng(0)
    # Not 0: a trust ratio is in proportion to the norm of what it moves.
    shapes = {"w": (64, 10), "b": (1, 10)}
    return {
        name: 0.1 * jnp.asarray(rng.normal(size=s), jnp.float32)
        for name, s in shapes.items()
    }


def digits(model, images, labels):
    """Cross-entropy of logistic regression; a penalty, so that there is a least."""
    log_p = jax.nn.log_softmax(images @ model["w"] + model["b"])
    chosen = jnp.take_along_axis(log_p, labels[:, None], axis=1)
    return 0.005 * jnp.sum(model["w"] ** 2) - jnp.mean(chosen)


@functools.cache
def least_digits():
    """The least loss on digits, by SciPy, which knows nothing of our rules."""
    images, labels = pixels()
    start, unravel = ravel_pytree(first_weights())
    loss = jax.jit(jax.value_and_grad(lambda v: digits(unravel(v), images, labels)))

    def in_double(v):
        value, slope = loss(jnp.asarray(v, jnp.float32))
        return float(value), np.asarray(slope, np.float64)

    found = minimize(in_double, start, jac=True, method="L-BFGS-B", tol=1e-12)
    return found.fun


# Rules ------------------------------------------------------------------------------


class Tuned(NamedTuple):
    """Where the learning rate starts, on each problem, and what else is not default."""

    bowl: float | None
    valley: float | None
    digits: float | None
    options: dict[str, Any] | None = None
    steps: dict[str, int] | None = None


STEPS = {"bowl": 5000, "valley": 5000, "digits": 200}
# How far above its least each loss may end: the table is wrong, or the rule, if it
# does not. They start at 119, 24 and 2.5.
ENOUGH = {"bowl": 1e-3, "valley": 1e-2, "digits": 1e-2}
FEW = {"bowl": 100, "valley": 100, "digits": 50}

TUNED = {
    "gradients": {
        "SGD": Tuned(0.01, 0.003, 5.0),
        "Momentum": Tuned(0.005, 0.001, 1.0),
        "ASGD": Tuned(0.01, 0.003, 5.0),
        "NoisySGD": Tuned(0.01, 0.003, 5.0, {"eta": 1e-4}),
        "OptimisticGradientDescent": Tuned(
            0.005, 0.001, 2.0, steps={"bowl": 15_000, "valley": 15_000}
        ),
        "PolyakSGD": Tuned(0.1, 0.5, 5.0),
        "LBFGS": Tuned(None, None, None, steps=FEW),
    },
    "signs and trust ratios": {
        "SignSGD": Tuned(0.005, 0.002, 0.01),
        "Signum": Tuned(0.005, 0.005, 0.03),
        "Lion": Tuned(0.02, 0.005, 0.03),
        "Rprop": Tuned(0.01, 0.01, 0.01),
        "Fromage": Tuned(0.05, 0.05, 0.1),
        "LARS": Tuned(2.0, 1.0, 10.0),
        "LAMB": Tuned(0.02, 0.02, 0.05),
        "NovoGrad": Tuned(0.005, 0.001, 0.05),
    },
    "Adam's kin": {
        "Adam": Tuned(0.1, 0.05, 0.1),
        "NAdam": Tuned(0.1, 0.05, 0.3),
        "AMSGrad": Tuned(0.5, 0.5, 1.0),
        "Adamax": Tuned(0.3, 0.2, 0.5),
        "RAdam": Tuned(0.01, 0.002, 0.5, {"b2": 0.9}),
        "AdaBelief": Tuned(0.1, 0.05, 0.1),
        "Yogi": Tuned(0.3, 0.1, 0.1),
    },
    "Adam's kin, weight decay apart": {
        "AdamW": Tuned(0.1, 0.05, 0.1),
        "NAdamW": Tuned(0.1, 0.05, 0.3),
        "AMSGradW": Tuned(0.5, 0.5, 1.0),
        "AdamaxW": Tuned(0.3, 0.2, 0.5),
        "RAdamW": Tuned(0.01, 0.002, 0.5, {"b2": 0.9}),
        "AdaBeliefW": Tuned(0.1, 0.05, 0.1),
    },
    "Adam's descendants: momentum": {
        "ADOPT": Tuned(2.0, 1.0, 0.2),
        "AdEMAMix": Tuned(0.5, 0.1, 0.1),
        "SimplifiedAdEMAMix": Tuned(0.002, 0.002, 0.01, {"b1": 0.9}),
        "LaProp": Tuned(1.0, 0.1, 0.1),
        "MADGRAD": Tuned(0.1, 0.01, 1.0),
        "Tiger": Tuned(0.002, 0.002, 0.02),
    },
    "Adam's descendants: scale": {
        "AdamAtan2": Tuned(0.5, 0.1, 0.1),
        "StableAdam": Tuned(0.5, 0.005, 0.1),
        "AdaBound": Tuned(0.2, 0.2, 0.1, {"final_rate": 0.01, "gamma": 1e-4}),
        "ACProp": Tuned(0.02, 0.01, 0.01, {"b2": 0.9}),
        "Grams": Tuned(0.2, 0.05, 0.1),
        "AdamP": Tuned(0.5, 0.2, 0.1),
        "SGDP": Tuned(0.01, 0.002, 1.0),
    },
    "sums of squares": {
        "AdaGrad": Tuned(1.0, 0.5, 2.0),
        "AdaDelta": Tuned(10.0, 1.0, 20.0),
        "RMSProp": Tuned(0.03, 0.01, 0.1),
        "SM3": Tuned(2.0, 3.0, 1.0),
        "Adafactor": Tuned(0.1, 0.02, 0.1, {"min_dim_size_to_factor": 2}),
    },
    "matrices": {
        "Muon": Tuned(0.002, 0.005, 0.1),
        "NorMuon": Tuned(0.002, 0.01, 0.1),
        "AdaMuon": Tuned(0.01, 0.01, 0.1),
        "SOAP": Tuned(0.002, 0.005, 0.2),
        "Shampoo": Tuned(0.01, 0.005, 0.005),
        "SPlus": Tuned(0.001, 0.05, 2.0, {"every": 10}),
        "PSGDKron": Tuned(0.002, 0.002, 0.05),
        "Dion": Tuned(0.001, 0.001, 0.2),
        "Scion": Tuned(0.002, 0.001, 0.2, {"radius": 1.0}),
    },
    "low rank and blocks": {
        "GaLore": Tuned(1.0, 2.0, 1.0, {"every": 20}),
        "Fira": Tuned(0.5, 0.2, 0.2, {"every": 20}),
        "APOLLO": Tuned(0.5, 0.2, 0.5, {"every": 20}),
        "AdamMini": Tuned(0.5, 0.1, 1.0),
        "CAME": Tuned(0.1, 0.05, 0.1),
    },
    "changes of the gradient": {
        "Adan": Tuned(0.1, 0.02, 0.2),
        "OptimisticAdam": Tuned(0.1, 0.05, 0.1),
        "MARS": Tuned(0.1, 0.05, 0.1),
    },
    "second order": {
        "AdaHessian": Tuned(1.0, 1.0, 0.3),
        "Sophia": Tuned(0.01, 0.005, 0.03),
    },
    "without a learning rate": {
        "Prodigy": Tuned(1.0, 1.0, 1.0),
        "DAdaptAdam": Tuned(1.0, 1.0, 1.0),
        "DAdaptSGD": Tuned(1.0, 1.0, 1.0),
        "DAdaptLion": Tuned(0.02, 0.002, 0.03, {"d0": 1.0}),
        "DoG": Tuned(2.0, 2.0, 2.0),
        "DoWG": Tuned(1.0, 1.0, 1.0),
        "MoMo": Tuned(None, None, None),
        "MoMoAdam": Tuned(0.5, 0.5, 0.5),
        "COCOB": Tuned(None, None, None, {"alpha": 10.0}),
    },
}


def tuned(name):
    """The entry of a rule in `TUNED`; LookupError, with what to do, without one."""
    for family in TUNED.values():
        if name in family:
            return family[name]
    raise LookupError(
        f"{name} is not in TUNED of examples/gallery.py: add it to a family there, "
        "with a learning rate each for the bowl, the valley and the digits."
    )


def build(name, problem):
    """The rule with its hyperparameters for a problem, and how many steps it takes."""
    entry, cls = tuned(name), getattr(oj, name)
    steps = (entry.steps or STEPS).get(problem, STEPS[problem])
    options, peak = entry.options or {}, getattr(entry, problem)
    if peak is None:
        return cls(**options), steps
    # As data of the schedule the two numbers may change without a new compilation.
    rate = {rate_of(name): Partial(falling, peak, steps)}
    if "inner" in cls._kinds:  # the rate is that of the rule inside
        return cls(dataclasses.replace(cls().inner, **rate), **options), steps
    return cls(**rate, **options), steps


def rate_of(name):
    return "max_learning_rate" if name == "PolyakSGD" else "learning_rate"


def falling(peak, steps, count):
    return peak * (1.0 - count / steps)


class Run(NamedTuple):
    losses: np.ndarray  # (steps + 1,), above the least there is
    path: np.ndarray | None  # (steps + 1, 2)


def cross(name):
    """{landscape: Run}: the rule's way over both, in one compilation."""
    step = oj.make_step(landscape, has_aux=True)
    runs = {}
    for problem in ("bowl", "valley"):
        rule, steps = build(name, problem)
        # A matrix rule is shown a matrix: one input, two outputs.
        matrix = issubclass(type(rule), oj.MatrixRule)
        model = {"x": jnp.array(START[None] if matrix else START)}
        valley = jnp.full(steps, problem == "valley")
        state = oj.setup(rule, model)
        _, model, (losses, path) = step.scan(state, model, valley)
        loss, x = landscape(model, valley[0])
        runs[problem] = Run(np.append(losses, loss), np.vstack([path, x]))
    return runs


def fit(name):
    """The rule's run on digits."""
    images, labels = map(jnp.asarray, pixels())
    rule, steps = build(name, "digits")
    model = first_weights()
    step = oj.make_step(lambda model: digits(model, images, labels))
    _, model, losses = step.scan(oj.setup(rule, model), model, length=steps)
    losses = np.append(losses, digits(model, images, labels))
    return Run(losses - least_digits(), None)


def arrives(run, problem):
    """After how many steps the loss stays low enough; None if it never does."""
    late = np.flatnonzero(~(run.losses <= ENOUGH[problem]))
    after = late[-1] + 1 if late.size else 0
    return int(after) if after < len(run.losses) else None


# Pictures ---------------------------------------------------------------------------

VIEWS = {"bowl": ((-2.0, 2.0), (-1.7, 2.3)), "valley": ((-1.9, 1.9), (-0.8, 3.0))}
COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#000000", "#882255"),
    "#999933",
)
FLOOR = 1e-6  # what float32 can tell from the least


def draw_paths(runs, path):
    """Small multiples: for each rule, its way over the bowl and through the valley."""
    names = [name for family in TUNED.values() for name in family]
    columns = 5
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(4.6 * columns, 2.85 * rows + 1.7), layout="constrained")
    figure.suptitle(
        "Where every rule goes: a bowl of condition number 100, and Rosenbrock's "
        "valley\n\n",
        fontsize=22,
    )
    colors = dict(zip(TUNED, itertools.cycle(COLORS), strict=False))
    inch = 1 / figure.get_figheight()
    text = {"ha": "center", "va": "center", "fontsize": 14}
    figure.text(
        *(0.5, 1 - 0.62 * inch),
        "Circle: start. Star: minimum. Dots: the first 40 steps. Number: steps until "
        f"the loss stays below {ENOUGH['bowl']:g} in the bowl, {ENOUGH['valley']:g} in "
        "the valley. Learning rates: at first, bowl | valley; they fall to 0.",
        **text,
    )
    for n, (family, color) in enumerate(colors.items()):
        at = (n + 0.5) / len(colors)
        figure.text(at, 1 - 0.95 * inch, family, color=color, weight="bold", **text)
    cells = figure.subfigures(rows, columns, wspace=0.02, hspace=0.02)
    for cell in cells.flat[len(names) :]:
        cell.set_visible(False)
    for name, cell in zip(names, cells.flat, strict=False):
        color = next(colors[family] for family in TUNED if name in TUNED[family])
        cell.suptitle(title(name), fontsize=12, color=color)
        for problem, axes in zip(VIEWS, cell.subplots(1, 2), strict=True):
            draw_landscape(axes, problem)
            draw_path(axes, runs[name][problem], problem, color)
    figure.savefig(path, dpi=90)


def title(name):
    """The name, and below it the rates, and what else is not the default."""
    entry = tuned(name)
    words = {k: f"{v:g}" for k, v in (entry.options or {}).items()}
    words.pop("min_dim_size_to_factor", None)  # of no consequence for two numbers
    if entry.bowl is not None:
        words = {rate_of(name): f"{entry.bowl:g} | {entry.valley:g}", **words}
    shown = ", ".join(f"{k} {v}" for k, v in words.items()).replace("_", " ")
    return f"$\\bf{{{name}}}$\n{shown or 'defaults'}"


def draw_landscape(axes, problem):
    across, up = VIEWS[problem]
    a, b = np.meshgrid(np.linspace(*across, 150), np.linspace(*up, 150))
    loss = landscape({"x": (a, b)}, problem == "valley")[0]
    axes.contourf(a, b, np.log10(loss + 1e-2), levels=14, cmap="Greys", alpha=0.35)
    axes.set(xlim=across, ylim=up, xticks=[], yticks=[], aspect="equal")


def draw_path(axes, run, problem, color):
    axes.plot(*run.path.T, color=color, linewidth=1.6)
    axes.plot(*run.path[:41].T, ".", color=color, markersize=5)
    mark = {"markeredgecolor": "black", "linestyle": "none"}
    axes.plot(*START, marker="o", color="white", markersize=7, **mark)
    axes.plot(*MINIMA[problem], marker="*", color="gold", markersize=14, **mark)
    steps = arrives(run, problem)
    axes.text(
        *(0.97, 0.03),
        "not there" if steps is None else f"{steps:,}",
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        fontsize=11,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
    )


def draw_digits(runs, path):
    """A panel for each family: its curves in colour, those of all others in grey."""
    rows = -(-len(TUNED) // 3)
    figure = Figure(figsize=(17, 5 * rows), layout="constrained")
    figure.suptitle(
        "Logistic regression on scikit-learn's digits, all images at each step: the "
        "loss above the least there is",
        fontsize=16,
    )
    panels = figure.subplots(rows, 3, sharex=True, sharey=True).flat
    for axes in panels[len(TUNED) :]:
        axes.set_visible(False)
    for axes, family in zip(panels, TUNED, strict=False):
        for losses in runs.values():
            axes.plot(np.maximum(losses, FLOOR), color="0.88", linewidth=0.8)
        for name, color in zip(TUNED[family], COLORS, strict=False):
            rate = tuned(name).digits
            label = name if rate is None else f"{name}, {rate:g}"
            losses = np.maximum(runs[name], FLOOR)
            axes.plot(losses, color=color, linewidth=1.8, label=label)
        axes.axhline(ENOUGH["digits"], color="0.4", linestyle=":", linewidth=1)
        axes.set(title=family, yscale="log", ylim=(FLOOR, 20))
        axes.set_xlim(0, STEPS["digits"])
        axes.legend(title="and learning rate, at first", fontsize=9, loc="upper right")
        axes.grid(alpha=0.3)
    figure.supxlabel("step")
    figure.supylabel("loss - least loss [nats per image]")
    figure.savefig(path, dpi=100)


def main(argv=None):
    """Run all, draw both pictures, and return {name: {problem: Run}}."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="where to write")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = {}
    limits = ", ".join(f"{p} {limit:g}" for p, limit in ENOUGH.items())
    print(f"Steps until the loss stays within a limit of its least ({limits}):")
    for family in TUNED.values():
        for name in family:
            runs[name] = cross(name) | {"digits": fit(name)}
            steps = [f"{p} {arrives(r, p)}" for p, r in runs[name].items()]
            print(f"{name:>26}: {', '.join(steps)}", flush=True)
    draw_paths(runs, args.out / "paths.png")
    curves = {name: run["digits"].losses for name, run in runs.items()}
    draw_digits(curves, args.out / "digits.png")
    print(f"Pictures: {args.out / 'paths.png'}, {args.out / 'digits.png'}")
    return runs


if __name__ == "__main__":
    main()
