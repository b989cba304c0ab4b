"""What the dispatcher keeps of each data worker, loader, session and lease. Data only; `tables.py` has all of them."""

from __future__ import annotations

import bisect
import enum
import functools
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import msgspec

from hetstream.base.training_progress import TrainingProgress
from hetstream.mpi_dataworkers.dispatcher.standing import Standing
from hetstream.mpi_dataworkers.failures import StepFailures
from hetstream.mpi_dataworkers.rates import RecentRates
from hetstream.mpi_dataworkers.wire.messages import (
    Device,
    Failure,
    FeatureCut,
    Interpreter,
    LoaderStats,
    OptimizerCalls,
    Program,
    Ranges,
    RegisterLoader,
    SessionSpec,
    ShardOrder,
)

# More than a data worker has leases that are not yet reported; if it is fewer, a shard is read from its beginning.
_SNAPSHOTS_KEPT = 16


class LeaseStatus(enum.Enum):
    """Where a lease is."""

    ACTIVE = "ACTIVE"
    SENT = "SENT"


@dataclass
class Lease:
    """Steps [first, stop) of a session in the hands of a worker.

    Attributes:
        token: its fencing token; a later lease has a greater one.
        worker: peer id of the data worker, which may be gone.
        granted_at: when it was leased, s.
        status: whether the worker is still at it.
        sent_at: when the worker said that all was sent, s.
        shift: as in `GrantLease`.
        cached: the worker made them, or is making them, for another session too.
        begun_at: when the worker came to it, as far as its reports tell, s.
        trimmed: its end was taken away, so the time that it takes says nothing of the steps left.
    """

    token: int
    session_id: str
    worker: str
    first: int
    stop: int
    granted_at: float
    shift: int = 0
    cached: bool = False
    status: LeaseStatus = LeaseStatus.ACTIVE
    sent_at: float = 0.0
    begun_at: float = 0.0
    trimmed: bool = False


@dataclass
class WorkDone:
    """What a data worker process has done since it registered.

    Attributes:
        registered_at: when, s.
        steps, busy_s: steps of finished leases, and the time it took to make them.
        waited_s: of that time, and of the lease in work, what it waited for the stage before.
        leases_revoked: leases that were taken from it.
        recent: growth of `steps`, of `busy_s` without `waited_s`, and of `waited_s`.
    """

    registered_at: float
    recent: RecentRates
    steps: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    leases_revoked: int = 0


@dataclass
class Binding:
    """The program that a data worker process serves.

    Attributes:
        program: with all modules that it may have loaded.
        trainers: the processes that it has served, as in `RegisterLoader`; None when that is not known, because the
            dispatcher was restarted.
        granted: (pipeline id, trainer) of the leases that it had.
        streams: of each stream that sessions share, from which pipeline it makes that.
    """

    program: Program
    trainers: set[str] | None
    granted: set[tuple[str, str]] = field(default_factory=set)
    streams: dict[str, str] = field(default_factory=dict)


@dataclass
class WorkerRecord:
    """One data worker process.

    Attributes:
        number: its number in order of arrival, from 0.
        host, pid: where it runs.
        last_seen: time of its last message, s.
        work: what it has done.
        tokens: leases it holds in status ACTIVE.
        cached_tokens: those of them that it serves from its cache.
        unreachable: loaders it could not reach, with the time until which it is not tried again.
        step_s: smoothed time it needs for a step of each session, s.
        standings: how it does with each pipeline that it was given, by pipeline id.
        draining: it leaves after the step in work and gets no more leases.
        slurm_job: id of the Slurm job that it belongs to.
        slot: its place among its supervisor's processes; "" where nobody can fork it anew.
        binding: None until it has its first lease.
        renews: it leaves to be forked anew.
        interpreter: its Python.
        resident_bytes: of its memory; 0 while that is not known.
        device: what it makes steps with.
    """

    number: int
    host: str
    pid: int
    last_seen: float
    work: WorkDone
    tokens: set[int] = field(default_factory=set)
    cached_tokens: set[int] = field(default_factory=set)
    unreachable: dict[str, float] = field(default_factory=dict)
    step_s: dict[str, float] = field(default_factory=dict)
    standings: dict[str, Standing] = field(default_factory=dict)
    draining: bool = False
    slurm_job: str = ""
    slot: str = ""
    binding: Binding | None = None
    renews: bool = False
    interpreter: Interpreter = field(default_factory=Interpreter)
    resident_bytes: int = 0
    device: Device = "cpu"

    def standing(self, pipeline_id: str) -> Standing:
        """How it does with a pipeline."""
        standing = self.standings.get(pipeline_id)
        if standing is None:
            standing = self.standings[pipeline_id] = Standing()
        return standing

    def is_sound(self, pipeline_id: str) -> bool:
        """Whether it has made a step of the pipeline since it last failed one."""
        return pipeline_id in self.standings and self.standings[pipeline_id].is_sound

    @property
    def num_making(self) -> int:
        """Leases that cost it work: those it serves from its cache cost next to none."""
        return len(self.tokens) - len(self.cached_tokens)


