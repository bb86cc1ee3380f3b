"""The figures that set all rows side by side, a panel each: accuracy, and ECE on the band of a perfect model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from committed import FITTED, Row, Run, having, numbers
from matplotlib.figure import Figure
from seen import FAMILY_UNSEEN
from shift import title_of_output
from tables import AUTO, PAPER_SOURCES, RIVALS, Rows, Source, paper_order, title_of

from doublehead import plots

DOT = {"marker": "o", "color": plots.ORANGE, "markersize": 7}
DIAMOND = {"marker": "D", "color": plots.BLUE, "markersize": 6}
SHORT = {
    "annealing-double-head": "Annealing double head",
    "double-head": "Double head",
    AUTO.output: "Auto head",
}
FITTED_HEAD = Source("Head fitted after training", "cross-entropy", FITTED)
N_COLUMNS = 3


def short(source: Source) -> str:
    """A title that fits a legend."""
    return SHORT.get(source.output, source.title)


def accuracy_bars(rows: Rows) -> Figure | None:
    """Accuracy by data set, network and method, with its spread over seeds."""
    found = sorted(rows, key=paper_order)
    if not found:
        return None
    sources = present(rows, found)
    figure, axes = panels(found, sources)
    low = 1.0
    for ax, row in zip(axes, found):
        for place, source in enumerate(sources):
            low = min(low, _draw_bar(ax, place, rows[row].get(source.method, []), source))
    start = 0.5 if low > 0.52 else 0.0
    axes[0].set_xlim(start, 1.12)  # room for the numbers
    axes[0].set_xticks(np.arange(start, 1.01, 0.1 if start else 0.25))
    plots._percent_axis(axes[0].xaxis)
    for ax in axes:
        ax.set_xlabel("test accuracy (axis cut)" if start else "test accuracy")
    return figure


def _draw_bar(ax: Any, place: int, runs: Sequence[Run], source: Source) -> float:
    """A bar with its number; the accuracy, 1 where there is none."""
    found = numbers(runs, source.output, "accuracy")
    if found is None:
        ax.text(0.02, place, "not run", va="center", fontsize="small", transform=ax.get_yaxis_transform())
        return 1.0
    color, several = (plots.ORANGE if source.output == "main" else plots.BLUE), found.n > 1
    ax.barh(place, found.mean, 0.7, xerr=found.sd if several else None, color=color, alpha=0.75, capsize=2)
    text = f" {100 * found.mean:.1f}" + (f" ± {100 * found.sd:.1f}" if several else "")
    ax.text(found.mean + (found.sd if several else 0), place, text, va="center", fontsize="small")
    return found.mean


def ece_and_floor(rows: Rows) -> Figure | None:
    """ECE of every method as a dot, on the band of a perfect model with the same confidences."""
    found = [row for row in sorted(rows, key=paper_order) if "cross-entropy" in rows[row]]
    if not found:
        return None
    sources = with_guard(present(rows, found), rows, found)
    figure, axes = panels(found, sources)
    for ax, row in zip(axes, found):
        for place, source in enumerate(sources):
            _draw_dots(ax, place, rows[row].get(source.method, []), source)
        ax.set_xlabel("ECE (logarithmic)")
    axes[0].set(xscale="log", xlim=(0.002, 0.5))
    axes[0].set_xticks([0.003, 0.01, 0.03, 0.1, 0.3], ["0.3 %", "1 %", "3 %", "10 %", "30 %"])
    axes[0].minorticks_off()
    _dots_legend(axes[0])
    return figure


def present(rows: Rows, found: Sequence[Row]) -> list[Source]:
    """The paper's methods and ours, and what any of these rows has of a head fitted later and of rivals."""
    later = any(having(rows[row].get("cross-entropy", []), FITTED) for row in found)
    rivals = [source for source in RIVALS if any(source.method in rows[row] for row in found)]
    return [*PAPER_SOURCES, AUTO, *([FITTED_HEAD] if later else []), *rivals]


def with_guard(sources: list[Source], rows: Rows, found: Sequence[Row]) -> list[Source]:
    """The same with the shift guard after the auto head, where any of these rows has it; mean over its guards."""
    if not any(having(rows[row].get("cross-entropy", []), FAMILY_UNSEEN) for row in found):
        return sources
    place = sources.index(AUTO) + 1
    guard = Source(title_of_output(FAMILY_UNSEEN), "cross-entropy", FAMILY_UNSEEN)
    return [*sources[:place], guard, *sources[place:]]


def panels(found: Sequence[Row], sources: Sequence[Source]) -> tuple[Figure, list[Any]]:
    """A figure with a panel for each row, and methods from top to bottom."""
    n_columns = min(N_COLUMNS, len(found))
    n_lines = -(-len(found) // n_columns)
    size = (1.6 + 4.0 * n_columns, 0.8 + (0.8 + 0.36 * len(sources)) * n_lines)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(n_lines, n_columns, squeeze=False, sharey=True, sharex=True).flat)
    for ax, row in zip(axes, found):
        ax.set_title(f"{title_of(row.data, row.model)}, {row.epochs} epochs", fontsize="medium")
        ax.tick_params(labelbottom=True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="x", alpha=0.3)
    for ax in axes[len(found) :]:
        ax.set_axis_off()
    axes[0].set_yticks(range(len(sources)), [short(source) for source in sources])
    axes[0].set_ylim(len(sources) - 0.5, -0.5)
    return figure, axes[: len(found)]


def _draw_dots(ax: Any, place: int, runs: Sequence[Run], source: Source) -> None:
    """Hollow as trained, full after temperature; heads are diamonds; the band of a perfect model behind each."""
    looks = (
        {"before": {**DOT, "fillstyle": "none"}, "after": DOT}
        if source.output == "main"
        else {"before": DIAMOND}
    )
    for when, look in looks.items():
        keys = ("ece", "ece_floor_low", "ece_floor_high")
        ece, low, high = (numbers(runs, source.output, key, when) for key in keys)
        if ece is None or low is None or high is None:
            ax.text(0.0022, place, "not run", va="center", fontsize="small", color=plots.INK)
            return
        ends = [low.mean, high.mean]
        ax.plot(ends, [place] * 2, color=plots.GREY, linewidth=7, solid_capstyle="butt", zorder=1)
        if ece.n > 1:
            around = [max(ece.mean - ece.sd, 1e-4), ece.mean + ece.sd]
            ax.plot(around, [place] * 2, color=look["color"], linewidth=1.2, zorder=2)
        ax.plot(ece.mean, place, **look, zorder=3)


def _dots_legend(ax: Any) -> None:
    ax.plot([], [], "o", fillstyle="none", color=plots.ORANGE, markersize=7, label="as trained")
    ax.plot([], [], "o", color=plots.ORANGE, markersize=7, label="after temperature")
    ax.plot([], [], "D", color=plots.BLUE, markersize=6, label="head")
    ax.plot([], [], color=plots.GREY, linewidth=7, label="perfect model, 5 to 95 %")
    ax.plot([], [], color=plots.INK, linewidth=1.2, label="a deviation over seeds")
    ax.figure.legend(loc="outside lower center", ncols=5, fontsize="small", frameon=False)
