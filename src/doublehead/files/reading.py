"""Predictions from files: one, many or a folder; read in chunks, so files may be larger than memory.

Whether the numbers are logits or probabilities is stated by the caller, or by an .npz that names its arrays so. Row
numbers in messages count from 1 below the header.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from doublehead.files.columns import (
    Layout,
    choose_layout,
    named_columns,
    score_family,
    to_labels,
    to_scores,
    to_text,
)
from doublehead.files.formats import (
    Array,
    CsvReader,
    NoRows,
    RawBatch,
    Reader,
    Source,
    TableError,
    find_sources,
    open_source,
)
from doublehead.predictions import Predictions
from doublehead.summary import Tally, label_groups

Kind: TypeAlias = Literal["logits", "probs"]

CHUNK_ENTRIES = 1 << 21  # scores looked at together: 16 MiB of float64
ROWS_PER_CLASS = 10  # from so many rows per class on, every class should have a label


class Chunk(NamedTuple):
    """Some rows of one file."""

    scores: torch.Tensor  # (B, K), logits or probs as stated
    predictions: Predictions | None  # None where the file has no labels
    groups: Array | None  # (B,) text: the values of the `by` column
    raw: RawBatch
    rows: Array  # (B,) which rows of the raw batch these are (some are left out by a filter)


@dataclass(frozen=True)
class PredictionTable:
    """Files of predictions and how to read them; only their beginning has been read yet."""

    sources: tuple[Source, ...]
    kind: Kind
    layout: Layout
    by: str | None
    where: Mapping[str, str]
    tolerance: float
    weights: str | None = None  # the column of sample weights
    labels: tuple[
        str, ...
    ] = ()  # columns of 0 and 1, one for each score, where a sample may have several labels
    independent: bool = False  # scores are those of such labels, also where the labels are not known

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
        values: set[str] = set()
        for source in self.sources:
            reader = open_source(source)
            done, first = 0, reader.first_row
            with closing(
                self._raw(reader, keep)
            ) as batches:  # the file is closed whatever is wrong in a chunk
                for raw in batches:
                    n = len(next(iter(raw.columns.values())))
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
        parts = [chunk.predictions for chunk in self.chunks()]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            raise TableError(f"{self.sources[0]} has no labels")
        return Predictions.joined(whole)

    def tally(self, n_bins: int = 15, advance: Callable[[int], None] | None = None) -> Tally:
        """Read the table once, in memory that does not grow with its rows."""
        found: Tally | None = None
        for chunk in self.chunks(advance):
            if chunk.predictions is None:
                raise TableError(f"{self.sources[0]} has no labels to measure by")
            part = Tally.of(chunk.predictions, n_bins, chunk.groups)
            found = part if found is None else found + part
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
        return [replace(self, sources=(piece,)) for piece in pieces]

    def _raw(self, reader: Reader, keep: bool) -> Generator[RawBatch, None, None]:
        """Batches of the columns that matter; every file must have them."""
        numbers, texts = list(self.layout.scores), [*([self.by] if self.by else []), *self.where]
        numbers += [*([self.weights] if self.weights else []), *self.labels]
        if self.layout.label is not None:
            is_number = reader.columns.get(self.layout.label) in ("number", "whole")
            if keep and isinstance(reader, CsvReader):
                is_number = False  # so that it is written back as it was
            (numbers if is_number else texts).append(self.layout.label)
        for name in (*numbers, *texts):
            if name not in reader.columns:
                raise TableError(f"{reader.source} has no column {name!r}, which {self.sources[0]} has")
        width = max(len(self.layout.scores), 2)
        if reader.columns[self.layout.scores[0]] == "matrix":
            width = 1000  # not known before reading; enough for small chunks of wide rows
        rows = min(max(1, CHUNK_ENTRIES // width), 1 << 18)
        return reader.batches(list(dict.fromkeys(numbers)), list(dict.fromkeys(texts)), rows, keep)

    def _chunk(self, raw: RawBatch, rows: Array, first: int, source: Source) -> Chunk:
        columns = [raw.columns[name][rows] for name in self.layout.scores]
        numbers = first + rows + 1  # as in messages
        several = self._several_labels(raw, rows, numbers, source)
        scores = to_scores(
            columns,
            self.layout.scores,
            numbers,
            source,
            self.kind,
            self.tolerance,
            self.independent or several is not None,
        )
        if several is not None:
            return self._chunk_of_labels(
                raw, rows, scores, several, self._weights(raw, rows, numbers, source)
            )
        predictions = None
        if self.layout.label is not None:
            labels = to_labels(
                raw.columns[self.layout.label][rows], self.layout, scores.shape[1], numbers, source
            )
            predictions = self._predictions(scores, labels, self._weights(raw, rows, numbers, source))
        groups = None if self.by is None else to_text(raw.columns[self.by][rows])
        return Chunk(scores, predictions, groups, raw, rows)

    def _predictions(self, scores: torch.Tensor, labels: Array, weights: Array | None) -> Predictions:
        if self.kind == "probs":
            return Predictions.from_probs(scores, labels, weights, tolerance=self.tolerance)
        return Predictions(scores, labels, weights)

    def _several_labels(self, raw: RawBatch, rows: Array, numbers: Array, source: Source) -> Array | None:
        """(B, L) 0 and 1 where samples have several labels."""
        if self.labels:
            labels = np.stack([raw.columns[name][rows] for name in self.labels], 1)
        elif self.layout.label is not None and raw.columns[self.layout.label].ndim == 2:
            labels = raw.columns[self.layout.label][rows]
        else:
            return None
        wrong = ~np.isin(labels, (0, 1))
        if wrong.any():
            i, j = (int(index[0]) for index in np.nonzero(wrong))
            name = self.labels[j] if self.labels else self.layout.label
            raise TableError(
                f"{source}, column {name!r}, row {numbers[i]} must hold 0 or 1, got {labels[i, j]}"
            )
        return labels.astype(np.int64)

    def _chunk_of_labels(
        self, raw: RawBatch, rows: Array, scores: torch.Tensor, labels: Array, weights: Array | None
    ) -> Chunk:
        if labels.shape != tuple(scores.shape):
            raise TableError(
                f"{self.name} must have a score for each label, got {scores.shape[1]} scores and {labels.shape[1]} "
                "labels"
            )
        p = Predictions.multilabel(scores, labels, weights, are_probs=self.kind == "probs")
        names = self.labels or [f"label {i}" for i in range(labels.shape[1])]
        groups = label_groups(p, names)
        if self.by is not None:
            groups = np.repeat(to_text(raw.columns[self.by][rows]), labels.shape[1])
        return Chunk(scores, p, groups, raw, rows)

    def _weights(self, raw: RawBatch, rows: Array, numbers: Array, source: Source) -> Array | None:
        if self.weights is None:
            return None
        weights: Array = raw.columns[self.weights][rows].astype(np.float64)
        wrong = ~(np.isfinite(weights) & (weights >= 0))
        if wrong.any():
            i = int(wrong.argmax())
            raise TableError(
                f"{source}, column {self.weights!r}, row {numbers[i]} must hold a weight >= 0, got {weights[i]:g}"
            )
        return weights

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
) -> PredictionTable:
    """Predictions in .npz, pairs of .npy, CSV or Parquet: files, folders, or one set of an .npz (`file.npz:test`).

    `kind` says whether the scores are logits or probs; only an .npz whose array is called so states it itself.
    `label` and `scores` name columns (or arrays; * and ? stand for any characters); what is not named is guessed and
    recorded in `.layout.guesses`. Labels are whole numbers from `base` on (0, or the number of the first score
    column) or names of classes that match the score columns; several columns of 0 and 1 (a list, or a name with * in
    it), or an array (N, L) of an .npz, are as many labels of each sample (`independent` says so of files without
    labels). `where` keeps the rows with these values, `by` is a column of groups, `weights` one of sample weights.
    With `label_needed=False` files without labels are read too. Scores that are not named are the columns of the table
    `like` where this one has them.

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
    label, several = _label_columns(label, reader, label_needed)
    independent = independent or bool(several) or (like is not None and like.independent)
    others = [*where, *(name for name in (by, weights) if name), *several]
    for name in others:
        if name not in reader.columns:
            raise TableError(
                f"{reader.source} has no column {name!r}, it has {', '.join(map(repr, reader.columns))}"
            )
    stated = _stated(sources, reader, kind)
    named = scores
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
        label_needed=label_needed and not several,
    )
    if several:
        layout = replace(layout, label=None)
    if layout.label is not None and layout.label in others:
        raise TableError(
            f"rows cannot be selected or grouped by their label ({layout.label!r}): among the samples of one class a "
            "calibrated model looks miscalibrated. Group by the predicted class, or read the class-wise ECE"
        )
    table = PredictionTable(
        tuple(sources), stated or "logits", layout, by, where, tolerance, weights, several, independent
    )
    if stated is None:
        raise TableError(_what_it_looks_like(table))
    if named is None:
        _check_names(table)
    if layout.unnamed:
        _check_unnamed(table, reader)
    return table


