"""What the pictures show, as numbers: compute here, draw in `plots`."""

from __future__ import annotations

from dataclasses import dataclass
from math import erfc, sqrt
from typing import Any, TypeAlias

import numpy as np
import torch

from doublehead.bins import UNIT, Bins, bin_of, entries_of
from doublehead.metrics import Floor, RiskCoverage, ece_floor, fine_bins, risk_coverage
from doublehead.predictions import Predictions

Array: TypeAlias = "np.ndarray[Any, Any]"

BAND = (0.05, 0.95)  # the share of perfectly calibrated models a band leaves out below and above
BAND_SIGMA = 1.6448536269514722  # the same in standard deviations of a normal variable
EXACT_UP_TO = 20_000  # samples of a group; above it the normal distribution is as good
CLASS_CELLS = 20  # confidences of a class within 1/20 of each other count as equal
LEVEL = 0.05  # chance that any class of a perfectly calibrated model is called off


@dataclass(frozen=True, eq=False)
class Reliability:
    """The numbers of a reliability diagram; the arrays are float64 (n_bins,), nan where a bin is empty.

    `gap` is confidence minus accuracy, positive where overconfident. A perfectly calibrated model with the same
    confidences has its accuracy within `band_low..band_high` in 90 % of test sets, bin by bin.
    """

    edges: Array  # (n_bins + 1,)
    confidence: Array
    accuracy: Array
    counts: Array  # int64
    gap: Array
    band_low: Array
    band_high: Array
    ece: float
    floor: Floor

    @property
    def n(self) -> int:
        """How many samples were binned."""
        return int(self.counts.sum())

    @property
    def outside(self) -> Array:
        """(n_bins,) bool: where the accuracy lies outside the band of a perfectly calibrated model."""
        slack = 1e-12  # a quantile of simulated accuracies may differ from the same accuracy by a rounding
        outside: Array = (self.accuracy < self.band_low - slack) | (self.accuracy > self.band_high + slack)
        return outside


@dataclass(frozen=True, eq=False)
class ClassGaps:
    """For each class, the samples predicted to be of it: what the model claims and how often it is right.

    Arrays are float64 (K,), nan where a class is never predicted. `band_low..band_high` holds the accuracy of a
    perfectly calibrated model in 90 % of test sets, `p_value` is its chance to lie as far off on either side, `ece`
    the one-versus-rest error of the class's probability.
    """

    counts: Array  # int64, samples predicted to be of the class
    n_labels: Array  # int64, samples of the class
    confidence: Array
    accuracy: Array
    band_low: Array
    band_high: Array
    p_value: Array
    ece: Array

    @property
    def gap(self) -> Array:
        """(K,) confidence minus accuracy."""
        gap: Array = self.confidence - self.accuracy
        return gap

    @property
    def off(self) -> Array:
        """(K,) bool: off by more than chance explains, with 5 % for all classes together (Bonferroni).

        A class that alone has samples is never off: the test of all samples is about it.
        """
        n = int((self.counts > 0).sum())
        off: Array = self.p_value < (LEVEL / n if n > 1 else 0)
        return off

    def worst_first(self) -> Array:
        """(K,) classes that are off by falling |gap|, then the rest by rising p-value, never predicted ones last.

        Classes of one p-value are ordered by falling |gap|.
        """
        p_value, size = np.nan_to_num(self.p_value, nan=2.0), np.nan_to_num(np.abs(self.gap))
        order: Array = np.lexsort((-size, np.where(self.off, 0, p_value), ~self.off))
        return order


