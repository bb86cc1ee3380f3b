"""Calibration errors over bins: how far confidence is from accuracy. All are fractions, 0 is perfect."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from doublehead.bins import Bins, check_n_bins
from doublehead.predictions import Predictions
from doublehead.torch_tools import one_thread

Components: TypeAlias = Literal["top", "all", "classwise"]
Norm: TypeAlias = Literal["l1", "l2"]


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


def adaptive_ece(p: Predictions, n_bins: int = 15) -> float:
    """ECE over bins that hold equally many samples (sizes differ by at most one).

    Use it when most confidences crowd near 1 and leave equal-width bins empty. Samples of equal confidence count
    with their common accuracy, so their order never matters; with fewer samples than bins each sample is a bin.

    >>> adaptive_ece(Predictions.from_probs([[0.75, 0.25], [0.75, 0.25]], [0, 1]), n_bins=2)
    0.25
    """
    counts, excess, _ = _equal_mass(*_cumulative(*p.top_label()), n_bins)
    return float(excess.abs().sum() / counts.sum())


def debiased_ece(p: Predictions, n_bins: int = 15, norm: Norm = "l2") -> float:
    """Calibration error with the part removed that chance alone puts into equal-mass bins (Kumar et al. 2019).

    Use it to compare models on test sets of different or small size. "l2" subtracts from each squared gap the
    variance of the bin's accuracy and takes the root (0 where noise explains everything; compare with `ece2`).
    "l1" subtracts the mean rise of |gap| under normal noise of that variance (compare with `adaptive_ece`).
    """
    counts, excess, right = _equal_mass(*_cumulative(*p.top_label()), n_bins)
    gap, hit = excess / counts, right / counts
    spread = hit * (1 - hit)
    if _check_norm(norm) == "l2":
        # A bin of one sample says nothing about its own variance and counts as 0.
        squares = (gap.square() - spread / (counts - 1)).where(counts > 1, 0.0)
        return float(((counts * squares).sum() / counts.sum()).clamp(min=0).sqrt())
    noisy = _mean_folded_normal(gap, (spread / counts).sqrt())
    return float((counts * (2 * gap.abs() - noisy)).sum() / counts.sum())


def ece_sweep(p: Predictions, norm: Norm = "l1") -> float:
    """ECE over the largest number of equal-mass bins whose accuracies still rise with confidence (Roelofs et al. 2022).

    Use it when no number of bins is given by custom: the data choose it, which lowers the bias of a fixed choice.
    The sweep starts at one bin and stops before the first number of bins that breaks monotony.
    """
    sums = _cumulative(*p.top_label())
    counts, excess, _ = _equal_mass(*sums, _sweep(*sums))
    if _check_norm(norm) == "l2":
        return float(((excess.square() / counts).sum() / counts.sum()).sqrt())
    return float(excess.abs().sum() / counts.sum())


@one_thread()  # the operations are too short to share
def _cumulative(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """(N + 1,) float64 running sums of confidence and accuracy in rising order of confidence, on the CPU.

    Each sample of a group of equal confidences counts with the group's accuracy.
    """
    ordered, order = confidence.cpu().sort()
    _, group, size = ordered.unique_consecutive(return_inverse=True, return_counts=True)
    right = torch.zeros(len(size), dtype=torch.float64).index_add_(0, group, correct.cpu()[order].double())
    columns = torch.stack([ordered.double(), (right / size)[group]])
    confidence_sums, correct_sums = torch.cat([columns.new_zeros(2, 1), columns.cumsum(1)], 1)
    return confidence_sums, correct_sums


def _equal_mass(confidence_sums: Tensor, correct_sums: Tensor, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, sums of confidence minus accuracy, and sums of accuracy of `n_bins` bins (at most N) of equal mass."""
    n = len(correct_sums) - 1
    n_bins = min(check_n_bins(n_bins), n)
    edges = torch.arange(n_bins + 1) * n // n_bins
    right = correct_sums[edges].diff()
    return edges.diff().double(), confidence_sums[edges].diff() - right, right


def _sweep(confidence_sums: Tensor, correct_sums: Tensor) -> int:
    """The largest number of equal-mass bins up to which accuracies never fall from one bin to the next."""
    n = len(correct_sums) - 1
    slack = 1e-9  # running sums of up to 1e7 samples round by less
    if bool((correct_sums.diff().diff() >= -slack).all()):
        return n
    for n_bins in range(2, n + 1):
        counts, _, right = _equal_mass(confidence_sums, correct_sums, n_bins)
        if bool(((right / counts).diff() < -slack).any()):
            return n_bins - 1
    return n


def _mean_folded_normal(mean: Tensor, deviation: Tensor) -> Tensor:
    """The mean of |X| for normal X; |mean| where the deviation is 0."""
    ratio = mean / deviation.clamp(min=1e-300)
    height: Tensor = math.sqrt(2 / math.pi) * deviation * (-0.5 * ratio.square()).exp()
    return height + mean * torch.erf(ratio / math.sqrt(2))


def _check_norm(norm: Norm) -> Norm:
    if norm not in ("l1", "l2"):
        raise ValueError(f"norm must be 'l1' or 'l2', got {norm!r}")
    return norm
