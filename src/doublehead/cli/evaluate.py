"""`doublehead evaluate`: numbers with intervals and a verdict for predictions in files."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from doublehead.cli import options
from doublehead.cli.output import progress, show, show_counts, show_guesses
from doublehead.files.reading import read_predictions
from doublehead.metrics import fine_bins

METHOD = (
    "Intervals are 95 %: Poisson bootstrap over {cells} cells of confidence (1000 draws, seed 0, centred on the "
    "value); Wilson for accuracy; normal for NLL, Brier score and entropy."
)

GUARANTEE = (
    "Of test sets like this one, at most 1 in 20 gives a threshold whose answers have a higher error on new data. It "
    "holds for new data like these, if these were not used to train or calibrate the model."
)


def evaluate(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Predictions: .csv, .tsv, .txt, .json, .jsonl (also .gz), .parquet, .arrow, .feather, .xlsx, .npz, "
            "pairs of .npy, or folders of them; - is standard input. One set of an .npz that holds several: "
            "file.npz:test.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    logits: options.Logits = False,
    probs: options.Probs = False,
    label: options.Label = None,
    scores: options.Scores = None,
    by: options.By = None,
    where: options.Where = None,
    abstain: Annotated[
        float | None,
        typer.Option(help="Find the confidence above which answers have at most this error (0.01 is 1 %)."),
    ] = None,
    weights: options.Weights = None,
    bins: options.BinCount = 15,
    as_json: options.AsJson = False,
    label_base: options.LabelBase = None,
    tolerance: options.Tolerance = 1e-3,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Use a Dask cluster: the address of its scheduler, such as tcp://10.0.0.1:8786, or 'local' for all "
            "cores of this machine."
        ),
    ] = None,
) -> None:
    """Measure the calibration of predictions: a table of numbers with intervals, and a verdict.

    The files are read once, in chunks, so they may be larger than memory. A row holds the true class and a score for
    every class, or the true class, the predicted one and its confidence; or there is a row for each sample and class.
    What is guessed about the columns is printed. Give --logits or --probs where it is not certain.

    Examples:

        doublehead evaluate test.csv
        doublehead evaluate test.csv --logits --abstain 0.01
        doublehead evaluate monday/ tuesday/ --probs --label finding --by hospital
        doublehead evaluate predictions/ --probs --cluster local --json
    """
    if abstain is not None and not 0 < abstain < 1:
        raise ValueError(f"--abstain must lie between 0 and 1 (0.01 is 1 %), got {abstain:g}")
    if abstain is not None and weights is not None:
        raise ValueError(
            "give one of --abstain and --weights: with sample weights no threshold carries a guarantee"
        )
    how = options.how_to_read(logits, probs, label, scores, weights, label_base, tolerance)
    chosen = options.parse_pairs(where or [], "--where", "COLUMN=VALUE")
    table = read_predictions(files, by=by, where=chosen, **how)
    show_guesses(table)
    with progress("reading", table.n_bytes) as advance:
        summary = table.tally(bins, advance, cluster).summary()
    show_counts(table)
    choice = None if abstain is None else summary.abstain(abstain)
    if as_json:
        facts: dict[str, Any] = {
            "files": [str(source) for source in table.sources],
            "kind": table.kind,
            "columns": {"label": table.layout.label, "scores": list(table.layout.scores)},
            "by": table.by,
            "clipped_rows": table.counts.get("clipped", 0),
        }
        if choice is not None:  # JSON has no nan
            facts["abstain"] = {**asdict(choice), "error": choice.error if choice.n_accepted else None}
        print(json.dumps({**facts, **summary.to_dict()}, indent=2))
        return
    about = f", weighted by {weights!r}" if weights else ""
    about += f", {len(summary.groups)} labels of each sample" if table.layout.independent and not by else ""
    show(f"{table.name} ({table.kind}{about}): {summary}")
    if choice is not None:
        show(f"\n{choice}" + (f" {GUARANTEE}" if choice.threshold is not None else ""))
    show(METHOD.format(cells=fine_bins(bins)), style="dim")
