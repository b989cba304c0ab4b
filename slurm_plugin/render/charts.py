"""Charts as inline SVG: (numbers) -> text. Pure; used by `page.py`. The style sheet below gives them their colours.

Nothing is told by colour alone: lines have dashes, marks and their names at their ends, areas have patterns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from html import escape
from itertools import accumulate, pairwise, zip_longest
from statistics import median
from typing import Any

from hetstream.base.text import percent, printable, size_words
from hetstream.slurm_plugin.insight.observation import Observation
from hetstream.slurm_plugin.insight.shared_gpus import IdleTrainer, SharingRow, idle_trainers, sharing_rows
from hetstream.slurm_plugin.render.tables import Column, Section

Point = tuple[float, float | None]
# A place on the x axis, and what is to be read there when it is pointed at.
Hint = tuple[float, str]
# Classes of fills and names of patterns: of nodes by their class, and of jobs by their cause.
CLASSES, CAUSES = ("f", "p"), ("c", "q")

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
# Between ticks of times.
_CLOCK_STEPS_S = (
    1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 2 * 86400, 7 * 86400, 14 * 86400,
)  # fmt: skip


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


def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, width: int, height: int, title: str, hints: Sequence[Hint] = ()
) -> str:
    """Return lines with their names at their ends."""
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
        # The last mark stands at the name.
        every = max(1, math.ceil(len(known) / 6))
        parts += [_mark(curve.style, *at) for at in known[-1 - every :: -every]]
        ends.append((known[-1][1], curve))
    places = _spread([at for at, _ in ends], _TOP, height - _BOTTOM)
    edge = width - right + 6
    for (_, curve), label_y in zip(ends, places, strict=True):
        parts.append(_mark(curve.style, edge + 4, label_y))
        parts.append(f'<text x="{edge + 12:.0f}" y="{label_y + 4:.1f}">{escape(curve.name)}</text>')
    return _svg(width, height, title, [*parts, *plot.pointed_at(hints)])


def stacked_areas(
    layers: Sequence[Series], x: Axis, y: Axis, width: int, height: int, title: str,
    paint: tuple[str, str] = CLASSES, hints: Sequence[Hint] = (),
) -> str:  # fmt: skip
    """Areas one upon the other, the first at the bottom.

    Args:
        layers: with the same places on the x axis; where a value is None, nothing is drawn.
        paint: which fills and patterns.
    """
    plot = _Plot(x, y, width, height, 8)
    parts = [*plot.axes()]
    places = [at for at, _ in layers[0].points] if layers else []
    heights = [[*accumulate(layer.points[place][1] or 0.0 for layer in layers)] for place in range(len(places))]
    gaps = [place for place in range(len(places)) if any(layer.points[place][1] is None for layer in layers)]
    for start, stop in pairwise([-1, *gaps, len(places)]):
        run = range(start + 1, stop)
        # What was seen once is a stroke.
        half = 1.0 if len(run) == 1 else 0.0
        for level, layer in enumerate(layers):
            if not any(layer.points[place][1] for place in run):
                continue
            top = [(plot.x(places[place]), plot.y(heights[place][level])) for place in run]
            ground = [(plot.x(places[place]), plot.y(heights[place][level - 1] if level else 0.0)) for place in run]
            edge = [(top[0][0] - half, top[0][1]), *top, (top[-1][0] + half, top[-1][1])]
            edge += [(ground[-1][0] + half, ground[-1][1]), *reversed(ground), (ground[0][0] - half, ground[0][1])]
            outline = "L".join(f"{at:.1f} {high:.1f}" for at, high in edge)
            parts.append(_painted("path", f'd="M{outline}z"', paint, layer.style))
    return _svg(width, height, title, [*parts, *plot.pointed_at(hints)])


def stacked_bars(
    bars: Sequence[tuple[float, Sequence[float]]], x: Axis, y: Axis, width: int, height: int, title: str,
    paint: tuple[str, str] = CLASSES, hints: Sequence[Hint] = (),
) -> str:  # fmt: skip
    """Bars of parts, the first part at the bottom; with hints each has its sum at its top.

    Args:
        bars: (x, size of each part).
        paint: which fills and patterns.
    """
    plot = _Plot(x, y, width, height, 8)
    slot = min((b - a for (a, _), (b, _) in pairwise(bars)), default=x.high - x.low)
    thick = max(2.0, min(64.0, 0.86 * (width - _LEFT - 8) * slot / ((x.high - x.low) or 1.0)))
    parts = [*plot.axes()]
    for at, sizes in bars:
        left = min(max(plot.x(at) - thick / 2, _LEFT), width - 8 - thick)
        bottom = 0.0
        for place, size in enumerate(sizes):
            if size:
                top_y, bottom_y = plot.y(bottom + size), plot.y(bottom)
                box = f'x="{left:.1f}" y="{top_y:.1f}" width="{thick:.1f}" height="{bottom_y - top_y:.1f}"'
                parts.append(_painted("rect", box, paint, place))
            bottom += size
        if hints and bottom:
            where = f'x="{left + thick / 2:.1f}" y="{plot.y(bottom) - 4:.1f}"'
            parts.append(f'<text {where} text-anchor="middle">{bottom:,.0f}</text>')
    return _svg(width, height, title, [*parts, *plot.pointed_at(hints)])


def _painted(shape: str, form: str, paint: tuple[str, str], kind: int) -> str:
    """A shape twice: with a fill, and with the pattern that says the same without colours."""
    return f'<{shape} class="{paint[0]}{kind}" {form}/><{shape} fill="url(#{paint[1]}{kind})" {form}/>'


def cell(name: str, value: str, kind: int, hint: str, large: bool, level: float = 1.0, which: str = "") -> str:
    """Return one node of a heat map: a pattern and a colour, and where there is room its name and value.

    Args:
        kind: which fill and pattern.
        hint: shown when it is pointed at.
        level: up to where it is filled.
        which: attribute by which pages choose it; HTML.
    """
    title = f"<title>{escape(hint)}</title>"
    width, height = (82, 46) if large else (20, 20)
    full = f'<rect class="f{kind}" y="{height * (1 - level):.0f}" width="{width}" height="{height * level:.0f}"/>'
    head = f'<svg class="cell" width="{width}" height="{height}" role="img"{which}>{title}{full}'
    if not large:
        return f'{head}<rect fill="url(#p{kind})" width="20" height="20"/></svg>'
    shown = name if len(name) <= 11 else f"{name[:5]}…{name[-5:]}"
    return (
        f'{head}<rect fill="url(#p{kind})" y="36" width="82" height="10"/>'
        f'<text class="on{kind} name" x="41" y="14">{escape(shown)}</text>'
        f'<text class="on{kind} value" x="41" y="31">{escape(value)}</text></svg>'
    )


def patterns() -> str:
    """Return the patterns that fills have; once in a page. Those of causes are of the card's colour, on any fill."""
    shapes = (
        '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4" stroke-width="2"/>',
        '<path d="M0 8l8-8M-2 2l4-4M6 10l4-4" stroke-width="0.8"/>',
        "",
        '<circle cx="4" cy="4" r="1" class="dot"/>',
        '<circle cx="2" cy="2" r="1.5" class="dot"/><circle cx="6" cy="6" r="1.5" class="dot"/>',
        '<path d="M0 0l8 8M8 0l-8 8" stroke-width="0.8"/>',
    )
    defined = "".join(
        f'<pattern id="{name}{place}" class="pattern {ink}" width="8" height="8" patternUnits="userSpaceOnUse">{shape}'
        "</pattern>"
        for place, shape in enumerate(shapes)
        for name, ink in (("p", f"on{place}"), ("q", "cut"))
    )
    return f'<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>{defined}</defs></svg>'