def reliability(p: Predictions | Bins, n_bins: int = 15, seed: int = 0) -> Reliability:
    """The reliability diagram of the predicted class, with the band of a perfectly calibrated model.

    The band is worked out from the distribution of the number of right answers; `seed` is that of the simulated
    floor. For a stream, pass top-label bins finer than `n_bins` by a whole factor, such as
    `Bins.top(p, fine_bins(15))`.

    >>> p = Predictions.from_probs([[0.9, 0.1]] * 100, [0] * 90 + [1] * 10)
    >>> curve = reliability(p, n_bins=10)
    >>> int(curve.counts[8]), round(float(curve.accuracy[8]), 3), bool(curve.outside[8])
    (100, 0.9, False)
    """
    fine = p if isinstance(p, Bins) else Bins.top(p.with_countable_weights(), fine_bins(n_bins))
    fine = fine.to("cpu")
    floor = ece_floor(fine, n_bins, seed=seed)  # checks that these are top-label bins with samples
    bins = fine.coarsen(n_bins)
    low, high, _ = _perfect_model(*_effective(Bins.from_state(fine.state().unflatten(-1, (n_bins, -1)))))
    return Reliability(
        edges=bins.edges.numpy(),
        confidence=bins.confidence.numpy(),
        accuracy=bins.accuracy.numpy(),
        counts=bins.mass.numpy(),
        gap=bins.gap.numpy(),
        band_low=low,
        band_high=high,
        ece=float(bins.ece()),
        floor=floor,
    )


def risk_coverage_curve(p: Predictions, n_points: int = 200) -> RiskCoverage:
    """`metrics.risk_coverage` thinned to at most `n_points` of its own points, about even in coverage.

    >>> curve = risk_coverage_curve(Predictions([[i / 50, 0.0] for i in range(1, 101)], [0] * 100), n_points=5)
    >>> [round(c, 2) for c in curve.coverage.tolist()]
    [0.01, 0.25, 0.5, 0.75, 1.0]
    """
    if n_points < 2:
        raise ValueError(f"n_points must be at least 2, got {n_points}")
    whole = RiskCoverage(*(column.cpu() for column in risk_coverage(p)))
    if len(whole.coverage) <= n_points:
        return whole
    wanted = torch.linspace(0, 1, n_points, dtype=torch.float64)
    above = torch.searchsorted(whole.coverage, wanted).clamp(1, len(whole.coverage) - 1)
    nearer = wanted - whole.coverage[above - 1] < whole.coverage[above] - wanted
    kept = torch.where(nearer, above - 1, above).unique()
    return RiskCoverage(*(column[kept] for column in whole))


def class_gaps(p: Predictions, n_bins: int = 15) -> ClassGaps:
    """Class by class: when the model says k, what does it claim and how often is it right?

    >>> gaps = class_gaps(Predictions.from_probs([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]], [0, 1, 1]))
    >>> gaps.counts.tolist(), [round(g, 2) for g in gaps.gap.tolist()]
    ([2, 1], [0.3, -0.4])
    """
    p = p.with_countable_weights()
    return class_gaps_of(predicted_bins(p), Bins.classwise(p, n_bins))


def predicted_bins(p: Predictions, onto: Bins | None = None) -> Bins:
    """Bins (K, CLASS_CELLS): those of class k hold the confidences in k of the samples predicted to be of it.

    They are added to `onto`, in its memory, where it is given.
    """
    confidence = p.confidence
    cell = p.predicted * CLASS_CELLS + bin_of(confidence, CLASS_CELLS)
    entries = entries_of(confidence, p.correct, p.weights)  # (3, N), or (5, N) with weights
    if onto is None:
        # numpy's zeros take up no memory until they are written to: with many classes, few are ever predicted
        zeros = np.zeros((len(entries), p.n_classes, CLASS_CELLS), dtype=np.int64)
        onto = Bins.from_state(torch.from_numpy(zeros).to(cell.device))
    for part, entry in zip(onto.parts, entries.to(onto.counts.device)):
        part.view(-1).index_add_(0, cell.to(part.device), entry)
    return onto


