"""The HTML page of a cluster: (observation, samples) -> one self-contained document. Pure.

Called by `hetstream report --html` and `hetstream serve`. No script, no outside resource: it opens from a mail, and a
browser asks nobody for anything. Every text that comes from the cluster is escaped.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from html import escape
from statistics import fmean
from typing import Any

from hetstream.base.text import count_words, duration, percent, printable
from hetstream.base.web import PRIVATE, Document, WebServer
from hetstream.slurm_plugin.client.counted import counted, cpus_asked, whole_if_near
from hetstream.slurm_plugin.client.model import Node
from hetstream.slurm_plugin.errors import ServeError
from hetstream.slurm_plugin.insight.advise import Advice, advise, headline
from hetstream.slurm_plugin.insight.fragmentation import NodeFragmentation
from hetstream.slurm_plugin.insight.observation import NUM_CLASSES, Observation, Sample, WaitingJob, class_of
from hetstream.slurm_plugin.insight.prices import Prices, hourly, spent
from hetstream.slurm_plugin.render.charts import (
    CAUSES,
    CLASSES,
    HEIGHT,
    WIDE,
    Axis,
    Hint,
    Series,
    both,
    card,
    cell,
    count_axis,
    document,
    html_table,
    legend,
    line_chart,
    nothing,
    share_axis,
    shared_gpu_cards,
    stacked_areas,
    stacked_bars,
    tiles,
    time_axis,
    with_gaps,
)
from hetstream.slurm_plugin.render.tables import signed

NUM_WORST = 10
_GAIN_TITLE = "Jobs that would gain from data workers"
# With more nodes than this the heat map shows small cells without text.
MAX_LARGE_CELLS = 160
MAX_POINTS = 60
OUT_OF_USE, WITHOUT_GPUS = NUM_CLASSES, NUM_CLASSES + 1
_CLASS_NAMES = (
    "CPUs gone (−1 to −0.5)",
    "CPUs short (−0.5 to −0.25)",
    "in step",
    "GPUs short (0.25 to 0.5)",
    "GPUs gone (0.5 to 1)",
    "out of use",
    "without GPUs: filled as far as jobs hold its CPUs",
)
# Of what pending jobs wait for.
_EITHER, _QUEUE, _OTHER = "GPUs or CPUs", "their place in the queue", "other things"
_GROUPS = ("GPUs", "CPUs", _EITHER, "memory", _QUEUE, _OTHER)
_OF_THE_QUEUE = ("priority", "backfill", "hidden", "scheduler")
# Between the bars of how long jobs have waited.
_AGES = ((60, "1 min"), (600, "10 min"), (3600, "1 h"), (6 * 3600, "6 h"), (86400, "1 d"), (7 * 86400, "7 d"))


# Name, style, and what it is in a sample; None: not known.
_Curve = tuple[str, int, Callable[[Sample], "float | None"]]


class _Partitions:
    """Which rows and nodes the page shows for a partition, without a script.

    Each has the numbers of the partitions in whose view it is, 0 for all; the address after `#` says which is shown.

    Args:
        names: of the partitions; of a single one there is no choice.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._views = {name: place for place, name in enumerate(names, 1)} if len(names) > 1 else {}

    def mark(self, views: Iterable[int]) -> str:
        """Return the attribute of what is in these views."""
        return f' data-in="{" ".join(map(str, sorted(views)))}"' if self._views else ""

    def of(self, partitions: Iterable[str]) -> set[int]:
        """Return the views of something in these partitions."""
        return {0, *(self._views[name] for name in partitions if name in self._views)}

    def table(self, head: Sequence[str], rows: Iterable[tuple[Iterable[str], Sequence[object]]], empty: str) -> str:
        """Return a table with the first rows of each view.

        Args:
            head, empty: see `html_table`.
            rows: partitions and values, the most important first.
        """
        shown: list[tuple[Sequence[object], str]] = []
        num_rows: Counter[int] = Counter()
        for partitions, row in rows:
            if views := {view for view in self.of(partitions) if num_rows[view] < NUM_WORST}:
                num_rows.update(views)
                shown.append((row, self.mark(views)))
        without = [view for view in self._views.values() if shown and not num_rows[view]]
        none = f'<p class="nothing"{self.mark(without)}>None in this partition.</p>' if without else ""
        return html_table(head, [row for row, _ in shown], empty, [mark for _, mark in shown]) + none

    def choice(self, seen: Observation) -> str:
        """Return the links that choose, and figures of what is chosen."""
        if not self._views:
            return ""
        links, lines, rules = ['<a id="in0" href="#in0">all</a>'], [], ["body:not(:has(.in:target)) "]
        rules[0] += '[data-in]:not([data-in~="0"])'
        for name, view in self._views.items():
            links.append(f'<a class="in" id="in{view}" href="#in{view}">{escape(printable(name))}</a>')
            rules.append(f'body:has(#in{view}:target) [data-in]:not([data-in~="{view}"])')
            there = counted(node for node in seen.snapshot.nodes if name in node.partitions)
            stranded = sum(node.stranded_gpus for node in seen.fragmentation.nodes if name in node.partitions)
            waiting = sum(
                pending_job.job.num_records for pending_job in seen.waiting if name in pending_job.job.partitions
            )
            lines.append(
                f"<p{self.mark([view])}>{there.gpus - there.gpus_held:,} of {there.gpus:,} GPUs are free, "
                f"{stranded:,} of them stranded, and {there.cpus - there.cpus_held:,} of {there.cpus:,} CPUs; "
                f"{waiting:,} jobs wait. The figures above, and the curves, are of all partitions.</p>"
            )
        style = f"<style>{','.join(rules)}{{display:none!important}}</style>"
        return f"{style}<nav><span>Partition</span> {''.join(links)}{''.join(lines)}</nav>"