def legend(names: Iterable[tuple[int, str]], paint: tuple[str, str] = CLASSES) -> str:
    """Fills with their patterns, and what they are."""
    box = 'width="20" height="14"'
    items = "".join(
        f'<li><svg {box} aria-hidden="true">{_painted("rect", box, paint, kind)}</svg> {escape(name)}</li>'
        for kind, name in names
    )
    return f'<ul class="legend">{items}</ul>'


def with_gaps(points: Sequence[Point]) -> list[Point]:
    """Return the points, with a break wherever far fewer were taken than usual."""
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
    """Return an axis of counts from 0, with a few round ticks."""
    step = _round_step(max(high, 4.0) / 4)
    top = step * math.ceil(max(high, 1.0) / step)
    return Axis(0.0, top, [(step * place, f"{step * place:,.0f}") for place in range(round(top / step) + 1)])


def share_axis(high: float = 1.0) -> Axis:
    """Return an axis of shares, from 0 to 100 %, or to what the highest needs."""
    step = max(0.25, _round_step(high / 4) if high > 1 else 0.0)
    num = max(4, math.ceil(high / step))
    return Axis(0.0, step * num, [(step * place, f"{100 * step * place:,.0f} %") for place in range(num + 1)])


def time_axis(start_s: float, end_s: float, most: int) -> Axis:
    """Return an axis of moments with ticks at round times of the clock here, no two of which have the same label."""
    span_s = end_s - start_s
    step_s = next(
        (step for step in _CLOCK_STEPS_S if span_s <= step * most), 30 * 86400 * math.ceil(span_s / (30 * 86400 * most))
    )
    form = "%d %b" if step_s >= 86400 else "%d %b %H:%M" if span_s >= 86400 else "%H:%M" if step_s >= 60 else "%H:%M:%S"
    ahead_s = (datetime.fromtimestamp(start_s).astimezone().utcoffset() or timedelta()).total_seconds()
    first_s = math.ceil((start_s + ahead_s) / step_s) * step_s - ahead_s
    moments = [first_s + step_s * place for place in range(math.floor((end_s - first_s) / step_s) + 1)]
    return Axis(start_s, end_s, [(at, datetime.fromtimestamp(at).strftime(form)) for at in moments])


