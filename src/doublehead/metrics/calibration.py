"""Calibration errors, over bins and without: how far confidence is from accuracy. All are fractions, 0 is perfect."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from doublehead.bins import Bins, check_n_bins
from doublehead.predictions import Predictions
from doublehead.score_arrays import BITS
from doublehead.torch_tools import one_thread

Components: TypeAlias = Literal["top", "all", "classwise"]
Array: TypeAlias = "np.ndarray[Any, Any]"

MESH = 1 << 15  # intervals of 0..1 on which smooth ECE is worked out


def ece(p: Predictions, n_bins: int = 15, components: Components = "top") -> float:
    """Expected calibration error: the mean |confidence - accuracy| over bins of equal width.

    "top" looks at the confidence in the predicted class: the number most papers report. "classwise" averages the
    errors of the K one-versus-rest problems: use it when each class's probability is used, not only the largest.
    "all" pools all N*K probabilities into one set of bins and divides the pooled error by N, as in the Annealing
    Double-Head paper's tables.

    A perfectly calibrated model does not score 0 on finite data: see `ece_floor`.

    >>> p = Predictions.from_probs([[0.75, 0.25], [0.75, 0.25]], [0, 1])
    >>> ece(p), ece(p, components="all")
    (0.25, 0.5)
    """
    if components not in ("top", "all", "classwise"):
        raise ValueError(f"components must be 'top', 'all' or 'classwise', got {components!r}")
    if components == "top":
        return float(Bins.top(p, n_bins).ece())
    if components == "classwise":
        return float(Bins.classwise(p, n_bins).ece().mean())
    return float(Bins.pooled(p, n_bins).ece()) * p.n_classes


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


def debiased_ece(p: Predictions, n_bins: int = 15) -> float:
    """Calibration error with the part removed that chance alone puts into equal-mass bins (Kumar et al. 2019).

    Use it to compare models on test sets of different or small size, beside `ece2`. The variance of a bin's accuracy
    is subtracted from its squared gap, and the root is taken of their mean: 0 where noise explains everything.
    """
    counts, excess, right = _equal_mass(*_cumulative(*p.top_label()), n_bins)
    gap, hit = excess / counts, right / counts
    # A bin of one sample says nothing about its own variance and counts as 0.
    squares = (gap.square() - hit * (1 - hit) / (counts - 1)).where(counts > 1, 0.0)
    return float(((counts * squares).sum() / counts.sum()).clamp(min=0).sqrt())


# --- without bins


def ks_error(p: Predictions) -> float:
    """Kolmogorov-Smirnov calibration error (Gupta et al. 2021): the largest |sum of confidence - correct| / N.

    The sums run over all samples of at most some confidence. Free of bins and of any parameter; use it when a
    number must not hang on a choice. It is at least |overconfidence|, which is the sum over everything.

    >>> ks_error(Predictions.from_probs([[0.75, 0.25], [0.75, 0.25]], [0, 1]))
    0.25
    """
    ordered, excess = _sorted_excess(*p.top_label())
    sums = excess.cumsum(0)
    last_of_group = torch.cat([ordered.diff() > 0, ordered.new_ones(1, dtype=torch.bool)])
    return float(sums.where(last_of_group, 0.0).abs().max() / len(p))


def smooth_ece(p: Predictions) -> float:
    """Smooth ECE (Blasiok and Nakkiran 2023): ECE after smoothing with a Gaussian of the right width.

    A sample's confidence - correct is spread over 0..1 by a Gaussian reflected at both ends, so all of it stays
    inside; the error is the integral of |sum|. The width is the one that equals the error, which makes the number
    continuous in the confidences and free of parameters. Widths down to 1e-3 are resolved.

    >>> round(smooth_ece(Predictions.from_probs([[0.75, 0.25], [0.75, 0.25]], [0, 1])), 3)
    0.25
    """
    confidence, correct = p.top_label()
    spectrum = np.fft.rfft(_mirror(_on_mesh(confidence.double(), correct.double())))
    low, high = 0.0, 1.0
    while high - low > 1e-7:  # the error falls as the width grows, so they meet once
        width = (low + high) / 2
        if _smoothed(spectrum, width) > width:
            low = width
        else:
            high = width
    return _smoothed(spectrum, high)


def mmce(p: Predictions, width: float = 0.4) -> float:
    """Maximum mean calibration error (Kumar et al. 2018) with the kernel exp(-|difference| / width).

    The root of the mean over all pairs of (confidence - correct)(confidence' - correct') kernel. A bin-free
    metric with a kernel of fixed width; sorting and running sums make it O(N log N) instead of O(N^2).

    >>> round(mmce(Predictions.from_probs([[0.75, 0.25], [0.75, 0.25]], [0, 1])), 6)
    0.25
    """
    if not 0.002 <= width < float("inf"):
        raise ValueError(f"width must be a number >= 0.002, got {width!r}")
    ordered, excess = _sorted_excess(*p.top_label())
    growth = ((ordered - 0.5) / width).exp()  # exp(-(c_j - c_i) / width) = growth_i / growth_j for c_i <= c_j
    before = (excess * growth).cumsum(0) - excess * growth
    pairs = excess.square().sum() + 2 * (excess * before / growth).sum()
    return float(pairs.clamp(min=0).sqrt() / len(p))


# --- the sums behind them


@one_thread()  # the operations are too short to share
def _cumulative(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """(N + 1,) float64 running sums of confidence and accuracy in rising order of confidence, on the CPU.

    Each sample of a group of equal confidences counts with the group's accuracy.
    """
    ordered, right = _by_confidence(confidence, correct)
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])  # of its group
    starts = np.flatnonzero(is_first)
    size = np.diff(starts, append=len(ordered))
    accuracy = np.add.reduceat(right, starts) / size
    columns = torch.from_numpy(np.stack([ordered, np.repeat(accuracy, size)]))
    confidence_sums, correct_sums = torch.cat([columns.new_zeros(2, 1), columns.cumsum(1)], 1)
    return confidence_sums, correct_sums


def _by_confidence(confidence: Tensor, correct: Tensor) -> tuple[Array, Array]:
    """Confidences (N,) in rising order, and whether each was correct (1 or 0), both float64.

    The bits of floats >= 0, read as whole numbers, are in their order, and the first one is 0. Moved up by one, they
    leave room for the answer: sorting these numbers is faster than sorting floats with their places.
    """
    floats = confidence.cpu().numpy()
    bits = floats.view(BITS[floats.itemsize])
    keys = np.sort((bits << 1) | correct.cpu().numpy())
    return (keys >> 1).view(floats.dtype).astype(np.float64), (keys & 1).astype(np.float64)


def _equal_mass(confidence_sums: Tensor, correct_sums: Tensor, n_bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, sums of confidence minus accuracy, and sums of accuracy of `n_bins` bins (at most N) of equal mass."""
    n = len(correct_sums) - 1
    n_bins = min(check_n_bins(n_bins), n)
    edges = torch.arange(n_bins + 1) * n // n_bins
    right = correct_sums[edges].diff()
    return edges.diff().double(), confidence_sums[edges].diff() - right, right


