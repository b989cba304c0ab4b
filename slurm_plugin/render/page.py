"""The HTML page of a cluster: (observation, samples) -> one self-contained document. Pure.

Called by `hetstream report --html` and `hetstream serve`. No script, no outside resource: it opens from a mail, and a
browser asks nobody for anything. Every text that comes from the cluster is escaped.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cache
from html import escape
from statistics import fmean
from typing import Any

from hetstream.base.text import printable
from hetstream.slurm_plugin.insight.advise import Advice, advise
from hetstream.slurm_plugin.insight.fragmentation import NodeFragmentation
from hetstream.slurm_plugin.insight.observation import NUM_CLASSES, Observation, Sample, WaitingJob, class_of
from hetstream.slurm_plugin.render.charts import (
    Axis,
    Series,
    cell,
    count_axis,
    line_chart,
    patterns,
    share_axis,
    stacked_bars,
    swatch,
    ticked,
    with_gaps,
)
from hetstream.slurm_plugin.render.report import duration, percent, signed

NUM_WORST = 10
# Widths for which each chart is drawn: one for desktops, one for phones. The style sheet shows one of them.
WIDE, NARROW, HEIGHT = 560, 330, 220
# With more nodes than this the heat map shows small cells without text.
MAX_LARGE_CELLS = 160
MAX_POINTS, MAX_BARS = 120, 24
OUT_OF_USE = NUM_CLASSES
_CLASS_NAMES = (
    "CPUs gone (−1 to −0.5)",
    "CPUs short (−0.5 to −0.25)",
    "in step",
    "GPUs short (0.25 to 0.5)",
    "GPUs gone (0.5 to 1)",
    "out of use",
)
# Of what pending jobs wait for: `either` is GPUs or CPUs, `turn` a place in the queue, `other` no resource.
_GROUPS = ("GPUs", "CPUs", "either", "memory", "turn", "other")
_TURN = ("priority", "backfill", "scheduler")
# Waits are drawn from a minute on, in so many steps for each power of ten.
_SHORTEST_S, DELAY_STEPS = 60.0, 40
_LOG_SHORTEST = math.log10(_SHORTEST_S)
_AGES = (
    (60, "1 min"), (600, "10 min"), (3600, "1 h"), (6 * 3600, "6 h"), (86400, "1 d"), (7 * 86400, "1 week"),
    (30 * 86400, "30 d"),
)  # fmt: skip
_FOOTER = """\
Made by hetstream. What a job waits for is what <code>hetstream why</code> names first: <em>either</em> is GPUs
or CPUs, <em>turn</em> a place in the queue, <em>other</em> no resource. The indicator of a node is
freeCPU/CPU − freeGPU/GPU; stranded is what is free and no pending job can use."""


def page(seen: Observation, samples: Sequence[Sample], refresh_s: int = 0) -> str:
    """The document.

    Args:
        seen: the cluster now.
        samples: its history, the oldest first, with the sample of `seen` at the end.
        refresh_s: the browser loads it again after so many seconds; 0 for never.
    """
    cluster = seen.snapshot.config.get("ClusterName", "") or "cluster"
    body = "".join(
        (
            _header(seen, cluster),
            _tiles(seen),
            _card("Fragmentation now", _heat_map(seen), wide=True),
            _card("Fragmentation over time", _class_history(samples)),
            _card("Utilisation over time", _utilisation(samples)),
            _card("Jobs that wait, by cause", _queue_history(samples)),
            _card("How long they have waited", _delay_curve(seen.waiting)),
            _card("Worst nodes", _worst_nodes(seen)),
            _card("Jobs that wait longest", _longest_waits(seen)),
            _card("Jobs that would gain from data workers", _would_gain(seen), wide=True),
        )
    )
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'{refresh}<link rel="icon" href="data:,"><title>hetstream: {escape(cluster)}</title>'
        f"<style>{_STYLE}</style></head><body>{patterns()}{body}"
        f"<footer>{_FOOTER}</footer></body></html>\n"
    )


def unavailable(error: str, refresh_s: int) -> str:
    """The document while slurmctld does not answer."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{refresh_s}"><link rel="icon" href="data:,">'
        f"<title>hetstream: no answer</title><style>{_STYLE}</style></head><body><header><h1>Slurm does not answer</h1>"
        f"<p>{escape(error)}</p></header></body></html>\n"
    )


