"""What the jobs of one GPU are to do now: state and measurements in, orders with their reasons out. Pure.

In doubt opportunistic jobs pause: when the guaranteed job has no agent, says nothing, or says what cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from hetstream.hetjob.gpu.orders import FULL_SHARE, NO_LIMIT, GpuUse, JobClass, Order, Statistics
from hetstream.slurm_plugin.coordinator import pacing
from hetstream.slurm_plugin.coordinator.pacing import Pacing, Phase, measured_anew

# What the coordinator knows of one GPU and its jobs at one moment. Pure.


@dataclass(frozen=True)
class SharingJob:
    """One process on the GPU.

    Attributes:
        name: of the process among those on the GPU.
        job_class: what it was admitted as; never what its statistics say.
        since_ns: when it was admitted.
        statistics: what it said last; None: nothing yet, or nothing whole.
        measured_bytes: memory of the GPU that it holds by the GPU's own count; None where nobody counts.
        gang: text that the processes have in common which train together, on this GPU and on others; empty: it has no
            other process.
        meet_at: boundary at which these wait for each other if one of them is held up; 0: there is only this one.
    """

    name: str
    job_class: JobClass
    since_ns: int
    statistics: Statistics | None = None
    measured_bytes: int | None = None
    gang: str = ""
    meet_at: int = 0

    @property
    def held_bytes(self) -> int:
        """Memory of the GPU that it holds: the larger of the GPU's count and its own."""
        said_bytes = self.statistics.held_bytes if self.statistics else 0
        return max(said_bytes, self.measured_bytes or 0)


@dataclass(frozen=True)
class Measurements:
    """One GPU.

    Attributes:
        capacity_bytes: memory that its jobs may hold together.
        jobs: those with an agent.
        is_reserved: a guaranteed job has the GPU, with or without an agent.
        is_lost: the GPU answers no more.
        is_awaited: the guaranteed job was there before the coordinator, and its agent has not come back.
        agentless_bytes: of its memory that processes without an agent hold.
        is_hogged: an opportunistic job has some of that.
    """

    capacity_bytes: int
    jobs: tuple[SharingJob, ...] = ()
    is_reserved: bool = False
    is_lost: bool = False
    is_awaited: bool = False
    agentless_bytes: int = 0
    is_hogged: bool = False

    @property
    def guaranteed(self) -> SharingJob | None:
        """The job that has the GPU. Several processes of it count as one, which has the name of the one that trains."""
        return _as_one(self.all_guaranteed)

    @property
    def all_guaranteed(self) -> tuple[SharingJob, ...]:
        """Its processes."""
        return tuple(job for job in self.jobs if job.job_class is JobClass.GUARANTEED)

    @property
    def opportunistic(self) -> tuple[SharingJob, ...]:
        """The others."""
        return tuple(job for job in self.jobs if job.job_class is JobClass.OPPORTUNISTIC)


def _as_one(jobs: tuple[SharingJob, ...]) -> SharingJob | None:
    """Several processes of a guaranteed job on one GPU: it is idle while all are, and their memory adds up.

    The pace is that of the first one that makes mini-batches. If one has said nothing, nothing is known.
    """
    if len(jobs) < 2:
        return jobs[0] if jobs else None
    records = [job.statistics for job in jobs if job.statistics]
    first = next((job for job in jobs if job.statistics and job.statistics.boundaries), jobs[0])
    measured = [job.measured_bytes for job in jobs if job.measured_bytes is not None]
    whole = replace(first, measured_bytes=sum(measured) if measured else None)
    if len(records) < len(jobs) or first.statistics is None:
        return replace(whole, statistics=None)
    busy = [record.updated_ns for record in records if not record.is_idle]
    return replace(
        whole,
        statistics=replace(
            first.statistics,
            updated_ns=min(busy, default=first.statistics.updated_ns),
            boundary_ns=max(record.boundary_ns for record in records),
            is_idle=int(not busy),
            held_bytes=sum(record.held_bytes for record in records),
            peak_bytes=sum(record.peak_bytes for record in records),
            host_bytes=sum(record.host_bytes for record in records),
        ),
    )


