"""What the dispatcher knows: who is there, what is read, and who has which steps. Data, and the indexes over it.

The modules that decide read and change it, `state.py` shows it; it decides nothing, and imports none of them.
"""

from __future__ import annotations

import bisect
import enum
import functools
import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import get_args

import msgspec

from hetstream.base.process import TrainingProgress
from hetstream.mpi_dataworkers.dispatcher.events import Event
from hetstream.mpi_dataworkers.order.rates import RecentRates
from hetstream.mpi_dataworkers.wire.failures import StepFailures
from hetstream.mpi_dataworkers.wire.messages import (
    Device,
    Failure,
    FeatureCut,
    Interpreter,
    LoaderStats,
    Message,
    OptimizerCalls,
    Program,
    ProvidePipeline,
    Ranges,
    RegisterLoader,
    SessionSpec,
    ShardOrder,
    SteerDataWorkers,
    Steered,
)

# How a data worker does with a pipeline: whether it makes its steps, or fails what others can make. Pure.
#
# Used by `leasing.py`. A data worker on a host where something is missing fails in an instant, and would get lease
# after lease. So one that fails what others then make, or cannot load a pipeline, gets no leases of it for a time that
# grows.

# The first pause, and the longest; each is twice as long as the one before.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
# Failures of this many steps that others made, with no step made in between: it is no accident.
_FAILURES_IN_A_ROW = 2


@dataclass
class WorkerBackoff:
    """How one data worker does with one pipeline.

    Attributes:
        is_sound: it has made a step since it last failed one.
        cannot_load: the last thing it said is that the pipeline cannot be used there.
        blamed: steps that it failed and another one made, since it made one itself.
        pauses: how often it was paused since then.
        paused_until: it gets no leases before, s.
    """

    is_sound: bool = False
    cannot_load: bool = False
    blamed: int = 0
    pauses: int = 0
    paused_until: float = 0.0

    def made_step(self) -> None:
        """It made a step: all is forgiven."""
        self.is_sound, self.cannot_load, self.blamed, self.pauses, self.paused_until = True, False, 0, 0, 0.0

    def failed_step(self, is_final: bool, now: float) -> float:
        """It failed a step, with `is_final` because it cannot use the pipeline.

        Returns:
            For how long it is paused now, s; 0 when it is not, or was already.
        """
        self.is_sound = False
        self.cannot_load = is_final
        return self._pause(now) if is_final else 0.0

    def made_by_another(self, now: float) -> float:
        """Note that another one made what it failed. Returns as `failed_step`."""
        self.blamed += 1
        return self._pause(now) if self.blamed >= _FAILURES_IN_A_ROW else 0.0

    def _pause(self, now: float) -> float:
        if now < self.paused_until:
            return 0.0
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.pauses, 16))
        self.pauses += 1
        self.paused_until = now + pause_s
        return pause_s


