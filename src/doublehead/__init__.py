"""Calibrated probabilities for PyTorch classifiers.

Three verbs: `evaluate` measures predictions, `calibrate` repairs a network or predictions, `report` shows them. To train
calibration heads beside a network, put a `DoubleHead` beside your training loop.
"""

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
    "calibrate",
    "calibrators",
    "choose",
    "load",
    "losses",
    "metrics",
]
