"""The values of the columns as checked arrays. Errors name the file, the column and the row."""

from __future__ import annotations

import math
from datetime import datetime
from functools import lru_cache

import numpy as np
import torch

from doublehead.files.columns import WHOLE, Layout, no_yes, quoted, split_score, without_prefix
from doublehead.files.readers import Batch
from doublehead.files.sources import Array, TableError
from doublehead.score_arrays import ROUNDED, rounding_error

MAX_LOGIT = 1e30  # sums of squared NLLs stay finite
MISSING = "(missing)"
CLASS = "a class (a whole number)"
OUTSIDE = 1e-3  # how far outside 0..1 a probability may lie by rounding, at most
PERCENTAGES = "each row sums to 100, so these are percentages: divide them by 100"
GIVE = {"probabilities": "give --probs", "percentages": "divide them by 100 and give --probs"}  # for logits
WORDS: dict[str | None, float] = {
    None: np.nan,
    "": np.nan,
    **dict.fromkeys(("true", "True", "TRUE"), 1.0),
    **dict.fromkeys(("false", "False", "FALSE"), 0.0),
}


def to_scores(batch: Batch, layout: Layout, kind: str, tolerance: float) -> tuple[torch.Tensor, int]:
    """(B, K) finite scores, and in how many rows some were clipped to 0..1.

    A single column is a binary model's score of class 1, or the confidence in a class that is not known here. Scores of
    independent labels stay as they are.
    """
    table = batch.scores
    if table.shape[1] == 0:
        raise TableError(f"{batch.source} must have at least one score per row, got none")
    narrow = table.dtype in (np.float16, np.float32)
    table = table.astype(np.float32 if narrow else np.float64, copy=False)
    wrong = ~np.isfinite(table)
    if wrong.any():
        i, j = (int(index[0]) for index in np.nonzero(wrong))
        name, must = layout.scores[min(j, len(layout.scores) - 1)], " must hold a finite number"
        got = "nothing or nan" if np.isnan(table[i, j]) else table[i, j]
        if len(layout.scores) < table.shape[1]:
            must = f" (number {j} of the row){must}"
            if np.isnan(table[i]).all():
                must, got = f" must hold a list of {table.shape[1]} numbers", "none, or one of another length"
        batch.refuse(wrong.any(1), name, lambda _: f"{must}, got {got}")
    clipped, reach = 0, min(tolerance, OUTSIDE)
    low, high = table.min(), table.max()
    if kind == "probs" and (low < 0 or high > 1) and -reach <= low and high <= 1 + reach:
        inside = np.clip(table, 0, 1)  # they are a rounding error outside
        table, clipped = inside, int((inside != table).any(1).sum())
    if layout.top_only:
        confidence = table[:, 0]
        batch.refuse(
            (confidence < 0) | (confidence > 1),
            layout.scores[0],
            lambda i: f" must hold a confidence in 0..1, got {confidence[i]:.6g}",
            "; divide percentages by 100",
        )
    elif table.shape[1] == 1 and not layout.independent:
        table = np.concatenate([1 - table if kind == "probs" else np.zeros_like(table), table], 1)
    elif kind == "logits":
        _check_logits(table, layout, batch)
    if kind == "probs" and not layout.top_only:
        _check_probs(table, layout, batch, tolerance)
    return torch.from_numpy(np.require(table, requirements=["C", "W"])), clipped


def recognise(scores: Array, tolerance: float = 1e-3) -> str:
    """What all rows of scores (B, K) plainly are: probabilities, percentages, log-probabilities, or nothing.

    >>> recognise(np.array([[0.25, 0.75]])), recognise(np.array([[25.0, 75.0]])), recognise(np.array([[1.0, -2.0]]))
    ('probabilities', 'percentages', '')
    """
    low, high, reach = np.nanmin(scores), np.nanmax(scores), min(tolerance, OUTSIDE)
    scores = np.nan_to_num(scores)
    if high <= 1e-6:
        off = _off_one(np.exp(scores, dtype=np.float64))
        return "log-probabilities" if off <= max(tolerance, 1e-2) else ""
    if low < -reach:
        return ""
    if high <= 1 + reach and _off_one(scores) <= max(tolerance, ROUNDED):
        return "probabilities"
    return "percentages" if _off_one(scores / 100) <= 1e-2 else ""


def _off_one(table: Array) -> float:
    """How far the sum of any row lies from 1."""
    return float(np.abs(table.sum(1, dtype=np.float64) - 1).max())


