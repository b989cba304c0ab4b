"""`hetstream util`: how much of the cluster was allocated, and how much of that did something."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from hetstream.base.errors import UsageError
from hetstream.base.text import count_words, duration, percent
from hetstream.slurm_plugin.cli.cluster_source import add_fresh_argument, add_prices_argument, prices_of, read_cluster
from hetstream.slurm_plugin.cli.output import (
    EXIT_CODES,
    accounting_notes,
    add_output_arguments,
    chosen_partitions,
    emit,
    meta_of,
)
from hetstream.slurm_plugin.client.accounting import Usage, has_accounting
from hetstream.slurm_plugin.client.counted import counted
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.read import without_types
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.insight.last_reading import SOURCE
from hetstream.slurm_plugin.insight.prices import Prices
from hetstream.slurm_plugin.insight.utilisation import (
    BY,
    Utilisation,
    Window,
    capacity,
    share,
    together,
    utilisation,
    wait_shares,
    with_shared_cpus,
)
from hetstream.slurm_plugin.render.tables import Column, Report, Section

EPILOG = f"""\
Times are written as for sacct: 2026-11-20T16:00:00, now, now-1day, now-8hours, now-30minutes. HOURS are those that jobs
held within the window: GPUs from a job's start to its end, CPUs but for the time in which it was suspended. OF GPUS and
OF CPUS compare them with what counts now, as if that had been there all the time: the nodes on which jobs can start,
and on drained, reserved and other ones what jobs hold there. EFFECTIVE is the share of the held hours that was used:
CPU time, and GPU use where Slurm gathers it. For running jobs of hetstream it is the share in which trainers did not
wait for data. MEASURED is the share of the held hours for which somebody measured that. With slurmdbd the figures come
from sacct. Without slurmdbd, slurmctld knows running jobs and those that ended in the last MinJobAge seconds: for a
longer window the figures are too small, and a note says so.

examples:
  hetstream util
  hetstream util --start now-7days --by account
  hetstream util --by user -p gpu --csv

{EXIT_CODES}"""
DEFAULT_START = "now-1day"


def add_util_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Show allocated and effective utilisation of CPUs and GPUs over a window of time."
    parser.epilog = EPILOG
    parser.add_argument(
        "-S", "--start", metavar="TIME", default=DEFAULT_START, help="begin of the window (default %(default)s)"
    )
    parser.add_argument("-E", "--end", metavar="TIME", default="now", help="end of the window (default %(default)s)")
    parser.add_argument("--by", choices=tuple(BY), default="partition", help="one line for each (default %(default)s)")
    parser.add_argument("-p", "--partition", metavar="NAMES", help="only these partitions")
    add_prices_argument(parser)
    add_fresh_argument(parser)
    add_output_arguments(parser, csv=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the cluster and print."""
    prices = prices_of(args)
    slurm = CommandSlurm()
    snapshot = read_cluster(args)
    if snapshot.source == SOURCE and not has_accounting(snapshot):
        snapshot = slurm.snapshot()  # the jobs that slurmctld remembers are asked for now: nodes must be of now, too
    window = window_of(args, snapshot)
    partitions = chosen_partitions(args, snapshot)
    usages = with_wait_shares(slurm.usages(snapshot, window.start_s, window.end_s), wait_shares(snapshot.jobs))
    chosen = [usage for usage in usages if partitions is None or usage.partition in partitions]
    report = report_of(chosen, window, args.by, snapshot, sorted(partitions) if partitions else None, prices)
    emit(args, replace(report, notes=(*accounting_notes(usages, snapshot), *report.notes)))
    return 0


def window_of(args: argparse.Namespace, snapshot: Snapshot) -> Window:
    """Return the window that the arguments ask for; its end is never in the future.

    Raises:
        UsageError: a time of another form, or an empty window.
    """
    start_s = parse_time("--start", args.start, snapshot.taken_s)
    end_s = min(parse_time("--end", args.end, snapshot.taken_s), snapshot.taken_s)
    if start_s >= end_s:
        raise UsageError(f"--start={args.start} --end={args.end}: the window must begin before it ends, and before now")
    return Window(start_s, end_s)


