"""Accuracy, the proper scores and AUROC: what calibration alone cannot see."""

from __future__ import annotations

import torch
from torch import Tensor

from doublehead.predictions import Predictions
from doublehead.score_arrays import ArrayLike, Target, as_float_tensor


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


def auroc(positive: ArrayLike, negative: ArrayLike) -> float:
    """The chance that a positive scores above a negative, a tie counting half (area under the ROC curve)."""
    own, other = _check_side(positive, "positive"), _check_side(negative, "negative").sort().values
    below, up_to = (torch.searchsorted(other, own, right=right) for right in (False, True))
    return float((below + up_to).double().mean()) / (2 * len(other))


def _check_side(values: ArrayLike, name: str) -> Tensor:
    scores = as_float_tensor(values, name)
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(f"{name} must have shape (N,) with N >= 1, got {tuple(scores.shape)}")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError(
            f"{name} must be finite, got {int((~torch.isfinite(scores)).sum())} non-finite values"
        )
    return scores.double()