def _sorted_excess(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Confidences in rising order, and confidence - correct in that order; float64."""
    ordered, right = (torch.from_numpy(column) for column in _by_confidence(confidence, correct))
    return ordered, ordered - right


def _on_mesh(confidence: Tensor, correct: Tensor) -> Array:
    """(MESH + 1,) the mean of confidence - correct, each sample shared between the two mesh points around it."""
    left = (confidence * MESH).floor().clamp(max=MESH - 1)
    share = confidence * MESH - left
    excess = (confidence - correct) / len(confidence)
    mesh = torch.zeros(MESH + 1, dtype=torch.float64, device=confidence.device)
    mesh.index_add_(0, left.long(), excess * (1 - share)).index_add_(0, left.long() + 1, excess * share)
    points: Array = mesh.cpu().numpy()
    return points


def _mirror(points: Array) -> Array:
    """(2 MESH,) the points and their mirror image on a circle of length 2; the ends meet their own image."""
    circle: Array = np.concatenate([points, points[-2:0:-1]])
    circle[[0, MESH]] *= 2
    return circle


def _smoothed(spectrum: Array, width: float) -> float:
    """The integral over 0..1 of |the points smoothed by a Gaussian|, from the spectrum of the mirrored points."""
    frequency = np.pi * np.arange(len(spectrum))  # of a circle of length 2
    density = np.fft.irfft(spectrum * np.exp(-0.5 * (frequency * width) ** 2))[: MESH + 1] * MESH
    size = np.abs(density)
    return float((size.sum() - 0.5 * (size[0] + size[-1])) / MESH)
