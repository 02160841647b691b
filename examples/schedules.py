"""Every schedule: a picture of its values over 1,000 updates, and a small table.

    python examples/schedules.py [--out DIR]

draws schedules.png. The title of each panel is the line of code that makes it, after
`from optimjax.schedules import *`; the dotted line is 0. The table that is printed has
the values at the first count, in the middle, and at the end.

A schedule is given to a rule in place of a number, whichever of its numbers that is:

    oj.AdamW(oj.schedules.WarmupCosine(peak=1e-3, warmup_steps=100, steps=1000))
"""

import argparse
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # not pyplot: it needs no display

from optimjax.schedules import (
    Constant,
    Cosine,
    CosineCycle,
    CosineRestarts,
    Cyclic,
    Exponential,
    InverseSqrt,
    InverseTime,
    Join,
    Linear,
    OneCycle,
    Piecewise,
    Polynomial,
    Product,
    Step,
    Trapezoid,
    Warmup,
    WarmupCosine,
)

STEPS = 1000

FAMILIES = {
    "one way": [
        Constant(0.6),
        Linear(1.0, 0.1, steps=700, begin=150),
        Polynomial(1.0, 0.1, power=3, steps=800),
        Cosine(1.0, steps=800, end=0.1),
        Exponential(1.0, rate=0.5, steps=200, end=0.1),
        Exponential(1.0, rate=0.5, steps=200, staircase=True),
        InverseTime(1.0, rate=1.0, steps=100),
        Step(1.0, steps=300, factor=0.4),
    ],
    "with a warm-up": [
        WarmupCosine(1.0, warmup_steps=100, steps=900, end=0.05),
        InverseSqrt(1.0, warmup_steps=100),
        Trapezoid(1.0, warmup_steps=100, steps=950, decay_steps=300),
        Trapezoid(1.0, 100, 950, decay_steps=300, shape="1-sqrt"),
        OneCycle(1.0, steps=900),
        OneCycle(1.0, steps=900, div=10, back=0.8, shape="linear"),
        Warmup(0.7, steps=300),
        Warmup(Exponential(1.0, rate=0.5, steps=200), steps=200, start=0.2),
    ],
    "in cycles": [
        CosineCycle(1.0, steps=200, end=0.1),
        CosineRestarts(1.0, steps=140, factor=2),
        CosineRestarts(1.0, steps=200, end=0.1, decay=0.8),
        Cyclic(0.1, 1.0, up_steps=100),
        Cyclic(0.1, 1.0, up_steps=50, down_steps=200, mode="triangular2"),
        Cyclic(0.1, 1.0, up_steps=100, mode="exp_range", decay=0.998),
    ],
    "put together": [
        Piecewise(values=(1.0, 0.6, 0.2), boundaries=(400, 700)),
        Piecewise((0.2, 1.0, 0.2), (400, 700), "linear"),
        Piecewise((0.2, 1.0, 0.2), (400, 700), "cosine"),
        Join((Linear(0.0, 1.0, 200), 1.0, Cosine(0.8, 400)), (200, 500)),
        Join((WarmupCosine(1.0, 50, 400), WarmupCosine(0.6, 50, 600)), (400,)),
        Product(Cosine(1.0, steps=900), Step(1.0, steps=250, factor=0.7)),
    ],
}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def title(schedule):
    """The line of code, broken so that it fits above its panel."""
    lines = textwrap.wrap(repr(schedule), 44, subsequent_indent="  ")
    return "\n".join(lines)


def draw(curves, path):
    """Small multiples, a colour for each family."""
    columns = 4
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(4.4 * columns, 2.6 * rows + 1), layout="constrained")
    figure.suptitle("The schedules, over 1,000 updates", fontsize=20)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True).flatten()
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    colors = dict(zip(FAMILIES, COLORS, strict=True))
    for axes, (family, schedule, values) in zip(panels, curves, strict=False):
        axes.plot(values, color=colors[family], linewidth=2)
        axes.axhline(0, color="0.4", linestyle=":", linewidth=1)
        axes.set_title(title(schedule), fontsize=9, family="monospace", loc="left")
        axes.set(xlim=(0, STEPS), ylim=(-0.05, 1.1))
        axes.grid(alpha=0.3)
    figure.supxlabel("count of updates", fontsize=14)
    figure.supylabel("value", fontsize=14)
    figure.savefig(path, dpi=80)


def main(argv=None):
    """Draw, print, and return [(family, schedule, values)]."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="where to write")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    counts = np.arange(STEPS + 1)
    curves = [
        (family, schedule, np.asarray(schedule(counts)))
        for family, schedules in FAMILIES.items()
        for schedule in schedules
    ]
    print(f"{0:>8} {STEPS // 2:>8} {STEPS:>8}  schedule")
    for _, schedule, values in curves:
        first, middle, last = values[[0, STEPS // 2, STEPS]]
        print(f"{first:8.4f} {middle:8.4f} {last:8.4f}  {schedule}")
    draw(curves, args.out / "schedules.png")
    print(f"Picture: {args.out / 'schedules.png'}")
    return curves


if __name__ == "__main__":
    main()
