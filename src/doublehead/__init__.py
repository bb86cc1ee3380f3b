"""doublehead: deep classifiers that tell the truth about their confidence.

The public names in the order data flows: a network with its calibration head, what it predicts, how good that is.
"""

from typing import Any

from doublehead import calibrators, losses, metrics
from doublehead.adafocal import AdaFocal
from doublehead.bins import Bins
from doublehead.double_head import (
    Alternation,
    Annealing,
    CalibrationHead,
    DoubleHead,
    Heads,
    Readings,
)
from doublehead.head_bank import HeadBank, HeadSpec, Selection, hold_back
from doublehead.head_inputs import Standardise, statistics
from doublehead.integrations.fit_head import fit_head, fit_head_on, refit
from doublehead.integrations.head_calibrator import HeadCalibrator
from doublehead.predictions import Predictions
from doublehead.shift_guard import ShiftGuard

__version__ = "0.1.0"

__all__ = [
    "AdaFocal",
    "Alternation",
    "Annealing",
    "Bins",
    "CalibrationHead",
    "DoubleHead",
    "HeadBank",
    "HeadCalibrator",
    "HeadSpec",
    "Heads",
    "Predictions",
    "Readings",
    "Selection",
    "ShiftGuard",
    "Standardise",
    "Summary",
    "calibrators",
    "evaluate",
    "fit_head",
    "fit_head_on",
    "hold_back",
    "losses",
    "metrics",
    "refit",
    "report",
    "statistics",
]


def __getattr__(name: str) -> Any:
    """The names that need more modules than a training loop does, imported on first use."""
    if name in ("evaluate", "report"):
        from doublehead import audit

        return getattr(audit, name)
    if name == "Summary":
        from doublehead.summary import Summary

        return Summary
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
