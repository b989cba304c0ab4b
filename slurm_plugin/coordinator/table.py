"""Who is on a node's GPUs, and how they fare: what the coordinator shows to people and to other programs. Pure.

Made from what `decide` saw and said; `hetstream gpu top`, the exporter of a node and the packer read it. A field is
never given another meaning: another version says so, and a reader refuses it.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hetstream.base.errors import HetstreamError
from hetstream.base.typed_json import decode
from hetstream.hetjob.gpu.orders import FULL_SHARE, NO_LIMIT, Verdict
from hetstream.slurm_plugin.coordinator.agentless import Agentless
from hetstream.slurm_plugin.coordinator.decide import Decision, GpuState, believed
from hetstream.slurm_plugin.coordinator.gpus import Gpu
from hetstream.slurm_plugin.coordinator.measurements import Measurements, SharingJob

TABLE_VERSION = 1
# What is called the time of a mini-batch now is the mean over so many.
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
    decisions: Mapping[str, Decision],
    who: Mapping[str, Who],
    agentless: Collection[Agentless] | None,
    now_ns: int,
) -> GpuRow:
    """The row of one GPU.

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
    """What one user may see: of the processes his own. How busy a GPU is, whoever runs on it can tell by himself."""
    return tuple(
        msgspec.structs.replace(row, processes=tuple(process for process in row.processes if process.uid == uid))
        for row in rows
    )


def read_table(text: bytes) -> GpuTable:
    """A table in the form in which it is sent.

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
        verdict=Verdict.PAUSE.name.lower(), reason=complaint,
        share=0.0, limit_bytes=0, held_bytes=process.held_bytes, peak_bytes=0, host_bytes=0, host_capacity_bytes=0,
        num_batches=0, batch_s=None, alone_s=None, paused_s=0.0, said_ago_s=None,
        is_disobedient=True,
    )  # fmt: skip


def _process_row(job: SharingJob, who: Who, decision: Decision, state: GpuState, now_ns: int) -> ProcessRow:
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
        verdict=(Verdict.FINISH if order.meet_at and order.verdict else Verdict(order.verdict)).name.lower(),
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
