"""Calibration errors without bins: Kolmogorov-Smirnov, smooth ECE, MMCE. All are fractions, 0 is perfect."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from doublehead.predictions import Predictions

Array: TypeAlias = "np.ndarray[Any, Any]"

MESH = 1 << 15  # intervals of 0..1 on which smooth ECE is worked out


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


def _sorted_excess(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Confidences in rising order, and confidence - correct in that order; float64."""
    ordered, order = confidence.double().sort()
    return ordered, ordered - correct[order].double()


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
