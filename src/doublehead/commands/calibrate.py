"""`doublehead calibrate`: repair the confidences of one file with what another one teaches."""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

import doublehead
from doublehead.calibrators import Calibrator, NotConverged
from doublehead.commands import options
from doublehead.commands.errors import UserError, told_to_user
from doublehead.predictions import Predictions
from doublehead.table_files import TableError
from doublehead.tables import Chunk, PredictionTable
from doublehead.tally import Summary, Tally


def calibrate(
    fit: Annotated[
        list[str],
        typer.Option(
            "--fit",
            help="Labelled predictions to learn from, which the model was not trained on.",
            show_default=False,
        ),
    ],
    apply: Annotated[
        list[str],
        typer.Option("--apply", help="Predictions to repair, with labels or without.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write, or folder for several.", show_default=False)
    ],
    method: Annotated[
        str, typer.Option(help="temperature, ..., or auto: the best by cross-validated NLL on --fit.")
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
    """
    with told_to_user():
        how: dict[str, Any] = {
            "kind": options.stated_kind(logits, probs),
            "label": label,
            "scores": scores,
            "base": label_base,
            "tolerance": tolerance,
        }
        learn = options.open_table(fit, **how)
        repair = _open_like(learn, apply, how)
        _repair(learn, repair, method, output, bins, as_json)


def _open_like(learn: PredictionTable, paths: list[str], how: dict[str, Any]) -> PredictionTable:
    """The table to repair: the columns of the other one where it has them, else its own; the classes must agree."""
    how = {**how, "kind": how["kind"] or learn.kind}
    if how["scores"] is None:
        try:
            table = options.open_table(
                paths, label_needed=False, **{**how, "scores": ",".join(learn.layout.scores)}
            )
        except TableError:
            table = options.open_table(paths, label_needed=False, **how)
    else:
        table = options.open_table(paths, label_needed=False, **how)
    ours, theirs = learn.layout.classes, table.layout.classes
    if ours and theirs and ours != theirs:
        raise TableError(
            f"the classes of {table.sources[0]} ({', '.join(theirs[:5])}, ...) must be those of {learn.sources[0]} "
            f"({', '.join(ours[:5])}, ...) in the same order: name the columns with --scores"
        )
    return table


class Fitted(NamedTuple):
    """A calibrator and why it is this one."""

    name: str
    calibrator: Calibrator
    why: str
    choice: dict[str, Any]


def _repair(
    learn: PredictionTable, repair: PredictionTable, method: str, output: Path, n_bins: int, as_json: bool
) -> None:
    from rich.markup import escape

    from doublehead.commands import show
    from doublehead.table_writers import check_output

    check_output(output, repair, learn)
    _check_method(method)
    show.tell_reading(learn, learn.name)
    if repair.layout.scores != learn.layout.scores:
        show.tell_reading(repair, repair.name)
    known = learn.load()
    fitted = _fit(method, known)
    before, after, written = _write(learn, repair, fitted, known, output, n_bins)
    if as_json:
        facts = {"method": fitted.name, "why": fitted.why, "choice": fitted.choice, "written": written}
        numbers = {"before": before and show.plain(before), "after": after and show.plain(after)}
        print(json.dumps({**facts, **numbers}, indent=2, default=str))
        return
    out = show.results()
    out.print(escape(fitted.why))
    if before is None or after is None:
        out.print(f"{escape(repair.name)} has no labels, so there is nothing to measure.")
    else:
        out.print(f"\n{escape(repair.name)}: {before.n:,} predictions\n")
        out.print(show.before_after_table(before, after, n_bins))
        out.print(f"\n{show.verdict(after)}")
    out.print("Wrote " + ", ".join(escape(name) for name in written))


def _write(
    learn: PredictionTable,
    repair: PredictionTable,
    fitted: Fitted,
    known: Predictions,
    output: Path,
    n_bins: int,
) -> tuple[Summary | None, Summary | None, list[str]]:
    """All files or none; the numbers before and after where there are labels."""
    from doublehead.calibrator_files import save_calibrator
    from doublehead.commands import show
    from doublehead.table_writers import appearing, write_calibrated

    tallies: dict[str, Tally] = {}

    def calibrated(chunk: Chunk) -> torch.Tensor:
        probs = _apply(fitted.calibrator, chunk.scores, repair, known.n_classes)
        if chunk.predictions is not None:
            fixed = Predictions.from_probs(probs, chunk.predictions.labels)
            for name, p in (("before", chunk.predictions), ("after", fixed)):
                part = Tally.of(p, n_bins)
                tallies[name] = tallies[name] + part if name in tallies else part
        return probs

    stem = output.with_name(re.sub(r"\.(csv|tsv|parquet|npz|npy)(\.gz)?$", "", output.name) + ".calibrator")
    weights, description = Path(f"{stem}.safetensors"), Path(f"{stem}.json")
    with appearing(output) as table, appearing(weights) as tensors, appearing(description) as text:
        with show.progress("calibrating", repair.n_bytes) as advance:
            write_calibrated(repair, table, calibrated, advance)
        before, after = (tallies[name].summary() if name in tallies else None for name in ("before", "after"))
        facts = _facts(learn, repair, fitted, known, before, after)
        save_calibrator(fitted.calibrator, tensors.with_suffix(""), facts)
        tensors.with_suffix(".json").rename(text)
    return before, after, [str(path) for path in (output, weights, description)]


def _facts(
    learn: PredictionTable,
    repair: PredictionTable,
    fitted: Fitted,
    known: Predictions,
    before: Summary | None,
    after: Summary | None,
) -> dict[str, Any]:
    """What a reader of the calibrator's .json should know."""
    return {
        "reads": learn.kind,
        "n_classes": known.n_classes,
        "classes": list(learn.layout.classes),
        "fitted_on": {"files": [str(source) for source in learn.sources], "n": len(known)},
        "applied_to": [str(source) for source in repair.sources],
        "why": fitted.why,
        "choice": fitted.choice,
        "before": before and before.to_dict(),
        "after": after and after.to_dict(),
        "versions": {"doublehead": doublehead.__version__, "torch": torch.__version__},
    }


def _check_method(method: str) -> None:
    from doublehead.calibrator_files import methods

    names = ["auto", *methods()]
    if method.replace("-", "_") not in names:
        near = difflib.get_close_matches(method, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--method must be one of {', '.join(names)}, got {method!r}{hint}")


def _fit(method: str, known: Predictions) -> Fitted:
    from doublehead.calibrator_files import methods

    method = method.replace("-", "_")
    if method == "auto":
        return _choose(known)
    with _warnings_told():
        try:
            calibrator = methods()[method]().fit(known)
        except (ValueError, TypeError) as error:
            raise UserError(f"{method} cannot be fitted: {error}") from error
    learned = ", ".join(
        f"{name.rstrip('_')} {float(value):.4g}"
        for name, value in calibrator.state_dict().items()
        if value.numel() == 1 and value.is_floating_point()
    )
    why = f"Fitted {method} on {len(known):,} predictions" + (f": {learned}." if learned else ".")
    return Fitted(method, calibrator, why, {})


def _choose(known: Predictions) -> Fitted:
    raise UserError("--method auto is not here yet")


def _apply(
    calibrator: Calibrator, scores: torch.Tensor, table: PredictionTable, n_classes: int
) -> torch.Tensor:
    """Scores (B, K) as stated -> calibrated probs (B, K) in their own type, normalised in float64."""
    if scores.shape[1] != n_classes:
        raise TableError(
            f"{table.sources[0]} has scores of {scores.shape[1]} classes, the calibrator was fitted on {n_classes}"
        )
    logits = scores
    if table.kind == "probs":
        logits = scores.clamp(min=torch.finfo(scores.dtype).tiny).log()  # as Predictions.logits
    with torch.no_grad():
        calibrated: torch.Tensor = calibrator(logits)
    return calibrated.double().softmax(1).to(scores.dtype)


@contextmanager
def _warnings_told() -> Iterator[None]:
    """A fit that did not converge is told in a line, not as a Python warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, NotConverged):
            typer.echo(f"Warning: {warning.message}", err=True)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