# How much of a GPU's memory each opportunistic job may hold. Pure.
#
# The guaranteed job has no limit. What it had at its peak, and some more, is kept free for it: when it takes more, some
# of its tensors are on the host for one mini-batch, the others' limits fall at once, and rise again in steps.

# A process's context and its libraries have at most so much, and of a small GPU no more than this part.
_CONTEXT_BYTES, _CONTEXT_PART = 2**30, 8
# A job's own count of its memory is of its allocator alone. It may be so far below the GPU's, or as much as a context.
_UNCOUNTED = 0.05


def context_bytes(capacity_bytes: int) -> int:
    """Return what a process holds on such a GPU at most before it has a tensor there."""
    return min(_CONTEXT_BYTES, capacity_bytes // _CONTEXT_PART)


def uncounted_bytes(capacity_bytes: int) -> int:
    """Return how much more than it says a job may hold by the GPU's count."""
    return max(int(_UNCOUNTED * capacity_bytes), context_bytes(capacity_bytes))


# Kept free beside the guaranteed job's peak, as a part of the GPU's memory.
_HEADROOM = 0.05
_RAISE = 0.1
# Limits that change all the time would have allocators give back and take again all the time.
_LEAST_RAISE = 0.02


def left_bytes(capacity_bytes: int, peak_bytes: int) -> int:
    """Return what a guaranteed job with such a peak leaves."""
    return max(0, capacity_bytes - peak_bytes - int(_HEADROOM * capacity_bytes))


def demand_bytes(job: SharingJob, capacity_bytes: int) -> int:
    """Return what a job would use of the GPU if there were no limit; all of it, as long as it has shown nothing."""
    record = job.statistics
    if record is None or record.boundaries == 0:
        return capacity_bytes
    return min(capacity_bytes, record.peak_bytes + int(_HEADROOM * capacity_bytes))


def kept_bytes(job: SharingJob, capacity_bytes: int) -> int:
    """Return the limit that a job keeps to, whoever has told it that; nothing, as long as it has not said so."""
    return min(capacity_bytes, job.statistics.limit_bytes) if job.statistics else 0


def divided_memory(available_bytes: int, demands_bytes: Mapping[str, int]) -> dict[str, int]:
    """Equal parts, of which nobody has more than he asks for; what is over goes to the others."""
    limits: dict[str, int] = {}
    left = available_bytes
    for number, name in enumerate(sorted(demands_bytes, key=lambda name: (demands_bytes[name], name))):
        limits[name] = min(demands_bytes[name], left // (len(demands_bytes) - number))
        left -= limits[name]
    return limits


def stepwise_limits(
    capacity_bytes: int, before: Mapping[str, int], wanted: Mapping[str, int], may_rise: bool
) -> dict[str, int]:
    """Return the way to new limits: down at once, up by a tenth of the GPU at a time, and never by little.

    Args:
        capacity_bytes: of the GPU.
        before: limits as they are; who has none begins with 0.
        wanted: limits as they should be.
        may_rise: whether it is time for a step upwards.
    """
    limits = {}
    for name, want_bytes in wanted.items():
        old_bytes = before.get(name, 0)
        if want_bytes <= old_bytes:
            limits[name] = want_bytes
        elif may_rise and want_bytes - old_bytes >= _LEAST_RAISE * capacity_bytes:
            limits[name] = min(want_bytes, old_bytes + int(_RAISE * capacity_bytes))
        else:
            limits[name] = old_bytes
    return limits


def is_overdrawn(job: SharingJob, limit_bytes: int, capacity_bytes: int) -> bool:
    """Return whether a job holds more than it may, by its own count or by the GPU's."""
    said_bytes = job.statistics.held_bytes if job.statistics else 0
    return said_bytes > limit_bytes or (job.measured_bytes or 0) > limit_bytes + uncounted_bytes(capacity_bytes)


# Opportunistic jobs that are alone on a GPU divide its memory by trial: for the best total speed. Pure.
#
# Some jobs hardly notice that half of their tensors are on the host, others become several times slower. Which is which
# shows only when it is tried: a part of the memory is moved from one job to another, and stays there if the sum of the
# jobs' speeds, each against the best that it has shown, is larger than before.

_MOVED = 0.1
# A new division is judged by mini-batches that were begun and ended under it.
_BATCHES = 4
_GAIN = 0.02


@dataclass(frozen=True)
class MemoryTrial:
    """Where the search is.

    Attributes:
        best: limits that have done best so far, in bytes.
        best_ns: how long the jobs' mini-batches took under them; empty: not measured.
        tried: limits that are being tried.
        moves: pairs of jobs, from which to which memory is moved, that are still to be tried.
        counts: mini-batches that each job had made when the trial began.
        fastest_ns: shortest mini-batch of each job so far.
    """

    best: Mapping[str, int] = field(default_factory=dict)
    best_ns: Mapping[str, int] = field(default_factory=dict)
    tried: Mapping[str, int] = field(default_factory=dict)
    moves: tuple[tuple[str, str], ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    fastest_ns: Mapping[str, int] = field(default_factory=dict)


def advance_trial(
    trial: MemoryTrial, capacity_bytes: int, demands: Mapping[str, int], jobs: tuple[SharingJob, ...]
) -> MemoryTrial:
    """Return the next state: begun anew when other jobs are there, and one move further when the last one can be
    judged.
    """
    names = {job.name for job in jobs}
    if set(trial.tried) != names:
        limits = divided_memory(capacity_bytes, demands)
        moves = tuple((giver, getter) for giver in sorted(names) for getter in sorted(names) if giver != getter)
        return MemoryTrial(limits, {}, limits, moves, _counts(jobs))
    durations = {job.name: job.statistics.mini_batch_ns for job in jobs if job.statistics}
    made = {name: count - trial.counts.get(name, 0) for name, count in _counts(jobs).items()}
    if len(durations) < len(names) or min(made.values()) < _BATCHES or min(durations.values()) <= 0:
        return trial
    fastest_ns = {name: min(ns, trial.fastest_ns.get(name, ns)) for name, ns in durations.items()}
    if not trial.best_ns or _speed(durations, fastest_ns) > _speed(trial.best_ns, fastest_ns) * (1 + _GAIN):
        # What has helped is done again, as long as it helps.
        trial = replace(trial, best=trial.tried, best_ns=durations)
    else:
        trial = replace(trial, moves=trial.moves[1:])
    tried = _moved(trial.best, trial.moves[0], capacity_bytes) if trial.moves else dict(trial.best)
    return replace(trial, tried=tried, counts=_counts(jobs), fastest_ns=fastest_ns)


def _speed(durations: Mapping[str, int], fastest_ns: Mapping[str, int]) -> float:
    """Sum of the jobs' speeds, each against its best."""
    return sum(fastest_ns[name] / duration_ns for name, duration_ns in durations.items())


def _moved(limits: Mapping[str, int], move: tuple[str, str], capacity_bytes: int) -> dict[str, int]:
    giver, getter = move
    amount = min(limits[giver], int(_MOVED * capacity_bytes))
    return {**limits, giver: limits[giver] - amount, getter: limits[getter] + amount}


def _counts(jobs: tuple[SharingJob, ...]) -> dict[str, int]:
    return {job.name: job.statistics.boundaries if job.statistics else 0 for job in jobs}


# An order that is not renewed lapses after this. The coordinator renews it several times in that time.
VALID_NS = 150_000_000
_RAISE_NS = 100_000_000
# Time that a job above its limit has to reach a boundary before it is stopped where it is.
_FINISH_NS = 2_000_000_000
# ... and time before it is reported.
_OBEY_NS = 10_000_000_000
# Mini-batches until which a guaranteed job may take all memory: what it needs is not known before.
_SETTLED = 3
# Time in which the GPU's count of a job may be above its own: the two are not of the same moment.
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
    trial: MemoryTrial = field(default_factory=MemoryTrial)
    limits: Mapping[str, int] = field(default_factory=dict)
    raised_ns: int = 0
    lowered_ns: Mapping[str, int] = field(default_factory=dict)
    finishing_ns: Mapping[str, int] = field(default_factory=dict)
    paused: Mapping[str, int | None] = field(default_factory=dict)
    understated_ns: Mapping[str, int] = field(default_factory=dict)
    alone_ns: Mapping[str, int] = field(default_factory=dict)
    measuring_ns: int = 0


@dataclass(frozen=True)
class OrderDecision:
    """What one job is to do, and why.

    Attributes:
        order: for its page.
        reason: for people.
        is_disobedient: it does not keep to its orders, so Slurm should take it away.
    """

    order: Order
    reason: str
    is_disobedient: bool = False


def decide(state: GpuState, seen: Measurements, now_ns: int) -> tuple[GpuState, dict[str, OrderDecision]]:
    """Return what all jobs of a GPU are to do, if none of them has processes on other GPUs (see `decide_all`).

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


def orders(state: GpuState, seen: Measurements, now_ns: int) -> tuple[GpuState, dict[str, OrderDecision]]:
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
        run = Order(valid_until_ns, GpuUse.RUN, share=FULL_SHARE)
        decisions[job.name] = OrderDecision(run, f"guaranteed; {state.pacing.reason}")
    for job in seen.opportunistic:
        order, reason = _order_for(state, seen, job, now_ns)
        order = replace(order, valid_until_ns=valid_until_ns, limit_bytes=state.limits[job.name])
        decisions[job.name] = OrderDecision(order, reason)
    return _watched(state, seen, decisions, now_ns)


def believed(job: SharingJob, now_ns: int) -> SharingJob:
    """Return the job without statistics that cannot be: what is in the future, below nothing, or beyond all bounds."""
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
    beyond_bytes = uncounted_bytes(seen.capacity_bytes)
    return {
        job.name: state.understated_ns.get(job.name, now_ns)
        for job in seen.opportunistic
        if job.statistics and (job.measured_bytes or 0) > job.statistics.held_bytes + beyond_bytes
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
        return Order(verdict=GpuUse.RUN, share=FULL_SHARE), "no guaranteed job is there"
    return _order_beside(state, seen.guaranteed.statistics, job, now_ns)


def _order_beside(state: GpuState, record: Statistics | None, job: SharingJob, now_ns: int) -> tuple[Order, str]:
    """The same beside a guaranteed job."""
    if record is None:
        return Order(), "the guaranteed job says nothing that can be: paused"
    if _is_giving_back(state, job, now_ns):
        return Order(verdict=GpuUse.FINISH, meet_at=job.meet_at), "it is to give memory back at its next boundary"
    needed_bytes = job.statistics.peak_bytes if job.statistics and not job.statistics.host_capacity_bytes else 0
    if needed_bytes > state.limits[job.name]:
        return Order(), f"{needed_bytes:,} bytes that it needs are not free, and nothing can stand in: paused"
    open_until_ns = pacing.open_until_ns(state.pacing, record, now_ns)
    if _is_leaving(state, job, now_ns):  # others of its processes wait for it; no faster than before
        before = replace(state.pacing, phase=Phase.SHARING)
        order = Order(
            verdict=GpuUse.RUN, share=pacing.share_now(before, record), meet_at=job.meet_at,
            open_until_ns=pacing.open_until_ns(before, record, now_ns), idle_since_ns=record.boundary_ns,
        )  # fmt: skip
        return order, f"{state.pacing.reason}: it goes on to the boundary at which its processes meet"
    if state.pacing.phase is Phase.MEASURING:
        verdict = GpuUse.RUN if open_until_ns else GpuUse.PAUSE
        order = Order(verdict=verdict, open_until_ns=open_until_ns, idle_since_ns=record.boundary_ns)
        return order, f"{state.pacing.reason}: paused while it is measured"
    if pacing.is_silent(state.pacing, record, now_ns):
        return Order(), "the guaranteed job has been at one mini-batch for long: paused"
    order = Order(
        verdict=GpuUse.RUN,
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
    demands = {job.name: demand_bytes(job, seen.capacity_bytes) for job in jobs}
    if seen.guaranteed is None and not seen.is_reserved:
        return _share_memory(state, seen, demands, now_ns)
    if seen.is_awaited:  # the coordinator before has told them what the guaranteed job leaves
        kept = {job.name: kept_bytes(job, seen.capacity_bytes) for job in jobs}
        return replace(state, limits=kept, trial=MemoryTrial(), raised_ns=now_ns)
    available = 0
    if seen.guaranteed and _is_settled(state, seen.guaranteed):
        record = seen.guaranteed.statistics or Statistics()
        peak_bytes = max(record.peak_bytes, state.pacing.history.peak_bytes)
        available = left_bytes(seen.capacity_bytes, peak_bytes + seen.agentless_bytes)
    wanted = divided_memory(available, demands)
    may_rise = now_ns - state.raised_ns >= _RAISE_NS
    limits = stepwise_limits(seen.capacity_bytes, state.limits, wanted, may_rise)
    rises = any(limits[name] > state.limits.get(name, 0) for name in limits)
    return replace(state, limits=limits, trial=MemoryTrial(), raised_ns=now_ns if rises else state.raised_ns)


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
        return replace(state, limits=limits, trial=MemoryTrial(), raised_ns=now_ns)
    advanced = advance_trial(state.trial, capacity_bytes, demands, seen.opportunistic)
    return replace(state, limits=dict(advanced.tried), trial=advanced, raised_ns=now_ns)


def _watched(
    state: GpuState, seen: Measurements, decisions: dict[str, OrderDecision], now_ns: int
) -> tuple[GpuState, dict[str, OrderDecision]]:
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
        is_over = is_overdrawn(job, state.limits.get(job.name, 0), seen.capacity_bytes)
        if is_over and not seen.is_awaited:
            lowered_ns[job.name] = state.lowered_ns.get(job.name, now_ns)
            gives = _has_given_back(state, job)
            # Who has given back all that he can, and still keeps the guaranteed job short, will not do better later.
            patience_ns = _FINISH_NS if gives and is_known else _OBEY_NS
            # Where a process without an agent has the memory, the limit is low because of that one.
            is_culprit = is_short and not seen.is_hogged
            if now_ns - lowered_ns[job.name] > patience_ns and (is_culprit or not gives):
                complaint = f"it holds {job.held_bytes:,} bytes and may hold {state.limits[job.name]:,}"
        if decision.order.verdict == GpuUse.PAUSE:
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


# What the processes of one job on several GPUs have in common: states and measurements in, orders out. Pure.
#
# Such processes train together: each of their mini-batches has a collective operation in which they wait for each
# other. So one that is held up holds up all, and what it does to a GPU is felt on the others:
#
# * *Opportunistic.* Each process uses its own GPU's gaps. When one may begin no mini-batch, none begins another one
#   than the furthest has begun: they meet at that boundary, where each has given memory back and nobody waits in a
#   collective operation, which would keep a GPU busy. Who is behind goes on until there.
# * *Guaranteed.* Its pace alone is measured on all of its GPUs at once: others on one of them would make it look slow
#   on all.

Decisions = dict[str, dict[str, OrderDecision]]


def decide_all(
    states: Mapping[str, GpuState], seen: Mapping[str, Measurements], now_ns: int
) -> tuple[dict[str, GpuState], Decisions]:
    """Return what all jobs of a node's GPUs are to do.

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


def _may_begin(decision: OrderDecision) -> bool:
    return decision.order.verdict == GpuUse.RUN and not decision.order.meet_at


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