@dataclass
class LoaderRecord:
    """One loader of one rank.

    Attributes:
        registration: what it said of itself.
        last_seen: time of its last message, s.
        stats: what it has delivered, as it said last.
        registered_at: when it first came, s.
        warned_alone: it was told that other ranks do not have it.
        warned_unshared: it was told that it shares with nobody.
        warned_unfit: it was told that all data workers run another Python.
        announced_workers: the number of data workers it was last told of.
        steady_since: it was never silent for longer than `LOADER_PAUSE_S` since then.
        recent: growth of steps, bytes and seconds waited of its `stats`.
        training: how far the program's training loop is, as it said last.
        optimizer: what it has counted of its optimizers' steps, likewise.
        features: where its feature graph is cut, likewise.
        served_by: data workers that had leases of it.
        awaited: slots of the data workers that are to end before the loader is told so, by peer id; None: it has not
            asked.
    """

    registration: RegisterLoader
    last_seen: float
    recent: RecentRates
    registered_at: float
    stats: LoaderStats = field(default_factory=LoaderStats)
    warned_alone: bool = False
    warned_unshared: bool = False
    warned_unfit: bool = False
    announced_workers: int = -1
    steady_since: float = 0.0
    training: TrainingProgress | None = None
    optimizer: OptimizerCalls | None = None
    features: FeatureCut | None = None
    served_by: set[str] = field(default_factory=set)
    awaited: dict[str, str] | None = None

    def go_on_from(self, known: LoaderRecord) -> None:
        """It was there before, as `known`: what it was told then it is not told again."""
        self.registered_at = known.registered_at
        self.warned_alone, self.warned_unshared = known.warned_alone, known.warned_unshared
        self.warned_unfit = known.warned_unfit
        self.served_by, self.awaited = known.served_by, known.awaited


@dataclass(frozen=True)
class UnexplainedLoss:
    """A step that was leased by itself, and lost with its data worker.

    Attributes:
        until: then it is a failure of the step, s.
        token: of the lease.
        peer: the data worker.
        failure: what to say of it.
    """

    until: float
    token: int
    peer: str
    failure: Failure


