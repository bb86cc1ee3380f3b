"""Damage files of every format and layout, and read them: each must give numbers or one sentence, never a traceback.

    make fuzz                                              # 20,000 files
    python benchmarks/fuzz_files.py --files 500 --seed 7   # fewer, others
    python benchmarks/fuzz_files.py --only 1234            # one file again, with its traceback

A file is made from its number alone. Workers read them, so that a crash of a library is noticed
and does not end the run. Every tenth file goes through the command line, `evaluate` and `calibrate` in turn.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from typer.testing import CliRunner

from doublehead.cli import app
from doublehead.files import TableError, read_predictions

ODD = [
    b"", b"nan", b"inf", b"-inf", b"1e300", b"-1", b"1.00001", b"1e-400", b"0x1", b"1,5", b"NULL", b"true", b"\xff\xfe",
    b"\xc3\x28", b'"', b"'", b"\x00", b"9" * 400, b"99999999999999999999", b"[1,2]", b"{}", b"\r", b"-0",
    b"+1", b"1_000",
]  # fmt: skip
LETTERS = "abcdef"


def rows(rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (N, K) and labels (N,), rounded as files are."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    n, k = rng.choice([1, 2, 5, 30, 200]), rng.choice([2, 3, 6])
    logits = 2 * numbers.normal(size=(n, k))
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    scores = probs.round(rng.choice([2, 4, 16])) if rng.random() < 0.6 else logits
    return scores, numbers.integers(0, k, n)


def kind_of(scores: np.ndarray) -> str:
    return "probs" if scores.min() >= 0 and abs(scores.sum(1) - 1).max() < 0.1 else "logits"


def as_csv(rng: random.Random, scores: np.ndarray, labels: np.ndarray) -> bytes:
    k, by_name = scores.shape[1], rng.random() < 0.5
    forms = {"probs": ["prob_{}", "{}_prob", "Prob({})"], "logits": ["logit_{}", "Logits {}"]}
    form = rng.choice([*forms[kind_of(scores)], "{}", "score_{}"])
    names = [form.format(LETTERS[i] if by_name else i) for i in range(k)]
    lines = [["id", rng.choice(["label", "gt", "True Class", "y"]), *names, "site"]]
    for i, (row, label) in enumerate(zip(scores.tolist(), labels.tolist())):
        lines.append([str(i), LETTERS[label] if by_name else str(label), *map(str, row), rng.choice("NS")])
    if rng.random() < 0.1:
        lines = [line[1:-1] for line in lines[1:]]
    delimiter = rng.choice([",", ",", ";", "\t"])
    text = "\n".join(delimiter.join(line) for line in lines) + "\n"
    return text.encode(rng.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16"]))


def as_long(rng: random.Random, scores: np.ndarray, labels: np.ndarray) -> bytes:
    lines = ["id,label,class,prob"]
    for i, (row, label) in enumerate(zip(scores.tolist(), labels.tolist())):
        lines += [f"{i},{label},{k},{value}" for k, value in enumerate(row)]
    return "\n".join(lines).encode()


def as_top_label(rng: random.Random, scores: np.ndarray, labels: np.ndarray) -> bytes:
    lines = ["label,predicted,confidence"]
    lines += [f"{y},{row.argmax()},{row.max()}" for row, y in zip(scores, labels)]
    return "\n".join(lines).encode()


def as_table(scores: np.ndarray, labels: np.ndarray, lists: bool) -> pa.Table:
    if lists:
        return pa.table({"label": labels, kind_of(scores): scores.tolist()})
    columns = {f"{kind_of(scores)[:-1]}_{k}": column for k, column in enumerate(scores.T)}
    return pa.table({"label": labels, **columns})


def as_parquet(rng: random.Random, scores: np.ndarray, labels: np.ndarray) -> bytes:
    sink, codec = io.BytesIO(), rng.choice(["none", "snappy", "zstd"])
    table = as_table(scores, labels, rng.random() < 0.5)
    parquet.write_table(table, sink, row_group_size=20, compression=codec)
    return sink.getvalue()


def as_arrow(rng: random.Random, scores: np.ndarray, labels: np.ndarray) -> bytes:
    sink, table = io.BytesIO(), as_table(scores, labels, rng.random() < 0.5)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def as_json(rng: random.Random, scores: np.ndarray, labels: np.ndarray) -> bytes:
    if rng.random() < 0.5:
        table = as_table(scores, labels, rng.random() < 0.5).to_pylist()
    else:
        name, names = rng.choice([kind_of(scores), "judge", "top_logprobs"]), LETTERS[: scores.shape[1]]
        table = [{"label": names[y], name: dict(zip(names, row))} for y, row in zip(labels, scores.tolist())]
    return "".join(json.dumps(row) + "\n" for row in table).encode()


def as_npz(rng: random.Random, scores: np.ndarray, labels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    save = rng.choice([np.savez, np.savez_compressed])
    save(sink, **{rng.choice([kind_of(scores)] * 5 + ["val_logits", "x"]): scores, "labels": labels})
    return sink.getvalue()


def as_npy(rng: random.Random, scores: np.ndarray, labels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.save(sink, scores)
    return sink.getvalue()


MAKERS: dict[str, Callable[[random.Random, np.ndarray, np.ndarray], bytes]] = {
    ".csv": as_csv, ".tsv": as_csv, ".csv.gz": as_csv, "-long.csv": as_long, "-top.csv": as_top_label,
    ".jsonl": as_json, ".jsonl.gz": as_json, ".parquet": as_parquet, ".arrow": as_arrow, ".feather": as_arrow,
    ".npz": as_npz, ".npy": as_npy,
}  # fmt: skip


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A few random changes: of bits, cells, lines, pieces."""
    made = bytearray(data)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 8])):
        if not made:
            break
        at, kind = rng.randrange(len(made)), rng.randrange(8)
        if kind == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del made[at:]
        elif kind == 2:
            del made[at : at + rng.choice([1, 4, 64])]
        elif kind == 3:
            made[at:at] = rng.randbytes(rng.choice([1, 4, 64]))
        elif kind == 4:
            other = rng.randrange(len(made))
            made[at : at + 16] = made[other : other + 16]
        elif kind == 5:
            cells = bytes(made).split(b",")
            cells[rng.randrange(len(cells))] = rng.choice(ODD)
            made = bytearray(b",".join(cells))
        elif kind == 6:
            lines = bytes(made).split(b"\n")
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i] if rng.random() < 0.5 else b""
            made = bytearray(b"\n".join(lines))
        else:
            made[at : at + 8] = rng.choice(ODD)
    return bytes(made)


