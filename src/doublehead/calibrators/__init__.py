"""Calibrators fitted after training: one contract, `fit(predictions) -> self`, then `calibrator(logits) -> logits`."""

from doublehead.calibrators.base import Calibrator, NotConverged, NotFitted
from doublehead.calibrators.temperature import Temperature, TemperatureGrid, fit_inverse_temperature

__all__ = [
    "Calibrator",
    "NotConverged",
    "NotFitted",
    "Temperature",
    "TemperatureGrid",
    "fit_inverse_temperature",
]