@dataclass
class Session:
    """One loader's reading of an epoch, or of a shard of it, and how far that is.

    Attributes:
        spec: what it reads.
        loader: peer id of the loader.
        num_steps: total, or -1 while unknown.
        known_steps: steps [0, known_steps) may be leased; all of them for a planned order.
        lists: indices of listed steps not yet consumed, by step.
        consumed: steps below it reached the training loop.
        received: ranges in the loader's buffer, ascending and not touching each other.
        window: steps at or above `consumed + window` are not leased yet.
        frontier: steps at or above it were never leased.
        requeued: steps below `frontier` that have to be leased again, ascending.
        tokens: its leases.
        sent: those of them that were sent and are not yet reported.
        step_s: smoothed time a worker needs for a step, 0 while unknown.
        shifts: (first step, shift) of the steps' places in a shared stream, ascending.
        holder: peer id of the data worker that has the leases of a session that is kept together.
        snapshots: where the reader of a shard was before some of its last steps, by step.
        lost: steps that the loader does without and has not passed: lost where steps are read at most once, given up.
        failures: of each step that was tried in vain; without data workers once it was made or given up.
        retries: steps below `frontier` that failed and have to be tried again, each in a lease of its own.
        losses: of steps that data workers held when they were lost, whose peer ids, but for losses that were explained.
        unexplained: of `retries` those that were leased by themselves when that happened, until it is explained.
    """

    spec: SessionSpec
    loader: str
    num_steps: int
    known_steps: int
    consumed: int
    received: Ranges
    window: int
    frontier: int
    lists: dict[int, bytes] = field(default_factory=dict)
    requeued: list[int] = field(default_factory=list)
    tokens: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    step_s: float = 0.0
    shifts: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    holder: str = ""
    lost: set[int] = field(default_factory=set)
    failures: dict[int, StepFailures] = field(default_factory=dict)
    retries: set[int] = field(default_factory=set)
    losses: dict[int, list[str]] = field(default_factory=dict)
    unexplained: dict[int, UnexplainedLoss] = field(default_factory=dict)
    snapshots: dict[int, bytes] = field(default_factory=dict)

    @property
    def reads_rounds(self) -> bool:
        """Whether all ranks read the shard, each its slice of rounds."""
        return isinstance(self.spec.order, ShardOrder) and self.spec.order.world_size > 0

    @functools.cached_property
    def shard(self) -> Hashable:
        """What it reads; the same for the sessions of all ranks that read one shard in rounds."""
        order, spec = self.spec.order, self.spec
        if not isinstance(order, ShardOrder) or not self.reads_rounds:
            return spec.session_id
        return spec.pipeline_id, spec.epoch, spec.seed, msgspec.structs.replace(order, rank=0)

    def shift(self, step: int) -> int:
        """How far the step's place in the shared stream is from the session's own numbering."""
        return self.shifts[bisect.bisect_right(self.shifts, step, key=lambda entry: entry[0]) - 1][1]

    def position(self, step: int) -> int:
        """Place of a step in the stream that the session shares."""
        assert self.spec.sharing is not None
        return self.spec.epoch * self.spec.sharing.num_steps + step + self.shift(step)

    def times_lost(self, step: int) -> int:
        """How often a step was lost with its data worker, and nobody said why."""
        return len(self.losses.get(step, ()))

    def next_step(self) -> int:
        """The step to lease next, if one is leasable."""
        return self.requeued[0] if self.requeued else self.frontier

    def has(self, step: int) -> bool:
        """Whether the loader has this step, or does without it."""
        return self.has_all(step, step + 1)

    def has_all(self, first: int, stop: int) -> bool:
        """Whether the loader has all steps of [first, stop), or does without them."""
        first = max(first, self.consumed)
        if self.num_steps >= 0:
            stop = min(stop, self.num_steps)
        if first >= stop:
            return True
        at = bisect.bisect_right(self.received, (first, math.inf)) - 1
        if at >= 0 and stop <= self.received[at][1]:
            return True
        if not self.lost:
            return False
        return all(step in self.lost or (stop - first > 1 and self.has(step)) for step in range(first, stop))

    def missing(self, steps: Iterable[int]) -> list[int]:
        """Those of the steps that the loader does not have."""
        return [step for step in steps if not self.has(step)]

    def keep_snapshot(self, step: int, snapshot: bytes) -> None:
        """Keep where the shard's reader was before a step."""
        if snapshot:
            self.snapshots[step] = snapshot
        if len(self.snapshots) > _SNAPSHOTS_KEPT:
            del self.snapshots[min(self.snapshots)]

    def snapshot_at(self, step: int) -> bytes:
        """The newest snapshot at or before a step."""
        return self.snapshots[max(before)] if (before := [at for at in self.snapshots if at <= step]) else b""

    def end_at(self, num_steps: int) -> None:
        """The session turned out to have so many steps."""
        self.num_steps = self.known_steps = num_steps
        self.requeued = self.missing(self.requeued)
        self.retries = set(self.missing(self.retries))

    def leasable(self) -> int:
        """How many steps may be leased now."""
        limit = min(self.consumed + self.window, self.known_steps)
        return len(self.requeued) + max(0, limit - self.frontier)

    def fill(self) -> float:
        """How full the loader's window is with steps that are there or on their way, 0 to 1."""
        return 1 - self.leasable() / max(1, self.window)
