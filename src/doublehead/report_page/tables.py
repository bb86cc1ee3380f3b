"""What the templates of the page show: tables, texts of numbers, and the frames of pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import floor, isfinite, log10
from typing import Any, NamedTuple
from unicodedata import category

import numpy as np
import torch

from doublehead.curves import ClassGaps, Reliability
from doublehead.guard import Shift
from doublehead.metrics import Interval
from doublehead.report_page.record import Array, Method
from doublehead.summary import (
    METRICS,
    Metric,
    Summary,
    capital,
    p_value_text,
    percent,
    shown,
    shown_interval,
    span,
    without_interval,
)

__all__ = ["percent", "span"]  # for the templates

ROWS = (
    "accuracy", "ece", "floor", "p_value", "overconfidence", "adaptive_ece", "ece_classwise", "mce", "nll", "brier",
    "aurc",
)  # fmt: skip
OWN_ROWS = {
    "floor": Metric("ECE floor", True, 0, "ECE of a perfectly calibrated model"),
    "p_value": Metric("p-value", False, 0, "chance that a perfectly calibrated model has an ECE this large"),
}
PAIRED = ("ece", "overconfidence", "ece_classwise", "nll", "brier", "aurc", "accuracy")
LONGEST_NAME = 100
JOINERS, BLANKS = "\u200c\u200d", "\t\n\r"
MAX_CLASSES = 2000  # in the table that can be sorted, the worst ones
MAX_PAIRS = 15
MAX_GROUPS = 200
MAX_BINS_SHOWN = 30  # their table is open at first
WORST = 20  # classes that the table shows at first, also in the script
ERROR_LIMITS = (0.05, 0.02, 0.01, 0.001)  # for which a guaranteed threshold is searched
START = 0.9  # where the slider stands at first


def metrics_table(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """A row per metric, a cell per method."""
    table = []
    known = [
        {
            **m.summary.metrics,
            "floor": Interval(*m.summary.floor),
            "p_value": without_interval(m.summary.p_value),
        }
        for m in methods
    ]
    for key in ROWS:
        if any(key not in numbers for numbers in known):
            continue
        metric, found = OWN_ROWS.get(key) or METRICS[key], [numbers[key] for numbers in known]
        texts = [_value_text(key, one.estimate, metric.is_share) for one in found]
        best = None
        if metric.better and len(set(texts)) > 1:
            best = texts[int(np.argmax([metric.better * one.estimate for one in found]))]
        cells = [
            {"text": text, "interval": shown_interval(one, metric.is_share), "best": text == best}
            for one, text in zip(found, texts)
        ]
        table.append({"label": capital(metric.title), "hint": metric.meaning, "cells": cells})
    return table


def _value_text(key: str, value: float, is_share: bool) -> str:
    if key == "p_value":
        return "< 0.001" if value < 0.001 else f"{value:.3f}"
    return f"{number(value, signed=True)} %" if key == "overconfidence" else shown(value, is_share)


def pair_rows(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """The metrics of the comparison of two methods: those that all methods have."""
    found = {key: METRICS[key] for key in PAIRED if all(key in m.summary.metrics for m in methods)}
    return [
        {"key": key, "label": capital(metric.title), "percent": metric.is_share, "better": metric.better}
        for key, metric in found.items()
    ]


def class_data(gaps: ClassGaps | None) -> list[list[float | None]]:
    """The numbers of the class table for the page's script, worst first: class, samples, then percent."""
    if gaps is None:
        return []
    columns = (gaps.confidence, gaps.accuracy, gaps.gap, gaps.band_low, gaps.band_high, gaps.ece)
    shares = np.round(100 * np.stack(columns, 1), 2).tolist()
    return [
        [
            int(k),
            round(float(gaps.counts[k])),
            int(gaps.off[k]),
            *(v if isfinite(v) else None for v in shares[k]),
        ]
        for k in gaps.worst_first()[:MAX_CLASSES]
    ]


def drift(periods: Summary) -> str:
    """Whether the gap differs between periods by more than chance: a chi-squared test of equal gaps."""
    gaps = periods.group_gaps
    if gaps is None or len(gaps.counts) < 2:
        return "All samples are of one time."
    sizes = np.array([float(g.bins.coarsen(1).effective) for g in periods.groups.values()])
    right = (gaps.accuracy * sizes + 0.5) / (sizes + 1)  # never 0 or 1, so that no variance is 0
    weight = sizes / (right * (1 - right))
    excess = float((weight * (gaps.gap - np.average(gaps.gap, weights=weight)) ** 2).sum())
    p = float(torch.special.gammaincc(torch.tensor((len(weight) - 1) / 2), torch.tensor(excess / 2)))
    low, high = (number(value, 1, signed=True) for value in (gaps.gap.min(), gaps.gap.max()))
    changed = "changes" if p < 0.05 else "does not change"
    return (
        f"The gap between confidence and accuracy {changed} over time by more than chance explains "
        f"(between {low} and {high} points, p {p_value_text(p, '= ')})."
    )


