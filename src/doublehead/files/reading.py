"""Predictions from files: one, many or a folder; read in chunks, so files may be larger than memory.

Whether the numbers are logits or probabilities is stated by the caller or by an .npz that names its arrays so, or it is
certain from the numbers. Row numbers in messages count from 1 below the header.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from doublehead.files import columns, guesses, values
from doublehead.files.formats import open_source
from doublehead.files.readers import Batch, Reader, Wanted
from doublehead.files.sources import Array, Kind, NoRows, Source, TableError, find_sources
from doublehead.outcomes import Outcomes
from doublehead.predictions import Predictions
from doublehead.score_arrays import ROUNDED
from doublehead.stream import Tally, row_groups
from doublehead.system import require

CHUNK_ENTRIES = 1 << 21  # scores looked at together: 16 MiB of float64
MAX_ROWS = 1 << 15  # looked at together: text columns take more memory than scores
MAX_PIECES = 2000  # tasks on a cluster, to keep the load on its scheduler small
CONNECT_SECONDS = 20


class Chunk(NamedTuple):
    """Some rows of one file."""

    scores: torch.Tensor  # (B, K), logits or probs as stated
    predictions: Predictions | Outcomes | None  # None where the file has no labels
    groups: Array | None  # (N,) text: the value of the `by` column, or the label of a prediction of several
    batch: Batch

    def labelled(self) -> Predictions | Outcomes:
        """The predictions, which must have labels."""
        if self.predictions is None:
            raise TableError(f"{self.batch.source} has no labels to measure by")
        return self.predictions


@dataclass(frozen=True)
class PredictionTable:
    """Files of predictions and how to read them; only their beginning has been read yet."""

    sources: tuple[Source, ...]
    kind: Kind
    layout: columns.Layout
    by: str | None
    where: Mapping[str, str]
    tolerance: float
    extra: tuple[str, ...] = ()  # further columns to read
    weights: str | None = None  # the column of sample weights
    why: str = ""  # it is of this kind, where that was not stated
    width: int | None = None  # scores in a row of the first file
    counts: dict[str, int] = field(default_factory=dict, compare=False)  # of the last time all was read
    opened: dict[str, Reader] = field(default_factory=dict, compare=False)  # reads the beginning once

    @property
    def name(self) -> str:
        """The file, or how many there are."""
        first = str(self.sources[0])
        return first if len(self.sources) == 1 else f"{len(self.sources)} files ({first}, ...)"

    @property
    def n_bytes(self) -> int:
        """The size of all files."""
        return sum(source.n_bytes for source in self.sources)

    @property
    def reader(self) -> Reader:
        """That of the first file."""
        source = self.sources[0]
        return self.opened.get(str(source)) or open_source(source)

    def chunks(self, advance: Callable[[int], None] | None = None, keep: bool = False) -> Iterator[Chunk]:
        """Checked chunks; `advance` receives the bytes read since the last one, `keep` keeps every column."""
        seen = kept = 0
        self.counts["clipped"] = 0
        other: set[str] = set()  # values of the rows that the filter leaves out
        for source in self.sources:
            reader = self.opened.pop(str(source), None) or open_source(source)
            done = 0
            with closing(self._batches(reader, keep)) as batches:  # whatever is wrong in a chunk
                for batch in batches:
                    rows = _matching(batch, self.where, other)
                    seen, kept = seen + len(batch.scores), kept + len(rows)
                    if len(rows):
                        yield self._chunk(batch.take(rows))
                    if advance is not None:
                        advance(batch.bytes_done - done)
                        done = batch.bytes_done
        if not kept:
            raise NoRows(self._nothing(seen, other))

    def load(self) -> Predictions:
        """All of it in memory; it must have labels."""
        self.require_scores()
        parts = [chunk.labelled() for chunk in self.chunks()]
        return Predictions.joined([part for part in parts if isinstance(part, Predictions)])  # all of them

    def require_scores(self) -> None:
        """Refuse files that hold the confidence in the predicted class alone."""
        if self.layout.top_only:
            raise TableError(
                f"{self.name} holds only the confidence in the predicted class: a score for every class is needed"
            )

    def tally(
        self, n_bins: int = 15, advance: Callable[[int], None] | None = None, cluster: Any = None
    ) -> Tally:
        """Read the table once, in memory that does not grow with its rows.

        `cluster` is a Dask `distributed.Client`, a scheduler's address (`"tcp://10.0.0.1:8786"`), or "local" for one
        worker process per core of this machine. Workers need doublehead installed and must see the files under the same
        paths; a script that starts a local cluster must do so under `if __name__ == "__main__":`, because each worker
        imports the script. The result has the same bits however the work is split.
        """
        if cluster is not None:
            return _tally_on(cluster, self, n_bins, advance)
        found: Tally | None = None
        for chunk in self.chunks(advance):
            found = Tally.of(chunk.labelled(), n_bins, chunk.groups, onto=found)
        assert found is not None  # chunks() raises where there are no rows
        return found

    def split(self) -> list[PredictionTable]:
        """The same table in at most about MAX_PIECES pieces: row groups of Parquet files, other files whole."""
        groups = [(source, getattr(open_source(source), "groups", None)) for source in self.sources]
        step = -(-sum(1 if there is None else len(there) for _, there in groups) // MAX_PIECES)
        pieces: list[Source] = []
        for source, there in groups:
            if there is None:
                pieces.append(source)
            else:
                starts = range(there.start, there.stop, step)
                pieces += [source._replace(row_groups=(i, min(there.stop, i + step))) for i in starts]
        return [replace(self, sources=(piece,), opened={}) for piece in pieces]

    def _batches(self, reader: Reader, keep: bool) -> Generator[Batch, None, None]:
        """Batches of the columns that matter; every file must have them."""
        others = [*self.layout.others, *filter(None, (self.by, self.weights)), *self.where, *self.extra]
        for name in (*self.layout.scores, *others):
            if name not in reader.columns and not reader.empty:
                raise TableError(f"{reader.source} has no column {name!r}, which {self.sources[0]} has")
        width = max(len(self.layout.scores), 2)
        if reader.columns.get(self.layout.scores[0]) == "matrix":
            width = 1000  # not known before reading; enough for small chunks of wide rows
        rows = min(max(1, CHUNK_ENTRIES // width), MAX_ROWS)
        texts = [name for name in (self.by, *self.where) if name is not None]
        return reader.batches(Wanted(self.layout.scores, list(dict.fromkeys(others)), rows, keep, texts))

    def _chunk(self, batch: Batch) -> Chunk:
        layout = self.layout
        width = batch.scores.shape[1]
        if width != (self.width or width):
            raise TableError(
                f"{batch.source} has {width} scores in a row, but the first file has {self.width}"
            )
        scores, clipped = values.to_scores(batch, layout, self.kind, self.tolerance)
        self.counts["clipped"] += clipped
        weights = None
        if self.weights is not None:
            weights = torch.from_numpy(values.to_weights(batch, self.weights))
        groups = None if self.by is None else values.to_text(batch.columns[self.by])
        predictions: Predictions | Outcomes | None
        if layout.top_only:
            predictions = Outcomes(scores[:, 0], values.to_correct(batch, layout), weights=weights)
        elif weights is None or weights.any():
            predictions = self._predictions(scores, batch, weights)
        else:  # only those of all rows together may not be 0
            predictions = self._predictions(scores, batch, torch.ones_like(weights))
            if predictions is not None and predictions.weights is not None:
                predictions.weights.zero_()
        if isinstance(predictions, Predictions):
            groups = row_groups(predictions, groups, layout.labels)
        return Chunk(scores, predictions, groups, batch)

    def _predictions(
        self, scores: torch.Tensor, batch: Batch, weights: torch.Tensor | None
    ) -> Predictions | None:
        layout, are_probs = self.layout, self.kind == "probs"
        if layout.label is None and not layout.labels:
            return None
        if layout.independent or layout.one_hot:
            labels = values.to_several_labels(batch, layout, scores.shape[1])
            if layout.independent:
                return Predictions.multilabel(scores, labels, weights, are_probs=are_probs)
            labels = labels.argmax(1)
        else:
            labels = values.to_labels(batch, layout, scores.shape[1])
        if are_probs:
            tolerance = max(self.tolerance, ROUNDED)  # `to_scores` has looked closer
            return Predictions.from_probs(scores, labels, weights, tolerance=tolerance)
        return Predictions(scores, labels, weights)

    def _nothing(self, seen: int, other: set[str]) -> str:
        wanted = " and ".join(f"{name}={value}" for name, value in self.where.items())
        if not seen:
            there = f"{self.name} {'has' if len(self.sources) == 1 else 'have'} no rows"
            return there + (f" with {wanted}" if wanted else "")
        found = ", ".join(sorted(other)[:10])
        return f"none of the {seen} rows of {self.name} has {wanted}; the values there are {found}"


def read_predictions(
    paths: str | Path | Sequence[str | Path | Source],
    *,
    kind: Kind | None = None,
    label: str | Sequence[str] | None = None,
    scores: str | Sequence[str] | None = None,
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
    of numbers in 0..1 sum to 1, or where the columns are called logits or probabilities.
    `label` and `scores` name columns (or arrays; * and ? stand for any characters; several are a list, or one text with
    commas); what is not named is guessed and recorded in `.layout.guesses`. Labels are whole numbers from `base` on (0,
    or the number of the first score column) or names of classes that match the score columns. Several columns of 0 and
    1 (a list, or a name with * in it), or lists of 0 and 1, are one-hot labels where each row has a single 1 and its
    scores are of one class, else as many labels of each sample; `independent` states the latter, also of files without
    labels. A file may also hold a row for each sample and class, the predicted class and its confidence alone, or
    answers of a language model. `where` keeps the rows with these values, `by` is a column of groups, which may be the
    name of folders called `by=value`, `weights` is one of sample weights; `extra` columns are read too. With
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
        raise TableError(f"tolerance (--tolerance) must lie in 0..1, got {tolerance}")
    if by == "":
        raise TableError("by (--by) must name a column, got an empty name")
    sources = find_sources([paths] if isinstance(paths, str | Path) else paths)
    while (reader := open_source(sources[0])).empty:  # it does not say what its columns hold
        if len(sources) == 1:
            raise NoRows(f"{sources[0]} has no rows")
        sources = sources[1:]
    where = dict(where or {})
    if not label_needed and weights not in reader.columns:
        weights = None
    others = [*where, *filter(None, (by, weights)), *extra]
    for name in others:
        if name not in reader.columns:
            raise TableError(
                f"{reader.source} has no column {name!r}, it has {columns.listed(reader.columns)}"
            )
    label, labels = columns.label_columns(label, reader.columns, str(reader.source), label_needed)
    if scores is None and not labels:
        made = guesses.from_long_form(sources, reader, label)
        if made is not None:
            sources, reader = [made], open_source(made)
    stated = guesses.stated_kind(sources, reader, kind)
    scores = reader.scores if scores is None else scores
    if scores is None and like is not None:
        scores = guesses.scores_like(like.layout, reader, stated)
    if scores is None and reader.mixed is not None:
        column, problem = reader.mixed
        named = columns.score_family(reader.columns, str(reader.source), stated) is not None
        if not named and column not in (label, *labels, *others):
            raise TableError(f"{problem}; name the score columns with --scores if it is not one of them")
    independent = independent or (like is not None and like.layout.independent)
    given = (stated, label, labels, scores, base, others, label_needed, independent)
    layout = columns.choose_layout(reader.columns, str(reader.source), *given)
    if reader.classes and not layout.classes:
        layout = columns.with_classes(layout, reader.classes, base)
    layout = replace(layout, notes=reader.guesses)
    if scores is None and stated is not None:
        guesses.check_names(layout, stated, "", str(reader.source))
    guesses.check_groups(layout, [*where, *filter(None, [by])])
    how = (by, where, tolerance, tuple(extra), weights)
    table = PredictionTable(tuple(sources), stated or "logits", layout, *how)
    table.opened[str(sources[0])] = reader
    with closing(table._batches(reader, keep=False)) as batches:
        first = next(batches, None)
    if first is not None:
        layout, certain, why = guesses.settle(first, layout, stated, tolerance, label_needed, not independent)
        width = len(layout.scores) if len(layout.scores) > 1 else first.scores.shape[1]
        table = replace(table, layout=layout, kind=certain, why=why, width=width)
    elif stated is None:
        raise NoRows(table._nothing(0, set()))
    if scores is None and stated is None:
        guesses.check_names(table.layout, table.kind, table.why, table.name)
    return table


def _matching(batch: Batch, where: Mapping[str, str], other: set[str]) -> Array:
    """The rows of a batch that pass the filter; up to 1000 values of its first column are remembered for an error."""
    keep = np.ones(len(batch.scores), dtype=bool)
    for i, (name, wanted) in enumerate(where.items()):
        found = values.to_text(batch.columns[name])
        if i == 0 and len(other) < 1000:
            other.update(np.unique(found)[:1000].tolist())
        keep &= found == wanted
    return np.flatnonzero(keep)


def _tally_on(
    cluster: Any, table: PredictionTable, n_bins: int, advance: Callable[[int], None] | None
) -> Tally:
    """`PredictionTable.tally` by the workers of a cluster, which take some row groups of Parquet, or a file, each."""
    distributed = require("distributed", extra="cluster")
    found: Tally | None = None
    with _connect(cluster) as client:
        futures = client.map(_tally_piece, table.split(), n_bins=n_bins, pure=False)
        try:
            for future in distributed.as_completed(futures):
                n_bytes, part = future.result()
                future.release()
                found = part if found is None else found if part is None else found + part
                if advance is not None:
                    advance(n_bytes)
        finally:
            client.cancel(futures)
    if found is None:
        raise NoRows(table._nothing(0, set()))
    return found


@contextmanager
def _connect(cluster: Any) -> Iterator[Any]:
    """A client of the cluster; a client or cluster started here is stopped at the end."""
    distributed = require("distributed", extra="cluster")
    if isinstance(cluster, distributed.Client):
        yield cluster
        return
    how = {"address": cluster, "timeout": CONNECT_SECONDS}
    if cluster == "local":
        how = {"n_workers": os.cpu_count() or 1, "threads_per_worker": 1, "dashboard_address": None}
        how["silence_logs"] = logging.ERROR
    try:
        client = distributed.Client(**how)
    except (OSError, ValueError) as error:
        raise ConnectionError(f"no Dask scheduler answers at {cluster!r}") from error
    with client:
        yield client


def _tally_piece(piece: PredictionTable, n_bins: int) -> tuple[int, Tally | None]:
    """Runs on a worker; also returns the bytes read. A piece may be empty; only a table may not."""
    told: list[int] = []
    found = None
    with suppress(NoRows):
        found = piece.tally(n_bins, told.append)
    return sum(told), found
