"""The page's tables as plain dicts of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import isfinite
from typing import Any

import numpy as np
import torch

from doublehead.curves import ClassGaps
from doublehead.guard import Shift
from doublehead.metrics import Interval
from doublehead.report_page.charts import gap_bar, number
from doublehead.report_page.record import ERROR_LIMITS, Array, Method, Shifted
from doublehead.summary import (
    METRICS,
    Metric,
    Summary,
    capital,
    p_value_text,
    percent,
    shown,
    shown_interval,
    without_interval,
)

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
MAX_CLASSES = 2000  # in the table that can be sorted, the worst ones
MAX_GROUPS = 200
MAX_PAIRS = 15


def metrics_table(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """A row per metric, a cell per method."""
    table = []
    known = [_numbers(method.summary) for method in methods]
    for key in ROWS:
        if any(key not in numbers for numbers in known):
            continue
        metric, found = OWN_ROWS.get(key) or METRICS[key], [numbers[key] for numbers in known]
        texts = [_value_text(key, one.estimate, metric.is_share) for one in found]
        best = _best([one.estimate for one in found], metric.better) if len(set(texts)) > 1 else None
        cells = [
            {
                "text": text,
                "interval": shown_interval(one, metric.is_share),
                "best": best is not None and text == texts[best],
            }
            for one, text in zip(found, texts)
        ]
        table.append({"label": capital(metric.title), "hint": metric.meaning, "cells": cells})
    return table


def _numbers(summary: Summary) -> dict[str, Interval]:
    return {
        **summary.metrics,
        "floor": Interval(*summary.floor),
        "p_value": without_interval(summary.p_value),
    }


def clean(name: str, longest: int = LONGEST_NAME) -> str:
    """A name that can be encoded and printed: control characters and broken file names become U+FFFD."""
    whole = "".join(c if c.isprintable() else "\ufffd" for c in str(name))
    return whole if len(whole) <= longest else whole[: longest - 1] + "…"


def pair_rows(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """The metrics of the comparison of two methods: those that all methods have."""
    return [
        {
            "key": key,
            "label": capital(METRICS[key].title),
            "percent": METRICS[key].is_share,
            "better": METRICS[key].better,
        }
        for key in PAIRED
        if all(key in method.summary.metrics for method in methods)
    ]


def bins_table(method: Method) -> list[dict[str, Any]]:
    """A row per bin that holds samples."""
    curve = method.curve
    return [
        {
            "range": f"{number(curve.edges[i], 1)} to {number(curve.edges[i + 1], 1)}",
            "count": f"{curve.counts[i]:,.0f}",
            "confidence": number(curve.confidence[i], 1),
            "accuracy": number(curve.accuracy[i], 1),
            "band": f"{number(curve.band_low[i], 1)} to {number(curve.band_high[i], 1)}",
            "outside": bool(curve.outside[i]),
        }
        for i in np.flatnonzero(curve.counts)
    ]


def class_name(k: int, names: Sequence[str] | None) -> str:
    """The name of a class, or its number."""
    return names[k] if names is not None else f"class {k}"


def class_rows(method: Method, names: Sequence[str] | None, shown: int) -> list[dict[str, Any]]:
    """The worst classes first."""
    gaps = method.classes
    if gaps is None:
        return []
    order = gaps.worst_first()[:shown]
    return gap_rows(gaps, [class_name(k, names) for k in order], order)


def class_data(method: Method) -> list[list[float | None]]:
    """The numbers of the class table for the page's script, worst first: class, samples, then percent."""
    gaps = method.classes
    if gaps is None:
        return []
    columns = (gaps.confidence, gaps.accuracy, gaps.gap, gaps.band_low, gaps.band_high, gaps.ece)
    return [
        [int(k), int(gaps.counts[k]), int(gaps.off[k]), *(_percent(column[k]) for column in columns)]
        for k in gaps.worst_first()[:MAX_CLASSES]
    ]


def _percent(value: float) -> float | None:
    return round(100 * float(value), 2) if isfinite(value) else None


