"""Raw columns from files of predictions, batch by batch: CSV, Parquet, .npz and pairs of .npy.

Every format has the same interface: `columns` (name -> what it holds) and `batches` (dicts of numpy arrays). A file
that cannot be read raises a `TableError` that says what is wrong and where.
"""

from __future__ import annotations

import os
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from doublehead.files.answers import holds_answers, read_answers
from doublehead.optional import require

Array: TypeAlias = "np.ndarray[Any, Any]"

CSV = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
FORMATS = (*CSV, ".parquet", ".npz", ".npy", ".jsonl")
CSV_BLOCK = 1 << 20  # bytes parsed together
# What numpy and Arrow raise on damaged files.
DAMAGED = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, NotImplementedError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
MAX_UNPACKED = 1 << 30  # bytes of an .npz that compresses suspiciously well


class TableError(ValueError):
    """A file cannot be used; the message names the file, and the column and row where there is one."""


class NoRows(TableError):
    """No rows at all, or none that pass the filter."""


class Source(NamedTuple):
    """A file, a part of an .npz (`file.npz:test`), a pair of .npy, row groups of a Parquet file, or arrays."""

    path: Path
    part: str = ""  # prefix of the arrays of an .npz
    partner: Path | None = None  # the other .npy
    row_groups: tuple[int, int] | None = None
    arrays: dict[str, Array] | None = None  # in memory; `path` is then only a name for messages

    def __str__(self) -> str:
        return f"{self.path}:{self.part}" if self.part else str(self.path)


class RawBatch(NamedTuple):
    """Some rows: numpy columns by name, the Arrow batch they came from (CSV, Parquet), bytes read so far."""

    columns: dict[str, Array]
    arrow: Any
    bytes_done: int


def find_sources(paths: Iterable[str | Path | Source]) -> list[Source]:
    """The files named, the files inside folders (sorted; hidden ones left out), .npy files paired in order.

    >>> find_sources(["no_such.csv"])
    Traceback (most recent call last):
    doublehead.files.formats.TableError: no_such.csv does not exist
    """
    paths = list(paths)
    if not paths:
        raise TableError("no file was given")
    if all(isinstance(path, Source) for path in paths):
        return paths  # type: ignore[return-value]
    named = [_split_part(path) for path in paths if not isinstance(path, Source)]
    files = [Source(file, part) for path, part in named for file in _inside(path)]
    arrays = [source.path for source in files if source.path.suffix == ".npy"]
    if len(arrays) % 2:
        raise TableError(
            f"{arrays[-1]} has no partner: .npy files come in pairs, one of scores (N, K) and one of labels (N,)"
        )
    pairs = [Source(arrays[i], partner=arrays[i + 1]) for i in range(0, len(arrays), 2)]
    return [source for source in files if source.path.suffix != ".npy"] + pairs


def format_of(path: Path) -> str:
    """Which of FORMATS a file's name ends in."""
    name = path.name.lower()
    for suffix in FORMATS:
        if name.endswith(suffix):
            return suffix
    raise TableError(f"{path} must end in one of {', '.join(FORMATS)}")


def open_source(source: Source) -> Reader:
    """The reader of a source; only the beginning (or the footer) of the file is read here."""
    if source.arrays is not None:
        return ArraysReader(source, source.arrays)
    suffix = format_of(source.path)
    if source.path.stat().st_size == 0:
        raise TableError(f"{source.path} is empty (0 bytes)")
    if suffix in CSV:
        return CsvReader(source)
    if suffix == ".jsonl":
        return AnswersReader(source)
    if suffix == ".parquet":
        return ParquetReader(source)
    return NpzReader(source) if suffix == ".npz" else NpyReader(source)


class Reader:
    """The interface of every format."""

    columns: dict[str, str]  # name -> "number" (decimal), "whole", "text", "matrix" or "other"
    states: str | None = None  # "logits" or "probs" where the file itself says it
    first_row: int = 0  # of the file, where only some row groups are read

    def __init__(self, source: Source) -> None:
        self.source = source
        self.n_bytes = 0 if source.arrays is not None else source.path.stat().st_size

    def batches(
        self, numbers: Sequence[str], texts: Sequence[str], rows: int, keep: bool = False
    ) -> Generator[RawBatch, None, None]:
        """Up to about `rows` rows at a time of some columns; with `keep` the Arrow batch has every column."""
        raise NotImplementedError