def make(number: int, folder: Path) -> tuple[list[str], str | None]:
    """The file of a number, damaged before or after it is compressed, a pair for .npy; and what to state about it."""
    rng = random.Random(number)
    suffix = rng.choice(list(MAKERS))
    scores, labels = rows(rng)
    data = MAKERS[suffix](rng, scores, labels)
    if suffix.endswith(".gz"):
        data = gzip.compress(damaged(rng, data), 1)
    path = folder / f"file{suffix}"
    path.write_bytes(data if suffix.endswith(".gz") and rng.random() < 0.7 else damaged(rng, data))
    kind = rng.choice([None, None, None, kind_of(scores), kind_of(scores), "probs", "logits"])
    if suffix != ".npy":
        return [str(path)], kind
    np.save(folder / "labels.npy", labels)
    return [str(path), str(folder / "labels.npy")], kind


def read(number: int, folder: Path) -> str:
    """How reading the file of a number ends: numbers, refused, or a traceback."""
    files, kind = make(number, folder)
    stated = [] if kind is None else [f"--{kind}"]
    if number % 10:
        try:
            read_predictions(files, kind=kind, tolerance=0.02).tally()  # type: ignore[arg-type]
        except (TableError, ValueError) as error:
            return "refused" if "\n" not in str(error) else "a message of several lines: " + str(error)
        except Exception:
            return traceback.format_exc()
        return "numbers"
    command = ["evaluate", *files]
    if number % 20:
        out = folder / ("out" + "".join(Path(files[0]).suffixes))
        command = ["calibrate", *(x for f in files for x in ("--fit", f, "--apply", f))]
        command += ["--method", "temperature", "--force", "-o", str(out)]
    result = CliRunner().invoke(app, [*command, *stated])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception))
    if result.exit_code == 2 and "Traceback" not in result.output:
        return "refused"
    return "numbers" if result.exit_code == 0 else f"exit code {result.exit_code}: {result.output}"


def work(first: int, last: int, progress: Path) -> None:
    """Read some files; the number of each is written down first, and what went wrong is printed."""
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    found: Counter[str] = Counter()
    for number in range(first, last):
        progress.write_text(str(number))
        with tempfile.TemporaryDirectory() as folder:
            ending = read(number, Path(folder))
        if ending not in ("numbers", "refused"):
            print(f"--- file {number}\n{ending}", flush=True)
            ending = "wrong"
        found[ending] += 1
    progress.write_text(json.dumps(found))


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one file")
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(read(options.only, Path(folder)))
        return 0
    total: Counter[str] = Counter()
    start, first = time.monotonic(), options.seed * 10_000_000
    end = first + options.files
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        while first < end:
            last = min(end, first + 1000)
            worker = multiprocessing.get_context("spawn").Process(target=work, args=(first, last, progress))
            worker.start()
            worker.join()
            said = progress.read_text()
            if worker.exitcode == 0:
                total.update(json.loads(said))
                first = last
            else:  # the files before were read; count this one and go on behind it
                print(f"--- file {said}: the process ended with {worker.exitcode}", flush=True)
                total.update(wrong=1, numbers=int(said) - first)
                first = int(said) + 1
            print(f"{sum(total.values())} files: {dict(total)}, {time.monotonic() - start:.0f} s", flush=True)
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
