"""Make docs/results anew from committed result files: every table, figure and the report. No GPU; under a minute.

python experiments/make.py            # what `make results` runs
python experiments/make.py --tables   # without drawing

The blocks of README.md and of other pages that quote results (pages.py) are written too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import theory
from auto_choice import auto_table, candidates_table
from committed import RESULTS, read_runs, rows_of
from figures import FIGURES
from guard_search import read_search, search_table
from guards import ablation
from head_ablation import ablation_table
from headline import frozen_table, headline, runs_table, targets
from other_networks import BRIEF, networks_table, read_brief
from pages import PAGES, ROOT, blocks, filled
from PIL import Image
from post_hoc import post_hoc_table
from report import page
from seen import FAMILY_UNSEEN, GUARD
from shift import family_table, guards, perturbed_heads, shift_table
from tables import Rows, Table, table1, table2, table3, table4

from doublehead import plots

OUTPUT = ROOT / "docs" / "results"
MADE = "<!-- made by `make results` from experiments/results; do not edit -->\n"


def all_tables(rows: Rows, results: Path = RESULTS, brief: Path = BRIEF) -> dict[str, Table]:
    """Every table by name."""
    runs = [run for row in rows for some in rows[row].values() for run in some]
    heads = perturbed_heads(sorted(runs, key=lambda run: run.name))
    heads += [source for source in guards(runs) if source.output in (FAMILY_UNSEEN, GUARD)]
    tried = read_search(results)
    frozen, fitted_after = results / "imagenet_frozen.json", post_hoc_table(results)
    choices = ablation_table(results)
    made = [
        table1(rows),
        table2(rows, heads),
        table3(rows),
        table4(rows),
        shift_table(rows),
        family_table(rows),
        auto_table(rows),
        candidates_table(rows),
        ablation(rows),
        *([search_table(tried)] if tried else []),
        frozen_table(frozen),
        *([fitted_after] if fitted_after else []),
        *([choices] if choices else []),
        headline(rows, frozen),
        targets(rows),
        networks_table(read_brief(brief)),
        runs_table(sorted(runs, key=lambda run: run.name)),
    ]
    return {table.name: table for table in made}


def write_tables(tables: dict[str, Table], output: Path) -> None:
    """One Markdown page a table, and a CSV file where it has records."""
    output.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        (output / f"{name}.md").write_text(MADE + table.page())
        if table.records:
            (output / f"{name}.csv").write_text(table.csv())


def draw_figures(rows: Rows, output: Path, dpi: int = 100) -> list[str]:
    """Draw what can be drawn; the names of the figures."""
    drawn = []
    for name, draw in FIGURES.items():
        figure, file = draw(rows), output / "figures" / f"{name}.png"
        if figure is None:
            file.unlink(missing_ok=True)
            continue
        plots.save(figure, file, dpi=dpi)
        Image.open(file).convert("RGB").quantize(160).save(file, optimize=True)  # a third of the size
        drawn.append(name)
    return drawn


def draw_theory(output: Path) -> None:
    """The two figures of docs/theory.md."""
    numbers = json.loads((OUTPUT / "theory.json").read_text())
    theory.draw_theorem1(numbers["theorem1"], output / "theorem1.png")
    theory.draw_theorem2(numbers["theorem2"], output / "theorem2.png")


def write_pages(rows: Rows, results: Path, root: Path) -> None:
    """The blocks of pages that are otherwise written by hand."""
    made = blocks(rows, results)
    for name in PAGES:
        text = (root / name).read_text(encoding="utf-8")
        (root / name).write_text(filled(text, made), encoding="utf-8")


def make(results: Path = RESULTS, root: Path = ROOT, *, draw: bool = True, dpi: int = 100) -> str:
    """Everything from one folder of results into the pages under `root`; what was made, in a line."""
    output = root / OUTPUT.relative_to(ROOT)
    runs = read_runs(results)
    rows = rows_of(runs)
    tables = all_tables(rows, results)
    write_tables(tables, output)
    if draw:
        drawn = draw_figures(rows, output, dpi)
        draw_theory(output)
    else:
        drawn = [name for name in FIGURES if (output / "figures" / f"{name}.png").exists()]
    (output / "index.md").write_text(MADE + page(rows, runs, tables, drawn, results, read_brief()))
    write_pages(rows, results, root)
    return f"{len(runs)} runs, {len(tables)} tables, {len(drawn)} figures -> {output}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="write tables and texts, draw nothing")
    options = parser.parse_args()
    began = time.perf_counter()
    print(f"{make(draw=not options.tables)} in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
