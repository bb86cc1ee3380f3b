"""Outcomes: what is kept of each prediction without its scores, and paired comparisons of methods.

They take a few bytes per sample, for any number of classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doublehead import metrics
from doublehead.bins import Bins
from doublehead.metrics import Interval
from doublehead.predictions import Predictions

NORMAL = 1.959963984540054  # 97.5 % of a standard normal lie below


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Confidences and whether each answer was correct; the rest is None where only these are known.

    >>> found = Outcomes.of(Predictions([[2.0, 0.0], [0.0, 1.0]], [0, 0]))
    >>> len(found), found.correct.tolist(), found[1:].predicted.tolist()
    (2, [True, False], [1])
    """

    confidence: Tensor  # (N,)
    correct: Tensor  # (N,) bool
    labels: Tensor | None = None  # (N,) int32
    predicted: Tensor | None = None  # (N,) int32
    nll: Tensor | None = None  # (N,) float64; without weights inf where the label has a probability of 0
    weights: Tensor | None = None  # (N,) float64

    @classmethod
    def of(cls, p: Predictions) -> Outcomes:
        """The outcomes of predictions, on the CPU."""
        nll = metrics.per_sample(p)["nll"]
        if p.weights is None:
            nll = nll.where(~metrics.zero_labels(p), torch.inf)
        columns = (p.confidence, p.correct, p.labels.int(), p.predicted.int(), nll, p.weights)
        return cls(*(None if column is None else column.cpu() for column in columns))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence[Outcomes]) -> Outcomes:
        """One after the other."""
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(cls)}
        return cls(**{name: torch.cat(column) for name, column in columns.items() if column[0] is not None})

    def __len__(self) -> int:
        return len(self.confidence)

    def __getitem__(self, rows: Any) -> Outcomes:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return Outcomes(**{name: column[rows] for name, column in columns.items() if column is not None})

    def top_label(self) -> tuple[Tensor, Tensor]:
        """(N,) `confidence` and (N,) `correct`, as of `Predictions`."""
        return self.confidence, self.correct

    def bins(self, n_bins: int) -> Bins:
        """Bins (n_bins,) of the confidences."""
        return Bins.of(self.confidence, self.correct, n_bins, self.weights)


class Comparison(NamedTuple):
    """Two methods on the same samples: the second minus the first, so a negative NLL difference is an improvement."""

    nll: Interval  # mean paired difference with its 95 % interval
    n_changed: int  # samples whose predicted class differs
    n: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference leaves out 0."""
        return self.nll.low > 0 or self.nll.high < 0


def compare(before: Predictions, after: Predictions) -> Comparison:
    """Compare two methods sample by sample, by their NLL; both must have the same labels in the same order.

    >>> p = Predictions([[3.0, 0.0]] * 100, [0] * 70 + [1] * 30)
    >>> found = compare(p, Predictions(p.logits / 3, p.labels))
    >>> found.n_changed, found.nll.estimate < 0, found.is_clear
    (0, True, True)
    """
    (found,) = compare_all([before, after])[0][1:]
    if found is None:
        raise ValueError(
            f"both predictions must have the same labels in the same order, got {len(before)} and {len(after)} samples"
        )
    return found


def compare_all(methods: Sequence[Predictions | Outcomes]) -> list[list[Comparison | None]]:
    """`compare` of every method (row) with every other (column); None where their samples differ or lack an NLL."""
    found = [m if isinstance(m, Outcomes) else Outcomes.of(m) for m in methods]
    for m, p in zip(methods, found):
        if isinstance(m, Predictions) and p.nll is not None:
            p.nll.nan_to_num_(posinf=-math.log(m.zero_floor))
    return [[_pair(one, other) for other in found] for one in found]


def _pair(one: Outcomes, other: Outcomes) -> Comparison | None:
    if one.nll is None or other.nll is None or one.labels is None or other.labels is None:
        return None
    if one.predicted is None or other.predicted is None or not torch.equal(one.labels, other.labels):
        return None
    if (one.weights is None) != (other.weights is None):
        return None
    pairing = Pairing()
    pairing.add(one, other)
    return pairing.comparison()


class Pairing:
    """The sums behind a `Comparison` of two methods whose samples come in parts."""

    def __init__(self) -> None:
        self.n = self.n_changed = 0
        # A sample's difference is difference + before * L + after * M: `before` and `after` say whether its label has a
        # probability of 0 there, L and M are what that costs, which only all parts together tell.
        self._sums = torch.zeros(4, dtype=torch.float64)  # of 1, difference, before, after
        self._squares = torch.zeros(4, 4, dtype=torch.float64)  # of their products

    def add(self, one: Outcomes, other: Outcomes) -> None:
        """Some samples, which must be the same of both."""
        assert one.nll is not None
        assert other.nll is not None
        assert one.predicted is not None
        assert other.predicted is not None
        zero = [nll.isinf() for nll in (one.nll, other.nll)]
        difference = other.nll.where(~zero[1], 0.0) - one.nll.where(~zero[0], 0.0)
        rows = torch.stack([torch.ones_like(difference), difference, -zero[0].double(), zero[1].double()], 1)
        weights = torch.ones_like(difference) if one.weights is None else one.weights
        self._sums += weights @ rows
        self._squares += (rows * weights.square()[:, None]).T @ rows
        self.n += len(rows)
        self.n_changed += int((one.predicted != other.predicted).sum())

    def comparison(self, floor: float = 1.0, other_floor: float = 1.0) -> Comparison:
        """The comparison, with the probabilities that stand for 0 in the two methods."""
        parts = torch.tensor([0.0, 1.0, -math.log(floor), -math.log(other_floor)], dtype=torch.float64)
        mean = float(self._sums @ parts / self._sums[0])
        parts[0] = -mean
        reach = NORMAL * float((parts @ self._squares @ parts).clamp(min=0).sqrt() / self._sums[0])
        return Comparison(Interval(mean, mean - reach, mean + reach), self.n_changed, self.n)
