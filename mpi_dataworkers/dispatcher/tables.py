"""What the dispatcher knows: who is there, what is read, and who has which steps. Data, and the indexes over it.

The modules that decide read and change it, `status.py` shows it; it decides nothing, and imports none of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from hetstream.mpi_dataworkers.dispatcher.events import Event
from hetstream.mpi_dataworkers.dispatcher.instructions import Instruction, ReportEvent
from hetstream.mpi_dataworkers.dispatcher.limits import LEASES_PER_WORKER, RECOVERY_GRACE_S
from hetstream.mpi_dataworkers.dispatcher.records import Lease, LeaseStatus, LoaderRecord, Session, WorkerRecord
from hetstream.mpi_dataworkers.rates import RecentRates
from hetstream.mpi_dataworkers.wire.messages import Device, Program, ProvidePipeline, SteerDataWorkers

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
        rooms_changed: something has changed which may leave a program without a process: see `rooms.py`.
        is_mixed: processes and data workers are two things now: several programs are there, or one makes room.

        slot_bytes: resident memory of the last process of a slot, for the fresh one that takes its place.
        workers_seen: data worker processes that registered since this start.
        workers_renewed: those of them that have left for a fresh one in their slot.
        workers_replaced: of them, those that came in the place of one that had died.
        workers_lost: of them, those that went without a word.
        leases_granted, leases_revoked: since this start.
        recent: growth of `leases_granted`.
        elastic: what the elastic controller of each stage said last of itself.
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
        self.workers_renewed = 0
        self.workers_replaced = 0
        self.workers_lost = 0
        self.leases_granted = 0
        self.leases_revoked = 0
        self.recent = RecentRates(now, 0)
        self.elastic: dict[Device, str] = {"cpu": "", "gpu": ""}
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
        """The program that a pipeline comes from; one without a directory while the pipeline is not here."""
        pipeline = self.pipelines.get(pipeline_id)
        return pipeline.program if pipeline is not None else _NO_PROGRAM

    def trainer_of(self, session: Session) -> str:
        """The process that reads a session, as in `RegisterLoader`."""
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
