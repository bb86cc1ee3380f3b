"""What the auto head chose in each run, and its numbers beside temperature scaling's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from committed import Run, having, numbers
from doublehead.head_bank import AUTO as CANDIDATES
from doublehead.head_bank import HeadSpec
from doublehead.last_map import ENOUGH
from tables import AUTO, BAND_NOTE, Rows, Table, before_curves, ece_cell, paper_order, row_title, shown

DEFAULT = HeadSpec(
    beta0=1.0, lr=0.3, hidden=16, reads=("statistics",)
)  # the head of a DoubleHead made without options
KINDS = {
    "CIFAR-10": ("cifar10",),
    "CIFAR-100": ("cifar100",),
    "texts": ("sst-fine", "sst-binary", "20newsgroups-bydate"),
}


def choice_of(run: Run) -> str:
    """The spec of the chosen head in words."""
    spec = (run.results.get("selection") or {}).get("spec")
    return in_words(spec) if spec else "the scalar temperature"


def in_words(spec: dict[str, Any]) -> str:
    """A candidate, from the fields of its HeadSpec."""
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


def candidates_table(rows: Rows) -> Table:
    """Each candidate's NLL on held-back calibration data less the scalar temperature's."""
    kinds = {kind: _behind(rows, names) for kind, names in KINDS.items()}
    everything = [run for runs in kinds.values() for run in runs]
    lines = []
    for number, spec in enumerate(CANDIDATES if everything else ()):
        means = [f"{fmean(run[number] for run in runs):+.4f}" if runs else "" for runs in kinds.values()]
        each = [run[number] for run in everything]
        below = f"{sum(one < 0 for one in each)} of {len(each)}"
        title = in_words(asdict(spec))
        lines.append([f"**{title}**" if spec == DEFAULT else title, *means, f"{max(each):+.4f}", below])
    head = ["candidate", *(f"{kind}, mean of {len(runs)}" for kind, runs in kinds.items()), "worst", "below"]
    notes = [
        "NLL on the fifth of the calibration data that was held back from all heads, each at the scale that suits it "
        "best there, less that of the scalar temperature: negative is better. No test data has a part in it.",
        "Bold: what `DoubleHead(network)` trains unless told otherwise; on texts all heads learned at 0.3 times its "
        "rates. Heads that read statistics are the least far behind the temperature in their worst run. On texts, with "
        "700 to 900 samples to learn from, a temperature is ahead of all heads on average. Those that read features "
        "are far behind it there, the paper's head on CIFAR-100 too.",
        *([as_trained(rows)] if as_trained(rows) else []),
    ]
    return Table("candidates", "Auto's candidates on held-back calibration data", head, lines, notes)


def as_trained(rows: Rows) -> str:
    """The default head on test data, before any `refit`, and the same with a little annealing; nothing if not run."""
    told = []
    for output in ("statistics-1", "statistics-1.1"):
        runs = [run for row in rows for run in having(rows[row].get("cross-entropy", []), output)]
        gaps = [(run.number(output, "nll") or 0.0) - (run.number("main+T", "nll") or 0.0) for run in runs]
        if not gaps:
            return ""
        above, ends = sum(one > 0 for one in gaps), f"{min(gaps):+.4f} to {max(gaps):+.4f}"
        told.append(f"{above} of the {len(gaps)} runs that have it ({ends})")
    return (
        f"On test data, as training left it, the bold head's NLL is above temperature scaling's in {told[0]}, that of "
        f"the same head with beta0 1.1 in {told[1]}. That is what `refit` at the end is for."
    )


def _behind(rows: Rows, names: Sequence[str]) -> list[list[float]]:
    """For each run on these data sets, by how much each candidate is behind the scalar temperature."""
    runs = [run for row in rows if row.data in names for run in rows[row].get("cross-entropy", [])]
    found = [run.results.get("selection") or {} for run in having(runs, AUTO.output)]
    return [[score - one["temperature_score"] for score in one["scores"]] for one in found if "scores" in one]
