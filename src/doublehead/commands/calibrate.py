"""`doublehead calibrate`: repair the confidences of one file with what another one teaches."""

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
from doublehead.calibrators import CALIBRATORS, Calibrator
from doublehead.commands import options
from doublehead.commands.errors import UserError, told_to_user
from doublehead.predictions import Predictions
from doublehead.tables.files import TableError
from doublehead.tables.reading import Chunk, PredictionTable
from doublehead.tables.tally import Summary, Tally


def calibrate(
    apply: Annotated[
        list[str],
        typer.Option("--apply", help="Predictions to repair, with labels or without.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, or folder for several.", show_default=False)
    ],
    fit: Annotated[
        list[str] | None,
        typer.Option("--fit", help="Labelled predictions to learn from, which the model was not trained on."),
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
    ] = "temperature",
    logits: options.Logits = False,
    probs: options.Probs = False,
    label: options.Label = None,
    scores: options.Scores = None,
    bins: options.BinCount = 15,
    as_json: options.AsJson = False,
    label_base: options.LabelBase = None,
    tolerance: options.Tolerance = 1e-3,
) -> None:
    """Repair the confidences of one file with what another one teaches.

    Writes calibrated probabilities in the format of the input, all other columns as they were (a column logit_3
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
        "scores": scores,
        "base": label_base,
        "tolerance": tolerance,
    }
    with told_to_user():
        _check_method(method)
        if (fit is None or not fit) == (use is None):
            raise UserError(
                "give either --fit FILE (predictions to learn from) or --use FILE (a saved calibrator)"
            )
        if use is not None:
            repair, fitted = _load(use, apply, how)
            _check_output(output, repair)
        else:
            learn = options.open_table(fit or [], **how)
            repair = _open_like(learn, apply, how)
            _check_output(output, repair, learn)
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


def _check_output(output: Path, repair: PredictionTable, *others: PredictionTable) -> None:
    from doublehead.tables.writers import check_output

    check_output(output, repair, *others)


def _open_like(learn: PredictionTable, paths: list[str], how: dict[str, Any]) -> PredictionTable:
    """The table to repair: the columns of the other one where it has them, else its own; the classes must agree."""
    from doublehead.commands import show

    how = {**how, "kind": how["kind"] or learn.kind}
    table = options.open_table(paths, label_needed=False, like=learn.layout.scores, **how)
    ours, theirs = learn.layout.classes, table.layout.classes
    if ours and theirs and ours != theirs:
        raise TableError(
            f"the classes of {table.sources[0]} ({_few(theirs)}) must be those of {learn.sources[0]} ({_few(ours)}) "
            "in the same order: name the columns with --scores"
        )
    show.tell_reading(learn, learn.name)
    if table.layout.scores != learn.layout.scores:
        show.tell_reading(table, table.name)
    return table


def _few(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 5 else [*names[:4], "..."])


def _fit(method: str, learn: PredictionTable) -> Fitted:
    from doublehead.commands import show

    known = learn.load()
    facts: dict[str, Any] = {
        "reads": learn.kind,
        "n_classes": known.n_classes,
        "classes": list(learn.layout.classes),
        "fitted_on": {"files": [str(source) for source in learn.sources], "n": len(known)},
    }
    doing = "cross-validating calibrators" if method == "auto" else f"fitting {method}"
    with _warnings_told(), show.notes().status(f"{doing} on {len(known):,} predictions"):
        try:
            if method == "auto":
                choice = calibrators.choose(known)
                facts["cross_validation"] = [_without_nan(score._asdict()) for score in choice.scores]
                why = f"Of {len(choice.scores)} methods {choice.why()}."
                return Fitted(choice.method, choice.calibrator, why, known.n_classes, facts)
            calibrator = calibrators.make(method).fit(known)
        except ValueError as error:
            raise UserError(f"{method} cannot be fitted on {learn.name}: {error}") from error
    learned = calibrator.in_words()
    why = f"Fitted {method} on {len(known):,} predictions" + (f": {learned}." if learned else ".")
    return Fitted(method, calibrator, why, known.n_classes, facts)


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """For JSON, which has no nan: None instead."""
    return {name: None if value != value else value for name, value in values.items()}  # noqa: PLR0124


def _load(use: Path, paths: list[str], how: dict[str, Any]) -> tuple[PredictionTable, Fitted]:
    """A calibrator written by this command and the table it is to repair."""
    from doublehead.commands import show

    try:
        calibrator = calibrators.load(use)
        about = json.loads(use.with_suffix(".json").read_bytes())
        n_classes, reads, classes = int(about["n_classes"]), about["reads"], tuple(about["classes"])
    except (ValueError, KeyError) as error:
        raise UserError(f"{use} is not a calibrator written by this command: {error}") from error
    if how["kind"] not in (None, reads):
        raise UserError(f"{use} was fitted on {reads}, but {how['kind']} were stated")
    table = options.open_table(paths, label_needed=False, **how)
    if classes and table.layout.classes and classes != table.layout.classes:
        raise UserError(
            f"the classes of {table.name} must be those of {use} in the same order: {', '.join(classes)}"
        )
    show.tell_reading(table, table.name)
    why = f"Using {about['method']} from {use}."
    return table, Fitted(about["method"], calibrator, why, n_classes, about, saves=False)


def _repair(repair: PredictionTable, fitted: Fitted, output: Path, n_bins: int, as_json: bool) -> None:
    """Write everything, then say what changed."""
    from rich.markup import escape

    from doublehead.commands import show

    before, after, changed, written = _write(repair, fitted, output, n_bins)
    if as_json:
        numbers = {"before": before and show.plain(before), "after": after and show.plain(after)}
        facts = {
            "method": fitted.method,
            "why": fitted.why,
            **fitted.facts,
            "changed": changed,
            "written": written,
        }
        print(json.dumps({**facts, **numbers}, indent=2))
        return
    out = show.results()
    out.print(escape(fitted.why))
    if before is None or after is None:
        out.print(f"{escape(repair.name)} has no labels, so there is nothing to measure.")
    else:
        out.print(f"\n{escape(repair.name)}: {before.n:,} predictions\n")
        out.print(show.before_after_table(before, after, n_bins))
        out.print(f"\n{show.verdict(after)}")
    out.print(
        f"The predicted class changed in {changed:,} rows." if changed else "No predicted class changed."
    )
    out.print("Wrote " + ", ".join(escape(name) for name in written))


def _write(
    repair: PredictionTable, fitted: Fitted, output: Path, n_bins: int
) -> tuple[Summary | None, Summary | None, int, list[str]]:
    """All files or none; the numbers before and after where there are labels, and how many predictions changed."""
    from doublehead.commands import show
    from doublehead.tables.writers import appearing, write_calibrated

    tallies: dict[str, Tally] = {}
    changed = 0

    def calibrated(chunk: Chunk) -> torch.Tensor:
        nonlocal changed
        probs = _apply(fitted, chunk.scores, repair)
        changed += int((probs.argmax(1) != chunk.scores.argmax(1)).sum())
        if chunk.predictions is not None:
            fixed = Predictions.from_probs(probs, chunk.predictions.labels)
            for name, p in (("before", chunk.predictions), ("after", fixed)):
                part = Tally.of(p, n_bins)
                tallies[name] = tallies[name] + part if name in tallies else part
        return probs

    with appearing(output) as table:
        with show.progress("calibrating", repair.n_bytes) as advance:
            write_calibrated(repair, table, calibrated, advance)
        before, after = (tallies[name].summary() if name in tallies else None for name in ("before", "after"))
        written = _save(repair, fitted, output, before, after) if fitted.saves else []
    return before, after, changed, [str(output), *written]


def _save(
    repair: PredictionTable, fitted: Fitted, output: Path, before: Summary | None, after: Summary | None
) -> list[str]:
    """The calibrator beside the output, its .json with what a reader should know of it."""
    from doublehead.tables.writers import appearing

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
    with appearing(weights) as tensors, appearing(description) as text:
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
    logits = scores
    if table.kind == "probs":
        logits = scores.clamp(min=torch.finfo(scores.dtype).tiny).log()  # as Predictions.logits
    with torch.no_grad():
        calibrated: torch.Tensor = fitted.calibrator(logits)
    return calibrated.double().softmax(1).to(scores.dtype)


@contextmanager
def _warnings_told() -> Iterator[None]:
    """A fit that did not converge is told in a line, not as a Python warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, calibrators.NotConverged):
            typer.echo(f"Warning: {warning.message}", err=True)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