def _label_columns(
    label: str | Sequence[str] | None, reader: Reader, needed: bool
) -> tuple[str | None, tuple[str, ...]]:
    """The label column, or several of them; none of several where they are not needed and one is missing."""
    if label is None or (isinstance(label, str) and (label in reader.columns or not set(label) & set("*?,"))):
        return label, ()
    names = [name.strip() for name in label.split(",")] if isinstance(label, str) else label
    try:
        found = named_columns(names, reader.columns, str(reader.source), "labels")
    except TableError:
        if needed:
            raise
        return None, ()
    return (found[0], ()) if len(found) == 1 else (None, found)


def _check_names(table: PredictionTable) -> None:
    """Refuse guessed columns that are called the other kind than was stated: prob_0, ... stated as logits."""
    other = "probs" if table.kind == "logits" else "logits"
    first = table.layout.scores[0]
    if all(name.lower().startswith(other[:-1]) for name in table.layout.scores):
        raise TableError(
            f"{table.name} has columns such as {first!r}, but {table.kind} were stated: state {other} (--{other}, or "
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
    matrix = np.stack([raw.columns[name] for name in scores], 1)
    if table.kind == "probs" and np.abs(np.nan_to_num(matrix).sum(1) - 1).max() <= max(table.tolerance, 1e-2):
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


def _what_it_looks_like(table: PredictionTable) -> str:
    """The error for a missing statement, with what the first rows suggest."""
    chunk = next(table.chunks())
    scores = chunk.scores
    low, high = float(scores.min()), float(scores.max())
    off = float((scores.sum(1) - 1).abs().max())
    probable = low >= 0 and high <= 1 and (off < 1e-2 or len(table.layout.scores) == 1)
    shape = f"the scores of {table.sources[0]} lie in {low:.4g}..{high:.4g}"
    if len(table.layout.scores) > 1 or probable:
        shape += " and rows sum to 1" if off < 1e-2 else " and rows do not sum to 1"
    name = "probs" if probable else "logits"
    return f"say whether the scores are logits or probabilities: {shape}, which looks like {name}; give --{name} if so"


def _matching(raw: RawBatch, where: Mapping[str, str], n: int, values: set[str]) -> Array:
    """The rows of a batch that pass the filter; up to 1000 values of its first column are remembered for an error."""
    keep = np.ones(n, dtype=bool)
    for i, (name, wanted) in enumerate(where.items()):
        found = to_text(raw.columns[name])
        if i == 0 and len(values) < 1000:
            values.update(np.unique(found)[:1000].tolist())
        keep &= found == wanted
    return np.flatnonzero(keep)
