"""Parametric calibrators of one probability: Platt scaling and beta calibration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from doublehead.calibrators.base import Calibrator
from doublehead.calibrators.maps import log_odds
from doublehead.calibrators.optimise import fit_logistic
from doublehead.predictions import Predictions

CLASSES_AT_ONCE = 64  # one-vs-rest fits in one computation


class Platt(Calibrator):
    """A line through the log odds of class 1. Use it for binary models, above all scores that are not probabilities.

    With `smooth` the labels count as (n1 + 1) / (n1 + 2) and 1 / (n0 + 2), as in Platt (1999), so that few or separable
    data give finite answers.

    >>> p = Predictions.from_binary([-2.0, -1.0, 1.0, 2.0], [0, 1, 0, 1])
    >>> Platt().fit(p).slope_.shape
    torch.Size([])
    """

    learned = ("slope_", "shift_")
    binary_only = True

    slope_: Tensor
    shift_: Tensor

    def __init__(self, smooth: bool = True) -> None:
        super().__init__()
        self.smooth = smooth

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        odds = (predictions.logits[:, 1] - predictions.logits[:, 0]).double()
        targets = predictions.labels.double()
        if self.smooth:
            ones = targets.sum()
            zeros = len(targets) - ones
            targets = torch.where(targets > 0, (ones + 1) / (ones + 2), 1 / (zeros + 2))
        features = torch.stack([odds, torch.ones_like(odds)], 1)[None]
        towards = odds.new_tensor([[1.0, 0.0]])
        weights, _, converged = fit_logistic(features, targets[None], towards=towards, ridge=1e-9)
        return {"slope_": weights[0, 0], "shift_": weights[0, 1], "converged_": converged.all()}

    def _transform(self, logits: Tensor) -> Tensor:
        odds = logits[..., 1] - logits[..., 0]
        moved = odds * self.slope_.to(odds.dtype) + self.shift_.to(odds.dtype)
        return torch.stack([torch.zeros_like(moved), moved], -1)


class Beta(Calibrator):
    """A bend and a shift of each probability (Kull et al. 2017). Use it where Platt's line is too stiff.

    log odds = a log p - b log(1 - p) + c with a, b >= 0, a tiny pull towards a = b = 1, c = 0 keeping them finite.
    Two classes share one map of class 1; more classes get one each, normalised to sum to 1.

    >>> p = Predictions.from_binary([0.1, 0.2, 0.7, 0.9], [0, 1, 0, 1], are_probs=True)
    >>> Beta().fit(p).weights_.shape
    torch.Size([1, 3])
    """

    learned = ("weights_",)

    weights_: Tensor  # (1 or K, 3): a, b, c

    def _learn(self, predictions: Predictions) -> dict[str, Any]:
        odds = log_odds(predictions.logits.double()).T  # (K, N)
        targets = one_hot(predictions.labels, predictions.n_classes).T
        if predictions.n_classes == 2:
            odds, targets = odds[1:], targets[1:]
        fits = [
            _fit_beta(*part)
            for part in zip(odds.split(CLASSES_AT_ONCE), targets.split(CLASSES_AT_ONCE), strict=True)
        ]
        converged = torch.cat([done for _, done in fits])
        return {
            "weights_": torch.cat([weights for weights, _ in fits]),
            "converged_": converged.all(),
            "facts": f"{int((~converged).sum())} of {len(converged)} class maps are short of their optimum",
        }

    def _transform(self, logits: Tensor) -> Tensor:
        weights = self.weights_.to(logits.dtype)
        if len(weights) == 1:
            moved = _features(logits[..., 1] - logits[..., 0]) @ weights[0]
            return torch.stack([torch.zeros_like(moved), moved], -1)
        moved = (_features(log_odds(logits)) * weights).sum(-1)
        return logsigmoid(moved).log_softmax(-1)

    def _n_classes(self) -> int:
        return max(2, len(self.weights_))


def _features(odds: Tensor) -> Tensor:
    """(...) -> (..., 3): log p, -log(1 - p), 1."""
    return torch.stack([logsigmoid(odds), -logsigmoid(-odds), torch.ones_like(odds)], -1)


def _fit_beta(odds: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """a, b, c (C, 3) for odds and targets (C, N).

    The problem is convex: its optimum is the free fit where that has no negative weight, else the best of the fits
    with a, b or both held at 0.
    """
    features, towards = _features(odds), odds.new_tensor([[1.0, 1.0, 0.0]])
    weights, _, converged = fit_logistic(features, targets, towards=towards)
    open_ = (weights[:, :2] < 0).any(1)  # where the free fit breaks a bound
    best = torch.where(open_, torch.inf, -torch.inf)
    for held in ([0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.0, 0.0, 1.0]) if bool(open_.any()) else ():
        mask = features.new_tensor(held)
        fit, loss, done = fit_logistic(features * mask, targets, towards=towards)
        better = (fit * mask >= 0)[:, :2].all(1) & (loss < best)
        best = torch.where(better, loss, best)
        weights, converged = (
            torch.where(better[:, None], fit * mask, weights),
            torch.where(better, done, converged),
        )
    return weights, converged
