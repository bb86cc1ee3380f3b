"""From raw columns to scores, labels and groups, every cell checked; errors name the file, the column and the row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from doublehead.tables.files import Array, Source, TableError
from doublehead.tables.layout import Layout

MISSING = "(missing)"
WORDS: dict[str | None, float] = {
    None: np.nan,
    "": np.nan,
    **dict.fromkeys(("true", "True", "TRUE"), 1.0),
    **dict.fromkeys(("false", "False", "FALSE"), 0.0),
}


def to_scores(
    columns: list[Array], names: Sequence[str], rows: Array, source: Source, kind: str, tolerance: float
) -> torch.Tensor:
    """(B, K) finite scores; a single column is a binary model's score of class 1. `rows` are told in errors."""
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
    if table.shape[1] == 1:
        other = 1 - table if kind == "probs" else np.zeros_like(table)
        table = np.concatenate([other, table], 1)
    if kind == "probs":
        _check_probs(table, rows, source, tolerance)
    return torch.from_numpy(np.ascontiguousarray(table))


def to_labels(column: Array, layout: Layout, n_classes: int, rows: Array, source: Source) -> Array:
    """(B,) int64 in 0..K-1 from whole numbers, or from names through the names of the score columns."""
    place = f"{source}, column {layout.label!r}, row"
    if column.dtype.kind in "OU":
        if not all(name.isdecimal() for name in layout.classes):
            return _labels_by_name(column, layout, rows, place)
        column = _numbers(column, rows, place)
    if column.ndim != 1 or column.dtype.kind not in "fiub":
        raise TableError(
            f"{source}: labels in {layout.label!r} must be whole numbers of shape (N,), "
            f"got {column.dtype} of shape {column.shape}"
        )
    number = column.astype(np.float64)
    wrong = ~np.isfinite(number) | (number != np.floor(number))
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


def _check_probs(table: Array, rows: Array, source: Source, tolerance: float) -> None:
    low, high = table.min(1), table.max(1)
    outside = (low < 0) | (high > 1 + 1e-6)
    if outside.any():
        i = int(outside.argmax())
        value = low[i] if low[i] < 0 else high[i]
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
