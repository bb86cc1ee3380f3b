"""Predictions from files: one, many or a folder; read in chunks, so files may be larger than memory.

Whether the numbers are logits or probabilities is stated by the caller or by an .npz that names its arrays so, or it is
certain from the numbers. Row numbers in messages count from 1 below the header.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from doublehead.files.arrays import RawBatch, Reader
from doublehead.files.columns import (
    LOGITS,
    Layout,
    choose_layout,
    label_columns,
    listed,
    score_family,
    split_score,
)
from doublehead.files.formats import open_source
from doublehead.files.long_form import from_long_form
from doublehead.files.sources import Array, NoRows, Source, TableError, find_sources
from doublehead.files.values import to_correct, to_labels, to_scores, to_several_labels, to_text, to_weights
from doublehead.outcomes import Outcomes
from doublehead.predictions import Predictions
from doublehead.summary import Tally, row_groups

Kind: TypeAlias = Literal["logits", "probs"]

CHUNK_ENTRIES = 1 << 21  # scores looked at together: 16 MiB of float64
ROWS_PER_CLASS = 10  # from so many rows per class on, every class should have a label


class Chunk(NamedTuple):
    """Some rows of one file."""

    scores: torch.Tensor  # (B, K), logits or probs as stated
    predictions: Predictions | Outcomes | None  # None where the file has no labels
    groups: (
        Array | None
    )  # (N,) text, of each prediction: the values of the `by` column, or one of several labels
    raw: RawBatch
    rows: Array  # (B,) which rows of the raw batch these are (some are left out by a filter)
    source: Source
    numbers: Array  # (B,) the rows of the file, from 1


@dataclass(frozen=True)
class PredictionTable:
    """Files of predictions and how to read them; only their beginning has been read yet."""

    sources: tuple[Source, ...]
    kind: Kind
    layout: Layout
    by: str | None
    where: Mapping[str, str]
    tolerance: float
    extra: tuple[str, ...] = ()  # further columns to read
    weights: str | None = None  # the column of sample weights
    why: str = ""  # it is of this kind, where that was not stated
    counts: dict[str, int] = field(default_factory=dict, compare=False)  # of the last time all was read
    opened: dict[str, Reader] = field(
        default_factory=dict, compare=False
    )  # to read once what files begin with

    @property
    def name(self) -> str:
        """The file, or how many there are."""
        first = str(self.sources[0])
        return first if len(self.sources) == 1 else f"{len(self.sources)} files ({first}, ...)"

    @property
    def n_bytes(self) -> int:
        """The size of all files."""
        whole = [s for s in self.sources if s.row_groups is None and s.arrays is None]
        sizes = [path.stat().st_size for s in whole for path in (s.path, s.partner) if path is not None]
        return sum(sizes) + sum(open_source(s).n_bytes for s in self.sources if s.row_groups is not None)

    def __iter__(self) -> Iterator[Chunk]:
        return self.chunks()

    def chunks(self, advance: Callable[[int], None] | None = None, keep: bool = False) -> Iterator[Chunk]:
        """Checked chunks; `advance` receives the bytes read since the last one, `keep` keeps every column."""
        seen = kept = 0
        self.counts["clipped"] = 0
        values: set[str] = set()
        for source in self.sources:
            reader = self.opened.pop(str(source), None) or open_source(source)
            done, first = 0, reader.first_row
            with closing(
                self._raw(reader, keep)
            ) as batches:  # the file is closed whatever is wrong in a chunk
                for raw in batches:
                    n = len(raw.scores)
                    rows = _matching(raw, self.where, n, values)
                    seen, kept = seen + n, kept + len(rows)
                    if len(rows):
                        yield self._chunk(raw, rows, first, source)
                    first += n
                    if advance is not None:
                        advance(raw.bytes_done - done)
                        done = raw.bytes_done
        if not kept:
            raise NoRows(self._nothing(seen, values))

    def load(self) -> Predictions:
        """All of it in memory; it must have labels."""
        self.require_scores()
        parts = [chunk.predictions for chunk in self.chunks()]
        whole = [part for part in parts if isinstance(part, Predictions)]
        if len(whole) < len(parts):
            raise TableError(f"{self.sources[0]} has no labels")
        return Predictions.joined(whole)

    def require_scores(self) -> None:
        """Refuse files that hold the confidence in the predicted class alone."""
        if self.layout.top_only:
            raise TableError(
                f"{self.name} holds only the confidence in the predicted class: a score for every class is needed"
            )

    def tally(self, n_bins: int = 15, advance: Callable[[int], None] | None = None) -> Tally:
        """Read the table once, in memory that does not grow with its rows."""
        found: Tally | None = None
        for chunk in self.chunks(advance):
            if chunk.predictions is None:
                raise TableError(f"{self.sources[0]} has no labels to measure by")
            part = Tally.of(chunk.predictions, n_bins, chunk.groups)
            if found is None:
                found = part
            else:
                found += part
        assert found is not None  # chunks() raises where there are no rows
        return found

    def split(self, row_groups: int = 1) -> list[PredictionTable]:
        """The same table in pieces: Parquet files every `row_groups` row groups, other files whole."""
        pieces: list[Source] = []
        for source in self.sources:
            reader: Any = open_source(source)
            n = getattr(reader, "groups", None)
            if n is None:
                pieces.append(source)
            else:
                starts = range(n.start, n.stop, row_groups)
                pieces += [source._replace(row_groups=(i, min(n.stop, i + row_groups))) for i in starts]
        return [replace(self, sources=(piece,), opened={}) for piece in pieces]

    def _raw(self, reader: Reader, keep: bool) -> Generator[RawBatch, None, None]:
        """Batches of the columns that matter; every file must have them."""
        others = [*self.layout.others, *filter(None, (self.by, self.weights)), *self.where, *self.extra]
        for name in (*self.layout.scores, *others):
            if name not in reader.columns:
                raise TableError(f"{reader.source} has no column {name!r}, which {self.sources[0]} has")
        width = max(len(self.layout.scores), 2)
        if reader.columns[self.layout.scores[0]] == "matrix":
            width = 1000  # not known before reading; enough for small chunks of wide rows
        rows = min(max(1, CHUNK_ENTRIES // width), 1 << 18)
        return reader.batches(self.layout.scores, list(dict.fromkeys(others)), rows, keep)

    def _chunk(self, raw: RawBatch, rows: Array, first: int, source: Source) -> Chunk:
        layout, numbers = self.layout, first + rows + 1  # as in messages
        table = raw.scores if len(rows) == len(raw.scores) else raw.scores[rows]
        columns = {name: column[rows] for name, column in raw.columns.items()}
        scores, clipped = to_scores(table, layout, numbers, source, self.kind, self.tolerance)
        self.counts["clipped"] += clipped
        predictions: Predictions | Outcomes | None = None
        weights = None
        if self.weights is not None:
            weights = to_weights(columns[self.weights], self.weights, numbers, source)
        if layout.top_only:
            correct = to_correct(columns, layout, numbers, source)
            predictions = Outcomes(
                scores[:, 0], correct, weights=None if weights is None else torch.from_numpy(weights)
            )
        else:
            predictions = self._predictions(scores, columns, weights, numbers, source)
        groups = None if self.by is None else to_text(columns[self.by])
        if isinstance(predictions, Predictions):
            groups = row_groups(predictions, groups, layout.labels)
        return Chunk(scores, predictions, groups, raw, rows, source, numbers)

    def _predictions(
        self,
        scores: torch.Tensor,
        columns: dict[str, Array],
        weights: Array | None,
        numbers: Array,
        source: Source,
    ) -> Predictions | None:
        layout, are_probs = self.layout, self.kind == "probs"
        if layout.independent:
            several = to_several_labels(columns, layout, scores.shape[1], numbers, source)
            if several is None:
                return None
            return Predictions.multilabel(scores, several, weights, are_probs=are_probs)
        if layout.label is None:
            return None
        labels = to_labels(columns[layout.label], layout, scores.shape[1], numbers, source)
        if are_probs:
            return Predictions.from_probs(scores, labels, weights, tolerance=self.tolerance)
        return Predictions(scores, labels, weights)

    def _nothing(self, seen: int, values: set[str]) -> str:
        if not seen:
            return f"{self.name} {'has' if len(self.sources) == 1 else 'have'} no rows"
        wanted = " and ".join(f"{name}={value}" for name, value in self.where.items())
        found = ", ".join(sorted(values)[:10])
        return f"none of the {seen} rows of {self.name} has {wanted}; the values there are {found}"


def read_predictions(
    paths: str | Path | Sequence[str | Path | Source],
    *,
    kind: Kind | None = None,
    label: str | Sequence[str] | None = None,
    scores: Sequence[str] | None = None,
    by: str | None = None,
    weights: str | None = None,
    where: Mapping[str, str] | None = None,
    base: int | None = None,
    tolerance: float = 1e-3,
    label_needed: bool = True,
    independent: bool = False,
    like: PredictionTable | None = None,
    extra: Sequence[str] = (),
) -> PredictionTable:
    """Predictions in files of any format, in folders, or one set of an .npz (`file.npz:test`).

    `kind` says whether the scores are logits or probs. It may be left out where an .npz calls its array so, where rows
    of numbers in 0..1 sum to 1, or where the columns are called logits.
    `label` and `scores` name columns (or arrays; * and ? stand for any characters); what is not named is guessed and
    recorded in `.layout.guesses`. Labels are whole numbers from `base` on (0, or the number of the first score
    column) or names of classes that match the score columns. Several columns of 0 and 1 (a list, or a name with * in
    it), or lists of 0 and 1, are as many labels of each sample; `independent` states this of files without labels. A
    file may also hold a row for each sample and class, the predicted class and its confidence alone, or answers of a
    language model (`files.answers`). `where` keeps the rows with these values, `by` is a column of groups, which may be
    the name of folders called `by=value`, `weights` is one of sample weights; `extra` columns are read too. With
    `label_needed=False` files without labels, or without weights, are read too. Scores that are not named are the
    columns of the table `like` where this one has them.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "a.csv"
    >>> _ = file.write_text("label,cat,dog\\ndog,0.25,0.75\\ncat,0.5,0.5\\n")
    >>> table = read_predictions(file, kind="probs")
    >>> table.layout.guesses
    ("label column 'label'", "score columns 'cat', 'dog' (2 classes)")
    >>> table.load().labels.tolist()
    [1, 0]
    """
    if kind not in ("logits", "probs", None):
        raise ValueError(f"kind must be 'logits' or 'probs', got {kind!r}")
    if not 0 <= tolerance < 1:
        raise TableError(f"tolerance must lie in 0..1, got {tolerance}")
    if by == "":
        raise TableError("by must name a column, got an empty name")
    sources = find_sources([paths] if isinstance(paths, str | Path) else paths)
    reader = open_source(sources[0])
    where = dict(where or {})
    if not label_needed and weights not in reader.columns:
        weights = None
    others = [*where, *filter(None, (by, weights)), *extra]
    for name in others:
        if name not in reader.columns:
            raise TableError(f"{reader.source} has no column {name!r}, it has {listed(reader.columns)}")
    label, labels = label_columns(label, reader.columns, str(reader.source), label_needed)
    if scores is None and not labels and (made := from_long_form(sources, reader, label, others)) is not None:
        sources, reader = [made], open_source(made)
    stated = _stated(sources, reader, kind)
    scores = named = reader.scores if scores is None else scores
    if scores is None and like is not None and set(like.layout.scores) <= set(reader.columns):
        family = score_family(reader.columns, str(reader.source), stated)
        if family is None or set(family) <= set(like.layout.scores):  # else it has other classes
            named = like.layout.scores
    layout = choose_layout(
        reader.columns,
        str(reader.source),
        kind=stated,
        label=label,
        scores=named,
        base=base,
        taken=others,
        label_needed=label_needed,
        labels=labels,
        independent=independent or (like is not None and like.layout.independent),
    )
    layout = replace(layout, guesses=(*reader.guesses, *layout.guesses))
    if grouped := {layout.label, *labels} & {*where, *filter(None, [by])}:
        raise TableError(
            f"rows cannot be selected or grouped by their label ({grouped.pop()!r}): among the samples of one class a "
            "calibrated model looks miscalibrated. Group by the predicted class, or read the class-wise ECE"
        )
    table = PredictionTable(
        tuple(sources), stated or "logits", layout, by, where, tolerance, tuple(extra), weights
    )
    table.opened[str(sources[0])] = reader
    if stated is None:
        certain, why = _certain_kind(table, reader)
        table = replace(table, kind=certain, why=why)
    if named is None:
        _check_names(table)
    if layout.unnamed:
        _check_unnamed(table, reader)
    return table


def _check_names(table: PredictionTable) -> None:
    """Refuse guessed columns that are called the other kind than was stated: prob_0, ... stated as logits."""
    other = "probs" if table.kind == "logits" else "logits"
    first = table.layout.scores[0]
    if not table.layout.top_only and all(name.lower().startswith(other[:-1]) for name in table.layout.scores):
        against = (
            table.why if table.why and table.why != "as they are called" else f"{table.kind} were stated"
        )
        raise TableError(
            f"{table.name} has columns such as {first!r}, but {against}: state {other} (--{other}, or "
            f"{other}:FILE in a report), or name the columns (--scores) if they hold {table.kind}"
        )


def _check_unnamed(table: PredictionTable, reader: Reader) -> None:
    """Refuse score columns without telling names where the labels of the first rows contradict them."""
    layout = table.layout
    if layout.label is None:
        return
    with closing(table._raw(reader, keep=False)) as batches:
        raw = next(batches, None)
    if raw is None:
        return
    labels, scores = to_text(raw.columns[layout.label]), layout.scores
    enough = len(labels) >= ROWS_PER_CLASS * len(scores)  # then a class without any label is unlikely
    if table.kind == "probs" and _off_one(raw.scores) <= max(table.tolerance, 1e-2):
        return
    named = set(labels.tolist()) & set(scores)
    if named:
        extra = [name for name in scores if name not in named] if enough or table.kind == "probs" else []
    else:
        numbers = [int(label) for label in set(labels.tolist()) if label.isdecimal()]
        extra = list(scores[max(numbers) + 1 - layout.base :]) if numbers and enough else []
    if extra and len(extra) < len(scores):
        raise TableError(
            f"{table.sources[0]}: the columns of decimal numbers are {', '.join(map(repr, scores[:12]))}, but no label "
            f"in {layout.label!r} stands for {', '.join(map(repr, extra[:12]))}: name the score columns with --scores"
        )


def _stated(sources: Sequence[Source], reader: Reader, kind: Kind | None) -> Kind | None:
    """What the caller or the files state; they must not contradict each other."""
    for source in sources:
        says = None
        if source.path.suffix == ".npz":
            says = (reader if source is reader.source else open_source(source)).states
        if says is not None and kind is not None and says != kind:
            raise TableError(f"{source} holds an array called {says!r}, but {kind} were stated with --{kind}")
    if kind is None and reader.states in ("logits", "probs"):
        return "logits" if reader.states == "logits" else "probs"
    return kind


def _off_one(table: Array) -> float:
    """How far the sum of any row lies from 1."""
    sums = np.nan_to_num(table).sum(1, dtype=np.float64)
    return float(np.abs(sums - 1).max())


def _certain_kind(table: PredictionTable, reader: Reader) -> tuple[Kind, str]:
    """The kind of the scores where the first rows or the names leave no doubt, and why; else an error."""
    with closing(table._raw(reader, keep=False)) as batches:
        raw = next(batches, None)
    if raw is None:
        raise NoRows(table._nothing(0, set()))
    if table.layout.top_only:
        return "probs", "a confidence"
    scores, several = raw.scores, raw.scores.shape[1] > 1 and not table.layout.independent
    low, high = float(np.nanmin(scores)), float(np.nanmax(scores))
    if several and low >= 0 and high <= 1 + 1e-6 and _off_one(scores) <= max(table.tolerance, 1e-2):
        return "probs", "rows sum to 1"
    if all(split_score(name, "logits")[0] in LOGITS or name in LOGITS for name in table.layout.scores):
        return "logits", "as they are called"
    if several and high <= 1e-6 and _off_one(np.exp(scores, dtype=np.float64)) <= 1e-2:
        return "logits", "log-probabilities"
    shape = f"the scores of {table.sources[0]} lie in {low:.4g}..{high:.4g}"
    shape += " and rows do not sum to 1" if several else ""
    name = "logits" if several or low < 0 or high > 1 else "probs"
    raise TableError(
        f"say whether the scores are logits or probabilities: {shape}, which looks like {name}; give --{name} if so"
    )


def _matching(raw: RawBatch, where: Mapping[str, str], n: int, values: set[str]) -> Array:
    """The rows of a batch that pass the filter; up to 1000 values of its first column are remembered for an error."""
    keep = np.ones(n, dtype=bool)
    for i, (name, wanted) in enumerate(where.items()):
        found = to_text(raw.columns[name])
        if i == 0 and len(values) < 1000:
            values.update(np.unique(found)[:1000].tolist())
        keep &= found == wanted
    return np.flatnonzero(keep)
