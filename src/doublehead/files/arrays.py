"""The interface of every format, and the readers of what fits into memory: .npz, pairs of .npy, .xlsx, answers.

Answers of language models are JSON Lines with a label and the log-probabilities of the likeliest tokens:

    {"label": "B", "top_logprobs": {"A": -1.2, "B": -0.4, "C": -3.0}}

The classes are the `options` (or `choices`) of the first line, or else the labels of the file.
"""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from doublehead.files.sources import Array, Source, TableError, content_of, reading
from doublehead.logprobs import option_logprobs, token_logprobs

ANSWERS = ("top_logprobs", "logprobs")
LABELS = ("label", "labels", "answer", "target", "gold", "correct")
MAX_UNPACKED = 1 << 30  # bytes of an .npz that compresses suspiciously well


class RawBatch(NamedTuple):
    """Some rows: the scores, other columns by name, the Arrow batch they came from, bytes read so far."""

    scores: Array  # (B, K)
    columns: dict[str, Array]
    arrow: Any
    bytes_done: int


class Reader:
    """The interface of every format."""

    # name -> "number" (decimal), "whole", "text", "matrix" (of decimals), "labels" (a matrix of whole numbers), "other"
    columns: dict[str, str]
    states: str | None = None  # "logits" or "probs" where the file itself says it
    first_row: int = 0  # of the file, where only some row groups are read
    scores: tuple[str, ...] | None = None  # the score columns where the file itself names them
    guesses: tuple[str, ...] = ()  # about the file as a whole
    mixed: tuple[str, str] | None = (
        None  # a column that begins with decimal numbers but holds text, and where
    )
    empty: bool = False  # a header and no rows

    def __init__(self, source: Source) -> None:
        self.source = source
        self.n_bytes = 0 if source.arrays is not None else source.path.stat().st_size

    def batches(
        self, scores: Sequence[str], others: Sequence[str], rows: int, keep: bool = False
    ) -> Generator[RawBatch, None, None]:
        """Up to about `rows` rows at a time of some columns; with `keep` the Arrow batch has every column."""
        raise NotImplementedError


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
        self, scores: Sequence[str], others: Sequence[str], rows: int, keep: bool = False
    ) -> Generator[RawBatch, None, None]:
        """Slices of the arrays."""
        n = next(iter(self.arrays.values())).shape[0]
        for first in range(0, n, rows):
            last = min(n, first + rows)
            parts = {name: np.asarray(self.arrays[name][first:last]) for name in (*scores, *others)}
            for name in scores:
                if parts[name].dtype.kind not in "fiub":
                    raise TableError(f"{self.source}: {name!r} must hold numbers, got {parts[name].dtype}")
            one = parts[scores[0]]
            table = one if one.ndim == 2 else np.stack([parts[name] for name in scores], 1)
            yield RawBatch(table, {name: parts[name] for name in others}, None, self.n_bytes * last // n)


class NpzReader(ArraysReader):
    """An .npz: arrays `labels` and `logits` or `probs`, or several sets of them (`val_logits`, `test_logits`)."""

    def __init__(self, source: Source) -> None:
        self.source = source
        prefix = f"{source.part}_" if source.part else ""
        with reading(source):
            if not zipfile.is_zipfile(source.path):
                raise TableError(
                    f"{source} must be an .npz file, a zip of arrays: it is truncated or has another format"
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
        if source.partner is None:
            raise TableError(
                f"{source} is an .npy array without a partner: give one of scores and one of labels"
            )
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


class ExcelReader(ArraysReader):
    """The first sheet of an .xlsx workbook, its first row the header; needs openpyxl."""

    def __init__(self, source: Source) -> None:
        try:
            import openpyxl  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError as error:
            raise TableError(
                f"{source}: .xlsx is read with openpyxl (pip install openpyxl), or save it as CSV"
            ) from error
        with reading(source):
            sheet = openpyxl.load_workbook(source.path, read_only=True, data_only=True).worksheets[0]
            header, *rows = sheet.iter_rows(values_only=True)
        names = unique([str(name) for name in header], source)
        super().__init__(source, {name: _column([row[i] for row in rows]) for i, name in enumerate(names)})


class AnswersReader(ArraysReader):
    """Log-probabilities of options, which are logits, in the answers of a language model."""

    states = "logits"

    def __init__(self, source: Source) -> None:
        with reading(source):
            arrays = read_answers(source.path)
        super().__init__(source, arrays)
        self.scores = tuple(name for name in arrays if arrays[name].dtype.kind == "f")


def _column(values: list[Any]) -> Array:
    """Numbers as float64 or int64 where all are, else text."""
    if all(isinstance(value, int | float) for value in values):
        return np.array(values, dtype=None if all(isinstance(value, int) for value in values) else np.float64)
    return np.array([None if value is None else str(value) for value in values], dtype=object)


def _check_size(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse a small file that would fill the memory: real scores are seldom compressed to a hundredth."""
    size, packed = (sum(getattr(one, name) for one in members) for name in ("file_size", "compress_size"))
    if size > MAX_UNPACKED and size > 100 * packed:
        raise TableError(
            f"{path} would take {size / 2**30:.1f} GiB unpacked, from {packed / 2**20:.1f} MiB: refused"
        )


def unique(names: Iterable[str], source: Source) -> list[str]:
    """The names of the columns, which must differ."""
    names = list(names)
    (name, count), *_ = Counter(names).most_common(1) or [("", 0)]
    if count > 1:
        raise TableError(f"{source} has more than one column called {name!r}")
    return names


def _array_kind(array: Array) -> str:
    if array.ndim == 2 and array.dtype.kind in "fiub":
        return "matrix" if array.dtype.kind == "f" else "labels"
    if array.ndim != 1:
        return "other"
    return {"f": "number", "i": "whole", "u": "whole", "b": "whole", "U": "text", "O": "text"}.get(
        array.dtype.kind, "other"
    )


def holds_answers(path: Path) -> bool:
    """Whether the first line of a file has log-probabilities of tokens; a list of numbers has no tokens.

    Not where it has calibrated probabilities beside them, see `write_answers`.
    """
    with _open(path) as file:
        first = next((line for line in file if line.strip()), "")
    try:
        record = json.loads(first)
        return not isinstance(record.get("probs"), dict) and bool(token_logprobs(_answer(record)))
    except (AttributeError, TypeError, ValueError):
        return False


def read_answers(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The columns of a file: the label, where there is one, and a log-probability for each option."""
    records = list(_records(path))
    labels = [next((str(record[key]) for key in LABELS if key in record), None) for record in records]
    known = [label for label in labels if label is not None]
    if known and len(known) < len(records):
        raise ValueError(f"{path}, line {labels.index(None) + 1} must have a label like the others, got none")
    options = _options(records, known)
    columns = dict(zip(options, option_logprobs([_answer(record) for record in records], options).T))
    return {**({"label": np.array(labels, dtype=object)} if known else {}), **columns}


def write_answers(path: Path, target: Path, options: Sequence[str], probs: np.ndarray[Any, Any]) -> None:
    """The lines of a file with the calibrated probabilities of the options added, as `probs`."""
    opener: Any = gzip.open if target.suffix == ".gz" else open
    with opener(target, "wt", encoding="utf-8") as file:
        for record, row in zip(_records(path), probs.tolist()):
            file.write(json.dumps({**record, "probs": dict(zip(options, row))}) + "\n")


def _open(path: Path) -> IO[str]:
    opener: Any = gzip.open if content_of(path)[1] else open
    file: IO[str] = opener(path, "rt", encoding="utf-8")
    return file


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with _open(path) as file:
        for i, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {i} must be a JSON object, got {line.strip()[:80]!r}"
                ) from error
            if not isinstance(record, dict) or _answer(record) is None:
                raise ValueError(
                    f"{path}, line {i} must have {' or '.join(ANSWERS)}, got {line.strip()[:80]!r}"
                )
            yield record


def _answer(record: dict[str, Any]) -> Any:
    """The log-probabilities of a record, also of a whole answer of a server (`choices`)."""
    if any(record.get(key) is not None for key in ANSWERS):
        return next(record[key] for key in ANSWERS if record.get(key) is not None)
    inner = record.get("response", record).get("choices")
    return _answer(inner[0]) if isinstance(inner, list) and inner and isinstance(inner[0], dict) else None


def _options(records: list[dict[str, Any]], labels: list[str]) -> list[str]:
    stated = next((records[0][key] for key in ("options", "choices") if key in records[0]), None)
    if isinstance(stated, (list, dict)) and all(isinstance(option, str) for option in stated):
        return list(stated)
    if len(set(labels)) >= 2:
        return sorted(set(labels))
    shared = set.intersection(*(set(token_logprobs(_answer(record))) for record in records))
    return sorted(shared)
