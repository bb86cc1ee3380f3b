"""`doublehead evaluate`: numbers with intervals and a verdict for predictions in files."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from doublehead.cli import options
from doublehead.cli.output import progress, show, show_guesses, told_to_user
from doublehead.files.reading import PredictionTable, read_predictions
from doublehead.metrics import fine_bins
from doublehead.summary import Summary

METHOD = (
    "Intervals are 95 %: Poisson bootstrap over {cells} cells of confidence (1000 draws, seed 0, centred on the "
    "value), normal for NLL, Brier score and entropy."
)


def evaluate(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Predictions: .csv, .tsv (also .gz), .parquet, .npz, pairs of .npy, or folders of them. "
            "One set of an .npz that holds several: file.npz:test.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    logits: options.Logits = False,
    probs: options.Probs = False,
    label: options.Label = None,
    scores: options.Scores = None,
    by: Annotated[str | None, typer.Option(help="Column whose values are groups: a site, a month.")] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="COLUMN=VALUE: only these rows. May be given several times.")
    ] = None,
    weights: options.Weights = None,
    bins: options.BinCount = 15,
    as_json: options.AsJson = False,
    label_base: options.LabelBase = None,
    tolerance: options.Tolerance = 1e-3,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Work on a Dask cluster: the address of its scheduler, or 'local' for all cores here."
        ),
    ] = None,
) -> None:
    """Measure the calibration of predictions: a table of numbers with intervals, and a verdict.

    The files are read once, in chunks, so they may be larger than memory. State whether the scores are logits or
    probabilities with --logits or --probs; only an .npz with an array called so states it itself.

    Examples:

        doublehead evaluate test.csv --logits

        doublehead evaluate monday/ tuesday/ --probs --label diagnosis --by hospital

        doublehead evaluate predictions/ --probs --cluster tcp://10.0.0.1:8786 --json
    """
    with told_to_user():
        table = read_predictions(
            files,
            kind=options.stated_kind(logits, probs),
            label=label,
            scores=options.split_names(scores),
            by=by,
            weights=weights,
            where=options.parse_where(where or []),
            base=label_base,
            tolerance=tolerance,
        )
        show_guesses(table)
        summary = _measure(table, bins, cluster)
        if as_json:
            facts = {
                "files": [str(source) for source in table.sources],
                "kind": table.kind,
                "columns": {"label": table.layout.label, "scores": list(table.layout.scores)},
                "by": table.by,
            }
            print(json.dumps({**facts, **summary.to_dict()}, indent=2))
            return
    show(f"{table.name} ({table.kind}): {summary}")
    show(METHOD.format(cells=fine_bins(bins)), style="dim")


def _measure(table: PredictionTable, n_bins: int, cluster: str | None) -> Summary:
    with progress("reading", table.n_bytes) as advance:
        if cluster is None:
            return table.tally(n_bins, advance).summary()
        from doublehead.files.clusters import tally_on

        return tally_on(cluster, table, n_bins, advance).summary()
