"""What the site daemon is told of a node's GPUs: the coordinator's tables of the last seconds -> a report. Pure.

Nothing by which the packer decides is a job's word about itself alone: how much a GPU is used says its driver, or,
where nobody counts, the guaranteed job, which by a lie keeps others off its own GPU or lets them onto it. How jobs fare
is their own word, and for people.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from hetstream.base.errors import UsageError
from hetstream.hetjob.gpu.devices.emulated_file import resolved
from hetstream.hetjob.gpu.orders import JobClass, Verdict
from hetstream.hetjob.site.gpus import MAX_GPUS, MAX_SHARING, GpuNow, JobNow, ReportGpus, SharingNow
from hetstream.slurm_plugin.coordinator.memory import left_bytes
from hetstream.slurm_plugin.coordinator.table import GpuRow, GpuTable, ProcessRow

# Where no driver counts, the share in use is told over so many tables, one a second.
_WINDOW = 10
# A guaranteed job whose agent is silent for longer may be anywhere.
_SILENT_S = 30.0
_MOST_TEXT = 200
_MOST_DIGITS = 4
_PAUSE = Verdict.PAUSE.name.lower()


class GpuWatch:
    """Follows the tables of one node.

    Args:
        node: by Slurm's name.
        numbers: of its GPUs, by the names that the coordinator has for them. Others are not told.
    """

    def __init__(self, node: str, numbers: Mapping[str, int]) -> None:
        self._node = node
        self._numbers = dict(numbers)
        self._used: dict[str, deque[float]] = {}
        self._paused: dict[tuple[str, str], tuple[float, int]] = {}  # since when, and the mini-batches made by then

    def see(self, table: GpuTable) -> None:
        """Take a table, once a second."""
        paused: dict[tuple[str, str], tuple[float, int]] = {}
        for row in table.gpus:
            self._used.setdefault(row.gpu, deque(maxlen=_WINDOW)).append(_used_share(row))
            for job, processes in _sharing(row).items():
                made = sum(process.num_batches for process in processes)
                key = row.gpu, job
                if all(process.verdict == _PAUSE for process in processes):
                    since_s, before = self._paused.get(key, (table.taken_s, made))
                    paused[key] = (since_s, before) if made <= before else (table.taken_s, made)
        self._paused = paused

    def report(self, table: GpuTable) -> ReportGpus:
        """What is told after `see` of the same table."""
        rows = [row for row in table.gpus if row.gpu in self._numbers]
        return ReportGpus(self._node, tuple(self._gpu(row, table.taken_s) for row in rows[:MAX_GPUS]))

    def _gpu(self, row: GpuRow, now_s: float) -> GpuNow:
        guaranteed = _guaranteed(row)
        peak_bytes = sum(max(job.held_bytes, job.peak_bytes - job.host_bytes) for job in guaranteed)
        left = left_bytes(row.capacity_bytes, peak_bytes) if row.is_reserved else row.capacity_bytes
        free_bytes = max(0, left - (row.agentless_bytes or 0))
        used = self._used[row.gpu]
        sharing = [
            SharingNow(job, self._paused_s(row.gpu, job, now_s), _complaint(processes))
            for job, processes in _sharing(row).items()
        ]
        sharing.sort(key=lambda job: not job.complaint)  # those are told also where there are too many
        used_share = sum(used) / len(used) if row.utilisation is None else row.utilisation
        jobs = tuple(dict.fromkeys(process.job for process in guaranteed))
        return GpuNow(
            self._numbers[row.gpu], row.gpu, min(1.0, max(0.0, used_share)), free_bytes, row.is_reserved,
            jobs[:MAX_SHARING], _closed(row, guaranteed), tuple(sharing[:MAX_SHARING]),
            row.capacity_bytes, row.idle_share if row.is_reserved else None, _fares(row),
        )  # fmt: skip

    def _paused_s(self, gpu: str, job: str, now_s: float) -> float:
        since = self._paused.get((gpu, job))
        return max(0.0, now_s - since[0]) if since else 0.0


def parse_numbers(text: str) -> dict[str, int]:
    """GPUs' numbers by their names, from `0=GPU-1a2b 1=GPU-3c4d`.

    Raises:
        UsageError: a word has another form, or a number or name comes twice.
    """
    found: dict[str, int] = {}
    for word in text.split():
        number, _, name = word.partition("=")
        if not (number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS and name):
            raise UsageError(f"GPU {word!r}: must be NUMBER=NAME, as in 0=GPU-1a2b")
        name = resolved(name)
        if name in found or int(number) in found.values():
            raise UsageError(f"GPU {word!r}: its number or its name stands there twice")
        found[name] = int(number)
    return found


def _used_share(row: GpuRow) -> float:
    """The share of the last seconds in which a guaranteed job had something on a GPU, by its mini-batches."""
    return 1.0 - (row.idle_share or 0.0) if row.is_reserved else 0.0


def _guaranteed(row: GpuRow) -> list[ProcessRow]:
    return [process for process in row.processes if process.job_class == JobClass.GUARANTEED.value]


def _sharing(row: GpuRow) -> dict[str, list[ProcessRow]]:
    """The processes of opportunistic jobs, by job."""
    found: dict[str, list[ProcessRow]] = {}
    for process in row.processes:
        if process.job_class != JobClass.GUARANTEED.value:
            found.setdefault(process.job, []).append(process)
    return found


def _fares(row: GpuRow) -> tuple[JobNow, ...]:
    """How each job fares: its memory is that of all its processes, its pace that of the slowest."""
    found: dict[str, list[ProcessRow]] = {}
    for process in row.processes:
        found.setdefault(process.job, []).append(process)
    fares = []
    for job, processes in list(found.items())[:MAX_SHARING]:
        slowest = max(processes, key=lambda process: process.batch_s or 0.0)
        fares.append(
            JobNow(
                job, slowest.uid, slowest.job_class == JobClass.GUARANTEED.value,
                sum(process.held_bytes for process in processes), sum(process.host_bytes for process in processes),
                max(0.0, slowest.batch_s or 0.0), max(0.0, slowest.alone_s or 0.0),
            )
        )  # fmt: skip
    return tuple(fares)


def _closed(row: GpuRow, guaranteed: Sequence[ProcessRow]) -> str:
    """Why an opportunistic job could do nothing there; empty if it could."""
    if row.is_lost:
        return "that answer no more"
    if not row.is_reserved:
        return ""
    if not guaranteed:
        return "of guaranteed jobs without an agent"
    if any(process.said_ago_s is None or process.said_ago_s > _SILENT_S for process in guaranteed):
        return "of guaranteed jobs that say nothing"
    return "" if row.idle_share is not None else "of guaranteed jobs that have made no mini-batch yet"


def _complaint(processes: Sequence[ProcessRow]) -> str:
    return next((process.reason[:_MOST_TEXT] for process in processes if process.is_disobedient), "")
