"""Calibrated probabilities for PyTorch classifiers.

Three verbs, in Python as on the command line: `evaluate` measures predictions, `calibrate` calibrates a network or
predictions, `report` writes a page about them. `DoubleHead` trains calibration heads beside a network, in your own
loop.
"""

from typing import Any

from doublehead import calibrators, losses, metrics
from doublehead.bins import Bins
from doublehead.calibrate import calibrate
from doublehead.calibration_head import PAPER, CalibrationHead, HeadSpec
from doublehead.calibrators import Calibrator, choose
from doublehead.double_head import Calibrated, DoubleHead
from doublehead.predictions import Predictions
from doublehead.saving import load
from doublehead.shift_guard import ShiftGuard

__version__ = "0.2.0"

__all__ = [
    "PAPER",
    "Bins",
    "Calibrated",
    "CalibrationHead",
    "Calibrator",
    "DoubleHead",
    "HeadSpec",
    "Predictions",
    "ShiftGuard",
    "Summary",
    "calibrate",
    "calibrators",
    "choose",
    "evaluate",
    "load",
    "losses",
    "metrics",
    "report",
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
