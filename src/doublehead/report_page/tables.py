"""The page's tables as plain dicts of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from doublehead.metrics import Interval
from doublehead.report_page.charts import gap_bar, number
from doublehead.report_page.numbers import MAX_ERRORS, Method, Shifted
from doublehead.summary import METRICS, Metric, Summary, capital, percent, shown, shown_interval

ROWS = (
    "accuracy", "ece", "floor", "p_value", "overconfidence", "adaptive_ece", "ece_classwise", "mce", "nll", "brier",
    "aurc",
)  # fmt: skip
OWN_ROWS = {
    "floor": Metric("ECE floor", True, 0, "ECE of a perfectly calibrated model"),
    "p_value": Metric("p-value", False, 0, "chance that a perfectly calibrated model has this ECE"),
}
PAIRED = ("ece", "overconfidence", "ece_classwise", "nll", "brier", "aurc", "accuracy")
PAIR_ROWS: list[dict[str, Any]] = [
    {
        "key": key,
        "label": capital(METRICS[key].title),
        "percent": METRICS[key].is_share,
        "better": METRICS[key].better,
    }
    for key in PAIRED
]


def metrics_table(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """A row per metric, a cell per method."""
    table = []
    for key in ROWS:
        metric = OWN_ROWS.get(key) or METRICS[key]
        texts = [_value_text(method.summary, key, metric.is_share) for method in methods]
        best = _best([value_of(m, key) for m in methods], metric.better) if len(set(texts)) > 1 else None
        cells = [
            {
                "text": text,
                "interval": _interval_text(m.summary, key, metric.is_share),
                "best": best is not None and text == texts[best],
            }
            for m, text in zip(methods, texts)
        ]
        table.append({"label": capital(metric.title), "hint": metric.meaning, "cells": cells})
    return table


def value_of(method: Method, key: str) -> float:
    """A number of a method by the key of its row."""
    return method.summary.values["ece_floor" if key == "floor" else key]


def bins_table(method: Method) -> list[dict[str, Any]]:
    """A row per bin that holds samples."""
    curve = method.curve
    return [
        {
            "range": f"{number(curve.edges[i], 1)} to {number(curve.edges[i + 1], 1)}",
            "count": f"{int(curve.counts[i]):,}",
            "confidence": number(curve.confidence[i], 1),
            "accuracy": number(curve.accuracy[i], 1),
            "band": f"{number(curve.band_low[i], 1)} to {number(curve.band_high[i], 1)}",
            "outside": bool(curve.outside[i]),
        }
        for i in np.flatnonzero(curve.counts)
    ]


def class_rows(method: Method, names: Sequence[str] | None, shown: int) -> list[dict[str, Any]]:
    """The worst classes first."""
    gaps = method.classes
    order = gaps.worst_first()[:shown]
    widest = float(np.nanmax(np.abs(gaps.gap[order])))
    return [
        {
            "name": names[k] if names is not None else f"class {k}",
            "count": f"{int(gaps.counts[k]):,}",
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
        for k in order
    ]


def classes_off(method: Method) -> str:
    """How many classes deviate by more than chance explains."""
    off, n = method.summary.n_classes_off, int((method.classes.counts > 0).sum())
    if off == 0:
        return "No class deviates by more than chance explains."
    return f"{off} of {n} predicted classes deviate by more than chance explains: their gaps are bold."


def guaranteed_table(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """A row per limit of the error, a cell per method: the threshold and what it answers."""
    table = []
    for i, limit in enumerate(MAX_ERRORS):
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


def _value_text(summary: Summary, key: str, is_share: bool) -> str:
    if key == "p_value":
        return "< 0.001" if summary.p_value < 0.001 else f"{summary.p_value:.3f}"
    if key == "floor":
        return percent(summary.floor.mean)
    value = summary.metrics[key].estimate
    return f"{100 * value:+.2f} %" if key == "overconfidence" else shown(value, is_share)


def _interval_text(summary: Summary, key: str, is_share: bool) -> str:
    if key == "p_value":
        return ""
    value = Interval(*summary.floor) if key == "floor" else summary.metrics[key]
    return shown_interval(value, is_share)


def _best(values: Sequence[float], better: int) -> int | None:
    if not better:
        return None
    return int(np.argmax(values) if better > 0 else np.argmin(values))


def _known(value: float, digits: int = 1, signed: bool = False) -> str:
    if not isfinite(value):
        return "unknown" if not signed else ""
    return f"{100 * value:+.{digits}f}" if signed else number(value, digits)


def _threshold(value: float) -> str:
    """Rounded up, so that what is printed accepts no more than was tested."""
    digits = next(d for d in range(1, 8) if d == 7 or 100 * (1 - value) >= 10.0 ** (1 - d))
    scale = 10.0**digits
    return f"{np.ceil(100 * value * scale - 1e-9) / scale:.{digits}f}"
