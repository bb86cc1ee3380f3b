"""How much of a number is chance: the floor of a perfect model, bootstrap intervals, a calibration test."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from doublehead.bins import UNIT, Bins, check_n_bins
from doublehead.predictions import Predictions

CELLS = (
    960  # confidences within 1/960 of each other share one binomial draw: variance off by under 1e-7 a sample
)


Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


class Floor(NamedTuple):
    """What a perfectly calibrated model with the same confidences scores: mean, 5th and 95th percentile."""

    mean: float
    low: float
    high: float


def ece_floor(p: Predictions | Bins, n_bins: int = 15, n_draws: int = 1000, seed: int = 0) -> Floor:
    """ECE of a perfectly calibrated model with these confidences, its answers drawn from them `n_draws` times.

    Binned ECE of a perfect model is not 0 on finite data. An ECE within low..high cannot be told from perfect on
    this many samples; print it beside every ECE. For a stream, pass top-label bins finer than `n_bins` by a whole
    factor (`Bins.top(p, fine_bins(15))`); the cost does not depend on the number of samples.

    >>> sure = Predictions.from_probs([[1.0, 0.0], [0.0, 1.0]], [0, 1])
    >>> ece_floor(sure)
    Floor(mean=0.0, low=0.0, high=0.0)
    """
    bins = p if isinstance(p, Bins) else Bins.top(p, fine_bins(n_bins))
    draws = floor_draws(bins, n_bins, n_draws, seed)
    low, high = np.quantile(draws, [0.05, 0.95])
    return Floor(float(draws.mean()), float(low), float(high))


def fine_bins(n_bins: int) -> int:
    """The smallest multiple of `n_bins` that is at least 960: bins fine enough for `ece_floor`."""
    return check_n_bins(n_bins) * -(-CELLS // n_bins)


def floor_draws(bins: Bins, n_bins: int, n_draws: int, seed: int) -> Array:
    """(n_draws,) ECE in `n_bins` bins of perfectly calibrated models with the confidences in these finer bins."""
    coarse = bins.coarsen(n_bins)
    cell = bins.counts.cpu().numpy().nonzero()[0]  # the cells that hold any sample
    counts = bins.counts.cpu().numpy()[cell]
    chance = np.clip(bins.conf_sums.cpu().numpy()[cell] / UNIT / counts, 0, 1)
    correct = np.random.default_rng(seed).binomial(counts, chance, size=(n_draws, len(cell)))
    first, bin_of_cell = np.unique(cell // (bins.n_bins // n_bins), return_index=True)
    correct = np.add.reduceat(correct, bin_of_cell, axis=1)  # (n_draws, bins that hold any sample)
    confidence = coarse.conf_sums.cpu().numpy()[first] / UNIT
    errors: Array = np.abs(correct - confidence).sum(1) / counts.sum()
    return errors
