"""A picture of one job over time: data workers, the share of time waited, steps per second. (samples) -> SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from hetstream.slurm_plugin.render.charts import Axis, Series, line_chart, ticked

_WIDTH, _HEIGHT, _HEAD, _TITLE, _NAME = 860, 190, 46, 20, len("requested")
_STYLE = (
    "svg{font-family:DejaVu Sans,Helvetica,sans-serif}text{font-size:12px;fill:#1b1f24}"
    ".tick{fill:#57606a;font-size:11px}"
    ".head{font-size:15px;font-weight:600}.grid{stroke:#d8dde3}.line{fill:none;stroke-width:2}.mark{stroke-width:1.5}"
    ".s0{stroke:#0b5cad}.s1{stroke:#b35900}.s2{stroke:#6b7280}"
    ".mark.s0{fill:#0b5cad}.mark.s1{fill:#b35900}.mark.s2{fill:#6b7280}"
)


@dataclass(frozen=True)
class Sample:
    """One moment.

    Attributes:
        at_s: since the first step.
        working: data workers that are registered.
        requested: companion jobs in Slurm's queue, running or pending.
        wait_share: of the last seconds that the training loop waited.
        steps_per_s: over the last seconds.
    """

    at_s: float
    working: int
    requested: int
    wait_share: float
    steps_per_s: float


def picture(
    title: str, samples: Sequence[Sample], changes: Sequence[tuple[float, str]], ideal_per_s: float | None = None
) -> str:
    """Three charts below one another; the controller's changes stand in the first one's heading.

    Args:
        title: in words.
        samples: by time.
        changes: time and words of each.
        ideal_per_s: what the trainer would take if it never waited; None if that changes.
    """
    end = max((one.at_s for one in samples), default=1.0)
    x = ticked(0.0, end, 7, lambda value: f"{value:.0f} s")
    most = max((max(one.working, one.requested) for one in samples), default=1)
    fast = max([one.steps_per_s for one in samples] + [ideal_per_s or 0.0, 1.0])
    speed = [Series("steps/s", 0, [(one.at_s, one.steps_per_s) for one in samples])]
    if ideal_per_s:
        speed.append(Series("ideal", 2, [(0.0, ideal_per_s), (end, ideal_per_s)]))
    said = ", ".join(f"{words} at {at:.0f} s" for at, words in changes) or "none"
    charts = [
        (
            f"Data workers. Changes: {said}",
            [
                Series("working", 0, [(one.at_s, one.working) for one in samples], steps=True),
                Series("requested", 1, [(one.at_s, one.requested) for one in samples], steps=True),
            ],
            _whole(most),
        ),
        (
            "Share of its time that the trainer waits for data",
            [
                Series("waits", 0, [(one.at_s, one.wait_share) for one in samples]),
                Series("5 %", 2, [(0.0, 0.05), (end, 0.05)]),
            ],
            ticked(0.0, 1.0, 5, lambda value: f"{value:.0%}"),
        ),
        ("Steps per second", speed, ticked(0.0, fast * 1.05, 5, lambda value: f"{value:.0f}")),
    ]
    return stacked(title, x, charts)


def stacked(title: str, x: Axis, charts: Sequence[tuple[str, Sequence[Series], Axis]]) -> str:
    """Charts with one time axis below one another.

    Args:
        title: in words.
        x: of all of them.
        charts: heading, series and axis of each.
    """
    parts = [f'<text class="head" x="8" y="24">{escape(title)}</text>']
    for number, (heading, series, y) in enumerate(charts):
        top = _HEAD + number * (_HEIGHT + _TITLE + 8)
        # Names of one length give all charts the same time axis.
        even = [replace(one, name=one.name.ljust(_NAME)) for one in series]
        chart = line_chart(even, x, y, _WIDTH, _HEIGHT, heading)
        placed = chart.replace("<svg ", f'<svg x="0" y="{top + _TITLE}" width="{_WIDTH}" height="{_HEIGHT}" ', 1)
        parts += [f'<text x="8" y="{top + 14}">{escape(heading)}</text>', placed]
    height = _HEAD + len(charts) * (_HEIGHT + _TITLE + 8)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _whole(most: int) -> Axis:
    step = 1 if most <= 4 else 2
    top = most + (-most) % step
    return Axis(0, top, [(value, str(value)) for value in range(0, top + 1, step)])
