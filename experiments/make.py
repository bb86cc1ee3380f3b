"""Make results.csv, and the tables and figures in docs/results, from what is committed. No GPU; a few minutes.

python experiments/make.py             # everything: what `make results` runs
python experiments/make.py --keep      # tables and figures from results.csv as it is
python experiments/make.py --run NAME  # measure this run again, keep the others
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import figures
import pandas as pd
import rivals
import tables
import theory
import torch
from post_hoc import PEERS, all_scores, ensemble_rows, ensembles
from results import HERE, TABLE, StoredRun, read_table, rows_of, stored_runs, write_table

from doublehead import plots

OUTPUT = HERE.parent / "docs" / "results"


def measure(runs: Sequence[StoredRun], before: pd.DataFrame, again: Sequence[str] = ()) -> pd.DataFrame:
    """The long table. Of runs not in `again`, and of packages that are not installed, the committed rows are kept."""
    rows: list[tuple[object, ...]] = []
    for run in runs:
        own = before[before.run == run.name]
        if again and run.name not in again:
            rows += own.itertuples(index=False, name=None)
            continue
        began = time.perf_counter()
        scores = dict(all_scores(run))
        for name, one in scores.items():
            rows += rows_of(run.name, name, one.numbers(scores["none"], scores["temperature"]))
        missing = own[own.output.isin(set(PEERS) - set(scores))]
        rows += missing.itertuples(index=False, name=None)
        print(f"{run.name}: {len(scores)} outputs in {time.perf_counter() - began:.0f} s", flush=True)
    for name, members in ensembles(runs):
        rows += ensemble_rows(name, members)
    return write_table(rows)


def draw(table: pd.DataFrame, runs: Sequence[StoredRun], output: Path) -> None:
    """Draw all figures into `output`/figures, and the two of docs/theory.md."""
    for name, function in figures.FIGURES.items():
        plots.save(function(table, runs), output / "figures" / f"{name}.png", dpi=90)
    theory.draw(output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--run", action="append", default=[], metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs, table = stored_runs(), read_table()
    if not options.keep:
        table = measure(runs, table, options.run)
    pages = tables.PAGES | rivals.PAGES
    for name, page in pages.items():
        (OUTPUT / f"{name}.md").write_text(tables.MADE + page(table, runs))
    for name, (file, made) in (tables.FILLED | rivals.FILLED).items():
        text = (HERE.parent / file).read_text()
        (HERE.parent / file).write_text(tables.fill(text, name, made(table, runs)))
    draw(table, runs, OUTPUT)
    print(f"{TABLE.name}: {len(table)} rows; tables {', '.join(pages)}")


if __name__ == "__main__":
    main()
