"""The calibrators by name, and the choice among them by cross-validation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from doublehead.calibrators.affine import Dirichlet, Matrix, Vector
from doublehead.calibrators.base import Calibrator, NotConverged
from doublehead.calibrators.binary import Beta, Platt
from doublehead.calibrators.ensemble import EnsembleTemperature
from doublehead.calibrators.gaussian_process import GaussianProcess
from doublehead.calibrators.histogram import BBQ, HistogramBinning
from doublehead.calibrators.identity import Identity
from doublehead.calibrators.isotonic import Isotonic
from doublehead.calibrators.spline import Spline
from doublehead.calibrators.temperature import Temperature, TemperatureGrid
from doublehead.predictions import Predictions

# To these `doublehead.HeadCalibrator`, which stands above this package, adds itself as "head".
CALIBRATORS: dict[str, type[Calibrator]] = {
    "none": Identity,
    "temperature": Temperature,
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
}
FEW_CLASSES = 100  # beyond, these learn too much from too little: K * K weights, or a map for every class
_FOR_FEW_CLASSES = ("matrix", "dirichlet", "beta", "bbq")


class Score(NamedTuple):
    """How a method did on samples it was not fitted on."""

    method: str
    nll: float  # nan where it could not be fitted
    behind: float  # how much larger its NLL is than the winner's
    behind_error: float  # the standard error of that difference, sample by sample
    note: str


class Choice(NamedTuple):
    """The winner, fitted on all of the data, and how all candidates did, best first."""

    calibrator: Calibrator
    method: str
    scores: list[Score]

    def why(self) -> str:
        """The choice in one sentence."""
        first, *rest = (score for score in self.scores if score.nll == score.nll)
        sentence = f"{self.method} has the lowest cross-validated NLL, {first.nll:.4f}"
        if not rest:
            return sentence
        second = rest[0]
        gap = f"{second.behind:.4f} behind (standard error {second.behind_error:.4f})"
        return f"{sentence}; next is {second.method}, {gap}"


def make(method: str, **params: Any) -> Calibrator:
    """The unfitted calibrator of this name.

    >>> make("histogram", n_bins=10).n_bins
    10
    """
    if method not in CALIBRATORS:
        raise ValueError(f"method must be one of {sorted(CALIBRATORS)}, got {method!r}")
    return CALIBRATORS[method](**params)


def choose(
    predictions: Predictions,
    methods: Sequence[str] | Mapping[str, Calibrator] | None = None,
    folds: int = 5,
    seed: int = 0,
) -> Choice:
    """Pick the calibrator with the lowest NLL on held-out folds and fit it on all of the predictions.

    `methods` are names, or names with calibrators to try under them; by default all that suit the number of classes,
    doing nothing among them. A method that cannot be fitted is listed with the reason and is out of the race.

    >>> p = Predictions([[4.0, 0.0]] * 20, [0] * 15 + [1] * 5)
    >>> choose(p, ["none", "temperature"]).method
    'temperature'
    """
    if not 2 <= folds <= len(predictions):
        raise ValueError(f"folds must lie in 2..{len(predictions)}, the number of samples, got {folds}")
    candidates = _candidates(predictions.n_classes, methods)
    fold_of = _fold_of(len(predictions), folds, seed).to(predictions.labels.device)
    results = {name: _held_out_nll(each, predictions, fold_of, folds) for name, each in candidates.items()}
    able = {name: losses for name, (losses, _) in results.items() if losses is not None}
    if not able:
        reasons = "; ".join(f"{name}: {note}" for name, (_, note) in results.items())
        raise ValueError(f"none of the methods could be fitted: {reasons}")
    winner = min(able, key=lambda name: float(able[name].mean()))
    scores = [_score(name, *result, able[winner]) for name, result in results.items()]
    scores.sort(key=lambda score: (score.nll != score.nll, score.nll))
    return Choice(candidates[winner].fresh().fit(predictions), winner, scores)


def _candidates(
    n_classes: int, methods: Sequence[str] | Mapping[str, Calibrator] | None
) -> dict[str, Calibrator]:
    if isinstance(methods, Mapping):
        return dict(methods)
    if methods is None:
        left_out = ["temperature_grid"] + ([] if n_classes == 2 else ["platt"])
        left_out += _FOR_FEW_CLASSES if n_classes > FEW_CLASSES else ()
        methods = [name for name in CALIBRATORS if name not in left_out]
    if not methods:
        raise ValueError("methods must name at least one calibrator, got none")
    return {name: make(name) for name in methods}


def _fold_of(n: int, folds: int, seed: int) -> Tensor:
    """(N,) the fold of each sample: at random, sizes differing by one at most."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return torch.empty(n, dtype=torch.int64).scatter(0, order, torch.arange(n) % folds)


def _held_out_nll(
    calibrator: Calibrator, predictions: Predictions, fold_of: Tensor, folds: int
) -> tuple[Tensor | None, str]:
    """The loss (N,) of every sample when it was held out, or None, and a note on what went wrong."""
    losses = torch.empty(len(predictions), dtype=torch.float64, device=fold_of.device)
    short = 0
    for fold in range(folds):
        held = fold_of == fold
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotConverged)
                fitted = calibrator.fresh().fit(predictions[~held])
        except (ImportError, ValueError) as error:
            return None, str(error)
        short += not bool(fitted.converged_)
        out = fitted.calibrate(predictions[held])
        losses[held] = cross_entropy(out.logits.double(), out.labels, reduction="none")
    return losses, f"did not converge in {short} of {folds} folds" if short else ""


def _score(name: str, losses: Tensor | None, note: str, best: Tensor) -> Score:
    if losses is None:
        return Score(name, torch.nan, torch.nan, torch.nan, note)
    behind = losses - best
    error = float(behind.std() / len(behind) ** 0.5)
    return Score(name, float(losses.mean()), float(behind.mean()), error, note)
