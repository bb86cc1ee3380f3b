"""Accuracy and the proper scores: what calibration alone cannot see."""

from __future__ import annotations

import torch
from torch import Tensor

from doublehead.predictions import Predictions


def accuracy(p: Predictions) -> float:
    """The share of samples whose predicted class is the label."""
    return float(p.top_label()[1].double().mean())


def nll(p: Predictions) -> float:
    """Negative log-likelihood (nats per sample) of the labels: the proper score that punishes confident errors most.

    A label of probability exactly 0 counts as the smallest normal number of its type (-log = 87.3 in float32).
    """
    return float(per_sample(p)["nll"].mean())


def brier(p: Predictions) -> float:
    """Brier score: squared differences between probs and the one-hot label, summed over classes; 0..2.

    A proper score that stays bounded, so a few confident errors do not decide it.
    """
    return float(per_sample(p)["brier"].mean())


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
        logs = (
            scores.clamp(min=torch.finfo(scores.dtype).tiny).log() if p.are_probs else scores.log_softmax(1)
        )  # (B, K)
        probs = scores if p.are_probs else logs.exp()
        at_label = probs.gather(1, labels[:, None])[:, 0].double()
        parts["nll"].append(-logs.gather(1, labels[:, None])[:, 0].double())
        parts["brier"].append(probs.square().sum(1).double() - 2 * at_label + 1)
        parts["entropy"].append(-(probs * logs).sum(1).double())
    return {name: torch.cat(chunks) for name, chunks in parts.items()}
