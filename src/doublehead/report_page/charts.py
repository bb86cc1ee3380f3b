"""The pictures of the page as inline SVG; every mark that shows a number has it as a tooltip.

Every attribute and text is escaped. Colours, fonts and dashes come from the page's style sheet through class names, so
pictures follow light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, isfinite, log10

import numpy as np

from doublehead.report_page.record import Array, Method, Shifted
from doublehead.summary import span

TENTHS = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
LOOKS = 7  # methods beyond repeat the colours, dashes and markers of the style sheet

# Markers around 0, 0, about as large as each other: circle, square, triangle, diamond, triangle, plus, cross.
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "M-3.6 -3.6H3.6V3.6H-3.6Z",
    "M0 -4.8L4.5 3.4H-4.5Z",
    "M0 -5L5 0L0 5L-5 0Z",
    "M0 4.8L4.5 -3.4H-4.5Z",
    "M-1.5 -4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
    "M-4.3 -2.2L-2.2 -4.3L0 -2.1L2.2 -4.3L4.3 -2.2L2.1 0L4.3 2.2L2.2 4.3L0 2.1L-2.2 4.3L-4.3 2.2L-2.1 0Z",
)


def tag(name: str, *children: str, **attributes: str | float | None) -> str:
    """An element. Children are markup made here; attributes are escaped, `_` becomes `-`, None is left out.

    >>> tag("g", tag("path", d="M0 0"), class_="m<1")
    '<g class="m&lt;1"><path d="M0 0"/></g>'
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(pixels(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{pairs}>{''.join(children)}</{name}>" if children else f"<{name}{pairs}/>"


def text(x: float, y: float, content: str, **attributes: str | float | None) -> str:
    """Text at a place, escaped."""
    return tag("text", escape(content), x=x, y=y, **attributes)


def pixels(value: str | float) -> str:
    """Pixels to a tenth: crisp enough, and short."""
    if isinstance(value, str):
        return value
    rounded = f"{value:.1f}".removesuffix(".0")
    return "0" if rounded == "-0" else rounded


def picture(width: float, height: float, title: str, *children: str, **attributes: str | float | None) -> str:
    """A whole picture that scales with the page and tells a screen reader its title."""
    box = f"0 0 {pixels(width)} {pixels(height)}"
    return tag("svg", *children, viewBox=box, role="img", aria_label=title, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, *children: str) -> str:
    """A box; a height below 0 grows upwards."""
    if height < 0:
        y, height = y + height, -height
    return tag("rect", *children, x=x, y=y, width=width, height=height, class_=class_)


def boxes(corners: Iterable[tuple[float, float, float, float]], class_: str) -> str:
    """Many boxes (x, y, width, height) of one look as one element; a box of no height is a line."""
    parts = []
    for corner in corners:
        x, y, width, height = map(pixels, corner)
        parts.append(f"M{x} {y}h{width}" if height == "0" else f"M{x} {y}h{width}v{height}h-{width}Z")
    return tag("path", d="".join(parts), class_=class_)


def tooltip(content: str) -> str:
    """What is shown when the pointer rests on the element it is a child of."""
    return tag("title", escape(content))


@dataclass(frozen=True)
class Frame:
    """The box of a plot in pixels and the numbers at its borders."""

    left: float
    top: float
    width: float
    height: float
    x_end: float = 1.0
    y_end: float = 1.0
    y_start: float = 0.0

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return self.left + self.width * value / self.x_end

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return self.top + self.height * (self.y_end - value) / (self.y_end - self.y_start)

    @property
    def bottom(self) -> float:
        """Pixels from the top to the lower border."""
        return self.top + self.height

    @property
    def right(self) -> float:
        """Pixels from the left to the right border."""
        return self.left + self.width

    def path(self, xs: Iterable[float], ys: Iterable[float]) -> str:
        """The `d` of a line through these points."""
        points = [f"{pixels(self.x(x))} {pixels(self.y(y))}" for x, y in zip(xs, ys)]
        return "M" + "L".join(points) if points else ""

    def axes(
        self,
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
        x_label: str,
        y_label: str,
        grid: bool = True,
    ) -> str:
        """Grid, tick labels in percent, and the names of both axes where they have one."""
        across = [f"M{pixels(self.left)} {pixels(self.y(v))}h{pixels(self.width)}" for v in y_ticks]
        along = [f"M{pixels(self.x(v))} {pixels(self.top)}v{pixels(self.height)}" for v in x_ticks]
        parts = [tag("path", d="".join(across + along), class_="grid")] if grid else []
        parts += [text(self.left - 6, self.y(v) + 4, tick(v), class_="tick y") for v in y_ticks]
        parts += [text(self.x(v), self.bottom + 16, tick(v), class_="tick x") for v in x_ticks]
        if x_label:
            parts.append(text(self.left + self.width / 2, self.bottom + 33, x_label, class_="axis x"))
        if y_label:
            middle = self.top + self.height / 2
            turned = f"rotate(-90 12 {pixels(middle)})"
            parts.append(text(12, middle, y_label, class_="axis x", transform=turned))
        return "".join(parts)


def tick(value: float) -> str:
    """A share as percent, with no more digits than it needs.

    >>> tick(0.2), tick(0.005)
    ('20', '0.5')
    """
    return f"{100 * value:.4g}"


def nice_ticks(end: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 on, the last one at or above `end`.

    >>> nice_ticks(0.065)
    [0.0, 0.02, 0.04, 0.06, 0.08]
    """
    rough = max(end, 1e-4) / wanted
    size = 10.0 ** min(0, floor(log10(rough)))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [round(i * step, 10) for i in range(int(-(-max(end, 1e-4) // step)) + 1)]


def number(value: float, digits: int = 2) -> str:
    """A share as a number of percent, without the sign."""
    return f"{100 * value:.{digits}f}"


def look(i: int) -> str:
    """The class name that gives method i its colour and dash."""
    return f"m{i % LOOKS}"


def marker(i: int, x: float, y: float, *children: str, class_: str = "") -> str:
    """The marker of method i at a place."""
    place = f"translate({pixels(x)} {pixels(y)})"
    return tag(
        "path", *children, d=MARKERS[i % LOOKS], transform=place, class_=f"mark {look(i)} {class_}".strip()
    )


def swatch(i: int) -> str:
    """A line with the marker of method i, for legends."""
    stroke = line(0, 8, 28, 8, f"curve {look(i)}")
    return tag("svg", stroke, marker(i, 14, 8), viewBox="0 0 28 16", class_="swatch", aria_hidden="true")


def reliability_chart(method: Method) -> str:
    """Accuracy by confidence, the gap to what was claimed, the band of a perfect model; counts underneath."""
    curve, frame, strip = method.curve, Frame(48, 8, 300, 300), Frame(48, 318, 300, 46)
    width, tallest = frame.width / len(curve.counts), log10(1 + int(curve.counts.max()))
    gaps, ticks, counts, targets = [], [], [], []
    for i in np.flatnonzero(curve.counts):
        left, acc = frame.x(curve.edges[i]), frame.y(curve.accuracy[i])
        gaps.append((left + 0.5, acc, width - 1, frame.y(curve.confidence[i]) - acc))
        ticks.append((left + 1, acc, width - 2, 0.0))
        height = strip.height * log10(1 + int(curve.counts[i])) / tallest
        counts.append((left + 0.5, strip.bottom - height, width - 1, height))
        words = tooltip(bin_line(method, int(i)))
        targets.append(rect(left, frame.top, width, strip.bottom - frame.top, "hit", words))
    parts = [
        frame.axes([], TENTHS, "", "accuracy (%)"),
        _band(frame, method),
        boxes(gaps, "gap"),
        line(frame.x(0), frame.y(0), frame.x(1), frame.y(1), "diagonal"),
        boxes(ticks, "acc"),
        boxes(counts, "count"),
        line(strip.left, strip.bottom, strip.right, strip.bottom, "base"),
        strip.axes(TENTHS, [], "confidence (%)", "", grid=False),
        text(42, strip.bottom - 18, "samples", class_="tick y"),
        text(42, strip.bottom - 5, "(log)", class_="tick y"),
        _note(method),
        *targets,
    ]
    title = f"Reliability diagram of {method.name}: ECE {number(curve.ece)} %, {_n_outside(method)}"
    return picture(360, 404, title, *parts, class_="chart")


def bin_line(method: Method, i: int) -> str:
    """One bin in words."""
    curve = method.curve
    start, end, count = number(curve.edges[i], 0), number(curve.edges[i + 1], 0), int(curve.counts[i])
    return (
        f"confidence {start} to {end} %: {count:,} samples, "
        f"mean confidence {number(curve.confidence[i], 1)} %, accuracy {number(curve.accuracy[i], 1)} %, "
        f"calibrated model {number(curve.band_low[i], 1)} to {number(curve.band_high[i], 1)} %"
    )


def overlay_chart(methods: Sequence[Method]) -> str:
    """All methods in one frame, each in a group of its own that the page shows, hides and styles."""
    frame = Frame(48, 8, 300, 300)
    bands, groups = [], []
    for m, method in enumerate(methods):
        curve = method.curve
        full = np.flatnonzero(curve.counts)
        path = tag(
            "path", d=frame.path(curve.confidence[full], curve.accuracy[full]), class_=f"curve {look(m)}"
        )
        dots = "".join(marker(m, frame.x(curve.confidence[i]), frame.y(curve.accuracy[i])) for i in full)
        bands.append(tag("g", _band(frame, method), data_after=str(m), class_="off"))
        groups.append(tag("g", path, dots, data_pair=str(m), class_="off"))
    diagonal = line(frame.x(0), frame.y(0), frame.x(1), frame.y(1), "diagonal")
    axes = frame.axes(TENTHS, TENTHS, "confidence (%)", "accuracy (%)")
    title = "Accuracy by confidence, before and after; the numbers are in the table beside it"
    return picture(360, 352, title, *bands, axes, diagonal, *groups, class_="chart", id="overlay")


def confidence_chart(method: Method, drop_last: bool = False) -> str:
    """The share of samples at each confidence, with mean confidence and accuracy as lines."""
    histogram = method.histogram
    shares = histogram.shares[:-1] if drop_last else histogram.shares
    ticks = nice_ticks(float(shares.max(initial=0)), 4)
    frame = Frame(48, 24, 300, 150, y_end=ticks[-1])
    width, bars = frame.width / len(histogram.counts), []
    for i in np.flatnonzero(shares):
        start, end = (number(edge, 0) for edge in histogram.edges[i : i + 2])
        words = f"confidence {start} to {end} %: {int(histogram.counts[i]):,} samples, {number(shares[i])} %"
        x, y = frame.x(histogram.edges[i]) + 0.5, frame.y(shares[i])
        bars.append(rect(x, y, width - 1, frame.bottom - y, "bar", *([] if drop_last else [tooltip(words)])))
    parts = [frame.axes(TENTHS, ticks, "confidence (%)", "samples (%)"), *bars]
    if not drop_last:
        for value, class_ in ((histogram.accuracy, "right"), (histogram.mean_confidence, "claimed")):
            parts.append(line(frame.x(value), 18, frame.x(value), frame.bottom, class_))
    kept = ", without its last bin" if drop_last else ""
    title = f"Confidence histogram of {method.name}{kept}"
    return picture(360, 214, title, *parts, class_="chart")


def risk_chart(methods: Sequence[Method]) -> str:
    """Error among the answered by the share answered; a dot per method that the slider moves."""
    settled = [risk for m in methods for risk, share in zip(*_risk(m)) if share >= 0.1]
    ticks = nice_ticks(1.05 * max([*settled, 0.001]))
    frame = Frame(48, 8, 340, 250, y_end=ticks[-1])
    groups = []
    for i, method in enumerate(methods):
        risk, coverage = _risk(method)
        path = tag("path", d=frame.path(coverage, np.minimum(risk, ticks[-1])), class_=f"curve {look(i)}")
        # outside the frame until the slider places it
        dot = tag("g", marker(i, 0, 0, class_="big"), class_="dot", transform="translate(-99 -99)")
        groups.append(tag("g", path, dot, data_method=str(i)))
    where: dict[str, str | float | None] = {
        "data_left": frame.left, "data_width": frame.width, "data_top": frame.top, "data_height": frame.height,
        "data_end": repr(float(ticks[-1])),
    }  # fmt: skip
    axes = frame.axes(TENTHS, ticks, "answered (%), the most confident first", "error of answers (%)")
    title = "Risk-coverage curves: the error left when only the most confident samples are answered"
    return picture(400, 302, title, axes, *groups, class_="chart wide", id="risk", **where)


def shift_chart(methods: Sequence[Method], shifts: Mapping[str, Sequence[Shifted | None]]) -> str:
    """ECE of every method on its own data and on each shifted set, a line of markers each."""
    rows = [("own test data", [m.curve.ece for m in methods])]
    rows += [(name, [np.nan if s is None else s.ece for s in found]) for name, found in shifts.items()]
    largest = max(value for _, values in rows for value in values if isfinite(value))
    ticks = nice_ticks(1.02 * largest)
    frame = Frame(124, 8, 264, 26.0 * len(rows), x_end=ticks[-1])
    parts = [line(frame.x(v), frame.top, frame.x(v), frame.bottom, "grid") for v in ticks]
    parts += [text(frame.x(v), frame.bottom + 16, tick(v), class_="tick x") for v in ticks]
    parts.append(text(256, frame.bottom + 33, "ECE (%)", class_="axis x"))
    groups: list[list[str]] = [[] for _ in methods]
    for j, (name, values) in enumerate(rows):
        y = frame.top + 26 * (j + 0.5)
        parts.append(line(frame.left, y, frame.right, y, "grid"))
        parts.append(text(116, y + 4, shortened(name), class_="tick y"))
        for i, value in enumerate(values):
            if isfinite(value):
                words = tooltip(f"{methods[i].name}, {name}: ECE {number(value)} %")
                groups[i].append(marker(i, frame.x(value), y, words, class_="big"))
    parts += [tag("g", *marks, data_method=str(i)) for i, marks in enumerate(groups) if marks]
    title = "ECE under shift, by method; the numbers are in the table below"
    return picture(400, frame.bottom + 44, title, *parts, class_="chart wide")


def time_chart(method: Method) -> str:
    """Accuracy and mean confidence of each period, with the band of a perfectly calibrated model."""
    assert method.periods is not None
    gaps, names = method.periods.group_gaps, list(method.periods.groups)
    assert gaps is not None
    lowest = min(
        1.0, *(float(np.nanmin(values)) for values in (gaps.accuracy, gaps.confidence, gaps.band_low))
    )
    ticks = [1 - value for value in nice_ticks(1 - lowest, 4) if value <= 1]
    frame = Frame(48, 8, 300, 180, x_end=float(len(names)), y_start=ticks[-1])
    width = frame.width / len(names)
    middle = np.arange(len(names)) + 0.5
    band = [
        (
            frame.x(i),
            frame.y(gaps.band_high[i]),
            width,
            frame.y(gaps.band_low[i]) - frame.y(gaps.band_high[i]),
        )
        for i in range(len(names))
    ]
    parts = [frame.axes([], ticks, "", "(%)"), boxes(band, "band")]
    for values, class_ in ((gaps.accuracy, "right"), (gaps.confidence, "claimed")):
        parts.append(tag("path", d=frame.path(middle, values), class_=f"curve {class_}"))
    for i, name in enumerate(names):
        claims, right = number(gaps.confidence[i], 1), number(gaps.accuracy[i], 1)
        words = f"{name}: {int(gaps.counts[i]):,} samples, claims {claims} %, right {right} %"
        parts.append(rect(frame.x(i), frame.top, width, frame.height, "hit", tooltip(words)))
    ends = [(frame.left, names[0], "tick"), (frame.right, names[-1], "tick y")]
    parts += [text(x, frame.bottom + 16, shortened(name, 24), class_=class_) for x, name, class_ in ends]
    title = f"Accuracy and mean confidence of {method.name} over time; the numbers are in the table below"
    return picture(360, 212, title, *parts, class_="chart")


def gap_bar(gap: float, widest: float) -> str:
    """A small bar to the right for overconfidence, to the left for underconfidence."""
    length = 0 if not isfinite(gap) or widest == 0 else 48 * gap / widest
    bar = boxes([(min(50, 50 + length), 2, abs(length), 10)], "over" if gap > 0 else "under")
    return tag(
        "svg", line(50, 0, 50, 14, "base"), bar, viewBox="0 0 100 14", class_="gapbar", aria_hidden="true"
    )


def shortened(name: str, length: int = 18) -> str:
    """A name that fits beside a picture: its beginning and its end."""
    half = length // 2
    return name if len(name) <= length else f"{name[:half]}…{name[1 - half :]}"


def _risk(method: Method) -> tuple[Array, Array]:
    return method.risk.risk.numpy(), method.risk.coverage.numpy()


def _band(frame: Frame, method: Method) -> str:
    """Where the accuracy of a perfectly calibrated model falls, bin by bin."""
    curve = method.curve
    width, heights = frame.width / len(curve.counts), frame.height * (curve.band_high - curve.band_low)
    full = np.flatnonzero(curve.counts)
    corners = [(frame.x(curve.edges[i]), frame.y(curve.band_high[i]), width, float(heights[i])) for i in full]
    return boxes(corners, "band")


def _note(method: Method) -> str:
    """ECE, floor and n in the free corner of a reliability diagram."""
    floor = method.curve.floor
    words = [f"floor {span(floor.low, floor.high)}", f"n = {method.summary.n:,}"]
    small = [text(338, 281 + 16 * i, word, class_="tick y") for i, word in enumerate(words)]
    value = text(338, 265, f"ECE {number(method.curve.ece)} %", class_="value y")
    return rect(206, 248, 138, 54, "note") + value + "".join(small)


def _n_outside(method: Method) -> str:
    outside, full = int(method.curve.outside.sum()), int((method.curve.counts > 0).sum())
    return f"{outside} of {full} bins outside the band of a perfectly calibrated model"
