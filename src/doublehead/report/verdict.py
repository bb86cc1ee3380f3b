"""Numbers into sentences: can these confidences be taken at face value?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from doublehead.report.numbers import Method

# How far an ECE may lie above its floor. One point in a hundred is about what people can act on; above five a
# stated 95 % may as well be 90 %.
SLIGHT, SEVERE = 0.01, 0.05
LEVEL = 0.05  # p-values above it are called chance


class Grade(NamedTuple):
    """A word for a badge, a key for its look, and what to do with the confidences."""

    key: str
    word: str
    advice: str


CALIBRATED = Grade("good", "calibrated", "can be taken at face value")
NEARLY = Grade("fair", "slightly off", "can nearly be taken at face value")
OFF = Grade("poor", "miscalibrated", "should not be taken at face value")
FAR_OFF = Grade("bad", "badly miscalibrated", "mislead")


def grade(method: Method) -> Grade:
    """By the calibration test first, then by how far the ECE lies above that of a perfectly calibrated model."""
    if method.p_value >= LEVEL:
        return CALIBRATED
    excess = method.curve.ece - method.curve.floor.mean
    return NEARLY if excess < SLIGHT else OFF if excess < SEVERE else FAR_OFF


def direction(method: Method) -> str:
    """Overconfident or underconfident where that explains most of the error, else both in places."""
    over = method.intervals["overconfidence"].estimate
    if abs(over) < 0.5 * method.curve.ece:
        return "overconfident in places and underconfident in others"
    return "overconfident" if over > 0 else "underconfident"


def describe(method: Method) -> str:
    """What one method claims, how often it is right, and how sure that is."""
    claimed, right = (method.intervals[key].estimate for key in ("mean_confidence", "accuracy"))
    _, low, high = method.curve.floor
    error = f"Its ECE of {percent(method.curve.ece)} %"
    if grade(method) is CALIBRATED:
        return _unbroken(
            f"It claims {percent(claimed, 1)} % and is right {percent(right, 1)} % of the time. {error} cannot be told "
            f"from that of a perfectly calibrated model on {method.n:,} samples ({span(low, high)} %)."
        )
    return _unbroken(
        f"It claims {percent(claimed, 1)} % and is right {percent(right, 1)} % of the time: {direction(method)}. "
        f"{error} lies above the {span(low, high)} % of a perfectly calibrated model."
    )


def verdict(methods: Sequence[Method]) -> str:
    """The whole page in one sentence."""
    best = min(methods, key=lambda m: m.curve.ece - m.curve.floor.mean)
    mark = grade(best)
    _, low, high = best.curve.floor
    facts = f"ECE {percent(best.curve.ece)} %, where a perfectly calibrated model shows {span(low, high)} %"
    if mark is not CALIBRATED:
        facts = f"{direction(best)}, {facts}"
    if len(methods) == 1:
        return _unbroken(f"The confidences of “{best.name}” {mark.advice} ({facts}).")
    worst = max(methods, key=lambda m: m.curve.ece - m.curve.floor.mean)
    least = f"the worst is “{worst.name}” with an ECE of {percent(worst.curve.ece)} %"
    return _unbroken(
        f"Of {len(methods)} methods, “{best.name}” is the best calibrated: its confidences {mark.advice} ({facts}); "
        f"{least}."
    )


def percent(value: float, digits: int = 2) -> str:
    """A share as a number of percent, without the sign."""
    return f"{100 * value:.{digits}f}"


def span(low: float, high: float) -> str:
    """A range of shares in percent."""
    return f"{percent(low)} to {percent(high)}"


def _unbroken(sentence: str) -> str:
    """With no line break before a percent sign."""
    return sentence.replace(" %", "\u00a0%")