def to_correct(batch: Batch, layout: Layout) -> torch.Tensor:
    """(B,) bool: whether the answer was right, as the file says or because the predicted class is the label."""
    if layout.correct is not None:
        number = _numbers(batch, layout.correct)
        batch.refuse(
            (number != 0) & (number != 1),
            layout.correct,
            lambda i: f" must say whether the answer was right (0 or 1), got {number[i]:g}",
        )
        return torch.from_numpy(number == 1)
    assert layout.label is not None
    assert layout.predicted is not None
    texts = [to_text(batch.columns[name]) for name in (layout.label, layout.predicted)]
    for name, column in zip((layout.label, layout.predicted), texts):
        batch.refuse(column == MISSING, name, lambda _: " holds nothing")
    return torch.from_numpy(np.asarray(texts[0] == texts[1], dtype=bool))


def to_several_labels(batch: Batch, layout: Layout, n_labels: int) -> Array:
    """(B, L) int64, 0 or 1."""
    names = layout.labels or (str(layout.label),)
    table = batch.columns[names[0]]
    if layout.labels:
        table = np.stack([_numbers(batch, name) for name in names], 1)
    if table.ndim != 2 or table.shape[1] != n_labels:
        raise TableError(
            f"{batch.source}: labels in {', '.join(map(repr, names))} must be a class for each row, or 0 or 1 for each "
            f"of its {n_labels} scores, got shape {table.shape}"
        )
    wrong = ~np.isin(table, (0, 1))
    column = int(wrong.any(0).argmax())
    name = names[min(column, len(names) - 1)]
    batch.refuse(wrong[:, column], name, lambda i: f" must hold 0 or 1, got {table[i, column]:g}")
    if layout.one_hot:
        counts = table.sum(1)
        batch.refuse(
            counts != 1,
            None,
            lambda i: f" must have one label, like the first rows of the file, got {counts[i]:g}",
        )
    return table.astype(np.int64)


def to_weights(batch: Batch, name: str) -> Array:
    """(B,) float64, finite and >= 0."""
    weights = _numbers(batch, name, "a weight")
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    batch.refuse(wrong, name, lambda i: f" must hold a weight >= 0, got {weights[i]:g}")
    return weights


def to_labels(batch: Batch, layout: Layout, n_classes: int) -> Array:
    """(B,) int64 in 0..K-1 from whole numbers, or from names through the names of the score columns."""
    name, base = str(layout.label), layout.base
    column = batch.columns[name]
    is_text = column.dtype.kind in "OU"
    if base is None or (is_text and _are_names(column, layout)):
        return _labels_by_name(batch, layout)
    if not is_text and (column.ndim != 1 or column.dtype.kind not in "fiub"):
        raise TableError(
            f"{batch.source}: labels in {name!r} must be whole numbers of shape (N,), "
            f"got {column.dtype} of shape {column.shape}"
        )
    number = _numbers(batch, name)
    batch.refuse(
        ~np.isfinite(number) | (number != np.floor(number)) | (np.abs(number) > 2**53),
        name,
        lambda i: f" must hold {CLASS}, got {'nothing' if np.isnan(number[i]) else f'{number[i]:g}'}",
    )
    labels: Array = number.astype(np.int64) - base
    # Where every label is one too high or one too low, or counted from 0 beside numbers of columns.
    first = None
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if base > 1 and low + base >= 0 and high + base < n_classes:
        first = 0
    elif (low >= 1 and high == n_classes) or (low == -1 and high < n_classes - 1 and base > 0):
        first = base + (1 if low >= 1 else -1)
    hint = "" if first is None else f"; if labels are counted from {first}, give --label-base {first}"
    allowed = f"labels of {n_classes} classes must lie in {base}..{base + n_classes - 1}"
    outside = (labels < 0) | (labels >= n_classes)
    batch.refuse(outside, name, lambda i: f": {allowed}, got {labels[i] + base}{hint}")
    return labels


def to_text(column: Array) -> Array:
    """A column as text, whole numbers without a point; what is missing reads (missing).

    >>> to_text(np.array([1.0, np.nan])).tolist()
    ['1', '(missing)']
    """
    values = column.tolist()
    if {*map(type, values)} <= {str, type(None)}:
        texts = {value: _tell(value) for value in set(values)}  # seldom many
        return np.array([texts[value] for value in values], dtype=object)
    return np.array([_tell(value) for value in values], dtype=object)


def _tell(value: object) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else MISSING if math.isnan(value) else str(value)
    text = MISSING if value is None or value == "" else str(value).strip()
    return (
        text.removesuffix(" 00:00:00") if isinstance(value, datetime) else text
    )  # a day, as CSV files write it