# What the dispatcher keeps of each data worker, loader, session and lease. Data only; `Tables` has all of them.

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
    standings: dict[str, WorkerBackoff] = field(default_factory=dict)
    draining: bool = False
    slurm_job: str = ""
    slot: str = ""
    binding: Binding | None = None
    renews: bool = False
    interpreter: Interpreter = field(default_factory=Interpreter)
    resident_bytes: int = 0
    device: Device = "cpu"

    def standing(self, pipeline_id: str) -> WorkerBackoff:
        """Return how it does with a pipeline."""
        standing = self.standings.get(pipeline_id)
        if standing is None:
            standing = self.standings[pipeline_id] = WorkerBackoff()
        return standing

    def is_sound(self, pipeline_id: str) -> bool:
        """Return whether it has made a step of the pipeline since it last failed one."""
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
        """Return how far the step's place in the shared stream is from the session's own numbering."""
        return self.shifts[bisect.bisect_right(self.shifts, step, key=lambda entry: entry[0]) - 1][1]

    def position(self, step: int) -> int:
        """Place of a step in the stream that the session shares."""
        assert self.spec.sharing is not None
        return self.spec.epoch * self.spec.sharing.num_steps + step + self.shift(step)

    def times_lost(self, step: int) -> int:
        """Return how often a step was lost with its data worker, and nobody said why."""
        return len(self.losses.get(step, ()))

    def next_step(self) -> int:
        """Return the step to lease next, if one is leasable."""
        return self.requeued[0] if self.requeued else self.frontier

    def has(self, step: int) -> bool:
        """Return whether the loader has this step, or does without it."""
        return self.has_all(step, step + 1)

    def has_all(self, first: int, stop: int) -> bool:
        """Return whether the loader has all steps of [first, stop), or does without them."""
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
        """Return those of the steps that the loader does not have."""
        return [step for step in steps if not self.has(step)]

    def keep_snapshot(self, step: int, snapshot: bytes) -> None:
        """Keep where the shard's reader was before a step."""
        if snapshot:
            self.snapshots[step] = snapshot
        if len(self.snapshots) > _SNAPSHOTS_KEPT:
            del self.snapshots[min(self.snapshots)]

    def snapshot_at(self, step: int) -> bytes:
        """Return the newest snapshot at or before a step."""
        return self.snapshots[max(before)] if (before := [at for at in self.snapshots if at <= step]) else b""

    def end_at(self, num_steps: int) -> None:
        """Note how many steps the session turned out to have."""
        self.num_steps = self.known_steps = num_steps
        self.requeued = self.missing(self.requeued)
        self.retries = set(self.missing(self.retries))

    def leasable(self) -> int:
        """Return how many steps may be leased now."""
        limit = min(self.consumed + self.window, self.known_steps)
        return len(self.requeued) + max(0, limit - self.frontier)

    def fill(self) -> float:
        """Return how full the loader's window is with steps that are there or on their way, 0 to 1."""
        return 1 - self.leasable() / max(1, self.window)


# Times and numbers by which the dispatcher decides. How often its peers report is in `wire/messages.py`.

# A worker is lost when it was silent this long and has no work. One that works may hold the GIL: while its connection
# is alive, its sample has the time that the program gives a sample.
WORKER_TIMEOUT_S = 4.0
# A trainer may hold the GIL in a long call; taking it for dead only pauses its prefetch, it registers again by itself.
LOADER_TIMEOUT_S = 15.0
# A sent lease that the loader does not report within this time went to a broken connection.
ARRIVAL_TIMEOUT_S = 5.0
# A loader silent for longer is held up (the GIL in a long call): its reports are late, not its batches.
LOADER_PAUSE_S = ARRIVAL_TIMEOUT_S / 2
# A worker that could not reach a loader is not sent there again for this long.
UNREACHABLE_S = 10.0
# A loader that divides its data, and that another rank has not made by then, is told.
LONELY_AFTER_S = 60.0
# One whose program runs another Python than the data workers is told; they may be about to start in its own.
UNFIT_AFTER_S = 5.0
# After a restart, wait at most this long for the workers of before to tell what they hold, so that the same steps are
# not leased to others. They register as soon as their connection is back; who is later loses only what it held.
RECOVERY_GRACE_S = 0.7

# One lease in work and one waiting: the worker never idles for a round trip.
LEASES_PER_WORKER = 2
# Long enough that control costs nothing, short enough that the tail of a window is shared among workers.
TARGET_LEASE_S = 0.02
MAX_LEASE_STEPS = 128
# A steal has to bring the end of the stolen lease forward by this much; what a worker does next is looked at as often.
STEAL_GAIN_S = TARGET_LEASE_S


# What the dispatcher decides to do: instructions that `state.py` returns and `server.py` carries out. Data only.


@dataclass(frozen=True)
class Send:
    """Instruction: send a message to a peer."""

    peer: str
    message: Message


