"""The paper's Tables 1 to 4 with our numbers beside the paper's, made from committed result files alone."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from committed import Row, Run, Spread, having, numbers, spread
from doublehead.last_map import ENOUGH
from paper import SHIFTED, TABLE_1, TABLE_2, TABLE_3_ECE, TABLE_3_OVERHEAD, TABLE_3_PERIODS, TABLE_4, Cell
from paper import Row as PaperRow
from seen import is_guard, parts

GAP = "not run"
NONE = ""
REFERENCE = ("cifar10", "resnet50")  # the row of the paper's figures and of its Table 3
SPEED = Path(__file__).resolve().parents[1] / "benchmarks/results/gpu_training.json"

DATA_TITLES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "imagenet": "ImageNet",
    "sst-fine": "SST fine",
    "sst-binary": "SST binary",
    "20newsgroups": "20 Newsgroups",
    "20newsgroups-bydate": "20 Newsgroups by date",
    "fashion": "Fashion-MNIST",
}
MODEL_TITLES = {
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "resnet152": "ResNet-152",
    "densenet121": "DenseNet-121",
    "wide_resnet28_10": "Wide ResNet 28-10",
    "tree_lstm": "TreeLSTM",
    "gp_cnn": "GP CNN",
}


class Source(NamedTuple):
    """Where a line of a table comes from: the runs of a method and one of their outputs."""

    title: str
    method: str
    output: str = "main"

    @property
    def key(self) -> str:
        """The name that paper.py has for it."""
        return self.method if self.output == "main" else self.output


PAPER_SOURCES = (
    Source("Cross entropy", "cross-entropy"),
    Source("MMCE", "mmce"),
    Source("Brier", "brier"),
    Source("Focal", "focal"),
    Source("Double head, no annealing", "cross-entropy", "double-head"),
    Source("Annealing double head, beta0 1.2", "cross-entropy", "annealing-double-head"),
)
AUTO = Source("Auto head (ours)", "cross-entropy", "auto")
RIVALS = (
    Source("MMCE as published", "mmce-published"),
    Source("FLSD-53", "flsd-53"),
    Source("AdaFocal", "adafocal"),
    Source("Label smoothing", "label-smoothing"),
    Source("Mixup", "mixup"),
    Source("Last-layer retraining (TST)", "last-layer"),
    Source("Deep ensemble of 4", "ensemble-4"),
)
Rows = Mapping[Row, Mapping[str, list[Run]]]


@dataclass
class Table:
    """A table for people (head, lines, notes) and the same numbers for programs (records, one dict a line)."""

    name: str
    title: str
    head: Sequence[str]
    lines: list[list[str]]
    notes: Sequence[str] = ()
    records: list[dict[str, Any]] = field(default_factory=list)
    more: str = ""  # Markdown after the notes

    def markdown(self) -> str:
        """The lines as a Markdown table."""
        rule = ["---"] * len(self.head)
        return "".join(f"| {' | '.join(cells)} |\n" for cells in (self.head, rule, *self.lines))

    def page(self) -> str:
        """A Markdown page: title, table, notes."""
        notes = "".join(f"- {note}\n" for note in self.notes)
        parts = [f"# {self.title}\n", self.markdown(), notes, self.more]
        return "\n".join(part for part in parts if part)

    def csv(self) -> str:
        """The records, with every key that any of them has as a column."""
        columns = list(dict.fromkeys(key for record in self.records for key in record))
        file = io.StringIO()
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records)
        return file.getvalue()


def title_of(data: str, model: str) -> str:
    """Data set and network as people write them."""
    return f"{DATA_TITLES.get(data, data)}, {MODEL_TITLES.get(model, model)}"


def row_title(row: Row, rows: Iterable[Row]) -> str:
    """Data set and network; with the epochs where there are rows of the same two with others.

    >>> row = Row("cifar10", "resnet50", 30)
    >>> row_title(row, [row]), row_title(row, [row, row._replace(epochs=5)])
    ('CIFAR-10, ResNet-50', 'CIFAR-10, ResNet-50, 30 epochs')
    """
    twins = sum(other[:2] == row[:2] for other in rows)
    return title_of(row.data, row.model) + f", {row.epochs} epochs" * (twins > 1)


def reference(rows: Rows, which: tuple[str, str] = REFERENCE) -> tuple[Row, Mapping[str, list[Run]]] | None:
    """The row of a data set and network with the most epochs, and its methods."""
    found = [row for row in rows if (row.data, row.model) == which]
    return (max(found), rows[max(found)]) if found else None


def seeds_said(n: int) -> str:
    """'1 seed', '3 seeds'."""
    return f"{n} seed{'s' * (n != 1)}"


def shown(value: Spread | None, *, scale: float = 100, digits: int = 2, of: int | None = None) -> str:
    """Mean, and spread over seeds where there are several; "not run" where there is nothing.

    `of` is how many seeds the reader takes it for; where it comes from another number of seeds, that is said.

    >>> shown(spread([0.0312])), shown(spread([0.01, 0.03])), shown(None)
    ('3.12', '2.00 ± 1.41', 'not run')
    >>> shown(spread([0.0312]), of=3)
    '3.12, 1 seed'
    """
    if value is None:
        return GAP
    text = f"{scale * value.mean:.{digits}f}"
    text += f" ± {scale * value.sd:.{digits}f}" * (value.n > 1)
    return text if of in (None, value.n) else f"{text}, {seeds_said(value.n)}"


def ece_cell(runs: Sequence[Run], output: str, when: str = "before", of: int | None = None) -> str:
    """An ECE in percent with the band of a perfectly calibrated model; bold where it is not above the band."""
    ece, low, high = (numbers(runs, output, key, when) for key in ("ece", "ece_floor_low", "ece_floor_high"))
    if ece is None or low is None or high is None:
        return GAP
    text = f"**{shown(ece)}**" if ece.mean <= high.mean else shown(ece)
    text += f" ({100 * low.mean:.2f} to {100 * high.mean:.2f}){worst_part(runs, output, when)}"
    return text if of in (None, ece.n) else f"{text}, {seeds_said(ece.n)}"


def eces_of_parts(runs: Sequence[Run], output: str, when: str = "before") -> list[tuple[float, float]]:
    """ECE and the upper end of its band, means over seeds, of every guard that a composed output is made of."""
    has, keys = having(runs, output), ("ece", "ece_floor_high")
    found = [[numbers(has, part, key, when) for key in keys] for part in parts(output)]
    return [(ece.mean, high.mean) for ece, high in found if ece and high]


def worst_part(runs: Sequence[Run], output: str, when: str = "before") -> str:
    """What to add to the mean over the parts of a composed output: the largest of them, where they differ."""
    eces = eces_of_parts(runs, output, when)
    if len({f"{100 * ece:.2f}" for ece, _ in eces}) < 2:
        return ""
    ece, high = max(eces)
    return f", worst of {len(eces)}: {100 * ece:.2f}" + ", above its band" * (ece > high)


def temperature_cell(runs: Sequence[Run], output: str, key: str = "temperature") -> str:
    """The mean of the fitted temperatures."""
    return shown(numbers(runs, output, key, ""), scale=1)


def paper_cell(cell: Cell | None, when: str) -> str:
    """The paper's number, in italics so that nobody takes it for ours."""
    value = None if cell is None else getattr(cell, when)
    if value is None:
        return NONE
    bracket = (
        f" ({cell.temperature:.1f})" if when == "after" and cell and cell.temperature is not None else ""
    )
    return f"*{value:.2f}{bracket}*"