def parse_time(option: str, text: str, now_s: float) -> float:
    """Return seconds since the epoch of a time as sacct takes it.

    Raises:
        UsageError: another form.
    """
    match = re.fullmatch(r"now(?:-(\d+)(second|minute|hour|day|week)s?)?", text)
    if match:
        unit_s = {None: 0, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 7 * 86400}[match[2]]
        return now_s - int(match[1] or 0) * unit_s
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as exc:
        raise UsageError(f"{option}={text}: must be 2026-11-20T16:00:00, 2026-11-20, now or now-8hours") from exc


def with_wait_shares(usages: tuple[Usage, ...], shares: dict[str, float]) -> list[Usage]:
    """Return the runs; those that go on with the share of time that trainers wait. Components have other numbers in
    sacct.
    """
    return [replace(usage, wait_share=None if usage.end_s else shares.get(usage.job)) for usage in usages]


def report_of(
    usages: list[Usage],
    window: Window,
    by: str,
    snapshot: Snapshot,
    partitions: list[str] | None,
    prices: Prices | None = None,
) -> Report:
    """Put the sums into words and a table."""
    nodes = [node for node in snapshot.nodes if partitions is None or set(partitions) & set(node.partitions)]
    sharing = {part.name: capacity(nodes, part.name)[0] for part in snapshot.partitions if part.jobs_per_cpu > 1}
    usages = with_shared_cpus(usages, window, sharing)
    rows = []
    for name, group in utilisation(usages, window, by).items():
        cpus, gpus = capacity(nodes, name if by == "partition" else None)
        rows.append({by: name, **_row(group, window, cpus, gpus, prices)})
    whole = _row(together(usages, window), window, *capacity(nodes), prices)
    lines = [
        f"{_time(window.start_s)} to {_time(window.end_s)} ({duration(window.length_s)}), "
        f"{count_words(whole['num_jobs'], 'job')}",
        f"allocated: {_percent(whole['gpu_allocated_share'])} of the GPUs, {_percent(whole['cpu_allocated_share'])} of "
        f"the CPUs",
        f"effective: {_percent(whole['gpu_effective_share'])} of the allocated GPUs (measured: "
        f"{_percent(whole['gpu_measured_share'])} of them), {_percent(whole['cpu_effective_share'])} of the allocated "
        f"CPUs (measured: {_percent(whole['cpu_measured_share'])})",
    ]
    if prices:
        waited = whole["cost_waited"]
        of_that = "" if waited is None else f", of that {prices.shown(waited)} for GPUs whose trainers waited for data"
        lines.append(f"cost:      {prices.shown(whole['cost'])} for what jobs held{of_that}")
    loads = [node.cpu_load for node in nodes if node.cpu_load is not None and counted([node]).cpus]
    if loads:
        cpus = counted(node for node in nodes if node.cpu_load is not None).cpus
        lines.append(f"load now:  {sum(loads):,.1f} threads want one of {cpus:,} CPUs, whoever started them")
    columns = (Column(by, by.upper(), left=True), *_COLUMNS, *(_COST_COLUMNS if prices else ()))
    section = Section("groups", columns, rows, empty="no job ran in this window, as far as this user can see")
    summary = {
        "start_s": round(window.start_s),
        "end_s": round(window.end_s),
        "by": by,
        "cpu_load_now": round(sum(loads), 2) if loads else None,
        "prices": asdict(prices) if prices else None,
        **whole,
    }
    notes = [*without_types(whole["num_gpu_types_unknown"]), *_notes(window, snapshot, whole)]
    if not sharing.keys().isdisjoint(usage.partition for usage in usages):
        notes.append(
            f"jobs in {', '.join(sorted(sharing))} may be given the same CPUs (OverSubscribe): together they count "
            "with no more than there are"
        )
    return Report(meta_of("util", snapshot), summary, lines, (section,), notes)


