"""Calibration errors: how far confidence is from accuracy. All are fractions, 0 is perfect."""

from __future__ import annotations

from typing import Literal, TypeAlias

from doublehead.bins import Bins
from doublehead.predictions import Predictions

Components: TypeAlias = Literal["top", "all", "classwise"]


def ece(
    p: Predictions,
    n_bins: int = 15,
    components: Components = "top",
    *,
    divide_by: Literal["samples", "entries"] = "samples",
) -> float:
    """Expected calibration error: the mean |confidence - accuracy| over bins of equal width.

    "top" looks at the confidence in the predicted class: the number most papers report. "classwise" averages the
    errors of the K one-versus-rest problems: use it when each class's probability is used, not only the largest.
    "all" pools all N*K probabilities into one set of bins; with `divide_by="samples"` the pooled error is divided
    by N, as in the Annealing Double-Head paper's tables, with "entries" by N*K.

    A perfectly calibrated model does not score 0 on finite data: see `ece_floor`.

    >>> p = Predictions.from_probs([[0.75, 0.25], [0.75, 0.25]], [0, 1])
    >>> ece(p), ece(p, components="all"), ece(p, components="all", divide_by="entries")
    (0.25, 0.5, 0.25)
    """
    if components not in ("top", "all", "classwise"):
        raise ValueError(f"components must be 'top', 'all' or 'classwise', got {components!r}")
    if divide_by not in ("samples", "entries"):
        raise ValueError(f"divide_by must be 'samples' or 'entries', got {divide_by!r}")
    if components == "top":
        return float(Bins.top(p, n_bins).ece())
    if components == "classwise":
        return float(Bins.classwise(p, n_bins).ece().mean())
    pooled = float(Bins.pooled(p, n_bins).ece())
    return pooled * p.n_classes if divide_by == "samples" else pooled


def mce(p: Predictions, n_bins: int = 15) -> float:
    """Maximum calibration error: the largest |confidence - accuracy| of any bin.

    Use it where the worst confidence matters. Bins with few samples dominate it, so look at the counts.
    """
    return float(Bins.top(p, n_bins).mce())


def ece2(p: Predictions, n_bins: int = 15) -> float:
    """Root mean squared calibration error over bins of equal width; large gaps weigh more than in `ece`."""
    return float(Bins.top(p, n_bins).ece2())
