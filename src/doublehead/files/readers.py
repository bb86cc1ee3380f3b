"""The interface of every format, and its readers but those of text: arrays, .xlsx, Parquet, Arrow and Feather."""

from __future__ import annotations

import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from doublehead.files.columns import LABELS, LOGITS, PROBS, SCORES, plain
from doublehead.files.sources import Array, Kind, Source, TableError, reading
from doublehead.llm_answers import read_answers
from doublehead.system import require

SIMPLE = ("float", "double")  # Arrow types of scores that need no conversion
NUMBERS = ("number", "whole", "matrix", "labels")  # what columns of scores may hold
CLASS_LISTS = ("classes", "class_names", "label_names")
MAX_UNPACKED = 1 << 30  # bytes of an .npz that compresses suspiciously well


# Scores (B, K), other columns by name, the Arrow batch they came from, and the bytes read so far.
Raw: TypeAlias = "tuple[Array, dict[str, Array], Any, int]"


class Batch(NamedTuple):
    """Some rows of a file."""

    source: Source
    numbers: Array  # (B,) of the rows in the file, from 1
    scores: Array  # (B, K)
    columns: dict[str, Array]
    arrow: Any  # with all rows, also where a filter has left out some
    bytes_done: int

    def take(self, rows: Array) -> Batch:
        """Only these rows, given by their places."""
        if len(rows) == len(self.numbers):
            return self
        columns = {name: column[rows] for name, column in self.columns.items()}
        return self._replace(numbers=self.numbers[rows], scores=self.scores[rows], columns=columns)

    def refuse(self, wrong: Any, column: str | None, message: Callable[[int], str], hint: str = "") -> None:
        """Raise at the first row where `wrong` (B,) says so; `message` of its place follows the row."""
        if not wrong.any():
            return
        i, others = int(wrong.argmax()), int(wrong.sum())
        more = f" ({others} such rows in this part of the file)" if others > 1 else ""
        place = "" if column is None else f", column {column!r}"
        raise TableError(f"{self.source}{place}, row {self.numbers[i]}{message(i)}{more}{hint}")


class Wanted(NamedTuple):
    """What is read of a file: some columns, about `rows` rows at a time."""

    scores: Sequence[str]
    others: Sequence[str]
    rows: int
    keep: bool = False  # the Arrow batches have every column
    texts: Sequence[str] = ()  # of the others, those that are names, though the first may be whole numbers


class Reader:
    """The interface of every format."""

    # name -> "number" (decimal), "whole", "text", "matrix" (of decimals), "labels" (a matrix of whole numbers), "other"
    columns: dict[str, str]
    is_text = False  # then what must be a number is parsed as one
    states: Kind | None = None  # "logits" or "probs" where the file itself says it
    first_row: int = 0  # of the file, where only some row groups are read
    scores: tuple[str, ...] | None = None  # the score columns where the file itself names them
    guesses: tuple[str, ...] = ()  # about the file as a whole
    mixed: tuple[str, str] | None = None  # a column that begins with decimal numbers but holds text; where
    empty: bool = False  # no rows, and maybe a header
    classes: tuple[str, ...] = ()  # their names where the file lists them

    def __init__(self, source: Source) -> None:
        self.source = source
        self.n_bytes = source.n_bytes

    def batches(self, wanted: Wanted) -> Generator[Batch, None, None]:
        """One after the other."""
        if self.empty:
            return
        for name in wanted.scores:
            if (holds := self.columns[name]) not in NUMBERS and not self.is_text:
                raise TableError(f"{self.source}: column {name!r} must hold numbers, got {holds}")
        first = self.first_row
        for raw in self._read(wanted):
            n = len(raw[0])
            yield Batch(self.source, np.arange(first, first + n) + 1, *raw)
            first += n

    def _read(self, wanted: Wanted) -> Iterator[Raw]:
        raise NotImplementedError


