"""Who is on a node's GPUs, and how they fare: what the coordinator shows to people and to other programs. Pure.

Made from what `decide` saw and said; `hetstream gpu top`, the exporter of a node and the packer read it. A field is
never given another meaning: another version says so, and a reader refuses it.
"""

from __future__ import annotations

import fcntl
import os
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hetstream.base.errors import HetstreamError, UsageError
from hetstream.base.typed_json import decode, encode
from hetstream.hetjob.errors import GpuJobRefused
from hetstream.hetjob.gpu.emulated_file import resolved
from hetstream.hetjob.gpu.handshake import ask
from hetstream.hetjob.gpu.orders import FULL_SHARE, NO_LIMIT, VERSION, GpuUse, JobClass
from hetstream.hetjob.site.messages import MAX_GPUS, MAX_SHARING, GpuNow, ReportGpus, SharingJobNow, SharingNow
from hetstream.slurm_plugin.coordinator.admission import Agentless
from hetstream.slurm_plugin.coordinator.decide import (
    GpuState,
    Measurements,
    OrderDecision,
    SharingJob,
    believed,
    left_bytes,
)
from hetstream.slurm_plugin.coordinator.gpus import Gpu

TABLE_VERSION = 1
# Latest mini-batches whose mean is shown as the time of one.
_RECENT = 8
_NS_PER_S = 1e9


class ProcessRow(msgspec.Struct, frozen=True):
    """One process on a GPU.

    Attributes:
        job: that it belongs to.
        job_class: `guaranteed` or `opportunistic`.
        uid, pid: whose it is, and which.
        verdict: `run`, `finish` (its mini-batch) or `pause`.
        reason: why.
        share: of the guaranteed job's busy time that it may use, 0 to 1.
        limit_bytes: memory of the GPU that it may hold; None: all that there is.
        held_bytes: memory of the GPU that it holds.
        peak_bytes: most that its last mini-batch had in use, on the GPU and on the host together.
        host_bytes: most of that on the host.
        host_capacity_bytes: memory of the host that may stand in.
        num_batches: mini-batches that it has made.
        batch_s: how long one takes now; None: not known.
        alone_s: how long one takes when nobody else is on the GPU; of an opportunistic job the shortest; None: not
            known.
        paused_s: how long it has been held up in all.
        said_ago_s: how old its last word is; None: it has said nothing that can be.
        is_disobedient: it does not keep to its orders.
        rank: among the processes of its launch on this node; None: it is the only one, as far as it knows.
    """

    job: str
    job_class: str
    uid: int
    pid: int
    verdict: str
    reason: str
    share: float
    limit_bytes: int | None
    held_bytes: int
    peak_bytes: int
    host_bytes: int
    host_capacity_bytes: int
    num_batches: int
    batch_s: float | None
    alone_s: float | None
    paused_s: float
    said_ago_s: float | None
    is_disobedient: bool
    rank: int | None = None


class GpuRow(msgspec.Struct, frozen=True):
    """One GPU.

    Attributes:
        gpu: what jobs call it.
        capacity_bytes: memory that its jobs may hold together.
        phase: `vacant`, `measuring` or `sharing`: what goes on between a guaranteed job and others.
        reason: why.
        is_reserved: a guaranteed job has it, with or without an agent.
        idle_share: of the guaranteed job's mini-batches of late, in which it had nothing on the GPU, 0 to 1; None: no
            mini-batch was seen.
        free_bytes: what is left of its memory: by the peaks of the jobs with agents, not by what they hold at this
            moment, and by what others hold.
        used_bytes: of its memory by its own count, by whomever; None: nobody counts.
        utilisation: share of the last ten seconds in which anything ran on it, 0 to 1; None: nobody counts.
        is_lost: it answers no more.
        processes: on it, in the order in which they came, and opportunistic ones that are to be taken away for want of
            an agent; a user who may see his own alone has those.
        agentless_bytes: of its memory that processes without an agent hold, whoever they are; None: nobody counts.
    """

    gpu: str
    capacity_bytes: int
    phase: str
    reason: str
    is_reserved: bool
    idle_share: float | None
    free_bytes: int
    used_bytes: int | None
    utilisation: float | None
    is_lost: bool
    processes: tuple[ProcessRow, ...]
    agentless_bytes: int | None = None


class GpuTable(msgspec.Struct, frozen=True):
    """The GPUs of a node.

    Attributes:
        version: of this form.
        host: name of the node.
        taken_s: when, in seconds since 1970.
        gpus: that are shared there.
    """

    version: int
    host: str
    taken_s: float
    gpus: tuple[GpuRow, ...]


@dataclass(frozen=True)
class Who:
    """Behind a name among a GPU's jobs."""

    job: str
    uid: int
    pid: int
    rank: int | None = None


