"""Everything the page shows, measured once per method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

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
from doublehead.outcomes import Outcomes
from doublehead.predictions import Predictions
from doublehead.report_page.record import Record
from doublehead.summary import Summary, Tally

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
    record: Record
    periods: Summary | None  # its groups are stretches of time
    curve: Reliability
    histogram: Histogram
    risk: RiskCoverage
    accepted: Array  # (T,) samples of at least each threshold, or their weight
    wrong: Array  # (T,) and how many of these are wrong
    guaranteed: tuple[ThresholdChoice, ...]  # one per MAX_ERRORS; none with sample weights

    @property
    def classes(self) -> ClassGaps | None:
        """The class-wise gaps; None where only confidences are known."""
        return self.summary.classes


@dataclass(frozen=True)
class Shifted:
    """One method on one shifted set; nan where a number is not known."""

    accuracy: float
    ece: float
    floor_high: float
    mean_confidence: float
    auroc: float


def measure(name: str, p: Predictions | Record, n_bins: int, seed: int) -> Method:
    """Everything about one set of predictions; a second or so for 10,000 samples."""
    record = Record.of(p, n_bins) if isinstance(p, Predictions) else p
    summary, outcomes = record.summary(seed), record.outcomes
    assert summary.bins is not None
    accepted, wrong = at_thresholds(outcomes, THRESHOLDS)
    confidences: Any = outcomes  # all that the curve reads
    return Method(
        name=name,
        summary=summary,
        record=record,
        periods=record.periods(seed),
        curve=reliability(summary.bins, n_bins, seed),
        histogram=confidence_histogram(summary.bins, n_bins),
        risk=risk_coverage_curve(confidences),
        accepted=accepted,
        wrong=wrong,
        guaranteed=tuple(
            summary.abstain(max_error) for max_error in MAX_ERRORS if summary.answers is not None
        ),
    )


def at_thresholds(p: Outcomes, thresholds: Array) -> tuple[Array, Array]:
    """How many samples (or what weight) have at least each confidence, and how many of these are wrong."""
    order = p.confidence.argsort(descending=True)
    weights = torch.ones(len(p), dtype=torch.int64) if p.weights is None else p.weights
    counted = torch.stack([weights, weights * ~p.correct])[:, order].cumsum(
        1
    )  # (2, N) among the most confident
    kept = torch.searchsorted(-p.confidence[order].double(), -torch.from_numpy(thresholds), right=True)
    accepted, wrong = torch.nn.functional.pad(counted, (1, 0))[:, kept].numpy()
    return accepted, wrong


def measure_shift(
    own: Outcomes, shifted: Predictions | Record | Mapping[str, float], n_bins: int, seed: int
) -> Shifted:
    """One method on shifted data: from predictions, or from numbers by name that were measured before."""
    if isinstance(shifted, Mapping):
        known = {key: float(shifted.get(key, np.nan)) for key in Shifted.__dataclass_fields__}
        return Shifted(**known)
    found = shifted.outcomes if isinstance(shifted, Record) else Outcomes.of(shifted)
    values = Tally.of(found, n_bins).summary(seed).values
    return Shifted(
        accuracy=values["accuracy"],
        ece=values["ece"],
        floor_high=values["ece_floor_high"],
        mean_confidence=values["mean_confidence"],
        auroc=metrics.auroc(own.confidence, found.confidence),
    )