def ticked(low: float, high: float, num_ticks: int, text: Callable[[float], str]) -> Axis:
    """Return an axis with ticks at even distances."""
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
        for value, text in self._x.ticks:
            at, half = self.x(value), _CHAR / 2 * len(text)
            anchor = "start" if at < half else "end" if at + half > self._width else "middle"
            parts.append(
                f'<text class="tick" x="{at:.1f}" y="{ground + 18}" text-anchor="{anchor}">{escape(text)}</text>'
            )
        return parts

    def pointed_at(self, hints: Sequence[Hint]) -> list[str]:
        """Return a band for each hint, as far as to the middle between it and the next; it shows when it is
        pointed at.
        """
        places = [self.x(at) for at, _ in hints]
        edges = [float(_LEFT), *((a + b) / 2 for a, b in pairwise(places)), self._width - self._right]
        high = self._height - _TOP - _BOTTOM
        return [
            f'<rect class="band" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{high}">'
            f"<title>{escape(text)}</title></rect>"
            for (_, text), (left, right) in zip(hints, pairwise(edges), strict=False)
        ]


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


# What HTML pages are made of: the document with its style sheet, cards, tiles and charts in two widths. Pure.
#
# No script, no outside resource: a page opens from a mail, and a browser asks nobody for anything.

# Widths for which each chart is drawn: one for desktops, one for phones. The style sheet shows one of them.
WIDE, NARROW, HEIGHT = 560, 330, 220


def document(title: str, body: str, footer: str = "", refresh_s: int = 0) -> str:
    """Return a whole page.

    Args:
        title: plain text.
        body: HTML.
        footer: HTML; "" for none.
        refresh_s: seconds after which the browser loads it again; 0 for never.
    """
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    foot = f"<footer>{footer}</footer>" if footer else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'{refresh}<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{patterns()}{body}{foot}</body></html>\n"
    )


def card(title: str, body: str, wide: bool = False) -> str:
    """Return one thing with its title."""
    return f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{body}</section>'


def nothing(text: str) -> str:
    """Return a line in the place of what is not there."""
    return f'<p class="nothing">{escape(text)}</p>'


def both(draw: Callable[[int], str]) -> str:
    """Return a chart for desktops and one for phones."""
    return f'<div class="on-wide">{draw(WIDE)}</div><div class="on-narrow">{draw(NARROW)}</div>'