def gpu_row(
    gpu: Gpu,
    state: GpuState,
    seen: Measurements,
    decisions: Mapping[str, OrderDecision],
    who: Mapping[str, Who],
    agentless: Collection[Agentless] | None,
    now_ns: int,
) -> GpuRow:
    """Return the row of one GPU.

    Args:
        gpu: it.
        state, decisions: what `decide` returned last.
        seen: what it had seen.
        who: is behind each name that `seen` has.
        agentless: processes that hold memory without an agent; None: nobody counts.
        now_ns: the time.
    """
    jobs = [believed(job, now_ns) for job in seen.jobs]
    recent = state.pacing.history.recent[-_RECENT:]
    reading = gpu.reading()
    total_ns = sum(batch.duration_ns for batch in recent)
    needed_bytes = sum(_peak_bytes(job) for job in jobs) + seen.agentless_bytes
    return GpuRow(
        gpu=gpu.name,
        capacity_bytes=seen.capacity_bytes,
        phase=state.pacing.phase.name.lower(),
        reason=state.pacing.reason,
        is_reserved=seen.is_reserved or seen.guaranteed is not None,
        idle_share=min(1.0, sum(batch.gap_ns for batch in recent) / total_ns) if total_ns else None,
        free_bytes=max(0, seen.capacity_bytes - needed_bytes),
        used_bytes=reading.used_bytes,
        utilisation=reading.utilisation,
        is_lost=reading.is_lost,
        processes=tuple(
            _process_row(job, who[job.name], decisions[job.name], state, now_ns)
            for job in jobs
            if job.name in decisions and job.name in who
        )
        + tuple(filter(None, (_agentless_row(process, now_ns) for process in agentless or ()))),
        agentless_bytes=None if agentless is None else seen.agentless_bytes,
    )


def of_user(rows: Sequence[GpuRow], uid: int) -> tuple[GpuRow, ...]:
    """Return what one user may see: of the processes his own. How busy a GPU is, whoever runs on it can tell by
    himself.
    """
    return tuple(
        msgspec.structs.replace(row, processes=tuple(process for process in row.processes if process.uid == uid))
        for row in rows
    )


def read_table(text: bytes) -> GpuTable:
    """Return a table in the form in which it is sent.

    Raises:
        HetstreamError: it is of another version, or no table.
    """
    try:
        version = decode(text, _Version).version
        if version != TABLE_VERSION:
            raise HetstreamError(
                f"the coordinator's table of GPUs has version {version}, and this hetstream reads {TABLE_VERSION}. Use "
                "the hetstream that the cluster has"
            )
        return decode(text, GpuTable)
    except msgspec.MsgspecError as error:
        raise HetstreamError(f"what the coordinator of GPUs sent is no table: {error}") from error


class _Version(msgspec.Struct, frozen=True):
    version: int


def _peak_bytes(job: SharingJob) -> int:
    on_gpu_bytes = job.statistics.peak_bytes - job.statistics.host_bytes if job.statistics else 0
    return max(job.held_bytes, on_gpu_bytes)


def _agentless_row(process: Agentless, now_ns: int) -> ProcessRow | None:
    """Of a process that should wait, and nobody can tell it so; None of all that are let alone."""
    complaint = process.complaint(now_ns)
    if process.holder is None or not complaint:
        return None
    return ProcessRow(
        job=process.holder.job, job_class=process.holder.job_class.value, uid=process.holder.uid, pid=process.pid,
        verdict=GpuUse.PAUSE.name.lower(), reason=complaint,
        share=0.0, limit_bytes=0, held_bytes=process.held_bytes, peak_bytes=0, host_bytes=0, host_capacity_bytes=0,
        num_batches=0, batch_s=None, alone_s=None, paused_s=0.0, said_ago_s=None,
        is_disobedient=True,
    )  # fmt: skip


def _process_row(job: SharingJob, who: Who, decision: OrderDecision, state: GpuState, now_ns: int) -> ProcessRow:
    order, record = decision.order, job.statistics
    batch_ns = float(record.mini_batch_ns) if record and record.mini_batch_ns else None
    alone_ns: float | None = state.alone_ns.get(job.name)
    if job.name == state.pacing.guaranteed:
        recent = state.pacing.history.recent[-_RECENT:]
        batch_ns = statistics.fmean(batch.duration_ns for batch in recent) if recent else batch_ns
        alone_ns = state.pacing.alone.mean_ns if state.pacing.alone else None
    return ProcessRow(
        job=who.job,
        job_class=job.job_class.value,
        uid=who.uid,
        pid=who.pid,
        verdict=(GpuUse.FINISH if order.meet_at and order.verdict else GpuUse(order.verdict)).name.lower(),
        reason=decision.reason,
        share=order.share / FULL_SHARE,
        limit_bytes=None if order.limit_bytes >= NO_LIMIT else order.limit_bytes,
        held_bytes=job.held_bytes,
        peak_bytes=record.peak_bytes if record else 0,
        host_bytes=record.host_bytes if record else 0,
        host_capacity_bytes=record.host_capacity_bytes if record else 0,
        num_batches=record.boundaries if record else 0,
        batch_s=_seconds(batch_ns),
        alone_s=_seconds(alone_ns),
        paused_s=(record.paused_ns if record else 0) / _NS_PER_S,
        said_ago_s=max(0, now_ns - record.updated_ns) / _NS_PER_S if record else None,
        is_disobedient=decision.is_disobedient,
        rank=who.rank,
    )


