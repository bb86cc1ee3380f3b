"""What a report keeps of the predictions of one method, gathered in one pass and in bounded memory, and measures.

Sums are those of all samples. What needs samples one by one comes from some drawn at random, see `outcomes.Drawn`.
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from doublehead import metrics
from doublehead.abstain import threshold_counts
from doublehead.curves import Reliability, reliability, risk_coverage_curve
from doublehead.files.reading import Chunk, PredictionTable
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
    "text", "sentence", "question", "image", "path", "file", "filename", "file_name", "id", "name", "url",
)  # fmt: skip
SHIFTED = ("accuracy", "ece", "ece_floor_high", "mean_confidence", "auroc")  # measured on shifted data

# The thresholds of the slider: fine where most confidences lie.
THRESHOLDS = np.unique(np.r_[0:0.9:0.01, 0.9:0.99:0.001, 0.99:0.999:0.0005, 0.999, 0.9995, 0.9999].round(4))


class ErrorRow(NamedTuple):
    """A wrong answer and its place in the file."""

    confidence: float
    label: str
    predicted: str
    row: int  # of the file, from 1
    source: str
    shown: str  # the text, path or id of the sample, where the file has one
    group: str
    about: str  # the label, of a sample that has several


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
        p = p.with_countable_weights()
        samples = np.arange(len(p) // (p.n_labels or 1)) + 1
        if times is not None and times.shape != samples.shape:
            raise ValueError(
                f"time must hold one time for each of {len(samples)} samples, got shape {times.shape}"
            )
        return _gathered([_Part(p, row_groups(p, by), row_groups(p), samples, "", None, times)], n_bins)

    @classmethod
    def of_table(cls, table: PredictionTable, n_bins: int = 15, time: str | None = None) -> Record:
        """The record of files, which are streamed; `time` is among the extra columns of the table."""
        columns, layout = table.reader.columns, table.layout
        taken = {*layout.scores, *layout.others, table.by, table.weights, time}
        names = {name.lower(): name for name in columns if name not in taken}
        shown = next((names[name] for name in SHOWN if name in names), None)  # tells which sample a row is
        table = replace(table, extra=(*table.extra, *filter(None, [shown])))

        def part(chunk: Chunk) -> _Part:
            batch, source = chunk.batch, str(chunk.batch.source)
            texts = None if shown is None else to_text(batch.columns[shown])
            times = None if time is None else as_times(batch.columns[time], time, source)
            p = chunk.labelled()
            labels = None if isinstance(p, Outcomes) else row_groups(p, names=layout.labels)
            return _Part(p, chunk.groups, labels, batch.numbers, source, texts, times)

        return _gathered(map(part, table.chunks()), n_bins)

    @property
    def notes(self) -> list[str]:
        """What a reader of the page must know about its numbers, in sentences."""
        notes = ["Tables count each sample by its weight."] if self.outcomes.weights is not None else []
        if len(self.outcomes) == self.tally.n:
            return notes
        return [
            *notes,
            f"Equal-mass ECE, AURC, error by coverage, confused classes, changed predictions and periods are those of "
            f"{len(self.outcomes):,} samples drawn at random, all other numbers those of all {self.tally.n:,}.",
        ]


class _Part(NamedTuple):
    predictions: Predictions | Outcomes
    groups: Array | None
    labels: Array | None  # what each prediction is about, where samples have several labels
    rows: Array  # of the file, one for each sample; `shown` and `times` likewise
    source: str
    shown: Array | None
    times: Array | None


def _gathered(parts: Iterable[_Part], n_bins: int) -> Record:
    tally: Tally | None = None
    drawn, counts, several = Drawn(), np.zeros((2, len(THRESHOLDS)), dtype=np.int64), 1
    errors: list[ErrorRow] = []
    for part in parts:
        p, several = part.predictions, len(part.predictions) // len(part.rows)
        tally = Tally.of(p, n_bins, part.groups, onto=tally)
        found = p if isinstance(p, Outcomes) else Outcomes.of(p)
        drawn.add(found, None if part.times is None else np.repeat(part.times, several))
        counts = counts + np.stack(at_thresholds(found, THRESHOLDS))
        errors = heapq.nlargest(
            MAX_ERRORS, [*errors, *_errors(found, part, several)], key=lambda row: row.confidence
        )
    assert tally is not None
    outcomes, times = drawn.joined(tally.zero_floor)
    accepted, wrong = counts
    return Record(tally, outcomes, accepted, wrong, tuple(errors), times, several)


def _errors(found: Outcomes, part: _Part, several: int) -> Iterator[ErrorRow]:
    def told(column: Any, i: int) -> str:
        return "" if column is None else str(np.asarray(column)[i])

    wrong = (~found.correct).nonzero()[:, 0]
    for i in wrong[found.confidence[wrong].argsort(descending=True, stable=True)[:MAX_ERRORS]].tolist():
        label, predicted, group = told(found.labels, i), told(found.predicted, i), told(part.groups, i)
        row, shown, about = int(part.rows[i // several]), told(part.shown, i // several), told(part.labels, i)
        yield ErrorRow(float(found.confidence[i]), label, predicted, row, part.source, shown, group, about)


def as_times(column: Array, name: str, source: str) -> Array:
    """Numbers as they are, text as dates (ISO 8601)."""
    if column.dtype.kind in "iuf":
        times: Array = column.astype(np.float64)
    elif column.dtype.kind == "M":
        times = column.astype("datetime64[s]")
    else:
        texts, which = np.unique([str(value).strip() for value in column.tolist()], return_inverse=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that times with a zone become universal time
                # Parsing is slow, and different texts are seldom many.
                times = np.array(texts, dtype="datetime64[s]")[which]
        except ValueError as error:
            got = repr(str(error.object)) if isinstance(error, UnicodeEncodeError) else error
            raise TableError(
                f"{source}: the times in {name!r} must be numbers or dates such as 2024-12-31, got {got}"
            ) from error
    if missing := int(np.isnan(times).sum()):
        raise TableError(f"{source}: the time in {name!r} is missing in {missing} rows")
    return times


def _periods(times: Array) -> tuple[list[str], Array]:
    """Names of at most MAX_PERIODS periods and the one of each sample; months or years where they suffice."""
    if times.dtype.kind == "M":
        for unit in ("D", "M", "Y"):
            rounded = times.astype(f"datetime64[{unit}]")
            values, which = np.unique(rounded, return_inverse=True)
            if 1 < len(values) <= MAX_PERIODS:
                return [str(value) for value in values], which
    values, which = np.unique(times, return_inverse=True)
    if len(values) <= MAX_PERIODS:
        return [_told(value) for value in values], which
    edges = np.unique(np.quantile(which, np.arange(1, MAX_PERIODS) / MAX_PERIODS, method="nearest"))
    which = np.searchsorted(edges, which, side="right")
    bounds = [(times[which == i].min(), times[which == i].max()) for i in range(int(which.max()) + 1)]
    return [_told(low) + (f" to {_told(high)}" if high > low else "") for low, high in bounds], which


def _told(value: Any) -> str:
    return (
        f"{value:g}"
        if isinstance(value, np.floating)
        else str(value).replace("T", " ").removesuffix(" 00:00:00")
    )


@dataclass(frozen=True, eq=False)
class Method:
    """One set of predictions: its summary and what the pictures show."""

    index: int
    name: str
    summary: Summary
    record: Record
    periods: Summary | None  # its groups are periods
    curve: Reliability
    risk: RiskCoverage

    @property
    def filled(self) -> Array:
        """The bins that hold samples."""
        return np.flatnonzero(self.curve.counts)

    @property
    def shares(self) -> Array:
        """The share of samples in each bin."""
        shares: Array = self.curve.counts / self.curve.counts.sum()
        return shares


def measure(index: int, name: str, record: Record) -> Method:
    """Everything about one set of predictions; a second or so for 10,000 samples."""
    summary = record.tally.summary()
    if record.outcomes.weights is None:
        summary = add_sample_metrics(summary, record.outcomes)
    periods = None
    if record.times is not None:
        names, which = _periods(record.times)
        parts = [record.outcomes[np.flatnonzero(which == i)] for i in range(len(names))]
        tallies = {name: Tally.of(part, summary.n_bins) for name, part in zip(names, parts)}
        groups = {name: tally.summary() for name, tally in tallies.items() if tally.top.n}
        periods = replace(summary, groups=groups)
    confidences: Any = record.outcomes  # all that the curve reads
    return Method(
        index=index,
        name=name,
        summary=summary,
        record=record,
        periods=periods,
        curve=reliability(summary.bins, summary.n_bins),
        risk=risk_coverage_curve(confidences),
    )


def at_thresholds(p: Outcomes, thresholds: Array) -> tuple[Array, Array]:
    """How many samples (or what weight) have at least each confidence, and how many of these are wrong."""
    # 0.7 in float32 is at least 0.7, though as a float64 it is less
    falling = torch.from_numpy(thresholds).to(p.confidence.dtype).flip(0)
    counts = threshold_counts(p.confidence, p.correct, falling, p.weights)
    accepted, wrong = counts.cumsum(1).flip(1).numpy()
    return accepted, wrong


def compare_methods(methods: Sequence[Method]) -> list[list[Comparison | None]]:
    """Every method (row) with every other (column), see `outcomes.compare_all`."""
    pairs = compare_all([m.record.outcomes for m in methods])
    for row, one in zip(pairs, methods):
        for j, (pair, other) in enumerate(zip(row, methods)):
            n, nlls = one.record.tally.n, [m.summary.values.get("nll", np.nan) for m in (one, other)]
            if pair is not None:
                row[j] = pair.of_all(n, nlls[1] - nlls[0]) if n == other.record.tally.n else None
    return pairs


def measure_shift(
    own: Outcomes, shifted: Predictions | Record | Mapping[str, float], n_bins: int
) -> dict[str, float]:
    """One method on shifted data: from predictions, or numbers that were measured before; nan where not known."""
    if isinstance(shifted, Mapping):
        return {key: float(shifted.get(key, np.nan)) for key in SHIFTED}
    record = shifted if isinstance(shifted, Record) else Record.of(shifted, n_bins)
    auroc = metrics.auroc(own.confidence, record.outcomes.confidence)
    values = {**record.tally.summary().values, "auroc": auroc}
    return {key: values[key] for key in SHIFTED}
