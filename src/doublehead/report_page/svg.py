"""Small inline SVG: elements whose every attribute and text is escaped, and a frame that maps numbers to pixels.

Colours, fonts and dashes come from the page's style sheet through class names, so pictures follow light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


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
    end = max(end, 1e-4)
    rough = end / wanted
    size = 10.0 ** _floor_log10(rough)
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    count = int(-(-end // step))
    return [round(i * step, 10) for i in range(count + 1)]


def _floor_log10(value: float) -> int:
    power = 0
    while value < 1:
        value, power = value * 10, power - 1
    return power
