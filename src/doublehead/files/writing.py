"""Write calibrated probabilities in the format of the input, with all other columns unchanged."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doublehead.files.formats import BOM, JsonReader
from doublehead.files.readers import AnswersReader, NpzReader
from doublehead.files.reading import Chunk, PredictionTable
from doublehead.files.sources import ARROW, JSON_LINES, NoRows, Source, TableError, content_of, format_of
from doublehead.system import require

Calibrate = Callable[[Chunk], Tensor]  # -> probs (B, K)


def check_output(out: Path, table: PredictionTable, *others: PredictionTable, force: bool = False) -> None:
    """Refuse an output that cannot be written, is an input, or exists and may not be replaced, before any work."""
    suffixes = {format_of(source.path) for source in table.sources}
    in_memory = any(source.arrays is not None for source in table.sources)
    if in_memory or ".xlsx" in suffixes or getattr(table.reader, "is_list", False):
        raise TableError(
            f"{table.name} cannot be written back: save it first as CSV or JSON Lines with a row for each sample"
        )
    inputs = {file.resolve() for each in (table, *others) for source in each.sources for file in source.files}
    if out.resolve() in inputs:
        raise TableError(f"{out} is one of the files to read: give another name to --output")
    if len(table.sources) > 1:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise TableError(
                f"{out} must be a new or empty folder, because {len(table.sources)} files are written"
            )
        _check_folder(out)
        return
    check_file(out, force)
    (wanted,) = suffixes
    if not out.name.lower().endswith(wanted):
        raise TableError(
            f"{out} must end in {wanted} like the file it is made from, {table.sources[0].path.name}"
        )


def check_file(out: Path, force: bool) -> None:
    """Refuse a file that cannot be written, or exists and may not be replaced."""
    if out.is_dir():
        raise TableError(f"{out} is a folder: give the name of a file to --output")
    if out.exists() and not force:
        raise TableError(f"{out} exists: give another name to --output, or --force to replace it")
    _check_folder(out)


def _check_folder(out: Path) -> None:
    if not out.parent.is_dir():
        raise TableError(f"{out} cannot be written: there is no folder {out.parent}")
    try:
        Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.")).rmdir()
    except OSError as error:
        raise TableError(f"{out} cannot be written: {error.strerror}") from error


def write_calibrated(
    table: PredictionTable, out: Path, calibrate: Calibrate, advance: Callable[[int], None] | None = None
) -> None:
    """Write `out`, a file for one source or a folder for many; `calibrate` returns the probabilities of a chunk."""
    if len(table.sources) == 1:
        _write_source(table, table.sources[0], out, calibrate, advance)
        return
    root = Path(os.path.commonpath([source.path.resolve().parent for source in table.sources]))
    empty: list[NoRows] = []
    for source in table.sources:
        target = out / source.path.resolve().relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_source(table, source, target, calibrate, advance)
        except NoRows as error:  # a part of a folder may be empty; then it has nothing to write
            target.unlink(missing_ok=True)
            empty.append(error)
    if len(empty) == len(table.sources):
        raise empty[0]


def probs_name(column: str, table: PredictionTable) -> str:
    """The name of a score column once it holds probabilities: logit_3 becomes prob_3, other names stay."""
    return column if table.kind == "probs" else re.sub("(?i)logit", "prob", column)


def _write_source(
    table: PredictionTable,
    source: Source,
    target: Path,
    calibrate: Calibrate,
    advance: Callable[[int], None] | None,
) -> None:
    one = replace(table, sources=(source,))
    pairs = ((chunk, calibrate(chunk)) for chunk in one.chunks(advance, keep=True))
    suffix, _ = content_of(source.path)
    if suffix in (".npz", ".npy"):
        _write_arrays(one, target, pairs)
    elif suffix in (".parquet", *ARROW):
        _write_table(one, target, pairs, suffix)
    else:
        (_write_json if suffix in JSON_LINES else _write_csv)(one, target, pairs)


def _write_csv(table: PredictionTable, target: Path, pairs: Iterator[tuple[Chunk, Tensor]]) -> None:
    reader: Any = table.reader
    with _text_file(target) as file:
        for i, (chunk, probs) in enumerate(pairs):
            batch = _replaced(table, chunk, probs)
            if i == 0:
                header = io.StringIO()
                csv.writer(header, delimiter=reader.delimiter, lineterminator="\n").writerow(
                    batch.schema.names
                )
                file.write((BOM if reader.has_bom else b"") + header.getvalue().encode())
            file.write(_csv_lines(batch, reader.delimiter, reader.decimal_point))


def _write_json(table: PredictionTable, target: Path, pairs: Iterator[tuple[Chunk, Tensor]]) -> None:
    """The objects of the file with other scores, in their places; answers have them as `probs`."""
    reader, names = table.reader, table.layout.scores
    assert isinstance(reader, JsonReader | AnswersReader)
    rows, answers = reader.rows(), isinstance(reader, AnswersReader)
    paths = {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)} | {*names}
    with _text_file(target) as file:
        for chunk, probs in pairs:
            lists, lines = chunk.batch.scores.shape[1] > len(names), []
            for values, row in zip(_columns(table, probs).tolist(), rows):
                found = {names[0]: values} if lists else dict(zip(names, values))
                new = {**row, "probs": found} if answers else _with_scores(row, found, paths, table)
                lines.append(json.dumps(new) + "\n")
            file.write("".join(lines).encode())


def _with_scores(
    row: dict[str, Any],
    found: Mapping[str, Any],
    paths: Container[str],
    table: PredictionTable,
    path: str = "",
) -> dict[str, Any]:
    """The object at a path with the scores found by their columns, such as `probs.cat`, which are below `paths`."""
    made = {}
    for key, value in row.items():
        if (here := path + key) not in paths:
            made[key] = value
        elif here in found:
            made[_new_name(key, row, table)] = found[here]
        elif isinstance(value, dict):
            made[_new_name(key, row, table)] = _with_scores(value, found, paths, table, f"{here}.")
        else:  # a list of labels and scores
            pairs = [{**one, "score": found[f"{here}.{one['label']}"]} for one in value]
            made[_new_name(key, row, table)] = pairs
    return made


def _text_file(target: Path) -> Any:
    compression = "gzip" if target.suffix == ".gz" else None
    return require("pyarrow", extra="tables").output_stream(str(target), compression=compression)


def _csv_lines(batch: Any, delimiter: str, decimal_point: str) -> bytes:
    """Lines of CSV; values are quoted where they must be, and nowhere else."""
    arrow, compute = require("pyarrow", extra="tables"), require("pyarrow.compute", extra="tables")
    cells = []
    for kind, run in groupby(enumerate(batch.schema.types), key=lambda place: str(place[1])):
        columns = [i for i, _ in run]
        if kind == "double":  # scores, which may be many: as one column of texts that are joined row by row
            numbers = np.ascontiguousarray(batch.select(columns).to_tensor(null_to_nan=True).to_numpy())
            ends = np.arange(0, numbers.size + 1, len(columns), dtype=np.int32)
            text = arrow.array(numbers.ravel()).cast("string")
            if decimal_point != ".":
                text = compute.replace_substring(text, ".", decimal_point)
            texts = arrow.ListArray.from_arrays(ends, text)
            cells.append(compute.binary_join(texts, delimiter))
            continue
        for column in batch.select(columns).columns:
            text = compute.fill_null(column.cast("string"), "")
            quoted = compute.binary_join_element_wise(
                '"', compute.replace_substring(text, '"', '""'), '"', ""
            )
            needed = compute.match_substring_regex(text, f'["\\r\\n{re.escape(delimiter)}]')
            cells.append(compute.if_else(needed, quoted, text))
    lines = compute.binary_join_element_wise(*cells, delimiter)
    return ("\n".join(lines.to_pylist()) + "\n").encode()


def _write_table(
    table: PredictionTable, target: Path, pairs: Iterator[tuple[Chunk, Tensor]], suffix: str
) -> None:
    parquet, ipc = (require(f"pyarrow.{name}", extra="tables") for name in ("parquet", "ipc"))
    batches = (_replaced(table, chunk, probs) for chunk, probs in pairs)
    first = next(batches)  # there is one: files without rows are refused
    make = parquet.ParquetWriter if suffix == ".parquet" else ipc.new_file
    with make(str(target), first.schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)


def _write_arrays(table: PredictionTable, target: Path, pairs: Iterator[tuple[Chunk, Tensor]]) -> None:
    """An .npz of `probs` and all other arrays, or an .npy of probabilities alone."""
    reader: Any = table.reader
    probs = torch.cat([_columns(table, part) for _, part in pairs]).numpy()
    name = table.layout.scores[0]
    if probs.shape[1] == 1 and reader.arrays[name].ndim == 1:
        probs = probs[:, 0]
    with target.open("wb") as file:
        if isinstance(reader, NpzReader):
            arrays: dict[str, Any] = {probs_name(name, table): probs}
            arrays |= {key: array for key, array in reader.arrays.items() if key != name}
            arrays |= {"classes": np.array(reader.classes)} if reader.classes else {}
            np.savez_compressed(file, **arrays)
        else:
            np.save(file, probs, allow_pickle=False)


def _replaced(table: PredictionTable, chunk: Chunk, probs: Tensor) -> Any:
    """The Arrow batch with its score columns replaced, in their places."""
    arrow = require("pyarrow", extra="tables")
    batch, values = chunk.batch.arrow, _columns(table, probs).numpy()
    columns, names = batch.columns, batch.schema.names
    places = {name: i for i, name in enumerate(names)}
    lists = chunk.batch.scores.shape[1] > len(table.layout.scores)
    narrow = chunk.batch.scores.dtype in (np.float16, np.float32)
    for i, name in enumerate(table.layout.scores):
        at, new = places[name], _new_name(name, places, table)
        if lists:
            ends = np.arange(0, values.size + 1, values.shape[1])
            made = arrow.LargeListArray.from_arrays(ends, values.reshape(-1))
            columns[at] = made.cast(columns[at].type)
        else:
            columns[at] = arrow.array(values[:, i].astype(np.float32 if narrow else np.float64))
        names[at] = new
    return arrow.RecordBatch.from_arrays(columns, names).replace_schema_metadata(batch.schema.metadata)


def _new_name(column: str, columns: Container[str], table: PredictionTable) -> str:
    """`probs_name` of one of the columns, none of which has it yet."""
    new = probs_name(column, table)
    if new in columns and new != column:
        raise TableError(
            f"{table.sources[0]} already has a column {new!r}, which the calibrated {column!r} would take"
        )
    return new


def _columns(table: PredictionTable, probs: Tensor) -> Tensor:
    """Probs (B, K) as the input has them: a binary model's single column is the probability of class 1."""
    return probs[:, 1:] if table.layout.binary else probs
