"""The numbers by their definitions in numpy, slow and plain, and as peers compute them where they differ."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch

Array = Any


def binned(confidence: Array, correct: Array, n_bins: int = 15, *, left: bool = False) -> Array:
    """(bins, 2): share of samples and |mean confidence - accuracy|; bins closed on the right, or on the left."""
    edges = (np.arange(n_bins + 1) / n_bins).astype(confidence.dtype)
    rows = []
    for low, high in itertools.pairwise(edges):
        if left:
            inside = (confidence >= low) & ((confidence < high) | ((high == 1) & (confidence == 1)))
        else:
            inside = (confidence <= high) & ((confidence > low) | ((low == 0) & (confidence == 0)))
        if inside.any():
            gap = abs(confidence[inside].astype(np.float64).mean() - correct[inside].mean())
            rows.append((inside.mean(), gap))
    return np.array(rows)


def binned_as_torchmetrics(confidence: Array, correct: Array, n_bins: int = 15) -> Array:
    """The same with its habits: left-closed float32 edges, 1.0 in a bin of its own, sums added up in float32."""
    confidence = confidence.astype(np.float32)
    edges = torch.linspace(0, 1, n_bins + 1).numpy()
    which = np.searchsorted(edges, confidence, side="right") - 1
    rows = []
    for b in range(n_bins + 1):
        inside = np.flatnonzero(which == b)
        if len(inside):
            mean = np.cumsum(confidence[inside], dtype=np.float32)[-1] / np.float32(len(inside))
            hits = np.float32(correct[inside].sum()) / np.float32(len(inside))
            rows.append((len(inside) / len(confidence), abs(float(mean - hits))))
    return np.array(rows)


def clamped(probs: Array) -> Array:
    """Probabilities as probmetrics hands them on: cut to 1e-7 .. 1 - 1e-7 and rescaled to sum to 1."""
    kept = torch.from_numpy(probs).clamp(1e-7, 1 - 1e-7)
    return (kept / kept.sum(-1, keepdim=True)).numpy()


def ece_of(rows: Array) -> float:
    return float((rows[:, 0] * rows[:, 1]).sum())


def rms_of(rows: Array) -> float:
    return math.sqrt((rows[:, 0] * rows[:, 1] ** 2).sum())


def mce_of(rows: Array) -> float:
    return float(rows[:, 1].max())


def equal_mass(confidence: Array, correct: Array, n_bins: int = 15) -> float:
    """Adaptive ECE; samples of equal confidence count with their common accuracy."""
    order = np.argsort(confidence, kind="stable")
    confidence, correct = confidence[order].astype(np.float64), correct[order].astype(np.float64)
    for value in np.unique(confidence[np.flatnonzero(np.diff(confidence) == 0)]):
        correct[confidence == value] = correct[confidence == value].mean()
    parts = np.array_split(np.arange(len(confidence)), n_bins)
    return float(sum(abs((confidence[i] - correct[i]).sum()) for i in parts) / len(confidence))


def mmce_of(confidence: Array, correct: Array, width: float = 0.4) -> float:
    """MMCE over all pairs."""
    c = confidence.astype(np.float64)
    excess = c - correct
    total = sum(float(excess[i] * (excess * np.exp(-np.abs(c - c[i]) / width)).sum()) for i in range(len(c)))
    return math.sqrt(max(total, 0.0)) / len(c)


def smooth_of(confidence: Array, correct: Array, width: float) -> float:
    """The integral over 0..1 of |sum of confidence - correct smoothed by a reflected Gaussian of this width|."""
    grid = (np.arange(2000) + 0.5) / 2000
    c = confidence.astype(np.float64)
    excess = (c - correct) / len(c)
    density = np.zeros_like(grid)
    for image in (-2, 0, 2):
        for mirrored in (c, -c):
            for i in range(0, len(c), 500):
                away = grid[:, None] - (mirrored[None, i : i + 500] + image)
                density += np.exp(-0.5 * (away / width) ** 2) @ excess[i : i + 500]
    return float(np.abs(density).mean() / (width * math.sqrt(2 * math.pi)))


def smooth_as_relplot(confidence: Array, correct: Array) -> float:
    """Nearly relplot's number for confidences that are too high everywhere.

    It spreads them over a grid of 1001 points and mirrors it without its ends, so what lies on an end counts half.
    """
    c = confidence.astype(np.float64)
    weight = 1 - np.clip(1 - (1 - c) * 1000, 0, 1) / 2
    return float((weight * (c - correct)).sum() / weight.sum())


def ks_of(confidence: Array, correct: Array) -> float:
    """The largest |sum of confidence - correct| / N over samples of at most some confidence."""
    order = np.argsort(confidence, kind="stable")
    sums = np.cumsum(confidence[order].astype(np.float64) - correct[order])
    last = np.append(np.diff(confidence[order]) > 0, True)
    return float(np.abs(sums[last]).max() / len(sums))


def nll_at(temperature: float, logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The mean NLL of logits divided by a temperature, in float64."""
    return float(torch.nn.functional.cross_entropy(logits.double() / temperature, labels))


def golden_temperature(logits: torch.Tensor, labels: torch.Tensor, within: float = 1e-9) -> float:
    """Golden-section search of the mean NLL over log T."""
    low, high, ratio = -12.0, 12.0, (math.sqrt(5) - 1) / 2
    while high - low > within:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        lower = nll_at(math.exp(left), logits, labels) < nll_at(math.exp(right), logits, labels)
        low, high = (low, right) if lower else (left, high)
    return math.exp((low + high) / 2)