@dataclass(frozen=True)
class RememberPipeline:
    """Instruction: journal a pickled pipeline before anything that follows in the same batch of instructions."""

    pipeline: ProvidePipeline


@dataclass(frozen=True)
class RememberStats:
    """Instruction: journal what a loader has delivered."""

    loader: RegisterLoader
    stats: LoaderStats


@dataclass(frozen=True)
class ForgetPipeline:
    """Instruction: take a pipeline that no loader uses out of the journal."""

    pipeline_id: str


@dataclass(frozen=True)
class RememberWorker:
    """Instruction: journal that a data worker is registered, before anything that is leased to it."""

    peer: str


@dataclass(frozen=True)
class ForgetWorker:
    """Instruction: take a data worker that is lost out of the journal."""

    peer: str


@dataclass(frozen=True)
class ReportEvent:
    """Instruction: report an event, in the process's log and in `events.jsonl`."""

    event: Event


Instruction = Send | ReportEvent | RememberPipeline | ForgetPipeline | RememberStats | RememberWorker | ForgetWorker


# Decisions of the elastic controller that `Status` shows; the event log has all.
_DECISIONS_SHOWN = 5
# Events that are shown when an invariant does not hold.
_STORY_LENGTH = 512
_NO_PROGRAM = Program("", [])


