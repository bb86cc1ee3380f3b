"""How much of a number is chance: the floor of a perfect model, a calibration test, bootstrap intervals."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from doublehead.bins import UNIT, Bins, check_n_bins
from doublehead.predictions import Predictions

Array: TypeAlias = "np.ndarray[Any, Any]"

# Confidences within 1/960 of each other share one binomial draw: variance off by under 1e-7 a sample.
CELLS = 960
DRAWS = 1000  # of a floor and a bootstrap; a test takes twice as many
LEVEL = 0.95  # of intervals


class Floor(NamedTuple):
    """What a perfectly calibrated model with the same confidences scores: mean, 5th and 95th percentile."""

    mean: float
    low: float
    high: float


class CalibrationTest(NamedTuple):
    """An ECE and the chance that a perfectly calibrated model with the same confidences reaches it."""

    ece: float
    p_value: float


class Interval(NamedTuple):
    """A number and its interval; the bounds are nan where no interval is known."""

    estimate: float
    low: float
    high: float


def ece_floor(p: Predictions | Bins, n_bins: int = 15, seed: int = 0) -> Floor:
    """ECE of a perfectly calibrated model with these confidences, its answers drawn from them 1,000 times.

    Binned ECE of a perfect model is not 0 on finite data. An ECE within low..high cannot be told from perfect on
    this many samples; print it beside every ECE. For a stream, pass top-label bins finer than `n_bins` by a whole
    factor (`Bins.top(p, fine_bins(15))`); the cost does not depend on the number of samples.

    >>> sure = Predictions.from_probs([[1.0, 0.0], [0.0, 1.0]], [0, 1])
    >>> ece_floor(sure)
    Floor(mean=0.0, low=0.0, high=0.0)
    """
    return _floor(_ece_and_draws(p, n_bins, DRAWS, seed)[1])


def calibration_test(p: Predictions | Bins, n_bins: int = 15, seed: int = 0) -> CalibrationTest:
    """Test whether the confidences in the predicted class are calibrated: a small p-value says they are not.

    The p-value is the share of 2,000 perfectly calibrated models with the same confidences whose ECE is as large as
    this one. It is at or below 0.05 for at most 5 % of calibrated models, whatever n_bins and N are. With many
    samples it finds differences too small to matter, so read it beside the ECE itself.

    >>> calibration_test(Predictions([[2.0, 0.0]] * 100, [1] * 100)).p_value < 0.001
    True
    """
    return floor_and_test(p, n_bins, seed)[1]


def floor_and_test(p: Predictions | Bins, n_bins: int = 15, seed: int = 0) -> tuple[Floor, CalibrationTest]:
    """`ece_floor` and `calibration_test` from the same draws, so that neither costs extra."""
    observed, draws = _ece_and_draws(p, n_bins, 2 * DRAWS, seed)
    as_large = int((draws >= observed - 1e-12).sum())
    return _floor(draws[:DRAWS]), CalibrationTest(observed, (1 + as_large) / (1 + len(draws)))


def bootstrap(p: Predictions | Bins, n_bins: int = 15, seed: int = 0) -> dict[str, Interval]:
    """95 % intervals of mean_confidence, overconfidence, ece, ece2 and mce by the Poisson bootstrap, and of accuracy.

    Each sample counts a Poisson(1) number of times. Samples of one fine bin and the same correctness share their mean
    confidence, so only the counts of such cells are drawn, at a cost that does not depend on N. For a stream, pass
    top-label bins as in `ece_floor`. An interval holds the middle 95 % of the draws, shifted so that their mean is
    the estimate: resampling adds noise of its own, which would push an ECE above its own value. The interval of an
    ECE is about the ECE at this N, floor included. The interval of the accuracy is Wilson's, which holds where all
    answers are correct too: no draw of those has a wrong one.

    >>> interval = bootstrap(Predictions([[2.0, 0.0]] * 50, [0] * 40 + [1] * 10))["accuracy"]
    >>> interval.estimate, 0.65 < interval.low < 0.75, 0.85 < interval.high < 0.95
    (0.8, True, True)
    """
    bins = _top_bins(p, n_bins)
    cells, mass, n, confidence, right = _cells(bins)
    wrong, each = mass - right, mass / n  # the weight of a sample
    rng, shape = np.random.default_rng(seed), (DRAWS, len(cells))
    drawn_right, drawn_wrong = (rng.poisson(part / each, shape) * each for part in (right, wrong))
    some = np.flatnonzero((drawn_right + drawn_wrong).sum(1))  # of few samples a draw may hold none
    if len(some):
        drawn_right, drawn_wrong = drawn_right[some], drawn_wrong[some]
    _, first = np.unique(cells // (bins.n_bins // n_bins), return_index=True)  # of the cells in each bin
    estimates = _from_cells(right[None], wrong[None], confidence, first)
    draws = _from_cells(drawn_right, drawn_wrong, confidence, first)
    coarse = bins.coarsen(n_bins)
    exact = {"ece": float(coarse.ece()), "mce": float(coarse.mce()), "ece2": float(coarse.ece2())}
    values = {name: exact.get(name, float(found[0])) for name, found in estimates.items()}
    found = {name: _interval(value, draws[name], name) for name, value in values.items()}
    squares = mass if bins.squares is None else bins.squares.cpu().numpy() / UNIT
    return found | {"accuracy": _wilson(values["accuracy"], float(mass.sum() ** 2 / squares.sum()))}


def fine_bins(n_bins: int) -> int:
    """The smallest multiple of `n_bins` that is at least 960: bins fine enough for `ece_floor`."""
    return check_n_bins(n_bins) * -(-CELLS // n_bins)


def _ece_and_draws(p: Predictions | Bins, n_bins: int, n_draws: int, seed: int) -> tuple[float, Array]:
    """The ECE of `p` and (n_draws,) those of perfectly calibrated models with its confidences."""
    bins = _top_bins(p, n_bins)
    cells, mass, n, chance, right = _cells(bins)
    drawn = np.random.default_rng(seed).binomial(n, chance, size=(n_draws, len(cells))) * (mass / n)
    correct = np.concatenate([right[None], drawn])  # (1 + n_draws, cells)
    _, first = np.unique(cells // (bins.n_bins // n_bins), return_index=True)  # of the cells in each bin
    excess = np.add.reduceat(bins.conf_sums.cpu().numpy()[cells] / UNIT - correct, first, axis=1)
    errors: Array = np.abs(excess).sum(1) / mass.sum()
    return float(errors[0]), errors[1:]


def _floor(draws: Array) -> Floor:
    low, high = np.quantile(draws, [0.05, 0.95])
    return Floor(float(draws.mean()), float(low), float(high))


def _cells(bins: Bins) -> tuple[Array, Array, Array, Array, Array]:
    """Of the cells that hold any sample: their numbers, weight, effective count, mean confidence, weight correct."""
    bins = bins.to("cpu")
    cells = bins.counts.numpy().nonzero()[0]
    mass, n = bins.mass.double().numpy()[cells], bins.effective.numpy()[cells]
    right = bins.correct_sums.double().numpy()[cells] / (1 if bins.squares is None else UNIT)
    confidence = np.clip(bins.conf_sums.numpy()[cells] / UNIT / mass, 0, 1)
    return cells, mass, n, confidence, right


def _top_bins(p: Predictions | Bins, n_bins: int) -> Bins:
    """Fine top-label bins that hold samples."""
    bins = p if isinstance(p, Bins) else Bins.top(p, fine_bins(n_bins))
    if bins.counts.ndim != 1 or bins.n == 0:
        raise ValueError(
            f"bins must be top-label bins with samples, got shape {tuple(bins.counts.shape)}, n {bins.n}"
        )
    bins.coarsen(n_bins)  # checks that n_bins divides the number of fine bins
    return bins


def _from_cells(right: Array, wrong: Array, confidence: Array, first: Array) -> dict[str, Array]:
    """Counts of right and wrong answers (D, cells) -> each metric (D,)."""
    counts = np.add.reduceat(right + wrong, first, axis=1)  # (D, bins that hold any sample)
    excess = np.add.reduceat((right + wrong) * confidence - right, first, axis=1)
    n = np.maximum(counts.sum(1), 1e-300)
    accuracy, gap = right.sum(1) / n, excess / np.maximum(counts, 1e-300)
    return {
        "accuracy": accuracy,
        "mean_confidence": excess.sum(1) / n + accuracy,
        "overconfidence": excess.sum(1) / n,
        "ece": np.abs(excess).sum(1) / n,
        "ece2": np.sqrt((excess * gap).sum(1) / n),
        "mce": np.abs(gap).max(1),
    }


def _interval(estimate: float, draws: Array, name: str) -> Interval:
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = (float(bound) for bound in np.quantile(draws - draws.mean() + estimate, tails))
    if name == "overconfidence":
        return Interval(estimate, low, high)
    return Interval(estimate, max(0.0, low), min(1.0, high))


def _wilson(share: float, n: float) -> Interval:
    """The score interval of a share of n samples."""
    z2 = NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
    middle, reach = share + z2 / (2 * n), (z2 * (share * (1 - share) + z2 / (4 * n)) / n) ** 0.5
    low, high = ((middle + side * reach) / (1 + z2 / n) for side in (-1, 1))
    return Interval(share, min(share, max(0.0, low)), max(share, min(1.0, high)))
