"""What the processes of one job on several GPUs have in common: states and measurements in, orders out. Pure.

Such processes train together: each of their mini-batches has a collective operation in which they wait for each other.
So one that is held up holds up all, and what it does to a GPU is felt on the others:

* *Opportunistic.* Each process uses its own GPU's gaps. When one may begin no mini-batch, none begins another one than
  the furthest has begun: they meet at that boundary, where each has given memory back and nobody waits in a collective
  operation, which would keep a GPU busy. Who is behind goes on until there.
* *Guaranteed.* Its pace alone is measured on all of its GPUs at once: others on one of them would make it look slow on
  all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from hetstream.hetjob.gpu.orders import JobClass, Verdict
from hetstream.slurm_plugin.coordinator.decide import Decision, GpuState, believed, orders, paced
from hetstream.slurm_plugin.coordinator.measurements import Measurements, SharingJob
from hetstream.slurm_plugin.coordinator.pacing import Pacing, Phase, measured_anew

Decisions = dict[str, dict[str, Decision]]


def decide_all(
    states: Mapping[str, GpuState], seen: Mapping[str, Measurements], now_ns: int
) -> tuple[dict[str, GpuState], Decisions]:
    """What all jobs of a node's GPUs are to do.

    Args:
        states: what the call before returned, by the GPU's name.
        seen: each GPU and its jobs. A process has a name of its own among those of all GPUs.
        now_ns: the time.

    Returns:
        The new states, and for each GPU its jobs' decisions by their names.
    """
    seen = _with_jobs(seen, lambda job: believed(job, now_ns))
    meetings = _meetings(seen)
    seen = _with_jobs(seen, lambda job: replace(job, meet_at=meetings.get(job.name, 0)))
    paces = {gpu: paced(states[gpu], measured, now_ns) for gpu, measured in seen.items()}
    paces = _measured_together(states, paces, seen)
    new_states, decisions = dict[str, GpuState](), Decisions()
    for gpu, measured in seen.items():
        new_states[gpu], decisions[gpu] = orders(replace(states[gpu], pacing=paces[gpu]), measured, now_ns)
    return new_states, _met(decisions, seen)


def _with_jobs(
    seen: Mapping[str, Measurements], changed: Callable[[SharingJob], SharingJob]
) -> dict[str, Measurements]:
    return {gpu: replace(measured, jobs=tuple(map(changed, measured.jobs))) for gpu, measured in seen.items()}


def _gangs(seen: Mapping[str, Measurements], job_class: JobClass) -> Iterator[list[tuple[str, SharingJob]]]:
    """Of each job with several processes, these, each with its GPU."""
    found: dict[str, list[tuple[str, SharingJob]]] = {}
    for gpu, measured in seen.items():
        for job in measured.jobs:
            if job.gang and job.job_class is job_class:
                found.setdefault(job.gang, []).append((gpu, job))
    return (processes for processes in found.values() if len(processes) > 1)


def _meetings(seen: Mapping[str, Measurements]) -> dict[str, int]:
    """At which boundary the processes of an opportunistic job meet, by the name of each."""
    return {
        job.name: max(1, *(_furthest(other) for _, other in processes))
        for processes in _gangs(seen, JobClass.OPPORTUNISTIC)
        for _, job in processes
    }


def _furthest(job: SharingJob) -> int:
    """The boundary that a process comes to next, or at which it is. Its first one comes after it has got ready."""
    record = job.statistics
    if record is None or not record.boundaries:
        return 0
    return record.boundaries if record.is_idle else record.boundaries + 1


def _met(decisions: Decisions, seen: Mapping[str, Measurements]) -> Decisions:
    """Orders by which no process of a job begins a mini-batch in which it would wait for one that is held up."""
    for processes in _gangs(seen, JobClass.OPPORTUNISTIC):
        held = next(((gpu, job) for gpu, job in processes if not _may_begin(decisions[gpu][job.name])), None)
        if held is None:
            continue
        reason = decisions[held[0]][held[1].name].reason
        for gpu, job in processes:
            decision = decisions[gpu][job.name]
            if _may_begin(decision):
                decisions[gpu][job.name] = replace(
                    decision,
                    order=replace(decision.order, meet_at=job.meet_at),
                    reason=f"it waits at boundary {job.meet_at} for its process on {held[0]}: {reason}",
                )
    return decisions


def _may_begin(decision: Decision) -> bool:
    return decision.order.verdict == Verdict.RUN and not decision.order.meet_at


def _measured_together(
    before: Mapping[str, GpuState], after: dict[str, Pacing], seen: Mapping[str, Measurements]
) -> dict[str, Pacing]:
    """The pace of each GPU's guaranteed job, where one that is measured on one GPU is measured on all of its GPUs."""
    for processes in _gangs(seen, JobClass.GUARANTEED):
        # A process that makes no mini-batches would have the others wait for ever.
        gpus = {gpu for gpu, job in processes if job.statistics and job.statistics.boundaries}
        if len(gpus) < 2 or all(after[gpu].phase is Phase.SHARING for gpu in gpus):
            continue
        is_known = all(after[gpu].phase is Phase.SHARING or after[gpu].alone is not None for gpu in gpus)
        for gpu in gpus:
            if is_known:
                after[gpu] = replace(after[gpu], phase=Phase.SHARING)
            elif before[gpu].pacing.phase is Phase.SHARING:
                after[gpu] = measured_anew(after[gpu], "another of its GPUs is measured")
            else:  # it is known here, and waits for the others
                after[gpu] = replace(after[gpu], phase=Phase.MEASURING)
    return after
