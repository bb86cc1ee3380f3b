"""Raw columns from files of predictions in any format, batch by batch.

Every format has the same interface: `columns` (name -> what it holds) and `batches` of numpy arrays. A file that
cannot be read raises a `TableError` that says what is wrong and where.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from doublehead.files import readers
from doublehead.files.readers import Raw, Reader, TableReader, Wanted, to_numpy
from doublehead.files.sources import CSV, JSON_LINES, Array, Source, TableError, content_of, explain, reading
from doublehead.llm_answers import holds_answers
from doublehead.system import require

BLOCK = 1 << 20  # bytes of text parsed together
WIDEST_BLOCK = 1 << 26  # where rows are long
# Score columns from which on they are parsed as one long column: Arrow takes microseconds for each.
WIDE = 1000
WIDE_BLOCK = 1 << 22  # bytes of such text parsed together
LABELS_AND_SCORES = "list<item: struct<label: string, score: double>>"  # as pipelines of Transformers answer
BOM = b"\xef\xbb\xbf"
DECIMAL = re.compile(r"-?\d*[.,]\d+([eE][-+]?\d+)?")
NUMBER = re.compile(r"[-+]?(\d+[.,]?\d*|[.,]\d+)([eE][-+]?\d+)?|[-+]?(nan|inf)", re.IGNORECASE)
QUOTED = re.compile(r'"[^"]*"')


def open_source(source: Source) -> Reader:
    """The reader of a source; only the beginning (or the footer) of the file is read here."""
    if source.arrays is not None:
        return readers.ArraysReader(source, source.arrays)
    with reading(source):
        if source.path.stat().st_size == 0:
            raise TableError(f"{source} is empty (0 bytes)")
        suffix, zipped = content_of(source.path)
    if suffix in CSV:
        return CsvReader(source, zipped)
    if suffix in JSON_LINES:
        reader = JsonReader(source, zipped)
        return readers.AnswersReader(source, reader.rows) if reader.holds_answers else reader
    binary: dict[str, Callable[[Source], Reader]] = {
        ".parquet": readers.ParquetReader,
        ".npz": readers.NpzReader,
        ".npy": readers.NpyReader,
        ".xlsx": readers.excel_reader,
    }
    return binary.get(suffix, readers.ArrowReader)(source)


class CsvReader(TableReader):
    """CSV and TSV, also gzipped, in UTF-8 or UTF-16, with or without a header, with points or commas in numbers."""

    is_text = True

    def __init__(self, source: Source, zipped: bool) -> None:
        super().__init__(source, zipped)
        self._csv = require("pyarrow.csv", extra="tables")
        with reading(source):
            start = self._start()
            self._encoding = _encoding(start, source)
            if self._encoding == "cp1252":
                self.guesses = ("Windows-1252 text",)
            self.has_bom = start.startswith(BOM) or self._encoding != "utf8"
            text = start.decode(self._encoding, errors="ignore").removeprefix("\ufeff")
            self.before = text[: len(text) - len(text.lstrip("\r\n"))].count("\n")  # lines above the header
            lines = [*re.split(r"[\r\n]+", text.lstrip("\r\n"), maxsplit=3)[:3], "", ""]
            if lines[0].lower().startswith("sep="):  # as Excel writes it
                self.before, lines = self.before + 1, lines[1:]
            lines = lines[:2]
            filled = [line for line in lines if line] or [""]
            self.delimiter = max("	;|,", key=lambda mark: _regular(filled, mark))
            if self.delimiter not in lines[0] and " " in lines[0].strip():
                self.delimiter = " "
            names, row = (next(csv.reader([line], delimiter=self.delimiter), []) for line in lines)
            self.header = 1
            self._names = self._header(names, row)
            self.empty = self.header == 1 and not lines[1].strip()
            row = row if self.header else names
            commas = any("," in cell and DECIMAL.fullmatch(cell.strip()) for cell in row)
            self.decimal_point = "," if commas and self.delimiter != "," else "."
            self._block = min(max(BLOCK, 100 * max(map(len, lines))), WIDEST_BLOCK)
            self._describe(*self._columns_of(self._names or names, row, len(start)))
            signs = [name for name, cell in zip(self.names, row) if cell.strip().endswith("%")]
            if signs and "number" not in self.columns.values():
                problem = f"{source}, column {signs[0]!r} must hold numbers: divide percentages by 100"
                self.mixed = signs[0], problem

    def _start(self) -> bytes:
        """The beginning of the text, with its first two lines where they are not too long."""
        start = b""
        with self._open()[1] as stream:
            while start.count(b"\n") < 3 and len(start) < WIDEST_BLOCK and (more := stream.read(BLOCK)):
                start += more
        if len(start) >= WIDEST_BLOCK and b"\n" not in start and b"\r" not in start:
            raise TableError(f"{self.source} has a line of more than {WIDEST_BLOCK >> 20} MB")
        return start

    def _columns_of(self, names: list[str], row: list[str], block: int) -> tuple[list[str], list[Any]]:
        """The names of the columns, and their types by the first row and the beginning of the text."""
        number = self._arrow.float64()
        if self.empty:  # Arrow refuses a header without a line break
            return names, [self._arrow.string()] * len(names)
        places = [i for i, cell in enumerate(row) if DECIMAL.fullmatch(cell.strip())]
        if len(set(names)) == len(names) == len(row) >= WIDE and len(places) > 1:
            # all numbers from the first to the last decimal one: zeros may be written as 0
            scores = range(places[0], places[-1] + 1)
            types = {names[i]: number for i in scores if NUMBER.fullmatch(row[i].strip())}
            if rest := [name for name in names if name not in types]:
                with self._reader(
                    {}, block, rest
                ) as reader:  # Arrow needs kilobytes for each column it looks at
                    types |= dict(zip(reader.schema.names, reader.schema.types))
            return names, [types[name] for name in names]
        with self._reader({}, block) as reader:
            names, kinds = reader.schema.names, reader.schema.types
        mixed = [names[i] for i in places if len(names) == len(row) and kinds[i] != number]
        if mixed:
            try:
                self._reader({mixed[0]: number}, block).close()
            except ValueError as error:
                self.mixed = mixed[0], explain(str(error), self.source, names, self.header + self.before)
        return names, kinds

    def _header(self, names: list[str], row: list[str]) -> list[str] | None:
        """Names for the columns where the file has none or one too few, or where its own are padded; else None."""
        cells = [name.strip().strip('"').strip() for name in names]
        numbers = [cell for cell in cells if NUMBER.fullmatch(cell)]
        decimals = [cell for cell in cells if re.fullmatch(r"-?\d*[.,]\d*[1-9]\d*(e-?\d+)?", cell.lower())]
        repeated = len(numbers) > len(set(numbers))  # no names of columns
        counted = len(cells) > 2 and cells == [str(i) for i in range(len(cells))]  # as pandas calls columns
        if len(cells) > 1 and not counted and (numbers == cells or len(decimals) >= 2 or repeated):
            self.header, self.guesses = 0, (*self.guesses, "no header")
            whole = [i for i, cell in enumerate(cells) if not re.search(r"[.,]\d", cell)]
            if len(whole) == 1 and whole[0] in (0, len(cells) - 1):
                scores = [f"score_{i}" for i in range(len(cells) - 1)]
                return ["label", *scores] if whole[0] == 0 else [*scores, "label"]
            return [f"column_{i + 1}" for i in range(len(cells))]
        if len(row) == len(names) + 1 and row[-1].strip():
            return ["row", *cells]  # R leaves out the name of the row names
        return cells if cells != names else None

    def _tables(self, names: list[str], wanted: Wanted) -> Iterator[tuple[Any, int]]:
        types = self._types(self.columns, wanted)
        with (
            reading(self.source, self.names, self.header + self.before),
            self._reader(types, self._block, names) as reader,
        ):
            for batch in reader:
                yield batch, self._file.tell()

    def _types(self, names: Iterable[str], wanted: Wanted) -> dict[str, Any]:
        """Scores are parsed as float64; other columns too if they are numbers and need not be written back."""

        def is_number(name: str) -> bool:
            kinds = ("number",) if name in wanted.texts else ("number", "whole")
            return name in scores or (not wanted.keep and self.columns[name] in kinds)

        number, text, scores = self._arrow.float64(), self._arrow.string(), set(wanted.scores)
        return {name: number if is_number(name) else text for name in names}

    def _read(self, wanted: Wanted) -> Iterator[Raw]:
        """Many score columns side by side are parsed as one; from the first row on that is not plain, as any file."""
        seen, first, width = 0, self.names.index(wanted.scores[0]), len(wanted.scores)
        together = self.names[first : first + width] == list(wanted.scores)
        plain = self._encoding == "utf8" and not self.before and not wanted.keep
        if together and width >= WIDE and plain:
            for raw in self._wide_batches(first, width, wanted):
                if raw is None:
                    break
                seen += len(raw[0])
                yield raw
            else:
                return
        for scores, columns, batch, done in super()._read(wanted):
            skip = min(seen, len(scores))
            seen -= skip
            if skip < len(scores):
                yield scores[skip:], {name: column[skip:] for name, column in columns.items()}, batch, done

    def _wide_batches(self, first: int, width: int, wanted: Wanted) -> Iterator[Raw | None]:
        """Batches of `width` scores from column `first` on; None at a quote, or a row that is not as it should be."""
        skip = self.header
        file, stream = self._open()
        with stream:
            for block in _line_blocks(stream, WIDE_BLOCK):
                header, newline, rest = block.partition(b"\n")
                text, skip = (rest if newline else header) if skip else block, 0
                if not text.strip():
                    continue
                found = self._wide_batch(text, first, width, wanted)
                yield None if found is None else (*found, None, file.tell())
                if found is None:
                    return

    def _wide_batch(
        self, text: bytes, first: int, width: int, wanted: Wanted
    ) -> tuple[Array, dict[str, Array]] | None:
        delimiter, outside = self.delimiter.encode(), [*self.names[:first], *self.names[first + width :]]
        cut = [_cut(line, delimiter, first, width, len(outside)) for line in text.splitlines() if line]
        rows = [row for row in cut if row is not None]
        if b'"' in text or len(rows) < len(cut):
            return None
        scores = b"\n".join(row[1] for row in rows).replace(delimiter, b"\n")
        rest = b"\n".join(row[0] for row in rows)
        try:
            table = self._parsed(scores, ["score"], {"score": self._arrow.float64()})
            batch = self._parsed(rest, outside, self._types(outside, wanted)) if outside else None
        except ValueError:
            return None
        return to_numpy(table.column(0)).reshape(-1, width), self._others(batch, wanted.others, len(rows))

    def _parsed(self, text: bytes, names: list[str], types: dict[str, Any]) -> Any:
        """Lines without a header as one Arrow batch."""
        table = self._csv.read_csv(
            self._arrow.BufferReader(text),
            self._csv.ReadOptions(use_threads=False, block_size=BLOCK, column_names=names),
            self._csv.ParseOptions(delimiter=self.delimiter, ignore_empty_lines=False),
            self._csv.ConvertOptions(column_types=types, decimal_point=self.decimal_point),
        )
        (batch,) = table.combine_chunks().to_batches()
        return batch

    def _reader(self, types: dict[str, Any], block: int, wanted: Sequence[str] = ()) -> Any:
        self._file, stream = self._open()
        columns = list(wanted) if wanted else None
        return self._csv.open_csv(
            stream,
            # one thread: only then do errors name the row
            read_options=self._csv.ReadOptions(
                use_threads=False,
                block_size=block,
                encoding=self._encoding,
                column_names=self._names,
                skip_rows=self.before + (self.header if self._names else 0),
            ),
            parse_options=self._csv.ParseOptions(delimiter=self.delimiter),
            convert_options=self._csv.ConvertOptions(
                column_types=types, include_columns=columns, decimal_point=self.decimal_point
            ),
        )


def _regular(lines: list[str], mark: str) -> tuple[bool, int]:
    """Whether all lines have as many of these marks outside quotes, and how many: names may hold some too."""
    counts = [QUOTED.sub("", line).count(mark) for line in lines]
    return 0 < min(counts) == max(counts), min(counts)


class JsonReader(TableReader):
    """JSON Lines, an object per row, also gzipped; a list of numbers is a matrix column.

    The entries of an object in a row, such as {"probs": {"cat": 0.9, "dog": 0.1}}, are columns `probs.cat`, ... So are
    those of a list such as [{"label": "cat", "score": 0.9}, ...]. A file may also be one list of objects.
    """

    def __init__(self, source: Source, zipped: bool) -> None:
        super().__init__(source, zipped)
        self._json = require("pyarrow.json", extra="tables")
        with reading(source):
            with self._open()[1] as stream:
                self.is_list = stream.read(BLOCK).lstrip().startswith(b"[")
            first = next(self._blocks(), (b"", 0))[0]
            rows = [*_objects(first, source)]
            if len(rows) == 1 and _is_frame(rows[0]):
                raise TableError(
                    f"{source} must hold an object for each row, got one of columns: in pandas write it with "
                    "to_json(path, orient='records', lines=True)"
                )
            self.empty, self.columns = not rows, {}
            self.holds_answers = bool(rows) and holds_answers(rows[0])
            if self.holds_answers or self.empty:  # answers are read from `rows`: each has columns of its own
                return
            self._schema = self._arrow.schema(self._fields(rows))
            flat = self._flat(self._parsed(first, self._schema)).schema
            self._describe(flat.names, flat.types)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The objects as Python reads them."""
        n_lines = 0
        with reading(self.source):
            for block, _ in self._blocks():
                yield from _objects(block, self.source, n_lines)
                n_lines += block.count(b"\n")

    def _fields(self, rows: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Names and types of what the first rows hold; what has values of several kinds is left out."""
        for name in dict.fromkeys(name for row in rows for name in row):
            with suppress(self._arrow.ArrowInvalid, self._arrow.ArrowTypeError, OverflowError):
                kind = self._arrow.array([row.get(name) for row in rows]).type
                yield name, self._arrow.string() if kind == "null" else kind

    def _tables(self, names: list[str], wanted: Wanted) -> Iterator[tuple[Any, int]]:
        names = [*wanted.scores, *(name for name in wanted.others if name in names)]

        def holds(field: Any, columns: Sequence[str]) -> bool:
            return any(name == field.name or name.startswith(f"{field.name}.") for name in columns)

        fields = [field for field in self._schema if holds(field, names)]  # others may hold anything
        fields = [
            field.with_type(self._decimal(field.type)) if holds(field, wanted.scores) else field
            for field in fields
        ]
        schema, n_lines = self._arrow.schema(fields), 0
        with reading(self.source):
            for block, done in self._blocks():
                try:
                    table = self._flat(self._parsed(block, schema))
                except self._arrow.ArrowInvalid:
                    for _ in _objects(block, self.source, n_lines):  # names the line where one is damaged
                        pass
                    raise
                n_lines += block.count(b"\n")
                for batch in table.select(names).combine_chunks().to_batches(max_chunksize=wanted.rows):
                    yield batch, done

    def _decimal(self, kind: Any) -> Any:
        """The type with decimal numbers in place of whole ones, which may be those of the first rows alone."""
        types = require("pyarrow.types", extra="tables")
        if types.is_struct(kind):
            return self._arrow.struct([field.with_type(self._decimal(field.type)) for field in kind])
        if types.is_list(kind):
            return self._arrow.list_(self._decimal(kind.value_type))
        return self._arrow.float64() if types.is_integer(kind) else kind

    def _parsed(self, block: bytes, schema: Any) -> Any:
        options = self._json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        read = self._json.ReadOptions(use_threads=False, block_size=len(block) + 1)
        return self._json.read_json(self._arrow.BufferReader(block), read, options)

    def _flat(self, table: Any) -> Any:
        """The table with the entries of objects as columns of their own."""
        types = require("pyarrow.types", extra="tables")
        while any(types.is_struct(kind) for kind in table.schema.types):
            table = table.flatten()
        for at, field in reversed([*enumerate(table.schema)]):
            if str(field.type) == LABELS_AND_SCORES:
                scores = self._by_label(table.column(at).combine_chunks(), field.name)
                table = table.remove_column(at)
                for name, column in reversed(scores.items()):
                    table = table.add_column(at, name, self._arrow.array(column))
        return table

    def _by_label(self, lists: Any, name: str) -> dict[str, Array]:
        """A column of scores for each label, from lists of pairs of a label and a score."""
        lengths, (labels, scores) = np.diff(np.asarray(lists.offsets)), lists.flatten().flatten()
        found, which = np.unique(np.asarray(labels, dtype=str), return_inverse=True)
        table = np.full((len(lists), len(found)), np.nan)
        table[np.repeat(np.arange(len(lists)), lengths), which] = np.asarray(scores)
        return {f"{name}.{label}": table[:, i] for i, label in enumerate(found)}

    def _blocks(self) -> Iterator[tuple[bytes, int]]:
        """Whole lines of text, and the bytes read so far."""
        file, stream = self._open()
        with file, stream:
            if self.is_list:
                rows = json.loads(stream.read())
                yield "".join(json.dumps(row) + "\n" for row in rows).encode(), self.n_bytes
                return
            for block in _line_blocks(stream, BLOCK):
                yield block, file.tell()


def _encoding(start: bytes, source: Source) -> str:
    """UTF-16 by its mark, UTF-8, or else what Windows writes in western Europe and America."""
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    if b"\0" in start:
        raise TableError(f"{source} must be text, got binary data")
    try:
        start[: start.rfind(b"\n") + 1 or len(start)].decode("utf8")
    except UnicodeDecodeError:
        return "cp1252"
    return "utf8"


def _objects(block: bytes, source: Source, n_before: int = 0) -> Iterator[dict[str, Any]]:
    """The objects in lines of JSON; errors name the line, of which `n_before` come before these."""
    for i, line in enumerate(io.BytesIO(block), n_before + 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                got = line.strip()[:80].decode(errors="replace")
                raise TableError(f"{source}, line {i} must be a JSON object, got {got!r}")
            yield row


def _is_frame(row: dict[str, Any]) -> bool:
    """Whether this is a whole pandas frame in one object, by column or by row, and not a row itself."""
    if row.keys() == {"columns", "index", "data"}:
        return True
    if len(row) < 2 or not all(isinstance(part, dict) for part in row.values()):
        return False
    keys, *others = (list(part) for part in row.values())
    return all(other == keys for other in others) and any(
        names and all(map(str.isdecimal, names))
        for names in (list(row), keys)  # those of an index
    )


def _line_blocks(stream: Any, size: int) -> Iterator[bytes]:
    """Whole lines of text, about `size` bytes at a time."""
    rest = b""
    while block := stream.read(size):
        whole, newline, tail = block.rpartition(b"\n")
        if newline:
            lines = rest + whole + newline
            rest = tail
            if not lines.isspace():
                yield lines
        else:
            rest += block
    if rest.strip():
        yield rest


def _cut(line: bytes, delimiter: bytes, first: int, width: int, n_others: int) -> tuple[bytes, bytes] | None:
    """The other columns and `width` scores from column `first` on; None where the row has more or fewer."""
    *head, rest = line.split(delimiter, first)
    middle, *tail = rest.rsplit(delimiter, n_others - first)
    if len(head) + len(tail) != n_others or middle.count(delimiter) != width - 1:
        return None
    return delimiter.join([*head, *tail]), middle
