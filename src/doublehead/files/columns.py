"""Which columns are the label and the scores, and their values as checked arrays.

Columns are named by the caller or guessed from their names; guesses are recorded. Errors name the file, the column and
the row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch

from doublehead.files.formats import Array, Source, TableError

LABELS = (
    "label",
    "labels",
    "target",
    "targets",
    "y_true",
    "y",
    "true_label",
    "truth",
    "ground_truth",
    "class",
)
LOGITS = ("logit", "logits")
PROBS = ("prob", "probs", "proba", "probability", "p", "calibrated_prob", "y_prob")
SCORES = ("score", "scores", "class", "output", "y_score", "")
PREFIXES = {"logits": (*LOGITS, *SCORES), "probs": (*PROBS, *SCORES), None: (*LOGITS, *PROBS, *SCORES)}

MAX_LOGIT = 1e30  # sums of squared NLLs stay finite
MISSING = "(missing)"
WORDS: dict[str | None, float] = {
    None: np.nan,
    "": np.nan,
    **dict.fromkeys(("true", "True", "TRUE"), 1.0),
    **dict.fromkeys(("false", "False", "FALSE"), 0.0),
}


@dataclass(frozen=True)
class Layout:
    """The columns that matter and the classes they stand for.

    `scores` are K columns of one number each, one column of lists of K numbers, or one column of a binary model's
    single score. `classes` are the names of the classes where the columns have names, else empty. `base` is the
    label of the first class where labels are numbers.
    """

    label: str | None
    scores: tuple[str, ...]
    classes: tuple[str, ...]
    base: int
    guesses: tuple[str, ...] = ()
    binary: bool = False  # one column of a binary model's single score, of class 1
    unnamed: bool = False  # the scores are all columns of decimal numbers, for want of telling names


def choose_layout(
    columns: Mapping[str, str],
    where: str,
    *,
    kind: str | None,
    label: str | None,
    scores: Sequence[str] | None,
    base: int | None,
    taken: Sequence[str] = (),
    label_needed: bool = True,
) -> Layout:
    """The layout of a file called `where` with these columns (name -> what it holds); `taken` are no scores.

    >>> found = choose_layout({"id": "whole", "y": "whole", "logit_1": "number", "logit_0": "number"}, "a.csv",
    ...     kind="logits", label=None, scores=None, base=None)
    >>> found.label, found.scores, found.guesses
    ('y', ('logit_0', 'logit_1'), ("label column 'y'", "score columns 'logit_0' .. 'logit_1' (2 classes)"))
    """
    guesses: list[str] = []
    if label is None:
        label = next((name for want in LABELS for name in columns if name.lower() == want), None)
        if label is not None and label != "labels":
            guesses.append(f"label column {label!r}")
    elif label not in columns:
        if label_needed:
            raise TableError(f"{where} has no column {label!r} for the label, it has {_listed(columns)}")
        label = None
    if label is None and label_needed:
        raise TableError(
            f"{where} has no column that looks like the label: name it with --label, it has {_listed(columns)}"
        )
    left = {name: holds for name, holds in columns.items() if name != label and name not in taken}
    unnamed = False
    if scores is None:
        found = _guess_scores(left, where, kind)
        unnamed = len(found) > 1 and score_family(left, where, kind) is None
        if found != (kind,):
            guesses.append(f"score {_told(found)}")
    else:
        found = named_columns(scores, left, where)
    classes, first = _classes(found)
    binary = len(found) == 1 and columns[found[0]] != "matrix"
    return Layout(label, found, classes, first if base is None else base, tuple(guesses), binary, unnamed)


def named_columns(
    names: Sequence[str], columns: Mapping[str, str], where: str, what: str = "scores"
) -> tuple[str, ...]:
    """The columns named, a name with * or ? standing for all that match it, in the order of their numbers."""
    found: list[str] = []
    for name in names:
        matches = [name] if name in columns else _by_number([c for c in columns if fnmatchcase(c, name)])
        if not matches:
            raise TableError(f"{where} has no column {name!r} for the {what}, it has {_listed(columns)}")
        found += matches
    return tuple(dict.fromkeys(found))


def score_family(columns: Mapping[str, str], where: str, kind: str | None) -> tuple[str, ...] | None:
    """The columns whose names mark them as scores (logit_0, prob_cat, ... or lists of numbers), None without such."""
    known = PREFIXES[kind]
    matrices = [name for name, holds in columns.items() if holds == "matrix"]
    fitting = [name for name in matrices if name.lower() in known] or matrices
    if len(fitting) == 1:
        return (fitting[0],)
    numbered, named = _families(columns, known)
    # one that says what it holds goes before "score_0", "class_0" or a bare number
    for family in (numbered, named):
        prefixes = [p for p in known if p in family and p not in SCORES] or [p for p in known if p in family]
        if len(prefixes) > 1:
            raise TableError(
                f"{where} has several sets of score columns ({', '.join(family[p][0] for p in prefixes)}, ...): "
                "name one with --scores, such as --scores 'prob_*'"
            )
        if prefixes:
            return tuple(family[prefixes[0]])
    return None


def _guess_scores(columns: Mapping[str, str], where: str, kind: str | None) -> tuple[str, ...]:
    known = PREFIXES[kind]
    if (found := score_family(columns, where, kind)) is not None:
        return found
    single = [
        name
        for name, holds in columns.items()
        if name.lower().rstrip("_1") in known[:-1] and holds == "number"
    ]
    decimal = [name for name, holds in columns.items() if holds == "number"]
    if len(single) == 1:
        return (single[0],)
    if len(decimal) >= 2:
        return tuple(decimal)
    raise TableError(
        f"{where} has no columns that look like scores: name them with --scores, it has {_listed(columns)}"
    )


def _families(
    columns: Mapping[str, str], known: Sequence[str]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Columns such as logit_0, logit_1, ... and prob_cat, prob_dog, ..., by their known prefix; two or more each."""
    numbered: dict[str, list[str]] = {}
    named: dict[str, list[str]] = {}
    for name in columns:
        prefix, number = _split_number(name)
        if number is not None and prefix.lower() in known:
            numbered.setdefault(prefix.lower(), []).append(name)
        elif (split := re.fullmatch(r"([A-Za-z]+)[_\-. ](.+)", name)) and split[1].lower() in known:
            named.setdefault(split[1].lower(), []).append(name)
    numbered = {prefix: _by_number(names) for prefix, names in numbered.items() if _consecutive(names)}
    return numbered, {prefix: names for prefix, names in named.items() if len(names) >= 2}


