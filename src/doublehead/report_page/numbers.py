"""Everything the page shows, measured once per method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from doublehead import metrics
from doublehead.curves import (
    ClassGaps,
    Histogram,
    Reliability,
    confidence_histogram,
    reliability,
    risk_coverage_curve,
)
from doublehead.metrics import RiskCoverage, ThresholdChoice
from doublehead.predictions import Predictions
from doublehead.summary import Summary

Array: TypeAlias = "np.ndarray[Any, Any]"

MAX_ERRORS = (0.05, 0.02, 0.01, 0.001)  # for which a guaranteed threshold is searched

# The thresholds of the slider: fine where most confidences lie.
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
    """One set of predictions: its summary and what the pictures show."""

    name: str
    summary: Summary
    curve: Reliability
    histogram: Histogram
    risk: RiskCoverage
    accepted: Array  # (T,) samples of at least each threshold
    wrong: Array  # (T,) and how many of these are wrong
    guaranteed: tuple[ThresholdChoice, ...]  # one per MAX_ERRORS

    @property
    def classes(self) -> ClassGaps:
        """The class-wise gaps."""
        assert self.summary.classes is not None  # `Summary.of` always has them
        return self.summary.classes


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
    summary = Summary.of(p, n_bins, seed=seed)
    assert summary.bins is not None
    accepted, wrong = at_thresholds(p, THRESHOLDS)
    return Method(
        name=name,
        summary=summary,
        curve=reliability(summary.bins, n_bins, seed),
        histogram=confidence_histogram(summary.bins, n_bins),
        risk=risk_coverage_curve(p),
        accepted=accepted,
        wrong=wrong,
        guaranteed=tuple(metrics.choose_threshold(p, max_error) for max_error in MAX_ERRORS),
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