def group_rows(summary: Summary | None, sort: bool = True) -> list[dict[str, Any]]:
    """A row per group or period with its ECE, interval and floor; the worst groups first."""
    gaps = None if summary is None else summary.group_gaps
    if summary is None or gaps is None:
        return []
    order = gaps.worst_first()[:MAX_GROUPS] if sort else np.arange(len(gaps.counts))
    names, groups = list(summary.groups), list(summary.groups.values())
    rows = gap_rows(gaps, [clean(names[i]) for i in order], order)
    for row, i in zip(rows, order):
        ece = groups[i].metrics["ece"]
        row |= {"ece": number(ece.estimate), "interval": shown_interval(ece, True)}
        row |= {"p": p_value_text(min(1.0, float(gaps.p_value[i]) * len(groups)))}
    return rows


def drift(periods: Summary | None) -> str:
    """Whether the gap differs between periods by more than chance: a chi-squared test of equal gaps."""
    gaps = None if periods is None else periods.group_gaps
    if periods is None or gaps is None or len(gaps.counts) < 2:
        return ""
    sizes = np.array([float(g.bins.effective.sum()) for g in periods.groups.values() if g.bins is not None])
    right = (gaps.accuracy * sizes + 0.5) / (sizes + 1)  # never 0 or 1, so that no variance is 0
    weight = sizes / (right * (1 - right))
    excess = float((weight * (gaps.gap - np.average(gaps.gap, weights=weight)) ** 2).sum())
    p = float(torch.special.gammaincc(torch.tensor((len(weight) - 1) / 2), torch.tensor(excess / 2)))
    low, high = (f"{100 * value:+.1f}" for value in (gaps.gap.min(), gaps.gap.max()))
    changed = "changes" if p < 0.05 else "does not change"
    return (
        f"The gap between confidence and accuracy {changed} over time by more than chance explains "
        f"(between {low} and {high} points, p {p_value_text(p, '= ')})."
    )


def error_rows(method: Method, names: Sequence[str] | None) -> list[dict[str, Any]]:
    """The most confident errors, the worst first."""
    return [
        {
            "confidence": at_least(error.confidence),
            "said": class_name(int(error.predicted), names) if error.predicted else "",
            "label": class_name(int(error.label), names) if error.label else "",
            "row": f"{error.row:,}",
            "source": clean(error.source),
            "group": clean(error.group),
            "shown": clean(error.shown, 300),
        }
        for error in method.record.errors
    ]


def at_least(share: float) -> str:
    """97.31 %, or in words where rounding would claim certainty."""
    return "at least 99.99 %" if share > 0.9999 else percent(share)