def _split_number(name: str) -> tuple[str, int | None]:
    """("logit", 3) from "logit_3"."""
    found = re.fullmatch(r"(.*?)[_\-. ]?(\d+)", name)
    return (found[1], int(found[2])) if found else (name, None)


def _by_number(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: (_split_number(name)[1] is None, _split_number(name)[1] or 0))


def _consecutive(names: list[str]) -> bool:
    numbers = sorted(number for name in names if (number := _split_number(name)[1]) is not None)
    return len(numbers) >= 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _classes(scores: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """The names of the classes, a common prefix taken off, and the label of the first one."""
    if len(scores) == 1:
        return (), 0
    split = [_split_number(name) for name in scores]
    if len({prefix for prefix, _ in split}) == 1 and _consecutive(list(scores)):
        numbers = [number for _, number in split if number is not None]
        return tuple(map(str, numbers)), numbers[0]
    heads = {re.split(r"[_\-. ]", name, maxsplit=1)[0] for name in scores}
    if len(heads) == 1 and next(iter(heads)).lower() in PREFIXES[None]:
        return tuple(re.split(r"[_\-. ]", name, maxsplit=1)[1] for name in scores), 0
    return scores, 0


def _told(scores: tuple[str, ...]) -> str:
    if len(scores) == 1:
        return f"column {scores[0]!r}"
    if len(scores) <= 4 and not _consecutive(list(scores)):
        return f"columns {', '.join(map(repr, scores))} ({len(scores)} classes)"
    return f"columns {scores[0]!r} .. {scores[-1]!r} ({len(scores)} classes)"


def _listed(columns: Mapping[str, str]) -> str:
    names = [repr(name) for name in columns]
    return (
        ", ".join(names if len(names) <= 12 else [*names[:10], f"... ({len(names)} columns)"]) or "no columns"
    )


def to_scores(
    columns: list[Array],
    names: Sequence[str],
    rows: Array,
    source: Source,
    kind: str,
    tolerance: float,
    independent: bool = False,
) -> torch.Tensor:
    """(B, K) finite scores; a single column is a binary model's score of class 1. `rows` are told in errors.

    With `independent` labels a column is the score of one label, and rows of probabilities need not sum to 1.
    """
    narrow = all(column.dtype in (np.float16, np.float32) for column in columns)
    table = columns[0] if columns[0].ndim == 2 else np.stack(columns, 1)
    table = table.astype(np.float32 if narrow else np.float64, copy=False)
    finite = np.isfinite(table)
    if not finite.all():
        i, j = (int(index[0]) for index in np.nonzero(~finite))
        name = repr(names[j]) if columns[0].ndim == 1 else f"{names[0]!r} (number {j} of the row)"
        got = "nothing or nan" if np.isnan(table[i, j]) else f"{table[i, j]}"
        others = _others(int((~finite).any(1).sum()))
        raise TableError(
            f"{source}, column {name}, row {rows[i]} must hold a finite number, got {got}{others}"
        )
    if table.shape[1] == 0:
        raise TableError(f"{source} must have at least one score per row, got none")
    if kind == "probs":
        table = _clip(table, tolerance)
    if independent:
        outside = (table < 0) | (table > 1)
        if kind == "probs" and outside.any():
            i, j = (int(index[0]) for index in np.nonzero(outside))
            raise TableError(
                f"{source}, column {names[min(j, len(names) - 1)]!r}, row {rows[i]}: probabilities must lie in 0..1, "
                f"got {table[i, j]:.6g}; give --logits if these are logits"
            )
        return torch.from_numpy(np.ascontiguousarray(table))
    if table.shape[1] == 1:
        other = 1 - table if kind == "probs" else np.zeros_like(table)
        table = np.concatenate([other, table], 1)
    elif kind == "logits":
        _check_logits(table, rows, source)
    if kind == "probs":
        _check_probs(table, rows, source, tolerance)
    return torch.from_numpy(np.ascontiguousarray(table))


def to_labels(column: Array, layout: Layout, n_classes: int, rows: Array, source: Source) -> Array:
    """(B,) int64 in 0..K-1 from whole numbers, or from names through the names of the score columns."""
    place = f"{source}, column {layout.label!r}, row"
    if column.dtype.kind in "OU":
        if _are_names(column, layout):
            return _labels_by_name(column, layout, rows, place)
        column = _numbers(column, rows, place)
    if column.ndim != 1 or column.dtype.kind not in "fiub":
        raise TableError(
            f"{source}: labels in {layout.label!r} must be whole numbers of shape (N,), "
            f"got {column.dtype} of shape {column.shape}"
        )
    number = column.astype(np.float64)
    wrong = ~np.isfinite(number) | (number != np.floor(number)) | (np.abs(number) > 2**53)
    if wrong.any():
        i = int(wrong.argmax())
        got = "nothing" if np.isnan(number[i]) else f"{number[i]:g}"
        raise TableError(
            f"{place} {rows[i]} must hold a class (a whole number), got {got}{_others(int(wrong.sum()))}"
        )
    labels: Array = number.astype(np.int64) - layout.base
    outside = (labels < 0) | (labels >= n_classes)
    if outside.any():
        i, last = int(outside.argmax()), layout.base + n_classes - 1
        raise TableError(
            f"{place} {rows[i]}: labels of {n_classes} classes must lie in {layout.base}..{last}, "
            f"got {labels[i] + layout.base}{_base_hint(labels, n_classes, layout.base)}"
        )
    return labels


def to_text(column: Array) -> Array:
    """A column as text, whole numbers without a point; what is missing reads (missing).

    >>> to_text(np.array([1.0, np.nan])).tolist()
    ['1', '(missing)']
    """
    return np.array([_tell(value) for value in column.tolist()], dtype=object)


def _tell(value: object) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else MISSING if math.isnan(value) else str(value)
    return MISSING if value is None or value == "" else str(value)


def _are_names(column: Array, layout: Layout) -> bool:
    """Whether labels in text are names of classes: columns have other names than numbers, or a label is a column."""
    if not all(name.isdecimal() for name in layout.classes):
        return True
    return (
        bool(set(layout.scores) & {str(value) for value in column.tolist()[:1000]}) and len(layout.scores) > 1
    )


def _clip(table: Array, tolerance: float) -> Array:
    """Probabilities a rounding error outside 0..1 moved onto the bound."""
    low, high = table.min(), table.max()
    near = -min(tolerance, 1e-3) <= low and high <= 1 + min(tolerance, 1e-3)
    clipped: Array = np.clip(table, 0, 1) if near and (low < 0 or high > 1) else table
    return clipped


def _check_logits(table: Array, rows: Array, source: Source) -> None:
    low, high = table.min(), table.max()
    if max(-low, high) > MAX_LOGIT:
        i = int(np.abs(table).max(1).argmax())
        raise TableError(
            f"{source}, row {rows[i]}: logits must lie within {MAX_LOGIT:g}, got {table[i].tolist()}"
        )
    if low < 0 or high > 100:
        return
    sums = table.sum(1, dtype=np.float64)
    for total, what in (
        (1, "probabilities: give --probs"),
        (100, "percentages: divide them by 100, give --probs"),
    ):
        if np.abs(sums / total - 1).max() <= 1e-3:
            raise TableError(
                f"{source}: all scores are positive and each row sums to {total}, so these are {what}"
            )


def _check_probs(table: Array, rows: Array, source: Source, tolerance: float) -> None:
    low, high = table.min(1), table.max(1)
    outside = (low < 0) | (high > 1 + 1e-6)
    if outside.any():
        i = int(outside.argmax())
        value = low[i] if low[i] < 0 else high[i]
        sums = table.sum(1, dtype=np.float64)
        if low.min() >= 0 and np.abs(sums / 100 - 1).max() <= 1e-2:
            raise TableError(f"{source}: each row sums to 100, so these are percentages: divide them by 100")
        if high.max() <= 1e-6 and np.abs(np.exp(table.astype(np.float64)).sum(1) - 1).max() <= max(
            tolerance, 1e-2
        ):
            raise TableError(
                f"{source}: these are log-probabilities: give --logits, which gives the same results"
            )
        raise TableError(
            f"{source}, row {rows[i]}: probabilities must lie in 0..1, got {value:.6g}{_others(int(outside.sum()))}; "
            "give --logits if these are logits"
        )
    sums = table.sum(1, dtype=np.float64)
    off = np.abs(sums - 1) > tolerance
    if off.any():
        i = int(off.argmax())
        raise TableError(
            f"{source}, row {rows[i]}: probabilities must sum to 1 within {tolerance:g}, got {sums[i]:.6g}"
            f"{_others(int(off.sum()))}; a file rounded to few digits needs a larger --tolerance"
        )


def _numbers(column: Array, rows: Array, place: str) -> Array:
    """(B,) float64 from text: nan where there is none, 1 and 0 for true and false."""
    numbers = np.empty(len(column), dtype=np.float64)
    for i, text in enumerate(column.tolist()):
        try:
            numbers[i] = WORDS[text] if text in WORDS else float(text)
        except ValueError:
            raise TableError(f"{place} {rows[i]} must hold a class (a whole number), got {text!r}") from None
    return numbers


def _labels_by_name(column: Array, layout: Layout, rows: Array, place: str) -> Array:
    names = {name: i for i, name in enumerate(layout.scores) if len(layout.scores) > 1}
    names.update({name: i for i, name in enumerate(layout.classes)})
    found, at = np.unique(to_text(column), return_inverse=True)
    index: Array = np.array([names.get(str(name), -1) for name in found], dtype=np.int64)[at]
    if (index < 0).any():
        i = int((index < 0).argmax())
        classes = ", ".join(layout.classes[:10]) + (", ..." if len(layout.classes) > 10 else "")
        wanted = f"one of the classes {classes}" if classes else "a whole number"
        got = "nothing" if column[i] in (None, "") else repr(str(column[i]))
        raise TableError(f"{place} {rows[i]} must hold {wanted}, got {got}{_others(int((index < 0).sum()))}")
    return index


def _base_hint(labels: Array, n_classes: int, base: int) -> str:
    """What to try when every label is one too high or one too low."""
    if labels.min() >= 1 and labels.max() == n_classes:
        shift = 1
    elif labels.min() == -1 and labels.max() < n_classes - 1 and base > 0:
        shift = -1
    else:
        return ""
    return f"; if labels are counted from {base + shift}, give --label-base {base + shift}"


def _others(bad_rows: int) -> str:
    return f" ({bad_rows} such rows in this part of the file)" if bad_rows > 1 else ""
