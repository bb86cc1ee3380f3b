"""What the auto head chose in each run, and its numbers beside temperature scaling's."""

from __future__ import annotations

from committed import Run, having, numbers
from tables import AUTO, BAND_NOTE, Rows, Table, before_curves, ece_cell, paper_order, row_title, shown

from doublehead.last_map import ENOUGH


def choice_of(run: Run) -> str:
    """The spec of the chosen head in words."""
    spec = (run.results.get("selection") or {}).get("spec")
    if not spec:
        return "the scalar temperature"
    if spec["kind"] == "mlp":
        return f"the paper's head, beta0 {spec['beta0']:g}"
    reads = [spec["reads"]] if isinstance(spec["reads"], str) else spec["reads"]
    return f"reads {' and '.join(reads)}, beta0 {spec['beta0']:g}"


def last_of(run: Run) -> str:
    """What auto ends with, in words."""
    if before_curves(run):
        return "a temperature (made before curves)"
    return (
        "a temperature and a curve" if (run.results.get("selection") or {}).get("bends") else "a temperature"
    )


def auto_table(rows: Rows) -> Table:
    """One line for each run that has the auto head."""
    lines = []
    for row in sorted(rows, key=paper_order):
        for run in having(rows[row].get("cross-entropy", []), AUTO.output):
            lines.append([f"{row_title(row, rows)}, seed {run.seed}", *_cells(run)])
    head = ["run", "auto chose", "and ended with", "accuracy: network", "auto",
            "ECE: cross entropy + temperature", "auto",
            "NLL: cross entropy + temperature", "auto", "Brier: cross entropy + temperature", "auto"]  # fmt: skip
    notes = [
        BAND_NOTE,
        "Percent but for NLL and Brier.",
        "Candidates: per-sample temperature heads, which keep every prediction, and the paper's head. Each competes at "
        "the scale that suits it best on a fifth of the calibration data held back from all of them. A head is chosen "
        "if its NLL is lower than the scalar temperature's by more than a standard error, the paper's only if it is "
        "right there at least as often as the network.",
        f"A curve follows where at least {ENOUGH:,} calibration samples show, fold by fold, that it has a lower NLL "
        "than a temperature alone (`doublehead.last_map`). After the paper's head, which knows the data that it "
        "learned from too well, only held-back samples count.",
    ]
    return Table("auto", "What auto chose, run by run", head, lines, notes)


def _cells(run: Run) -> list[str]:
    pair = ("main+T", AUTO.output)
    accuracies = [shown(numbers([run], output, "accuracy")) for output in ("main", AUTO.output)]
    eces = [ece_cell([run], output) for output in pair]
    scores = [
        shown(numbers([run], output, key), scale=1, digits=4) for key in ("nll", "brier") for output in pair
    ]
    return [choice_of(run), last_of(run), *accuracies, *eces, *scores]
