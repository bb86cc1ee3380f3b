"""Numbers about predictions, as fractions: calibration errors, proper scores, floor and intervals, shift, decisions."""

from typing import Any

from doublehead.metrics.calibration import (
    adaptive_ece,
    debiased_ece,
    ece,
    ece2,
    ks_error,
    mce,
    mmce,
    smooth_ece,
)
from doublehead.metrics.scores import (
    accuracy,
    auroc,
    brier,
    mean_confidence,
    mean_entropy,
    nll,
    overconfidence,
    per_sample,
    zero_labels,
)
from doublehead.metrics.selective import (
    RiskCoverage,
    ThresholdChoice,
    aurc,
    choose_threshold,
    clopper_pearson_upper,
    risk_coverage,
    threshold_counts,
)
from doublehead.metrics.uncertainty import (
    CalibrationTest,
    Floor,
    Interval,
    bootstrap,
    calibration_test,
    ece_floor,
    fine_bins,
    floor_and_test,
)

__all__ = [
    "CalibrationError",
    "CalibrationTest",
    "Floor",
    "Interval",
    "RiskCoverage",
    "ThresholdChoice",
    "accuracy",
    "adaptive_ece",
    "aurc",
    "auroc",
    "bootstrap",
    "brier",
    "calibration_test",
    "choose_threshold",
    "clopper_pearson_upper",
    "debiased_ece",
    "ece",
    "ece2",
    "ece_floor",
    "fine_bins",
    "floor_and_test",
    "ks_error",
    "mce",
    "mean_confidence",
    "mean_entropy",
    "mmce",
    "nll",
    "overconfidence",
    "per_sample",
    "risk_coverage",
    "smooth_ece",
    "threshold_counts",
    "zero_labels",
]


def __getattr__(name: str) -> Any:
    if name == "CalibrationError":  # needs torchmetrics, so it is imported on first use
        from doublehead.metrics.streaming import CalibrationError

        return CalibrationError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
