"""What was measured, as tables and as bar charts."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: it needs no display

from benchmarks.measure import ratio


def seconds(t: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if t >= size or unit == "us":
            return f"{t / size:.3g} {unit}"
    raise AssertionError


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, aligned for a terminal as well."""
    rows = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join(
        [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]
    )


def spread(figures: list[float] | None) -> str:
    if figures is None:
        return "–"
    middle, low, high = figures
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def steps(cases: Sequence[Mapping[str, Any]]) -> str:
    """Median step, and how many times as long each of the others takes."""
    others = list(dict.fromkeys(name for c in cases for name in c["step"]))
    others.remove("optimjax")
    head = ("model", "rule", "optimjax", *others)
    return table(
        head,
        (
            [
                case["model"],
                case["rule"],
                seconds(statistics.median(case["step"]["optimjax"])),
                *(spread(ratio(case["step"], "optimjax", name)) for name in others),
            ]
            for case in cases
        ),
    )


def compiles(cases: Sequence[Mapping[str, Any]]) -> str:
    """Seconds to trace and lower, and to compile; and those of the first call."""
    names = [n for n in cases[0]["first"] if n != "floor" and "torch" not in n]

    def cells(case: Mapping[str, Any]) -> Iterable[str]:
        for name in names:
            trace, compiled, whole = case["first"][name].values()
            yield f"{trace:.2f} + {compiled:.2f} ({whole:.2f})"
        both = [sum(case["first"][n][k] for k in ("trace", "compile")) for n in names]
        yield f"{both[names.index('optax')] / both[0]:.2f}x"

    head = ("model", "rule", *names, "optax / optimjax")
    return table(head, ([c["model"], c["rule"], *cells(c)] for c in cases))


def chart(cases: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Speed of each peer's step relative to optax's, for each model and rule."""
    rules = list(dict.fromkeys(case["rule"] for case in cases))
    models = list(dict.fromkeys(case["model"] for case in cases))
    names = list(dict.fromkeys(name for case in cases for name in case["step"]))
    names.remove("optax")
    size = (max(9, 2 + 1.5 * len(models)), 1 + 2 * len(rules))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rules), 1, squeeze=False, sharex=True)[:, 0]
    width = 0.8 / len(names)
    for ax, rule in zip(axes, rules, strict=True):
        for i, name in enumerate(names):
            for case in cases:
                figures = ratio(case["step"], name, "optax")
                if case["rule"] != rule or figures is None:
                    continue
                middle, low, high = figures
                x = models.index(case["model"]) + (i - len(names) / 2 + 0.5) * width
                whiskers = [[max(middle - low, 0)], [max(high - middle, 0)]]
                ax.bar(x, middle, width, color=f"C{i}", yerr=whiskers)
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set_ylabel(rule)
    for i, name in enumerate(names):
        axes[0].bar(0, 0, color=f"C{i}", label=name)
    figure.legend(ncols=len(names), fontsize="small", loc="outside lower center")
    axes[-1].set_xticks(range(len(models)), models)
    figure.suptitle("speed of a step; optax is 1, whiskers are quartiles")
    figure.savefig(out, dpi=120)
