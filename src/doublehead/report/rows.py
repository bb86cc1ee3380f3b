"""The page's tables as plain dicts of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from doublehead.report.charts import gap_bar
from doublehead.report.numbers import MAX_ERRORS, Method, Shifted
from doublehead.report.verdict import percent, span

# key, label, hint, whether it is a share, +1 where more is better, -1 where less is, 0 where neither
METRICS: tuple[tuple[str, str, str, bool, int], ...] = (
    ("accuracy", "Accuracy", "share of right answers", True, 1),
    ("ece", "ECE", "mean gap between confidence and accuracy", True, -1),
    ("floor", "Floor of ECE", "what a perfectly calibrated model shows", True, 0),
    ("p_value", "p-value", "chance that a perfect model shows this ECE", False, 0),
    ("overconfidence", "Overconfidence", "mean confidence minus accuracy", True, 0),
    ("adaptive_ece", "Equal-mass ECE", "over bins that hold equally many samples", True, -1),
    ("ece_classwise", "Class-wise ECE", "mean over the classes, each against the rest", True, -1),
    ("mce", "MCE", "the largest gap of any bin; noisy", True, 0),
    ("nll", "NLL", "nats per sample; calibration and accuracy in one", False, -1),
    ("brier", "Brier score", "squared error of all probabilities", False, -1),
    ("aurc", "AURC", "mean error over all coverages", True, -1),
)
PAIRED = ("ece", "overconfidence", "ece_classwise", "nll", "brier", "aurc", "accuracy")
PAIR_ROWS: list[dict[str, Any]] = [
    {"key": key, "label": label, "percent": share, "better": better}
    for wanted in PAIRED
    for key, label, _, share, better in METRICS
    if key == wanted
]


def value_of(method: Method, key: str) -> float:
    """A number of a method by the key of its row."""
    if key in method.intervals:
        return method.intervals[key].estimate
    return {"floor": method.curve.floor.mean, "p_value": method.p_value, **method.others}[key]


def metrics_table(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """A row per metric, a cell per method."""
    table = []
    for key, label, hint, share, better in METRICS:
        texts = [_value_text(method, key, share) for method in methods]
        best = _best([value_of(m, key) for m in methods], better) if len(set(texts)) > 1 else None
        cells = [
            {
                "text": text,
                "interval": _interval_text(m, key, share),
                "best": best is not None and text == texts[best],
            }
            for m, text in zip(methods, texts)
        ]
        table.append({"label": label, "hint": hint, "cells": cells})
    return table


def bins_table(method: Method) -> list[dict[str, Any]]:
    """A row per bin that holds samples."""
    curve = method.curve
    return [
        {
            "range": f"{percent(curve.edges[i], 1)} to {percent(curve.edges[i + 1], 1)}",
            "count": f"{int(curve.counts[i]):,}",
            "confidence": percent(curve.confidence[i], 1),
            "accuracy": percent(curve.accuracy[i], 1),
            "band": f"{percent(curve.band_low[i], 1)} to {percent(curve.band_high[i], 1)}",
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
            "band": f"{percent(gaps.band_low[k], 1)} to {percent(gaps.band_high[k], 1)}"
            if gaps.counts[k]
            else "",
            "ece": percent(gaps.ece[k]),
        }
        for k in order
    ]


def classes_off(method: Method) -> str:
    """How many classes are off by more than chance explains."""
    off, n = int(method.classes.off.sum()), int((method.classes.counts > 0).sum())
    if off == 0:
        return "No class is off by more than chance explains."
    return f"{off} of {n} predicted classes are off by more than chance explains: their gaps are bold."


def guaranteed_table(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """A row per limit of the error, a cell per method: the threshold and what it answers."""
    table = []
    for i, limit in enumerate(MAX_ERRORS):
        cells = []
        for choice in (m.guaranteed[i] for m in methods):
            if choice.threshold is None:
                more = f"at best {percent(choice.bound)} %"
                cells.append({"text": "none", "more": more})
            else:
                text = f"≥ {_threshold(choice.threshold)} %"
                cells.append({"text": text, "more": f"answers {percent(choice.coverage, 1)} %"})
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
            "floor": f"floor up to {percent(found.floor_high)}" if isfinite(found.floor_high) else "",
            "accuracy": _known(found.accuracy, 2),
            "claimed": _known(found.mean_confidence, 2),
            "auroc": _known(found.auroc),
        }
        for data, entries in shifts.items()
        for i, found in enumerate(entries)
        if found is not None
    ]


def _value_text(method: Method, key: str, share: bool) -> str:
    value = value_of(method, key)
    if key == "p_value":
        return "< 0.001" if value < 0.001 else f"{value:.3f}"
    if key == "overconfidence":
        return f"{100 * value:+.2f} %"
    return f"{percent(value)} %" if share else f"{value:.4f}"


def _interval_text(method: Method, key: str, share: bool) -> str:
    if key == "floor":
        return span(method.curve.floor.low, method.curve.floor.high)
    if key not in method.intervals:
        return ""
    _, low, high = method.intervals[key]
    return span(low, high) if share else f"{low:.4f} to {high:.4f}"


def _best(values: Sequence[float], better: int) -> int | None:
    if not better:
        return None
    return int(np.argmax(values) if better > 0 else np.argmin(values))


def _known(value: float, digits: int = 1, signed: bool = False) -> str:
    if not isfinite(value):
        return "unknown" if not signed else ""
    return f"{100 * value:+.{digits}f}" if signed else percent(value, digits)


def _threshold(value: float) -> str:
    """Rounded up, so that what is printed accepts no more than was tested."""
    digits = next(d for d in range(1, 8) if d == 7 or 100 * (1 - value) >= 10.0 ** (1 - d))
    scale = 10.0**digits
    return f"{np.ceil(100 * value * scale - 1e-9) / scale:.{digits}f}"
