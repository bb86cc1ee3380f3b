"""The calibrators by name, and the choice among them by cross-validation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from doublehead.calibrators.affine import Dirichlet, Matrix, Vector
from doublehead.calibrators.base import Calibrator, NotConverged
from doublehead.calibrators.binary import Beta, Platt
from doublehead.calibrators.choose import Choice, choose, stratified_folds
from doublehead.calibrators.ensemble import EnsembleTemperature
from doublehead.calibrators.gaussian_process import GaussianProcess
from doublehead.calibrators.head import Head
from doublehead.calibrators.histogram import BBQ, HistogramBinning
from doublehead.calibrators.identity import Identity
from doublehead.calibrators.isotonic import Isotonic
from doublehead.calibrators.per_label import PerLabel
from doublehead.calibrators.spline import Spline
from doublehead.calibrators.temperature import Temperature, TemperatureGrid
from doublehead.metrics import per_sample
from doublehead.predictions import Predictions
from doublehead.torch_tools import one_thread

CALIBRATORS: dict[str, type[Calibrator]] = {
    "none": Identity,
    "temperature": Temperature,
    "head": Head,
    "temperature_grid": TemperatureGrid,
    "ensemble_temperature": EnsembleTemperature,
    "vector": Vector,
    "matrix": Matrix,
    "dirichlet": Dirichlet,
    "platt": Platt,
    "beta": Beta,
    "histogram": HistogramBinning,
    "isotonic": Isotonic,
    "bbq": BBQ,
    "spline": Spline,
    "gaussian_process": GaussianProcess,
    "per_label": PerLabel,
}
MAX_CLASSES = 100  # beyond, these learn too much from too little: K * K weights, or a map for every class
BEHIND = 5.0  # standard errors of the difference from the best after which a candidate is given up
_FOR_FEW_CLASSES = ("matrix", "dirichlet", "beta", "bbq")


def make(method: str, **params: Any) -> Calibrator:
    """The unfitted calibrator of this name.

    >>> make("histogram", n_bins=10).n_bins
    10
    """
    if method not in CALIBRATORS:
        raise ValueError(f"method must be one of {sorted(CALIBRATORS)}, got {method!r}")
    return CALIBRATORS[method](**params)


def choose_calibrator(
    predictions: Predictions,
    methods: Sequence[str] | Mapping[str, Calibrator] | None = None,
    folds: int = 5,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Calibrator, Choice]:
    """The calibrator with the lowest NLL on held-out folds, fitted on all of the predictions, and how all did.

    `methods` are names, or names with calibrators to try under them; by default all that suit the number of classes.
    One that cannot be fitted is listed with the reason. `none` and `temperature` are kept unless another is better by
    more than a standard error. `progress` is called before each method with its name, its number and their count.

    >>> p = Predictions([[4.0, 0.0]] * 20, [0] * 15 + [1] * 5)
    >>> choose_calibrator(p, ["none", "temperature"])[1].chosen
    'temperature'
    """
    if not 2 <= folds <= len(predictions):
        raise ValueError(f"folds must lie in 2..{len(predictions)}, the number of samples, got {folds}")
    if predictions.n_labels:
        raise TypeError(
            "predictions must have one label per sample, got several: fit calibrators.PerLabel to them"
        )
    candidates = _candidates(predictions, methods)
    fold = stratified_folds(predictions.target.labels, folds, seed)
    nlls: dict[str, Tensor | None] = {}
    notes: dict[str, str] = {}
    for i, (name, calibrator) in enumerate(candidates.items()):
        if progress is not None:
            progress(name, i, len(candidates))
        done = [losses for losses in nlls.values() if losses is not None]
        best = min(done, key=lambda losses: float(losses.mean()), default=None)
        with one_thread():
            nlls[name], note = _held_out_nll(calibrator, predictions, fold, folds, best)
        if note:
            notes[name] = note
    baseline = [name for name in ("none", "temperature") if nlls.get(name) is not None]
    choice = choose(nlls, baseline, notes=notes)
    return candidates[choice.chosen].fresh().fit(predictions), choice


def _candidates(
    predictions: Predictions, methods: Sequence[str] | Mapping[str, Calibrator] | None
) -> dict[str, Calibrator]:
    if isinstance(methods, Mapping):
        return dict(methods)
    if methods is None:
        # temperature_grid is as temperature, and dirichlet, on probabilities, as matrix
        left_out = ["temperature_grid", "dirichlet", "per_label"]
        left_out += [] if predictions.n_classes == 2 else ["platt"]
        left_out += _FOR_FEW_CLASSES if predictions.n_classes > MAX_CLASSES else ()
        methods = [name for name in CALIBRATORS if name not in left_out]
    if not methods:
        raise ValueError("methods must name at least one calibrator, got none")
    return {name: make(name) for name in methods}


def _held_out_nll(
    calibrator: Calibrator, predictions: Predictions, fold_of: Tensor, folds: int, best: Tensor | None
) -> tuple[Tensor | None, str]:
    """The loss (N,) of every sample when it was held out, or None, and a note on what went wrong.

    One that lies far behind the `best` losses so far after the first fold is not fitted to the others.
    """
    losses = torch.empty(len(predictions), dtype=torch.float64, device=fold_of.device)
    short = 0
    for fold in range(folds):
        held = fold_of == fold
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                fitted = calibrator.fresh().fit(predictions[~held])
            out = fitted.calibrate(predictions[held])
        except Exception as error:  # a candidate that fails, however, is out of the race
            return None, f"{type(error).__name__}: {error}"
        short += not bool(fitted.converged_)
        nll = per_sample(out.with_logits(out.logits.double()))["nll"]
        losses[held] = predictions.target.rows(held).weighted(nll)
        if (
            fold == 0
            and best is not None
            and (gap := losses[held] - best[held]).mean() > BEHIND * _error(gap)
        ):
            return (
                None,
                f"left out after the first of {folds} folds, its NLL {float(gap.mean()):.4f} too high",
            )
    return losses, f"did not converge in {short} of {folds} folds" if short else ""


__all__ = ["CALIBRATORS", "NotConverged", "choose_calibrator", "make"]


def _error(values: Tensor) -> float:
    """The standard error of the mean of values (N,)."""
    return float(values.std()) / len(values) ** 0.5 if len(values) > 1 else math.inf