BAND_NOTE = (
    "In brackets: the 5 to 95 % band of what a *perfectly calibrated* model with the same confidences scores on as "
    "many samples. Bold: not above that band, so not to be told from perfect."
)
AUTO_NOTE = (
    "Auto was chosen on held-back calibration data and ends with a temperature of its own, and a smooth curve where "
    "that has the lower NLL when both are cross-fitted on calibration data."
)
PAPER_NOTE = "*Italics*: the paper's numbers, as printed there. Everything else was measured here."


def auto_note(rows: Rows) -> str:
    """What auto is, and in which rows it is still the earlier one."""
    earlier = [
        row_title(row, rows)
        for row in sorted(rows, key=paper_order)
        if any(before_curves(run) for run in having(rows[row].get("cross-entropy", []), AUTO.output))
    ]
    if not earlier:
        return AUTO_NOTE
    return f"{AUTO_NOTE} Made before there was a curve, with a temperature alone: {'; '.join(earlier)}."


def before_curves(run: Run) -> bool:
    """Whether a run with enough calibration data for a curve was made before one was tried."""
    selection = run.results.get("selection") or {}
    return "bends" not in selection and run.results["sizes"][1] >= ENOUGH


def table1(rows: Rows) -> Table:
    """ECE of the predicted class, row by row, method by method; rows that were not run stand below."""
    lines, records = [], []
    for row, source, runs, cell in _lines(rows, TABLE_1, RIVALS):
        lines.append(_table1_line(row, source, runs, cell))
        records.append(_record(row, source, runs, cell, "ece"))
    head = ["row", "method", "epochs; seeds", "accuracy", "ECE as trained", "ECE after temperature", "T",
            "ECE after T on the paper's grid", "*paper: as trained*", "*paper: after T (T)*"]  # fmt: skip
    notes = [
        BAND_NOTE,
        PAPER_NOTE,
        "Percent, 15 bins. Temperature is fitted by NLL to the same calibration images that the heads learn from; the "
        "paper's grid is 0.1 to 10 in steps of 0.1, chosen by ECE on them.",
        "Heads are not scaled again: a temperature fitted to the data that a head was trained on is fooled by it.",
        auto_note(rows) + " beta0 = 1.2 is the paper's.",
    ]
    more = gaps(rows, TABLE_1)
    return Table("table1", "Table 1: ECE of the predicted class", head, lines, notes, records, more)


