"""Calibrators fitted after training: one contract, `fit(predictions) -> self`, then `calibrator(logits) -> logits`."""

from doublehead.calibrators.affine import Dirichlet, Matrix, Vector
from doublehead.calibrators.base import Calibrator, NotConverged, NotFitted
from doublehead.calibrators.binary import Beta, Platt
from doublehead.calibrators.choose import Choice, choose
from doublehead.calibrators.ensemble import EnsembleTemperature
from doublehead.calibrators.gaussian_process import GaussianProcess
from doublehead.calibrators.head import Head
from doublehead.calibrators.histogram import BBQ, HistogramBinning
from doublehead.calibrators.identity import Identity
from doublehead.calibrators.isotonic import Isotonic
from doublehead.calibrators.per_label import PerLabel
from doublehead.calibrators.spline import Spline
from doublehead.calibrators.storage import load, save
from doublehead.calibrators.table import CALIBRATORS, choose_calibrator, make
from doublehead.calibrators.temperature import Temperature, TemperatureGrid, fit_inverse_temperature

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
