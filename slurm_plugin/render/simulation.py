"""The HTML page of a simulation: (compared runs) -> one self-contained document. Pure.

Called by `hetstream simulate --html`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from hetstream.base.text import duration, percent
from hetstream.slurm_plugin.render.charts import (
    HEIGHT,
    WIDE,
    Axis,
    Series,
    both,
    card,
    count_axis,
    document,
    html_table,
    line_chart,
    nothing,
    share_axis,
    stacked_bars,
    swatch,
    ticked,
    tiles,
)
from hetstream.slurm_plugin.simulate.metrics import PACKED, Compared, waits
from hetstream.slurm_plugin.simulate.usage_log import Outcome

# Lines of one chart: as many as there are dashes and marks.
MOST_LINES = 6
_POINTS = 120
PARTS = ("running", "waits for GPUs", "for CPUs", "for memory", "behind others", "for backfill")
_SHORTEST_S = 60.0
_AGES = ((60, "1 min"), (600, "10 min"), (3600, "1 h"), (6 * 3600, "6 h"), (86400, "1 d"), (7 * 86400, "1 week"))
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
_LEAST_UNITS = 4
_FOOTER = """\
Made by hetstream simulate. A job's completion time is its end less its submission; <em>effective</em> counts each GPU
times its job's speed, as a share of the speed that it has if it never waits for data. Intervals are 95 %, by bootstrap
over the seeds. Lines show the first seed."""


def simulation_page(title: str, compared: Sequence[Compared], lines: Sequence[str]) -> str:
    """The document.

    Args:
        title: the trace's name.
        compared: all runs; those of one discipline stand together.
        lines: what was simulated, assumed and left out.
    """
    said = "".join(f"<p>{escape(line)}</p>" for line in lines)
    disciplines = list(dict.fromkeys(comparison.discipline for comparison in compared))
    body = [
        f"<header><h1>{escape(title)}</h1>{said}</header>",
        _tiles(compared),
        card("Figures", _table(compared), True),
    ]
    packed = [comparison for comparison in compared if comparison.mean("gpu_effective_shared") is not None]
    if packed:
        body.append(card("GPUs that opportunistic jobs share", _sharing(compared, packed), True))
    for discipline in disciplines:
        own = [comparison for comparison in compared if comparison.discipline == discipline]
        body += [
            card(f"Completion time, {discipline}", _bars(own)),
            card(f"How long jobs wait, {discipline}", _waits(own)),
            card(f"Effective GPUs over time, {discipline}", _effective(own)),
            card(f"Fragmentation over time, {discipline}", _fragmentation(own)),
        ]
    return document(f"hetstream simulate: {title}", "".join(body), _FOOTER)


def hours(seconds: float) -> str:
    """`3.4 h`."""
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _span(low_s: float, high_s: float) -> str:
    """`3.4 to 5.1 h`."""
    unit_s, unit = (3600, "h") if high_s >= 3600 else (60, "min")
    return f"{low_s / unit_s:,.1f} to {high_s / unit_s:,.1f} {unit}"


def _tiles(compared: Sequence[Compared]) -> str:
    best = min(compared, key=lambda comparison: comparison.mean("mean_jct_s") or 0.0)
    own = [comparison for comparison in compared if comparison.discipline == best.discipline]
    worst = max(own, key=lambda comparison: comparison.mean("mean_jct_s") or 0.0)
    jct_s, worst_s = best.mean("mean_jct_s") or 0.0, worst.mean("mean_jct_s") or 0.0
    return tiles(
        [
            ("Least completion time", hours(jct_s), f"{best.policy}, {best.discipline}"),
            ("Against the worst", f"{worst_s / max(jct_s, 1e-9):.2f}x", f"{worst.policy}, {worst.discipline}"),
            ("It waits", hours(best.mean("mean_wait_s") or 0.0), "on average"),
            ("GPUs allocated", percent(best.mean("gpu_allocated") or 0.0), "of all"),
            ("GPUs effective", percent(best.mean("gpu_effective") or 0.0), "of all, times speed"),
            ("Greatest slowdown", f"{best.mean('max_slowdown') or 0.0:.1f}", "completion time / work"),
        ]
    )


def _table(compared: Sequence[Compared]) -> str:
    head = (
        "Policy", "Discipline", "Completion", "95 %", "Waiting", "Waiting, p95", "Slowdown, p99", "Makespan",
        "GPUs allocated", "effective", "CPUs allocated", "productive", "Cost",
    )  # fmt: skip
    rows = []
    for comparison in compared:
        low, high = comparison.interval("mean_jct_s") or (0.0, 0.0)
        cost = comparison.mean("cost")
        rows.append(
            (
                comparison.policy,
                comparison.discipline,
                hours(comparison.mean("mean_jct_s") or 0.0),
                _span(low, high) if high > low else "–",
                hours(comparison.mean("mean_wait_s") or 0.0),
                hours(comparison.mean("p95_wait_s") or 0.0),
                f"{comparison.mean('p99_slowdown') or 0.0:.1f}",
                duration(comparison.mean("makespan_s") or 0.0),
                percent(comparison.mean("gpu_allocated") or 0.0),
                percent(comparison.mean("gpu_effective") or 0.0),
                percent(comparison.mean("cpu_allocated") or 0.0),
                percent(comparison.mean("cpu_productive") or 0.0),
                "–" if cost is None else f"{cost:,.0f}",
            )
        )
    return html_table(head, rows, "Nothing was simulated.")


def _sharing(compared: Sequence[Compared], packed: Sequence[Compared]) -> str:
    """What packing brings, and what it costs those that have the GPUs."""
    head = (
        "Policy", "Discipline", "Effective GPUs", "of it by sharing", "without packing", "Guaranteed: completion",
        "run time, p99", "Opportunistic: completion", "evictions",
    )  # fmt: skip
    without = {(comparison.policy, comparison.discipline): comparison for comparison in compared}
    rows = []
    for comparison in packed:
        plain = without.get((comparison.policy.removesuffix(PACKED), comparison.discipline))
        rows.append(
            (
                comparison.policy,
                comparison.discipline,
                percent(comparison.mean("gpu_effective") or 0.0),
                percent(comparison.mean("gpu_effective_shared") or 0.0),
                "–" if plain is None else percent(plain.mean("gpu_effective") or 0.0),
                hours(comparison.mean("guaranteed_mean_jct_s") or 0.0),
                f"{comparison.mean('guaranteed_p99_held_up') or 1.0:.3f} of alone",
                hours(comparison.mean("opportunistic_mean_jct_s") or 0.0),
                f"{comparison.mean('num_evictions') or 0.0:,.0f}",
            )
        )
    note = "<p>How much sharing slows a guaranteed job down is a number of the model, not a result.</p>"
    return html_table(head, rows, "Nothing was simulated.") + note


def completion_bars(own: Sequence[Compared], width: int, height: int, title: str) -> str:
    """Mean completion time in hours, in parts: running, and what jobs wait for."""
    bars = []
    for place, comparison in enumerate(own):
        waited = comparison.waiting_s()
        backfill = waited["reservation"] + waited["cycle"]
        parts = [waited["gpus"], waited["cpus"], waited["memory"], waited["queue"], backfill]
        running = max(0.0, (comparison.mean("mean_jct_s") or 0.0) - sum(parts))
        bars.append((float(place), [part / 3600 for part in (running, *parts)]))
    high = max(sum(sizes) for _, sizes in bars)
    names = [(float(place), comparison.policy) for place, comparison in enumerate(own)]
    step = max(1, len(names) * 70 // width + (1 if width < WIDE else 0))
    shown = [name if at % step == 0 else (name[0], "") for at, name in enumerate(names)]
    # Names stand in the middle below their bars; the first and the last text of an axis do not.
    x = Axis(-0.6, len(own) - 0.4, [(-0.6, ""), *shown, (len(own) - 0.4, "")])
    return stacked_bars(bars, x, count_axis(high), width, height, title)


def legend() -> str:
    """What the parts of the bars are."""
    items = "".join(f"<li>{swatch(kind)} {escape(name)}</li>" for kind, name in enumerate(PARTS))
    return f'<ul class="legend">{items}</ul>'


def _bars(own: Sequence[Compared]) -> str:
    title = "mean completion time in hours"
    return both(lambda width: completion_bars(own, width, HEIGHT, title)) + f"<p>Hours.</p>{legend()}"


def _waits(own: Sequence[Compared]) -> str:
    curves = [(comparison.policy, waits(comparison.first)) for comparison in own[:MOST_LINES]]
    longest_s = max((curve[-1][0] for _, curve in curves if curve), default=0.0)
    if longest_s <= _SHORTEST_S:
        return nothing("No job waits longer than a minute.")
    high = float(np.log10(longest_s))
    series = [
        Series(name, style, [(float(np.log10(max(at, _SHORTEST_S))), share) for at, share in curve])
        for style, (name, curve) in enumerate(curves)
    ]
    ticks = [(float(np.log10(seconds)), text) for seconds, text in _AGES if np.log10(seconds) <= high]
    low = float(np.log10(_SHORTEST_S))
    title = "share of the jobs that waited no longer"
    return both(
        lambda width: line_chart(
            series, Axis(low, high, ticks[:: 1 if width == WIDE else 2]), share_axis(), width, HEIGHT, title
        )
    )


def _over_time(own: Sequence[Compared], points: Sequence[Series], title: str) -> str:
    end_s = max(
        (float(comparison.first.use.at_s[-1]) for comparison in own if len(comparison.first.use.at_s)), default=0.0
    )
    if end_s <= 0:
        return nothing("No job ran.")
    # Marks four to a chart must differ: a day or two are read in hours, more in days, an hour or two in minutes.
    unit_s, unit = next((span for span in _UNITS if end_s >= _LEAST_UNITS * span[0]), (1.0, "s"))
    return both(
        lambda width: line_chart(
            points,
            ticked(0.0, end_s, 4 if width == WIDE else 2, lambda at: f"{at / unit_s:.0f} {unit}"),
            share_axis(),
            width,
            HEIGHT,
            title,
        )
    )


def _effective(own: Sequence[Compared]) -> str:
    series = [
        Series(comparison.policy, style, effective_points(comparison.first), steps=True)
        for style, comparison in enumerate(own[:MOST_LINES])
    ]
    return _over_time(own, series, "effective GPUs as a share of all")


def effective_points(outcome: Outcome) -> list[tuple[float, float | None]]:
    """Effective GPUs over time, as means over equal spans."""
    use, end_s = outcome.use, float(outcome.use.at_s[-1]) if len(outcome.use.at_s) else 0.0
    if end_s <= 0 or not outcome.cluster.num_gpus:
        return []
    bounds = np.linspace(0.0, end_s, _POINTS + 1)
    integral = np.concatenate([[0.0], np.cumsum(use.effective_gpus[:-1] * np.diff(use.at_s))])
    means = np.diff(np.interp(bounds, use.at_s, integral)) / np.diff(bounds) / outcome.cluster.num_gpus
    return list(zip(bounds[:-1].tolist(), means.tolist(), strict=True))


def _fragmentation(own: Sequence[Compared]) -> str:
    series = []
    for style, comparison in enumerate(own[:MOST_LINES]):
        seen = comparison.first.fragmentation
        if seen is not None:
            every = max(1, len(seen.at_s) // _POINTS)
            points = zip(seen.at_s[::every].tolist(), seen.indicator[::every].tolist(), strict=True)
            series.append(Series(comparison.policy, style, list(points)))
    if not series:
        return nothing("It was not sampled.")
    return _over_time(own, series, "mean of |freeCPU/CPU - freeGPU/GPU| over the nodes with GPUs")
