"""Shared GPUs for people: (nodes' readings, jobs, wait shares) -> who is on each, whose trainer leaves it idle. Pure.

Used by `hetstream report` and `hetstream serve`. Who may see what, the site daemon has decided: of other users' jobs it
tells how they fare only to those whom it trusts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetstream.base.text import count_words, size_words
from hetstream.hetjob.site.messages import GpuNow, NodeGpus, SharingJobNow
from hetstream.slurm_plugin.client.model import Job
from hetstream.slurm_plugin.packing.state import PackingRules

_RULES = PackingRules()
# A trainer that leaves less of its GPU's time is not worth the memory.
LEAST_IDLE = 0.2
GUARANTEED, OPPORTUNISTIC = "guaranteed", "opportunistic"


@dataclass(frozen=True)
class SharedGpus:
    """What the site daemon tells.

    Attributes:
        nodes: with their GPUs, by name.
        wait_shares: job id -> share of time in which its trainers waited for data.
        missing: why nothing is told; empty if it is.
    """

    nodes: tuple[NodeGpus, ...] = ()
    wait_shares: Mapping[str, float] | None = None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class SharingRow:
    """One job on one GPU, or a GPU with nobody on it.

    Attributes:
        node, index, gpu: which GPU.
        age_s: how old the node's word is.
        used_share: of the last seconds, in which something ran there.
        idle_share: of the guaranteed job's mini-batches, in which it has nothing on the GPU; None: not known.
        capacity_bytes, free_bytes: memory that jobs may hold together, and what the guaranteed job's peak leaves.
        job: its id; empty: nobody is there.
        user: whose it is; empty: not known.
        job_class: `guaranteed` or `opportunistic`; empty for nobody.
        held_bytes, host_bytes, batch_s, alone_s: as `JobNow` has them; None: not told.
        ratio: of a mini-batch's time and the time alone.
        note: what is to be known of it in words.
    """

    node: str
    index: int
    gpu: str
    age_s: float
    used_share: float
    idle_share: float | None
    capacity_bytes: int
    free_bytes: int
    job: str
    user: str
    job_class: str
    held_bytes: int | None
    host_bytes: int | None
    batch_s: float | None
    alone_s: float | None
    ratio: float | None
    note: str


@dataclass(frozen=True, slots=True)
class IdleTrainer:
    """A trainer that leaves its GPUs idle.

    Attributes:
        job, user: the trainer.
        gpus: that it holds.
        wait_share: of time in which it waits for data; None: it does not tell.
        idle_share: of its mini-batches, in which it has nothing on its GPUs; None: not known.
        places: its shared GPUs, such as `g1:0`.
        free_bytes: what the GPU with most memory leaves; None: not known.
        num_sharing: opportunistic jobs on its GPUs.
        takes: how many of its GPUs would take an opportunistic job now.
        verdict: that in words, or why none does.
    """

    job: str
    user: str
    gpus: int
    wait_share: float | None
    idle_share: float | None
    places: tuple[str, ...]
    free_bytes: int | None
    num_sharing: int
    takes: int
    verdict: str


def sharing_rows(shared: SharedGpus, jobs: Sequence[Job]) -> list[SharingRow]:
    """Return who is on which GPU: those that have a GPU by Slurm first."""
    users = {str(job.job_id): job.user for job in jobs}
    return [row for node in shared.nodes for gpu in node.gpus for row in _rows_of(node, gpu, users)]


def idle_trainers(shared: SharedGpus, jobs: Sequence[Job], wait_shares: Mapping[str, float]) -> list[IdleTrainer]:
    """Trainers that leave their GPUs idle for a part of the time that is worth it, the idlest first.

    Args:
        shared: what the daemon tells.
        jobs: of the cluster.
        wait_shares: what this user's own jobs told, by their labels.
    """
    found = []
    for job in jobs:
        num_gpus = job.count("gpu")
        if not (job.is_running and num_gpus):
            continue
        name = str(job.job_id)
        wait_share = wait_shares.get(job.label, (shared.wait_shares or {}).get(name))
        held = [(node, gpu) for node in shared.nodes for gpu in node.gpus if name in gpu.guaranteed]
        idle_shares = [gpu.idle_share for _, gpu in held if gpu.idle_share is not None]
        idle_share = sum(idle_shares) / len(idle_shares) if idle_shares else None
        if max(wait_share or 0.0, idle_share or 0.0) < LEAST_IDLE:
            continue
        refusals = [_refusal(node, gpu) for node, gpu in held]
        free = [gpu.free_bytes for (_, gpu), refusal in zip(held, refusals, strict=True) if not refusal]
        found.append(
            IdleTrainer(
                name, job.user, num_gpus, wait_share, idle_share,
                tuple(f"{node.node}:{gpu.index}" for node, gpu in held),
                max((gpu.free_bytes for _, gpu in held), default=None),
                len({sharing.job for _, gpu in held for sharing in gpu.sharing}),
                len(free), _verdict(refusals, free),
            )
        )  # fmt: skip
    return sorted(found, key=lambda row: (-max(row.wait_share or 0.0, row.idle_share or 0.0) * row.gpus, row.job))


def _verdict(refusals: Sequence[str], free: Sequence[int]) -> str:
    if not refusals:
        return "not now: its nodes tell nothing of its GPUs (hetstream internal gpu-report)"
    if not free:
        return f"not now: {refusals[0]}"
    return f"yes: {len(free)} of {count_words(len(refusals), 'GPU')}, up to {size_words(max(free))}"


def _refusal(node: NodeGpus, gpu: GpuNow) -> str:
    """Why a GPU takes no opportunistic job now, as the packer judges; empty if it takes one that fits."""
    if node.age_s > _RULES.oldest_s:
        return f"its node told of it {node.age_s:.0f} s ago"
    if gpu.closed:
        return f"nobody is placed on GPUs {gpu.closed}"
    if gpu.used_share >= _RULES.most_used:
        return f"in use for {gpu.used_share:.0%} of the time"
    if len(gpu.sharing) >= _RULES.most_jobs:
        return f"{len(gpu.sharing)} opportunistic jobs are there"
    return "" if gpu.free_bytes else "no memory is left"


def _rows_of(node: NodeGpus, gpu: GpuNow, users: Mapping[str, str]) -> list[SharingRow]:
    fares = {job.job: job for job in gpu.jobs}
    names = [(job, GUARANTEED) for job in gpu.guaranteed]
    names += [(sharing.job, OPPORTUNISTIC) for sharing in gpu.sharing]
    rows = [
        _row(node, gpu, job, users.get(job, ""), job_class, fares.get(job), _note(gpu, job)) for job, job_class in names
    ]
    return rows or [_row(node, gpu, "", "", GUARANTEED if gpu.is_reserved else "", None, _note(gpu, ""))]


def _note(gpu: GpuNow, job: str) -> str:
    sharing = next((sharing for sharing in gpu.sharing if sharing.job == job), None)
    if sharing is None:
        return f"nobody is placed on GPUs {gpu.closed}" if gpu.closed else ""
    if sharing.complaint:
        return sharing.complaint
    return f"paused for {sharing.paused_s:.0f} s" if sharing.paused_s >= 1 else ""


def _row(
    node: NodeGpus, gpu: GpuNow, job: str, user: str, job_class: str, fares: SharingJobNow | None, note: str
) -> SharingRow:
    known = fares or SharingJobNow("-", 0)
    batch_s, alone_s = known.batch_s or None, known.alone_s or None
    held_bytes, host_bytes = (fares.held_bytes, fares.host_bytes) if fares else (None, None)
    return SharingRow(
        node.node, gpu.index, gpu.gpu, node.age_s, gpu.used_share, gpu.idle_share, gpu.capacity_bytes, gpu.free_bytes,
        job, user, job_class, held_bytes, host_bytes, batch_s, alone_s,
        batch_s / alone_s if batch_s and alone_s else None, note,
    )  # fmt: skip
