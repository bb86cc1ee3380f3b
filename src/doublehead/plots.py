"""Draw reliability diagrams, and touch nothing global.

Without `ax` the drawing gets its own `Figure` outside pyplot: nothing is registered, no window opens, and a loop
over thousands of runs keeps no figures in memory. Put several into one figure by passing the axes, and write it
with `save`:

    figure = matplotlib.figure.Figure(figsize=(8, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_reliability(reliability(before), ax=left, title="before")
    draw_reliability(reliability(after), ax=right, title="after")
    save(figure, "before-after.pdf")
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from doublehead.curves import Reliability
from doublehead.system import require

Axes: TypeAlias = Any  # matplotlib.axes.Axes; matplotlib is an extra

# Of Okabe and Ito's palette, safe for colour-blind readers.
BLUE, ORANGE, INK, GREY = "#0072b2", "#d55e00", "#333333", "#b8b8b8"
PICTURES = (".pdf", ".png", ".svg", ".eps", ".jpg", ".webp")


def draw_reliability(curve: Reliability, ax: Axes = None, *, title: str | None = None) -> Axes:
    """Accuracy by confidence, the gap to what was claimed, the band of a perfect model, and counts underneath.

    The strip of counts is a child of `ax` on a logarithmic scale.
    """
    if ax is None:
        figure = require("matplotlib.figure", extra="plots").Figure(figsize=(4.2, 5.0), layout="constrained")
        ax = figure.add_subplot()
    full = curve.counts > 0
    left, width = curve.edges[:-1][full], np.diff(curve.edges)[full]
    accuracy, gap, low = curve.accuracy[full], curve.gap[full], curve.band_low[full]
    across = {"x": left, "width": width, "align": "edge"}
    ax.bar(height=curve.band_high[full] - low, bottom=low, **across, color=GREY, alpha=0.6, linewidth=0)
    ax.bar(height=gap, bottom=accuracy, **across, fill=False, edgecolor=ORANGE, hatch="////", linewidth=0.8)
    ax.hlines(accuracy, left, left + width, color=BLUE, linewidth=3, clip_on=False, zorder=4)
    ax.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", ylabel="accuracy", title=title)
    ax.tick_params(labelbottom=False)
    _reliability_legend(ax)
    floor, *ends = (100 * value for value in curve.floor)
    ax.text(
        0.97,
        0.03,
        f"ECE {100 * curve.ece:.2f} %\nfloor {floor:.2f} % ({ends[0]:.2f} to {ends[1]:.2f})\nn = {curve.n:,}",
        transform=ax.transAxes, ha="right", va="bottom", fontsize="small", linespacing=1.4, zorder=5,
        bbox={"facecolor": "white", "edgecolor": GREY, "alpha": 0.9, "boxstyle": "round,pad=0.35"},
    )  # fmt: skip
    _counts_strip(ax, curve)
    return ax


def save(picture: Any, path: str | os.PathLike[str], *, dpi: int = 200) -> Path:
    """Write a figure, or the figure of some axes; the ending of `path` chooses the format."""
    path = Path(path)
    if path.suffix not in PICTURES:
        raise ValueError(f"path must end in one of {' '.join(PICTURES)}, got {path.name!r}")
    figure = getattr(picture, "figure", None) or picture
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, bbox_inches="tight")
    return path


def _reliability_legend(ax: Axes) -> None:
    """Handles of their own, since each thing shown is made of several marks."""
    patch = require("matplotlib.patches", extra="plots").Patch
    line = require("matplotlib.lines", extra="plots").Line2D
    ax.legend(
        handles=[
            line([], [], color=BLUE, linewidth=3, label="accuracy"),
            patch(fill=False, edgecolor=ORANGE, hatch="////", label="gap to mean confidence"),
            patch(color=GREY, alpha=0.6, linewidth=0, label="perfect model, 5 to 95 %"),
        ],
        loc="upper left", fontsize="small", handlelength=1.6, framealpha=0.85, edgecolor="none",
    )  # fmt: skip


def _counts_strip(ax: Axes, curve: Reliability) -> None:
    strip = ax.inset_axes((0, -0.22, 1, 0.18), sharex=ax)
    look = {"color": GREY, "edgecolor": INK, "linewidth": 0.7}
    strip.bar(curve.edges[:-1], curve.counts, np.diff(curve.edges), align="edge", **look)
    top = max(10, curve.counts.max())
    strip.set(yscale="log", ylim=(0.7, 2 * top), xlabel="confidence", ylabel="count")
    decades = int(np.log10(top))
    strip.set_yticks([1, 10**decades])
    strip.minorticks_off()
    strip.tick_params(axis="y", labelsize="small")
    strip.spines[["top", "right"]].set_visible(False)
