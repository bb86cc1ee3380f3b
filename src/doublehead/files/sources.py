"""Which files are read: names, folders, parts of an .npz, standard input; and errors that name them."""

from __future__ import annotations

import atexit
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
Kind: TypeAlias = Literal["logits", "probs"]

CSV = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz")
JSON_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz")
ARROW = (".arrow", ".feather")
FORMATS = (*CSV, *JSON_LINES, ".parquet", *ARROW, ".xlsx", ".npz", ".npy")
MAGIC = {b"PAR1": ".parquet", b"ARROW1": ".arrow", b"\x93NUMPY": ".npy", b"PK\x03\x04": ".npz"}
GZIP = b"\x1f\x8b"


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
    folders: tuple[tuple[str, str], ...] = ()  # ("site", "A") where the file lies in a folder called site=A
    name: str = ""  # in messages, where it is not the path

    @property
    def files(self) -> list[Path]:
        """Where it is on disk, or was before it was taken into memory."""
        return [path for path in (self.path, self.partner) if path is not None]

    @property
    def n_bytes(self) -> int:
        """The size of its files; 0 in memory."""
        return 0 if self.arrays is not None else sum(file.stat().st_size for file in self.files)

    def __str__(self) -> str:
        return self.name or (f"{self.path}:{self.part}" if self.part else str(self.path))


def find_sources(paths: Iterable[str | Path | Source]) -> list[Source]:
    """The files named, the files inside folders (sorted; hidden ones left out), .npy files paired in order.

    A file that is named twice is read once; `-` is standard input.

    >>> find_sources(["no_such.csv"])
    Traceback (most recent call last):
    doublehead.files.sources.TableError: no_such.csv does not exist
    """
    found: dict[tuple[Path, str], Source] = {}
    ready = []
    for path in paths:
        if path == "":
            raise TableError("the name of a file is empty")
        if isinstance(path, Source):
            ready.append(path)
            continue
        for source in [_standard_input()] if str(path) == "-" else _inside(Path(path)):
            found.setdefault((source.path.resolve(), source.part), source)
    files = list(found.values())
    if not files and not ready:
        raise TableError("no file was given")
    arrays = [source.path for source in files if source.path.suffix == ".npy"]
    if len(arrays) % 2:
        raise TableError(
            f"{arrays[-1]} has no partner: .npy files come in pairs, one of scores (N, K) and one of labels (N,)"
        )
    pairs = [Source(arrays[i], partner=arrays[i + 1]) for i in range(0, len(arrays), 2)]
    return ready + [source for source in files if source.path.suffix != ".npy"] + pairs


def format_of(path: Path) -> str:
    """Which of FORMATS a file's name ends in."""
    for suffix in FORMATS:
        if path.name.lower().endswith(suffix):
            return suffix
    raise TableError(f"{path} must end in one of {', '.join(FORMATS)}")


def magic_of(path: Path) -> tuple[str | None, bytes]:
    """The format of a binary file by its first bytes, and these."""
    with path.open("rb") as file:
        start = file.read(8)
    return next((suffix for magic, suffix in MAGIC.items() if start.startswith(magic)), None), start


def content_of(path: Path) -> tuple[str, bool]:
    """The format of a file by its first bytes, else by its name; and whether it is compressed by gzip."""
    suffix, start = magic_of(path)
    named = format_of(path)
    if suffix is not None and not (suffix == ".npz" and named == ".xlsx"):
        return suffix, False
    return named.removesuffix(".gz"), start.startswith(GZIP)


@contextmanager
def reading(source: Source, names: Sequence[str] = (), header: int = 1) -> Iterator[None]:
    """Turn what the libraries raise on a bad file into a `TableError`; rows are counted below `header` lines."""
    try:
        yield
    except (TableError, ImportError):
        raise
    except FileNotFoundError as error:
        raise TableError(f"{error.filename or source} does not exist") from error
    except PermissionError as error:
        raise TableError(f"{error.filename or source} cannot be read: permission denied") from error
    except UnicodeDecodeError as error:
        got = bytes(error.object[error.start : error.end])
        raise TableError(f"{source} must be UTF-8 text, got {got!r}; save it as such") from error
    except Exception as error:  # numpy, Arrow, zipfile and gzip raise almost anything on damaged files
        raise TableError(explain(str(error), source, names, header)) from error


def explain(message: str, source: Source, names: Sequence[str], header: int) -> str:
    """A sentence from an Arrow or numpy message."""
    message = " ".join(message.split())
    if cell := re.search(r"In CSV column #(\d+): Row #(\d+): .*invalid value '(.*)'", message):
        place = f"column {names[int(cell[1])]!r}, row {int(cell[2]) - header}"
        hint = "; divide percentages by 100" if cell[3].rstrip().endswith("%") else ""
        return f"{source}, {place} must hold a number, got {cell[3]!r}{hint}"
    if short := re.search(r"CSV parse error: Row #(\d+): Expected (\d+) columns, got (\d+)", message):
        row = int(short[1]) - header
        return (
            f"{source}, row {row} has {short[3]} values where the header has {short[2]}: "
            "the file is truncated or has a wrong delimiter there"
        )
    if mixed := re.search(r"Column\(/(.*)\) changed from (\w+) to (\w+)", message):
        name, *got = mixed[1].replace("/", "."), mixed[2], mixed[3]
        return f"{source}, column {name!r} must hold one kind of values, got {' and '.join(got)}"
    if "Empty CSV file" in message:
        return f"{source} has no rows"
    if "UTF8" in message:
        return f"{source} must be UTF-8 text; save it as such"
    if "pickle" in message:
        return f"{source} must hold plain arrays, not pickled objects, which are not loaded"
    what = format_of(source.path).lstrip(".")
    return f"{source} cannot be read as {what}, it is truncated or damaged: {message[:200]}"


def _inside(path: Path) -> list[Source]:
    """A file, a part of an .npz, or the files in a folder."""
    if not path.exists():
        if found := re.fullmatch(r"(.+\.npz):(\w+)", str(path)):
            return [one._replace(part=found[2]) for one in _inside(Path(found[1]))]
        raise TableError(f"{path} does not exist")
    if not path.is_dir():
        format_of(path)
        return [Source(path)]
    files = [
        file for file in sorted(path.rglob("*")) if file.name.lower().endswith(FORMATS) and file.is_file()
    ]
    files = [file for file in files if not any(p[0] in "._" for p in file.relative_to(path).parts)]  # hidden
    kinds = sorted({format_of(file) for file in files})
    if not files:
        raise TableError(f"{path} holds no file that ends in one of {', '.join(FORMATS)}")
    if len(kinds) > 1:
        raise TableError(f"{path} mixes files of {' and '.join(kinds)}: name the files to read")
    sources = []
    for file in files:  # in folders called site=A, as Hive, Spark and Arrow lay out tables
        pairs = (part.partition("=") for part in file.relative_to(path).parent.parts if "=" in part[1:])
        sources.append(Source(file, folders=tuple((name, value) for name, _, value in pairs)))
    return sources


def _standard_input() -> Source:
    """A copy of standard input in a file of its own, which goes when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="doublehead-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "input"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
    suffix, start = magic_of(path)
    suffix = suffix or (".jsonl" if start.lstrip().startswith(b"{") else ".csv")
    return Source(path.rename(path.with_suffix(suffix)), name="standard input")
