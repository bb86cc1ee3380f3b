"""Numbers about predictions, as fractions: calibration errors, proper scores, floor and intervals, shift, decisions."""

from doublehead.metrics.calibration import ece, ece2, mce
from doublehead.metrics.scores import accuracy, brier, mean_confidence, mean_entropy, nll, overconfidence
from doublehead.metrics.summary import evaluate
from doublehead.metrics.uncertainty import Floor, ece_floor

__all__ = [
    "Floor",
    "accuracy",
    "brier",
    "ece",
    "ece2",
    "ece_floor",
    "evaluate",
    "mce",
    "mean_confidence",
    "mean_entropy",
    "nll",
    "overconfidence",
]
