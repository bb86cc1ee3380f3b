"""Which columns are the label and the scores: named by the caller, or guessed from their names, which is recorded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache

from doublehead.files.sources import Kind, TableError

LABELS = (  # a `label` beside a `true_label` is the predicted one
    "y_true", "true_label", "truth", "ground_truth", "true_class", "gt", "gold", "human_label",
    "label", "labels", "target", "targets", "y", "actual", "y_test", "true", "category", "class", "human", "expected",
)  # fmt: skip
SEVERAL = ("matrix", "labels")  # what a column of lists of labels may hold
LOGITS = ("logit", "logits")
PROBS = ("prob", "probs", "proba", "probability", "p", "calibrated_prob", "y_prob", "softmax")
SCORES = ("score", "scores", "class", "output", "y_score", "")
PREFIXES = {"logits": (*LOGITS, *SCORES), "probs": (*PROBS, *SCORES), None: (*LOGITS, *PROBS, *SCORES)}
# A file with the predicted class and its confidence alone; of the k best classes only the first is read.
PROBABILITY = r"(prob(ability)?|conf(idence)?)"
PREDICTED = (
    r"(predicted|prediction|pred|y_pred|verdict|decision)(_class|_label)?"
    r"|(pred(icted|iction)?|class|label|top|rank)_?1(_?(class|label|pred|name))?"
)
CONFIDENCE = rf"conf(idence)?|(max|top|pred(icted)?)_{PROBABILITY}|msp|((top|rank)_?1_?)?{PROBABILITY}_?1?"
WHOLE, WHOLE_FLOAT = re.compile(r"-?\d+"), re.compile(r"^(-?\d+)\.0+$")
LAST_NUMBER, FIRST_NUMBER = re.compile(r"(\d+)[)\]]?$"), re.compile(r"(\d+)[_\-. ]")
BETWEEN_WORDS = re.compile(r"[\s\-.]+")
CORRECT = r"(is_)?correct|is_right|hit"
NO_YES = (("no", "yes"), ("negative", "positive"), ("neg", "pos"), ("n", "y"), ("false", "true"))
TOP_LABEL = "|".join((CONFIDENCE, PREDICTED, CORRECT))


@dataclass(frozen=True)
class Layout:
    """The columns that matter and the classes they stand for.

    `scores` are K columns of one number each, one column of lists of K numbers, one column of a binary model's
    single score, or the confidence in the predicted class where nothing else is known. `classes` are the names of the
    classes where the columns have names, else empty. `base` is the label of the first class where labels are numbers,
    None where numbers are names of classes: columns 10, 20, 30, or yes before no.
    Where samples have several labels the scores are `independent`, one for each label, which is 0 or 1: in as many
    columns `labels`, or in lists in `label`.
    """

    label: str | None
    scores: tuple[str, ...]
    classes: tuple[str, ...]
    base: int | None
    guessed: tuple[str, ...] = ()  # which of "label" and "scores"
    binary: bool = False  # one column of a binary model's single score, of class 1
    unnamed: bool = False  # the scores are all columns of decimal numbers, because no names identify them
    predicted: str | None = None  # the score is the confidence in this class
    correct: str | None = None  # the score is the confidence of an answer that was right or not
    labels: tuple[str, ...] = ()
    independent: bool = False
    one_hot: bool = False  # the labels are 0 or 1 for each class, and 1 for one of them
    notes: tuple[str, ...] = ()  # what was found out about the file as a whole

    @property
    def guesses(self) -> tuple[str, ...]:
        """What the caller did not say, in words."""
        found = [*self.notes]
        if self.predicted is not None:
            both = f"predicted class {self.predicted!r} and its confidence {self.scores[0]!r}"
            found.append(f"label column {self.label!r}, {both}")
        if self.correct is not None:
            found.append(f"confidence {self.scores[0]!r} and whether it was right, {self.correct!r}")
        if "label" in self.guessed and self.label is not None:
            found.append(f"label column {self.label!r}")
        if "scores" in self.guessed:
            found.append(f"score {_told(self.scores, 'labels' if self.independent else 'classes')}")
        return (*found, "one-hot labels") if self.one_hot else tuple(found)

    @property
    def top_only(self) -> bool:
        """Whether only the confidence in the predicted class is known."""
        return self.predicted is not None or self.correct is not None

    @property
    def others(self) -> list[str]:
        """The columns that are read besides the scores."""
        named = [name for name in (self.label, self.predicted, self.correct) if name is not None]
        return [*named, *self.labels]


def choose_layout(
    columns: Mapping[str, str],
    where: str,
    kind: Kind | None = None,
    label: str | None = None,
    labels: tuple[str, ...] = (),
    scores: str | Sequence[str] | None = None,
    base: int | None = None,
    taken: Sequence[str] = (),
    label_needed: bool = True,
    independent: bool = False,
) -> Layout:
    """The layout of a file called `where` with these columns (name -> what it holds), of which some are `taken`.

    >>> columns = {"id": "whole", "y": "whole", "logit_1": "number", "logit_0": "number"}
    >>> found = choose_layout(columns, "a.csv", "logits")
    >>> found.label, found.scores, found.guesses
    ('y', ('logit_0', 'logit_1'), ("label column 'y'", "score columns 'logit_0' .. 'logit_1' (2 classes)"))
    """
    guessed: tuple[str, ...] = ()
    if label is None and not labels:
        label = find([name for name in columns if not independent or columns[name] in SEVERAL], LABELS)
        guessed = ("label",) if label != "labels" else ()
    elif label is not None and label not in columns:
        if label_needed:
            raise TableError(f"{where} has no column {label!r} for the label, it has {listed(columns)}")
        label = None
    independent = independent or bool(labels) or columns.get(label or "") in SEVERAL
    if not independent and scores is None and kind != "logits":
        # Also where rows are grouped by the predicted class.
        rest = {name: columns[name] for name in columns if name != label}
        if (top_only := _top_label(rest, where, kind, label)) is not None:
            return top_only
    if label is None and label_needed and not labels:
        raise TableError(
            f"{where} has no column that looks like the label: name it with label (on the command line --label), "
            f"it has {listed(columns)}"
        )
    left = {name: holds for name, holds in columns.items() if name not in (label, *labels, *taken)}
    unnamed = False
    if scores is not None:
        chosen = named_columns(split_names(scores, left), left, where, "scores")
    else:
        family = score_family(left, where, kind)
        chosen = family or _guess_scores(left, where, kind)
        unnamed = family is None and len(chosen) > 1
        guessed += ("scores",) if chosen != (kind,) else ()
    binary = len(chosen) == 1 and columns[chosen[0]] != "matrix"
    layout = Layout(label, (), (), 0, guessed, binary, unnamed, labels=labels, independent=independent)
    return with_scores(layout, chosen, base)


def with_scores(layout: Layout, scores: tuple[str, ...], base: int | None = None) -> Layout:
    """The layout with other score columns."""
    return with_classes(replace(layout, scores=scores), class_names(scores), base)


def with_classes(layout: Layout, classes: tuple[str, ...], base: int | None = None) -> Layout:
    """The layout with these classes; their names may be numbers, which labels are then too, unless `base` is given."""
    for names in (layout.labels, without_prefix(layout.labels)):
        if names and sorted(names) == sorted(classes):  # each label belongs to the score of its name
            layout = replace(layout, labels=tuple(layout.labels[names.index(name)] for name in classes))
    numbers = no_yes(classes) or [int(name) for name in classes if WHOLE.fullmatch(name)]
    first: int | None = 0
    if numbers:
        first = numbers[0] if numbers == [*range(numbers[0], numbers[0] + len(classes))] else None
    return replace(layout, classes=classes, base=first if base is None else base)


def no_yes(classes: tuple[str, ...]) -> list[int]:
    """0 for no and 1 for yes where these are the two classes, as labels may call them, else nothing.

    >>> no_yes(("True", "False")), no_yes(("cat", "dog"))
    ([1, 0], [])
    """
    folded = [name.casefold() for name in classes]
    return next(
        ([pair.index(name) for name in folded] for pair in NO_YES if sorted(pair) == sorted(folded)), []
    )


def in_order(layout: Layout, classes: Sequence[str]) -> Layout | None:
    """The layout with its columns in the order of these classes, by their names; None where they cannot be put so."""
    if not classes or not layout.classes or tuple(classes) == layout.classes:
        return layout
    ours, theirs = ({name.casefold() for name in names} for names in (classes, layout.classes))
    if ours != theirs or not len(ours) == len(classes) == len(layout.scores) == len(layout.classes):
        return None
    columns = dict(zip(map(str.casefold, layout.classes), layout.scores))
    return with_scores(layout, tuple(columns[name.casefold()] for name in classes))


def label_columns(
    label: str | Sequence[str] | None, columns: Mapping[str, str], where: str, needed: bool
) -> tuple[str | None, tuple[str, ...]]:
    """The label column, or several of them; neither where several are named, not needed and missing."""
    if label is None or (isinstance(label, str) and (label in columns or not set(label) & set("*?,"))):
        return label, ()
    names = split_names(label, columns)
    try:
        found = named_columns(names, columns, where, "labels")
    except TableError:
        if needed:
            raise
        return None, ()
    return (found[0], ()) if len(found) == 1 else (None, found)


def split_names(names: str | Sequence[str], columns: Mapping[str, str]) -> Sequence[str]:
    """Names that may be one text, separated by commas unless it is the name of a column itself."""
    if not isinstance(names, str):
        return names
    return [names] if names in columns else [name.strip() for name in names.split(",")]


def plain(name: str) -> str:
    """`true_class` from `True Class`."""
    return BETWEEN_WORDS.sub("_", name.strip().lower())


def find(columns: Iterable[str], wanted: Sequence[str]) -> str | None:
    """The first column with one of the names wanted, the earlier ones preferred."""
    found: dict[str, str] = {}
    for name in columns:
        if (short := plain(name)) in wanted:
            found.setdefault(short, name)
    return next((found[name] for name in wanted if name in found), None)


def _top_label(columns: Mapping[str, str], where: str, kind: str | None, label: str | None) -> Layout | None:
    """The layout of a file without scores of all classes: the confidence, and the predicted class or `correct`."""
    names = {name: short for name in columns if re.fullmatch(TOP_LABEL, short := plain(name))}
    names = {name: short for name, short in names.items() if columns[name] != "matrix"}
    confidence, predicted, correct = (
        next((name for name, short in names.items() if re.fullmatch(pattern, short)), None)
        for pattern in (CONFIDENCE, PREDICTED, CORRECT)
    )
    if label is not None and {"label", "score"} <= {*columns}:  # as pipelines of Transformers answer
        predicted, confidence = predicted or "label", confidence or "score"
    if confidence is None or columns[confidence] not in ("number", "whole"):
        return None
    ranked = predicted is not None and "1" in predicted
    if ranked:  # counted from 0 where there is a class 0 too
        ranked = find(columns, [plain(str(predicted)).replace("1", "0")]) is None
    if not ranked and (plain(confidence) in PROBS or score_family(columns, where, kind) is not None):
        return None  # `prob` may be that of class 1
    if label is not None and predicted is not None:
        return Layout(label, (confidence,), (), 0, predicted=predicted)
    if correct is not None:
        return Layout(None, (confidence,), (), 0, correct=correct)
    return None


def named_columns(names: Sequence[str], columns: Mapping[str, str], where: str, what: str) -> tuple[str, ...]:
    """The columns named, a name with * or ? standing for all that match it, in the order of their numbers."""
    found: list[str] = []
    for name in names:
        matches = [name] if name in columns else [c for c in columns if fnmatchcase(c, name)]
        numbers = {match: _number(match) for match in matches}
        matches.sort(key=lambda match: (numbers[match] is None, numbers[match] or 0))
        if not matches:
            raise TableError(f"{where} has no column {name!r} for the {what}, it has {listed(columns)}")
        found += matches
    if not found:
        raise TableError(f"{what} must name at least one column, got none")
    return tuple(dict.fromkeys(found))


def score_family(columns: Mapping[str, str], where: str, kind: str | None) -> tuple[str, ...] | None:
    """The columns whose names mark them as scores (logit_0, cat_prob, ... or lists of numbers), None without such."""
    known = PREFIXES[kind]
    lists = {name.lower(): (name,) for name, holds in columns.items() if holds == "matrix"}
    if len(lists) == 1:
        return next(iter(lists.values()))
    classes: dict[str, dict[str, str]] = {}  # by prefix and column
    for name in columns:
        prefix, of_class = split_score(name, kind)
        if of_class is not None:
            classes.setdefault(prefix, {})[name] = of_class
    numbered: dict[str, tuple[str, ...]] = {}
    named: dict[str, tuple[str, ...]] = {}
    for prefix, found in classes.items():
        numbers = {name: int(text) for name, text in found.items() if WHOLE.fullmatch(text)}
        if _consecutive(numbers.values()):
            numbered[prefix] = tuple(sorted(numbers, key=numbers.__getitem__))
        others = [name for name in found if prefix not in numbered or name not in numbers]
        if len(others) >= 2 and prefix:
            named[prefix] = tuple(others)
    for family in (lists, numbered, named):
        # one that says what it holds goes before "score_0", "class_0" or a bare number
        prefixes = [p for p in known if p in family and p not in SCORES] or [p for p in known if p in family]
        if len(prefixes) > 1:
            raise TableError(
                f"{where} has several sets of score columns ({', '.join(family[p][0] for p in prefixes)}, ...): "
                "name one with --scores, such as --scores 'prob_*'"
            )
        if prefixes:
            return family[prefixes[0]]
    return None


def _guess_scores(columns: Mapping[str, str], where: str, kind: str | None) -> tuple[str, ...]:
    """The score columns where no names identify them as a set."""
    known = PREFIXES[kind]
    decimal = [name for name, holds in columns.items() if holds == "number"]
    single = [name for name in decimal if name.lower().rstrip("_1") in known[:-1]]
    if not decimal:  # percentages, or 0 and 1 alone
        single = [
            name for name, holds in columns.items() if holds == "whole" and name.lower() in (*LOGITS, *PROBS)
        ]
    if len(decimal) == 1 and split_score(decimal[0], kind)[0] in (*LOGITS, *PROBS):
        single = decimal  # prob_yes
        of_class = split_score(decimal[0], kind)[1] or "1"
        if WHOLE.fullmatch(of_class) and int(of_class) != 1:
            raise TableError(
                f"{where} has one score column, {decimal[0]!r}, and a single score must be that of class 1: name the "
                "columns of all classes with --scores"
            )
    if len(single) == 1:
        return (single[0],)
    if len(decimal) >= 2:  # whole numbers between them are scores too: zeros alone are written as 0
        names = list(columns)
        among = names[names.index(decimal[0]) : names.index(decimal[-1]) + 1]
        return tuple(name for name in among if columns[name] in ("number", "whole"))
    found = [name for name in columns if re.fullmatch(CONFIDENCE, plain(name))]
    hint = f"; rename the column of the class that {found[0]!r} is about to 'predicted'" if found else ""
    raise TableError(
        f"{where} has no columns that look like scores: name them with --scores, it has {listed(columns)}{hint}"
    )


@cache
def _score_pattern(kind: str | None) -> re.Pattern[str]:
    words = "|".join(sorted(filter(None, PREFIXES[kind]), key=len, reverse=True))
    forms = (
        r"(?P<number>-?\d+(?:\.0+)?)",
        rf"(?P<p>{words})[(\[](?:\w+\s*=\s*)?(?P<bracketed>.+)[)\]]",
        rf"(?P<q>{words})(?:[_\-. ]|(?=\d))(?P<after>.+)",
        rf"(?P<before>.+)[_\-. ](?P<r>{words})",
    )
    return re.compile("|".join(forms), re.IGNORECASE)


def split_score(name: str, kind: str | None) -> tuple[str, str | None]:
    """The prefix and the class of the name of a score column; no class where it is not one.

    A class called 2.0, as in a DataFrame whose columns are `classes_` of a model fitted to floats, is 2.

    >>> split_score("prob_cat", "probs"), split_score("Prob(y=cat)", "probs"), split_score("cat_prob", "probs")
    (('prob', 'cat'), ('prob', 'cat'), ('prob', 'cat'))
    """
    found = _score_pattern(kind).fullmatch(name)
    if found is None:
        return name, None
    prefix = found["p"] or found["q"] or found["r"] or ""
    of_class = found["number"] or found["bracketed"] or found["after"] or found["before"]
    return prefix.lower(), WHOLE_FLOAT.sub(r"\1", of_class)


def _number(name: str) -> int | None:
    """3 from "logit_3", "Prob(3)" or "3_prob"."""
    if WHOLE.fullmatch(name):
        return int(name)
    found = LAST_NUMBER.search(name) or FIRST_NUMBER.match(name)
    return int(found[1]) if found else None


def _consecutive(numbers: Iterable[int | None]) -> bool:
    """Whether the numbers, in any order, are all from the smallest to the largest; a None is left out."""
    found = sorted(number for number in numbers if number is not None)
    return len(found) >= 2 and found == list(range(found[0], found[0] + len(found)))


def class_names(scores: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the classes: those of the columns, a known prefix taken off."""
    if len(scores) == 1:
        return ()
    numbers = [_number(name) for name in scores]
    same = len({re.sub(r"\d+(?=\D*$)", "", name) for name in scores}) == 1  # apart from the number
    if same and None not in numbers and _consecutive(numbers):
        return tuple(map(str, numbers))
    split = [split_score(name, None) for name in scores]
    classes = [of_class for _, of_class in split if of_class is not None]
    if len(classes) == len(scores) and len({prefix for prefix, _ in split}) == 1:
        return tuple(classes)
    if len({name.rpartition(".")[0] for name in scores}) == 1:  # entries of a nested object
        return tuple(name.rpartition(".")[2] for name in scores)
    return scores


def without_prefix(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names without what all begin with, up to a separator: a and b from y_a and y_b."""
    shared = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071
    end = max(shared.rfind(mark) for mark in "_-. :/") + 1
    return tuple(name[end:] for name in names)


def _told(scores: tuple[str, ...], what: str) -> str:
    if len(scores) == 1:
        return f"column {quoted(scores[0])}"
    few = len(scores) <= 4 and not _consecutive(map(_number, scores))
    names = ", ".join(map(quoted, scores)) if few else f"{quoted(scores[0])} .. {quoted(scores[-1])}"
    return f"columns {names} ({len(scores)} {what})"


def listed(columns: Mapping[str, str]) -> str:
    """The names of the columns, the first ten where there are many."""
    names = [quoted(name) for name in columns]
    few = names if len(names) <= 12 else [*names[:10], f"... ({len(names)} columns)"]
    return ", ".join(few) or "no other columns"


def quoted(name: str) -> str:
    """A name in a message; the beginning of a long one."""
    return repr(name if len(name) <= 60 else f"{name[:57]}...")
