"""Can the model tell that data are not like its own? Shifted samples should come with less confidence."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from doublehead.metrics.scores import per_sample
from doublehead.predictions import Predictions
from doublehead.score_arrays import ArrayLike, as_float_tensor


class ShiftScores(NamedTuple):
    """How well a score separates the model's own data (positive) from shifted data (negative)."""

    auroc: float
    aupr: float
    fpr95: float


def shift_detection(
    p: Predictions, shifted: Predictions, by: Literal["confidence", "entropy"] = "confidence"
) -> ShiftScores:
    """AUROC, AUPR and FPR@95 of telling a model's own test data `p` from `shifted` data.

    The score is the confidence in the predicted class or the negative entropy of the whole distribution. AUROC 0.5
    is a guess, 1 is perfect, and it does not depend on how many samples each side has; AUPR does.

    >>> p = Predictions.from_probs([[0.9, 0.1], [0.2, 0.8]], [0, 1])
    >>> shift_detection(p, Predictions.from_probs([[0.6, 0.4], [0.15, 0.85]], [0, 0]))
    ShiftScores(auroc=0.75, aupr=0.8333333333333333, fpr95=0.5)
    """
    if by not in ("confidence", "entropy"):
        raise ValueError(f"by must be 'confidence' or 'entropy', got {by!r}")
    own, other = _certainty(p, by), _certainty(shifted, by)
    return ShiftScores(auroc(own, other), aupr(own, other), fpr95(own, other))


def auroc(positive: ArrayLike, negative: ArrayLike) -> float:
    """The chance that a positive scores above a negative, a tie counting half (area under the ROC curve)."""
    true, false, n_true, n_false = _roc(positive, negative)
    widths, heights = false.diff(), (true[1:] + true[:-1]) / 2
    return float((widths * heights).sum() / (n_true * n_false))


def aupr(positive: ArrayLike, negative: ArrayLike) -> float:
    """Area under the precision-recall curve as average precision (no interpolation).

    Unlike AUROC it depends on the share of positives: a guess scores that share.
    """
    true, false, n_true, _ = _roc(positive, negative)
    precision = true[1:] / (true[1:] + false[1:])
    return float((true.diff() * precision).sum() / n_true)


def fpr95(positive: ArrayLike, negative: ArrayLike) -> float:
    """The share of negatives let in by the strictest threshold that lets in at least 95 % of the positives."""
    true, false, n_true, n_false = _roc(positive, negative)
    enough = (true >= 0.95 * n_true - 1e-6).to(torch.int8).argmax()
    return float(false[enough] / n_false)


def _roc(positive: ArrayLike, negative: ArrayLike) -> tuple[Tensor, Tensor, int, int]:
    """Positives and negatives at or above each distinct score, from none to all; float64, and how many of each."""
    sides = [_check_side(positive, "positive"), _check_side(negative, "negative")]
    scores, group = torch.cat(sides).unique(return_inverse=True)  # rising
    counts = scores.new_zeros(2, len(scores) + 1, dtype=torch.float64)
    for row, part in zip(counts, group.split([len(side) for side in sides])):
        row[:-1].index_add_(0, part, torch.ones_like(part, dtype=torch.float64))
    true, false = counts.flip(1).cumsum(1)
    return true, false, len(sides[0]), len(sides[1])


def _check_side(values: ArrayLike, name: str) -> Tensor:
    scores = as_float_tensor(values, name)
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name} must have shape (N,) with N >= 1, got {tuple(scores.shape)}")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError(
            f"{name} must be finite, got {int((~torch.isfinite(scores)).sum())} non-finite values"
        )
    return scores.double()


def _certainty(p: Predictions, by: str) -> Tensor:
    return p.confidence if by == "confidence" else -per_sample(p)["entropy"]