def class_gaps_of(predicted: Bins, classwise: Bins) -> ClassGaps:
    """`class_gaps` of a stream, from its `predicted_bins` and class-wise bins."""
    classwise, counts = classwise.to("cpu"), predicted.mass.sum(1).cpu().numpy()
    seen = np.flatnonzero(counts)  # with many classes, few are predicted
    bins = Bins(*(part.cpu()[seen] for part in predicted.parts))
    known = np.stack(
        [
            bins.conf_sums.numpy().sum(1) / UNIT / counts[seen],
            bins.correct_sums.numpy().sum(1) / bins.counts.numpy().sum(1),
            *_perfect_model(*_effective(bins)),
        ]
    )
    whole = np.full((5, len(counts)), np.nan)
    whole[:, seen] = known
    confidence, accuracy, low, high, p_value = whole
    unit = 1 if classwise.squares is None else UNIT
    return ClassGaps(
        counts=counts,
        n_labels=(classwise.correct_sums.sum(1) / unit).round().long().numpy(),
        confidence=confidence,
        accuracy=accuracy,
        band_low=low,
        band_high=high,
        p_value=p_value,
        ece=classwise.ece().numpy(),
    )


def _effective(bins: Bins) -> tuple[Array, Array, Array]:
    """Counts (R, cells), and sums of confidences and right answers, that vary as much as the weighted samples of a row.

    They are those of samples of one weight, of which the row has its effective number (Kish): not whole numbers.
    """
    scale = bins.mass.sum(-1, True) / bins.mass_of_squares.sum(-1, True).clamp(min=1 / UNIT)
    n = bins.mass * scale
    confidence, accuracy = (part.nan_to_num(0.0) * n for part in (bins.confidence, bins.accuracy))
    return n.numpy(), confidence.numpy(), accuracy.numpy()


def _perfect_model(counts: Array, conf_sums: Array, correct_sums: Array) -> Array:
    """(3, R) of R groups: 5 % and 95 % quantiles of a perfect model's accuracy, and the p-value of the one seen.

    Each group is given by the counts, sums of confidences and sums of right answers in its cells, (R, cells). The
    right answers of a perfectly calibrated model are a sum of independent answers, each right with its confidence;
    those of a cell share its mean confidence.
    """
    found: Array = np.full((3, len(counts)), np.nan)
    for i in np.flatnonzero(counts.sum(1)):
        size = counts[i][counts[i] > 0]
        chance = np.clip(conf_sums[i][counts[i] > 0] / size, 0, 1)
        right, n, whole = float(correct_sums[i].sum()), float(size.sum()), size.round()
        if n <= EXACT_UP_TO and np.allclose(size, whole, rtol=1e-6):
            low, high, p_value = _exact(whole, chance, round(right))
        else:  # many, or weighted
            low, high, p_value = _normal(size, chance, right)
        found[:, i] = low / n, high / n, p_value
    return found


def _exact(size: Array, chance: Array, right: int) -> tuple[float, float, float]:
    """Quantiles of the number of right answers and the two-sided p-value of `right`, by its characteristic function."""
    n = int(size.sum())
    turn = np.exp(2j * np.pi * np.arange((n + 1) // 2 + 1) / (n + 1))  # the other half mirrors it
    with np.errstate(divide="ignore"):  # log(0) where an answer of chance 1/2 meets -1: the product is then 0
        logs = sum(count * np.log1p(p * (turn - 1)) for count, p in zip(size, chance))
    below = np.clip(np.fft.irfft(np.conj(np.exp(logs)), n + 1), 0, None).cumsum()  # P(X <= 0..n)
    low, high = np.searchsorted(below, np.array(BAND) - 1e-12)
    above = 1 - (below[right - 1] if right else 0.0)
    return float(low), float(min(high, n)), float(np.clip(2 * min(below[right], above), 0, 1))


def _normal(size: Array, chance: Array, right: float) -> tuple[float, float, float]:
    """The same by the normal distribution, with a correction for whole numbers."""
    n, mean, sigma = size.sum(), (size * chance).sum(), np.sqrt((size * chance * (1 - chance)).sum())
    low, high = np.clip([mean - BAND_SIGMA * sigma, mean + BAND_SIGMA * sigma], 0, n)
    far = max(0.0, abs(right - mean) - 0.5) / max(sigma, 1e-300)
    return float(low), float(high), erfc(far / sqrt(2))
