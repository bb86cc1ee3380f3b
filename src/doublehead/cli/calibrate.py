"""`doublehead calibrate`: fit a calibrator on one file and apply it to another."""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

import doublehead
from doublehead import calibrators
from doublehead.atomic import replacing
from doublehead.calibrators import CALIBRATORS, Calibrator
from doublehead.cli import options
from doublehead.cli.output import UserError, notes, progress, show, show_guesses, told_to_user
from doublehead.files.formats import TableError
from doublehead.files.reading import Chunk, PredictionTable, read_predictions
from doublehead.files.writing import check_output, write_calibrated
from doublehead.predictions import Predictions
from doublehead.summary import Summary, Tally, side_by_side


def calibrate(
    apply: Annotated[
        list[str],
        typer.Option("--apply", help="Predictions to calibrate, with labels or without.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, or folder for several.", show_default=False)
    ],
    fit: Annotated[
        list[str] | None,
        typer.Option("--fit", help="Labelled predictions to fit on, which the model was not trained on."),
    ] = None,
    use: Annotated[
        Path | None,
        typer.Option("--use", help="A calibrator written earlier (.safetensors), instead of --fit."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(CALIBRATORS)}; or auto: the best by cross-validated NLL on --fit."
        ),
    ] = "head",
    logits: options.Logits = False,
    probs: options.Probs = False,
    label: options.Label = None,
    scores: options.Scores = None,
    weights: options.Weights = None,
    bins: options.BinCount = 15,
    as_json: options.AsJson = False,
    label_base: options.LabelBase = None,
    tolerance: options.Tolerance = 1e-3,
) -> None:
    """Fit a calibrator on one file and apply it to another.

    Writes calibrated probabilities in the format of the input, with all other columns unchanged (a column logit_3
    becomes prob_3), and beside it the fitted calibrator: OUTPUT.calibrator.safetensors and .json. Prints the numbers
    before and after where --apply has labels. Nothing is written unless everything succeeds.

    Examples:

        doublehead calibrate --fit val.csv --apply test.csv --logits -o repaired.csv

        doublehead calibrate --fit val.parquet --apply new/ --probs --method auto -o repaired/

        doublehead calibrate --use repaired.calibrator.safetensors --apply tomorrow.csv --logits -o tomorrow_fixed.csv
    """
    how: dict[str, Any] = {
        "kind": options.stated_kind(logits, probs),
        "label": label,
        "scores": options.split_names(scores),
        "base": label_base,
        "tolerance": tolerance,
    }
    with told_to_user():
        _check_method(method)
        if (fit is None or not fit) == (use is None):
            raise UserError(
                "give either --fit FILE (predictions to fit on) or --use FILE (a saved calibrator)"
            )
        if use is not None:
            repair, fitted = _load(use, apply, how)
            check_output(output, repair)
        else:
            learn = read_predictions(fit or [], weights=weights, **how)
            repair = _open_like(learn, apply, how)
            check_output(output, repair, learn)
            if {source.path.resolve() for source in learn.sources} & {
                s.path.resolve() for s in repair.sources
            }:
                typer.echo(
                    "Warning: --fit and --apply share a file, so the numbers after are too good", err=True
                )
            fitted = _fit(method, learn)
        _repair(repair, fitted, output, bins, as_json)


class Fitted(NamedTuple):
    """A calibrator, where it comes from and why it is this one."""

    method: str
    calibrator: Calibrator
    why: str
    n_classes: int
    facts: dict[str, Any]
    saves: bool = True


