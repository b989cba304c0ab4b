"""The table of `hetstream job`: (Status) -> lines of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from hetstream.base.text import count_words, duration_words, printable, size_words
from hetstream.mpi_dataworkers.dispatcher.client import has_gpu_stage, load_of
from hetstream.mpi_dataworkers.wire.messages import DataWorkerStatus, Device, LoaderStatus, Status, Steered
from hetstream.slurm_plugin.render.tables import RED, YELLOW, Cell, Column, rate_words, sparkline, table, wrapped

# A trainer that waits for a twentieth of its time is worth a look, for half of it a remedy.
_WAITS_SOME, _WAITS_MUCH = 0.05, 0.5
_BAD_STATES = ("unreachable", "silent")
_LOADER_COLUMNS = (
    Column("", "LOADER", left=True, cuts=True),
    Column("", "HOST", left=True, priority=2),
    Column("", "EPOCH", priority=1),
    Column("", "STEP"),
    Column("", "STEPS/S"),
    Column("", "BYTES/S", priority=3),
    Column("", "WAITED"),
    Column("", "BUFFER", priority=4),
    Column("", "DATA WORKERS", priority=5),
    Column("", "LOCAL"),
)
_WORKER_COLUMNS = (
    Column("", "DATA WORKER", left=True),
    Column("", "HOST", left=True),
    Column("", "PID", priority=3),
    Column("", "STATE", left=True),
    Column("", "DEVICE", left=True),
    Column("", "WAITED"),
    Column("", "LEASES", priority=4),
    Column("", "STEPS/S"),
    Column("", "BUSY"),
    Column("", "STEPS", priority=1),
    Column("", "REVOKED", priority=5),
    Column("", "UP", priority=2),
)
_OF_STAGES = ("DEVICE", "WAITED")
_OF_WHOM: dict[Steered, str] = {"cpu": "", "gpu": " with a GPU", "embedding": " embedding server"}
# Fewer are no course.
_LEAST_LOOKS = 5


def render(
    status: Status, name: str, color: bool = False, width: int | None = None, speeds: Sequence[float] = ()
) -> list[str]:
    """Return the lines of one table.

    Args:
        status: what to show.
        name: of the service, for the head line.
        color: mark what needs attention with ANSI colours.
        width: of the terminal; None: there is room.
        speeds: steps per second that trainers took at the looks before, and at this one.
    """
    lost = f", {status.data_workers_lost} lost" if status.data_workers_lost else ""
    starts = f", start {status.incarnation}" if status.incarnation > 1 else ""
    made_s = sum(worker.steps_per_s for worker in status.data_workers)
    taken_s = sum(loader.steps_per_s for loader in status.loaders)
    bytes_s = sum(loader.bytes_per_s for loader in status.loaders)
    num_processes, num_loaders = len(status.data_workers), len(status.loaders)
    who = f"{count_words(num_processes, 'data worker process')}{lost}, {count_words(num_loaders, 'loader')}"
    how_fast = (
        f"steps/s: {rate_words(made_s)} made, {rate_words(taken_s)} taken   {size_words(bytes_s)}/s   "
        f"leases: {rate_words(status.leases_per_s)}/s, {status.leases_revoked:,} of {status.leases_granted:,} revoked"
    )
    together = f"{who}   {how_fast}"
    facts = [
        f"{printable(name)}  up {duration_words(status.uptime_s)}{starts}",
        *([together] if width is None or len(together) <= width else [who, how_fast]),
        *([f"steps/s taken until now  {sparkline(speeds)}"] if len(speeds) >= _LEAST_LOOKS else []),
        *_stage_lines(status),
        *_elastic_lines(status),
    ]
    lines = [*(part for line in facts for part in wrapped(line, width, 4)), ""]
    if status.loaders:
        lines += table(_LOADER_COLUMNS, [_loader_cells(row) for row in status.loaders], color, width)
    else:
        none = "no loader is connected: the program has not made its DataLoader yet, or loads its own data"
        lines += wrapped(none, width)
    lines.append("")
    if status.data_workers:
        staged = has_gpu_stage(status)
        columns = [column for column in _WORKER_COLUMNS if staged or column.title not in _OF_STAGES]
        rows = sorted(status.data_workers, key=lambda row: row.number)
        lines += table(columns, [_worker_cells(row, staged) for row in rows], color, width)
    else:
        lines.append("no data worker is registered: the loaders make the steps themselves")
    return lines


def _elastic_lines(status: Status) -> list[str]:
    """What the elastic controller says, and its last changes."""
    lines = [f"elastic: {status.elastic}"] if status.elastic else []
    lines += [f"elastic, stage on GPUs: {status.elastic_gpu}"] if status.elastic_gpu else []
    lines += [f"elastic, embedding servers: {status.elastic_embedding}"] if status.elastic_embedding else []
    lines += [
        f"  {duration_words(decision.ago_s)} ago: {decision.action} {decision.count}"
        f"{_OF_WHOM[decision.device]}, because {decision.reason}"
        for decision in status.decisions
    ]
    return [printable(line) for line in lines]


def _loader_cells(row: LoaderStatus) -> list[Cell]:
    number = f" loader {row.ordinal}" if row.ordinal and not row.title else ""
    of = f"/{row.num_steps:,}" if row.num_steps >= 0 else ""
    reads = row.epoch >= 0
    waits = RED if row.wait_share >= _WAITS_MUCH else YELLOW if row.wait_share >= _WAITS_SOME else ""
    return [
        (f"{row.title or row.job} rank {row.rank}/{row.world_size}{number}", ""),
        (row.host, ""),
        (str(row.epoch) if reads else "-", ""),
        (f"{row.step:,}{of}" if reads else "-", ""),
        (rate_words(row.steps_per_s), ""),
        (size_words(row.bytes_per_s), ""),
        (f"{row.wait_share:.0%}", waits if reads else ""),
        (f"{row.buffered}/{row.window}" if reads else "-", ""),
        (str(row.num_data_workers), "" if row.num_data_workers else RED),
        (f"{row.totals.local_steps:,}", YELLOW if row.totals.local_steps else ""),
    ]


def _stage_lines(status: Status) -> list[str]:
    """One line for each stage, if there is more than one."""
    loads = [load_of(device, status) for device in get_args(Device)] if has_gpu_stage(status) else []
    return [
        f"stage on {load.device.upper()}s: {count_words(len(load.workers), 'process')}, "
        f"{rate_words(load.steps_per_s)} steps/s taken, busy {load.busy_share:.0%}, "
        f"missed {load.wait_share:.0%} of the time"
        + (f", waits {load.earlier_wait_share:.0%} for the stage before" if load.device == "gpu" else "")
        for load in loads
    ]


def _worker_cells(row: DataWorkerStatus, staged: bool) -> list[Cell]:
    waited = YELLOW if row.wait_share >= _WAITS_SOME else ""
    of_stage: list[Cell] = [(row.device, ""), (f"{row.wait_share:.0%}", waited)] if staged else []
    return [
        (str(row.number), ""),
        (row.host, ""),
        (str(row.pid), ""),
        (row.state, RED if row.state in _BAD_STATES else YELLOW if row.state == "draining" else ""),
        *of_stage,
        (str(row.leases), ""),
        (rate_words(row.steps_per_s), ""),
        (f"{row.busy_share:.0%}", ""),
        (f"{row.steps:,}", ""),
        (str(row.leases_revoked), YELLOW if row.leases_revoked else ""),
        (duration_words(row.up_s), ""),
    ]
