"""What Arrow reads: the interface that its formats share, Parquet, Arrow and Feather files."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from doublehead.files.arrays import RawBatch, Reader, unique
from doublehead.files.sources import Array, Source, TableError, reading
from doublehead.system import require

SIMPLE = ("float", "double")  # Arrow types of scores that need no conversion


class TableReader(Reader):
    """What the formats that Arrow reads have in common; `_tables` yields its batches and the bytes read so far."""

    names: list[str]
    arrow: Any
    is_text = False  # then what must be a number is parsed as one

    def _describe(self, names: list[str], types: list[Any]) -> None:
        self.names = unique(names, self.source)
        kinds = {kind: _arrow_kind(kind) for kind in set(types)}
        if self.is_text:
            kinds = {kind: "text" if str(kind) == "bool" else holds for kind, holds in kinds.items()}
        self.columns = {name: kinds[kind] for name, kind in zip(names, types)}
        self.columns |= {name: "text" for name, _ in self.source.folders}

    def batches(
        self, scores: Sequence[str], others: Sequence[str], rows: int, keep: bool = False
    ) -> Generator[RawBatch, None, None]:
        """A text column among the scores is an error."""
        for name in scores:
            if self.columns[name] not in ("number", "whole", "matrix") and not self.is_text:
                raise TableError(
                    f"{self.source}: column {name!r} must hold numbers, got {self.columns[name]}"
                )
        wanted = [*scores, *(name for name in others if name not in dict(self.source.folders))]
        for batch, done in self._tables(
            self.names if keep else list(dict.fromkeys(wanted)), scores, rows, keep
        ):
            with reading(self.source, self.names):
                place = {name: i for i, name in enumerate(batch.schema.names)}
                table = _score_table(batch.select([place[name] for name in scores]))
                columns = self._others(batch, others, len(table))
            yield RawBatch(table, columns, batch, done)

    def _others(self, batch: Any, names: Sequence[str], n: int) -> dict[str, Array]:
        """Columns of a batch, and those made from the names of folders, which are constant."""
        folders = dict(self.source.folders)
        return {
            name: np.full(n, folders[name], dtype=object) if name in folders else to_numpy(batch.column(name))
            for name in names
        }

    def _tables(
        self, wanted: list[str], scores: Sequence[str], rows: int, keep: bool
    ) -> Iterator[tuple[Any, int]]:
        raise NotImplementedError


class ParquetReader(TableReader):
    """Parquet, row group after row group."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        with reading(source):
            # without pre_buffer: it would hold every row group read so far
            self.file = require("pyarrow.parquet", extra="tables").ParquetFile(source.path, pre_buffer=False)
            self._describe(self.file.schema_arrow.names, self.file.schema_arrow.types)
        self.groups = range(*(source.row_groups or (0, self.file.num_row_groups)))
        if source.row_groups is not None:
            self.n_bytes = self.n_bytes * len(self.groups) // max(1, self.file.num_row_groups)
            self.first_row = self._rows(range(self.groups.start))

    def _tables(
        self, wanted: list[str], scores: Sequence[str], rows: int, keep: bool
    ) -> Iterator[tuple[Any, int]]:
        total, done = self._rows(self.groups), 0
        with reading(self.source):
            for group in self.groups:
                for batch in self.file.iter_batches(rows, row_groups=[group], columns=wanted):
                    done += batch.num_rows
                    yield batch, self.n_bytes * done // max(total, 1)

    def _rows(self, groups: range) -> int:
        return sum(self.file.metadata.row_group(i).num_rows for i in groups)


class ArrowReader(TableReader):
    """Arrow and Feather files (version 2), through a memory map."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        with reading(source):
            arrow = require("pyarrow", extra="tables")
            self._map = arrow.memory_map(os.fspath(source.path))
            self.file = require("pyarrow.ipc", extra="tables").open_file(self._map)
            self._describe(self.file.schema.names, self.file.schema.types)

    def _tables(
        self, wanted: list[str], scores: Sequence[str], rows: int, keep: bool
    ) -> Iterator[tuple[Any, int]]:
        n = self.file.num_record_batches
        with reading(self.source):
            for i in range(n):
                whole = self.file.get_batch(i).select(wanted)
                whole.validate(full=True)  # Arrow trusts the offsets in a file
                for start in range(0, whole.num_rows, rows):
                    yield whole.slice(start, rows), self.n_bytes * (i + 1) // n


def _arrow_kind(kind: Any) -> str:
    types = require("pyarrow.types", extra="tables")
    if types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_integer(kind) or types.is_boolean(kind):
        return "whole"
    if types.is_dictionary(kind):
        return _arrow_kind(kind.value_type)
    if str(kind) in ("string", "large_string", "string_view"):
        return "text"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return {"number": "matrix", "whole": "labels"}.get(_arrow_kind(kind.value_type), "other")
    return "other"


def _score_table(batch: Any) -> Array:
    """(B, K) from an Arrow batch of numbers, or of one column of lists; missing numbers become nan."""
    if all(str(kind) in SIMPLE for kind in set(batch.schema.types)):
        table: Array = batch.to_tensor(null_to_nan=True).to_numpy()
        return table
    arrays = [to_numpy(column) for column in batch.columns]
    return arrays[0] if arrays[0].ndim == 2 else np.stack(arrays, 1)


def to_numpy(column: Any) -> Array:
    """An Arrow array as numpy: missing numbers become nan, missing texts None, lists of one length a matrix."""
    types, compute = (require(f"pyarrow.{name}", extra="tables") for name in ("types", "compute"))
    kind = _arrow_kind(column.type)
    if kind in ("matrix", "labels"):
        return _matrix(column)
    if kind == "text":
        column = column if types.is_dictionary(column.type) else column.dictionary_encode()
        texts: Array = np.array([*column.dictionary.to_pylist(), None], dtype=object)
        return np.asarray(texts[np.from_dlpack(compute.fill_null(column.indices.cast("int64"), -1))])
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kind == "whole" and not column.null_count:
        return np.from_dlpack(column.cast("uint8") if types.is_boolean(column.type) else column)
    if kind in ("number", "whole"):  # not by to_numpy, which imports pandas where it is installed
        column = column if str(column.type) in SIMPLE else column.cast("float64")
        return np.from_dlpack(compute.fill_null(column, np.nan) if column.null_count else column)
    array: Array = column.to_numpy(zero_copy_only=False)
    return array


def _matrix(column: Any) -> Array:
    """(B, K) from lists of K numbers; rows of another length or a missing list become nan."""
    lengths = (
        require("pyarrow.compute", extra="tables").list_value_length(column).to_numpy(zero_copy_only=False)
    )
    values = to_numpy(column.flatten())
    width = int(np.nanmax(lengths)) if len(lengths) else 0
    if not np.array_equal(lengths, np.full(len(lengths), width)):
        rows = [
            row if row is not None and len(row) == width else [np.nan] * width for row in column.to_pylist()
        ]
        return np.asarray(rows, dtype=np.float64)
    return values.reshape(len(lengths), width)