def _row(usage: Utilisation, window: Window, cpus: int, gpus: float, prices: Prices | None) -> dict[str, Any]:
    hours = window.length_s / 3600
    row = {
        "num_jobs": usage.num_jobs,
        "num_resized": usage.num_resized,
        "num_gpus_unknown": usage.num_gpus_unknown,
        "num_gpu_types_unknown": usage.num_gpu_types_unknown,
        "gpu_hours": usage.gpu_hours,
        "gpu_allocated_share": share(usage.gpu_hours, gpus * hours),
        "gpu_effective_share": share(usage.gpu_hours_used, usage.gpu_hours_measured),
        "gpu_measured_share": share(usage.gpu_hours_measured, usage.gpu_hours),
        "gpu_hours_waited": usage.wait_gpu_hours if usage.waits_known else None,
        "cpu_hours": usage.cpu_hours,
        "cpu_allocated_share": share(usage.cpu_hours, cpus * hours),
        "cpu_effective_share": share(usage.cpu_hours_used, usage.cpu_hours_measured),
        "cpu_measured_share": share(usage.cpu_hours_measured, usage.cpu_hours),
        "cost": prices.of(usage.gpu_hours, usage.cpu_hours) if prices else None,
        "cost_waited": prices.of(usage.wait_gpu_hours, 0.0) if prices and usage.waits_known else None,
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def _notes(window: Window, snapshot: Snapshot, whole: Mapping[str, Any]) -> list[str]:
    if has_accounting(snapshot):
        return []
    remembered = re.match(r"\d+", snapshot.config.get("MinJobAge", ""))
    age_s = float(remembered[0]) if remembered else 300.0
    notes = ["there is no slurmdbd: CPU and GPU use is known of hetstream's own running jobs alone"]
    if num_resized := whole["num_resized"]:
        notes.append(
            f"there is no slurmdbd: {count_words(num_resized, 'job')} began with another size; the last one counts "
            "for the whole time"
        )
    if num_gpus_unknown := whole["num_gpus_unknown"]:
        notes.append(
            f"of {count_words(num_gpus_unknown, 'ended job')} with whole nodes nothing says how many GPUs they held: "
            "they count as they asked, and the allocated GPUs are less than the truth"
        )
    if window.length_s > age_s:
        notes.append(
            f"there is no slurmdbd: jobs that ended more than {age_s:.0f} s ago (MinJobAge) are not known, so the "
            "allocated figures are less than the truth"
        )
    return notes


def _time(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s).strftime("%Y-%m-%dT%H:%M:%S")


def _percent(value: Any) -> str:
    return "-" if value is None else percent(value)


def _hours(value: float) -> str:
    return f"{value:,.1f}"


_COLUMNS = (
    Column("num_jobs", "JOBS"),
    Column("gpu_hours", "GPU HOURS", _hours, priority=1),
    Column("gpu_allocated_share", "OF GPUS", percent),
    Column("gpu_effective_share", "EFFECTIVE", percent),
    Column("gpu_measured_share", "MEASURED", percent, priority=2),
    Column("gpu_hours_waited", "WAITED HOURS", _hours, priority=4),
    Column("cpu_hours", "CPU HOURS", _hours, priority=1),
    Column("cpu_allocated_share", "OF CPUS", percent),
    Column("cpu_effective_share", "EFFECTIVE", percent),
    Column("cpu_measured_share", "MEASURED", percent, priority=3),
)
_COST_COLUMNS = (
    Column("cost", "COST", lambda cost: f"{cost:,.2f}"),
    Column("cost_waited", "WAITED", lambda cost: f"{cost:,.2f}"),
)
