"""Make results.csv, and the tables and figures in docs/results, from what is committed. No GPU; a few minutes.

python experiments/make.py             # everything: what `make results` runs
python experiments/make.py --keep      # tables and figures from results.csv as it is
python experiments/make.py --run NAME  # measure this run again, keep the others
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import figures
import head_tables
import pandas as pd
import tables
import theory
import torch
from post_hoc import PEERS, all_scores
from results import HERE, TABLE, StoredRun, read_table, rows_of, shift_rows, stored_runs, write_table
from rivals import ensemble_rows, ensembles

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
        rows += [*missing.itertuples(index=False, name=None), *shift_rows(run)]
        print(f"{run.name}: {len(scores)} outputs in {time.perf_counter() - began:.0f} s", flush=True)
    for name, members in ensembles(runs):
        rows += ensemble_rows(name, members)
    return write_table(rows)


def draw(table: pd.DataFrame, runs: Sequence[StoredRun], output: Path) -> list[str]:
    """Draw all figures into `output`/figures, and the two of docs/theory.md."""
    drawn = []
    for name, function in figures.FIGURES.items():
        figure = function(table, runs)
        if figure is not None:
            plots.save(figure, output / "figures" / f"{name}.png", dpi=90)
            drawn.append(name)
    numbers = json.loads((OUTPUT / "theory.json").read_text())
    theory.draw_theorem1(numbers["theorem1"], output / "theorem1.png")
    theory.draw_theorem2(numbers["theorem2"], output / "theorem2.png")
    return drawn


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
    written = tables.write_pages(table, OUTPUT, tables.PAGES | head_tables.PAGES)
    readme = HERE.parent / "README.md"
    readme.write_text(tables.fill(readme.read_text(), "readme", tables.readme_table(table)))
    drawn = draw(table, runs, OUTPUT)
    print(f"{TABLE.name}: {len(table)} rows; tables {', '.join(written)}; figures {', '.join(drawn)}")


if __name__ == "__main__":
    main()