def _table1_line(row: Row, source: Source, runs: list[Run], cell: Cell | None) -> list[str]:
    is_head = source.output != "main"
    name = [title_of(row.data, row.model), source.title]
    before, after = paper_cell(cell, "before"), paper_cell(cell, "after")
    if not runs:
        return [*name, GAP, GAP, GAP, NONE if is_head else GAP, NONE, NONE, before, after]
    where = f"{row.epochs}; {len(runs)}"
    accuracy = shown(numbers(runs, source.output, "accuracy"))
    ours = [where, accuracy, ece_cell(runs, source.output)]
    if is_head:
        return [*name, *ours, NONE, NONE, NONE, before, after]
    grid = shown(numbers(runs, "main", "ece", "after_grid"))
    grid += f" ({temperature_cell(runs, 'main', 'grid_temperature')})"
    return [
        *name,
        *ours,
        ece_cell(runs, "main", "after"),
        temperature_cell(runs, "main"),
        grid,
        before,
        after,
    ]


def table4(rows: Rows) -> Table:
    """ECE over all components, in the paper's form: the sum over bins divided by N."""
    lines, records = [], []
    for row, source, runs, cell in _lines(rows, TABLE_4):
        before = shown(numbers(runs, source.output, "ece_all"))
        after = NONE if source.output != "main" else shown(numbers(runs, "main", "ece_all", "after"))
        where = f"{row.epochs}; {len(runs)}" if runs else GAP
        lines.append([title_of(row.data, row.model), source.title, where, before, after,
                      paper_cell(cell, "before"), paper_cell(cell, "after")])  # fmt: skip
        records.append(_record(row, source, runs, cell, "ece_all"))
    head = ["row", "method", "epochs; seeds", "as trained", "after temperature", "*paper: as trained*",
            "*paper: after T (T)*"]  # fmt: skip
    notes = [
        PAPER_NOTE,
        "Percent. All N K probabilities go into 15 common bins; the sum over bins is divided by N, which is the only "
        "reading that fits the paper's numbers. Divided by N K it would be smaller by the number of classes.",
        "The band of a perfect model is not recorded for this form. Read it beside Table 1, where it is.",
    ]
    return Table(
        "table4", "Table 4: ECE over all components", head, lines, notes, records, gaps(rows, TABLE_4)
    )


