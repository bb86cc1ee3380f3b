"""How much of a number is chance: the floor of a perfect model, a calibration test, bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from doublehead.bins import UNIT, Bins, bin_of, check_n_bins
from doublehead.metrics.scores import per_sample
from doublehead.predictions import Predictions

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

CELLS = (
    960  # confidences within 1/960 of each other share one binomial draw: variance off by under 1e-7 a sample
)
MEANS = ("accuracy", "mean_confidence", "overconfidence", "nll", "brier", "mean_entropy")
BINNED = ("ece", "ece2", "mce")


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
    """A number and the interval in which it would fall for other samples like these."""

    estimate: float
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
    _, draws = _ece_and_floor(p, n_bins, n_draws, seed)
    low, high = np.quantile(draws, [0.05, 0.95])
    return Floor(float(draws.mean()), float(low), float(high))


def calibration_test(
    p: Predictions | Bins, n_bins: int = 15, n_draws: int = 2000, seed: int = 0
) -> CalibrationTest:
    """Test whether the confidences in the predicted class are calibrated: a small p-value says they are not.

    The p-value is the share of `n_draws` perfectly calibrated models with the same confidences whose ECE is as
    large as this one. It is at or below 0.05 for at most 5 % of calibrated models, whatever n_bins and N are. With
    many samples it finds differences too small to matter, so read it beside the ECE itself.

    >>> calibration_test(Predictions([[2.0, 0.0]] * 100, [1] * 100)).p_value < 0.001
    True
    """
    observed, draws = _ece_and_floor(p, n_bins, n_draws, seed)
    as_large = int((draws >= observed - 1e-12).sum())
    return CalibrationTest(observed, (1 + as_large) / (1 + n_draws))


def bootstrap(
    p: Predictions,
    metrics: Sequence[str] = ("accuracy", "ece", "nll", "brier"),
    *,
    n_bins: int = 15,
    level: float = 0.95,
    n_draws: int = 1000,
    seed: int = 0,
) -> dict[str, Interval]:
    """Intervals of metrics over test sets like this one, by drawing its samples with replacement.

    Metrics by name: accuracy, mean_confidence, overconfidence, nll, brier, mean_entropy, ece, ece2, mce. The middle
    `level` of the draws, shifted so that their mean is the estimate: resampling adds noise of its own, which would
    push an ECE above its own value. An ECE's interval is about the ECE at this N, floor included.

    >>> interval = bootstrap(Predictions([[2.0, 0.0]] * 50, [0] * 40 + [1] * 10), ["accuracy"])["accuracy"]
    >>> interval.estimate, 0.65 < interval.low < 0.75, 0.85 < interval.high < 0.95
    (0.8, True, True)
    """
    unknown = [name for name in metrics if name not in MEANS + BINNED]
    if unknown:
        raise ValueError(
            f"metrics must be among {', '.join(MEANS + BINNED)}, got {', '.join(map(repr, unknown))}"
        )
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}")
    _check_draws(n_draws)
    statistics, bins = _statistics(p, n_bins)
    everyone = _from_sums(_sums_by_bin(torch.ones_like(statistics[:, 0])[None], statistics, bins))
    drawn = _from_sums(_resampled_sums(statistics, bins, n_draws, seed))
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    return {name: _interval(float(everyone[name]), drawn[name].cpu(), tails, name) for name in metrics}


def fine_bins(n_bins: int) -> int:
    """The smallest multiple of `n_bins` that is at least 960: bins fine enough for `ece_floor`."""
    return check_n_bins(n_bins) * -(-CELLS // n_bins)


def _ece_and_floor(p: Predictions | Bins, n_bins: int, n_draws: int, seed: int) -> tuple[float, Array]:
    """The ECE of `p` and (n_draws,) those of perfectly calibrated models with its confidences."""
    _check_draws(n_draws)
    bins = p if isinstance(p, Bins) else Bins.top(p, fine_bins(n_bins))
    if bins.counts.ndim != 1 or bins.n == 0:
        raise ValueError(
            f"bins must be top-label bins with samples, got shape {tuple(bins.counts.shape)}, n {bins.n}"
        )
    counts, conf_sums, correct_sums = (row.numpy() for row in bins.state().cpu())
    cells = counts.nonzero()[0]  # those that hold any sample
    chance = np.clip(conf_sums[cells] / UNIT / counts[cells], 0, 1)
    drawn = np.random.default_rng(seed).binomial(counts[cells], chance, size=(n_draws, len(cells)))
    correct = np.concatenate([correct_sums[None, cells], drawn])  # (1 + n_draws, cells)
    bins.coarsen(n_bins)  # checks that n_bins divides the number of cells
    _, first = np.unique(cells // (bins.n_bins // n_bins), return_index=True)  # of the cells in each bin
    excess = np.add.reduceat(conf_sums[cells] / UNIT - correct, first, axis=1)
    errors: Array = np.abs(excess).sum(1) / counts.sum()
    return float(errors[0]), errors[1:]


def _statistics(p: Predictions, n_bins: int) -> tuple[Tensor, Tensor]:
    """(N, 6) float64: count, correct, confidence, nll, brier, entropy, in the order of the bins; (n_bins,) counts."""
    confidence, correct = p.top_label()
    scores = per_sample(p)
    which, order = bin_of(confidence, n_bins).sort(stable=True)
    columns = [torch.ones_like(scores["nll"]), correct.double(), confidence.double(), *scores.values()]
    return torch.stack(columns, 1)[order], torch.bincount(which, minlength=n_bins)


def _sums_by_bin(weights: Tensor, statistics: Tensor, bins: Tensor) -> Tensor:
    """Weights (D, N) of the samples -> (D, bins that hold any sample, 6) weighted sums."""
    sizes = [size for size in bins.tolist() if size]
    pairs = zip(weights.split(sizes, 1), statistics.split(sizes))
    return torch.stack([weight @ part for weight, part in pairs], 1)


def _resampled_sums(statistics: Tensor, bins: Tensor, n_draws: int, seed: int) -> Tensor:
    """`_sums_by_bin` of `n_draws` samples of N out of N with replacement."""
    n, device = len(statistics), statistics.device
    generator = torch.Generator(device).manual_seed(seed)
    at_once = max(1, (1 << (24 if statistics.is_cuda else 16)) // n)  # on a CPU, what stays in the cache
    sums = []
    for start in range(0, n_draws, at_once):
        rows = min(at_once, n_draws - start)
        picked = torch.randint(n, (rows, n), generator=generator, device=device)
        weights = torch.zeros(rows, n, dtype=torch.float64, device=device)
        weights.scatter_add_(1, picked, torch.ones_like(picked, dtype=torch.float64))
        sums.append(_sums_by_bin(weights, statistics, bins))
    return torch.cat(sums)


def _from_sums(sums: Tensor) -> dict[str, Tensor]:
    """Sums (D, n_bins, 6) -> each metric (D,)."""
    means = sums.sum(1) / sums[:, :, 0].sum(1, keepdim=True)  # (D, 6)
    excess, counts = sums[:, :, 2] - sums[:, :, 1], sums[:, :, 0]  # (D, n_bins)
    n, gap = counts.sum(1), excess / counts.clamp(min=1)
    return {
        "accuracy": means[:, 1],
        "mean_confidence": means[:, 2],
        "overconfidence": means[:, 2] - means[:, 1],
        "nll": means[:, 3],
        "brier": means[:, 4],
        "mean_entropy": means[:, 5],
        "ece": excess.abs().sum(1) / n,
        "ece2": ((excess * gap).sum(1) / n).sqrt(),
        "mce": gap.abs().amax(1),
    }


def _interval(estimate: float, draws: Tensor, tails: Tensor, name: str) -> Interval:
    low, high = (float(bound) for bound in (draws - draws.mean() + estimate).quantile(tails))
    floor = -np.inf if name == "overconfidence" else 0.0
    ceiling = 1.0 if name in ("accuracy", "mean_confidence", *BINNED) else np.inf
    return Interval(estimate, max(floor, low), min(ceiling, high))


def _check_draws(n_draws: int) -> None:
    if n_draws < 1:
        raise ValueError(f"n_draws must be at least 1, got {n_draws}")
