"""Tally: everything an audit prints, from sums that do not grow with the data and add up exactly.

Sums of NLL, Brier score and entropy are whole numbers in units of 2^-32, like the confidences in `Bins`, so a stream,
a folder of files or a cluster gives the same bits as one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from doublehead.bins import UNIT, Bins
from doublehead.metrics import Floor, Interval, calibration_test, ece_floor, fine_bins, per_sample
from doublehead.predictions import Predictions
from doublehead.tables.files import TableError
from doublehead.tables.reading import PredictionTable

Array: TypeAlias = "np.ndarray[Any, Any]"

SCORES = {"nll": "nll", "brier": "brier", "entropy": "mean_entropy"}  # per sample -> its mean
MAX_GROUPS = 1000
N_DRAWS = 1000
Z = 1.959963984540054  # 97.5 % of a standard normal lie below


@dataclass(frozen=True, eq=False)
class Tally:
    """Top-label bins (fine), class-wise bins (or None), and sums and sums of squares of the proper scores.

    `a + b` is the tally of both data sets together, exactly.

    >>> p = Predictions([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]], [0, 1, 0])
    >>> (Tally.of(p[:1]) + Tally.of(p[1:])).summary().to_dict() == Tally.of(p).summary().to_dict()
    True
    """

    n_bins: int
    top: Bins  # (fine_bins(n_bins),)
    classwise: Bins | None  # (K, n_bins)
    sums: dict[str, int]  # by name of SCORES, in units of 2^-32
    squares: dict[str, int]

    @classmethod
    def of(cls, p: Predictions, n_bins: int = 15, classwise: bool = True) -> Tally:
        """The tally of some predictions; without `classwise` it needs no memory that grows with the classes."""
        scores = per_sample(p)
        return cls(
            n_bins,
            Bins.top(p, fine_bins(n_bins)),
            Bins.classwise(p, n_bins) if classwise else None,
            {name: exact_sum(scores[name]) for name in SCORES},
            {name: exact_sum(scores[name].clamp(max=1e150).square()) for name in SCORES},
        )

    def __add__(self, other: Tally) -> Tally:
        if not isinstance(other, Tally):
            return NotImplemented
        both = self.classwise is not None and other.classwise is not None
        return Tally(
            self.n_bins,
            self.top + other.top,
            self.classwise + other.classwise if both else None,  # type: ignore[operator]
            {name: self.sums[name] + other.sums[name] for name in SCORES},
            {name: self.squares[name] + other.squares[name] for name in SCORES},
        )

    @property
    def n(self) -> int:
        """How many samples were counted."""
        return self.top.n

    def summary(self, n_draws: int = N_DRAWS, seed: int = 0) -> Summary:
        """Every number with its 95 % interval, the floor of the ECE and the p-value of perfect calibration."""
        metrics = {**_binned(self.top, self.n_bins, n_draws, seed), **self._scores()}
        if self.classwise is not None:
            pooled = Bins.from_state(self.classwise.state().sum(1))
            n_classes = self.classwise.counts.shape[0]
            metrics["ece_classwise"] = Interval(
                float(self.classwise.ece().mean()), float("nan"), float("nan")
            )
            metrics["ece_all"] = Interval(float(pooled.ece()) * n_classes, float("nan"), float("nan"))
        floor = ece_floor(self.top, self.n_bins, seed=seed)
        return Summary(self.n, metrics, floor, calibration_test(self.top, self.n_bins, seed=seed).p_value)

    def _scores(self) -> dict[str, Interval]:
        """Means with the interval of the normal distribution."""
        found = {}
        for name, mean_name in SCORES.items():
            mean, square = self.sums[name] / UNIT / self.n, self.squares[name] / UNIT / self.n
            reach = Z * (max(square - mean * mean, 0.0) / self.n) ** 0.5
            found[mean_name] = Interval(mean, max(0.0, mean - reach), mean + reach)
        return found


class Summary(NamedTuple):
    """What a tally says. A metric without an interval has nan bounds."""

    n: int
    metrics: dict[str, Interval]
    floor: Floor
    p_value: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, None for what is not known."""
        return {
            "n": self.n,
            "metrics": {
                name: {
                    "value": value.estimate,
                    "low": None if np.isnan(value.low) else value.low,
                    "high": None if np.isnan(value.high) else value.high,
                }
                for name, value in self.metrics.items()
            },
            "ece_floor": self.floor._asdict(),
            "calibration_p_value": self.p_value,
        }


class Tallies(NamedTuple):
    """The tally of everything and, by the value of a column, of its groups."""

    whole: Tally
    groups: dict[str, Tally]

    def __add__(self, other: object) -> Tallies:
        if not isinstance(other, Tallies):
            return NotImplemented
        groups = dict(self.groups)
        for name, tally in other.groups.items():
            groups[name] = groups[name] + tally if name in groups else tally
        return Tallies(self.whole + other.whole, check_groups(groups))


