"""`doublehead evaluate`: can the confidences of these predictions be trusted?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from doublehead.commands import options
from doublehead.commands.errors import told_to_user
from doublehead.tables.reading import PredictionTable


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
    """Can the confidences of these predictions be trusted? A table of numbers with their intervals.

    The files are read once, in chunks: they may be larger than memory. Whether the scores are logits or
    probabilities is stated with --logits or --probs; only an .npz with an array called so says it by itself.

    Examples:

        doublehead evaluate test.csv --logits

        doublehead evaluate monday/ tuesday/ --probs --label diagnosis --by hospital

        doublehead evaluate predictions/ --probs --cluster tcp://10.0.0.1:8786 --json
    """
    with told_to_user():
        table = options.open_table(
            files,
            kind=options.stated_kind(logits, probs),
            label=label,
            scores=scores,
            by=by,
            where=options.parse_where(where or []),
            base=label_base,
            tolerance=tolerance,
        )
        _report(table, bins, as_json, cluster)


def _report(table: PredictionTable, n_bins: int, as_json: bool, cluster: str | None) -> None:
    from rich.markup import escape

    from doublehead.commands import show
    from doublehead.metrics import fine_bins
    from doublehead.tables.tally import tally_table

    name = table.name
    show.tell_reading(table, name)
    with show.progress("reading", table.n_bytes) as advance:
        if cluster is None:
            tallies = tally_table(table, n_bins, advance)
        else:
            from doublehead.tables.clusters import evaluate_on

            tallies = evaluate_on(cluster, table, n_bins, advance=advance)
    whole = tallies.whole.summary()
    groups = {group: tallies.groups[group].summary() for group in sorted(tallies.groups)}
    assert tallies.whole.classwise is not None
    n_classes = tallies.whole.classwise.counts.shape[0]
    if as_json:
        facts = {
            "files": [str(source) for source in table.sources],
            "kind": table.kind,
            "n_classes": n_classes,
            "n_bins": n_bins,
            "columns": {"label": table.layout.label, "scores": list(table.layout.scores)},
            **show.plain(whole),
        }
        if table.by is not None:
            facts |= {"by": table.by, "groups": {group: show.plain(found) for group, found in groups.items()}}
        print(json.dumps(facts, indent=2))
        return
    out = show.results()
    out.print(f"{escape(name)}: {whole.n:,} predictions of {n_classes} classes ({table.kind})\n")
    out.print(show.summary_table(whole, n_bins))
    if groups:
        out.print()
        out.print(show.groups_table(groups, table.by or ""))
    out.print(f"\n{show.verdict(whole)}")
    out.print(show.METHOD.format(cells=fine_bins(n_bins)), style="dim")
