"""What the jobs of one GPU are to do now: state and measurements in, orders with their reasons out. Pure.

In doubt opportunistic jobs pause: when the guaranteed job has no agent, says nothing, or says what cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from hetstream.hetjob.gpu.orders import FULL_SHARE, NO_LIMIT, Order, Statistics, Verdict
from hetstream.slurm_plugin.coordinator import memory, pacing, trial
from hetstream.slurm_plugin.coordinator.measurements import Measurements, SharingJob
from hetstream.slurm_plugin.coordinator.pacing import Pacing, Phase
from hetstream.slurm_plugin.coordinator.trial import Trial

# An order that is not renewed lapses after this. The coordinator renews it several times in that time.
VALID_NS = 150_000_000
_RAISE_NS = 100_000_000
# A job that holds more than it may is given so long to come to a boundary before it is stopped where it is.
_FINISH_NS = 2_000_000_000
# ... and so long before it is reported.
_OBEY_NS = 10_000_000_000
# A guaranteed job may take all memory until it has made so many mini-batches: what it needs is not known before.
_SETTLED = 3
# A job's own count of its memory may be so far below the GPU's: contexts and libraries have some.
_UNCOUNTED = 0.05
# ... and further for so long: what it said last may be older than what the GPU counted, or younger.
_EXPLAIN_NS = 1_000_000_000


@dataclass(frozen=True)
class GpuState:
    """What the coordinator remembers of one GPU.

    Attributes:
        pacing: beside the guaranteed job.
        trial: of jobs that are alone.
        limits: memory limits of opportunistic jobs, in bytes, by name.
        raised_ns: when a limit was raised last.
        lowered_ns: since when a job has held more than it may, by name.
        finishing_ns: of these, and of those that have while the guaranteed job is measured, since when they first have.
        paused: mini-batches that a job had made when it was seen to have the order to pause, by name; None: it was not
            yet.
        understated_ns: since when a job says that it holds less than the GPU counts, by name.
        alone_ns: shortest mini-batch of an opportunistic job while nobody else was there, by name.
        measuring_ns: since when the guaranteed job is measured; 0: it is not.
    """

    pacing: Pacing = field(default_factory=Pacing)
    trial: Trial = field(default_factory=Trial)
    limits: Mapping[str, int] = field(default_factory=dict)
    raised_ns: int = 0
    lowered_ns: Mapping[str, int] = field(default_factory=dict)
    finishing_ns: Mapping[str, int] = field(default_factory=dict)
    paused: Mapping[str, int | None] = field(default_factory=dict)
    understated_ns: Mapping[str, int] = field(default_factory=dict)
    alone_ns: Mapping[str, int] = field(default_factory=dict)
    measuring_ns: int = 0


@dataclass(frozen=True)
class Decision:
    """What one job is to do, and why.

    Attributes:
        order: for its page.
        reason: for people.
        is_disobedient: it does not keep to its orders, so Slurm should take it away.
    """

    order: Order
    reason: str
    is_disobedient: bool = False


def decide(state: GpuState, seen: Measurements, now_ns: int) -> tuple[GpuState, dict[str, Decision]]:
    """What all jobs of a GPU are to do, if none of them has processes on other GPUs (`gangs.py`).

    Args:
        state: what the call before returned.
        seen: the GPU and its jobs.
        now_ns: the time.

    Returns:
        The new state, and each job's decision by its name.
    """
    seen = replace(seen, jobs=tuple(believed(job, now_ns) for job in seen.jobs))
    return orders(replace(state, pacing=paced(state, seen, now_ns)), seen, now_ns)


def paced(state: GpuState, seen: Measurements, now_ns: int) -> Pacing:
    """`GpuState.pacing`, one reading later. What jobs say is believed."""
    guaranteed = seen.guaranteed
    if guaranteed and guaranteed.statistics:
        advanced = pacing.advance(state.pacing, guaranteed.name, guaranteed.statistics, bool(seen.opportunistic))
        if advanced.phase is Phase.MEASURING and any(_is_leaving(state, job, now_ns) for job in seen.opportunistic):
            advanced = replace(advanced, history=replace(advanced.history.changed(), alone=()))
        return advanced
    return state.pacing if guaranteed or seen.is_reserved else Pacing()


def orders(state: GpuState, seen: Measurements, now_ns: int) -> tuple[GpuState, dict[str, Decision]]:
    """As `decide`, once it is known how fast the guaranteed job is."""
    state = replace(
        _limit_memory(state, seen, now_ns),
        alone_ns=_alone_ns(state, seen),
        understated_ns=_understated_ns(state, seen, now_ns),
        measuring_ns=(state.measuring_ns or now_ns) if state.pacing.phase is Phase.MEASURING else 0,
    )
    valid_until_ns = now_ns + VALID_NS
    decisions = {}
    for job in seen.all_guaranteed:
        run = Order(valid_until_ns, Verdict.RUN, share=FULL_SHARE)
        decisions[job.name] = Decision(run, f"guaranteed; {state.pacing.reason}")
    for job in seen.opportunistic:
        order, reason = _order_for(state, seen, job, now_ns)
        order = replace(order, valid_until_ns=valid_until_ns, limit_bytes=state.limits[job.name])
        decisions[job.name] = Decision(order, reason)
    return _watched(state, seen, decisions, now_ns)


def believed(job: SharingJob, now_ns: int) -> SharingJob:
    """The job without statistics that cannot be: what is in the future, below nothing, or beyond all bounds."""
    record = job.statistics
    if record is None:
        return job
    values = [getattr(record, attribute.name) for attribute in fields(Statistics)]
    is_possible = min(values) >= 0 and max(values) <= NO_LIMIT and max(record.updated_ns, record.boundary_ns) <= now_ns
    return job if is_possible and record.is_idle in (0, 1) else replace(job, statistics=None)


def _is_leaving(state: GpuState, job: SharingJob, now_ns: int) -> bool:
    """Whether a job is on its way to a boundary: it holds more than it may, or others of its processes wait there.

    Later it is stopped where it is.
    """
    return _is_giving_back(state, job, now_ns) or (_is_behind(job) and state.measuring_ns > now_ns - _FINISH_NS)


def _is_giving_back(state: GpuState, job: SharingJob, now_ns: int) -> bool:
    since_ns = state.lowered_ns.get(job.name)
    if since_ns is None or now_ns - since_ns >= _FINISH_NS:
        return False
    if now_ns - state.finishing_ns.get(job.name, now_ns) >= _FINISH_NS:  # once is enough
        return False
    return _is_behind(job) or not _has_given_back(state, job)


def _is_behind(job: SharingJob) -> bool:
    """Whether a process has still to come to the boundary at which those of its job meet."""
    record = job.statistics
    if not job.meet_at or record is None or not record.boundaries:
        return False
    return record.is_idle == 0 or record.boundaries < job.meet_at


def _has_given_back(state: GpuState, job: SharingJob) -> bool:
    """Whether a job has come to a boundary under its limit. What it still holds is in use, and cannot be given back."""
    record = job.statistics
    return record is not None and record.is_idle == 1 and record.limit_bytes <= state.limits.get(job.name, 0)


def _alone_ns(state: GpuState, seen: Measurements) -> dict[str, int]:
    """`GpuState.alone_ns`, one reading later."""
    known = {job.name: state.alone_ns[job.name] for job in seen.opportunistic if job.name in state.alone_ns}
    is_one = len({job.gang or job.name for job in seen.jobs}) == 1
    for job in seen.opportunistic if is_one and not seen.is_reserved else ():
        if job.statistics and job.statistics.mini_batch_ns:
            known[job.name] = min(job.statistics.mini_batch_ns, known.get(job.name, job.statistics.mini_batch_ns))
    return known


def _understated_ns(state: GpuState, seen: Measurements, now_ns: int) -> dict[str, int]:
    """`GpuState.understated_ns`, one reading later."""
    uncounted_bytes = seen.capacity_bytes * _UNCOUNTED
    return {
        job.name: state.understated_ns.get(job.name, now_ns)
        for job in seen.opportunistic
        if job.statistics and (job.measured_bytes or 0) > job.statistics.held_bytes + uncounted_bytes
    }


def _order_for(state: GpuState, seen: Measurements, job: SharingJob, now_ns: int) -> tuple[Order, str]:
    """When an opportunistic job may launch."""
    record = job.statistics
    if seen.is_lost:
        return Order(), "the GPU does not answer any more: paused"
    if record is None:
        return Order(), "it has said nothing that can be: paused"
    if now_ns - state.understated_ns.get(job.name, now_ns) > _EXPLAIN_NS:
        return Order(), (
            f"it says that it holds {record.held_bytes:,} bytes, and the GPU counts {job.measured_bytes:,}: paused"
        )
    if seen.guaranteed is None:
        if seen.is_awaited:
            return Order(), "a guaranteed job from before this coordinator has not come to it yet: paused"
        if seen.is_reserved:
            return Order(), "a guaranteed job without an agent has the GPU: paused"
        return Order(verdict=Verdict.RUN, share=FULL_SHARE), "no guaranteed job is there"
    return _order_beside(state, seen.guaranteed.statistics, job, now_ns)


def _order_beside(state: GpuState, record: Statistics | None, job: SharingJob, now_ns: int) -> tuple[Order, str]:
    """The same beside a guaranteed job."""
    if record is None:
        return Order(), "the guaranteed job says nothing that can be: paused"
    if _is_giving_back(state, job, now_ns):
        return Order(verdict=Verdict.FINISH, meet_at=job.meet_at), "it is to give memory back at its next boundary"
    needed_bytes = job.statistics.peak_bytes if job.statistics and not job.statistics.host_capacity_bytes else 0
    if needed_bytes > state.limits[job.name]:
        return Order(), f"{needed_bytes:,} bytes that it needs are not free, and nothing can stand in: paused"
    open_until_ns = pacing.open_until_ns(state.pacing, record, now_ns)
    if _is_leaving(state, job, now_ns):  # others of its processes wait for it; no faster than before
        before = replace(state.pacing, phase=Phase.SHARING)
        order = Order(
            verdict=Verdict.RUN, share=pacing.share_now(before, record), meet_at=job.meet_at,
            open_until_ns=pacing.open_until_ns(before, record, now_ns), idle_since_ns=record.boundary_ns,
        )  # fmt: skip
        return order, f"{state.pacing.reason}: it goes on to the boundary at which its processes meet"
    if state.pacing.phase is Phase.MEASURING:
        verdict = Verdict.RUN if open_until_ns else Verdict.PAUSE
        order = Order(verdict=verdict, open_until_ns=open_until_ns, idle_since_ns=record.boundary_ns)
        return order, f"{state.pacing.reason}: paused while it is measured"
    if pacing.is_silent(state.pacing, record, now_ns):
        return Order(), "the guaranteed job has been at one mini-batch for long: paused"
    order = Order(
        verdict=Verdict.RUN,
        share=pacing.share_now(state.pacing, record),
        open_until_ns=open_until_ns,
        idle_since_ns=record.boundary_ns,
    )
    return (
        order,
        f"{state.pacing.reason}; gaps {state.pacing.gap_use / 10:.0f}%, busy time {state.pacing.share / 10:.0f}%",
    )


def _limit_memory(state: GpuState, seen: Measurements, now_ns: int) -> GpuState:
    """New limits for the opportunistic jobs."""
    jobs = seen.opportunistic
    demands = {job.name: memory.demand_bytes(job, seen.capacity_bytes) for job in jobs}
    if seen.guaranteed is None and not seen.is_reserved:
        return _share_memory(state, seen, demands, now_ns)
    if seen.is_awaited:  # the coordinator before has told them what the guaranteed job leaves
        kept = {job.name: memory.kept_bytes(job, seen.capacity_bytes) for job in jobs}
        return replace(state, limits=kept, trial=Trial(), raised_ns=now_ns)
    available = 0
    if seen.guaranteed and _is_settled(state, seen.guaranteed):
        record = seen.guaranteed.statistics or Statistics()
        peak_bytes = max(record.peak_bytes, state.pacing.history.peak_bytes)
        available = memory.left_bytes(seen.capacity_bytes, peak_bytes + seen.agentless_bytes)
    wanted = memory.divided(available, demands)
    may_rise = now_ns - state.raised_ns >= _RAISE_NS
    limits = memory.stepwise(seen.capacity_bytes, state.limits, wanted, may_rise)
    rises = any(limits[name] > state.limits.get(name, 0) for name in limits)
    return replace(state, limits=limits, trial=Trial(), raised_ns=now_ns if rises else state.raised_ns)


def _is_settled(state: GpuState, guaranteed: SharingJob) -> bool:
    """Whether it is known what the guaranteed job needs. It may have settled before the coordinator was there."""
    made = guaranteed.statistics.boundaries if guaranteed.statistics else 0
    return made > _SETTLED or len(state.pacing.history.recent) >= _SETTLED


def _share_memory(state: GpuState, seen: Measurements, demands: Mapping[str, int], now_ns: int) -> GpuState:
    """New limits where opportunistic jobs are alone: what they ask for and some more, or what trials have shown."""
    capacity_bytes = max(0, seen.capacity_bytes - seen.agentless_bytes)
    spare_bytes = capacity_bytes - sum(demands.values())
    if spare_bytes >= 0 or len(demands) == 1:
        each_bytes = spare_bytes // max(1, len(demands))
        limits = {name: demand_bytes + each_bytes for name, demand_bytes in demands.items()}
        return replace(state, limits=limits, trial=Trial(), raised_ns=now_ns)
    advanced = trial.advance(state.trial, capacity_bytes, demands, seen.opportunistic)
    return replace(state, limits=dict(advanced.tried), trial=advanced, raised_ns=now_ns)


def _watched(
    state: GpuState, seen: Measurements, decisions: dict[str, Decision], now_ns: int
) -> tuple[GpuState, dict[str, Decision]]:
    """Who has not kept to his orders, for how long."""
    lowered_ns, paused = dict[str, int](), dict[str, int | None]()
    record = seen.guaranteed.statistics if seen.guaranteed else None
    # Of memory, the guaranteed job. One that has not come to the GPU yet, as it imports or builds its model, is not:
    # who holds his weights then, and pauses, is taken away by the packer only if that lasts.
    is_short = record is not None and record.host_bytes > 0
    is_known = record is not None and seen.guaranteed is not None and _is_settled(state, seen.guaranteed)
    for job in seen.opportunistic:
        decision, made = decisions[job.name], job.statistics.boundaries if job.statistics else 0
        complaint = ""
        if job in memory.overdrawn([job], state.limits) and not seen.is_awaited:
            lowered_ns[job.name] = state.lowered_ns.get(job.name, now_ns)
            gives = _has_given_back(state, job)
            # Who has given back all that he can, and still keeps the guaranteed job short, will not do better later.
            patience_ns = _FINISH_NS if gives and is_known else _OBEY_NS
            # Where a process without an agent has the memory, the limit is low because of that one.
            is_culprit = is_short and not seen.is_hogged
            if now_ns - lowered_ns[job.name] > patience_ns and (is_culprit or not gives):
                complaint = f"it holds {job.held_bytes:,} bytes and may hold {state.limits[job.name]:,}"
        if decision.order.verdict == Verdict.PAUSE:
            before = state.paused.get(job.name)
            # What it makes before it has the order, or made under another coordinator, is not held against it.
            paused[job.name] = made if before is None and job.name in state.paused and job.statistics else before
            # One mini-batch may have been on its way.
            if before is not None and made > before + 1:
                complaint = "it goes on although it should pause"
        if complaint:
            decisions[job.name] = replace(decision, reason=f"{complaint}; {decision.reason}", is_disobedient=True)
    is_measured = state.pacing.phase is Phase.MEASURING
    before_ns = {name: state.finishing_ns[name] for name in decisions if is_measured and name in state.finishing_ns}
    return replace(state, lowered_ns=lowered_ns, finishing_ns={**lowered_ns, **before_ns}, paused=paused), decisions
