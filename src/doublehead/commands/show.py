"""How the commands speak: tables on standard output, notes and progress on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from doublehead.metrics import Interval
from doublehead.report.verdict import CALIBRATED, FAR_OFF, LEVEL, NEARLY, OFF, SEVERE, SLIGHT
from doublehead.tables.reading import PredictionTable
from doublehead.tables.tally import Summary

# name of the metric -> what it is called, its unit, what it says
ROWS = {
    "accuracy": ("accuracy", "%", "share of right answers"),
    "mean_confidence": ("mean confidence", "%", "should equal the accuracy"),
    "overconfidence": ("overconfidence", "%", "mean confidence minus accuracy"),
    "ece": ("ECE", "%", "mean gap between confidence and accuracy"),
    "ece2": ("ECE, squared", "%", "root mean squared gap"),
    "mce": ("MCE", "%", "gap of the worst bin"),
    "ece_classwise": ("ECE, class-wise", "%", "mean over classes, each against the rest"),
    "ece_all": ("ECE, all components", "%", "all probabilities pooled, divided by N"),
    "nll": ("NLL", "", "proper score, nats; punishes confident errors"),
    "brier": ("Brier score", "", "proper score, 0..2"),
    "mean_entropy": ("mean entropy", "", "how undecided the model is, nats"),
}
METHOD = (
    "Intervals are 95 %: Poisson bootstrap over {cells} cells of confidence (1000 draws, seed 0, centred on the "
    "value), normal for NLL, Brier score and entropy."
)


def notes() -> Console:
    """Standard error, for what is not the result."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def results() -> Console:
    """Standard output; as wide as it needs where it is not a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=150)


def tell_reading(table: PredictionTable, what: str) -> None:
    """Say what was guessed about the columns."""
    if table.layout.guesses:
        notes().print(
            f"{escape(what)}: reading {escape(', '.join(table.layout.guesses))} as {table.kind}", style="dim"
        )


@contextmanager
def progress(what: str, n_bytes: int, least: int = 1 << 24) -> Iterator[Callable[[int], None]]:
    """A bar of bytes read, on a terminal and for 16 MB or more."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    hidden = n_bytes < least or not notes().is_terminal
    with Progress(*columns, console=notes(), transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=n_bytes)
        yield lambda done: bar.update(task, advance=done)


def summary_table(summary: Summary, n_bins: int) -> Table:
    """Every metric with its interval and what it says."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("what it says")
    for name, (title, unit, says) in ROWS.items():
        if name in summary.metrics:
            value, extra, perfect = summary.metrics[name], "", ""
            if name == "ece":
                extra, perfect = f" ({n_bins} bins)", f"; perfect here: {floor(summary)}"
            table.add_row(title + extra, number(value.estimate, unit), interval(value, unit), says + perfect)
    return table


def groups_table(groups: Mapping[str, Summary], by: str) -> Table:
    """One row a group."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(escape(by))
    for title in (
        "n",
        "accuracy",
        "ECE",
        "95 % interval",
        "perfect here",
        "overconfidence",
        "NLL",
        "Brier score",
    ):
        table.add_column(title, justify="right")
    for name, summary in groups.items():
        m = summary.metrics
        table.add_row(
            escape(name),
            f"{summary.n:,}",
            number(m["accuracy"].estimate, "%"),
            number(m["ece"].estimate, "%"),
            interval(m["ece"], "%"),
            floor(summary),
            number(m["overconfidence"].estimate, "%"),
            number(m["nll"].estimate, ""),
            number(m["brier"].estimate, ""),
        )
    return table


def before_after_table(before: Summary, after: Summary, n_bins: int) -> Table:
    """Two summaries side by side."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for title in ("before", "95 % interval", "after", "95 % interval"):
        table.add_column(title, justify="right")
    for name, (title, unit, _) in ROWS.items():
        if name in before.metrics:
            shown = f"{title} ({n_bins} bins)" if name == "ece" else title
            cells: list[str] = []
            for summary in (before, after):
                value = summary.metrics[name]
                cells += [number(value.estimate, unit), interval(value, unit)]
            table.add_row(shown, *cells)
    table.add_row("ECE of a perfect model", floor(before), "", floor(after), "")
    return table


def verdict(summary: Summary) -> str:
    """Whether the confidences can be trusted, in one sentence, in the words of the report."""
    ece, over = summary.metrics["ece"].estimate, summary.metrics["overconfidence"].estimate
    perfect = f"{100 * summary.floor.low:.2f} .. {100 * summary.floor.high:.2f} %"
    if summary.p_value >= LEVEL and summary.floor.high > SEVERE:
        return (
            f"{summary.n:,} samples are too few to judge the confidences: ECE {100 * ece:.2f} %, and even a perfectly "
            f"calibrated model scores {perfect}."
        )
    if summary.p_value >= LEVEL:
        return (
            f"The confidences {CALIBRATED.advice}: no miscalibration can be shown on {summary.n:,} samples (ECE "
            f"{100 * ece:.2f} %, a perfectly calibrated model scores {perfect}, p = {summary.p_value:.2g})."
        )
    excess = ece - summary.floor.mean
    found = NEARLY if excess < SLIGHT else OFF if excess < SEVERE else FAR_OFF
    chance = "p < 0.001" if summary.p_value < 0.001 else f"p = {summary.p_value:.2g}"
    return (
        f"The confidences {found.advice}: ECE {100 * ece:.2f} %, where a perfectly calibrated model with these "
        f"confidences scores {perfect} ({chance}); on average {'over' if over > 0 else 'under'}confident by "
        f"{100 * abs(over):.2f} points."
    )


def number(value: float, unit: str) -> str:
    """4.75 % for the fraction 0.0475, 0.3583 without a unit."""
    return f"{100 * value:.2f} %" if unit == "%" else f"{value:.4f}"


def interval(value: Interval, unit: str) -> str:
    """4.32 .. 5.19, or nothing where none is known."""
    if value.low != value.low:
        return ""
    low, high = (f"{100 * v:.2f}" if unit == "%" else f"{v:.4f}" for v in (value.low, value.high))
    return f"{low} .. {high}"


def floor(summary: Summary) -> str:
    """0.27 % (0.17 .. 0.39)."""
    low, high = (f"{100 * bound:.2f}" for bound in (summary.floor.low, summary.floor.high))
    return f"{100 * summary.floor.mean:.2f} % ({low} .. {high})"


def plain(summary: Summary) -> dict[str, Any]:
    """A summary for JSON, with its verdict."""
    return {**summary.to_dict(), "verdict": verdict(summary)}