class ArraysReader(Reader):
    """Arrays of one length, by name."""

    def __init__(self, source: Source, arrays: dict[str, Array]) -> None:
        super().__init__(source)
        self.arrays = arrays = {
            name: array[:, 0] if array.ndim == 2 and array.shape[1] == 1 and name in LABELS else array
            for name, array in arrays.items()
        }
        lengths = {name: array.shape[0] if array.ndim else None for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise TableError(f"{self.source}: all arrays must have one length, got {shapes}")
        for name, array in arrays.items():
            if array.ndim > 2 and plain(name) in (*LOGITS, *PROBS, *SCORES):
                raise TableError(
                    f"{self.source}: {name!r} must hold scores (N, K), got shape {array.shape}; of tokens and pixels "
                    "give a row for each position"
                )
        self.columns = {name: _array_kind(array) for name, array in arrays.items()}

    def _read(self, wanted: Wanted) -> Iterator[Raw]:
        n = next(iter(self.arrays.values())).shape[0]
        for first in range(0, n, wanted.rows):
            last = min(n, first + wanted.rows)
            scores = [np.asarray(self.arrays[name][first:last]) for name in wanted.scores]
            others = {name: np.asarray(self.arrays[name][first:last]) for name in wanted.others}
            yield stacked(scores), others, None, self.n_bytes * last // n


class NpzReader(ArraysReader):
    """An .npz: arrays `labels` and `logits` or `probs`, or several sets of them (`val_logits`, `test_logits`)."""

    def __init__(self, source: Source) -> None:
        prefix = f"{source.part}_" if source.part else ""
        with reading(source):
            if not zipfile.is_zipfile(source.path):
                raise TableError(
                    f"{source} must be an .npz file, a zip of arrays: it is truncated or has another format"
                )
            with np.load(source.path, allow_pickle=False) as file:
                _check_size(source.path, file.zip.infolist())
                names = [name for name in file.files if name.startswith(prefix)]
                parts = sorted(
                    {m[1] for name in file.files if (m := re.fullmatch(r"(.+)_(?:logits|probs)", name))}
                )
                if not names or (not prefix and parts and not {"logits", "probs"} & set(names)):
                    offer = " or ".join(f"{source.path}:{part}" for part in parts) or f"arrays {file.files}"
                    wanted = f"arrays called {prefix}..." if prefix else "one set of predictions"
                    raise TableError(f"{source.path} does not hold {wanted}, it holds {offer}")
                arrays = {name.removeprefix(prefix): np.atleast_1d(file[name]) for name in names}
                for name in [name for name in file.files if name in CLASS_LISTS]:
                    classes = np.atleast_1d(file[name])
                    if not any(len(arrays[other]) == len(classes) for other in arrays if other != name):
                        self.classes = tuple(map(str, classes.ravel().tolist()))
                        arrays.pop(name, None)
        super().__init__(source, arrays)
        known: tuple[Kind, ...] = ("logits", "probs")
        kinds = [kind for kind in known if kind in arrays]
        self.states = kinds[0] if len(kinds) == 1 else None


class NpyReader(ArraysReader):
    """A pair of .npy, one with scores (N, K) and one with labels (N,), read through a memory map."""

    def __init__(self, source: Source) -> None:
        arrays: dict[str, Array] = {}
        for path in source.files:
            with reading(Source(path)):
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            arrays["scores" if array.dtype.kind == "f" and array.ndim > 1 else "labels"] = array
        if len(arrays) < 2:
            got = " and ".join(map(str, source.files))
            raise TableError(f".npy files must be pairs of scores (N, K) and labels (N,), got {got}")
        super().__init__(source, arrays)


class AnswersReader(ArraysReader):
    """Log-probabilities of options, which are logits, in the answers of a language model."""

    states: Kind | None = "logits"

    def __init__(self, source: Source, rows: Callable[[], Iterator[dict[str, Any]]]) -> None:
        self.rows = rows
        super().__init__(source, read_answers(rows(), str(source)))
        self.scores = tuple(name for name, kind in self.columns.items() if kind == "number")


def excel_reader(source: Source) -> ArraysReader:
    """The first sheet of an .xlsx workbook, its first row the header; pandas needs openpyxl for it."""
    with reading(source):
        frame = require("pandas", extra="tables").read_excel(source.path)
    return ArraysReader(source, {str(name): frame[name].to_numpy() for name in frame.columns})


class TableReader(Reader):
    """What the formats that Arrow reads have in common; `_tables` yields its batches and the bytes read so far."""

    names: list[str]

    def __init__(self, source: Source, zipped: bool = False) -> None:
        super().__init__(source)
        self._zipped, self._arrow = zipped, require("pyarrow", extra="tables")

    def _open(self) -> tuple[Any, Any]:
        """The file, and the stream of what it holds."""
        # Arrow's own file: its reading threads never need Python, which may be on its way out after an error.
        file = self._arrow.OSFile(os.fspath(self.source.path), "rb")
        return file, self._arrow.CompressedInputStream(file, "gzip") if self._zipped else file

    def _describe(self, names: list[str], types: list[Any]) -> None:
        (name, count), *_ = Counter(names).most_common(1) or [("", 0)]
        if count > 1:
            raise TableError(f"{self.source} has more than one column called {name!r}")
        self.names = names
        kinds = {kind: _arrow_kind(kind) for kind in set(types)}
        if self.is_text:
            kinds = {kind: "text" if str(kind) == "bool" else holds for kind, holds in kinds.items()}
        self.columns = {name: kinds[kind] for name, kind in zip(names, types)}
        self.columns |= {name: "text" for name, _ in self.source.folders}

    def _read(self, wanted: Wanted) -> Iterator[Raw]:
        others = [name for name in wanted.others if name not in dict(self.source.folders)]
        names = self.names if wanted.keep else list(dict.fromkeys([*wanted.scores, *others]))
        for batch, done in self._tables(names, wanted):
            with reading(self.source, self.names):
                place = {name: i for i, name in enumerate(batch.schema.names)}
                table = _score_table(batch.select([place[name] for name in wanted.scores]))
                columns = self._others(batch, wanted.others, len(table))
            yield table, columns, batch, done

    def _others(self, batch: Any, names: Sequence[str], n: int) -> dict[str, Array]:
        """Columns of a batch, and those made from the names of folders, which are constant."""
        folders = dict(self.source.folders)
        return {
            name: np.full(n, folders[name], dtype=object) if name in folders else to_numpy(batch.column(name))
            for name in names
        }

    def _tables(self, names: list[str], wanted: Wanted) -> Iterator[tuple[Any, int]]:
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

    def _tables(self, names: list[str], wanted: Wanted) -> Iterator[tuple[Any, int]]:
        total, done = self._rows(self.groups), 0
        with reading(self.source):
            for group in self.groups:
                for batch in self.file.iter_batches(wanted.rows, row_groups=[group], columns=names):
                    done += batch.num_rows
                    yield batch, self.n_bytes * done // max(total, 1)

    def _rows(self, groups: range) -> int:
        return sum(self.file.metadata.row_group(i).num_rows for i in groups)


class ArrowReader(TableReader):
    """Arrow and Feather files (version 2), through a memory map."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        with reading(source):
            self._map = self._arrow.memory_map(os.fspath(source.path))
            self.file = require("pyarrow.ipc", extra="tables").open_file(self._map)
            self._describe(self.file.schema.names, self.file.schema.types)

    def _tables(self, names: list[str], wanted: Wanted) -> Iterator[tuple[Any, int]]:
        n = self.file.num_record_batches
        with reading(self.source):
            for i in range(n):
                whole = self.file.get_batch(i).select(names)
                whole.validate(full=True)  # Arrow trusts the offsets in a file
                for start in range(0, whole.num_rows, wanted.rows):
                    yield whole.slice(start, wanted.rows), self.n_bytes * (i + 1) // n


def _check_size(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse a small file that would fill the memory: real scores are seldom compressed to a hundredth."""
    size, packed = (sum(getattr(one, name) for one in members) for name in ("file_size", "compress_size"))
    if size > MAX_UNPACKED and size > 100 * packed:
        raise TableError(
            f"{path} would take {size / 2**30:.1f} GiB unpacked, from {packed / 2**20:.1f} MiB: refused"
        )


def _array_kind(array: Array) -> str:
    kind = array.dtype.kind
    if array.ndim == 2:
        return "matrix" if kind == "f" else "labels" if kind in "iub" else "other"
    kinds = {"f": "number", "i": "whole", "u": "whole", "b": "whole", "U": "text", "O": "text"}
    return kinds.get(kind, "other") if array.ndim == 1 else "other"


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
    return stacked([to_numpy(column) for column in batch.columns])


def stacked(columns: Sequence[Array]) -> Array:
    """(B, K) from K columns of numbers, or from one of lists."""
    return columns[0] if columns[0].ndim == 2 else np.stack(columns, 1)


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
        is_bool = types.is_boolean(column.type)
        return np.from_dlpack(column.cast("uint8")).astype(bool) if is_bool else np.from_dlpack(column)
    if kind in ("number", "whole"):  # not by to_numpy, which imports pandas where it is installed
        column = column if str(column.type) in SIMPLE else column.cast("float64")
        return np.from_dlpack(compute.fill_null(column, np.nan) if column.null_count else column)
    array: Array = column.to_numpy(zero_copy_only=False)
    return array


def _matrix(column: Any) -> Array:
    """(B, K) from lists of K numbers; rows of another length than most, or a missing list, become nan."""
    lengths = (
        require("pyarrow.compute", extra="tables").list_value_length(column).to_numpy(zero_copy_only=False)
    )
    values = to_numpy(column.flatten())
    found, counts = np.unique(np.nan_to_num(lengths), return_counts=True)
    width = int(max(zip(counts, found))[1]) if len(found) else 0
    if not np.array_equal(lengths, np.full(len(lengths), width)):
        rows = [
            row if row is not None and len(row) == width else [np.nan] * width for row in column.to_pylist()
        ]
        return np.asarray(rows, dtype=np.float64)
    return values.reshape(len(lengths), width)
