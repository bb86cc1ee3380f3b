"""Outcomes: what is kept of each prediction without its scores, and paired comparisons of methods.

They take a few bytes per sample, for any number of classes. Of many samples only some are kept, see `Drawn`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from doublehead import metrics
from doublehead.bins import Bins
from doublehead.metrics import Interval
from doublehead.predictions import Predictions

Array: TypeAlias = "np.ndarray[Any, Any]"

MIN_SAMPLES = 10  # below it nothing is judged
MAX_SAMPLES = 200_000
MAX_PARTS = 8  # of samples drawn, before they are joined
ROUNDING = 1e-6  # of the mean of NLLs in float32; it may be the same for every sample
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
    nll: Tensor | None = None  # (N,) float64; inf where the label has a probability of 0
    weights: Tensor | None = None  # (N,) float64

    @classmethod
    def of(cls, p: Predictions) -> Outcomes:
        """The outcomes of predictions, on the CPU."""
        nll = metrics.per_sample(p)["nll"].where(~metrics.zero_labels(p), torch.inf)
        columns = (p.confidence, p.correct, p.labels.int(), p.predicted.int(), nll, p.weights)
        return cls(*(None if column is None else column.cpu() for column in columns))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence[Outcomes]) -> Outcomes:
        """One after the other."""
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(cls)}
        return cls(**{name: torch.cat(column) for name, column in columns.items() if column[0] is not None})

    def with_floor(self, floor: float) -> Outcomes:
        """A label of probability 0 taken as one of `floor`."""
        if self.nll is None or floor > 1:  # inf: no probabilities, but logits
            return self
        return replace(self, nll=self.nll.nan_to_num(posinf=-math.log(floor)))

    def __len__(self) -> int:
        return len(self.confidence)

    def __getitem__(self, rows: Any) -> Outcomes:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return Outcomes(**{name: column[rows] for name, column in columns.items() if column is not None})

    def top_label(self) -> tuple[Tensor, Tensor]:
        """(N,) `confidence` and (N,) `correct`, as of `Predictions`."""
        if self.weights is not None:
            raise TypeError("predictions must have class labels and no weights here, got sample weights")
        return self.confidence, self.correct

    def bins(self, n_bins: int) -> Bins:
        """Bins (n_bins,) of the confidences."""
        return Bins.of(self.confidence, self.correct, n_bins, self.weights)


class Comparison(NamedTuple):
    """Two methods on the same samples: the second minus the first, so a negative NLL difference is an improvement."""

    nll: Interval  # mean paired difference with its 95 % interval
    n_changed: int  # samples whose predicted class differs
    n: int

    def of_all(self, n: int, difference: float) -> Comparison:
        """The comparison on all `n` samples, of which these were drawn; `difference` is that of their mean NLLs."""
        if n == self.n:
            return self
        reach = (self.nll.high - self.nll.low) / 2 * math.sqrt(self.n / n)
        return self._replace(nll=Interval(difference, difference - reach, difference + reach))

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference leaves out 0, of enough samples, and not by rounding alone."""
        clear = self.nll.low > 0 or self.nll.high < 0
        return clear and self.n >= MIN_SAMPLES and abs(self.nll.estimate) > ROUNDING


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
    found = [m if isinstance(m, Outcomes) else Outcomes.of(m).with_floor(m.zero_floor) for m in methods]
    return [[_pair(one, other) for other in found] for one in found]


def _pair(one: Outcomes, other: Outcomes) -> Comparison | None:
    if one.nll is None or other.nll is None or one.labels is None or other.labels is None:
        return None
    if one.predicted is None or other.predicted is None or not torch.equal(one.labels, other.labels):
        return None
    if (one.weights is None) != (other.weights is None):
        return None
    weights = torch.ones_like(one.nll) if one.weights is None else one.weights
    difference, total = other.nll - one.nll, float(weights.sum())
    mean = float(weights @ difference) / total
    reach = NORMAL * float((weights * (difference - mean)).norm()) / total
    n_changed = int((one.predicted != other.predicted).sum())
    return Comparison(Interval(mean, mean - reach, mean + reach), n_changed, len(one))


class Drawn:
    """At most MAX_SAMPLES of the samples added, in their order.

    The choice depends on their places in the stream only, not on the parts they come in. Methods on the same data
    keep the same samples, so they can be compared.
    """

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._parts: list[tuple[Array, Outcomes, Array | None]] = []  # with a random number for each sample

    def add(self, found: Outcomes, times: Array | None = None) -> None:
        """Draw from some more samples, which may have times."""
        self._parts.append((self._rng.random(len(found)), found, times))
        # small parts that are kept between large chunks that are freed leave holes in the memory
        if len(self._parts) > MAX_PARTS or sum(len(part) for _, part, _ in self._parts) > 1.25 * MAX_SAMPLES:
            self._join()

    def joined(self, floor: float) -> tuple[Outcomes, Array | None]:
        """The samples drawn so far, with `floor` as in `Outcomes.with_floor`, and their times."""
        self._join()
        _, outcomes, times = self._parts[0]
        return outcomes.with_floor(floor), times

    def _join(self) -> None:
        columns = zip(*self._parts)
        numbers, outcomes = np.concatenate(next(columns)), Outcomes.joined(next(columns))
        times = None if self._parts[0][2] is None else np.concatenate(next(columns))
        if len(numbers) > MAX_SAMPLES:  # those with the lowest random numbers are kept
            rows = np.sort(np.argpartition(numbers, MAX_SAMPLES)[:MAX_SAMPLES])
            numbers, outcomes, times = numbers[rows], outcomes[rows], None if times is None else times[rows]
        self._parts = [(numbers, outcomes, times)]
