"""Accuracy and the proper scores: what calibration alone cannot see."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from doublehead.bins import Bins
from doublehead.predictions import Predictions


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


def accuracy(p: Predictions) -> float:
    """The share of samples whose predicted class is the label."""
    return float(p.top_label()[1].double().mean())


def nll(p: Predictions) -> float:
    """Negative log-likelihood (nats per sample) of the labels: the proper score that punishes confident errors most.

    A label of probability exactly 0 counts as `Predictions.zero_floor`.

    >>> round(nll(Predictions.from_probs([[0.5, 0.5], [0.25, 0.75]], [0, 0])), 4)
    1.0397
    """
    return float(per_sample(p)["nll"].mean())


def brier(p: Predictions) -> float:
    """Brier score: squared differences between probs and the one-hot label, summed over classes; 0..2.

    A proper score that stays bounded, so a few confident errors do not decide it.

    >>> brier(Predictions.from_probs([[0.5, 0.5], [0.25, 0.75]], [0, 0]))
    0.8125
    """
    return float(per_sample(p)["brier"].mean())


def brier_decomposition(p: Predictions, n_bins: int = 15) -> BrierParts:
    """Take the Brier score apart into calibration and refinement over class-wise bins of equal width.

    Use it to learn whether a bad score asks for recalibration or for a better model.
    """
    bins = Bins.classwise(p, n_bins)
    counts = bins.counts.clamp(min=1).double()  # (K, n_bins)
    hit = bins.correct_sums / counts
    calibration = float((bins.excess.square() / counts).sum()) / len(p)
    refinement = float((bins.counts * hit * (1 - hit)).sum()) / len(p)
    total = brier(p)
    return BrierParts(total, calibration, refinement, total - calibration - refinement)


def mean_entropy(p: Predictions) -> float:
    """The mean Shannon entropy (nats) of the predicted distributions: how undecided the model is."""
    return float(per_sample(p)["entropy"].mean())


def mean_confidence(p: Predictions) -> float:
    """The mean probability of the predicted class."""
    return float(p.top_label()[0].double().mean())


def overconfidence(p: Predictions) -> float:
    """Mean confidence minus accuracy: positive for an overconfident model, negative for an underconfident one."""
    confidence, correct = p.top_label()
    return float(confidence.double().mean() - correct.double().mean())


def per_sample(p: Predictions) -> dict[str, Tensor]:
    """(N,) float64 each: "nll", "brier" and "entropy" of every sample, in one chunked pass."""
    parts: dict[str, list[Tensor]] = {"nll": [], "brier": [], "entropy": []}
    for scores, labels in p.score_chunks():
        # clamped: a probability of 0 adds 0 to the entropy and a finite NLL
        logs = scores.clamp(min=p.zero_floor).log() if p.are_probs else scores.log_softmax(1)  # (B, K)
        probs = scores if p.are_probs else logs.exp()
        at_label = probs.gather(1, labels[:, None])[:, 0].double()
        parts["nll"].append(-logs.gather(1, labels[:, None])[:, 0].double())
        parts["brier"].append(probs.square().sum(1).double() - 2 * at_label + 1)
        parts["entropy"].append(-(probs * logs).sum(1).double())
    return {name: torch.cat(chunks) for name, chunks in parts.items()}


def zero_labels(p: Predictions) -> Tensor:
    """(N,) bool: where the label has a probability of exactly 0, so that its NLL hangs on `Predictions.zero_floor`."""
    if not p.are_probs:
        return torch.zeros(len(p), dtype=torch.bool, device=p.device)
    return torch.cat([scores.gather(1, labels[:, None])[:, 0] == 0 for scores, labels in p.score_chunks()])