class Tables:
    """All that the dispatcher knows, but for streams that sessions share and when it last looked for idle workers.

    Args:
        incarnation: number of this start of the dispatcher, from 1.
        now: time of the start, s, on the clock of all later calls.
        expected: as the attribute.

    Attributes:
        incarnation: number of this start of the dispatcher, from 1.
        token_base: every fencing token of this start is above it: the incarnation is its high half, so that tokens grow
            across restarts without journaling each one.
        started_at: time of this start, s.
        grant_from: nothing is leased before this time, s.
        expected: peer ids of the data workers that were registered when the last dispatcher ended and are not back.
            Nothing is leased until it is empty, or `RECOVERY_GRACE_S` has passed.

        workers: the data worker processes that are there, by peer id.
        loaders: the loaders that are there, by peer id.
        sessions: the open sessions, by session id; the loader of each is in `loaders`.
        leases: leases that are ACTIVE or SENT, by fencing token. An ACTIVE one's token is in its worker's `tokens`.
        pipelines: pipelines that a loader or a session uses, as they came, by pipeline id.
        waiting_for_pipeline: peer ids of the data workers that asked for a pipeline which is not here, by its id.

        free: workers that may get a lease, in the order in which they came free; `free[n]` has those with n leases that
            cost work. `note_load` keeps it.
        slots: peer ids of the workers in each slot, by slot; none is empty.
        asked_at: when a process was asked for in a slot, by slot, s; the slot counts as a data worker until it comes.
        rooms_changed: something has changed which may leave a program without a process: see `placement.py`.
        is_mixed: processes and data workers are two things now: several programs are there, or one makes room.

        slot_bytes: resident memory of the last process of a slot, for the fresh one that takes its place.
        workers_seen: data worker processes that registered since this start.
        used_slots: places of processes in which a step was made, whichever process came after the other there.
        workers_renewed: those of them that have left for a fresh one in their slot.
        workers_replaced: of them, those that came in the place of one that had died.
        workers_lost: of them, those that went without a word.
        leases_granted, leases_revoked: since this start.
        recent: growth of `leases_granted`.
        elastic: what each elastic controller said last of itself.
        decisions: their last ones, with their times, s.
        story: the last events, for `validate`; each was also returned as an instruction.
    """

    def __init__(self, incarnation: int, now: float, expected: Collection[str] = ()) -> None:
        self.incarnation = incarnation
        self.token_base = incarnation << 32
        self.started_at = now
        self.grant_from = now + (RECOVERY_GRACE_S if expected else 0.0)
        self.expected = set(expected)

        self.workers: dict[str, WorkerRecord] = {}
        self.loaders: dict[str, LoaderRecord] = {}
        self.sessions: dict[str, Session] = {}
        self.leases: dict[int, Lease] = {}
        self.pipelines: dict[str, ProvidePipeline] = {}
        self.waiting_for_pipeline: dict[str, set[str]] = {}

        self.free: list[dict[str, None]] = [{} for _ in range(LEASES_PER_WORKER)]
        self.slots: dict[str, set[str]] = {}
        self.asked_at: dict[str, float] = {}
        self.slot_bytes: dict[str, int] = {}
        self.rooms_changed = False
        self.is_mixed = False

        self.workers_seen = 0
        self.used_slots: set[str] = set()
        self.workers_renewed = 0
        self.workers_replaced = 0
        self.workers_lost = 0
        self.leases_granted = 0
        self.leases_revoked = 0
        self.recent = RecentRates(now, 0)
        self.elastic: dict[Steered, str] = dict.fromkeys(get_args(Steered), "")
        self.decisions: deque[tuple[float, SteerDataWorkers]] = deque(maxlen=_DECISIONS_SHOWN)
        self.story: deque[Event] = deque(maxlen=_STORY_LENGTH)

    def tell(self, event: Event) -> list[Instruction]:
        """Write an event into the story, and return the instruction to report it."""
        self.story.append(event)
        return [ReportEvent(event)]

    def note_load(self, peer: str) -> None:
        """File a worker under the number of its leases, after each change of it: who leases looks at no busy one."""
        worker = self.workers.get(peer)
        load = LEASES_PER_WORKER if worker is None or worker.draining else worker.num_making
        for index, free in enumerate(self.free):
            if index == load:
                free[peer] = None
            else:
                free.pop(peer, None)

    def forget(self, lease: Lease) -> None:
        """Take a lease out of the tables."""
        del self.leases[lease.token]
        worker = self.workers.get(lease.worker)
        if worker is not None and lease.token in worker.tokens:
            worker.tokens.discard(lease.token)
            worker.cached_tokens.discard(lease.token)
            self.note_load(lease.worker)
        session = self.sessions.get(lease.session_id)
        if session is not None:
            session.tokens.discard(lease.token)
            session.sent.discard(lease.token)

    def program_of(self, pipeline_id: str) -> Program:
        """Return the program that a pipeline comes from; one without a directory while the pipeline is not here."""
        pipeline = self.pipelines.get(pipeline_id)
        return pipeline.program if pipeline is not None else _NO_PROGRAM

    def trainer_of(self, session: Session) -> str:
        """Return the process that reads a session, as in `RegisterLoader`."""
        return self.loaders[session.loader].registration.trainer

    def validate(self) -> None:
        """Check the invariants; tests call it after every event.

        Raises:
            AssertionError: with the story, when one does not hold.
        """
        story = "\n".join(event.render() for event in self.story)
        for load, free in enumerate(self.free):
            loads = {p for p, worker in self.workers.items() if worker.num_making == load and not worker.draining}
            assert set(free) == loads, f"workers with {load} leases are filed wrongly\n{story}"
        for token, lease in self.leases.items():
            active = lease.worker in self.workers and token in self.workers[lease.worker].tokens
            assert active == (lease.status is LeaseStatus.ACTIVE), f"lease {token} and its worker disagree\n{story}"
        for session in self.sessions.values():
            leased = [s for t in session.tokens for s in range(self.leases[t].first, self.leases[t].stop)]
            assert session.requeued == sorted(set(session.requeued)), f"requeued steps out of order\n{story}"
            assert not set(leased) & set(session.requeued), f"a step is leased and requeued\n{story}"
            assert not session.retries & {*leased, *session.requeued}, f"a step to be tried again is leased\n{story}"
            covered = {*leased, *session.requeued, *session.retries}
            lost = [s for s in session.missing(range(session.consumed, session.frontier)) if s not in covered]
            assert not lost, f"steps {lost} are neither there nor leased nor requeued\n{story}"
