"""Files with a row for each sample and class, turned into a row for each sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from doublehead.files.arrays import Reader
from doublehead.files.columns import LABELS, LOGITS, PROBS, SCORES, find, score_family
from doublehead.files.formats import open_source
from doublehead.files.sources import Array, Source, TableError
from doublehead.files.values import to_text

SAMPLES = (
    "sample",
    "sample_id",
    "id",
    "example",
    "example_id",
    "item",
    "item_id",
    "image",
    "image_id",
    "row",
    "index",
    "uid",
)
CLASSES = ("class", "class_name", "class_id", "candidate", "option", "choice", "category")


def from_long_form(
    sources: Sequence[Source], reader: Reader, label: str | None, others: Sequence[str]
) -> Source | None:
    """The same predictions with a column of scores for each class, in memory; None where the files are not long.

    Files are long when they have a column of samples whose values repeat, one of classes and one of scores.
    """
    columns = reader.columns
    sample, of_class = find(columns, SAMPLES), find([name for name in columns if name != label], CLASSES)
    label = label or find([name for name in columns if name != of_class], LABELS)
    score = find(columns, (*PROBS, *LOGITS, *SCORES[:-1]))
    if sample is None or of_class is None or label is None or score in (None, of_class):
        return None
    if score_family(
        {name: kind for name, kind in columns.items() if name != of_class}, str(reader.source), None
    ):
        return None
    assert score is not None
    wanted = list(dict.fromkeys([sample, of_class, label, *others]))
    parts = [batch for source in sources for batch in open_source(source).batches([score], wanted, 1 << 18)]
    if not parts:
        return None
    found = {name: np.concatenate([to_text(part.columns[name]) for part in parts]) for name in wanted}
    names, first, which = np.unique(found[sample], return_index=True, return_inverse=True)
    if len(names) == len(which):
        return None  # a row for each sample after all
    classes, column = np.unique(found[of_class], return_inverse=True)
    classes, column = _in_order(classes, column)
    table = np.full((len(names), len(classes)), np.nan)
    table[which, column] = np.concatenate([part.scores[:, 0] for part in parts])
    place = f"{sources[0]} (a row for each {sample!r} and {of_class!r})"
    if len(which) != table.size or np.isnan(table).any():
        at = int(np.bincount(which).argmin()) if len(which) < table.size else int(np.bincount(which).argmax())
        raise TableError(
            f"{place} must have {len(classes)} rows for each sample, one per class, not so for {names[at]!r}"
        )
    if (found[label] != found[label][first][which]).any():
        raise TableError(f"{place} must have one label for each sample in {label!r}")
    order = np.sort(first)  # samples as they first appear
    rows = np.argsort(first)
    arrays = {name: found[name][order] for name in wanted if name not in (sample, of_class)}
    arrays |= {sample: found[sample][order]}
    arrays |= {f"{score}_{name}": table[rows, k] for k, name in enumerate(classes)}
    return Source(sources[0].path, arrays=arrays, name=place)


def _in_order(classes: Array, column: Array) -> tuple[Array, Array]:
    """Classes by number where all are numbers, else by name."""
    if not all(name.isdecimal() for name in classes):
        return classes, column
    order = np.array(sorted(range(len(classes)), key=lambda i: int(classes[i])))
    return classes[order], np.argsort(order)[column]
