"""Answers of language models in JSON Lines: each line has a label and the log-probabilities of the likeliest tokens.

    {"label": "B", "top_logprobs": {"A": -1.2, "B": -0.4, "C": -3.0}}

The classes are the `options` (or `choices`) of the first line, or else the labels of the file.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from doublehead.logprobs import option_logprobs, token_logprobs

ANSWERS = ("top_logprobs", "logprobs")
LABELS = ("label", "labels", "answer", "target", "gold", "correct")


def holds_answers(path: Path) -> bool:
    """Whether the first line of a file has log-probabilities of tokens; a list of numbers has no tokens."""
    with _open(path) as file:
        first = next((line for line in file if line.strip()), "")
    try:
        return bool(token_logprobs(_answer(json.loads(first))))
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
    with _open(target, "wt") as file:
        for record, row in zip(_records(path), probs.tolist()):
            file.write(json.dumps({**record, "probs": dict(zip(options, row))}) + "\n")


def _open(path: Path, mode: str = "rt") -> IO[str]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    file: IO[str] = opener(path, mode, encoding="utf-8")
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