def _header(seen: Observation, cluster: str) -> str:
    taken = datetime.fromtimestamp(seen.snapshot.taken_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    return (
        f"<header><h1>{escape(cluster)}</h1><p>{escape(taken)} · Slurm {escape(seen.snapshot.version)} · "
        f"{len(seen.fragmentation.nodes):,} nodes in use, {len(seen.fragmentation.left_out):,} out of use</p></header>"
    )


def _tiles(seen: Observation) -> str:
    now = seen.sample
    groups = _grouped({cause: one.num_jobs for cause, one in now.waiting.items()})
    tiles = [
        ("GPUs free", f"{now.gpus - now.gpus_allocated:,}", f"of {now.gpus:,}"),
        ("GPUs stranded", f"{now.stranded_gpus:,}", "free, of no use to any pending job"),
        ("CPUs free", f"{now.cpus - now.cpus_allocated:,}", f"of {now.cpus:,}"),
        (
            "Fragmentation",
            "–" if now.indicator is None else f"{now.indicator:.2f}",
            "no node has GPUs" if now.indicator is None else "mean of |indicator|, 0 is none",
        ),
        ("Jobs that run", f"{now.num_running:,}", _starved(now)),
        (
            "Jobs that wait",
            f"{sum(groups.values()):,}",
            f"{groups['GPUs']:,} for GPUs, {groups['CPUs']:,} for CPUs, {groups['either']:,} for either",
        ),
    ]
    inside = "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b> <span>{escape(note)}</span></dd></div>"
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{inside}</dl>'


def _starved(now: Sample) -> str:
    if not now.gpus_measured:
        return "none tells how its trainers wait"
    return f"trainers on {now.gpus_measured:,} GPUs wait {percent(now.gpus_starved / now.gpus_measured)} for data"


def _card(title: str, body: str, wide: bool = False) -> str:
    return f'<section class="card{" wide" if wide else ""}"><h2>{escape(title)}</h2>{body}</section>'


def _nothing(text: str) -> str:
    return f'<p class="nothing">{escape(text)}</p>'


def _both(draw: Callable[[int], str]) -> str:
    """A chart for desktops and one for phones."""
    return f'<div class="on-wide">{draw(WIDE)}</div><div class="on-narrow">{draw(NARROW)}</div>'


def _heat_map(seen: Observation) -> str:
    nodes = sorted(seen.fragmentation.gpu_nodes, key=lambda node: _natural(node.node))
    out = sorted((node for node in seen.fragmentation.left_out if node.gpus), key=lambda node: _natural(node.name))
    if not nodes and not out:
        return _nothing("No node has GPUs.")
    large = len(nodes) + len(out) <= MAX_LARGE_CELLS
    cells = [cell(one.node, _indicator(one), class_of(one.indicator or 0.0), _hint(one), large) for one in nodes]
    cells += [cell(one.name, "out", OUT_OF_USE, f"{one.name}: {one.state} {one.reason}".strip(), large) for one in out]
    rest = len(seen.fragmentation.nodes) - len(nodes)
    without = f"<p>{rest:,} node(s) without GPUs are not shown.</p>" if rest else ""
    return f'<div class="cells">{"".join(cells)}</div>{_legend(range(NUM_CLASSES + bool(out)))}{without}'


def _legend(kinds: Iterable[int]) -> str:
    items = "".join(f"<li>{swatch(kind)} {escape(_CLASS_NAMES[kind])}</li>" for kind in kinds)
    return f'<ul class="legend">{items}</ul>'


def _indicator(one: NodeFragmentation) -> str:
    return signed(one.indicator or 0.0).replace("-", "−")


def _hint(one: NodeFragmentation) -> str:
    return (
        f"{one.node}: {one.cpus_free} of {one.cpus} CPUs and {one.gpus_free} of {one.gpus} GPUs free, "
        f"indicator {_indicator(one)}, {one.stranded_gpus} GPU(s) stranded"
        + (f" for want of {one.lacking}" if one.lacking else "")
    )


def _class_history(samples: Sequence[Sample]) -> str:
    bins = [some for some in binned(samples, MAX_BARS) if any(sum(one.classes) for one in some)]
    if len(bins) < 2:
        return _too_few(samples)
    bars = [(_middle(some), [fmean(one.classes[kind] for one in some) for kind in range(NUM_CLASSES)]) for some in bins]
    high = max(sum(sizes) for _, sizes in bars)
    legend = _legend(range(NUM_CLASSES))
    note = "<p>Nodes with GPUs in each class of the indicator.</p>"
    return (
        note
        + _both(
            lambda width: stacked_bars(
                bars, _time_axis(samples, width), count_axis(high), width, HEIGHT, "nodes by class of the indicator"
            )
        )
        + legend
    )


def _utilisation(samples: Sequence[Sample]) -> str:
    lines: list[tuple[str, int, Callable[[Sample], float | None]]] = [
        ("GPUs held", 0, lambda one: _share(one.gpus_allocated, one.gpus)),
        ("CPUs held", 1, lambda one: _share(one.cpus_allocated, one.cpus)),
        ("CPU load", 3, lambda one: None if one.cpu_load is None else _share(min(one.cpu_load, one.cpus), one.cpus)),
        ("stranded", 2, lambda one: _share(one.stranded_gpus, one.gpus)),
    ]
    note = "<p>Shares of what is in use; <em>stranded</em>: of the GPUs, those that no pending job can use.</p>"
    return note + _over_time(samples, lines, lambda _: share_axis(), "utilisation over time")


def _queue_history(samples: Sequence[Sample]) -> str:
    def count(name: str) -> Callable[[Sample], float]:
        return lambda one: sum(some.num_jobs for cause, some in one.waiting.items() if _group_of(cause) == name)

    lines = [(name, style, count(name)) for style, name in enumerate(_GROUPS)]
    return _over_time(samples, lines, count_axis, "pending jobs by cause over time")


def _over_time(
    samples: Sequence[Sample],
    lines: Sequence[tuple[str, int, Callable[[Sample], float | None]]],
    axis: Callable[[float], Axis],
    title: str,
) -> str:
    bins = binned(samples, MAX_POINTS)
    if len(bins) < 2:
        return _too_few(samples)
    series = []
    for name, style, value in lines:
        points = [(_middle(some), _mean(map(value, some))) for some in bins]
        if any(known for _, known in points):
            series.append(Series(name, style, with_gaps(points)))
    high = max((known or 0.0 for one in series for _, known in one.points), default=0.0)
    return _both(lambda width: line_chart(series, _time_axis(samples, width), axis(high), width, HEIGHT, title))


def _delay_curve(waiting: Sequence[WaitingJob]) -> str:
    """How many of the jobs that wait for resources have waited at least so long, by cause."""
    queued = [one for one in waiting if one.job.waits_for_resources]
    if not queued:
        return _nothing("No job waits for resources.")
    high = max(_log_age(one.waited_s) for one in queued) + 1 / DELAY_STEPS
    series = []
    for style, name in enumerate(_GROUPS):
        counts: Counter[float] = Counter()
        for one in queued:
            if _group_of(one.cause) == name:
                counts[round(_log_age(one.waited_s) * DELAY_STEPS) / DELAY_STEPS] += one.job.num_records
        left = counts.total()
        points = [(_LOG_SHORTEST, float(left))]
        for place, count in sorted(counts.items()):
            left -= count
            points.append((place, float(left)))
        if counts:
            series.append(Series(name, style, points, steps=True))
    most = max(one.points[0][1] or 0.0 for one in series)
    note = "<p>Jobs that have waited at least so long for resources, since they could have started.</p>"
    return note + _both(
        lambda width: line_chart(
            series,
            _delay_axis(high, width),
            count_axis(most),
            width,
            HEIGHT,
            "queueing delay by cause",
        )
    )


def _worst_nodes(seen: Observation) -> str:
    rows = [
        (
            one.node,
            _indicator(one),
            f"{one.gpus_free} of {one.gpus}",
            f"{one.cpus_free} of {one.cpus}",
            one.stranded_gpus,
            one.lacking or "–",
        )
        for one in seen.fragmentation.gpu_nodes
        if one.stranded_gpus or class_of(one.indicator or 0.0) != class_of(0.0)
    ][:NUM_WORST]
    head = ("Node", "Indicator", "GPUs free", "CPUs free", "Stranded GPUs", "Lacks")
    return _table(head, rows, "No node has stranded GPUs, or CPUs and GPUs far out of step.")


def _longest_waits(seen: Observation) -> str:
    rows = [
        (
            one.job.label,
            one.job.user,
            _short(one.job.name),
            one.job.count("gpu"),
            one.job.num_cpus,
            one.cause,
            duration(one.waited_s),
        )
        for one in seen.waiting
        if one.job.waits_for_resources
    ][:NUM_WORST]
    return _table(("Job", "User", "Name", "GPUs", "CPUs", "Waits for", "Since"), rows, "No job waits for resources.")


def _would_gain(seen: Observation) -> str:
    rows = [_gain(one) for one in advise(seen.snapshot, seen.wait_shares)[:NUM_WORST]]
    return _table(("Job", "User", "State", "Basis", "GPU hours a day", "Why", "What to do"), rows, "None is known.")


def _gain(one: Advice) -> tuple[object, ...]:
    hours = "–" if one.gpu_hours_per_day is None else f"{one.gpu_hours_per_day:,.1f}"
    return (one.job, one.user, one.state, one.basis, hours, one.text, one.step)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> str:
    if not rows:
        return _nothing(empty)
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(f"<tr>{''.join(map(_cell, head, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"


def _cell(name: str, value: object) -> str:
    kind = ' class="number"' if isinstance(value, (int, float)) else ""
    return f'<td data-label="{escape(name)}"{kind}><span>{escape(printable(str(value)))}</span></td>'


def binned(samples: Sequence[Sample], most: int) -> list[list[Sample]]:
    """The samples in at most so many spans of equal length; empty spans are left out."""
    if len(samples) <= most:
        return [[one] for one in samples]
    start_s, end_s = samples[0].taken_s, samples[-1].taken_s
    bins: dict[int, list[Sample]] = {}
    for one in samples:
        place = int((one.taken_s - start_s) / (end_s - start_s) * most)
        bins.setdefault(min(place, most - 1), []).append(one)
    return [bins[place] for place in sorted(bins)]


def _grouped(counts: dict[str, int]) -> dict[str, int]:
    found = dict.fromkeys(_GROUPS, 0)
    for cause, count in counts.items():
        found[_group_of(cause)] += count
    return found


@cache
def _group_of(cause: str) -> str:
    kinds = cause.split(" or ")
    if "GPUs" in kinds and "CPUs" in kinds:
        return "either"
    return next((name for name in ("GPUs", "CPUs", "memory") if name in kinds), "turn" if cause in _TURN else "other")


def _too_few(samples: Sequence[Sample]) -> str:
    return _nothing(
        f"{len(samples)} reading(s) so far: a history needs two. Keep them with --history=FILE, or let "
        "hetstream exporter --history=FILE keep one every minute."
    )


def _time_axis(samples: Sequence[Sample], width: int) -> Axis:
    start_s, end_s = samples[0].taken_s, samples[-1].taken_s
    form = "%H:%M" if end_s - start_s < 86400 else "%d %b %H:%M" if end_s - start_s < 7 * 86400 else "%d %b"
    return ticked(start_s, end_s, 4 if width == WIDE else 2, lambda at: datetime.fromtimestamp(at).strftime(form))


def _log_age(seconds: float) -> float:
    return math.log10(max(seconds, _SHORTEST_S))


def _delay_axis(high: float, width: int) -> Axis:
    """Time on a logarithmic scale, from a minute on."""
    ticks = [(math.log10(seconds), text) for seconds, text in _AGES if math.log10(seconds) <= high]
    return Axis(_LOG_SHORTEST, high, ticks[:: 1 if width == WIDE else 2])


def _middle(some: Sequence[Sample]) -> float:
    return fmean(one.taken_s for one in some)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"


def _natural(name: str) -> list[Any]:
    """g2 before g10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


# Colours: Okabe and Ito for lines, orange to blue for the indicator; both can be told apart with any colour vision.
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--paper:#f4f5f7;--card:#fff;--rule:#d8dde3;
--s0:#c24e00;--s1:#0072b2;--s2:#a5468a;--s3:#00805c;--s4:#8a6d00;--s5:#6b7280;
--f0:#b35806;--f1:#fdb863;--f2:#e9ebee;--f3:#a6cbea;--f4:#2166ac;--f5:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#a4adb8;--paper:#14171b;--card:#1e2329;--rule:#3a424c;
--s0:#ff8a3c;--s1:#5cb8ee;--s2:#e29bcb;--s3:#34c99a;--s4:#e0c341;--s5:#a4adb8;--f2:#4a525c;--f5:#1e2329}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:16px;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:break-word}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:0 0 8px}p{margin:0 0 8px;color:var(--soft)}
header{margin-bottom:12px}
.tiles{display:grid;grid-template-columns:repeat(6,1fr);gap:10px;margin:0 0 12px}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
dt{color:var(--soft);font-size:.85rem}dd{margin:0}dd b{font-size:1.6rem;display:block;line-height:1.2}
dd span{font-size:.8rem;color:var(--soft)}
.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px;margin:0 0 12px;min-width:0}
@media(min-width:900px){body{display:grid;grid-template-columns:1fr 1fr;gap:0 12px;align-items:stretch}
header,.tiles,.wide,footer{grid-column:1/-1}}
.cells{display:flex;flex-wrap:wrap;gap:4px;margin-bottom:10px}.cell{border-radius:3px;outline:1px solid var(--rule)}
.cell text{text-anchor:middle}.cell .name{font-size:11px}.cell .value{font-size:14px;font-weight:600}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:6px 0;padding:0;font-size:.85rem}
.legend svg{vertical-align:-2px;outline:1px solid var(--rule)}
.chart{display:block;width:100%;height:auto}.on-narrow{display:none}
text{font-size:12px;fill:var(--ink)}.tick{fill:var(--soft);font-size:11px}.grid{stroke:var(--rule)}
.line{fill:none;stroke-width:2}.mark{stroke-width:1.5}
.s0{stroke:var(--s0)}.s1{stroke:var(--s1)}.s2{stroke:var(--s2)}.s3{stroke:var(--s3)}.s4{stroke:var(--s4)}.s5{stroke:var(--s5)}
.mark.s0{fill:var(--s0)}.mark.s1{fill:var(--s1)}.mark.s2{fill:var(--s2)}.mark.s3{fill:var(--s3)}.mark.s4{fill:var(--s4)}.mark.s5{fill:none}
.f0{fill:var(--f0)}.f1{fill:var(--f1)}.f2{fill:var(--f2)}.f3{fill:var(--f3)}.f4{fill:var(--f4)}.f5{fill:var(--f5)}
.on0,.on4{fill:#fff;stroke:#fff}.on1,.on3{fill:#1b1f24;stroke:#1b1f24}.on2,.on5{fill:var(--ink);stroke:var(--ink)}
text[class^=on]{stroke:none}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;padding:5px 8px 5px 0;vertical-align:top}
th{color:var(--soft);font-weight:600;border-bottom:1px solid var(--rule)}
tbody tr+tr td{border-top:1px solid var(--rule)}td[data-label^=Wh]{overflow-wrap:anywhere}
.number{font-variant-numeric:tabular-nums}.nothing{font-style:italic}
footer{color:var(--soft);font-size:.8rem;padding:4px 2px 16px}
@media(max-width:899px){.tiles{grid-template-columns:repeat(3,1fr)}}
@media(max-width:560px){body{padding:10px}.tiles{grid-template-columns:1fr 1fr}.card{padding:10px}
.on-wide{display:none}.on-narrow{display:block}
thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
tr{display:grid;grid-template-columns:1fr 1fr;gap:0 12px;padding:7px 0}
tbody tr+tr{border-top:1px solid var(--rule)}tbody tr+tr td{border:0}
td{display:flex;gap:6px;padding:1px 0;min-width:0}td span{min-width:0;overflow-wrap:anywhere}
td::before{content:attr(data-label);color:var(--soft);flex:none}
td:first-child,td[data-label^=Wh]{grid-column:1/-1}td:first-child span{font-weight:600}
td[data-label^=Wh]{display:block}td[data-label^=Wh]::before{content:attr(data-label) ": "}}
@media print{body{background:#fff}.card,.tiles div{break-inside:avoid}}
""".replace("\n", "")
