"""Accuracy, the proper scores and the signs of shift: what calibration alone cannot see."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from doublehead.bins import Bins
from doublehead.predictions import Predictions
from doublehead.score_arrays import ArrayLike, Target, as_float_tensor


class BrierParts(NamedTuple):
    """The Brier score taken apart: brier = calibration + refinement + within_bins.

    calibration: the squared gaps between mean probability and frequency; what recalibration can remove.
    refinement: the spread of the labels that remains in each bin; what only a better classifier can lower.
    within_bins: what the bins do not see, because probabilities within a bin differ; small and of either sign.
    """

    brier: float
    calibration: float
    refinement: float
    within_bins: float


class ShiftScores(NamedTuple):
    """How well a score separates the model's own data (positive) from shifted data (negative)."""

    auroc: float
    aupr: float
    fpr95: float


def accuracy(p: Predictions) -> float:
    """The share of samples whose predicted class is the label; of soft labels the expected share."""
    return mean_of(p, p.correct)


def nll(p: Predictions) -> float:
    """Negative log-likelihood (nats per sample) of the labels: the proper score that punishes confident errors most.

    A label of probability exactly 0 counts as `Predictions.zero_floor`.

    >>> round(nll(Predictions.from_probs([[0.5, 0.5], [0.25, 0.75]], [0, 0])), 4)
    1.0397
    """
    return mean_of(p, per_sample(p)["nll"])


def brier(p: Predictions) -> float:
    """Brier score: squared differences between probs and the one-hot label, summed over classes; 0..2.

    A proper score that stays bounded, so a few confident errors do not decide it. For soft labels, the expected
    score of a label drawn from them.

    >>> brier(Predictions.from_probs([[0.5, 0.5], [0.25, 0.75]], [0, 0]))
    0.8125
    """
    return mean_of(p, per_sample(p)["brier"])


def brier_decomposition(p: Predictions, n_bins: int = 15) -> BrierParts:
    """Take the Brier score apart into calibration and refinement over class-wise bins of equal width.

    Use it to learn whether a bad score asks for recalibration or for a better model.
    """
    bins = Bins.classwise(p, n_bins)
    mass, n = bins.mass.double(), bins.n / p.n_classes  # (K, n_bins)
    hit = bins.accuracy.nan_to_num(0.0)
    calibration = float((bins.excess.square() / mass.where(mass > 0, 1.0)).sum()) / n
    refinement = float((mass * hit * (1 - hit)).sum()) / n
    total = brier(p)
    return BrierParts(total, calibration, refinement, total - calibration - refinement)


def mean_entropy(p: Predictions) -> float:
    """The mean Shannon entropy (nats) of the predicted distributions: how undecided the model is."""
    return mean_of(p, per_sample(p)["entropy"])


def mean_confidence(p: Predictions) -> float:
    """The mean probability of the predicted class."""
    return mean_of(p, p.confidence)


def overconfidence(p: Predictions) -> float:
    """Mean confidence minus accuracy: positive for an overconfident model, negative for an underconfident one."""
    return mean_confidence(p) - accuracy(p)


def mean_of(p: Predictions, values: Tensor) -> float:
    """The mean over samples (N,), weighted where there are weights."""
    values = values.double()
    return float(values.mean() if p.weights is None else (values * p.weights).sum() / p.weights.sum())


def per_sample(p: Predictions) -> dict[str, Tensor]:
    """(N,) float64 each: "nll", "brier" and "entropy" of every sample, in one chunked pass."""
    parts: dict[str, list[Tensor]] = {"nll": [], "brier": [], "entropy": []}
    for scores, labels in p.score_chunks():
        # clamped: a probability of 0 adds 0 to the entropy and a finite NLL
        logs = scores.clamp(min=p.zero_floor).log() if p.are_probs else scores.log_softmax(1)  # (B, K)
        probs = scores if p.are_probs else logs.exp()
        truth = Target(labels) if labels.ndim == 1 else Target(labels, labels)
        at_label = truth.of(probs).double()
        parts["nll"].append(-truth.of(logs).double())
        parts["brier"].append(probs.square().sum(1).double() - 2 * at_label + 1)
        parts["entropy"].append(-(probs * logs).sum(1).double())
    return {name: torch.cat(chunks) for name, chunks in parts.items()}


def zero_labels(p: Predictions) -> Tensor:
    """(N,) bool: where the label has a probability of exactly 0, so that its NLL hangs on `Predictions.zero_floor`."""
    if not p.are_probs:
        return torch.zeros(len(p), dtype=torch.bool, device=p.device)
    return torch.cat([scores.gather(1, labels[:, None])[:, 0] == 0 for scores, labels in p.score_chunks()])


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
    own, other = (q.confidence if by == "confidence" else -per_sample(q)["entropy"] for q in (p, shifted))
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
