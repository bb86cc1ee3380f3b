"""How numbers are shown: the metrics by name, formats of numbers, text and HTML tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from doublehead.metrics import Interval


class Metric(NamedTuple):
    """How a metric is shown."""

    title: str
    is_share: bool  # shown in percent
    better: int  # +1 where more is better, -1 where less is, 0 where neither
    meaning: str


METRICS = {
    "accuracy": Metric("accuracy", True, 1, "share of correct predictions"),
    "mean_confidence": Metric("mean confidence", True, 0, "should equal the accuracy"),
    "overconfidence": Metric("overconfidence", True, 0, "mean confidence minus accuracy"),
    "ece": Metric("ECE", True, -1, "mean gap between confidence and accuracy"),
    "ece2": Metric("ECE, squared", True, -1, "root mean squared gap"),
    "mce": Metric("MCE", True, 0, "gap of the worst bin; noisy"),
    "ece_classwise": Metric("ECE, class-wise", True, -1, "mean over classes, each against the rest"),
    "ece_all": Metric("ECE, all components", True, -1, "all probabilities pooled, divided by N"),
    "adaptive_ece": Metric("ECE, equal-mass", True, -1, "over bins that hold equally many samples"),
    "debiased_ece": Metric("ECE, debiased", True, -1, "root mean squared gap without the part due to chance"),
    "smooth_ece": Metric("ECE, smooth", True, -1, "without bins, by smoothing"),
    "ks_error": Metric("KS error", True, -1, "without bins, largest cumulative gap"),
    "nll": Metric("NLL", False, -1, "proper score, nats; penalises confident errors"),
    "brier": Metric("Brier score", False, -1, "proper score, 0 to 2"),
    "mean_entropy": Metric("mean entropy", False, 0, "uncertainty of the predictions, nats"),
    "aurc": Metric("AURC", True, -1, "mean error over all coverages"),
}


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Text columns: the first and any column of meanings to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    left = {0, *(i for i, title in enumerate(rows[0]) if title == "meaning")}
    lines = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def percent(value: float, digits: int = 2) -> str:
    """4.75 % for the fraction 0.0475."""
    return f"{100 * value:.{digits}f} %"


def p_value_text(value: float, equal: str = "") -> str:
    """0.032, or < 0.001."""
    return "< 0.001" if value < 0.001 else f"{equal}{value:.2g}"


def span(low: float, high: float) -> str:
    """0.17 to 0.39 % for fractions."""
    return f"{100 * low:.2f} to {100 * high:.2f} %"


def shown(value: float, is_share: bool) -> str:
    """4.75 % for the share 0.0475, 0.3583 for other numbers."""
    return percent(value) if is_share else f"{value:.4f}"


def shown_interval(value: Interval, is_share: bool) -> str:
    """4.32 to 5.19 %, or nothing where no interval is known."""
    if math.isnan(value.low):
        return ""
    return span(value.low, value.high) if is_share else f"{value.low:.4f} to {value.high:.4f}"


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as an HTML table, the header first."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows[1:])
    lines = "".join(f"<tr>{cells}</tr>" for cells in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
