"""Summary: every number of some predictions, with intervals, the floor of the ECE and a verdict.

It is made from the sums of a `stream.Tally`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doublehead import metrics
from doublehead.abstain import ThresholdChoice, choose_threshold
from doublehead.bins import Bins
from doublehead.calibrators.choose import Scores, score_table
from doublehead.curves import ClassGaps, class_gaps_of, reliability
from doublehead.metrics import Floor, Interval
from doublehead.outcomes import MIN_SAMPLES, Outcomes
from doublehead.predictions import Predictions
from doublehead.system import require

# How far an ECE may lie above its floor. One point in a hundred is about what people can act on; above five a stated
# 95 % may as well be 90 %.
SLIGHT, SEVERE = 0.01, 0.05
LEVEL = 0.05  # p-values above it are called chance
MIN_SAMPLES_CALIBRATED = 100  # below it nothing is called calibrated


class Grade(NamedTuple):
    """A short word for a badge and a key for its colour."""

    key: str
    word: str


UNKNOWN = Grade("unknown", "too few samples to judge")
CALIBRATED = Grade("good", "calibrated")
CLASSES_OFF = Grade("fair", "calibrated overall, not in every class")
GROUPS_OFF = Grade("fair", "calibrated overall, not in every group")
SLIGHTLY_OFF = Grade("fair", "slightly miscalibrated")
OFF = Grade("poor", "miscalibrated")
FAR_OFF = Grade("bad", "badly miscalibrated")


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


@dataclass(frozen=True, eq=False)
class Summary:
    """Every number of some predictions; the bounds of an interval are nan where none is known.

    `print(summary)` shows a table. Metrics that need all samples at once (adaptive_ece, smooth_ece, aurc, ...) are
    absent where the predictions were streamed, weighted or have soft labels.

    >>> summary = Summary.of(Predictions([[2.0, 0.0], [0.0, 1.0]], [0, 1]))
    >>> summary.n, summary.values["accuracy"], round(summary.values["ece"], 4), summary.grade.word
    (2, 1.0, 0.1941, 'too few samples to judge')
    """

    n: int
    n_classes: int
    n_bins: int
    metrics: dict[str, Interval]  # by the names of METRICS
    floor: Floor  # ECE of a perfectly calibrated model with the same confidences
    p_value: float  # of `metrics.calibration_test`
    bins: Bins  # fine top-label bins
    classes: ClassGaps | None = None
    groups: dict[str, Summary] = field(default_factory=dict)
    n_zero_labels: int = 0  # samples whose label has a probability of exactly 0
    zero_floor: float = 0.0  # what such a probability is taken as
    answers: Tensor | None = None  # `abstain.threshold_counts`, for `abstain`

    @classmethod
    def of(cls, p: Predictions, n_bins: int = 15, by: Any = None, seed: int = 0) -> Summary:
        """The summary of predictions in memory; `by` holds the group of each sample, see `groups`.

        Where samples have several labels, the labels are the groups.
        """
        from doublehead.stream import Tally, row_groups

        summary = Tally.of(p.with_countable_weights(), n_bins, row_groups(p, by)).summary(seed)
        return summary if p.weights is not None or p.are_soft else add_sample_metrics(summary, p)

    @property
    def values(self) -> dict[str, float]:
        """Every number by name, without intervals."""
        floor = {f"ece_floor{end}": value for end, value in zip(("", "_low", "_high"), self.floor)}
        found = {name: value.estimate for name, value in self.metrics.items()}
        return {"n": self.n, **found, **floor, "p_value": self.p_value}

    @property
    def grade(self) -> Grade:
        """By the calibration test first, then by how far the ECE lies above that of a calibrated model."""
        by_chance = self.p_value >= LEVEL
        if self.n < MIN_SAMPLES or (
            by_chance and (self.n < MIN_SAMPLES_CALIBRATED or self.floor.high > SEVERE)
        ):
            return UNKNOWN
        if by_chance:
            return CLASSES_OFF if self.n_classes_off else GROUPS_OFF if self.groups_off else CALIBRATED
        excess = self.metrics["ece"].estimate - self.floor.mean
        return SLIGHTLY_OFF if excess < SLIGHT else OFF if excess < SEVERE else FAR_OFF

    @property
    def n_classes_off(self) -> int:
        """How many classes deviate by more than chance explains (5 % for all classes together)."""
        return 0 if self.classes is None else int(self.classes.off.sum())

    @property
    def group_gaps(self) -> ClassGaps | None:
        """What is claimed and how often it is right, group by group in the order of `groups`."""
        if not self.groups:
            return None
        bins = [group.bins.coarsen(self.n_bins).state() for group in self.groups.values()]
        stacked = Bins.from_state(torch.stack(bins, 1))
        return class_gaps_of(stacked, stacked)

    @property
    def groups_off(self) -> list[str]:
        """The groups that deviate by more than chance explains (5 % for all groups together)."""
        gaps = self.group_gaps
        return [] if gaps is None else [name for name, off in zip(self.groups, gaps.off) if off]

    def abstain(self, max_error: float, confidence: float = 0.95) -> ThresholdChoice:
        """The confidence above which answers have an error of at most `max_error`, see `choose_threshold`."""
        if self.answers is None:
            raise ValueError("a summary made without thresholds cannot choose one")
        return choose_threshold(self.answers, max_error, confidence)

    @property
    def verdict(self) -> str:
        """The grade and the numbers behind it in one sentence."""
        grade, n = self.grade, f"{self.n:,} sample{'s' if self.n > 1 else ''}"
        ece = f"ECE {percent(self.metrics['ece'].estimate)}"
        perfect = f"a perfectly calibrated model with these confidences scores {span(*self.floor[1:])}"
        chance = f"p {p_value_text(self.p_value, '= ')}"
        if grade is UNKNOWN:
            return f"{capital(grade.word)}: {ece} on {n}; {perfect}."
        if grade is CALIBRATED:
            return f"Calibrated: no miscalibration can be shown on {n}; {ece}, {perfect} ({chance})."
        parts = [] if grade in (CLASSES_OFF, GROUPS_OFF) else [self._direction()]
        if self.classes is not None and self.n_classes_off:
            n_predicted = int((self.classes.counts > 0).sum())
            parts.append(
                f"{self.n_classes_off} of {n_predicted} predicted classes {deviate(self.n_classes_off)}"
            )
        if self.groups_off:
            parts.append(
                f"{len(self.groups_off)} of {len(self.groups)} groups {deviate(len(self.groups_off))}"
            )
        return f"{capital(grade.word)}: {'; '.join([*parts, ece])}, {perfect} ({chance})."

    @property
    def notes(self) -> list[str]:
        """Further facts that are needed to read the numbers, as sentences."""
        if not self.n_zero_labels:
            return []
        nll, n = self.metrics["nll"].estimate, f"{self.n_zero_labels:,} of {self.n:,} samples"
        return [
            f"The true class of {n} has a probability of exactly 0. With zeros taken as {self.zero_floor:.2g}, below "
            f"the resolution of the probabilities, the NLL is {nll:.4f}; as written it is infinite."
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, None for bounds that are not known."""
        found: dict[str, Any] = {
            "n": self.n,
            "n_classes": self.n_classes,
            "n_bins": self.n_bins,
            "metrics": {
                name: {key: None if math.isnan(x) else x for key, x in zip(("value", "low", "high"), value)}
                for name, value in self.metrics.items()
            },
            "ece_floor": self.floor._asdict(),
            "calibration_p_value": self.p_value,
            "n_classes_off": None if self.classes is None else self.n_classes_off,
            "grade": self.grade.word,
            "verdict": self.verdict,
            "notes": self.notes,
        }
        if self.groups:
            found["groups"] = {name: group.to_dict() for name, group in self.groups.items()}
            found["groups_off"] = self.groups_off
        return found

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row per metric: value, low, high."""
        rows = {**self.metrics, "ece_floor": Interval(*self.floor)}
        columns = ["value", "low", "high"]
        return require("pandas", extra="tables").DataFrame.from_dict(rows, orient="index", columns=columns)

    def plot(self, ax: Any = None, *, title: str | None = None) -> Any:
        """Draw the reliability diagram; returns the matplotlib axes."""
        from doublehead.plots import draw_reliability

        return draw_reliability(reliability(self.bins, self.n_bins), ax, title=title)

    @property
    def _size(self) -> str:
        n = f"{self.n:,} prediction{'s' if self.n > 1 else ''}"
        return f"{n} of {self.n_classes} classes" if self.n_classes else n

    def __str__(self) -> str:
        parts = [self._size, side_by_side({"value": self}, meanings=True)]
        if self.groups:
            parts.append(aligned(self._group_rows()))
        return "\n\n".join([*parts, self.verdict, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        html = f"<p>{self._size}</p>" + html_table(summary_rows({"value": self}, meanings=True))
        html += html_table(self._group_rows()) if self.groups else ""
        return html + "".join(f"<p>{escape(text)}</p>" for text in (self.verdict, *self.notes))

    def _group_rows(self) -> list[list[str]]:
        """A row per group; p-values of the overconfidence are corrected for the number of groups."""
        scores = [key for key in ("nll", "brier") if key in self.metrics]
        ece = ["ECE", "95 % interval", "ECE floor"]
        rows = [["group", "n", "accuracy", *ece, "overconfidence", "corrected p"]]
        rows[0] += [METRICS[key].title for key in scores]
        gaps = self.group_gaps
        chances = [1.0] * len(self.groups) if gaps is None else gaps.p_value * len(self.groups)
        for (name, group), chance in zip(self.groups.items(), chances):
            m = group.metrics
            ece = [percent(m["ece"].estimate), shown_interval(m["ece"], True), span(*group.floor[1:])]
            tested = [percent(m["overconfidence"].estimate), p_value_text(min(1.0, float(chance)))]
            values = [f"{m[key].estimate:.4f}" for key in scores]
            rows.append([name, f"{group.n:,}", percent(m["accuracy"].estimate), *ece, *tested, *values])
        return rows

    def _direction(self) -> str:
        over = self.metrics["overconfidence"].estimate
        if abs(over) < 0.5 * self.metrics["ece"].estimate:
            return "overconfident in some bins and underconfident in others"
        return f"{'over' if over > 0 else 'under'}confident by {100 * abs(over):.2f} points on average"


def add_sample_metrics(summary: Summary, p: Predictions | Outcomes) -> Summary:
    """The summary with the metrics that need the confidences of all samples at once."""
    confidences: Any = p  # all that these metrics read
    per_sample = {
        "adaptive_ece": metrics.adaptive_ece(confidences, summary.n_bins),
        "debiased_ece": metrics.debiased_ece(confidences, summary.n_bins),
        "smooth_ece": metrics.smooth_ece(confidences),
        "ks_error": metrics.ks_error(confidences),
        "aurc": metrics.aurc(confidences),
    }
    found = summary.metrics | {name: without_interval(value) for name, value in per_sample.items()}
    return replace(summary, metrics={name: found[name] for name in METRICS if name in found})


class Summaries(dict[str, Summary]):
    """Summaries by name; `print` shows the usual numbers of each in one line, `side_by_side` shows all."""

    def __str__(self) -> str:
        rows = {
            name: Scores(*(one.values[key] for key in ("nll", "ece", "ece_floor", "accuracy")))
            for name, one in self.items()
        }
        return score_table(rows)

    __repr__ = __str__


def side_by_side(summaries: Mapping[str, Summary], *, meanings: bool = False) -> str:
    """A text table with a row per metric and two columns per summary: value and interval."""
    return aligned(summary_rows(summaries, meanings))


def summary_rows(summaries: Mapping[str, Summary], meanings: bool) -> list[list[str]]:
    """The cells of `side_by_side`, the header first."""
    found = list(summaries.values())
    rows = [["", *(title for name in summaries for title in (name, "95 % interval")), "meaning"]]
    for key, metric in METRICS.items():
        if any(key not in summary.metrics for summary in found):
            continue
        row = [f"{metric.title} ({found[0].n_bins} bins)" if key == "ece" else metric.title]
        for value in (summary.metrics[key] for summary in found):
            row += [shown(value.estimate, metric.is_share), shown_interval(value, metric.is_share)]
        rows.append([*row, metric.meaning])
        if key == "ece":
            floors = [text for s in found for text in (percent(s.floor.mean), span(*s.floor[1:]))]
            rows.append(["ECE floor", *floors, "ECE of a perfectly calibrated model, mean and 5 to 95 %"])
    return rows if meanings else [row[:-1] for row in rows]


def without_interval(value: float) -> Interval:
    """A number of which no interval is known."""
    return Interval(value, math.nan, math.nan)


def aligned(rows: Sequence[Sequence[str]], left: Sequence[str] = ("", "group", "method", "meaning")) -> str:
    """Text columns, the header first; those whose title is in `left` to the left, numbers to the right."""
    signs = ["<" if title in left else ">" for title in rows[0]]
    widths = [max(map(_width, column)) for column in zip(*rows)]
    lines = (
        "  ".join(
            f"{cell:{sign}{width - _width(cell) + len(cell)}}"
            for cell, sign, width in zip(row, signs, widths)
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _width(text: str) -> int:
    """How many columns of a terminal a text takes: two for each letter of Chinese, Japanese and Korean."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)


