"""What `benchmarks.convergence` found, as a table and as a chart."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it needs no display

from benchmarks import figures

Run = Mapping[str, Any]
Row = dict[str, Any]
COLORED = 8  # curves that can be told apart; the others are grey


def curve(runs: Sequence[Run]) -> list[float]:
    """Mean validation loss over seeds, as long as all of them are finite."""
    columns = zip(*(run["validation"] for run in runs), strict=False)
    return [statistics.fmean(column) for column in columns]


def rows(results: Mapping[str, Sequence[Run]], base: str) -> list[Row]:
    """A row for each rule, best first; those that diverged are last."""
    made = [row(rule, runs, results[base]) for rule, runs in results.items()]
    return sorted(made, key=lambda r: (r["diverged"] > 0, r["mean"] or 0.0))


def row(rule: str, runs: Sequence[Run], base: Sequence[Run]) -> Row:
    finals = [run["final"] for run in runs if run["final"] is not None]
    diverged = len(runs) - len(finals)
    every = runs[0]["steps"] // max(len(run["validation"]) for run in base)
    reached, goal = None, curve(base)[-1:]
    for i, loss in enumerate(curve(runs)):
        if goal and not any(run["final"] is None for run in base) and loss <= goal[0]:
            reached = (i + 1) * every
            break
    ratios = [own / beside for run in runs for own, beside in run["times"]]
    return {
        "rule": rule,
        "learning_rate": runs[0]["learning_rate"],
        "mean": statistics.fmean(finals) if finals and not diverged else None,
        "deviation": statistics.stdev(finals) if len(finals) > 1 else None,
        "finals": finals,
        "diverged": diverged,
        "steps_to_base": None if diverged else reached,
        "time": statistics.median(ratios) if ratios else None,
        "state_bytes": runs[0]["state_bytes"],
    }


def result(row: Row) -> str:
    if row["diverged"]:
        return f"diverged, {row['diverged']} of {row['diverged'] + len(row['finals'])}"
    spread = "" if row["deviation"] is None else f" ± {row['deviation']:.4f}"
    return f"{row['mean']:.4f}{spread}"


def table(rows: Sequence[Row], unit: str, base: str) -> str:
    def cells(row: Row) -> list[str]:
        steps, time = row["steps_to_base"], row["time"]
        return [
            row["rule"],
            f"{row['learning_rate']:g}",
            result(row),
            "–" if steps is None else str(steps),
            "–" if time is None else f"{time:.2f}",
            f"{row['state_bytes']:.1f}",
        ]

    head = (
        "rule",
        "learning rate",
        f"validation loss, {unit}",
        f"steps to the end of {base}",
        f"time of a step, {base}: 1",
        "bytes of state per parameter",
    )
    return figures.table(head, map(cells, rows))


def chart(
    results: Mapping[str, Mapping[str, Sequence[Run]]],
    summary: Mapping[str, Sequence[Row]],
    units: Mapping[str, str],
    out: Path,
) -> None:
    """For each problem: curves of the validation loss, and where each seed ended."""
    most = max(map(len, summary.values()))
    size = (13, len(summary) * max(4.5, 1.5 + 0.2 * most))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(summary), 2, squeeze=False)
    for (name, rows), (left, right) in zip(summary.items(), grid, strict=True):
        draw_curves(left, results[name], rows)
        draw_ends(right, rows)
        what = f"validation loss [{units[name]}]"
        left.set(title=f"{name}: mean of the seeds", xlabel="step", ylabel=what)
        right.set(title=f"{name}: where each seed ended", xlabel=what)
        for axes in (left, right):
            axes.grid(alpha=0.3)
    figure.savefig(out, dpi=120)


def draw_curves(axes: Any, results: Mapping[str, Sequence[Run]], rows: Any) -> None:
    for i, row in reversed([*enumerate(rows)]):  # the best on top
        runs = results[row["rule"]]
        losses = curve(runs)
        every = runs[0]["steps"] // max(len(r["validation"]) or 1 for r in runs)
        look: dict[str, Any] = {"color": "0.8", "linewidth": 0.8}
        if i < COLORED:
            look = {"color": f"C{i}", "label": row["rule"]}
        axes.plot([every * (n + 1) for n in range(len(losses))], losses, **look)
    finals = [x for row in rows for x in row["finals"]]
    starts = [curve(runs)[0] for runs in results.values() if curve(runs)]
    if finals:  # a rule that is going to diverge may be anywhere
        low, high = min(finals), max(statistics.median(starts), *finals)
        if wide(low, high):
            axes.set_yscale("log")
            axes.set_ylim(0.9 * low, 1.1 * high)
        else:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize="small")


def wide(low: float, high: float) -> bool:
    """Whether a logarithmic axis shows more."""
    return high > 4 * low > 0


def draw_ends(axes: Any, rows: Sequence[Row]) -> None:
    for y, row in enumerate(rows):
        color = f"C{y}" if y < COLORED else "0.4"
        if row["diverged"]:
            axes.text(
                0.5,
                y,
                result(row),
                transform=axes.get_yaxis_transform(),
                va="center",
                ha="center",
                fontsize="small",
            )
            continue
        axes.plot(row["finals"], [y] * len(row["finals"]), color=color, linewidth=1)
        axes.plot(row["finals"], [y] * len(row["finals"]), ".", color=color)
        axes.plot(row["mean"], y, "|", color=color, markersize=10)
    axes.set_yticks(range(len(rows)), [row["rule"] for row in rows], fontsize="small")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    means = [row["mean"] for row in rows if row["mean"] is not None]
    if means and wide(min(means), max(means)):
        axes.set_xscale("log")