def page(seen: Observation, samples: Sequence[Sample], prices: Prices | None = None, refresh_s: int = 0) -> str:
    """Return the document.

    Args:
        seen: the cluster now.
        samples: its history, the oldest first, with the sample of `seen` at the end.
        prices: None if there are none: the page then says nothing of cost.
        refresh_s: seconds after which the browser loads it again; 0 for never.
    """
    cluster = seen.snapshot.config.get("ClusterName", "") or "cluster"
    partitions = _Partitions([partition.name for partition in seen.snapshot.partitions])
    advice = advise(seen.snapshot, seen.wait_shares)
    body = "".join(
        (
            _header(seen, cluster, [finding.job for finding in advice if finding.basis == "free now"]),
            _tiles(seen),
            partitions.choice(seen),
            *([card(_GAIN_TITLE, _would_gain(seen, advice, partitions), wide=True)] if advice else []),
            card("Nodes now", _heat_map(seen, partitions), wide=True),
            card("Fragmentation over time", _class_history(samples)),
            card("Utilisation over time", _utilisation(samples)),
            card("Jobs that wait, by cause", _queue_history(samples)),
            card("How long they have waited", _delays(seen.waiting)),
            *([card("Cost", _cost(seen.sample, samples, prices))] if prices else []),
            card("Worst nodes", _worst_nodes(seen, partitions), wide=True),
            card("Jobs that wait longest", _longest_waits(seen, partitions), wide=True),
            *(card(title, body, wide=True) for title, body in shared_gpu_cards(seen)),
        )
    )
    return document(f"hetstream: {cluster}", body, "Made by hetstream.", refresh_s)


def unavailable(error: str, refresh_s: int) -> str:
    """Return the document while slurmctld does not answer."""
    body = f"<header><h1>Slurm does not answer</h1><p>{escape(error)}</p></header>"
    return document("hetstream: no answer", body, "", refresh_s)