def _lines(
    rows: Rows, published: Mapping[tuple[str, str], PaperRow], rivals: Sequence[Source] = ()
) -> Iterator[tuple[Row, Source, list[Run], Cell | None]]:
    """The lines of every row that has a run, in the paper's order: our runs of it (maybe none) and the paper's cell."""
    for row in sorted(rows, key=paper_order):
        printed = published.get((row.data, row.model))
        for source in (*PAPER_SOURCES, AUTO, *_present(rivals, rows[row])):
            cell = printed.cell(source.key) if printed and source in PAPER_SOURCES else None
            runs = having(rows[row].get(source.method, []), source.output)
            if runs or cell is not None:
                yield row, source, runs, cell


def paper_order(row: Row) -> tuple[int, Row]:
    """For sorting: the paper's rows in its order, then others."""
    keys = list(TABLE_1)
    return (keys.index((row.data, row.model)) if (row.data, row.model) in TABLE_1 else len(keys), row)


def gaps(rows: Rows, published: Mapping[tuple[str, str], PaperRow]) -> str:
    """The paper's rows that were not run here, as it prints them."""
    have = {(row.data, row.model) for row in rows}
    missing = {key: row for key, row in published.items() if key not in have}
    if not missing:
        return ""
    head = ["not run here", *(f"*{source.title}*" for source in PAPER_SOURCES)]
    lines = []
    for key, row in missing.items():
        cells = [f"*{cell.before:.2f}, {cell.after:.2f} ({cell.temperature:.1f})*" for cell in row.losses]
        lines.append([title_of(*key), *cells, f"*{row.no_annealing:.2f}*", f"*{row.annealing:.2f}*"])
    table = Table("", "", head, lines).markdown()
    return f"## Rows not run yet\n\nThe paper's numbers alone: as trained, after temperature (T).\n\n{table}"


def _present(sources: Sequence[Source], methods: Mapping[str, list[Run]]) -> list[Source]:
    return [source for source in sources if source.method in methods]


def _record(row: Row, source: Source, runs: list[Run], cell: Cell | None, key: str) -> dict[str, Any]:
    """One line of a CSV: numbers as fractions, the paper's as it prints them."""
    record: dict[str, Any] = {
        "data": row.data, "model": row.model, "method": source.key, "epochs": row.epochs or "", "seeds": len(runs),
    }  # fmt: skip
    floor = (
        ("ece_floor_low", "ece_floor_high") if key == "ece" else ()
    )  # the only form whose floor is recorded
    wanted = {"before": ("accuracy", key, *floor, "nll", "brier")}
    if source.output == "main":
        wanted["after"] = (key, *floor, "nll", "brier")
        wanted["after_grid"] = (key,)
        wanted[""] = ("temperature", "grid_temperature")
    for when, keys in wanted.items():
        for one in keys:
            found = numbers(runs, source.output, one, when)
            record["_".join(filter(None, (one, when)))] = "" if found is None else f"{found.mean:.6g}"
            if found is not None and found.n > 1 and one == key:
                record[f"{one}_{when}_sd"] = f"{found.sd:.3g}"
    return record | {f"paper_{name}": value for name, value in (cell._asdict() if cell else {}).items()}


def table2(rows: Rows, heads: Sequence[Source]) -> Table:
    """AUROC of confidence: CIFAR-10's test images against the same with noise, and against SVHN."""
    lines, records = [], []
    for shift in SHIFTED:
        name = {"gaussian_noise:5": "Gaussian noise, severity 5", "ood:svhn": "SVHN"}[shift]
        for (where, model), cells in TABLE_2.items():
            if where == shift:
                for source in PAPER_SOURCES[:4] + PAPER_SOURCES[5:]:
                    cell = cells[source.key]
                    lines.append([name, f"*paper: {MODEL_TITLES[model]}*", source.title,
                                  paper_cell(cell, "before"), f"*{cell.after:.2f}*"])  # fmt: skip
        for row in [row for row in sorted(rows) if row.data == "cifar10"]:
            for source in (*PAPER_SOURCES, AUTO, *heads, *RIVALS):
                line, record = _table2_line(row, rows[row].get(source.method, []), source, shift)
                if record:
                    lines.append([name, *line])
                    records.append(record)
    head = ["against", "network", "method", "as trained", "after temperature"]
    outputs = [record["method"] for record in records]
    notes = [
        "Percent. How often an image of CIFAR-10's test set gets more confidence than a shifted one.",
        PAPER_NOTE
        + " The paper's networks here are other ones than ours, so only the order of methods can be compared.",
        'Heads marked "perturbed" saw Gaussian noise in training, so the noise is no surprise to them; SVHN is.'
        + ' The guard marked "family unseen" saw other noises but not this one.'
        * any(map(is_guard, outputs)),
    ]
    return Table("table2", "Table 2: AUROC under distribution shift", head, lines, notes, records)