def _are_names(column: Array, layout: Layout) -> bool:
    """Whether labels in text are names of classes; numbers may be text too, in a file that is written back."""
    if not layout.classes:
        return False
    places, counted = _places(layout), all(map(WHOLE.fullmatch, layout.classes))
    labels = {str(value).strip() for value in column.tolist()[:1000] if value is not None}
    words = {text for text in labels if text and not is_number(text)}
    return any(text in places or not (counted or text in WORDS) for text in words)


def is_number(text: str) -> bool:
    """Whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=8)
def _places(layout: Layout) -> dict[str, int]:
    """The number of each class by the names that labels may call it; the first ones go before the others."""
    forms = [layout.classes, layout.scores, without_prefix(layout.scores)]
    forms.append(tuple(split_score(name, None)[1] or name for name in layout.scores))
    forms += [tuple(map(str.casefold, names)) for names in forms]
    for words in (("0", "1"), ("false", "true")):
        forms.append(tuple(words[number] for number in no_yes(layout.classes)))
    places: dict[str, int] = {}
    for names in forms:
        if len(set(names)) == len(names) > 1:  # no two classes that differ by case alone
            for place, name in enumerate(names):
                places.setdefault(name.strip(), place)
    return places


def _check_logits(table: Array, layout: Layout, batch: Batch) -> None:
    largest = np.abs(table).max(1)
    far = f": logits must lie within {MAX_LOGIT:g}, got "
    batch.refuse(largest > MAX_LOGIT, None, lambda i: f"{far}{largest[i]:g}")
    found = "" if layout.independent or table.min() < 0 else recognise(table)
    if found in GIVE:
        total = 100 if found == "percentages" else 1
        raise TableError(
            f"{batch.source}: no score is negative and each row sums to {total}, so these are {found}: {GIVE[found]}"
        )


def _check_probs(table: Array, layout: Layout, batch: Batch, tolerance: float) -> None:
    low, high, sums = table.min(1), table.max(1), table.sum(1, dtype=np.float64)
    outside = (low < 0) | (high > 1 + 1e-6)
    if outside.any():
        found = recognise(table, tolerance)
        if found == "percentages":
            raise TableError(f"{batch.source}: {PERCENTAGES}")
        if found == "log-probabilities":
            raise TableError(
                f"{batch.source}: these are {found}: give --logits, which gives the same results"
            )
        few = outside.mean() < 0.1
        hint = f"; {'remove it if it is a total' if few else 'give --logits if these are logits'}"
        if layout.binary:  # the first column is the rest to 1
            low = high = table[:, -1]
            hint = hint if low.min() < 0 or high.max() > 100 else "; divide percentages by 100"
        batch.refuse(
            outside,
            None,
            lambda i: f": probabilities must lie in 0..1, got {low[i] if low[i] < 0 else high[i]:.6g}",
            hint,
        )
    if not layout.independent:
        off = np.abs(sums - 1)
        wrong = off > tolerance + 1e-9
        wrong[wrong] = off[wrong] > rounding_error(table[wrong])
        batch.refuse(
            wrong,
            None,
            lambda i: f": probabilities must sum to 1 within {tolerance:g}, got {sums[i]:.6g}",
            "; name the columns of all classes with --scores, or give a larger --tolerance",
        )


def _numbers(batch: Batch, name: str, wanted: str = CLASS) -> Array:
    """(B,) float64, also from text: nan where there is none, 1 and 0 for true and false."""
    column = batch.columns[name]
    if column.dtype.kind not in "OU":
        return column.astype(np.float64)
    numbers = np.empty(len(column), dtype=np.float64)
    for i, text in enumerate(column.tolist()):
        try:
            numbers[i] = WORDS[text] if text in WORDS else float(text)
        except ValueError:
            place = f"{batch.source}, column {name!r}, row {batch.numbers[i]}"
            raise TableError(f"{place} must hold {wanted}, got {text!r}") from None
    return numbers


def _labels_by_name(batch: Batch, layout: Layout) -> Array:
    names = _places(layout)
    found, at = np.unique(to_text(batch.columns[str(layout.label)]), return_inverse=True)
    known = [names.get(name, names.get(name.casefold(), -1)) for name in found]
    index: Array = np.array(known, dtype=np.int64)[at]
    classes = ", ".join(map(quoted, layout.classes[:10])) + (", ..." if len(layout.classes) > 10 else "")
    got = ["nothing" if name == MISSING else quoted(name) for name in found]
    batch.refuse(
        index < 0, layout.label, lambda i: f" must hold one of the classes {classes}, got {got[at[i]]}"
    )
    return index
