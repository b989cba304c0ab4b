"""The table of `hetstream top`: (Status) -> lines of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from mpi_dataworkers.messages import DataWorkerStatus, LoaderStatus, Status

_RED, _YELLOW, _BOLD, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[1m", "\x1b[0m"
# A trainer that waits for a twentieth of its time is worth a look, for half of it a remedy.
_WAITS_SOME, _WAITS_MUCH = 0.05, 0.5
_BAD_STATES = ("unreachable", "silent")
_LEFT = ("LOADER", "DATA WORKER", "HOST", "STATE")


def render(status: Status, name: str, color: bool = False) -> list[str]:
    """The lines of one table.

    Args:
        status: what to show.
        name: of the service, for the head line.
        color: mark what needs attention with ANSI colours.
    """
    lost = f", {status.data_workers_lost} lost" if status.data_workers_lost else ""
    starts = f", start {status.incarnation}" if status.incarnation > 1 else ""
    made_s = sum(worker.steps_per_s for worker in status.data_workers)
    taken_s = sum(loader.steps_per_s for loader in status.loaders)
    bytes_s = sum(loader.bytes_per_s for loader in status.loaders)
    lines = [
        f"{name}  up {_duration(status.uptime_s)}{starts}",
        f"{len(status.data_workers)} data worker process(es){lost}, {len(status.loaders)} loader(s)   "
        f"steps/s: {_rate(made_s)} made, {_rate(taken_s)} taken   {_size(bytes_s)}/s   "
        f"leases: {_rate(status.leases_per_s)}/s, {status.leases_revoked:,} of {status.leases_granted:,} revoked",
        "",
    ]
    if status.loaders:
        head = ["LOADER", "HOST", "EPOCH", "STEP", "STEPS/S", "BYTES/S", "WAITED", "BUFFER", "DATA WORKERS", "LOCAL"]
        lines += _table(head, [_loader_cells(row) for row in status.loaders], color)
    else:
        lines.append("no loader is connected: the program has not made its DataLoader yet, or loads its own data")
    lines.append("")
    if status.data_workers:
        head = ["DATA WORKER", "HOST", "PID", "STATE", "LEASES", "STEPS/S", "BUSY", "STEPS", "REVOKED", "UP"]
        rows = sorted(status.data_workers, key=lambda row: row.number)
        lines += _table(head, [_worker_cells(row) for row in rows], color)
    else:
        lines.append("no data worker is registered: the loaders make the steps themselves")
    return lines


_Cell = tuple[str, str]  # text and colour


def _loader_cells(row: LoaderStatus) -> list[_Cell]:
    number = f" loader {row.ordinal}" if row.ordinal else ""
    of = f"/{row.num_steps:,}" if row.num_steps >= 0 else ""
    reads = row.epoch >= 0
    waits = _RED if row.wait_share >= _WAITS_MUCH else _YELLOW if row.wait_share >= _WAITS_SOME else ""
    return [
        (f"{row.job} rank {row.rank}/{row.world_size}{number}", ""),
        (row.host, ""),
        (str(row.epoch) if reads else "-", ""),
        (f"{row.step:,}{of}" if reads else "-", ""),
        (_rate(row.steps_per_s), ""),
        (_size(row.bytes_per_s), ""),
        (f"{row.wait_share:.0%}", waits if reads else ""),
        (f"{row.buffered}/{row.window}" if reads else "-", ""),
        (str(row.num_data_workers), "" if row.num_data_workers else _RED),
        (f"{row.totals.local_steps:,}", _YELLOW if row.totals.local_steps else ""),
    ]


def _worker_cells(row: DataWorkerStatus) -> list[_Cell]:
    return [
        (str(row.number), ""),
        (row.host, ""),
        (str(row.pid), ""),
        (row.state, _RED if row.state in _BAD_STATES else _YELLOW if row.state == "draining" else ""),
        (str(row.leases), ""),
        (_rate(row.steps_per_s), ""),
        (f"{row.busy_share:.0%}", ""),
        (f"{row.steps:,}", ""),
        (str(row.leases_revoked), _YELLOW if row.leases_revoked else ""),
        (_duration(row.up_s), ""),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[_Cell]], color: bool) -> list[str]:
    """Columns as wide as their widest cell; words to the left, numbers to the right."""
    widths = [max(len(title), *(len(row[place][0]) for row in rows)) for place, title in enumerate(head)]

    def line(cells: Sequence[_Cell]) -> str:
        texts = []
        for title, width, (text, mark) in zip(head, widths, cells, strict=True):
            padded = text.ljust(width) if title in _LEFT else text.rjust(width)
            texts.append(f"{mark}{padded}{_PLAIN}" if color and mark else padded)
        return "  ".join(texts).rstrip()

    return [line([(title, _BOLD) for title in head]), *(line(row) for row in rows)]


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