def _check_method(method: str) -> None:
    names = ["auto", *CALIBRATORS]
    if method not in names:
        near = difflib.get_close_matches(method, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--method must be one of {', '.join(names)}, got {method!r}{hint}")


def _open_like(learn: PredictionTable, paths: list[str], how: dict[str, Any]) -> PredictionTable:
    """The table to calibrate: with the columns of `learn` where it has them; the classes must agree."""
    how = {**how, "kind": how["kind"] or learn.kind}
    table = read_predictions(paths, label_needed=False, like=learn, **how)
    ours, theirs = learn.layout.classes, table.layout.classes
    if ours and theirs and ours != theirs:
        raise TableError(
            f"the classes of {table.sources[0]} ({_few(theirs)}) must be those of {learn.sources[0]} ({_few(ours)}) "
            "in the same order: name the columns with --scores"
        )
    show_guesses(learn)
    if table.layout.scores != learn.layout.scores:
        show_guesses(table)
    return table


def _few(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 5 else [*names[:4], "..."])


def _fit(method: str, learn: PredictionTable) -> Fitted:
    known, zero_floor = _without_zeros(learn.load(), learn.name)
    facts: dict[str, Any] = {
        "reads": learn.kind,
        "n_classes": known.n_labels or known.n_classes,
        "classes": list(learn.layout.classes),
        "zero_floor": zero_floor,
        "fitted_on": {"files": [str(source) for source in learn.sources], "n": len(known)},
    }
    doing = "cross-validating calibrators" if method == "auto" else f"fitting {method}"
    with _convergence_warnings(), notes().status(f"{doing} on {len(known):,} predictions"):
        try:
            if method == "auto":
                calibrator, choice = calibrators.choose_calibrator(known)
                facts["cross_validation"] = {"nll": _without_nan(choice.nlls), "notes": choice.notes}
                why = f"Of {len(choice.nlls)} methods {choice}."
                return Fitted(choice.chosen, calibrator, why, known.n_classes, facts)
            calibrator = doublehead.calibrate(known, method=method)
        except (TypeError, ValueError) as error:
            raise UserError(f"{method} cannot be fitted on {learn.name}: {error}") from error
    learned = calibrator.in_words()
    why = f"Fitted {method} on {len(known):,} predictions" + (f": {learned}." if learned else ".")
    return Fitted(method, calibrator, why, known.n_labels or known.n_classes, facts)


def _without_zeros(p: Predictions, name: str) -> tuple[Predictions, float | None]:
    """Probabilities of exactly 0 are below the resolution of the file: replace them by smallest positive value / K."""
    if not p.are_probs:
        return p, None
    probs = p.probs
    zero = probs == 0
    floor = float(probs[~zero].min()) / p.n_classes
    if bool(zero.any()):
        n = int(zero.any(1).sum())
        notes().print(
            f"{name}: {n:,} of {len(p):,} rows hold probabilities of 0, taken as {floor:.2g}", style="dim"
        )
        n_labels = p.n_labels
        p = Predictions.from_probs(fill_zeros(probs, floor), p.labels, p.weights, tolerance=1.0)
        p.n_labels = n_labels
    return p, floor


def fill_zeros(probs: torch.Tensor, floor: float | None) -> torch.Tensor:
    """The probabilities (N, K) with `floor` in place of 0, at least the smallest normal number."""
    return probs.where(probs > 0, max(floor or 0.0, torch.finfo(probs.dtype).tiny))


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """For JSON, which has no nan: None instead."""
    return {name: None if value != value else value for name, value in values.items()}  # noqa: PLR0124


def _load(use: Path, paths: list[str], how: dict[str, Any]) -> tuple[PredictionTable, Fitted]:
    """A calibrator written by this command and the table to apply it to."""
    try:
        calibrator = calibrators.load(use)
        about = json.loads(use.with_suffix(".json").read_bytes())
        n_classes, reads, classes = int(about["n_classes"]), about["reads"], tuple(about["classes"])
    except (ValueError, KeyError) as error:
        raise UserError(f"{use} is not a calibrator written by this command: {error}") from error
    if how["kind"] not in (None, reads):
        raise UserError(f"{use} was fitted on {reads}, but {how['kind']} were stated")
    several = isinstance(calibrator, calibrators.PerLabel)
    table = read_predictions(paths, label_needed=False, independent=several, **how)
    if classes and table.layout.classes and classes != table.layout.classes:
        raise UserError(
            f"the classes of {table.name} must be those of {use} in the same order: {', '.join(classes)}"
        )
    show_guesses(table)
    why = f"Using {about['method']} from {use}."
    return table, Fitted(about["method"], calibrator, why, n_classes, about, saves=False)


def _repair(repair: PredictionTable, fitted: Fitted, output: Path, n_bins: int, as_json: bool) -> None:
    """Write everything, then show what changed."""
    before, after, changed, written = _write(repair, fitted, output, n_bins)
    if as_json:
        numbers = {"before": before and before.to_dict(), "after": after and after.to_dict()}
        facts = {
            "method": fitted.method,
            "why": fitted.why,
            **fitted.facts,
            "changed": changed,
            "written": written,
        }
        print(json.dumps({**facts, **numbers}, indent=2))
        return
    show(fitted.why)
    if before is None or after is None:
        show(f"{repair.name} has no labels, so nothing is measured.")
    else:
        table = side_by_side({"before": before, "after": after})
        show(f"\n{repair.name}: {before.n:,} predictions\n\n{table}\n\n{after.verdict}")
    show(f"The predicted class changed in {changed:,} rows." if changed else "No predicted class changed.")
    show("Wrote " + ", ".join(written))


def _write(
    repair: PredictionTable, fitted: Fitted, output: Path, n_bins: int
) -> tuple[Summary | None, Summary | None, int, list[str]]:
    """Write all files or none; returns the numbers before and after, the changed rows and the names of the files."""
    tallies: dict[str, Tally] = {}
    changed = 0

    def calibrated(chunk: Chunk) -> torch.Tensor:
        nonlocal changed
        probs = _apply(fitted, chunk.scores, repair)
        changed += _n_changed(chunk.scores, probs, fitted.calibrator, repair)
        if chunk.predictions is not None:
            groups = chunk.groups if chunk.predictions.n_labels else None
            fixed = _with_probs(chunk.predictions, probs)
            for name, p in (("before", chunk.predictions), ("after", fixed)):
                part = Tally.of(p, n_bins, groups)
                tallies[name] = tallies[name] + part if name in tallies else part
        return probs

    with replacing(output) as table:
        with progress("calibrating", repair.n_bytes) as advance:
            write_calibrated(repair, table, calibrated, advance)
        before, after = (tallies[name].summary() if name in tallies else None for name in ("before", "after"))
        written = _save(repair, fitted, output, before, after) if fitted.saves else []
    return before, after, changed, [str(output), *written]


def _save(
    repair: PredictionTable, fitted: Fitted, output: Path, before: Summary | None, after: Summary | None
) -> list[str]:
    """The calibrator beside the output, its .json with the facts about it."""
    stem = re.sub(r"\.(csv|tsv|parquet|npz|npy)(\.gz)?$", "", output.name)
    weights = output.with_name(f"{stem}.calibrator.safetensors")
    description = weights.with_suffix(".json")
    facts = {
        **fitted.facts,
        "why": fitted.why,
        "applied_to": [str(source) for source in repair.sources],
        "before": before and before.to_dict(),
        "after": after and after.to_dict(),
        "versions": {"doublehead": doublehead.__version__, "torch": torch.__version__},
    }
    with replacing(weights) as tensors, replacing(description) as text:
        calibrators.save(fitted.calibrator, tensors)
        about = json.loads(tensors.with_suffix(".json").read_bytes())
        text.write_text(json.dumps({**about, **facts}, indent=2) + "\n", encoding="utf-8")
    return [str(weights), str(description)]


def _apply(fitted: Fitted, scores: torch.Tensor, table: PredictionTable) -> torch.Tensor:
    """Scores (B, K) as stated -> calibrated probs (B, K) in their own type, normalised in float64."""
    if scores.shape[1] != fitted.n_classes:
        raise TableError(
            f"{table.name} has scores of {scores.shape[1]} classes, the calibrator was fitted on {fitted.n_classes}"
        )
    several = isinstance(fitted.calibrator, calibrators.PerLabel)
    if several:  # each score as those of no and yes
        no = 1 - scores if table.kind == "probs" else torch.zeros_like(scores)
        scores = torch.stack([no, scores], -1).reshape(-1, 2)
    logits = scores
    if table.kind == "probs":
        logits = fill_zeros(scores, fitted.facts.get("zero_floor")).log()
    with torch.no_grad():
        calibrated: torch.Tensor = fitted.calibrator(logits)
    probs = calibrated.double().softmax(1).to(scores.dtype)
    return probs[:, 1].reshape(-1, fitted.n_classes) if several else probs


def _n_changed(
    scores: torch.Tensor, probs: torch.Tensor, calibrator: Calibrator, table: PredictionTable
) -> int:
    """The rows whose predicted class, or any of their labels, is another now."""
    if isinstance(calibrator, calibrators.PerLabel):
        edge = 0.5 if table.kind == "probs" else 0.0
        return int(((probs > 0.5) != (scores > edge)).any(1).sum())
    return int((probs.argmax(1) != scores.argmax(1)).sum())


def _with_probs(p: Predictions, probs: torch.Tensor) -> Predictions:
    """The calibrated probabilities with the labels and weights of the predictions."""
    if p.n_labels is None:
        return Predictions.from_probs(probs, p.labels, p.weights)
    weights = None if p.weights is None else p.weights.reshape(-1, p.n_labels)
    return Predictions.multilabel(probs, p.labels.reshape(-1, p.n_labels), weights, are_probs=True)


@contextmanager
def _convergence_warnings() -> Iterator[None]:
    """Print the warning of a fit that did not converge in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, calibrators.NotConverged):
            typer.echo(f"Warning: {warning.message}", err=True)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
