"""Options that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

Logits = Annotated[
    bool,
    typer.Option(
        "--logits",
        metavar="",
        help="The scores are logits (any real numbers, before softmax). Needed where neither the numbers nor the names "
        "of the columns make it certain.",
    ),
]
Probs = Annotated[
    bool, typer.Option("--probs", metavar="", help="The scores are probabilities (each row sums to 1).")
]
Label = Annotated[
    str | None,
    typer.Option(
        help="Column (or array) of the true class: a number, or a class name that matches a score column. "
        "Guessed from names such as label, target, y. Several columns of 0 and 1, as 'y_*' or a,b,c, are labels that "
        "a sample may have at once."
    ),
]
Scores = Annotated[
    str | None,
    typer.Option(
        help="Score columns in the order of the classes, separated by commas; * matches anything: "
        "'logit_*'. One column is the score of class 1 of a binary model. Guessed from names such as "
        "logit_0, prob_cat, or all columns of decimal numbers."
    ),
]
LabelBase = Annotated[
    int | None, typer.Option(help="The label of the first class where labels are numbers: 1 for labels 1..K.")
]
Tolerance = Annotated[
    float,
    typer.Option(
        help="How far the sum of a row's probabilities may be from 1; more is allowed where rounding explains it."
    ),
]
BinCount = Annotated[int, typer.Option("--bins", min=1, help="Bins of equal width for calibration errors.")]
Weights = Annotated[str | None, typer.Option(help="Column of sample weights: how much each row counts.")]
AsJson = Annotated[
    bool, typer.Option("--json", metavar="", help="Print JSON (fractions, not percent) instead of tables.")
]
Force = Annotated[bool, typer.Option("--force", metavar="", help="Replace an output that exists.")]
By = Annotated[
    str | None,
    typer.Option(help="Column whose values are groups: a site, a month; also folders called site=A."),
]
Where = Annotated[
    list[str] | None,
    typer.Option(help="COLUMN=VALUE: only these rows. May be given once for each of several columns."),
]


def how_to_read(
    logits: bool,
    probs: bool,
    label: str | None,
    scores: str | None,
    weights: str | None,
    label_base: int | None,
    tolerance: float,
) -> dict[str, Any]:
    """The options of `files.read_predictions` that every command has."""
    if logits and probs:
        raise ValueError("give one of --logits and --probs, not both")
    return {
        "kind": "logits" if logits else "probs" if probs else None,
        "label": label,
        "scores": scores,
        "weights": weights,
        "base": label_base,
        "tolerance": tolerance,
    }


def parse_pairs(given: Sequence[str], option: str, form: str) -> dict[str, str]:
    """{"site": "A"} from ["site=A"]."""
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"{option} must read {form}, got {text!r}")
        if name in pairs:
            raise ValueError(
                f"{option} must be given once for each {form.partition('=')[0]}, got {name!r} twice"
            )
        pairs[name] = value
    return pairs


def importable_here(model: str | None) -> None:
    """Let `package.module:factory` be imported from the working folder, as with `python -m`.

    An installed script does not search there, so every command that builds a network calls this first. The folder
    is added last, so it hides no installed module.
    """
    if model and ":" in model and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
