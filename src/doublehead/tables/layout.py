"""Which column is the label and which are the scores: named by the user, or guessed from names, the guess told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from doublehead.tables.files import TableError

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
    if scores is None:
        found = _guess_scores(left, where, kind)
        if found != (kind,):
            guesses.append(f"score {_told(found)}")
    else:
        found = _named_scores(scores, left, where)
    classes, first = _classes(found)
    binary = len(found) == 1 and columns[found[0]] != "matrix"
    return Layout(label, found, classes, first if base is None else base, tuple(guesses), binary)


def _named_scores(names: Sequence[str], columns: Mapping[str, str], where: str) -> tuple[str, ...]:
    """The columns named, a name with * or ? standing for all that match it, in the order of their numbers."""
    found: list[str] = []
    for name in names:
        matches = [name] if name in columns else _by_number([c for c in columns if fnmatchcase(c, name)])
        if not matches:
            raise TableError(f"{where} has no column {name!r} for the scores, it has {_listed(columns)}")
        found += matches
    return tuple(dict.fromkeys(found))


def _guess_scores(columns: Mapping[str, str], where: str, kind: str | None) -> tuple[str, ...]:
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
