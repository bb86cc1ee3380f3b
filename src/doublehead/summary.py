"""Summary: every number of some predictions, with intervals, the floor of the ECE and a verdict.

`Tally` holds the sums behind it. They do not grow with the data and add up exactly: sums of NLL, Brier score and
entropy are whole numbers in units of 2^-32, like the confidences in `Bins`, so a stream, a folder of files or a
cluster gives the same bits as one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from html import escape
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from doublehead import metrics
from doublehead.bins import UNIT, Bins
from doublehead.calibrators.choose import Scores, score_table
from doublehead.curves import ClassGaps, class_gaps_of, predicted_bins, reliability
from doublehead.metrics import Floor, Interval, ThresholdChoice, choose_threshold, fine_bins, threshold_counts
from doublehead.optional import require
from doublehead.outcomes import Outcomes
from doublehead.predictions import Predictions
from doublehead.showing import (
    METRICS,
    aligned,
    capital,
    html_table,
    p_value_text,
    percent,
    shown,
    shown_interval,
    span,
)

Array: TypeAlias = "np.ndarray[Any, Any]"

SCORES = {"nll": "nll", "brier": "brier", "entropy": "mean_entropy"}  # per sample -> its mean
MAX_GROUPS = 1000
Z = 1.959963984540054  # 97.5 % of a standard normal lie below

# How far an ECE may lie above its floor. One point in a hundred is about what people can act on; above five a stated
# 95 % may as well be 90 %.
SLIGHT, SEVERE = 0.01, 0.05
LEVEL = 0.05  # p-values above it are called chance
MIN_SAMPLES = 10  # below it nothing is judged
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


class TooManyGroups(ValueError):
    """The column of groups has too many different values."""


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
    bins: Bins | None = None  # fine top-label bins, for `plot`
    classes: ClassGaps | None = None
    groups: dict[str, Summary] = field(default_factory=dict)
    n_zero_labels: int = 0  # samples whose label has a probability of exactly 0
    zero_floor: float = 0.0  # what such a probability is taken as
    answers: Tensor | None = None  # `metrics.threshold_counts`, for `abstain`

    @classmethod
    def of(cls, p: Predictions, n_bins: int = 15, by: Any = None, seed: int = 0) -> Summary:
        """The summary of predictions in memory; `by` holds the group of each sample, see `groups`.

        Where samples have several labels, the labels are the groups.
        """
        summary = Tally.of(p, n_bins, row_groups(p, by)).summary(seed)
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
        bins = [group.bins.coarsen(self.n_bins) for group in self.groups.values() if group.bins is not None]
        if not bins:
            return None
        stacked = Bins.from_state(torch.stack([one.state() for one in bins], 1))
        return class_gaps_of(stacked, stacked)

    @property
    def groups_off(self) -> list[str]:
        """The groups that deviate by more than chance explains (5 % for all groups together)."""
        gaps = self.group_gaps
        return [] if gaps is None else [name for name, off in zip(self.groups, gaps.off) if off]

    def abstain(self, max_error: float, confidence: float = 0.95) -> ThresholdChoice:
        """The confidence from which on answers have an error of at most `max_error`, see `choose_threshold`."""
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
        classes = ""
        if self.n_classes_off:
            n_predicted = int((self.classes.counts > 0).sum()) if self.classes is not None else 0
            classes = f"{self.n_classes_off} of {n_predicted} predicted classes deviate by more than chance; "
        groups = ""
        if self.groups_off:
            groups = f"{len(self.groups_off)} of {len(self.groups)} groups deviate by more than chance; "
        direction = "" if grade in (CLASSES_OFF, GROUPS_OFF) else f"{self._direction()}; "
        return f"{capital(grade.word)}: {direction}{classes}{groups}{ece}, {perfect} ({chance})."

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers must know besides, in sentences."""
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
                name: {
                    "value": value.estimate,
                    "low": None if math.isnan(value.low) else value.low,
                    "high": None if math.isnan(value.high) else value.high,
                }
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

        if self.bins is None:
            raise ValueError("a summary made without bins cannot be drawn")
        return draw_reliability(reliability(self.bins, self.n_bins), ax, title=title)

    def __str__(self) -> str:
        head = f"{self.n:,} predictions" + (f" of {self.n_classes} classes" if self.n_classes else "")
        parts = [head, side_by_side({"value": self}, meanings=True)]
        if self.groups:
            parts.append(aligned(self._group_rows()))
        return "\n\n".join([*parts, self.verdict, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = [
            summary_rows({"value": self}, meanings=True),
            *([self._group_rows()] if self.groups else []),
        ]
        sentences = "".join(f"<p>{escape(text)}</p>" for text in (self.verdict, *self.notes))
        return "".join(html_table(rows) for rows in tables) + sentences

    def _group_rows(self) -> list[list[str]]:
        """A row per group; p-values of the overconfidence are corrected for the number of groups."""
        scores = [key for key in ("nll", "brier") if key in self.metrics]
        titles = [
            "group",
            "n",
            "accuracy",
            "ECE",
            "95 % interval",
            "ECE floor",
            "overconfidence",
            "corrected p",
        ]
        rows = [[*titles, *(METRICS[key].title for key in scores)]]
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
    found = summary.metrics | {name: _without_interval(value) for name, value in per_sample.items()}
    return replace(summary, metrics={name: found[name] for name in METRICS if name in found})


@dataclass(frozen=True, eq=False)
class Tally:
    """The sums behind a `Summary`; `a + b` is the tally of both data sets together, exactly.

    >>> p = Predictions([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]], [0, 1, 0])
    >>> (Tally.of(p[:1]) + Tally.of(p[1:])).summary().to_dict() == Tally.of(p).summary().to_dict()
    True
    """

    n_bins: int
    n_classes: int
    top: Bins  # (fine_bins(n_bins),)
    classwise: Bins | None  # (K, n_bins)
    predicted: Bins | None  # (K, CLASS_CELLS), by predicted class
    n: int  # how many samples were counted
    sums: dict[str, int]  # by name of SCORES, in units of 2^-32, weighted where there are weights
    squares: dict[str, int]
    groups: dict[str, Tally]
    n_zero_labels: int = (
        0  # their NLL is not in the sums, because it hangs on the smallest probability of all
    )
    zero_floor: float = math.inf
    answers: Tensor | None = None  # (2, T) `metrics.threshold_counts`

    @classmethod
    def of(
        cls,
        p: Predictions | Outcomes,
        n_bins: int = 15,
        groups: Array | None = None,
        *,
        per_class: bool = True,
        onto: Tally | None = None,
    ) -> Tally:
        """The tally of some predictions and of each group among them; groups have no numbers per class.

        Without `per_class` it needs no memory that grows with the number of classes. Of `Outcomes` only what hangs on
        confidences is known. It is added to `onto`, in its memory: with many classes, bins are larger than `p`.
        """
        if onto is not None:
            return onto._add(p, groups)
        by_group = {} if groups is None else dict(_group_tallies(p, n_bins, groups))
        if isinstance(p, Outcomes):
            answers = threshold_counts(*p.top_label()) if p.weights is None else None
            top = p.bins(fine_bins(n_bins))
            return cls(n_bins, 0, top, None, None, len(p), {}, {}, by_group, answers=answers)
        plain = p.weights is None and not p.are_soft
        counts = threshold_counts(*p.top_label()) if plain else None
        scores, weights = metrics.per_sample(p), 1.0 if p.weights is None else p.weights
        zero = metrics.zero_labels(p) if plain else torch.zeros(len(p), dtype=torch.bool)
        scores["nll"] = scores["nll"].where(~zero.to(scores["nll"].device), 0.0)
        return cls(
            n_bins,
            p.n_classes,
            Bins.top(p, fine_bins(n_bins)).to("cpu"),
            Bins.classwise(p, n_bins).to("cpu") if per_class else None,
            predicted_bins(p).to("cpu") if per_class else None,
            len(p),
            {name: exact_sum(scores[name] * weights) for name in SCORES},
            {name: exact_sum(scores[name].clamp(max=1e150).square() * weights) for name in SCORES},
            by_group,
            int(zero.sum()),
            p.zero_floor if p.are_probs else math.inf,
            counts,
        )

    def __add__(self, other: Tally) -> Tally:
        if not isinstance(other, Tally):
            return NotImplemented
        if (self.n_bins, self.n_classes) != (other.n_bins, other.n_classes):
            raise ValueError(
                f"tallies must have the same bins and classes, got {self.n_bins} and {other.n_bins} bins, "
                f"{self.n_classes} and {other.n_classes} classes"
            )
        groups = dict(self.groups)
        for name, tally in other.groups.items():
            groups[name] = groups[name] + tally if name in groups else tally
        check_groups(groups)
        return Tally(
            self.n_bins,
            self.n_classes,
            self.top + other.top,
            _both(self.classwise, other.classwise),
            _both(self.predicted, other.predicted),
            self.n + other.n,
            {name: self.sums[name] + other.sums[name] for name in self.sums},
            {name: self.squares[name] + other.squares[name] for name in self.sums},
            groups,
            self.n_zero_labels + other.n_zero_labels,
            min(self.zero_floor, other.zero_floor),
            None if self.answers is None or other.answers is None else self.answers + other.answers,
        )

    def _add(self, p: Predictions | Outcomes, groups: Array | None) -> Tally:
        part = Tally.of(p, self.n_bins, groups, per_class=False)
        rest = replace(self, classwise=None, predicted=None) + part
        if self.classwise is None or self.predicted is None or isinstance(p, Outcomes):
            return rest
        return replace(
            rest, classwise=self.classwise.add_classwise_(p), predicted=predicted_bins(p, self.predicted)
        )

    def summary(self, seed: int = 0) -> Summary:
        """Every number with its 95 % interval; simulated numbers depend on `seed`."""
        groups = {
            name: replace(self.groups[name], zero_floor=self.zero_floor) for name in sorted(self.groups)
        }
        found = metrics.bootstrap(self.top, self.n_bins, seed=seed) | self._scores()
        classes = None
        if self.classwise is not None and self.predicted is not None:
            pooled = Bins(*(part.sum(0) for part in self.classwise.parts))
            found["ece_classwise"] = _without_interval(float(self.classwise.ece().mean()))
            found["ece_all"] = _without_interval(float(pooled.ece()) * self.n_classes)
            classes = class_gaps_of(self.predicted, self.classwise)
        return Summary(
            n=self.n,
            n_classes=self.n_classes,
            n_bins=self.n_bins,
            metrics={name: found[name] for name in METRICS if name in found},
            floor=metrics.ece_floor(self.top, self.n_bins, seed=seed),
            p_value=metrics.calibration_test(self.top, self.n_bins, seed=seed).p_value,
            bins=self.top,
            classes=classes,
            groups={name: group.summary(seed) for name, group in groups.items()},
            n_zero_labels=self.n_zero_labels,
            zero_floor=self.zero_floor if self.n_zero_labels else 0.0,
            answers=self.answers,
        )

    def _scores(self) -> dict[str, Interval]:
        """Means with the interval of the normal distribution, for the effective number of samples (Kish)."""
        found, total, n = {}, self.top.n, float(self.n)
        if self.top.squares is not None:
            n = total**2 * UNIT / float(self.top.squares.sum())
        unlikely = -math.log(self.zero_floor) if self.n_zero_labels else 0.0  # NLL of a label at 0
        for name in self.sums:
            mean, square = self.sums[name] / UNIT / total, self.squares[name] / UNIT / total
            if name == "nll":
                share = self.n_zero_labels / total
                mean, square = mean + share * unlikely, square + share * unlikely**2
            reach = Z * (max(square - mean * mean, 0.0) / n) ** 0.5
            found[SCORES[name]] = Interval(mean, max(0.0, mean - reach), mean + reach)
        return found


class Comparison(NamedTuple):
    """Two methods on the same samples: the second minus the first, so a negative NLL difference is an improvement."""

    nll: Interval  # mean paired difference with its 95 % interval
    n_changed: int  # samples whose predicted class differs
    n: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference leaves out 0."""
        return self.nll.low > 0 or self.nll.high < 0


def compare(before: Predictions, after: Predictions) -> Comparison:
    """Compare two methods sample by sample, by their NLL; both must have the same labels in the same order.

    >>> p = Predictions([[3.0, 0.0]] * 100, [0] * 70 + [1] * 30)
    >>> found = compare(p, Predictions(p.logits / 3, p.labels))
    >>> found.n_changed, found.nll.estimate < 0, found.is_clear
    (0, True, True)
    """
    (found,) = compare_all([before, after])[0][1:]
    if found is None:
        raise ValueError(
            f"both predictions must have the same labels in the same order, got {len(before)} and {len(after)} samples"
        )
    return found


def compare_all(methods: Sequence[Predictions | Outcomes]) -> list[list[Comparison | None]]:
    """`compare` of every method (row) with every other (column); None where their samples differ or lack an NLL."""
    found = [m if isinstance(m, Outcomes) else Outcomes.of(m) for m in methods]
    for m, p in zip(methods, found):
        if isinstance(m, Predictions) and p.nll is not None:
            p.nll.nan_to_num_(posinf=-math.log(m.zero_floor))
    return [[_pair(one, other) for other in found] for one in found]


def _pair(one: Outcomes, other: Outcomes) -> Comparison | None:
    if one.nll is None or other.nll is None or one.labels is None or other.labels is None:
        return None
    if one.predicted is None or other.predicted is None or not torch.equal(one.labels, other.labels):
        return None
    if (one.weights is None) != (other.weights is None):
        return None
    pairing = Pairing()
    pairing.add(one, other)
    return pairing.comparison()


class Pairing:
    """The sums behind a `Comparison` of two methods whose samples come in parts."""

    def __init__(self) -> None:
        self.n = self.n_changed = 0
        # A sample's difference is difference + before * L + after * M: `before` and `after` say whether its label has a
        # probability of 0 there, L and M are what that costs, which only all parts together tell.
        self._sums = torch.zeros(4, dtype=torch.float64)  # of 1, difference, before, after
        self._squares = torch.zeros(4, 4, dtype=torch.float64)  # of their products

    def add(self, one: Outcomes, other: Outcomes) -> None:
        """Some samples, which must be the same of both."""
        assert one.nll is not None
        assert other.nll is not None
        assert one.predicted is not None
        assert other.predicted is not None
        zero = [nll.isinf() for nll in (one.nll, other.nll)]
        difference = other.nll.where(~zero[1], 0.0) - one.nll.where(~zero[0], 0.0)
        rows = torch.stack([torch.ones_like(difference), difference, -zero[0].double(), zero[1].double()], 1)
        weights = torch.ones_like(difference) if one.weights is None else one.weights
        self._sums += weights @ rows
        self._squares += (rows * weights.square()[:, None]).T @ rows
        self.n += len(rows)
        self.n_changed += int((one.predicted != other.predicted).sum())

    def comparison(self, floor: float = 1.0, other_floor: float = 1.0) -> Comparison:
        """The comparison, with the probabilities that stand for 0 in the two methods."""
        parts = torch.tensor([0.0, 1.0, -math.log(floor), -math.log(other_floor)], dtype=torch.float64)
        mean = float(self._sums @ parts / self._sums[0])
        parts[0] = -mean
        reach = Z * float((parts @ self._squares @ parts).clamp(min=0).sqrt() / self._sums[0])
        return Comparison(Interval(mean, mean - reach, mean + reach), self.n_changed, self.n)


def exact_sum(values: Tensor) -> int:
    """The sum of finite values (N,) in units of 2^-32, each rounded to a whole number of them; never overflows.

    >>> exact_sum(torch.tensor([0.5, 2.0])) == int(2.5 * 2**32)
    True
    """
    values = values.double()
    if float(values.abs().max()) * len(values) > 2.0**62:
        return sum(round(Fraction(value) * int(UNIT)) for value in values.tolist())
    units = (values * UNIT).round()
    high = (units / UNIT).floor()
    low = units - high * UNIT  # in 0 .. 2^32
    return int(high.to(torch.int64).sum()) * int(UNIT) + int(low.to(torch.int64).sum())


def check_groups(groups: Mapping[str, Any]) -> None:
    """Refuse more groups than anyone can read."""
    if len(groups) > MAX_GROUPS:
        raise TooManyGroups(
            f"by must have at most {MAX_GROUPS} different values, got more, such as {next(iter(groups))!r}"
        )


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
    header = [""]
    for name in summaries:
        header += [name, "95 % interval"]
    rows = [[*header, "meaning"] if meanings else header]
    first = next(iter(summaries.values()))
    for key, metric in METRICS.items():
        if any(key not in summary.metrics for summary in summaries.values()):
            continue
        row = [f"{metric.title} ({first.n_bins} bins)" if key == "ece" else metric.title]
        for summary in summaries.values():
            value = summary.metrics[key]
            row += [shown(value.estimate, metric.is_share), shown_interval(value, metric.is_share)]
        rows.append([*row, metric.meaning] if meanings else row)
        if key == "ece":
            floors = [[percent(s.floor.mean), span(*s.floor[1:])] for s in summaries.values()]
            meaning = ["ECE of a perfectly calibrated model, mean and 5 to 95 %"] if meanings else []
            rows.append(["ECE floor", *(cell for pair in floors for cell in pair), *meaning])
    return rows


def _group_tallies(p: Predictions | Outcomes, n_bins: int, groups: Array) -> Iterator[tuple[str, Tally]]:
    if groups.shape != (len(p),):
        raise ValueError(f"by must hold one group for each of {len(p)} samples, got shape {groups.shape}")
    names, which = np.unique(groups.astype(str), return_inverse=True)
    check_groups(dict.fromkeys(names.tolist()))
    for i, name in enumerate(names):
        rows = torch.from_numpy(which == i)
        yield str(name), Tally.of(p[rows], n_bins, per_class=False)


def row_groups(p: Predictions, by: Any = None, names: Sequence[str] = ()) -> Array | None:
    """(N,) the group of each row: that of its sample in `by`, else the label it is about where samples have several."""
    if by is not None:
        groups = np.asarray(by)
        return np.repeat(groups, p.n_labels) if p.n_labels and len(groups) < len(p) else groups
    if p.n_labels is None or p.n_labels > MAX_GROUPS:
        return None
    names = names or [f"label {i:0{len(str(p.n_labels - 1))}d}" for i in range(p.n_labels)]
    return np.tile(np.asarray(names, dtype=object), len(p) // p.n_labels)


def _both(a: Bins | None, b: Bins | None) -> Bins | None:
    return None if a is None or b is None else a + b


def _without_interval(value: float) -> Interval:
    return Interval(value, math.nan, math.nan)
