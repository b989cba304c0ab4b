"""The HTML page of a cluster: (observation, samples) -> one self-contained document. Pure.

Called by `hetstream report --html` and `hetstream serve`. No script, no outside resource: it opens from a mail, and a
browser asks nobody for anything. Every text that comes from the cluster is escaped.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from html import escape
from statistics import fmean
from typing import Any

from hetstream.base.text import duration, percent
from hetstream.base.web import Document, WebServer
from hetstream.slurm_plugin.client.counted import cpus_asked, whole_if_near
from hetstream.slurm_plugin.errors import ServeError
from hetstream.slurm_plugin.insight.advise import Advice, advise
from hetstream.slurm_plugin.insight.fragmentation import NodeFragmentation
from hetstream.slurm_plugin.insight.observation import NUM_CLASSES, Observation, Sample, WaitingJob, class_of
from hetstream.slurm_plugin.insight.prices import Prices
from hetstream.slurm_plugin.insight.spending import hourly, spent
from hetstream.slurm_plugin.render.charts import (
    HEIGHT,
    WIDE,
    Axis,
    Series,
    both,
    card,
    cell,
    count_axis,
    document,
    html_table,
    line_chart,
    nothing,
    share_axis,
    shared_gpu_cards,
    stacked_bars,
    swatch,
    ticked,
    tiles,
    with_gaps,
)
from hetstream.slurm_plugin.render.tables import signed

NUM_WORST = 10
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
_TURN = ("priority", "backfill", "hidden", "scheduler")
# Waits are drawn from a minute on, with this many steps for each power of ten.
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


def page(seen: Observation, samples: Sequence[Sample], prices: Prices | None = None, refresh_s: int = 0) -> str:
    """The document.

    Args:
        seen: the cluster now.
        samples: its history, the oldest first, with the sample of `seen` at the end.
        prices: None if there are none: the page then says nothing of cost.
        refresh_s: seconds after which the browser loads it again; 0 for never.
    """
    cluster = seen.snapshot.config.get("ClusterName", "") or "cluster"
    body = "".join(
        (
            _header(seen, cluster),
            _tiles(seen),
            card("Fragmentation now", _heat_map(seen), wide=True),
            card("Fragmentation over time", _class_history(samples)),
            card("Utilisation over time", _utilisation(samples)),
            card("Jobs that wait, by cause", _queue_history(samples)),
            card("How long they have waited", _delay_curve(seen.waiting)),
            *([card("Cost", _cost(seen.sample, samples, prices))] if prices else []),
            *(card(title, body, wide=True) for title, body in shared_gpu_cards(seen)),
            card("Worst nodes", _worst_nodes(seen)),
            card("Jobs that wait longest", _longest_waits(seen)),
            card("Jobs that would gain from data workers", _would_gain(seen), wide=True),
        )
    )
    return document(f"hetstream: {cluster}", body, _FOOTER, refresh_s)


def unavailable(error: str, refresh_s: int) -> str:
    """The document while slurmctld does not answer."""
    body = f"<header><h1>Slurm does not answer</h1><p>{escape(error)}</p></header>"
    return document("hetstream: no answer", body, "", refresh_s)


def _header(seen: Observation, cluster: str) -> str:
    taken = datetime.fromtimestamp(seen.snapshot.taken_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    hidden = f"{seen.snapshot.hidden}: all figures are of what one user may see, and there may be more"
    hidden = f"<p>{escape(hidden)}</p>" if seen.snapshot.hidden else ""
    return (
        f"<header><h1>{escape(cluster)}</h1><p>{escape(taken)} · Slurm {escape(seen.snapshot.version)} · "
        f"{len(seen.fragmentation.nodes):,} nodes in use, {len(seen.fragmentation.left_out):,} out of use</p>{hidden}"
        "</header>"
    )


def _tiles(seen: Observation) -> str:
    now = seen.sample
    groups = _grouped({cause: group.num_jobs for cause, group in now.waiting.items()})
    shown = [
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
    return tiles(shown)


def _starved(now: Sample) -> str:
    if not now.gpus_measured:
        return "none tells how its trainers wait"
    return f"trainers on {now.gpus_measured:,} GPUs wait {percent(now.gpus_starved / now.gpus_measured)} for data"


def _heat_map(seen: Observation) -> str:
    nodes = sorted(seen.fragmentation.gpu_nodes, key=lambda node: _natural(node.node))
    out = sorted((node for node in seen.fragmentation.left_out if node.gpus), key=lambda node: _natural(node.name))
    if not nodes and not out:
        return nothing("No node has GPUs.")
    large = len(nodes) + len(out) <= MAX_LARGE_CELLS
    cells = [cell(node.node, _indicator(node), class_of(node.indicator or 0.0), _hint(node), large) for node in nodes]
    cells += [
        cell(node.name, "out", OUT_OF_USE, f"{node.name}: {node.state} {node.reason}".strip(), large) for node in out
    ]
    num_hidden = len(seen.fragmentation.nodes) - len(nodes)
    without = f"<p>{num_hidden:,} node(s) without GPUs are not shown.</p>" if num_hidden else ""
    return f'<div class="cells">{"".join(cells)}</div>{_legend(range(NUM_CLASSES + bool(out)))}{without}'


def _legend(kinds: Iterable[int]) -> str:
    items = "".join(f"<li>{swatch(kind)} {escape(_CLASS_NAMES[kind])}</li>" for kind in kinds)
    return f'<ul class="legend">{items}</ul>'


def _indicator(node: NodeFragmentation) -> str:
    return signed(node.indicator or 0.0).replace("-", "−")


def _hint(node: NodeFragmentation) -> str:
    return (
        f"{node.node}: {node.cpus_free} of {node.cpus} CPUs and {node.gpus_free} of {node.gpus} GPUs free, "
        f"indicator {_indicator(node)}, {node.stranded_gpus} GPU(s) stranded"
        + (f" for want of {node.lacking}" if node.lacking else "")
    )


def _class_history(samples: Sequence[Sample]) -> str:
    bins = [some for some in binned(samples, MAX_BARS) if any(sum(sample.classes) for sample in some)]
    if len(bins) < 2:
        return _too_few(samples)
    bars = [
        (_middle(some), [fmean(sample.classes[kind] for sample in some) for kind in range(NUM_CLASSES)])
        for some in bins
    ]
    high = max(sum(sizes) for _, sizes in bars)
    legend = _legend(range(NUM_CLASSES))
    note = "<p>Nodes with GPUs in each class of the indicator.</p>"
    return (
        note
        + both(
            lambda width: stacked_bars(
                bars, _time_axis(samples, width), count_axis(high), width, HEIGHT, "nodes by class of the indicator"
            )
        )
        + legend
    )


def _utilisation(samples: Sequence[Sample]) -> str:
    lines: list[tuple[str, int, Callable[[Sample], float | None]]] = [
        ("GPUs held", 0, lambda sample: _share(sample.gpus_allocated, sample.gpus)),
        ("CPUs held", 1, lambda sample: _share(sample.cpus_allocated, sample.cpus)),
        ("CPU load", 3, lambda sample: None if sample.cpu_load is None else _share(sample.cpu_load, sample.cpus)),
        ("stranded", 2, lambda sample: _share(sample.stranded_gpus, sample.gpus)),
    ]
    note = (
        "<p>Shares of what is in use; <em>stranded</em>: of the GPUs, those that no pending job can use. A CPU load "
        "above 100 % is more threads than CPUs.</p>"
    )
    return note + _over_time(samples, lines, share_axis, "utilisation over time")


def _queue_history(samples: Sequence[Sample]) -> str:
    def count(name: str) -> Callable[[Sample], float]:
        return lambda sample: sum(some.num_jobs for cause, some in sample.waiting.items() if _group_of(cause) == name)

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
    high = max((known or 0.0 for curve in series for _, known in curve.points), default=0.0)
    return both(lambda width: line_chart(series, _time_axis(samples, width), axis(high), width, HEIGHT, title))


def _delay_curve(waiting: Sequence[WaitingJob]) -> str:
    """How many of the jobs that wait for resources have waited at least for each time, by cause."""
    queued = [pending_job for pending_job in waiting if pending_job.job.waits_for_resources]
    if not queued:
        return nothing("No job waits for resources.")
    high = max(_log_age(pending_job.waited_s) for pending_job in queued) + 1 / DELAY_STEPS
    series = []
    for style, name in enumerate(_GROUPS):
        counts: Counter[float] = Counter()
        for pending_job in queued:
            if _group_of(pending_job.cause) == name:
                counts[round(_log_age(pending_job.waited_s) * DELAY_STEPS) / DELAY_STEPS] += pending_job.job.num_records
        left = counts.total()
        points = [(_LOG_SHORTEST, float(left))]
        for place, count in sorted(counts.items()):
            left -= count
            points.append((place, float(left)))
        if counts:
            series.append(Series(name, style, points, steps=True))
    most = max(curve.points[0][1] or 0.0 for curve in series)
    note = "<p>Jobs that have waited at least so long for resources, since they could have started.</p>"
    return note + both(
        lambda width: line_chart(
            series,
            _delay_axis(high, width),
            count_axis(most),
            width,
            HEIGHT,
            "queueing delay by cause",
        )
    )


def _cost(latest: Sample, samples: Sequence[Sample], prices: Prices) -> str:
    now, whole = hourly(latest, prices), spent(samples, prices)
    rows = [
        (name, prices.shown(cost_now), prices.shown(cost_of_all) if whole.hours else "–")
        for name, cost_now, cost_of_all in (
            ("Held by jobs", now.held, whole.held),
            ("of that, GPUs whose trainers wait for data", now.waited, whole.waited),
            ("Free", now.free, whole.free),
        )
    ]
    note = f"<p>At {prices.gpu_hour:g} for an hour of a GPU, and {prices.cpu_hour:g} of a CPU.</p>"
    return note + html_table(("", "An hour, as it is now", f"The last {whole.hours:,.1f} hours"), rows, "")


def _worst_nodes(seen: Observation) -> str:
    rows = [
        (
            node.node,
            _indicator(node),
            f"{node.gpus_free} of {node.gpus}",
            f"{node.cpus_free} of {node.cpus}",
            node.stranded_gpus,
            node.lacking or "–",
        )
        for node in seen.fragmentation.gpu_nodes
        if node.stranded_gpus or class_of(node.indicator or 0.0) != class_of(0.0)
    ][:NUM_WORST]
    head = ("Node", "Indicator", "GPUs free", "CPUs free", "Stranded GPUs", "Lacks")
    return html_table(head, rows, "No node has stranded GPUs, or CPUs and GPUs far out of step.")


def _longest_waits(seen: Observation) -> str:
    rows = [
        (
            pending_job.job.label,
            pending_job.job.user,
            _short(pending_job.job.name),
            whole_if_near(pending_job.job.gpus),
            cpus_asked(pending_job.job),
            pending_job.cause,
            duration(pending_job.waited_s),
        )
        for pending_job in seen.waiting
        if pending_job.job.waits_for_resources
    ][:NUM_WORST]
    return html_table(
        ("Job", "User", "Name", "GPUs", "CPUs", "Waits for", "Since"), rows, "No job waits for resources."
    )


def _would_gain(seen: Observation) -> str:
    rows = [_gain(finding) for finding in advise(seen.snapshot, seen.wait_shares)[:NUM_WORST]]
    return html_table(("Job", "User", "State", "Basis", "GPU hours a day", "Why", "What to do"), rows, "None is known.")


def _gain(finding: Advice) -> tuple[object, ...]:
    hours = "–" if finding.gpu_hours_per_day is None else f"{finding.gpu_hours_per_day:,.1f}"
    return (finding.job, finding.user, finding.state, finding.basis, hours, finding.text, finding.step)


def binned(samples: Sequence[Sample], most: int) -> list[list[Sample]]:
    """The samples in a limited number of spans of equal length; empty spans are left out."""
    if len(samples) <= most:
        return [[sample] for sample in samples]
    start_s, end_s = samples[0].taken_s, samples[-1].taken_s
    bins: dict[int, list[Sample]] = {}
    for sample in samples:
        place = int((sample.taken_s - start_s) / (end_s - start_s) * most)
        bins.setdefault(min(place, most - 1), []).append(sample)
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
    return nothing(
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
    return fmean(sample.taken_s for sample in some)


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


# Serves the page of a cluster and its figures over HTTP, read only. Used by `hetstream serve`.
#
# The documents are made once for each reading and not for each visitor.


def serve_documents(host: str, port: int, documents: Callable[[], Mapping[str, Document]]) -> WebServer:
    """Serve documents by their paths until the server is closed.

    Args:
        host, port: where; port 0 finds a free one.
        documents: path -> what is there now; asked for each request, from another thread.

    Raises:
        ServeError: the address cannot be listened on.
    """
    try:
        return WebServer(host, port, lambda path, _: documents().get(path))
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: OSError) -> ServeError:
    """The error that says what to do."""
    return ServeError(f"{host}:{port} cannot be listened on: {error.strerror}. Give another one: --listen=HOST:PORT")
