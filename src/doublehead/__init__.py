"""Calibrated probabilities for PyTorch classifiers.

A classifier is calibrated if it is correct 80 % of the time when it says 80 %. Three verbs, in Python and on the
command line (`doublehead evaluate | calibrate | report`):

- `evaluate(probs, labels)` measures predictions: a `Summary` that prints as a table, with intervals and a verdict.
- `calibrate(network, calib_data)` returns a `Calibrated`: network and calibration as one module, whose calls return
  calibrated log-probabilities. Predictions are kept. `calibrate(predictions)` returns a fitted `Calibrator`.
- `report({"before": p, "after": q}, "report.html")` writes an HTML page that compares them.

>>> import torch
>>> import doublehead as dh
>>> inputs, labels = torch.randn(600, 4), torch.randint(3, (600,))
>>> network = torch.nn.Linear(4, 3)  # trained, on other data
>>> model = dh.calibrate(network, (inputs[:300], labels[:300]))
>>> probs = model(inputs[300:]).exp().detach()
>>> summary = dh.evaluate(probs, labels[300:])  # print(summary) shows all numbers
>>> summary.n, summary.n_classes, bool(summary.values["ece"] < 0.5)
(300, 3, True)

`DoubleHead` trains calibration heads beside a network in your own loop; its weights stay bit-identical:

    double = dh.DoubleHead(network, calib_data, follow=optimizer)
    for x, y in batches:
        ...             # your step, as it was
        double.step()   # every tenth call trains the heads once
    model = double.finish()

Predictions are `Predictions` (logits and labels), arrays, DataFrames or files. Whether the numbers are logits or
probabilities is stated, or certain from the file. `metrics`, `losses` and `calibrators` hold the parts;
`doublehead.integrations` is for Lightning, Transformers, scikit-learn, torchmetrics and exports.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from doublehead import calibrators, losses, metrics
from doublehead.bins import Bins
from doublehead.calibrate import calibrate
from doublehead.calibrated import Calibrated
from doublehead.calibration_head import PAPER, CalibrationHead, HeadSpec
from doublehead.calibrators import Calibrator, choose
from doublehead.double_head import DoubleHead
from doublehead.predictions import Predictions
from doublehead.saving import load
from doublehead.shift_guard import ShiftGuard

if TYPE_CHECKING:
    from doublehead.audit import evaluate, report
    from doublehead.stream import Stream
    from doublehead.summary import Summary

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
    "Stream",
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


# Names that need more modules than a training loop does, imported on first use.
_LATER = {"evaluate": "audit", "report": "audit", "Stream": "stream", "Summary": "summary"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"doublehead.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:  # for help() and completion
    return sorted({*globals(), *__all__})