def tally_table(
    table: PredictionTable, n_bins: int = 15, advance: Callable[[int], None] | None = None
) -> Tallies:
    """Read a table once, in memory that does not grow with its rows."""
    found: Tallies | None = None
    for chunk in table.chunks(advance):
        if chunk.predictions is None:
            raise TableError(f"{table.sources[0]} has no labels to measure by")
        part = tally_chunk(chunk.predictions, chunk.groups, n_bins)
        found = part if found is None else found + part
    assert found is not None  # chunks() raises where there are no rows
    return found


def tally_chunk(p: Predictions, groups: Array | None, n_bins: int) -> Tallies:
    """The tally of some rows, and of each group among them (without class-wise bins)."""
    whole = Tally.of(p, n_bins)
    if groups is None:
        return Tallies(whole, {})
    names, which = np.unique(groups, return_inverse=True)
    check_groups(dict.fromkeys(names, whole))
    parts = {str(name): p[torch.from_numpy(which == i)] for i, name in enumerate(names)}
    return Tallies(whole, {name: Tally.of(part, n_bins, classwise=False) for name, part in parts.items()})


def check_groups(groups: dict[str, Tally]) -> dict[str, Tally]:
    """The groups, or an error when there are too many to read."""
    if len(groups) > MAX_GROUPS:
        raise TableError(
            f"the column of groups has more than {MAX_GROUPS} different values (such as {next(iter(groups))!r}): "
            "give one with fewer to --by"
        )
    return groups


def exact_sum(values: Tensor) -> int:
    """The sum of finite values (N,) in units of 2^-32, each rounded to a whole number of them; never overflows.

    >>> exact_sum(torch.tensor([0.5, 2.0])) == int(2.5 * 2**32)
    True
    """
    values = values.double()
    if float(values.abs().max()) * len(values) > 2.0**62:
        return sum(round(Fraction(value) * int(UNIT)) for value in values.tolist())
    units = (values * UNIT).round()
    high = (units / UNIT).floor()
    low = units - high * UNIT  # in 0 .. 2^32
    return int(high.to(torch.int64).sum()) * int(UNIT) + int(low.to(torch.int64).sum())


def _binned(top: Bins, n_bins: int, n_draws: int, seed: int) -> dict[str, Interval]:
    """Intervals by the Poisson bootstrap: each sample counts a Poisson(1) number of times.

    Samples of one fine bin and the same correctness share their mean confidence, so what is drawn is how often each
    such cell counts, at a cost that does not depend on the number of samples. As in `metrics.bootstrap`, draws are
    shifted so that their mean is the estimate.
    """
    counts, conf_sums, correct = (row.numpy() for row in top.state().cpu())
    cells = counts.nonzero()[0]
    confidence = np.clip(conf_sums[cells] / UNIT / counts[cells], 0, 1)
    right, wrong = correct[cells], counts[cells] - correct[cells]
    rng = np.random.default_rng(seed)
    drawn_right, drawn_wrong = (
        rng.poisson(right, (n_draws, len(cells))),
        rng.poisson(wrong, (n_draws, len(cells))),
    )
    _, first = np.unique(cells // (top.n_bins // n_bins), return_index=True)  # of the cells in each bin
    everyone = _from_cells(right[None], wrong[None], confidence, first)
    draws = _from_cells(drawn_right, drawn_wrong, confidence, first)
    coarse = top.coarsen(n_bins)
    exact = {"ece": float(coarse.ece()), "mce": float(coarse.mce()), "ece2": float(coarse.ece2())}
    return {name: _interval(exact.get(name, float(everyone[name][0])), draws[name], name) for name in draws}


def _from_cells(right: Array, wrong: Array, confidence: Array, first: Array) -> dict[str, Array]:
    """Counts of right and wrong answers (D, cells) -> each metric (D,)."""
    counts = np.add.reduceat(right + wrong, first, axis=1)  # (D, bins that hold any sample)
    excess = np.add.reduceat((right + wrong) * confidence - right, first, axis=1)
    n = np.maximum(counts.sum(1), 1)
    accuracy, gap = right.sum(1) / n, excess / np.maximum(counts, 1)
    return {
        "accuracy": accuracy,
        "mean_confidence": excess.sum(1) / n + accuracy,
        "overconfidence": excess.sum(1) / n,
        "ece": np.abs(excess).sum(1) / n,
        "ece2": np.sqrt((excess * gap).sum(1) / n),
        "mce": np.abs(gap).max(1),
    }


def _interval(estimate: float, draws: Array, name: str) -> Interval:
    low, high = (float(bound) for bound in np.quantile(draws - draws.mean() + estimate, [0.025, 0.975]))
    if name == "overconfidence":
        return Interval(estimate, low, high)
    return Interval(estimate, max(0.0, low), min(1.0, high))
