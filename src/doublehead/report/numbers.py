"""Everything the page shows, measured once per method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from doublehead import metrics
from doublehead.bins import Bins
from doublehead.curves import (
    ClassGaps,
    Histogram,
    Reliability,
    class_gaps,
    confidence_histogram,
    reliability,
    risk_coverage_curve,
)
from doublehead.metrics import Interval, RiskCoverage, ThresholdChoice
from doublehead.predictions import Predictions

Array: TypeAlias = "np.ndarray[Any, Any]"

INTERVALS = ("accuracy", "mean_confidence", "overconfidence", "ece", "nll", "brier")
MAX_ERRORS = (0.05, 0.02, 0.01, 0.001)  # for which a guaranteed threshold is looked for
RESAMPLED = 100_000_000  # samples drawn for intervals at most: a few seconds a method

# The thresholds the slider can take: fine where calibrated and overconfident models put most of their samples.
THRESHOLDS = np.unique(
    np.concatenate(
        [
            np.arange(90) / 100,
            0.9 + np.arange(90) / 1000,
            0.99 + np.arange(18) / 2000,
            [0.999, 0.9995, 0.9999],
        ]
    ).round(4)
)


@dataclass(frozen=True, eq=False)
class Method:
    """The numbers of one set of predictions."""

    name: str
    n: int
    n_classes: int
    curve: Reliability
    histogram: Histogram
    intervals: dict[str, Interval]  # 95 %
    p_value: float
    others: dict[str, float]  # ece_classwise, adaptive_ece, mce, aurc
    risk: RiskCoverage
    accepted: Array  # (T,) samples of at least each threshold
    wrong: Array  # (T,) and how many of these are wrong
    guaranteed: tuple[ThresholdChoice, ...]  # one per MAX_ERRORS
    classes: ClassGaps


@dataclass(frozen=True)
class Shifted:
    """One method on one shifted set; nan where a number is not known."""

    accuracy: float
    ece: float
    floor_high: float
    mean_confidence: float
    auroc: float


def measure(name: str, p: Predictions, n_bins: int, seed: int) -> Method:
    """Everything about one set of predictions; a second or so for 10,000 samples."""
    bins = Bins.top(p, metrics.fine_bins(n_bins))
    n_draws = int(np.clip(RESAMPLED // len(p), 200, 1000))
    gaps = class_gaps(p, n_bins)
    accepted, wrong = at_thresholds(p, THRESHOLDS)
    return Method(
        name=name,
        n=len(p),
        n_classes=p.n_classes,
        curve=reliability(bins, n_bins, seed),
        histogram=confidence_histogram(bins, n_bins),
        intervals=metrics.bootstrap(p, INTERVALS, n_bins=n_bins, n_draws=n_draws, seed=seed),
        p_value=metrics.calibration_test(bins, n_bins, seed=seed).p_value,
        others={
            "ece_classwise": float(gaps.ece.mean()),
            "adaptive_ece": metrics.adaptive_ece(p, n_bins),
            "mce": float(bins.coarsen(n_bins).mce()),
            "aurc": metrics.aurc(p),
        },
        risk=risk_coverage_curve(p),
        accepted=accepted,
        wrong=wrong,
        guaranteed=tuple(metrics.choose_threshold(p, max_error) for max_error in MAX_ERRORS),
        classes=gaps,
    )


def at_thresholds(p: Predictions, thresholds: Array) -> tuple[Array, Array]:
    """How many samples have at least each confidence (rising thresholds), and how many of these are wrong."""
    confidence, correct = (column.cpu().numpy() for column in p.top_label())
    confidence = confidence.astype(np.float64)

    def at_least(values: Array) -> Array:
        count: Array = len(values) - np.searchsorted(np.sort(values), thresholds, side="left")
        return count

    return at_least(confidence), at_least(confidence[~correct])


def measure_shift(
    own: Predictions, shifted: Predictions | Mapping[str, float], n_bins: int, seed: int
) -> Shifted:
    """One method on shifted data: from predictions, or from numbers by name that were measured before."""
    if isinstance(shifted, Mapping):
        known = {key: float(shifted.get(key, np.nan)) for key in Shifted.__dataclass_fields__}
        return Shifted(**known)
    return Shifted(
        accuracy=metrics.accuracy(shifted),
        ece=metrics.ece(shifted, n_bins),
        floor_high=metrics.ece_floor(shifted, n_bins, seed=seed).high,
        mean_confidence=metrics.mean_confidence(shifted),
        auroc=metrics.shift_detection(own, shifted).auroc,
    )


def changed_answers(named: Mapping[str, Predictions]) -> list[list[int | None]]:
    """How many predicted classes differ between two methods; None where they were not asked the same samples."""
    predicted = [p.predicted.cpu() for p in named.values()]
    labels = [p.labels.cpu() for p in named.values()]

    def differ(i: int, j: int) -> int | None:
        same = len(labels[i]) == len(labels[j]) and bool((labels[i] == labels[j]).all())
        return int((predicted[i] != predicted[j]).sum()) if same else None

    return [[differ(i, j) for j in range(len(predicted))] for i in range(len(predicted))]
