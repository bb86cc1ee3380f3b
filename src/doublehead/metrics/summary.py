"""The main numbers of a set of predictions in one plain dict."""

from __future__ import annotations

from doublehead.bins import Bins
from doublehead.metrics.binfree import ks_error, smooth_ece
from doublehead.metrics.calibration import adaptive_ece, debiased_ece
from doublehead.metrics.scores import per_sample
from doublehead.metrics.selective import aurc
from doublehead.metrics.uncertainty import ece_floor, fine_bins
from doublehead.predictions import Predictions


def evaluate(p: Predictions, n_bins: int = 15) -> dict[str, float]:
    """The main numbers as fractions: accuracy, errors of calibration with their floor, proper scores.

    >>> numbers = evaluate(Predictions([[2.0, 0.0], [0.0, 1.0]], [0, 1]))
    >>> numbers["n"], numbers["accuracy"], round(numbers["ece"], 4)
    (2, 1.0, 0.1941)
    """
    fine = Bins.top(p, fine_bins(n_bins))
    top, classwise = fine.coarsen(n_bins), Bins.classwise(p, n_bins)
    floor = ece_floor(fine, n_bins)
    confidence, correct = p.top_label()
    scores = per_sample(p)
    pooled = Bins.from_state(classwise.state().sum(1))
    return {
        "n": len(p),
        "accuracy": float(correct.double().mean()),
        "ece": float(top.ece()),
        "ece_floor": floor.mean,
        "ece_floor_low": floor.low,
        "ece_floor_high": floor.high,
        "ece_all": float(pooled.ece()) * p.n_classes,
        "ece_classwise": float(classwise.ece().mean()),
        "adaptive_ece": adaptive_ece(p, n_bins),
        "debiased_ece": debiased_ece(p, n_bins),
        "smooth_ece": smooth_ece(p),
        "ks_error": ks_error(p),
        "mce": float(top.mce()),
        "ece2": float(top.ece2()),
        "nll": float(scores["nll"].mean()),
        "brier": float(scores["brier"].mean()),
        "mean_entropy": float(scores["entropy"].mean()),
        "mean_confidence": float(confidence.double().mean()),
        "aurc": aurc(p),
        "overconfidence": float(confidence.double().mean() - correct.double().mean()),
    }