def tiles(shown: Iterable[tuple[str, str, str]]) -> str:
    """Return figures in a row: name, value, and a note."""
    inside = "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b> <span>{escape(note)}</span></dd></div>"
        for name, value, note in shown
    )
    return f'<dl class="tiles">{inside}</dl>'


def html_table(head: Sequence[str], rows: Sequence[Sequence[object]], empty: str, which: Sequence[str] = ()) -> str:
    """Return a table; on phones each row is a card of its own.

    Args:
        head: titles of the columns.
        rows: plain values; control characters are written out.
        empty: the line in its place when there are no rows.
        which: for each row the attribute by which pages choose it; HTML.
    """
    if not rows:
        return nothing(empty)
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(
        f"<tr{mark}>{''.join(map(_cell, head, row))}</tr>" for row, mark in zip_longest(rows, which, fillvalue="")
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"


def _cell(name: str, value: object) -> str:
    kind = ' class="number"' if isinstance(value, (int, float)) else ""
    return f'<td data-label="{escape(name)}"{kind}><span>{escape(printable(str(value)))}</span></td>'


# Colours: Okabe and Ito for lines, orange to blue for the indicator; both can be told apart with any colour vision.
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--paper:#f4f5f7;--card:#fff;--rule:#d8dde3;
--s0:#c24e00;--s1:#0072b2;--s2:#a5468a;--s3:#00805c;--s4:#8a6d00;--s5:#6b7280;
--f0:#b35806;--f1:#fdb863;--f2:#e9ebee;--f3:#a6cbea;--f4:#2166ac;--f5:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#a4adb8;--paper:#14171b;--card:#1e2329;--rule:#3a424c;
--s0:#ff8a3c;--s1:#5cb8ee;--s2:#e29bcb;--s3:#34c99a;--s4:#e0c341;--s5:#a4adb8;--f2:#4a525c;--f5:#1e2329}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:16px;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:break-word}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:0 0 8px}p{margin:0 0 8px;color:var(--soft)}
h3{font-size:.88rem;margin:0 0 4px}h3 span{font-weight:400;color:var(--soft)}
header{margin-bottom:12px}header p{margin:0}
nav{display:flex;flex-wrap:wrap;gap:6px;align-items:center;margin:0 0 12px;color:var(--soft);font-size:.88rem}
nav a{color:var(--ink);border:1px solid var(--rule);background:var(--card);border-radius:8px;padding:2px 10px;
text-decoration:none;scroll-margin-top:16px}
nav a:target,body:not(:has(.in:target)) #in0{border-color:var(--ink);font-weight:600}nav p{margin:0;flex-basis:100%}
.tiles{display:grid;grid-template-columns:repeat(5,1fr);gap:10px;margin:0 0 12px}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
dt{color:var(--soft);font-size:.85rem}dd{margin:0}dd b{font-size:1.6rem;display:block;line-height:1.2}
dd span{font-size:.8rem;color:var(--soft)}
.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px;margin:0 0 12px;min-width:0}
@media(min-width:900px){body{display:grid;grid-template-columns:1fr 1fr;gap:0 12px;align-items:stretch}
header,nav,.tiles,.wide,footer{grid-column:1/-1}}
.cells{display:flex;flex-wrap:wrap;gap:4px;margin-bottom:10px}.cell{border-radius:3px;outline:1px solid var(--rule)}
.cell text{text-anchor:middle}.cell .name{font-size:11px}.cell .value{font-size:14px;font-weight:600}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:6px 0;padding:0;font-size:.85rem}
.legend svg{vertical-align:-2px;outline:1px solid var(--rule)}
.chart{display:block;width:100%;height:auto}.on-narrow{display:none}
text{font-size:12px;fill:var(--ink)}.tick{fill:var(--soft);font-size:11px}.grid{stroke:var(--rule)}
.band{fill:transparent}.band:hover{fill:var(--ink);fill-opacity:.12}
.line{fill:none;stroke-width:2}.mark{stroke-width:1.5}
.s0{stroke:var(--s0)}.s1{stroke:var(--s1)}.s2{stroke:var(--s2)}.s3{stroke:var(--s3)}.s4{stroke:var(--s4)}.s5{stroke:var(--s5)}
.mark.s0{fill:var(--s0)}.mark.s1{fill:var(--s1)}.mark.s2{fill:var(--s2)}.mark.s3{fill:var(--s3)}.mark.s4{fill:var(--s4)}.mark.s5{fill:none}
.f0{fill:var(--f0)}.f1{fill:var(--f1)}.f2{fill:var(--f2)}.f3{fill:var(--f3)}.f4{fill:var(--f4)}.f5{fill:var(--f5)}.f6{fill:var(--s5);fill-opacity:.45}
.c0{fill:var(--s0)}.c1{fill:var(--s1)}.c2{fill:var(--s2)}.c3{fill:var(--s3)}.c4{fill:var(--s4)}.c5{fill:var(--s5)}
.cut{fill:var(--card);stroke:var(--card)}
.on0,.on4{fill:#fff;stroke:#fff}.on1,.on3{fill:#1b1f24;stroke:#1b1f24}.on2,.on5,.on6{fill:var(--ink);stroke:var(--ink)}
text[class^=on]{stroke:none}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;padding:5px 8px 5px 0;vertical-align:top}
th{color:var(--soft);font-weight:600;border-bottom:1px solid var(--rule)}
tbody tr+tr td{border-top:1px solid var(--rule)}td[data-label^=Wh]{overflow-wrap:anywhere}
.number{font-variant-numeric:tabular-nums}.nothing{font-style:italic}
footer{color:var(--soft);font-size:.8rem;padding:4px 2px 16px}
@media(max-width:899px){.tiles{grid-template-columns:repeat(3,1fr)}}
@media(max-width:560px){body{padding:10px}h1{font-size:1.25rem}.tiles{grid-template-columns:1fr 1fr}
.tiles div:last-child{grid-column:1/-1}.card{padding:10px}
.on-wide{display:none}.on-narrow{display:block}
thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
tr{display:grid;grid-template-columns:1fr 1fr;gap:0 12px;padding:7px 0}
tbody tr+tr{border-top:1px solid var(--rule)}tbody tr+tr td{border:0}
td{display:flex;gap:6px;padding:1px 0;min-width:0}td span{min-width:0;overflow-wrap:anywhere}
td::before{content:attr(data-label);color:var(--soft);flex:none}
td:first-child,td[data-label^=Wh]{grid-column:1/-1}td:first-child span{font-weight:600}
td[data-label^=Wh]{display:block}td[data-label^=Wh]::before{content:attr(data-label) ": "}}
@media print{nav a,nav span{display:none}body{background:#fff}.card,.tiles div{break-inside:avoid}}
""".replace("\n", "")


# Shared GPUs on the page of `hetstream report`, and as its tables and JSON. Pure.

_TITLE, _TRAINERS_TITLE = "Shared GPUs", "Trainers that leave their GPUs idle"
_NOBODY = "No node tells of shared GPUs."
_NO_TRAINERS = "None is known."
_NOTE = (
    "<p>Idle is the part of the guaranteed job's mini-batches in which it has nothing on the GPU; free is what its "
    "peak leaves. A mini-batch stands beside the time that one takes alone.</p>"
)
_HEAD = (
    "GPU", "In use", "Idle", "Free", "Job", "User", "Class", "Holds", "On host", "Mini-batch", "Alone", "What else",
)  # fmt: skip
_TRAINER_HEAD = (
    "Job", "User", "GPUs", "Waits for data", "Idle", "Free", "Sharing", "On", "Whether an opportunistic job can come",
)  # fmt: skip
# On the page, of each table.
MOST_LINES = 100
_TRAINERS_NOTE = "<p>Where <code>hetstream gpu pack</code> finds most time for opportunistic jobs.</p>"


def shared_gpu_cards(seen: Observation) -> Iterator[tuple[str, str]]:
    """Titles and contents of the page's cards; none where there is no site daemon that would know."""
    if seen.shared is None:
        return
    if seen.shared.missing:
        yield _TITLE, nothing(f"They are not known: {seen.shared.missing}")
        return
    rows = sharing_rows(seen.shared, seen.snapshot.jobs)
    lines = [_line(row, before) for row, before in zip(rows, [None, *rows], strict=False)]
    yield _TITLE, (_NOTE if rows else "") + _shortened(_HEAD, lines, _NOBODY)
    trainers = idle_trainers(seen.shared, seen.snapshot.jobs, seen.wait_shares)
    lines = [_trainer_line(row) for row in trainers]
    yield _TRAINERS_TITLE, (_TRAINERS_NOTE if trainers else "") + _shortened(_TRAINER_HEAD, lines, _NO_TRAINERS)


def _shortened(head: Sequence[str], lines: Sequence[Sequence[object]], empty: str) -> str:
    num_more = len(lines) - MOST_LINES
    more = f"<p>and {num_more:,} more, all of them with --json</p>" if num_more > 0 else ""
    return html_table(head, lines[:MOST_LINES], empty) + more


def shared_gpu_sections(seen: Observation) -> tuple[list[Section], list[str]]:
    """Return the same as tables, and what is to be noted."""
    if seen.shared is None:
        return [], []
    if seen.shared.missing:
        return [], [f"shared GPUs are not known: {seen.shared.missing}"]
    rows = [asdict(row) for row in sharing_rows(seen.shared, seen.snapshot.jobs)]
    trainers = [asdict(row) for row in idle_trainers(seen.shared, seen.snapshot.jobs, seen.wait_shares)]
    return [
        Section("shared_gpus", _COLUMNS, rows, title=_TITLE, empty=_NOBODY),
        Section("idle_trainers", _TRAINER_COLUMNS, trainers, title=_TRAINERS_TITLE, empty=_NO_TRAINERS),
    ], []


def _line(row: SharingRow, before: SharingRow | None) -> tuple[object, ...]:
    """One job; what is said of its GPU stands in the first line of each GPU alone."""
    is_first = before is None or (before.node, before.index) != (row.node, row.index)
    of_gpu = (percent(row.used_share), _shown(row.idle_share, percent), size_words(row.free_bytes))
    return (
        f"{row.node}:{row.index}", *(of_gpu if is_first else ("", "", "")), row.job or "–", row.user or "–",
        row.job_class or "–", _shown(row.held_bytes, size_words), _shown(row.host_bytes, size_words),
        _shown(row.batch_s, _time), _alone(row), row.note,
    )  # fmt: skip


def _trainer_line(row: IdleTrainer) -> tuple[object, ...]:
    return (
        row.job, row.user, row.gpus, _shown(row.wait_share, percent), _shown(row.idle_share, percent),
        _shown(row.free_bytes, size_words), row.num_sharing, " ".join(row.places) or "–", row.verdict,
    )  # fmt: skip


def _alone(row: SharingRow) -> str:
    return "–" if row.alone_s is None or row.ratio is None else f"{_time(row.alone_s)} (×{row.ratio:.2f})"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _shown(value: Any, show: Any) -> str:
    return "–" if value is None else str(show(value))


_COLUMNS = (
    Column("node", "NODE", left=True), Column("index", "GPU"), Column("used_share", "USED", percent),
    Column("idle_share", "IDLE", percent), Column("free_bytes", "FREE", size_words), Column("job", "JOB", left=True),
    Column("user", "USER", left=True), Column("job_class", "CLASS", left=True),
    Column("held_bytes", "HOLDS", size_words), Column("host_bytes", "ON HOST", size_words),
    Column("batch_s", "BATCH", _time), Column("alone_s", "ALONE", _time), Column("ratio", "RATIO", "{:.2f}".format),
    Column("note", "NOTE", left=True),
)  # fmt: skip
_TRAINER_COLUMNS = (
    Column("job", "JOB", left=True), Column("user", "USER", left=True), Column("gpus", "GPUS"),
    Column("wait_share", "WAITS", percent), Column("idle_share", "IDLE", percent),
    Column("free_bytes", "FREE", size_words), Column("num_sharing", "SHARING"),
    Column("verdict", "TAKES AN OPPORTUNISTIC JOB", left=True),
)  # fmt: skip
