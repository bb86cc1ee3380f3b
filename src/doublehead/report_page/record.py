"""What a report keeps of the predictions of one method, gathered in one pass and in bounded memory, and measures.

Sums are those of all samples. What needs samples one by one comes from some drawn at random, see `outcomes.Drawn`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from doublehead import metrics
from doublehead.abstain import ThresholdChoice
from doublehead.curves import (
    ClassGaps,
    Histogram,
    Reliability,
    confidence_histogram,
    reliability,
    risk_coverage_curve,
)
from doublehead.files.reading import PredictionTable
from doublehead.files.sources import TableError
from doublehead.files.values import to_text
from doublehead.metrics import RiskCoverage
from doublehead.outcomes import Comparison, Drawn, Outcomes, compare_all
from doublehead.predictions import Predictions
from doublehead.stream import Tally, row_groups
from doublehead.summary import Summary, add_sample_metrics

Array: TypeAlias = "np.ndarray[Any, Any]"

MAX_ERRORS = 25  # the most confident ones are listed
MAX_PERIODS = 24
SHOWN = (
    "text",
    "sentence",
    "question",
    "image",
    "path",
    "file",
    "filename",
    "file_name",
    "id",
    "name",
    "url",
)
ERROR_LIMITS = (0.05, 0.02, 0.01, 0.001)  # for which a guaranteed threshold is searched

# The thresholds of the slider: fine where most confidences lie.
THRESHOLDS = np.unique(np.r_[0:0.9:0.01, 0.9:0.99:0.001, 0.99:0.999:0.0005, 0.999, 0.9995, 0.9999].round(4))


class ErrorRow(NamedTuple):
    """A wrong answer and where it stands."""

    confidence: float
    label: str
    predicted: str
    row: int  # of the file, from 1
    source: str
    shown: str  # the text, path or id of the sample, where the file has one
    group: str  # or the label, of a sample that has several


@dataclass(frozen=True, eq=False)
class Record:
    """One method: its sums, samples drawn from all, its most confident errors."""

    tally: Tally
    outcomes: Outcomes  # of the drawn samples; those of all where they are few enough
    accepted: Array  # (T,) samples of at least each of THRESHOLDS, or their weight
    wrong: Array  # (T,) and how many of these are wrong
    errors: tuple[ErrorRow, ...] = ()
    times: Array | None = None  # numbers or dates of the drawn samples
    several: int = 1  # labels of each sample, which are counted as samples in everything else

    @classmethod
    def of(
        cls, p: Predictions, n_bins: int = 15, by: Array | None = None, times: Array | None = None
    ) -> Record:
        """The record of predictions in memory."""
        several = p.n_labels or 1
        rows = np.arange(len(p)) // several + 1
        times = None if times is None else np.repeat(times, several)
        return replace(
            _gathered([_Part(p, row_groups(p, by), rows, "", None, times)], n_bins), several=several
        )

    @classmethod
    def of_table(
        cls,
        table: PredictionTable,
        n_bins: int = 15,
        time: str | None = None,
        shown: str | None = None,
    ) -> Record:
        """The record of files, which are streamed; `time` and `shown` are among the extra columns of the table."""

        several = 1

        def parts() -> Iterable[_Part]:
            nonlocal several
            for chunk in table.chunks():
                if chunk.predictions is None:
                    raise TableError(f"{table.sources[0]} has no labels to measure by")
                several = len(chunk.predictions) // len(chunk.rows)  # labels of each row
                columns = {
                    name: np.repeat(chunk.raw.columns[name][chunk.rows], several) for name in table.extra
                }
                texts = None if shown is None else to_text(columns[shown])
                times = None if time is None else as_times(columns[time], time, str(chunk.source))
                rows, source = np.repeat(chunk.numbers, several), str(chunk.source)
                yield _Part(chunk.predictions, chunk.groups, rows, source, texts, times)

        return replace(_gathered(parts(), n_bins), several=several)

    def summary(self, seed: int = 0) -> Summary:
        """Every number of the method."""
        summary = self.tally.summary(seed)
        return summary if self.outcomes.weights is not None else add_sample_metrics(summary, self.outcomes)

    @property
    def notes(self) -> list[str]:
        """What a reader of the page must know about its numbers, in sentences."""
        if len(self.outcomes) == self.tally.n:
            return []
        return [
            f"Equal-mass ECE, AURC, error by coverage, confused classes, changed predictions and periods are those of "
            f"{len(self.outcomes):,} samples drawn at random, all other numbers those of all {self.tally.n:,}."
        ]

    def periods(self, summary: Summary, seed: int = 0) -> Summary | None:
        """The summary with periods as its groups, at most MAX_PERIODS; None without times."""
        if self.times is None:
            return None
        names, which = _periods(self.times)
        groups = {
            name: Tally.of(self.outcomes[np.flatnonzero(which == i)], self.tally.n_bins)
            for i, name in enumerate(names)
        }
        found = {name: group.summary(seed) for name, group in groups.items()}
        return replace(summary, groups=found)


class _Part(NamedTuple):
    predictions: Predictions | Outcomes
    groups: Array | None
    rows: Array
    source: str
    shown: Array | None
    times: Array | None


def _gathered(parts: Iterable[_Part], n_bins: int) -> Record:
    tally: Tally | None = None
    drawn, counts = Drawn(), np.zeros((2, len(THRESHOLDS)), dtype=np.int64)
    errors: list[ErrorRow] = []
    for part in parts:
        p = part.predictions
        tally = Tally.of(p, n_bins, part.groups, onto=tally)
        found = p if isinstance(p, Outcomes) else Outcomes.of(p)
        drawn.add(found, part.times)
        counts = counts + np.stack(at_thresholds(found, THRESHOLDS))
        errors = heapq.nlargest(MAX_ERRORS, [*errors, *_errors(found, part)])
    assert tally is not None
    outcomes, times = drawn.joined(tally.zero_floor)
    accepted, wrong = counts
    return Record(tally, outcomes, accepted, wrong, tuple(errors), times)


def _errors(found: Outcomes, part: _Part) -> list[ErrorRow]:
    wrong = (~found.correct).nonzero()[:, 0]
    worst = wrong[found.confidence[wrong].argsort(descending=True, stable=True)[:MAX_ERRORS]]

    def class_of(classes: Tensor | None, i: int) -> str:
        return "" if classes is None else str(int(classes[i]))

    return [
        ErrorRow(
            float(found.confidence[i]),
            class_of(found.labels, i),
            class_of(found.predicted, i),
            int(part.rows[i]),
            part.source,
            "" if part.shown is None else str(part.shown[i]),
            "" if part.groups is None else str(part.groups[i]),
        )
        for i in worst.tolist()
    ]


def as_times(column: Array, name: str, source: str) -> Array:
    """Numbers as they are, text as dates (ISO 8601)."""
    if column.dtype.kind in "iuf":
        times: Array = column.astype(np.float64)
        missing = np.isnan(times)
    elif column.dtype.kind == "M":
        times, missing = column.astype("datetime64[s]"), np.isnat(column)
    else:
        texts = [str(value).strip() for value in column.tolist()]
        different = list(set(texts))  # seldom many: parsing is slow
        try:
            dates = np.array(different, dtype="datetime64[s]")
        except ValueError as error:
            raise TableError(
                f"{source}: the times in {name!r} must be numbers or dates such as 2024-12-31, got {error}"
            ) from error
        known = dict(zip(different, range(len(different))))
        times = dates[[known[text] for text in texts]]
        missing = np.isnat(times)
    if missing.any():
        raise TableError(f"{source}: the time in {name!r} is missing in {int(missing.sum())} rows")
    return times


def _periods(times: Array) -> tuple[list[str], Array]:
    """Names of at most MAX_PERIODS periods and the one of each sample; months or years where they suffice."""
    if times.dtype.kind == "M":
        for unit in ("D", "M", "Y"):
            rounded = times.astype(f"datetime64[{unit}]")
            values, which = np.unique(rounded, return_inverse=True)
            if len(values) <= MAX_PERIODS:
                return [str(value) for value in values], which
    values, which = np.unique(times, return_inverse=True)
    if len(values) <= MAX_PERIODS:
        return [_told(value) for value in values], which
    edges = np.unique(np.quantile(which, np.arange(1, MAX_PERIODS) / MAX_PERIODS, method="nearest"))
    which = np.searchsorted(edges, which, side="right")
    bounds = [(times[which == i].min(), times[which == i].max()) for i in range(int(which.max()) + 1)]
    return [f"{_told(low)} to {_told(high)}" for low, high in bounds], which


def _told(value: Any) -> str:
    return f"{value:g}" if isinstance(value, np.floating) else str(value).replace("T", " ")


def shown_column(columns: Sequence[str], taken: Sequence[str]) -> str | None:
    """The column that tells a reader which sample a row is."""
    names = {name.lower(): name for name in columns if name not in taken}
    return next((names[name] for name in SHOWN if name in names), None)


@dataclass(frozen=True, eq=False)
class Method:
    """One set of predictions: its summary and what the pictures show."""

    name: str
    summary: Summary
    record: Record
    periods: Summary | None  # its groups are periods
    curve: Reliability
    histogram: Histogram
    risk: RiskCoverage
    guaranteed: tuple[ThresholdChoice, ...]  # one per ERROR_LIMITS; none with sample weights

    @property
    def classes(self) -> ClassGaps | None:
        """The class-wise gaps; None where only confidences are known."""
        return self.summary.classes


@dataclass(frozen=True)
class Shifted:
    """One method on one shifted set; nan where a number is not known."""

    accuracy: float
    ece: float
    floor_high: float
    mean_confidence: float
    auroc: float


def measure(name: str, p: Predictions | Record, n_bins: int, seed: int) -> Method:
    """Everything about one set of predictions; a second or so for 10,000 samples."""
    record = Record.of(p, n_bins) if isinstance(p, Predictions) else p
    summary = record.summary(seed)
    assert summary.bins is not None
    confidences: Any = record.outcomes  # all that the curve reads
    return Method(
        name=name,
        summary=summary,
        record=record,
        periods=record.periods(summary, seed),
        curve=reliability(summary.bins, n_bins, seed),
        histogram=confidence_histogram(summary.bins, n_bins),
        risk=risk_coverage_curve(confidences),
        guaranteed=tuple(
            summary.abstain(max_error) for max_error in ERROR_LIMITS if summary.answers is not None
        ),
    )


def at_thresholds(p: Outcomes, thresholds: Array) -> tuple[Array, Array]:
    """How many samples (or what weight) have at least each confidence, and how many of these are wrong."""
    reached = np.searchsorted(thresholds, p.confidence.double().numpy(), side="right")  # (N,) so many

    def at_least(rows: Array) -> Array:
        weights = None if p.weights is None else p.weights.numpy()[rows]
        counts: Array = np.bincount(reached[rows], weights, minlength=len(thresholds) + 1)
        return counts[:0:-1].cumsum()[::-1]

    return at_least(np.arange(len(p))), at_least(np.flatnonzero(~p.correct))


def compare_methods(methods: Sequence[Method]) -> list[list[Comparison | None]]:
    """Every method (row) with every other (column), see `outcomes.compare_all`."""
    pairs = compare_all([m.record.outcomes for m in methods])
    return [
        [_of_all(pair, one, other) for pair, other in zip(row, methods)] for row, one in zip(pairs, methods)
    ]


def _of_all(pair: Comparison | None, one: Method, other: Method) -> Comparison | None:
    n = one.record.tally.n
    if pair is None or n != other.record.tally.n:
        return None
    return pair.of_all(n, other.summary.values["nll"] - one.summary.values["nll"])


def measure_shift(
    own: Outcomes, shifted: Predictions | Record | Mapping[str, float], n_bins: int, seed: int
) -> Shifted:
    """One method on shifted data: from predictions, or from numbers by name that were measured before."""
    if isinstance(shifted, Mapping):
        known = {key: float(shifted.get(key, np.nan)) for key in Shifted.__dataclass_fields__}
        return Shifted(**known)
    record = shifted if isinstance(shifted, Record) else Record.of(shifted, n_bins)
    values = record.tally.summary(seed).values
    return Shifted(
        accuracy=values["accuracy"],
        ece=values["ece"],
        floor_high=values["ece_floor_high"],
        mean_confidence=values["mean_confidence"],
        auroc=metrics.auroc(own.confidence, record.outcomes.confidence),
    )
