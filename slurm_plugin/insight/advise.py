"""Which jobs would gain from data workers, and how much: (snapshot, what was measured) -> advice with its basis. Pure.

Called by `hetstream advise`. Three bases, from firm to soft: *measured* (trainers waited for data), *free now* (a
pending job would start), *shape* (a running job holds CPUs beside GPUs that nobody can use for want of CPUs; whether it
loads data with them is for its user to say).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from hetstream.base.text import count_words
from hetstream.hetjob.convert.spec import DEFAULT_TRAINER_CPUS_PER_GPU
from hetstream.hetjob.job.ended_job import EndedJob
from hetstream.slurm_plugin.client.accounting import Usage
from hetstream.slurm_plugin.client.model import Job, Snapshot
from hetstream.slurm_plugin.insight.fragmentation import Fragmentation, measure_table, shapes_on
from hetstream.slurm_plugin.insight.node_table import Hardware, NodeTable, alike_jobs, shape_of
from hetstream.slurm_plugin.insight.why import Explainer

# A trainer that waits for a twentieth of its time is worth a look.
MUCH_WAITING = 0.05
# Slurm's own measure: GPUs less busy than this while the CPUs are busier than that look as if data were lacking.
IDLE_GPUS, BUSY_CPUS = 0.5, 0.8
_MOST_NAMED = 5


@dataclass(frozen=True)
class Advice:
    """One job that would gain.

    Attributes:
        basis: `measured`, `free now` or `shape`.
        cpus_freed: CPUs that trainers would give back on their nodes.
        gpus_unlocked: GPUs that would begin to be of use.
        gpu_hours_per_day: GPU hours gained in a day; None where nothing allows an estimate.
        text: why.
        step: what to do.
    """

    job: str
    user: str
    state: str
    basis: str
    cpus_freed: int
    gpus_unlocked: int
    gpu_hours_per_day: float | None
    text: str
    step: str


def advise(
    snapshot: Snapshot, waits: Mapping[str, float], usages: Iterable[Usage] = (), ended: Iterable[EndedJob] = ()
) -> tuple[Advice, ...]:
    """Return all advice, firm first, then by what would be gained.

    Args:
        snapshot: the cluster.
        waits: label of a hetstream job -> share of time that its trainers wait for data.
        usages: runs of recent jobs with what accounting measured; of a job that was requeued the last one counts.
        ended: recent jobs with data workers that have left a record.
    """
    last_runs = {usage.job: usage for usage in sorted(usages, key=lambda usage: usage.start_s)}
    found = [
        *(_starving(job, waits[job.label]) for job in snapshot.jobs if waits.get(job.label, 0) > MUCH_WAITING),
        *(advice for usage in last_runs.values() if (advice := _idle(usage))),
        *(_oversized(ended_job) for ended_job in ended if ended_job.advice),
        *would_start(snapshot),
        *_running(snapshot, waits),
    ]
    order = ("measured", "free now", "shape")
    return tuple(
        sorted(
            found,
            key=lambda finding: (order.index(finding.basis), -(finding.gpu_hours_per_day or 0.0), -finding.cpus_freed),
        )
    )


def headline(found: Fragmentation, helped: Sequence[str]) -> str:
    """Return what is to be known first, in one sentence; empty where no GPU is free.

    Args:
        found: the cluster.
        helped: labels of pending jobs that would start with data workers.
    """
    free, stranded = found.total("gpus_free"), found.total("stranded_gpus")
    if not free:
        return ""
    if not stranded:
        return f"none of {free:,} free GPUs is stranded: pending jobs can use them all, or none waits"
    head = f"{stranded:,} of {free:,} free GPUs {'is' if stranded == 1 else 'are'} stranded"
    if not helped:
        return f"{head}: no pending job can use them as it is"
    named = ", ".join(helped[:_MOST_NAMED]) + (f" and {len(helped) - _MOST_NAMED} more" * (len(helped) > _MOST_NAMED))
    return f"{head}: job{'s' * (len(helped) > 1)} {named} would start with data workers"


def _starving(job: Job, wait: float) -> Advice:
    gpus = job.gpus
    return Advice(
        job.label, job.user, job.state, "measured", 0, 0, gpus * wait * 24,
        f"its trainers wait for data {wait:.0%} of their time", f"more data workers; hetstream job {job.label}",
    )  # fmt: skip


def _idle(usage: Usage) -> Advice | None:
    """A job of accounting whose GPUs waited while its CPUs worked."""
    ran_s = usage.ran_s
    if not usage.gpus or usage.gpu_share is None or usage.cpu_used_s is None or ran_s is None:
        return None
    busy = usage.cpu_used_s / (usage.cpus * ran_s) if usage.cpus and ran_s > 0 else 0.0
    if usage.gpu_share >= IDLE_GPUS or busy < BUSY_CPUS:
        return None
    return Advice(
        usage.job, usage.user, "ended", "measured", 0, 0, usage.gpus * (1 - usage.gpu_share) * 24,
        f"its GPUs were busy {usage.gpu_share:.0%} of the time, its CPUs {busy:.0%}",
        "#HETSTREAM --data-workers=MIN-MAX",
    )  # fmt: skip


def _oversized(ended_job: EndedJob) -> Advice:
    """A job whose trainers needed fewer CPUs than they had, as its elastic controller saw."""
    freed = (
        0 if ended_job.trainer_cpus is None else (ended_job.trainer_cpus - ended_job.needed_cpus) * ended_job.num_ranks
    )
    return Advice(
        ended_job.job, ended_job.user, "ended", "measured", freed, 0, None,
        ended_job.advice, f"next time: #HETSTREAM --trainer-cpus={ended_job.needed_cpus}",
    )  # fmt: skip


def would_start(snapshot: Snapshot) -> Iterable[Advice]:
    explainer, hardware = Explainer(snapshot), Hardware(snapshot.nodes, snapshot.config, snapshot.partitions)
    for job in snapshot.jobs:
        if not job.waits_for_resources or not job.count("gpu"):
            continue
        verdict = explainer.conversion(job)
        if not verdict.helps:
            continue
        gpus, shape = job.count("gpu"), shape_of(job, hardware)
        kept = min(shape.cpus, DEFAULT_TRAINER_CPUS_PER_GPU * shape.gpus)
        early_s = max(0.0, job.start_s - snapshot.taken_s) if job.start_s else None
        hours = None if early_s is None else gpus * min(24.0, early_s / 3600)
        yield Advice(
            job.label, job.user, job.state, "free now", (shape.cpus - kept) * shape.num_nodes, gpus, hours,
            verdict.text, verdict.directive,
        )  # fmt: skip


def _running(snapshot: Snapshot, waits: Mapping[str, float]) -> Iterable[Advice]:
    # Nodes whose GPUs want CPUs, and how many GPUs.
    with_room = NodeTable(
        (node for node in snapshot.nodes if node.starts_jobs and node.gpus_free()),
        snapshot.partitions,
        snapshot.jobs,
        others_are_hidden=snapshot.hides_jobs,
    )
    hardware = Hardware(snapshot.nodes, snapshot.config, snapshot.partitions)
    shapes = shapes_on(with_room, alike_jobs(snapshot.jobs), hardware)
    stranded = {
        stranding.node: (node, stranding.stranded_gpus)
        for node, stranding in zip(with_room.nodes, measure_table(with_room, shapes)[0], strict=True)
        if stranding.stranded_gpus and stranding.lacking == "CPUs"
    }
    # Who is whose companion they say themselves: it counts among the jobs of one user.
    served = {(job.trainer, job.uid, job.user) for job in snapshot.jobs if job.trainer}
    holders = [
        (job, shape, shape.cpus - kept, [stranded[name] for name in job.nodes if name in stranded])
        for job in snapshot.jobs
        if job.is_at_work and not job.het and job.label not in waits
        and (str(job.job_id), job.uid, job.user) not in served
        and 0 < (kept := DEFAULT_TRAINER_CPUS_PER_GPU * (shape := shape_of(job)).gpus) < shape.cpus
    ]  # fmt: skip
    lighter = [
        replace(node, cpus_allocated=max(0, node.cpus_allocated - freed))
        for _, _, freed, beside in holders
        for node, _ in beside
    ]
    table = NodeTable(lighter, snapshot.partitions, snapshot.jobs, others_are_hidden=snapshot.hides_jobs)
    measured = iter(measure_table(table, shapes)[0])
    for job, shape, freed, beside in holders:
        unlocked = sum(
            before - stranding.stranded_gpus
            for (_, before), stranding in zip(beside, islice(measured, len(beside)), strict=True)
        )
        if unlocked > 0:
            yield Advice(
                job.label, job.user, job.state, "shape", freed * max(1, job.num_nodes), unlocked, unlocked * 24.0,
                f"it holds {count_words(shape.cpus, 'CPU')} for {count_words(shape.gpus, 'GPU')} a node, beside "
                f"{count_words(unlocked, 'free GPU')} that no pending job can use for want of CPUs",
                "if it loads data with them, next time: #HETSTREAM --data-workers=MIN-MAX",
            )  # fmt: skip
