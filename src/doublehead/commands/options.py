"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from doublehead.commands.errors import UserError
from doublehead.tables.reading import PredictionTable, TableError, read_predictions

Logits = Annotated[
    bool, typer.Option("--logits", help="The scores are logits (any real numbers, before softmax).")
]
Probs = Annotated[bool, typer.Option("--probs", help="The scores are probabilities (each row sums to 1).")]
Label = Annotated[
    str | None,
    typer.Option(
        help="Column (or array) of the true class: a number, or a name that a score column bears. "
        "Guessed from names such as label, target, y."
    ),
]
Scores = Annotated[
    str | None,
    typer.Option(
        help="Score columns in the order of the classes, separated by commas; * stands for anything: "
        "'logit_*'. One column is the score of class 1 of a binary model. Guessed from names such as "
        "logit_0, prob_cat, or all columns of decimal numbers."
    ),
]
LabelBase = Annotated[
    int | None, typer.Option(help="The label of the first class where labels are numbers: 1 for labels 1..K.")
]
Tolerance = Annotated[
    float, typer.Option(help="How far from 1 the probabilities of a row may sum (rounded files).")
]
BinCount = Annotated[int, typer.Option("--bins", min=1, help="Bins of equal width for calibration errors.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON (fractions, not percent) instead of tables.")
]


def stated_kind(logits: bool, probs: bool) -> Literal["logits", "probs"] | None:
    """What the flags state; None where neither is given."""
    if logits and probs:
        raise UserError("give one of --logits and --probs, not both")
    return "logits" if logits else "probs" if probs else None


def open_table(
    paths: Sequence[Path | str], *, scores: str | None, like: Sequence[str] | None = None, **how: Any
) -> PredictionTable:
    """A table from the options as they were given.

    Where they name no scores and what is found are the columns `like`, these are taken in that order; where none are
    found, they are tried. Columns found by themselves must not be called the other kind than was stated.
    """
    table = open_any(paths, scores=scores, like=like, **how)
    if scores is None and (first := misnamed(table)) is not None:
        raise UserError(
            f"{table.name} has columns such as {first!r}, but --{table.kind} is given: state --{other_kind(table)}, "
            f"or name the columns with --scores if they are {table.kind} all the same"
        )
    return table


def other_kind(table: PredictionTable) -> str:
    """The kind of scores that was not stated."""
    return "probs" if table.kind == "logits" else "logits"


def misnamed(table: PredictionTable) -> str | None:
    """The first score column if all of them are called the other kind than was stated: prob_0, ... under --logits."""
    if all(name.lower().startswith(other_kind(table)[:-1]) for name in table.layout.scores):
        return str(table.layout.scores[0])
    return None


def open_any(
    paths: Sequence[Path | str], *, scores: str | None, like: Sequence[str] | None = None, **how: Any
) -> PredictionTable:
    """The same whatever the columns are called."""
    names = None if scores is None else [name.strip() for name in scores.split(",") if name.strip()]
    try:
        table = read_predictions(list(paths), scores=names, **how)
    except TableError:
        if names is not None or like is None:
            raise
        return read_predictions(list(paths), scores=like, **how)
    if names is None and like is not None and sorted(like) == sorted(table.layout.scores):
        return read_predictions(list(paths), scores=like, **how)
    return table


def parse_where(filters: Sequence[str]) -> dict[str, str]:
    """{"site": "A"} from ["site=A"]."""
    pairs = {}
    for text in filters:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--where must read COLUMN=VALUE, got {text!r}")
        pairs[name] = value
    return pairs
