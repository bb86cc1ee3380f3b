"""What the columns and the first rows of a file say: a row for each sample and class, logits or probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from doublehead.files import columns, values
from doublehead.files.columns import LABELS, LOGITS, PROBS, SCORES, Layout, quoted, score_family, with_scores
from doublehead.files.formats import open_source
from doublehead.files.readers import Batch, Reader, Wanted
from doublehead.files.sources import Array, Kind, Source, TableError
from doublehead.files.values import MISSING, recognise, to_text
from doublehead.score_arrays import ROUNDED
from doublehead.system import require

SAMPLES = (
    "sample", "sample_id", "id", "example", "example_id", "item", "item_id", "image", "image_id", "row", "index", "uid",
)  # fmt: skip
CALLED = "as they are called"
NAMED: dict[Kind, tuple[str, ...]] = {"logits": LOGITS, "probs": PROBS}  # names that state a kind
CLASSES = ("class", "class_name", "class_id", "candidate", "option", "choice", "category")
MIN_ROWS = 20  # to see that a single score is never below 0.5, or that no answer is right
ROWS_PER_CLASS = 10  # from so many rows per class on, every class should have a label


def from_long_form(sources: Sequence[Source], reader: Reader, label: str | None) -> Source | None:
    """The same predictions with a column of scores for each class, in memory; None where the files are not long.

    Files are long when they have a column of samples whose values repeat, one of classes and one of scores.
    """
    there, find = reader.columns, columns.find
    sample, of_class = find(there, SAMPLES), find([name for name in there if name != label], CLASSES)
    label = label or find([name for name in there if name != of_class], LABELS)
    score = find(there, (*PROBS, *LOGITS, *SCORES[:-1]))
    if sample is None or of_class is None or label is None or score is None or score == of_class:
        return None
    rest = {name: kind for name, kind in there.items() if name != of_class}
    if score_family(rest, str(reader.source), None):
        return None
    wanted = Wanted([score], [name for name in there if name != score], 1 << 18)
    parts = [batch for source in sources for batch in open_source(source).batches(wanted)]
    if not parts:
        return None
    texts = {name: np.concatenate([to_text(part.columns[name]) for part in parts]) for name in wanted.others}
    frame = require("pandas", extra="tables").DataFrame(texts)
    frame[score] = np.concatenate([part.scores[:, 0] for part in parts])
    if frame[sample].is_unique:
        return None  # a row for each sample after all
    classes = sorted(set(frame[of_class]), key=int if frame[of_class].str.isdecimal().all() else str)
    place = f"{sources[0]} (a row for each {sample!r} and {of_class!r})"
    counts = frame[sample].value_counts(sort=False)
    twice = frame[sample][frame.duplicated([sample, of_class])]
    if wrong := [*counts.index[counts != len(classes)], *twice]:
        raise TableError(
            f"{place} must have {len(classes)} rows for each sample, one per class, not so for {wrong[0]!r}"
        )
    if (frame.groupby(sample)[label].nunique() > 1).any():
        raise TableError(f"{place} must have one label for each sample in {label!r}")
    table = frame.pivot(index=sample, columns=of_class, values=score)
    first = frame.drop_duplicates(sample)  # samples as they first appear
    arrays = {name: first[name].to_numpy() for name in wanted.others if name != of_class}
    arrays |= {f"{score}_{name}": table[name][first[sample]].to_numpy() for name in classes}
    return Source(sources[0].path, arrays=arrays, name=place)


def stated_kind(sources: Sequence[Source], reader: Reader, kind: Kind | None) -> Kind | None:
    """What the caller or the files state; they must not contradict each other."""
    for source in sources:
        if kind is None or source.path.suffix != ".npz":
            continue
        says = (reader if source is reader.source else open_source(source)).states
        if says not in (None, kind):
            raise TableError(
                f"{source} holds an array called {says!r}, but --{kind} was given: give --{says}, or neither"
            )
    return kind or reader.states


def scores_like(layout: Layout, reader: Reader, kind: Kind | None) -> tuple[str, ...] | None:
    """The score columns of another file where this one has them, and no others that look like scores."""
    if not set(layout.scores) <= set(reader.columns):
        return None
    family = score_family(reader.columns, str(reader.source), kind)
    return layout.scores if family is None or set(family) <= set(layout.scores) else None


def settle(
    batch: Batch, layout: Layout, stated: Kind | None, tolerance: float, label_needed: bool, one_hot: bool
) -> tuple[Layout, Kind, str]:
    """What the first rows say: the layout, the kind of the scores, and why where it was not stated.

    Where no label is needed its column may hold nothing; with `one_hot` several columns of labels may be of one class.
    """
    source, scores = batch.source, batch.scores
    if len(layout.classes) not in (0, width := max(scores.shape[1], 2)):
        raise TableError(f"{source} names {len(layout.classes)} classes, but has scores of {width}")
    label = None if layout.top_only or label_needed else layout.label
    if label is not None and (to_text(batch.columns[label]) == MISSING).all():
        layout = replace(layout, label=None)
    if one_hot and layout.independent:
        layout = _one_of_each(batch, layout, stated, tolerance)
    if layout.label is not None and layout.predicted is not None:
        true, said = ({*to_text(batch.columns[name])} for name in (layout.label, layout.predicted))
        if len(scores) >= MIN_ROWS and not true & said:
            raise TableError(
                f"{source}: {layout.label!r} and {layout.predicted!r} must call the classes by the same names, got "
                f"{quoted(min(true))} and {quoted(min(said))}"
            )
    elif layout.label is not None and layout.binary and not layout.independent:
        labels = to_text(batch.columns[layout.label])
        layout = _binary_classes(labels, layout, source)
        if "scores" in layout.guessed and stated != "logits":
            _check_binary(scores, labels, layout.scores[0], source)
    if layout.unnamed and layout.label is not None:
        before, layout = layout.scores, _without_others(batch, layout, stated, tolerance)
        scores = scores[:, [before.index(name) for name in layout.scores]]
    return (layout, stated, "") if stated else (layout, *_certain_kind(scores, layout, tolerance, source))


def _one_of_each(batch: Batch, layout: Layout, kind: Kind | None, tolerance: float) -> Layout:
    """The layout with one class for each row where the labels of the first rows are one-hot.

    Not where the scores are probabilities of which each row does not sum to 1: those are of independent labels.
    """
    if layout.label is None and not layout.labels:
        return layout
    labels = values.to_several_labels(batch, layout, batch.scores.shape[1])
    if labels.shape[1] < 2 or (labels.sum(1) != 1).any():
        return layout
    if kind != "logits" and recognise(batch.scores, tolerance) not in ("probabilities", "log-probabilities"):
        return layout
    return replace(layout, independent=False, one_hot=True)


def _check_binary(scores: Array, labels: Array, name: str, source: Source) -> None:
    """Refuse a single score that is 0.5 and more for samples of both classes: it is not that of class 1."""
    low, high = np.nanmin(scores), np.nanmax(scores)
    if len(labels) >= MIN_ROWS and low >= 0.5 and high <= 1 and len(set(labels.tolist()) - {MISSING}) > 1:
        raise TableError(
            f"{source}: no score in {name!r} is below 0.5, so it looks like the confidence in the "
            "predicted class: call it 'confidence' and that class 'predicted', or give --scores if it is of class 1"
        )


def _binary_classes(labels: Array, layout: Layout, source: Source) -> Layout:
    """The layout with the names of no and yes where labels are words: yes is the class in the name of the column."""
    names = {text.casefold(): text for text in set(labels.tolist()) if text != MISSING}
    named = (columns.split_score(layout.scores[0], None)[1] or "").casefold()
    if all(text in values.WORDS or values.is_number(text) for text in names.values()):
        pair = next((pair for pair in columns.NO_YES if pair[0] == named != "n"), None)
        return layout if pair is None else columns.with_classes(layout, pair[::-1])  # it is the score of no
    if named in names and len(names) <= 2:
        no = next((text for folded, text in names.items() if folded != named), f"not {names[named]}")
        return replace(layout, classes=(no, names[named]))
    for pair in columns.NO_YES:
        if {*names} <= {*pair}:
            return replace(layout, classes=tuple(names.get(word, word) for word in pair))
    got = ", ".join(map(quoted, sorted(names.values())[:5]))
    raise TableError(
        f"{source}: labels of a single score must be 0 and 1, got {got} in {layout.label!r}; to say which of them "
        f"{layout.scores[0]!r} is the score of, call it prob_X with the name of the label for X"
    )


def check_groups(layout: Layout, names: Sequence[str]) -> None:
    """Refuse to select or group rows by their label, or by whether they are right."""
    right = [name for name in names if re.fullmatch(columns.CORRECT, columns.plain(name))]
    known = {layout.label, *layout.labels, *right}
    if grouped := known & {*names}:
        raise TableError(
            f"rows cannot be selected or grouped by their label ({grouped.pop()!r}): among the samples of one class, "
            "or those that are right, a calibrated model looks miscalibrated. Group by the predicted class; "
            "`doublehead report` has a table of classes"
        )


def _certain_kind(scores: Array, layout: Layout, tolerance: float, source: Source) -> tuple[Kind, str]:
    """The kind of scores (B, K) where they or the names leave no doubt, and why; else an error."""
    if layout.top_only:
        return "probs", "a confidence"
    several = scores.shape[1] > 1 and not layout.independent
    whole = ~np.isnan(scores).any(1)  # the others are refused when they are read
    scores = scores[whole] if whole.any() else scores
    known = np.nan_to_num(scores)
    usual = (np.abs(known.sum(1, dtype=np.float64) - 1) <= max(tolerance, ROUNDED)) & (
        known.min(1) >= -values.OUTSIDE
    )
    # a few other rows, such as one of totals, are refused when they are read
    found = recognise(scores[usual] if usual.mean() > 0.9 else scores, tolerance) if several else ""
    if found == "probabilities":
        return "probs", "rows sum to 1"
    for kind in NAMED:
        if all(_states(name, kind) for name in layout.scores):
            return kind, CALLED
    if found == "log-probabilities":
        return "logits", found
    if found == "percentages":
        raise TableError(f"{source}: {values.PERCENTAGES}")
    low, high = float(np.nanmin(scores)), float(np.nanmax(scores))
    shape = f"the scores of {source} lie in {low:.4g}..{high:.4g}"
    shape += " and rows do not sum to 1" if several else ""
    if several and low >= 0 and high <= 1:
        does = "name the columns of all classes with --scores, or give --logits if these are logits"
    elif low >= 0 and 1 < high <= 100:
        does = "divide percentages by 100, or give --logits if these are logits"
    else:
        name = "logits" if low < 0 or high > 1 else "probs"
        does = f"this looks like {name}; give --{name} if so"
    raise TableError(f"say whether the scores are logits or probabilities: {shape}; {does}")


def check_names(layout: Layout, kind: Kind, why: str, name: str) -> None:
    """Refuse guessed columns that are called the other kind than was stated: prob_0, ... stated as logits."""
    other: Kind = "probs" if kind == "logits" else "logits"
    called = [
        column for column in layout.scores if column.lower().startswith(other[:-1]) and _states(column, other)
    ]
    if layout.top_only or not called:
        return
    named = f"--{kind} --scores '{called[0][: len(other)]}*'"
    if why and why != CALLED:
        does = f"but {why}: give {named} if they hold {kind}"
    else:
        does = f"but --{kind} was given: give --{other} ({other}:FILE in a report), or {named} if they hold {kind}"
    raise TableError(f"{name} has columns such as {called[0]!r}, {does}")


def _states(column: str, kind: Kind) -> bool:
    """Whether a column is called what holds this kind: logit_0, cat_prob, probs."""
    prefix, of_class = columns.split_score(column, kind)
    return column.lower() in NAMED[kind] or (of_class is not None and prefix in NAMED[kind])


def _without_others(batch: Batch, layout: Layout, kind: Kind | None, tolerance: float) -> Layout:
    """Of score columns without telling names, those that labels name where their rows alone sum to 1.

    Where the labels of the first rows contradict the columns, they are refused.
    """

    def are_probs(scores: Array) -> bool:
        return kind != "logits" and recognise(scores, tolerance) == "probabilities"

    if are_probs(batch.scores):
        return layout  # a class that no label names may have zeros alone
    labels, scores = set(to_text(batch.columns[str(layout.label)]).tolist()), layout.scores
    folded = {label.casefold() for label in labels}
    places = [i for i, name in enumerate(scores) if name.strip().casefold() in folded]
    if 2 <= len(places) < len(scores) and are_probs(batch.scores[:, places]):
        return with_scores(layout, tuple(scores[i] for i in places))
    enough = len(batch.scores) >= ROWS_PER_CLASS * len(scores)  # then a class without any label is unlikely
    if named := labels & set(scores):
        extra = [name for name in scores if name not in named] if enough or kind == "probs" else []
    else:
        numbers = [int(label) for label in labels if label.isdecimal()]
        extra = list(scores[max(numbers) + 1 - (layout.base or 0) :]) if numbers and enough else []
    if extra and len(extra) < len(scores):
        raise TableError(
            f"{batch.source}: the columns of decimal numbers are {', '.join(map(repr, scores[:12]))}, but no label "
            f"in {layout.label!r} stands for {', '.join(map(repr, extra[:12]))}: name the score columns with --scores"
        )
    return layout