def _table2_line(row: Row, runs: list[Run], source: Source, shift: str) -> tuple[list[str], dict[str, Any]]:
    found = {}
    for suffix in ("", "+T"):
        values = [run.shifted(shift, source.output + suffix, "auroc") for run in runs]
        found[suffix] = spread([value for value in values if value is not None])
    if found[""] is None:
        return [], {}
    n = found[""].n
    network = f"{MODEL_TITLES.get(row.model, row.model)}, {row.epochs} epochs, {seeds_said(n)}"
    after = shown(found["+T"]) if source.output == "main" else NONE
    record = {"against": shift, "model": row.model, "epochs": row.epochs, "seeds": n, "method": source.key,
              "auroc": f"{found[''].mean:.6g}", **({"auroc_sd": f"{found[''].sd:.3g}"} if n > 1 else {})}  # fmt: skip
    if found["+T"] is not None and source.output == "main":
        record |= {"auroc_after_temperature": f"{found['+T'].mean:.6g}"}
    return [network, source.title, shown(found[""]), after], record


def table3(rows: Rows, speed: Path = SPEED) -> Table:
    """Overhead and ECE against the calibration period k."""
    timed = json.loads(speed.read_text())["head_adds_percent"] if speed.exists() else {}
    found = reference(rows)
    runs = found[1].get("cross-entropy", []) if found else []
    lines, records = [], []
    for k in TABLE_3_PERIODS:
        overhead = timed.get(f"ours, head every {k}", math.nan)
        names = ("annealing-double-head", "temperature-1.2")
        outputs = [name if k == 10 else f"{name}-k{k}" for name in names]
        lines.append([str(k), GAP if math.isnan(overhead) else f"{overhead:.2f}",
                      *(ece_cell(runs, output, of=len(runs)) for output in outputs),
                      f"*{TABLE_3_OVERHEAD[k]:.2f}*", f"*{TABLE_3_ECE[k]:.2f}*"])  # fmt: skip
        eces = [numbers(runs, output, "ece") for output in outputs]
        records.append({"k": k, "overhead_percent": "" if math.isnan(overhead) else overhead,
                        **{f"ece_{name}": f"{ece.mean:.6g}" if ece else "" for name, ece in zip(names, eces)},
                        "paper_overhead_percent": TABLE_3_OVERHEAD[k],
                        "paper_ece_percent": TABLE_3_ECE[k]})  # fmt: skip
    head = ["k", "overhead %", "ECE, paper's head, beta0 1.2", "ECE, temperature head, beta0 1.2",
            "*paper: overhead %*", "*paper: ECE*"]  # fmt: skip
    notes = [
        "Overhead: training time with one head against without, ResNet-50, batch 128, medians over rounds that take "
        "turns in one process on one H200 (`benchmarks/gpu_training.py`).",
        "ECE: heads with every period ride on one CIFAR-10 ResNet-50 run (`experiments/run.py cifar10 resnet50 "
        f"--methods cross-entropy`); {seeds_said(len(runs))}, fewer where a cell says so. " + BAND_NOTE,
        "An evaluation forward pass costs about a third of a training step, so about 33/k percent can be expected.",
    ]
    return Table(
        "table3", "Table 3: overhead and ECE against the calibration period", head, lines, notes, records
    )
