"""A picture of completion times, simulated against real: one mark a job. (points) -> SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_SIZE, _LEFT, _TOP, _BOTTOM, _RIGHT = 420, 60, 44, 48, 240
_MARKS = (
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "M-2.7-2.7h5.4v5.4h-5.4z",
    "M0-4l3.6 4-3.6 4-3.6-4z",
    "M0-3.6l3.6 6.3h-7.2z",
    "M-3-3l6 6M-3 3l6-6",
    "M0-4v8M-4 0h8",
)
_COLOURS = ("#0b5cad", "#b35900", "#1a7f37", "#8250df", "#57606a", "#a40e26")
_STYLE = (
    "svg{font-family:DejaVu Sans,Helvetica,sans-serif}text{font-size:12px;fill:#1b1f24}.head{font-size:15px;"
    "font-weight:600}.tick{fill:#57606a;font-size:11px}.grid{stroke:#d8dde3}.same{stroke:#57606a;stroke-dasharray:6 4}"
    ".mark{fill:none;stroke-width:1.4}"
)

# (name, real times, simulated times)
Points = tuple[str, Sequence[float], Sequence[float]]


def picture(runs: Sequence[Points]) -> str:
    """The diagonal is where both are the same."""
    most = max((value for _, real, simulated in runs for value in (*real, *simulated)), default=1.0)
    step = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1e9) if most / size <= 6)
    end = step * (int(most / step) + 1)
    ground = _TOP + _SIZE

    def x(value: float) -> float:
        return _LEFT + _SIZE * value / end

    def y(value: float) -> float:
        return ground - _SIZE * value / end

    parts = [
        f'<text class="head" x="{_LEFT}" y="22">Completion time of each job, simulated against real Slurm</text>',
        f'<text x="{_LEFT + _SIZE / 2:.0f}" y="{ground + 38}" text-anchor="middle">real Slurm, seconds</text>',
        f'<text transform="translate(16 {_TOP + _SIZE / 2:.0f}) rotate(-90)" text-anchor="middle">simulated, seconds'
        "</text>",
    ]
    for number in range(round(end / step) + 1):
        at = number * step
        parts += [
            f'<line class="grid" x1="{x(at):.1f}" y1="{_TOP}" x2="{x(at):.1f}" y2="{ground}"/>',
            f'<line class="grid" x1="{_LEFT}" y1="{y(at):.1f}" x2="{_LEFT + _SIZE}" y2="{y(at):.1f}"/>',
            f'<text class="tick" x="{x(at):.1f}" y="{ground + 16}" text-anchor="middle">{at:g}</text>',
            f'<text class="tick" x="{_LEFT - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{at:g}</text>',
        ]
    parts.append(f'<line class="same" x1="{x(0):.1f}" y1="{y(0):.1f}" x2="{x(end):.1f}" y2="{y(end):.1f}"/>')
    for place, (name, real, simulated) in enumerate(runs):
        mark, colour = _MARKS[place % len(_MARKS)], _COLOURS[place % len(_COLOURS)]
        points = [*zip(map(x, real), map(y, simulated), strict=True)]
        label_y = _TOP + 12 + 20 * place
        for at_x, at_y in (*points, (_LEFT + _SIZE + 16, label_y - 4)):
            parts.append(
                f'<path class="mark" stroke="{colour}" d="{mark}" transform="translate({at_x:.1f} {at_y:.1f})"/>'
            )
        parts.append(f'<text x="{_LEFT + _SIZE + 26}" y="{label_y}">{escape(name)}</text>')
    width, height = _LEFT + _SIZE + _RIGHT, ground + _BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
