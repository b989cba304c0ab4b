"""The table of `hetstream gpu top`: (GpuTable) -> lines of text. Pure."""

from __future__ import annotations

from hetstream.base.text import count_words, printable, size_words, user_name
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.coordinator.table import GpuRow, GpuTable, ProcessRow
from hetstream.slurm_plugin.render.tables import RED, YELLOW, Cell, Column, table, wrapped

# What a guaranteed job should not lose, and what it may not.
_SLOWER_SOME, _SLOWER_MUCH = 1.02, 1.05
_BOUND = JobClass.OPPORTUNISTIC.value
_COLUMNS = (
    Column("", "GPU", left=True),
    Column("", "JOB", left=True),
    Column("", "CLASS", left=True, priority=1),
    Column("", "USER", left=True),
    Column("", "PID", priority=2),
    Column("", "NOW", left=True),
    Column("", "LIMIT", priority=3),
    Column("", "HELD"),
    Column("", "ON HOST", priority=4),
    Column("", "BUSY TIME", priority=5),
    Column("", "BATCH", priority=6),
    Column("", "ALONE", priority=7),
    Column("", "RATIO"),
)


def render(seen: GpuTable, color: bool = False, width: int | None = None) -> list[str]:
    """Return the lines of one table.

    Args:
        seen: what to show.
        color: mark what needs attention with ANSI colours.
        width: of the terminal; None: there is room.
    """
    lines = [f"{printable(seen.host)}  {count_words(len(seen.gpus), 'GPU')} shared"]
    for row in seen.gpus:
        lines += wrapped(f"{printable(row.gpu)}  {_gpu_words(row)}", width, 4)
    rows = [(row, process) for row in seen.gpus for process in row.processes]
    if not rows:
        return [*lines, "", "no process of yours is on them"]
    lines += ["", *table(_COLUMNS, [_cells(row, process) for row, process in rows], color, width)]
    bound = [process for _, process in rows if process.job_class == _BOUND]
    said = [printable(f"{process.job} ({process.pid}): {process.reason}") for process in bound]
    lines += ["", *(part for line in said for part in wrapped(line, width))] if bound else []
    return lines


def _gpu_words(row: GpuRow) -> str:
    if row.is_lost:
        return "it does not answer any more"
    facts = [f"{size_words(row.free_bytes)} of {size_words(row.capacity_bytes)} free", row.reason]
    if row.agentless_bytes:
        facts.append(f"{size_words(row.agentless_bytes)} held without an agent")
    if row.utilisation is not None:
        facts.append(f"{row.utilisation:.0%} in use over ten seconds")
    if row.idle_share is not None:
        facts.append(f"the guaranteed job leaves it idle {row.idle_share:.0%} of the time")
    return printable("; ".join(facts))


def _cells(row: GpuRow, process: ProcessRow) -> list[Cell]:
    ratio = process.batch_s / process.alone_s if process.batch_s and process.alone_s else None
    is_bound = process.job_class == _BOUND
    slow = "" if is_bound or not ratio else RED if ratio > _SLOWER_MUCH else YELLOW if ratio > _SLOWER_SOME else ""
    return [
        (row.gpu, ""),
        (process.job, ""),
        (process.job_class, ""),
        (user_name(process.uid), ""),
        (str(process.pid), ""),
        ("disobeys" if process.is_disobedient else process.verdict, RED if process.is_disobedient else ""),
        ("-" if process.limit_bytes is None else size_words(process.limit_bytes), ""),
        (size_words(process.held_bytes), ""),
        (size_words(process.host_bytes), YELLOW if process.host_bytes else ""),
        (f"{process.share:.0%}" if is_bound else "-", ""),
        (_time_words(process.batch_s), ""),
        (_time_words(process.alone_s), ""),
        (f"{ratio:.2f}" if ratio else "-", slow),
    ]


def _time_words(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
