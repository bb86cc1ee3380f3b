"""`doublehead calibrate`: fit a calibrator on one file and apply it to another."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

import doublehead
from doublehead import calibrators
from doublehead.calibrators import CALIBRATORS, Calibrator
from doublehead.calibrators.choose import score_table
from doublehead.cli import options
from doublehead.cli.output import note, notes, progress, show, show_counts, show_guesses
from doublehead.files.columns import in_order
from doublehead.files.reading import Chunk, PredictionTable, read_predictions
from doublehead.files.sources import TableError, find_sources
from doublehead.files.writing import check_file, check_output, write_calibrated
from doublehead.outcomes import MIN_SAMPLES, Comparison, Drawn, Outcomes, compare_all
from doublehead.predictions import Predictions
from doublehead.stream import Tally
from doublehead.summary import fixed, side_by_side
from doublehead.system import did_you_mean, read_file, replacing


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
            help=f"One of {', '.join(CALIBRATORS)}; or auto: the best by cross-validated NLL on --fit.",
            autocompletion=lambda: ["auto", *CALIBRATORS],
        ),
    ] = "head",
    keep: Annotated[
        str,
        typer.Option(
            help="predictions, or best: the head may change predicted classes if that does not lower the accuracy.",
            autocompletion=lambda: ["predictions", "best"],
        ),
    ] = "predictions",
    logits: options.Logits = False,
    probs: options.Probs = False,
    label: options.Label = None,
    scores: options.Scores = None,
    weights: options.Weights = None,
    bins: options.BinCount = 15,
    as_json: options.AsJson = False,
    label_base: options.LabelBase = None,
    tolerance: options.Tolerance = 1e-3,
    force: options.Force = False,
) -> None:
    """Fit a calibrator on one file and apply it to another.

    Writes calibrated probabilities in the format of the input, with all other columns unchanged (a column logit_3
    becomes prob_3), and beside it the fitted calibrator: OUTPUT.calibrator.safetensors and .json. Prints the numbers
    before and after where --apply has labels. Nothing is written unless everything succeeds.

    Examples:

        doublehead calibrate --fit val.csv --apply test.csv -o new.csv
        doublehead calibrate --fit val.csv --apply june/ --method auto -o new/
        doublehead calibrate --use new.calibrator.safetensors --apply b.csv -o c.csv
    """
    how = options.how_to_read(logits, probs, label, scores, weights, label_base, tolerance)
    names = ["auto", *CALIBRATORS]
    if method not in names:
        raise ValueError(
            f"--method must be one of {', '.join(names)}, got {method!r}{did_you_mean(method, names)}"
        )
    if keep not in ("predictions", "best") or (keep == "best" and (method != "head" or use is not None)):
        raise ValueError(f"--keep must be predictions, or best with --fit and --method head, got {keep!r}")
    if bool(fit) == (use is not None):
        raise ValueError("give either --fit FILE (predictions to fit on) or --use FILE (a saved calibrator)")
    if use is not None:
        fitted = _load(use)
        reads, several = fitted.facts["reads"], isinstance(fitted.calibrator, calibrators.PerLabel)
        if how["kind"] not in (None, reads):
            raise ValueError(
                f"{use} was fitted on {reads}, but --{how['kind']} was given: give --{reads}, or neither"
            )
        how |= {"kind": None, "independent": several}
        repair = _open(apply, how, str(use), reads, fitted.facts["classes"], several)
        check_output(output, repair, force=force)
    else:
        learn = read_predictions(fit or [], **how)
        learn.require_scores()
        layout = learn.layout
        repair = _open(
            apply, {**how, "like": learn}, learn.name, learn.kind, layout.classes, layout.independent
        )
        show_guesses(learn)
        check_output(output, repair, learn, force=force)
        for file in _beside(output):
            check_file(file, force)
        files = [{(source.path.resolve(), source.part) for source in t.sources} for t in (learn, repair)]
        if files[0] & files[1]:
            note("Warning: --fit and --apply share a file, so the numbers after are too good", style=None)
        fitted = _fit(method, learn, keep)
    _repair(repair, fitted, output, bins, as_json)


class Fitted(NamedTuple):
    """A calibrator, where it comes from and why it is this one."""

    method: str
    calibrator: Calibrator
    why: str
    facts: dict[str, Any]
    saves: bool = True


def _open(
    paths: list[str], how: dict[str, Any], fitted: str, reads: str, classes: Sequence[str], several: bool
) -> PredictionTable:
    """The table to calibrate; kind, number of labels and classes must be those that `fitted` was fitted on."""
    sources, how = find_sources(paths), {**how, "label_needed": False}
    if how["kind"] is None:
        with suppress(TableError):  # where it is not certain
            holds = read_predictions(sources, **how).kind
            if holds != reads:
                raise ValueError(
                    f"the calibrator of {fitted} was fitted on {reads}, but {sources[0]} holds {holds}: fit one on "
                    f"{holds} with --fit"
                )
    table = read_predictions(sources, **{**how, "kind": how["kind"] or reads})
    if table.layout.independent != several:
        raise ValueError(f"{table.name} and {fitted} must both have one label per sample, or both several")
    if "like" not in how or table.layout.scores != how["like"].layout.scores:
        show_guesses(table)
    return _with_classes(table, classes, fitted)


def _with_classes(table: PredictionTable, classes: Sequence[str], fitted: str) -> PredictionTable:
    """The table with its columns in the order of the classes of the fit, by their names."""
    table.require_scores()
    if (layout := in_order(table.layout, classes)) is not None:
        return replace(table, layout=layout)
    ours, theirs = ({name.casefold(): name for name in names} for names in (classes, table.layout.classes))
    difference = [
        f"{what} {', '.join([name for key, name in one.items() if key not in other][:5])}"
        for what, one, other in (("lacks", ours, theirs), ("also has", theirs, ours))
        if {*one} - {*other}
    ]
    raise TableError(
        f"the classes of {table.sources[0]} must be those of {fitted} in the same order, but it "
        f"{' and '.join(difference) or 'has another order'}: name the columns with --scores"
    )


def _fit(method: str, learn: PredictionTable, keep: str) -> Fitted:
    known = learn.load()
    show_counts(learn)
    facts: dict[str, Any] = {
        "reads": learn.kind,
        "n_classes": known.n_labels or known.n_classes,
        "classes": list(learn.layout.classes),
        "zero_floor": known.zero_floor if known.are_probs else None,
        "fitted_on": {"files": [str(source) for source in learn.sources], "n": len(known)},
    }
    if known.are_probs:
        _say_zeros(int((known.probs == 0).any(1).sum()), len(known), known.zero_floor, learn.name)
    with notes().status(f"fitting {method} on {len(known):,} predictions") as status:
        try:
            if method == "auto" and known.n_labels is None:
                calibrator, choice = calibrators.choose_calibrator(
                    known,
                    progress=lambda name, i, n: status.update(f"cross-validating {name} ({i + 1} of {n})"),
                )
                nlls = {name: None if math.isnan(nll) else nll for name, nll in choice.nlls.items()}
                facts["cross_validation"] = {"nll": nlls, "notes": choice.notes}  # JSON has no nan
                failed = [f"{name}: {choice.notes[name]}" for name, nll in nlls.items() if nll is None]
                why = "; ".join([f"Of {len(nlls)} methods, the choice is {choice}", *failed]) + "."
                return Fitted(choice.chosen, calibrator, why, facts)
            kept = {"keep": keep} if method == "head" else {}
            calibrator = doublehead.calibrate(known, method=method, **kept)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{method} cannot be fitted on {learn.name}: {error}") from error
    learned = calibrator.in_words()
    why = f"Fitted {method} on {len(known):,} predictions" + (f": {learned}." if learned else ".")
    scores = getattr(getattr(calibrator, "choice", None), "scores", None)
    if scores:
        facts["held_back"] = {name: one._asdict() for name, one in scores.items()}
        why += f"\nHeld back, by cross-fitting:\n{score_table(scores)}"
    return Fitted(method, calibrator, why, facts)


def _say_zeros(n_rows: int, n: int, floor: float, name: str) -> None:
    if n_rows:
        note(f"{name}: {n_rows:,} of {n:,} rows hold probabilities of 0, taken as {floor:.2g}")


def _load(use: Path) -> Fitted:
    """A calibrator written by this command."""
    try:
        calibrator, (about, _) = calibrators.load(use), read_file(use)
        facts = {**about, "n_classes": int(about["n_classes"]), "classes": tuple(about["classes"])}
        return Fitted(about["method"], calibrator, f"Using {about['method']} from {use}.", facts, saves=False)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{use} is not a calibrator written by this command: {error}") from error


def _repair(repair: PredictionTable, fitted: Fitted, output: Path, n_bins: int, as_json: bool) -> None:
    """Write all files or none, then show what changed."""
    sides: dict[str, tuple[Drawn, list[Tally]]] = {"before": (Drawn(), []), "after": (Drawn(), [])}
    changed = n_zero = n = 0

    def calibrated(chunk: Chunk) -> torch.Tensor:
        nonlocal changed, n_zero, n
        probs = _apply(fitted, chunk.scores, repair)
        n, n_zero = n + len(probs), n_zero + int((chunk.scores == 0).any(1).sum())
        old, new = _answers(chunk.scores, repair, repair.kind), _answers(probs, repair, "probs")
        changed += int((old != new).any(1).sum())
        if isinstance(known := chunk.predictions, Predictions):
            if repair.layout.independent:
                fixed = Predictions.from_binary(probs.flatten(), known.labels, are_probs=True)
            else:
                fixed = Predictions.from_probs(probs, known.labels)
            fixed.weights = known.weights  # of these rows all may be 0
            for p, (drawn, tallies) in zip((known, fixed), sides.values()):
                tallies[:] = [Tally.of(p, n_bins, chunk.groups, onto=tallies[0] if tallies else None)]
                drawn.add(Outcomes.of(p))
        return probs

    with replacing(output) as table:
        with progress("calibrating", repair.n_bytes) as advance:
            write_calibrated(repair, table, calibrated, advance)
        show_counts(repair)
        if repair.kind == "probs":
            _say_zeros(n_zero, n, fitted.facts["zero_floor"], repair.name)
        found = {name: tallies[0].summary() for name, (_, tallies) in sides.items() if tallies}
        numbers: dict[str, Any] = {"before": None, "after": None, "nll_difference": None}  # without labels
        if found:
            samples = [drawn.joined(tallies[0].zero_floor)[0] for drawn, tallies in sides.values()]
            pair, (before, after) = compare_all(samples)[0][1], found.values()
            assert pair is not None  # of the same samples
            paired = pair.of_all(before.n, after.values["nll"] - before.values["nll"])
            numbers = {name: summary.to_dict() for name, summary in found.items()}
            numbers["nll_difference"] = dict(zip(("value", "low", "high"), paired.nll))
        written = [str(output), *(_save(repair, fitted, output, numbers) if fitted.saves else [])]
    if as_json:
        facts = {"method": fitted.method, "why": fitted.why, **fitted.facts}
        print(json.dumps({**facts, "changed": changed, "written": written, **numbers}, indent=2))
        return
    show(fitted.why)
    if found:
        weighted = f", weighted by {repair.weights!r}" if repair.weights else ""
        show(f"\n{repair.name}: {before.n:,} predictions{weighted}\n\n{side_by_side(found)}\n")
        for name, one in found.items():
            show(" ".join([f"{name.capitalize()}:", one.verdict, *one.notes]))
        show(_paired(paired))
    else:
        show(f"{repair.name} has no labels, so nothing is measured.")
    show(f"The predicted class changed in {changed:,} rows." if changed else "No predicted class changed.")
    show("Wrote " + ", ".join(written))


def _paired(found: Comparison) -> str:
    nll = found.nll
    interval = f"95 % interval {fixed(nll.low, 4, '+')} to {fixed(nll.high, 4, '+')}, paired by sample"
    if found.is_clear:
        judged = f"{'better' if nll.estimate < 0 else 'worse'} by more than chance"
    else:
        judged = "within chance" if found.n >= MIN_SAMPLES else "too few samples to judge"
    return f"NLL after minus before: {fixed(nll.estimate, 4, '+')} ({interval}): {judged}."


def _save(repair: PredictionTable, fitted: Fitted, output: Path, numbers: dict[str, Any]) -> list[str]:
    """The calibrator beside the output with the facts about it, which its .json shows to people."""
    weights, description = _beside(output)
    facts = {
        **fitted.facts,
        "why": fitted.why,
        "applied_to": [str(source) for source in repair.sources],
        **numbers,
        "versions": {"doublehead": doublehead.__version__, "torch": torch.__version__},
    }
    with replacing(description) as text:
        about = {**calibrators.describe(fitted.calibrator), **facts}
        text.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        calibrators.save(fitted.calibrator, weights, facts)
    return [str(weights), str(description)]


def _beside(output: Path) -> tuple[Path, Path]:
    """Where the calibrator and its description are written."""
    stem = re.sub(r"\.(csv|tsv|jsonl|ndjson|parquet|arrow|feather|npz|npy)(\.gz)?$", "", output.name)
    weights = output.with_name(f"{stem}.calibrator.safetensors")
    return weights, weights.with_suffix(".json")


def _apply(fitted: Fitted, scores: torch.Tensor, table: PredictionTable) -> torch.Tensor:
    """Scores (B, K) as stated -> calibrated probs (B, K) in their own type, normalised in float64."""
    if scores.shape[1] != (n := fitted.facts["n_classes"]):
        raise TableError(
            f"{table.name} has scores of {scores.shape[1]} classes, the calibrator was fitted on {n}"
        )
    logits = scores
    if table.layout.independent:  # a row of no and yes for each label
        no = 1 - scores if table.kind == "probs" else torch.zeros_like(scores)
        logits = torch.stack([no, scores], -1).reshape(-1, 2)
    if table.kind == "probs":
        floor = max(fitted.facts["zero_floor"], torch.finfo(scores.dtype).tiny)
        logits = logits.where(logits > 0, floor).log()
    with torch.no_grad():
        calibrated: torch.Tensor = fitted.calibrator(logits)
    probs = calibrated.double().softmax(1).to(scores.dtype)
    return probs[:, 1].reshape(scores.shape) if table.layout.independent else probs


def _answers(scores: torch.Tensor, table: PredictionTable, kind: str) -> torch.Tensor:
    """(B, 1) the predicted class, or (B, L) whether each label is predicted."""
    if table.layout.independent:
        return scores > (0.5 if kind == "probs" else 0.0)
    return scores.argmax(1, keepdim=True)
