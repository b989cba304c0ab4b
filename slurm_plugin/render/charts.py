"""Charts as inline SVG: (numbers) -> text. Pure; used by `page.py`, whose style sheet gives them their colours.

Nothing is told by colour alone: lines have dashes, marks and their names at their ends, areas have patterns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import median

Point = tuple[float, float | None]

_DASHES = ("", "7 4", "9 3 2 3", "2 3", "12 4", "1 5")
_MARKS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "M-3-3h6v6h-6z",
    "M0-4.5l4 4.5-4 4.5-4-4.5z",
    "M0-4l4 7h-8z",
    "M0 4l4-7h-8z",
    "M-3.5-3.5l7 7M-3.5 3.5l7-7",
)
_TOP, _BOTTOM, _LEFT = 12, 28, 42
_CHAR, _LINE = 7.4, 14
# Samples farther apart than this many times the usual are not joined by a line: nobody looked in between.
_GAP = 3.0


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: short; it stands at the line's end.
        style: which colour, dash and mark: 0 to 5.
        points: (x, y) by x; a y of None breaks the line.
        steps: the value holds until the next point.
    """

    name: str
    style: int
    points: Sequence[Point]
    steps: bool = False


@dataclass(frozen=True)
class Axis:
    """Where values lie, and what is written there.

    Attributes:
        low, high: the ends.
        ticks: (value, text).
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5


def line_chart(series: Sequence[Series], x: Axis, y: Axis, width: int, height: int, title: str) -> str:
    """Lines with their names at their ends."""
    right = 12 + _CHAR * max((len(curve.name) + 2 for curve in series), default=0)
    plot = _Plot(x, y, width, height, right)
    parts = [*plot.axes()]
    ends = []
    for curve in series:
        known = [(plot.x(at), plot.y(value)) for at, value in curve.points if value is not None]
        if not known:
            continue
        parts.append(
            f'<path class="line s{curve.style}" d="{_path(curve, plot)}" stroke-dasharray="{_DASHES[curve.style]}"/>'
        )
        every = max(1, math.ceil(len(known) / 6))
        parts += [_mark(curve.style, *at) for at in known[-1::-every]]
        ends.append((known[-1][1], curve))
    places = _spread([at for at, _ in ends], _TOP, height - _BOTTOM)
    edge = width - right + 6
    for (_, curve), label_y in zip(ends, places, strict=True):
        parts.append(_mark(curve.style, edge + 4, label_y))
        parts.append(f'<text x="{edge + 12:.0f}" y="{label_y + 4:.1f}">{escape(curve.name)}</text>')
    return _svg(width, height, title, parts)


def stacked_bars(
    bars: Sequence[tuple[float, Sequence[float]]], x: Axis, y: Axis, width: int, height: int, title: str
) -> str:
    """Bars of parts, the first part at the bottom; part N has fill `fN` and pattern `pN`.

    Args:
        bars: (x, size of each part).
    """
    plot = _Plot(x, y, width, height, 8)
    slot = min((b - a for (a, _), (b, _) in pairwise(bars)), default=x.high - x.low)
    thick = max(2.0, min(28.0, 0.86 * (width - _LEFT - 8) * slot / ((x.high - x.low) or 1.0)))
    parts = [*plot.axes()]
    for at, sizes in bars:
        left = min(max(plot.x(at) - thick / 2, _LEFT), width - 8 - thick)
        bottom = 0.0
        for place, size in enumerate(sizes):
            if size:
                top_y, bottom_y = plot.y(bottom + size), plot.y(bottom)
                box = f'x="{left:.1f}" y="{top_y:.1f}" width="{thick:.1f}" height="{bottom_y - top_y:.1f}"'
                parts.append(f'<rect class="f{place}" {box}/><rect fill="url(#p{place})" {box}/>')
            bottom += size
    return _svg(width, height, title, parts)


def cell(name: str, value: str, kind: int, hint: str, large: bool) -> str:
    """One node of a heat map: a pattern and a colour, and where there is room its name and value.

    Args:
        kind: which fill and pattern.
        hint: shown when it is pointed at.
    """
    title = f"<title>{escape(hint)}</title>"
    if not large:
        body = f'<rect class="f{kind}" width="20" height="20"/><rect fill="url(#p{kind})" width="20" height="20"/>'
        return f'<svg class="cell" width="20" height="20" role="img">{title}{body}</svg>'
    shown = name if len(name) <= 11 else f"{name[:5]}…{name[-5:]}"
    return (
        f'<svg class="cell" width="82" height="46" role="img">{title}<rect class="f{kind}" width="82" height="46"/>'
        f'<rect fill="url(#p{kind})" y="36" width="82" height="10"/>'
        f'<text class="on{kind} name" x="41" y="14">{escape(shown)}</text>'
        f'<text class="on{kind} value" x="41" y="31">{escape(value)}</text></svg>'
    )


def patterns() -> str:
    """The patterns that `stacked_bars` and `cell` refer to; once in a page."""
    shapes = (
        '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4" stroke-width="2"/>',
        '<path d="M0 8l8-8M-2 2l4-4M6 10l4-4" stroke-width="0.8"/>',
        "",
        '<circle cx="4" cy="4" r="1" class="dot"/>',
        '<circle cx="2" cy="2" r="1.5" class="dot"/><circle cx="6" cy="6" r="1.5" class="dot"/>',
        '<path d="M0 0l8 8M8 0l-8 8" stroke-width="0.8"/>',
    )
    defined = "".join(
        f'<pattern id="p{place}" class="pattern on{place}" width="8" height="8" patternUnits="userSpaceOnUse">{shape}'
        "</pattern>"
        for place, shape in enumerate(shapes)
    )
    return f'<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>{defined}</defs></svg>'


def swatch(kind: int) -> str:
    """A piece of a fill and its pattern, for legends."""
    box = 'width="20" height="14"'
    return f'<svg {box} aria-hidden="true"><rect class="f{kind}" {box}/><rect fill="url(#p{kind})" {box}/></svg>'


def with_gaps(points: Sequence[Point]) -> list[Point]:
    """The points, with a break wherever far fewer were taken than usual."""
    if len(points) < 3:
        return list(points)
    usual = median(b[0] - a[0] for a, b in pairwise(points))
    found = [points[0]]
    for before, after in pairwise(points):
        if after[0] - before[0] > _GAP * usual:
            found.append(((before[0] + after[0]) / 2, None))
        found.append(after)
    return found


def count_axis(high: float) -> Axis:
    """An axis of counts from 0, with a few round ticks."""
    step = _round_step(max(high, 4.0) / 4)
    top = step * math.ceil(max(high, 1.0) / step)
    return Axis(0.0, top, [(step * place, f"{step * place:,.0f}") for place in range(round(top / step) + 1)])


def share_axis(high: float = 1.0) -> Axis:
    """An axis of shares, from 0 to 100 %, or to what the highest needs."""
    step = max(0.25, _round_step(high / 4) if high > 1 else 0.0)
    num = max(4, math.ceil(high / step))
    return Axis(0.0, step * num, [(step * place, f"{100 * step * place:,.0f} %") for place in range(num + 1)])


def ticked(low: float, high: float, num_ticks: int, text: Callable[[float], str]) -> Axis:
    """An axis with ticks at even distances."""
    step = (high - low) / max(1, num_ticks - 1)
    return Axis(low, high, [(low + step * place, text(low + step * place)) for place in range(num_ticks)])


class _Plot:
    """Places of values in a picture."""

    def __init__(self, x: Axis, y: Axis, width: float, height: float, right: float) -> None:
        self._x, self._y, self._width, self._height, self._right = x, y, width, height, right

    def x(self, value: float) -> float:
        return _LEFT + min(1.0, max(0.0, self._x.place(value))) * (self._width - _LEFT - self._right)

    def y(self, value: float) -> float:
        return self._height - _BOTTOM - min(1.0, max(0.0, self._y.place(value))) * (self._height - _TOP - _BOTTOM)

    def axes(self) -> list[str]:
        end, ground = self._width - self._right, self._height - _BOTTOM
        parts = []
        for value, text in self._y.ticks:
            at = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{end:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>')
        last = len(self._x.ticks) - 1
        for place, (value, text) in enumerate(self._x.ticks):
            anchor = "start" if place == 0 else "end" if place == last else "middle"
            parts.append(
                f'<text class="tick" x="{self.x(value):.1f}" y="{ground + 18}" text-anchor="{anchor}">'
                f"{escape(text)}</text>"
            )
        return parts


def _path(curve: Series, plot: _Plot) -> str:
    steps: list[str] = []
    pen_up, before = True, 0.0
    for at, value in curve.points:
        if value is None:
            pen_up = True
            continue
        x, y = plot.x(at), plot.y(value)
        if pen_up:
            steps.append(f"M{x:.1f} {y:.1f}")
        elif curve.steps:
            steps.append(f"L{x:.1f} {before:.1f}L{x:.1f} {y:.1f}")
        else:
            steps.append(f"L{x:.1f} {y:.1f}")
        pen_up, before = False, y
    return "".join(steps)


def _mark(style: int, x: float, y: float) -> str:
    return f'<path class="mark s{style}" d="{_MARKS[style]}" transform="translate({x:.1f} {y:.1f})"/>'


def _spread(places: Sequence[float], low: float, high: float) -> list[float]:
    """Places that are a line of text apart, in the same order, and as near to the wanted as that allows."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    found = [0.0] * len(places)
    least = low
    for index in order:
        found[index] = least = max(places[index], least)
        least += _LINE
    most = high
    for index in reversed(order):
        found[index] = most = min(found[index], most)
        most -= _LINE
    return found


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= step * 0.999)


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return f"{head}{''.join(parts)}</svg>"