class CsvReader(Reader):
    """CSV and TSV, also gzipped; the delimiter is the commonest of , ; tab in the header."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._csv = require("pyarrow.csv", extra="tables")
        self._arrow = require("pyarrow", extra="tables")
        self.delimiter = ","
        with reading(source):
            with self._open()[1] as stream:
                header = bytes(stream.read(1 << 16)).split(b"\n")[0].decode("utf-8-sig")
            self.delimiter = max(",;\t", key=header.count)
            with self._reader({}) as reader:
                schema = reader.schema
        self.names = _unique(schema.names, source)
        self.columns = {field.name: _arrow_kind(field.type) for field in schema}
        self.columns |= {field.name: "text" for field in schema if field.type == self._arrow.bool_()}

    def batches(
        self, numbers: Sequence[str], texts: Sequence[str], rows: int, keep: bool = False
    ) -> Generator[RawBatch, None, None]:
        """Columns in `numbers` are parsed as float64, all others as text."""
        number, text = self._arrow.float64(), self._arrow.string()
        types = {name: number if name in numbers else text for name in self.names}
        wanted = self.names if keep else [name for name in self.names if name in {*numbers, *texts}]
        with reading(self.source, self.names), self._reader(types, wanted) as reader:
            for batch in reader:
                columns = {name: _to_numpy(batch.column(name)) for name in (*numbers, *texts)}
                yield RawBatch(columns, batch, self._file.tell())

    def _open(self) -> tuple[Any, Any]:
        # Arrow's own file: its reading threads never need Python, which may be on its way out after an error.
        file = self._arrow.OSFile(os.fspath(self.source.path), "rb")
        zipped = self.source.path.suffix == ".gz"
        return file, self._arrow.CompressedInputStream(file, "gzip") if zipped else file

    def _reader(self, types: dict[str, Any], wanted: Sequence[str] = ()) -> Any:
        self._file, stream = self._open()
        return self._csv.open_csv(
            stream,
            # one thread: only then do errors name the row
            read_options=self._csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK),
            parse_options=self._csv.ParseOptions(delimiter=self.delimiter),
            convert_options=self._csv.ConvertOptions(
                column_types=types, include_columns=list(wanted) or None
            ),
        )


class ParquetReader(Reader):
    """Parquet, row group after row group."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        with reading(source):
            # without pre_buffer: it would hold every row group read so far
            self.file = require("pyarrow.parquet", extra="tables").ParquetFile(source.path, pre_buffer=False)
        schema = self.file.schema_arrow
        self.names = _unique(schema.names, source)
        self.columns = {field.name: _arrow_kind(field.type) for field in schema}
        self.groups = range(*(source.row_groups or (0, self.file.num_row_groups)))
        if source.row_groups is not None:
            self.n_bytes = self.n_bytes * len(self.groups) // max(1, self.file.num_row_groups)
            self.first_row = self._rows(range(self.groups.start))

    def batches(
        self, numbers: Sequence[str], texts: Sequence[str], rows: int, keep: bool = False
    ) -> Generator[RawBatch, None, None]:
        """Numbers keep the type they are stored in; a text column among them is an error."""
        for name in numbers:
            if self.columns[name] not in ("number", "whole", "matrix"):
                raise TableError(
                    f"{self.source}: column {name!r} must hold numbers, got {self._type(name)}{self._example(name)}"
                )
        wanted = self.names if keep else list(dict.fromkeys([*numbers, *texts]))
        total, done = self._rows(self.groups), 0
        with reading(self.source):
            for group in self.groups:
                for batch in self.file.iter_batches(rows, row_groups=[group], columns=wanted):
                    done += batch.num_rows
                    columns = {name: _to_numpy(batch.column(name)) for name in (*numbers, *texts)}
                    yield RawBatch(columns, batch, self.n_bytes * done // max(total, 1))

    def _rows(self, groups: range) -> int:
        return sum(self.file.metadata.row_group(i).num_rows for i in groups)

    def _type(self, name: str) -> str:
        kind = self.columns[name]
        return kind if kind == "text" else str(self.file.schema_arrow.field(name).type)

    def _example(self, name: str) -> str:
        with reading(self.source):
            for batch in self.file.iter_batches(1, row_groups=list(self.groups), columns=[name]):
                return f" ({batch.column(0)[0].as_py()!r} in row 1)"
        return ""


class ArraysReader(Reader):
    """Arrays of one length, by name."""

    def __init__(self, source: Source, arrays: dict[str, Array]) -> None:
        super().__init__(source)
        self.arrays = arrays
        lengths = {name: array.shape[0] if array.ndim else None for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in self.arrays.items())
            raise TableError(f"{self.source}: all arrays must have one length, got {shapes}")
        self.columns = {name: _array_kind(array) for name, array in self.arrays.items()}

    def batches(
        self, numbers: Sequence[str], texts: Sequence[str], rows: int, keep: bool = False
    ) -> Generator[RawBatch, None, None]:
        """Slices of the arrays."""
        n = next(iter(self.arrays.values())).shape[0]
        for first in range(0, n, rows):
            last = min(n, first + rows)
            columns = {name: np.asarray(self.arrays[name][first:last]) for name in (*numbers, *texts)}
            yield RawBatch(columns, None, self.n_bytes * last // n)


class AnswersReader(ArraysReader):
    """Log-probabilities of options, which are logits, in the answers of a language model."""

    states = "logits"

    def __init__(self, source: Source) -> None:
        self.source = source
        with reading(source):
            if not holds_answers(source.path):
                raise TableError(
                    f"{source.path} must have top_logprobs in each line, a JSON object, got others"
                )
            arrays = read_answers(source.path)
        super().__init__(source, arrays)


class NpzReader(ArraysReader):
    """An .npz: arrays `labels` and `logits` or `probs`, or several sets of them (`val_logits`, `test_logits`)."""

    def __init__(self, source: Source) -> None:
        self.source = source
        prefix = f"{source.part}_" if source.part else ""
        with reading(source):
            if not zipfile.is_zipfile(source.path):
                raise TableError(
                    f"{source.path} must be an .npz file, a zip of arrays: it is truncated or has another format"
                )
            with np.load(source.path, allow_pickle=False) as file:
                _check_size(source.path, file.zip.infolist())
                names = [name for name in file.files if name.startswith(prefix)]
                self._check_parts(list(file.files), names)
                arrays = {name.removeprefix(prefix): np.atleast_1d(file[name]) for name in names}
        super().__init__(source, arrays)
        kinds = [kind for kind in ("logits", "probs") if kind in arrays]
        self.states = kinds[0] if len(kinds) == 1 else None

    def _check_parts(self, every: list[str], names: list[str]) -> None:
        parts = sorted({m[1] for name in every if (m := re.fullmatch(r"(.+)_(?:logits|probs)", name))})
        if not names or (not self.source.part and parts and not {"logits", "probs"} & set(every)):
            offer = " or ".join(f"{self.source.path}:{part}" for part in parts) or f"arrays {every}"
            wanted = f"arrays called {self.source.part}_..." if self.source.part else "one set of predictions"
            raise TableError(f"{self.source.path} does not hold {wanted}, it holds {offer}")


class NpyReader(ArraysReader):
    """A pair of .npy, one with scores (N, K) and one with labels (N,), read through a memory map."""

    def __init__(self, source: Source) -> None:
        assert source.partner is not None
        arrays: dict[str, Array] = {}
        for path in (source.path, source.partner):
            with reading(Source(path)):
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            arrays["scores" if array.dtype.kind == "f" else "labels"] = array
        if len(arrays) < 2:
            raise TableError(
                f"{source.path} and {source.partner} must be one array of scores (decimal numbers) and one of labels "
                f"(whole numbers), got two of {next(iter(arrays))}"
            )
        super().__init__(source, arrays)
        self.n_bytes += source.partner.stat().st_size


@contextmanager
def reading(source: Source, names: Sequence[str] = ()) -> Iterator[None]:
    """Turn what the libraries raise on a bad file into a `TableError`."""
    try:
        yield
    except TableError:
        raise
    except FileNotFoundError as error:
        raise TableError(f"{error.filename or source.path} does not exist") from error
    except PermissionError as error:
        raise TableError(f"{error.filename or source.path} cannot be read: permission denied") from error
    except UnicodeDecodeError as error:
        raise TableError(
            f"{source.path} must be UTF-8 text, got {error.object[error.start : error.end]!r}"
        ) from error
    except DAMAGED as error:
        raise TableError(_explain(str(error), source, names)) from error


def _check_size(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse a small file that would fill the memory: real scores are seldom compressed to a hundredth."""
    size, packed = (sum(getattr(one, name) for one in members) for name in ("file_size", "compress_size"))
    if size > MAX_UNPACKED and size > 100 * packed:
        raise TableError(
            f"{path} would take {size / 2**30:.1f} GiB unpacked, from {packed / 2**20:.1f} MiB: refused"
        )


def _explain(message: str, source: Source, names: Sequence[str]) -> str:
    """A sentence from an Arrow or numpy message."""
    message = " ".join(message.split())
    if cell := re.search(r"In CSV column #(\d+): Row #(\d+): .*invalid value '(.*)'", message):
        place = f"column {names[int(cell[1])]!r}, row {int(cell[2]) - 1}"
        return f"{source.path}, {place} must hold a number, got {cell[3]!r}"
    if short := re.search(r"CSV parse error: Row #(\d+): Expected (\d+) columns, got (\d+)", message):
        row = int(short[1]) - 1
        return (
            f"{source.path}, row {row} has {short[3]} values where the header has {short[2]}: "
            "the file is truncated or has a wrong delimiter there"
        )
    if "Empty CSV file" in message:
        return f"{source.path} is empty"
    if "UTF8" in message:
        return f"{source.path} must be UTF-8 text"
    if "pickle" in message:
        return f"{source.path} must hold plain arrays, not pickled objects, which are not loaded"
    what = format_of(source.path).lstrip(".")
    return f"{source.path} cannot be read as {what}, it is truncated or damaged: {message[:200]}"


def _split_part(path: str | Path) -> tuple[Path, str]:
    """(`file.npz`, "test") from `file.npz:test`."""
    found = re.fullmatch(r"(.+\.npz):(\w+)", str(path))
    if found and not Path(path).exists():
        return Path(found[1]), found[2]
    return Path(path), ""


def _inside(path: Path) -> list[Path]:
    if not path.exists():
        raise TableError(f"{path} does not exist")
    if not path.is_dir():
        format_of(path)
        return [path]
    files = [f for f in sorted(path.rglob("*")) if f.is_file() and not _hidden(f.relative_to(path))]
    files = [f for f in files if f.name.lower().endswith(FORMATS)]
    kinds = sorted({format_of(f) for f in files})
    if not files:
        raise TableError(f"{path} holds no file that ends in one of {', '.join(FORMATS)}")
    if len(kinds) > 1:
        raise TableError(f"{path} mixes files of {' and '.join(kinds)}: name the files to read")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _unique(names: list[str], source: Source) -> list[str]:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise TableError(f"{source.path} has more than one column called {twice[0]!r}")
    return list(names)


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
    if (
        types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    ) and types.is_floating(kind.value_type):
        return "matrix"
    return "other"


def _array_kind(array: Array) -> str:
    if array.ndim == 2 and array.dtype.kind == "f":
        return "matrix"
    if array.ndim != 1:
        return "other"
    return {"f": "number", "i": "whole", "u": "whole", "b": "whole", "U": "text", "O": "text"}.get(
        array.dtype.kind, "other"
    )


def _to_numpy(column: Any) -> Array:
    """An Arrow array as numpy: missing numbers become nan, missing texts None, lists of one length a matrix."""
    types = require("pyarrow.types", extra="tables")
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_decimal(column.type):
        column = column.cast("float64")
    if _arrow_kind(column.type) == "matrix":
        return _matrix(column)
    array: Array = column.to_numpy(zero_copy_only=False)
    return array


def _matrix(column: Any) -> Array:
    """(B, K) from lists of K numbers; rows of another length or a missing list become nan."""
    lengths = (
        require("pyarrow.compute", extra="tables").list_value_length(column).to_numpy(zero_copy_only=False)
    )
    values: Array = column.flatten().to_numpy(zero_copy_only=False)
    width = int(np.nanmax(lengths)) if len(lengths) else 0
    if not np.array_equal(lengths, np.full(len(lengths), width)):
        rows = [
            row if row is not None and len(row) == width else [np.nan] * width for row in column.to_pylist()
        ]
        return np.asarray(rows, dtype=np.float64)
    return values.reshape(len(lengths), width)
