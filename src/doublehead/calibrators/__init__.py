"""Calibrators fitted after training: one contract, `fit(predictions) -> self`, then `calibrator(logits) -> logits`.

Here are all of them by name, and what is done by name: making one, choosing one by cross-validation, saving, loading.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doublehead.calibrators.base import Calibrator, NotConverged, NotFitted
from doublehead.calibrators.binning import BBQ, HistogramBinning, Isotonic
from doublehead.calibrators.choose import Choice, choose, mean_and_error, stratified_folds
from doublehead.calibrators.head import Head
from doublehead.calibrators.parametric import Beta, Dirichlet, Matrix, PerLabel, Platt, Vector
from doublehead.calibrators.smooth import GaussianProcess, Spline
from doublehead.calibrators.temperature import (
    EnsembleTemperature,
    Identity,
    Temperature,
    TemperatureGrid,
    fit_inverse_temperature,
)
from doublehead.metrics import per_sample
from doublehead.predictions import Predictions
from doublehead.system import read_file, write_file
from doublehead.torch_tools import one_thread

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
    """The calibrator with the lowest NLL on held-out folds, fitted on all predictions, and the comparison of all.

    `methods` are names, or names with calibrators to try under them; by default all that suit the number of classes.
    One that cannot be fitted is listed with the reason. The best of `none`, `temperature` and `head` is kept unless
    another beats it by 2.5 standard errors. `progress` is called before each method with its name, its number and
    their count.

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
    if methods is None:
        # temperature_grid is as temperature, and dirichlet, on probabilities, as matrix
        left_out = ["temperature_grid", "dirichlet", "per_label"]
        left_out += [] if predictions.n_classes == 2 else ["platt"]
        left_out += _FOR_FEW_CLASSES if predictions.n_classes > MAX_CLASSES else ()
        methods = [name for name in CALIBRATORS if name not in left_out]
    if not methods:
        raise ValueError("methods must name at least one calibrator, got none")
    candidates = dict(methods) if isinstance(methods, Mapping) else {name: make(name) for name in methods}
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
    baseline = [name for name in ("none", "temperature", "head") if nlls.get(name) is not None]
    choice = choose(nlls, baseline, notes=notes)
    return candidates[choice.chosen].fresh().fit(predictions), choice


def _held_out_nll(
    calibrator: Calibrator, predictions: Predictions, fold_of: Tensor, folds: int, best: Tensor | None
) -> tuple[Tensor | None, str]:
    """The loss (N,) of every sample when it was held out, or None, and a note on what went wrong.

    A candidate far above the `best` losses so far after the first fold is not fitted to the other folds.
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
        except Exception as error:  # whatever it raises: the candidate is left out
            return None, f"{type(error).__name__}: {error}"
        short += not bool(fitted.converged_)
        nll = per_sample(out.with_logits(out.logits.double()))["nll"]
        losses[held] = predictions.target.rows(held).weighted(nll)
        if fold == 0 and best is not None:
            gap, spread = mean_and_error(losses[held] - best[held])
            if gap > BEHIND * spread:
                return None, f"left out after the first of {folds} folds, its NLL {gap:.4f} too high"
    return losses, f"did not converge in {short} of {folds} folds" if short else ""


# --- files: one safetensors file, with name and parameters as JSON in its header, no pickle


def save(
    calibrator: Calibrator, path: str | os.PathLike[str], facts: Mapping[str, Any] | None = None
) -> Path:
    """Write a fitted calibrator, and `facts` of your own that JSON knows, into one safetensors file."""
    path = Path(path)
    write_file(path, calibrator.state_dict(), {**describe(calibrator), **(facts or {})})
    return path


def load(path: str | os.PathLike[str]) -> Calibrator:
    """The calibrator that `save` wrote to `path`, fitted."""
    about, tensors = read_file(Path(path))
    if "method" not in about:
        raise ValueError(f"{path} must be a file of a calibrator, got that of a network")
    calibrator = make(about["method"], **about["params"])
    calibrator.load_state_dict(tensors)
    return calibrator


def describe(calibrator: Calibrator) -> dict[str, Any]:
    """Name and parameters of a fitted calibrator; its `state_dict` is the rest."""
    names = [name for name, kind in CALIBRATORS.items() if type(calibrator) is kind]
    if not names:
        raise TypeError(f"calibrator must be one of {sorted(CALIBRATORS)}, got {type(calibrator).__name__}")
    if not calibrator.is_fitted:
        raise NotFitted(f"this {type(calibrator).__name__} is not fitted: there is nothing to save")
    return {"method": names[0], "params": calibrator.get_params()}