def in_one_sentence(seen: Observation, helped: Sequence[str]) -> str:
    """What the page and the command begin with.

    Args:
        seen: the cluster now.
        helped: labels of pending jobs that would start with data workers.
    """
    now = seen.sample
    return headline(seen.fragmentation, helped) or (
        f"{now.gpus - now.gpus_allocated:,} of {now.gpus:,} GPUs and {now.cpus - now.cpus_allocated:,} of "
        f"{now.cpus:,} CPUs are free"
    )


def _header(seen: Observation, cluster: str, helped: Sequence[str]) -> str:
    found, now = seen.fragmentation, seen.sample
    sentence = in_one_sentence(seen, helped)
    taken = datetime.fromtimestamp(seen.snapshot.taken_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    hidden = f"{seen.snapshot.hidden}: all figures are of what one user may see, and there may be more"
    hidden = f"<p>{escape(hidden)}</p>" if seen.snapshot.hidden else ""
    meaning = "<p>Stranded is what is free and no pending job can use.</p>" if now.stranded_gpus else ""
    return (
        f"<header><p>{escape(cluster)} · {escape(taken)} · Slurm {escape(seen.snapshot.version)} · "
        f"{len(found.nodes):,} nodes in use, {len(found.left_out):,} out of use</p>"
        f"<h1>{escape(sentence[0].upper() + sentence[1:])}</h1>{meaning}{hidden}</header>"
    )


def _tiles(seen: Observation) -> str:
    now = seen.sample
    groups = _grouped(now)
    of_resources = sum(groups.values()) - groups[_QUEUE] - groups[_OTHER]
    parts = (("resources", of_resources), *((name, groups[name]) for name in (_QUEUE, _OTHER)))
    shown = [
        ("GPUs free", f"{now.gpus - now.gpus_allocated:,}", f"of {now.gpus:,}, {now.stranded_gpus:,} stranded"),
        ("CPUs free", f"{now.cpus - now.cpus_allocated:,}", f"of {now.cpus:,}, {now.stranded_cpus:,} stranded"),
        (
            "Fragmentation",
            "–" if now.indicator is None else f"{now.indicator:.2f}",
            "no node has GPUs" if now.indicator is None else "0: CPUs and GPUs are free in step; 1: never together",
        ),
        ("Jobs that run", f"{now.num_running:,}", _starved(now)),
        (
            "Jobs that wait",
            f"{sum(groups.values()):,}",
            ", ".join(f"{count:,} for {name}" for name, count in parts if count),
        ),
    ]
    return tiles(shown)


def _starved(now: Sample) -> str:
    if not now.gpus_measured:
        return ""  # no job of hetstream
    return f"trainers on {now.gpus_measured:,} GPUs wait {percent(now.gpus_starved / now.gpus_measured)} for data"


def _heat_map(seen: Observation, partitions: _Partitions) -> str:
    """Cells of all nodes, by the types of their GPUs."""
    found = seen.fragmentation
    usable = {row.node: row for row in found.nodes}
    groups: dict[tuple[str, ...], list[Node]] = defaultdict(list)
    for node in sorted(seen.snapshot.nodes, key=lambda node: _natural(node.name)):
        groups[tuple(sorted(node.gpu_types))].append(node)
    num_nodes, kinds, parts = len(seen.snapshot.nodes), set(), []
    for types, nodes in sorted(groups.items(), key=lambda group: (not group[0], group)):
        cells, views = [], set()
        for node in nodes:
            kind, value, hint, level = _node_cell(node, usable.get(node.name))
            here = partitions.of(node.partitions)
            cells.append(cell(node.name, value, kind, hint, num_nodes <= MAX_LARGE_CELLS, level, partitions.mark(here)))
            kinds.add(kind)
            views |= here
        there, names = counted(nodes), ", ".join(filter(None, types)) or "GPUs"
        free = f"{there.gpus - there.gpus_held:,} of {there.gpus:,} GPUs free, " if types else ""
        free += f"{there.cpus - there.cpus_held:,} of {there.cpus:,} CPUs free"
        parts.append(
            f"<div{partitions.mark(views)}><h3>{escape(names if types else 'Without GPUs')} "
            f"<span>{len(nodes):,} node{'s' * (len(nodes) > 1)}, {free}</span></h3>"
            f'<div class="cells">{"".join(cells)}</div></div>'
        )
    note = (
        "<p>The indicator of a node is the free share of its CPUs less the free share of its GPUs. Below zero its CPUs "
        "are gone before its GPUs.</p>"
        if found.gpu_nodes
        else nothing("No node has GPUs.")
    )
    return note + "".join(parts) + legend((kind, _CLASS_NAMES[kind]) for kind in sorted(kinds))


def _node_cell(node: Node, row: NodeFragmentation | None) -> tuple[int, str, str, float]:
    """Class, value, hint and how far it is filled."""
    if row is None:
        return OUT_OF_USE, "out", f"{node.name}: {node.state} {node.reason}".strip(), 1.0
    if row.indicator is None:
        hint = f"{node.name}: {row.cpus_free} of {row.cpus} CPUs free"
        return WITHOUT_GPUS, f"{row.cpus_free} free", hint, 1 - row.cpus_free / max(1, row.cpus)
    return class_of(row.indicator), _indicator(row), _hint(row), 1.0


def _indicator(node: NodeFragmentation) -> str:
    return signed(node.indicator or 0.0).replace("-", "−")


def _hint(node: NodeFragmentation) -> str:
    return (
        f"{node.node}: {node.cpus_free} of {node.cpus} CPUs and {node.gpus_free} of {node.gpus} GPUs free, "
        f"indicator {_indicator(node)}, {count_words(node.stranded_gpus, 'GPU')} stranded"
        + (f" for want of {node.lacking}" if node.lacking else "")
    )


def _class_history(samples: Sequence[Sample]) -> str:
    note = "<p>Nodes with GPUs in each class of the indicator.</p>"
    classes: list[_Curve] = [
        (name, kind, lambda sample, kind=kind: float(sample.classes[kind]))  # type: ignore[misc]
        for kind, name in enumerate(_CLASS_NAMES[:NUM_CLASSES])
    ]
    return note + _layers_over_time(samples, classes, CLASSES, "nodes by class of the indicator")


def _utilisation(samples: Sequence[Sample]) -> str:
    lines: list[_Curve] = [
        ("GPUs held", 0, lambda sample: _share(sample.gpus_allocated, sample.gpus)),
        ("CPUs held", 1, lambda sample: _share(sample.cpus_allocated, sample.cpus)),
        ("CPU load", 3, lambda sample: None if sample.cpu_load is None else _share(sample.cpu_load, sample.cpus)),
        ("stranded", 2, lambda sample: _share(sample.stranded_gpus, sample.gpus)),
    ]
    note = (
        "<p>Shares of what is in use; <em>stranded</em>: of the GPUs, those that no pending job can use. A CPU load "
        "above 100 % is more threads than CPUs.</p>"
    )
    bins = binned(samples, MAX_POINTS)
    if len(bins) < 2:
        return _too_few(samples)
    series = _series(bins, lines)
    high = max((known or 0.0 for curve in series for _, known in curve.points), default=0.0)
    hints = _hints(bins, series, percent)
    return note + both(
        lambda width: line_chart(
            series, _time_axis(samples, width), share_axis(high), width, HEIGHT, "utilisation over time",
            hints if width == WIDE else (),
        )
    )  # fmt: skip


def _queue_history(samples: Sequence[Sample]) -> str:
    causes: list[_Curve] = [
        (name, style, lambda sample, name=name: float(_grouped(sample)[name]))  # type: ignore[misc]
        for style, name in enumerate(_GROUPS)
    ]
    note = "<p>Each by the first thing that it waits for, as <code>hetstream why</code> names it.</p>"
    return note + _layers_over_time(samples, causes, CAUSES, "pending jobs by cause over time")


def _layers_over_time(samples: Sequence[Sample], layers: Sequence[_Curve], paint: tuple[str, str], title: str) -> str:
    bins = binned(samples, MAX_POINTS)
    if len(bins) < 2:
        return _too_few(samples)
    series = [curve for curve in _series(bins, layers) if any(value for _, value in curve.points)]
    sizes = ([value or 0.0 for _, value in curve.points] for curve in series)
    high = max(map(sum, zip(*sizes, strict=True)), default=0.0)
    hints = _hints(bins, series, "{:,.0f}".format)
    return both(
        lambda width: stacked_areas(
            series, _time_axis(samples, width), count_axis(high), width, HEIGHT, title, paint,
            hints if width == WIDE else (),
        )
    ) + legend(((curve.style, curve.name) for curve in series), paint)  # fmt: skip


def _series(bins: Sequence[Sequence[Sample]], curves: Sequence[_Curve]) -> list[Series]:
    """What is known, over time."""
    found = []
    for name, style, value in curves:
        points = [(_middle(some), _mean(map(value, some))) for some in bins]
        if any(known is not None for _, known in points):
            found.append(Series(name, style, with_gaps(points)))
    return found


def _hints(bins: Sequence[Sequence[Sample]], series: Sequence[Series], show: Callable[[float], str]) -> list[Hint]:
    """The time and each value, a line each."""
    values = [dict(curve.points) for curve in series]
    hints = []
    for at in map(_middle, bins):
        lines = [
            f"{curve.name}: {show(known)}"
            for curve, points in zip(series, values, strict=True)
            if (known := points.get(at)) is not None
        ]
        hints.append((at, "\n".join([_moment(at), *lines])))
    return hints


def _delays(waiting: Sequence[WaitingJob]) -> str:
    """How many of the jobs that wait for resources have waited how long, by cause."""
    queued = [pending_job for pending_job in waiting if pending_job.job.waits_for_resources]
    if not queued:
        return nothing("No job waits for resources.")
    counts = [[0.0] * len(_GROUPS) for _ in range(len(_AGES) + 1)]
    for pending_job in queued:
        age = bisect([seconds for seconds, _ in _AGES], pending_job.waited_s)
        counts[age][_GROUPS.index(_group_of(pending_job.cause))] += pending_job.job.num_records
    edges = ["0", *(text for _, text in _AGES), "longer"]
    hints = [
        (place + 0.5, f"{edges[place]} to {edges[place + 1]}: {_listed(sizes)}") for place, sizes in enumerate(counts)
    ]
    x = Axis(0, len(counts), [(place, text) for place, (_, text) in enumerate(_AGES, 1)])
    y = count_axis(1.08 * max(map(sum, counts)))  # with room for the number at the top of a bar
    bars = [(place + 0.5, sizes) for place, sizes in enumerate(counts)]
    note = "<p>Jobs by how long they have waited for resources, since they could have started.</p>"
    there = [(kind, name) for kind, name in enumerate(_GROUPS) if any(sizes[kind] for sizes in counts)]
    return (
        note
        + both(lambda width: stacked_bars(bars, x, y, width, HEIGHT, "waits by cause", CAUSES, hints))
        + legend(there, CAUSES)
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


def _worst_nodes(seen: Observation, partitions: _Partitions) -> str:
    types = {node.name: ", ".join(filter(None, node.gpu_types)) for node in seen.snapshot.nodes}
    rows = [
        (
            node.partitions,
            (
                node.node,
                types[node.node] or "–",
                ", ".join(node.partitions),
                _indicator(node),
                f"{node.gpus_free} of {node.gpus}",
                f"{node.cpus_free} of {node.cpus}",
                node.stranded_gpus,
                node.lacking or "–",
            ),
        )
        for node in seen.fragmentation.gpu_nodes
        if node.stranded_gpus or class_of(node.indicator or 0.0) != class_of(0.0)
    ]
    head = ("Node", "GPU type", "Partitions", "Indicator", "GPUs free", "CPUs free", "Stranded GPUs", "Lacks")
    return partitions.table(head, rows, "No node has stranded GPUs, or CPUs and GPUs far out of step.")


def _longest_waits(seen: Observation, partitions: _Partitions) -> str:
    rows = [
        (
            pending_job.job.partitions,
            (
                pending_job.job.label,
                pending_job.job.user,
                _short(pending_job.job.name),
                whole_if_near(pending_job.job.gpus),
                cpus_asked(pending_job.job),
                pending_job.cause,
                _moment(seen.snapshot.taken_s - pending_job.waited_s),
                duration(pending_job.waited_s),
            ),
        )
        for pending_job in seen.waiting
        if pending_job.job.waits_for_resources
    ]
    head = ("Job", "User", "Name", "GPUs", "CPUs", "Waits for", "Since", "Waited")
    return partitions.table(head, rows, "No job waits for resources.")


def _would_gain(seen: Observation, advice: Sequence[Advice], partitions: _Partitions) -> str:
    of_job = {job.label: job.partitions for job in seen.snapshot.jobs}
    rows = [(of_job.get(finding.job, ()), _gain(finding)) for finding in advice]
    head = ("Job", "User", "State", "Basis", "GPU hours a day", "Why", "What to do")
    return partitions.table(head, rows, "")


def _gain(finding: Advice) -> tuple[object, ...]:
    hours = "–" if finding.gpu_hours_per_day is None else f"{finding.gpu_hours_per_day:,.1f}"
    return (finding.job, finding.user, finding.state, finding.basis, hours, finding.text, finding.step)


def binned(samples: Sequence[Sample], most: int) -> list[list[Sample]]:
    """Return the samples in a limited number of spans of equal length; empty spans are left out."""
    if len(samples) <= most:
        return [[sample] for sample in samples]
    start_s, end_s = samples[0].taken_s, samples[-1].taken_s
    bins: dict[int, list[Sample]] = {}
    for sample in samples:
        place = int((sample.taken_s - start_s) / (end_s - start_s) * most)
        bins.setdefault(min(place, most - 1), []).append(sample)
    return [bins[place] for place in sorted(bins)]


def _grouped(sample: Sample) -> dict[str, int]:
    """How many jobs wait for each thing."""
    found = dict.fromkeys(_GROUPS, 0)
    for cause, group in sample.waiting.items():
        found[_group_of(cause)] += group.num_jobs
    return found


def _listed(counts: Sequence[float]) -> str:
    """`GPUs: 9, CPUs: 5`, of counts of groups."""
    return ", ".join(f"{name}: {count:,.0f}" for name, count in zip(_GROUPS, counts, strict=True) if count) or "none"


@cache
def _group_of(cause: str) -> str:
    kinds = cause.split(" or ")
    if "GPUs" in kinds and "CPUs" in kinds:
        return _EITHER
    named = next((name for name in ("GPUs", "CPUs", "memory") if name in kinds), "")
    return named or (_QUEUE if cause in _OF_THE_QUEUE else _OTHER)


def _too_few(samples: Sequence[Sample]) -> str:
    return nothing(
        f"{count_words(len(samples), 'reading')} so far: a history needs two. Keep them with --history=FILE, or let "
        "hetstream exporter --history=FILE keep one every minute."
    )


def _time_axis(samples: Sequence[Sample], width: int) -> Axis:
    return time_axis(samples[0].taken_s, samples[-1].taken_s, 5 if width == WIDE else 2)


def _moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).strftime("%d %b %H:%M")


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


def serve_documents(
    host: str, port: int, documents: Callable[[], Mapping[str, Document]], token: str = ""
) -> WebServer:
    """Serve documents by their paths until the server is closed.

    Args:
        host, port, token: see `WebServer`.
        documents: path -> what is there now; asked for each request, from another thread.

    Raises:
        ServeError: the address cannot be listened on.
    """
    try:
        return WebServer(host, port, lambda path, _: documents().get(path), token)
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: OSError) -> ServeError:
    """Return the error that says what to do."""
    where = host if host.startswith(PRIVATE) else f"{host}:{port}"
    return ServeError(f"{where} cannot be listened on: {error.strerror or error}. Give another one: --listen=HOST:PORT")