def confused_classes(method: Method) -> list[dict[str, Any]]:
    """The pairs of classes that are mistaken for one another most often."""
    found = method.record.outcomes
    if found.labels is None or found.predicted is None:
        return []
    k, wrong = method.summary.n_classes, ~found.correct
    weights = torch.ones(len(found)) if found.weights is None else found.weights
    codes, which = np.unique((found.labels.long() * k + found.predicted)[wrong].numpy(), return_inverse=True)
    counts = np.bincount(which, weights[wrong].numpy(), minlength=len(codes))
    totals = np.bincount(found.labels.numpy(), weights.numpy(), minlength=k)
    return [
        {"label": code // k, "predicted": code % k, "count": count, "share": count / totals[code // k]}
        for code, count in ((codes[i], counts[i]) for i in np.lexsort((codes, -counts))[:MAX_PAIRS])
    ]


def class_name(k: int | str, names: Sequence[str] | None) -> str:
    """The name of a class, or its number; nothing where it is not known."""
    return str(k) and (names[int(k)] if names is not None else f"class {k}")


def stretches(windows: Sequence[Shift]) -> list[list[Shift]]:
    """Successive windows with an alarm, or without."""
    return [list(group) for _, group in groupby(windows, lambda one: one.alarm)][-MAX_GROUPS:]


def widest(gaps: ClassGaps, order: Array) -> float:
    """The largest gap of some classes or groups, for the bars."""
    return float(np.nan_to_num(np.abs(gaps.gap[np.asarray(order)])).max(initial=0.0))


# --- texts


def clean(name: str, longest: int = LONGEST_NAME) -> str:
    """A name that can be encoded and printed: control characters and broken file names become U+FFFD.

    Blanks of other widths, tabs and line ends become a blank. The two joiners stay, which emoji and Persian need.

    >>> clean("two\\nlines"), clean("日本\\u3000語")
    ('two lines', '日本 語')
    """
    whole = "".join(
        c if c.isprintable() or c in JOINERS else " " if c in BLANKS or category(c) == "Zs" else "\ufffd"
        for c in str(name)
    )
    return whole if len(whole) <= longest else whole[: longest - 1] + "…"


def shortened(name: str, length: int = 18) -> str:
    """A name that fits beside a picture: its beginning and its end.

    >>> shortened("gaussian noise, severity 5"), shortened("fog")
    ('gaussian …verity 5', 'fog')
    """
    half = length // 2
    return name if len(name) <= length else f"{name[:half]}…{name[1 - half :]}"


def unbroken(sentence: str) -> str:
    """With no line break before a percent sign."""
    return sentence.replace(" %", "\u00a0%")


def number(value: float, digits: int = 2, signed: bool = False) -> str:
    """A share as a number of percent, without the percent sign.

    >>> number(0.0475), number(-1e-9, 1), number(0.02, 1, signed=True), number(float("nan"))
    ('4.75', '0.0', '+2.0', 'unknown')
    """
    if not isfinite(value):
        return "" if signed else "unknown"
    rounded = round(100 * float(value), digits) or 0.0  # not -0.0
    return f"{rounded:+.{digits}f}" if signed and rounded else f"{rounded:.{digits}f}"


def count(value: float) -> str:
    """1,500."""
    return f"{value:,.0f}"


def tick(value: float) -> str:
    """A share as percent, with no more digits than it needs.

    >>> tick(0.2), tick(0.005)
    ('20', '0.5')
    """
    return f"{100 * value:.4g}"


def rounded_up(threshold: float) -> str:
    """A threshold in percent, so that what is printed accepts no more than was tested."""
    digits = next(d for d in range(1, 8) if d == 7 or 100 * (1 - threshold) >= 10.0 ** (1 - d))
    scale = 10.0**digits
    return f"{np.ceil(100 * threshold * scale - 1e-9) / scale:.{digits}f}"


# --- pictures


def pixels(value: Any) -> Any:
    """Numbers in the templates are pixels: to a tenth they are crisp enough, and short."""
    if not isinstance(value, float):
        return value
    rounded = f"{value:.1f}".removesuffix(".0")
    return "0" if rounded == "-0" else rounded


class Frame(NamedTuple):
    """The box of a plot in pixels and the numbers at its borders."""

    left: float
    top: float
    width: float
    height: float
    x_start: float = 0.0
    x_end: float = 1.0
    y_start: float = 0.0
    y_end: float = 1.0

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return self.left + self.width * (value - self.x_start) / (self.x_end - self.x_start)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return self.top + self.height * (self.y_end - value) / (self.y_end - self.y_start)

    @property
    def bottom(self) -> float:
        """Pixels from the top to the lower border."""
        return self.top + self.height

    @property
    def right(self) -> float:
        """Pixels from the left to the right border."""
        return self.left + self.width

    def path(self, xs: Iterable[float], ys: Iterable[float]) -> str:
        """The `d` of a line through these points."""
        points = [f"{pixels(float(self.x(x)))} {pixels(float(self.y(y)))}" for x, y in zip(xs, ys)]
        return "M" + "L".join(points) if points else ""


def bar_gap(curve: Reliability) -> float:
    """Pixels between the bars of neighbouring bins, which are 300 wide together."""
    return min(1.0, 100 / len(curve.counts))


def nice_ticks(end: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 on, the last one at or above `end`.

    >>> nice_ticks(0.065)
    [0.0, 0.02, 0.04, 0.06, 0.08]
    """
    rough = max(end, 1e-4) / wanted
    size = 10.0 ** min(0, floor(log10(rough)))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [round(i * step, 10) for i in range(int(-(-max(end, 1e-4) // step)) + 1)]


def risk_ticks(methods: Sequence[Method]) -> list[float]:
    """Up to the largest error of a tenth of the samples or more: that of fewer is noise."""
    largest = max(float(m.risk.risk[m.risk.coverage >= 0.1].max()) for m in methods)
    return nice_ticks(min(1.0, 1.05 * max(0.001, largest)))


def shift_ticks(shifts: Sequence[tuple[str, Any]]) -> list[float]:
    """Up to the largest ECE of any method on any data."""
    return nice_ticks(min(1.0, 1.02 * np.nanmax([one["ece"] for _, row in shifts for one in row if one])))


def time_ticks(gaps: ClassGaps) -> list[float]:
    """From 1 down to the lowest number that is shown."""
    lowest = np.nanmin([gaps.accuracy, gaps.confidence, gaps.band_low])
    return [1 - value for value in nice_ticks(1 - float(lowest), 4) if value <= 1]