def fixed(value: float, digits: int, sign: str = "-") -> str:
    """A number with so many digits, and no minus before zeros; with the sign "+" one before positive numbers too.

    >>> fixed(-0.001, 2), fixed(0.0475, 2, "+")
    ('0.00', '+0.05')
    """
    return f"{round(float(value), digits) + 0.0:{sign}.{digits}f}"


def percent(value: float, digits: int = 2) -> str:
    """4.75 % for the fraction 0.0475."""
    return f"{fixed(100 * value, digits)} %"


def p_value_text(value: float, equal: str = "") -> str:
    """0.032, or < 0.001."""
    return "< 0.001" if value < 0.001 else f"{equal}{value:.2g}"


def span(low: float, high: float) -> str:
    """0.17 to 0.39 % for fractions."""
    return f"{fixed(100 * low, 2)} to {fixed(100 * high, 2)} %"


def shown(value: float, is_share: bool) -> str:
    """4.75 % for the share 0.0475, 0.3583 for other numbers."""
    return percent(value) if is_share else fixed(value, 4)


def shown_interval(value: Interval, is_share: bool) -> str:
    """4.32 to 5.19 %, or nothing where no interval is known."""
    if math.isnan(value.low):
        return ""
    return span(value.low, value.high) if is_share else f"{value.low:.4f} to {value.high:.4f}"


def deviate(n: int) -> str:
    """The verb of `n` classes or groups that a verdict counts."""
    return f"deviate{'s' if n == 1 else ''} by more than chance"


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as an HTML table, the header first."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows[1:])
    lines = "".join(f"<tr>{cells}</tr>" for cells in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
