"""Calibrators fitted after training: one contract, `fit(predictions) -> self`, then `calibrator(logits) -> logits`."""

from doublehead.calibrators.base import Calibrator, NotConverged, NotFitted
from doublehead.calibrators.binning import BBQ, HistogramBinning, Isotonic
from doublehead.calibrators.choose import Choice, choose
from doublehead.calibrators.head import Head
from doublehead.calibrators.parametric import Beta, Dirichlet, Matrix, Platt, Vector
from doublehead.calibrators.per_label import PerLabel
from doublehead.calibrators.smooth import GaussianProcess, Spline
from doublehead.calibrators.table import CALIBRATORS, choose_calibrator, load, make, save
from doublehead.calibrators.temperature import (
    EnsembleTemperature,
    Identity,
    Temperature,
    TemperatureGrid,
    fit_inverse_temperature,
)

__all__ = [
    "BBQ",
    "CALIBRATORS",
    "Beta",
    "Calibrator",
    "Choice",
    "Dirichlet",
    "EnsembleTemperature",
    "GaussianProcess",
    "Head",
    "HistogramBinning",
    "Identity",
    "Isotonic",
    "Matrix",
    "NotConverged",
    "NotFitted",
    "PerLabel",
    "Platt",
    "Spline",
    "Temperature",
    "TemperatureGrid",
    "Vector",
    "choose",
    "choose_calibrator",
    "fit_inverse_temperature",
    "load",
    "make",
    "save",
]