def _seconds(duration_ns: float | None) -> float | None:
    return None if duration_ns is None else duration_ns / _NS_PER_S


# How other programs of the node ask the coordinator who is on its GPUs: one message, and the table comes as a file.
#
# Root and the coordinator's own user see all processes, everybody else his own. The table is a sealed memory file, so
# that its size does not matter to a coordinator that waits for nobody.

_MOST_BYTES = 2**24
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Look(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="ask", tag="look"):
    """Asks for the table.

    Attributes:
        version: of the messages of the coordinator's socket.
    """

    version: int


def asks_to_look(message: bytes) -> bool:
    """Return whether the first message of a connection asks for the table.

    Raises:
        GpuJobRefused: it does, and is of another version.
    """
    try:
        version = decode(message, Look).version
    except msgspec.MsgspecError:
        return False
    if version != VERSION:
        raise GpuJobRefused(f"its hetstream speaks protocol {version}, and this coordinator protocol {VERSION}")
    return True


def sealed_file(text: bytes) -> int:
    """Return a descriptor of a memory file with this text, which nobody can change."""
    descriptor = os.memfd_create("hetstream-gpu-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        written = 0
        while written < len(text):
            written += os.pwrite(descriptor, text[written:], written)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def look(path: str, coordinator_uid: int | None = None) -> GpuTable:
    """Ask the coordinator that listens at a path.

    Args:
        path: of its socket.
        coordinator_uid: user that it may run as, beside root and this user; None: nobody else.

    Raises:
        GpuCoordinatorError: nobody answers there, or a user who is not the coordinator's listens.
        GpuJobRefused: it is of another version.
        HetstreamError: so is its table.
    """
    connection, _, descriptors = ask(path, encode(Look(VERSION)), coordinator_uid, num_descriptors=1)
    connection.close()
    with open(descriptors[0], "rb") as file:
        return read_table(file.read(_MOST_BYTES))


# What the site daemon is told of a node's GPUs: the coordinator's tables of the last seconds -> a report. Pure.
#
# Nothing by which the packer decides is a job's word about itself alone: how much a GPU is used says its driver, or,
# where nobody counts, the guaranteed job, which by a lie keeps others off its own GPU or lets them onto it. How jobs
# fare is their own word, and for people.

# Tables, one a second, over which the share in use is told where no driver counts it.
_WINDOW = 10
# A guaranteed job whose agent is silent for longer may be anywhere.
_SILENT_S = 30.0
_MOST_TEXT = 200
_MOST_DIGITS = 4
_PAUSE = GpuUse.PAUSE.name.lower()


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
            # The share of the last seconds in which a guaranteed job had something on the GPU, by its mini-batches.
            share = 1.0 - (row.idle_share or 0.0) if row.is_reserved else 0.0
            self._used.setdefault(row.gpu, deque(maxlen=_WINDOW)).append(share)
            for job, processes in _sharing(row).items():
                made = sum(process.num_batches for process in processes)
                key = row.gpu, job
                if all(process.verdict == _PAUSE for process in processes):
                    since_s, before = self._paused.get(key, (table.taken_s, made))
                    paused[key] = (since_s, before) if made <= before else (table.taken_s, made)
        self._paused = paused

    def report(self, table: GpuTable) -> ReportGpus:
        """Return what is told after `see` of the same table."""
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


def _guaranteed(row: GpuRow) -> list[ProcessRow]:
    return [process for process in row.processes if process.job_class == JobClass.GUARANTEED.value]


def _sharing(row: GpuRow) -> dict[str, list[ProcessRow]]:
    """The processes of opportunistic jobs, by job."""
    found: dict[str, list[ProcessRow]] = {}
    for process in row.processes:
        if process.job_class != JobClass.GUARANTEED.value:
            found.setdefault(process.job, []).append(process)
    return found


def _fares(row: GpuRow) -> tuple[SharingJobNow, ...]:
    """How each job fares: its memory is that of all its processes, its pace that of the slowest."""
    found: dict[str, list[ProcessRow]] = {}
    for process in row.processes:
        found.setdefault(process.job, []).append(process)
    fares = []
    for job, processes in list(found.items())[:MAX_SHARING]:
        slowest = max(processes, key=lambda process: process.batch_s or 0.0)
        fares.append(
            SharingJobNow(
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
