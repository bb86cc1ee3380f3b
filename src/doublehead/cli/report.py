"""`doublehead report`: one HTML page about the calibration of predictions."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from doublehead import audit
from doublehead.cli import options
from doublehead.cli.output import show, show_counts, show_guesses
from doublehead.cli.shift import read_features
from doublehead.files.writing import check_file
from doublehead.shift_guard import watch


def report(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Predictions, one method each: .npz, .csv, .parquet, pairs of .npy in a folder, or run folders "
            "(every output of the run on its test set). NAME=FILE names a method; logits:FILE or probs:FILE states "
            "the kind of one file where they differ.",
            metavar="[NAME=]INPUT",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write, .html.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    classes: Annotated[
        Path | None, typer.Option(help="Text file with the names of the classes, one per line.")
    ] = None,
    shift: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE: the same model on shifted data; with several methods a folder whose files have the "
            "names of the methods. May be given several times.",
        ),
    ] = None,
    features: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            help="Features of the calibration data and of new data: shows whether these raise an alarm, as "
            "`doublehead shift` does.",
            metavar="CALIB NEW",
        ),
    ] = None,
    logits: options.Logits = False,
    probs: options.Probs = False,
    label: options.Label = None,
    scores: options.Scores = None,
    bins: options.BinCount = 15,
    label_base: options.LabelBase = None,
    tolerance: options.Tolerance = 1e-3,
    by: options.By = None,
    weights: options.Weights = None,
    time: Annotated[
        str | None, typer.Option(help="Column of times (dates or numbers): shows whether the model drifts.")
    ] = None,
    force: options.Force = False,
) -> None:
    """Write one HTML page about the calibration of predictions.

    The page works offline and in print: verdict, reliability diagrams with the band of a perfectly calibrated model,
    metrics with intervals, methods side by side, classes, groups and times that deviate, the most confident errors, a
    slider for when to abstain, and where the numbers come from. Put the method to improve on first.

    Examples:

        doublehead report test.csv --by site --time taken -o report.html
        doublehead report before=test.csv after=probs:new.csv --logits
        doublehead report runs/cifar10-resnet50 --title "ResNet-50 on CIFAR-10"
    """
    audit.check_page_path(output, "--output")
    check_file(output, force)
    how = options.how_to_read(logits, probs, label, scores, weights, label_base, tolerance)
    found = audit.collect([_split_name(text) for text in inputs], n_bins=bins, by=by, time=time, **how)
    for table in found.tables:
        show_guesses(table)
        show_counts(table)
    moved = options.parse_pairs(shift or [], "--shift", "NAME=FILE")
    clean = read_features(features[0]) if features else None
    windows = list(watch(clean, read_features(features[1], clean))) if features and clean is not None else []
    page = found.page(
        title=title,
        classes=_read_classes(classes) if classes else None,
        shift=audit.read_shifts(moved, found.methods, n_bins=bins, **how),
        windows=windows,
        command=shlex.join(["doublehead", *sys.argv[1:]]),
    )
    audit.write_page(output, page)
    show(page.verdict)
    if windows:
        show(windows[-1].sentence)
    show(f"Wrote {output}")


def _split_name(text: str) -> tuple[str, str]:
    """(name, input) from [NAME=]INPUT; a path that exists is taken as it is."""
    name, equals, rest = text.partition("=")
    return ("", text) if Path(text).exists() or not equals else (name, rest)


def _read_classes(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be a text file in UTF-8, one class per line: {error}") from error