def confused_rows(method: Method, names: Sequence[str] | None) -> list[dict[str, Any]]:
    """The pairs of classes that are mistaken for one another most often."""
    found = method.record.outcomes
    if found.labels is None or found.predicted is None:
        return []
    k, wrong = method.summary.n_classes, ~found.correct
    weights = torch.ones(len(found)) if found.weights is None else found.weights
    codes, which = np.unique((found.labels.long() * k + found.predicted)[wrong].numpy(), return_inverse=True)
    counts = np.bincount(which, weights[wrong].numpy(), minlength=len(codes))
    totals = np.bincount(found.labels.numpy(), weights.numpy(), minlength=k)
    order = np.lexsort((codes, -counts))[:MAX_PAIRS]
    return [
        {
            "label": class_name(int(codes[i] // k), names),
            "said": class_name(int(codes[i] % k), names),
            "count": f"{counts[i]:,.0f}",
            "share": number(counts[i] / totals[codes[i] // k], 1),
        }
        for i in order
    ]


def gap_rows(gaps: ClassGaps, names: Sequence[str], order: Array) -> list[dict[str, Any]]:
    """What is claimed and how often it is right: the rows of classes, groups and periods."""
    widest = float(np.nan_to_num(np.abs(gaps.gap[order])).max(initial=0.0))
    return [
        {
            "name": name,
            "count": f"{gaps.counts[k]:,.0f}",
            "confidence": _known(gaps.confidence[k]),
            "accuracy": _known(gaps.accuracy[k]),
            "gap": _known(gaps.gap[k], signed=True),
            "off": bool(gaps.off[k]),
            "bar": gap_bar(float(gaps.gap[k]), widest),
            "band": f"{number(gaps.band_low[k], 1)} to {number(gaps.band_high[k], 1)}"
            if gaps.counts[k]
            else "",
            "ece": number(gaps.ece[k]),
        }
        for name, k in zip(names, order)
    ]


def classes_off(method: Method) -> str:
    """How many classes deviate by more than chance explains."""
    off, gaps = method.summary.n_classes_off, method.classes
    n = 0 if gaps is None else int((gaps.counts > 0).sum())
    if off == 0:
        return "No class deviates by more than chance explains."
    return f"{off} of {n} predicted classes deviate by more than chance explains: their gaps are bold."


def guaranteed_table(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """A row per limit of the error, a cell per method: the threshold and what it answers."""
    table: list[dict[str, Any]] = []
    if not all(m.guaranteed for m in methods):
        return table
    for i, limit in enumerate(ERROR_LIMITS):
        cells = []
        for choice in (m.guaranteed[i] for m in methods):
            if choice.threshold is None:
                more = f"at best {number(choice.bound)} %"
                cells.append({"text": "none", "more": more})
            else:
                text = f"≥ {_threshold(choice.threshold)} %"
                cells.append({"text": text, "more": f"answers {number(choice.coverage, 1)} %"})
        table.append({"limit": f"{100 * limit:g}", "cells": cells})
    return table


def shift_rows(
    methods: Sequence[Method], shifts: Mapping[str, Sequence[Shifted | None]]
) -> list[dict[str, Any]]:
    """A row per shifted set and method."""
    return [
        {
            "index": i,
            "data": data,
            "method": methods[i].name,
            "ece": _known(found.ece, 2),
            "floor": f"floor up to {number(found.floor_high)}" if isfinite(found.floor_high) else "",
            "accuracy": _known(found.accuracy, 2),
            "claimed": _known(found.mean_confidence, 2),
            "auroc": _known(found.auroc),
        }
        for data, entries in shifts.items()
        for i, found in enumerate(entries)
        if found is not None
    ]


def window_rows(windows: Sequence[Shift]) -> list[dict[str, Any]]:
    """A row per stretch of windows with an alarm or without: the samples up to which it goes, and its extremes."""
    rows = []
    for alarm, group in groupby(windows, lambda one: one.alarm):
        stretch = list(group)
        rows.append(
            {
                "alarm": alarm,
                "seen": f"{stretch[-1].seen:,}",
                "windows": f"{len(stretch):,}",
                "p_value": f"{min(one.p_value for one in stretch):.2g}",
                "strength": f"{max(one.strength for one in stretch):.1f}",
            }
        )
    return rows[-MAX_GROUPS:]


def _value_text(key: str, value: float, is_share: bool) -> str:
    if key == "p_value":
        return "< 0.001" if value < 0.001 else f"{value:.3f}"
    return f"{100 * value:+.2f} %" if key == "overconfidence" else shown(value, is_share)


def _best(values: Sequence[float], better: int) -> int | None:
    if not better:
        return None
    return int(np.argmax(values) if better > 0 else np.argmin(values))


def _known(value: float, digits: int = 1, signed: bool = False) -> str:
    if not isfinite(value):
        return "unknown" if not signed else ""
    rounded = round(100 * value, digits)
    return f"{rounded:+.{digits}f}" if signed and rounded else number(value if rounded else 0.0, digits)


def _threshold(value: float) -> str:
    """Rounded up, so that what is printed accepts no more than was tested."""
    digits = next(d for d in range(1, 8) if d == 7 or 100 * (1 - value) >= 10.0 ** (1 - d))
    scale = 10.0**digits
    return f"{np.ceil(100 * value * scale - 1e-9) / scale:.{digits}f}"
