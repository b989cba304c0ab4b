"""Which data workers can make the steps of a session, and which of them are to. Pure.

A data worker process runs one program only, in a Python that is the program's, and has to reach the loader. Of those
that can, one that fails what others make is given no steps of that pipeline for a while.
"""

from __future__ import annotations

from collections.abc import Collection

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.sharing import SharedStreams
from hetstream.mpi_dataworkers.dispatcher.tables import (
    UNREACHABLE_S,
    Binding,
    Instruction,
    Lease,
    Send,
    Session,
    Tables,
    WorkerRecord,
)
from hetstream.mpi_dataworkers.process.programs import joined, serves, why_unfit
from hetstream.mpi_dataworkers.wire.messages import AddProcess, DrainWorker, Membership, ProcessesEnded, RenewWorker

# A worker that failed this many steps, of which nobody knows yet whether others can make them, waits for that.
_MAX_UNEXPLAINED = 2


class WorkerPlacement:
    """Answers who can make what, from the tables.

    Attributes:
        _tables: what is known.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def able(self, session: Session, now: float) -> dict[str, str]:
        """Hosts of the data workers that can be given steps of the session, now or when they come free, by peer id."""
        return {
            peer: worker.host
            for peer, worker in self._tables.workers.items()
            if not worker.draining and self.can_make(worker, session, now)
        }

    def is_fit(self, peer: str, session: Session, now: float) -> bool:
        """Return whether nothing is known against a data worker: it is not paused, and few of its failures are
        unexplained.
        """
        standing = self._tables.workers[peer].standings.get(session.spec.pipeline_id)
        if standing is None or standing.is_sound:
            return True
        unexplained = sum(peer in failures.workers for failures in session.failures.values())
        return now >= standing.paused_until and unexplained < _MAX_UNEXPLAINED

    def may_try(self, peer: str, session: Session, now: float) -> bool:
        """Return whether a data worker is to be given steps of the session: where none is fit, who is there has
        to try.
        """
        if not self.can_make(self._tables.workers[peer], session, now):
            return False
        return self.is_fit(peer, session, now) or not any(
            self.is_fit(other, session, now) for other in self.able(session, now)
        )

    def not_known_to_fail(self, able: dict[str, str], pipeline_id: str) -> dict[str, str]:
        """Return those of the data workers that use the pipeline, or on whose hosts none has said that it cannot."""
        standings = {peer: self._tables.workers[peer].standings.get(pipeline_id) for peer in able}
        failed = {able[peer] for peer, its in standings.items() if its is not None and its.cannot_load}
        sound = {peer for peer, its in standings.items() if its is not None and its.is_sound}
        return {peer: host for peer, host in able.items() if peer in sound or host not in failed}

    def can_make(self, worker: WorkerRecord, session: Session, now: float) -> bool:
        """Return whether a data worker reaches the session's loader, and may run its program."""
        reaches = worker.unreachable.get(session.loader, 0.0) <= now
        return reaches and self.pipeline_for(worker, session) is not None

    def works_for(self, worker: WorkerRecord, session: Session) -> bool:
        """Return whether a data worker has had leases of this pipeline and trainer, so that no more need be asked."""
        binding = worker.binding
        return binding is not None and (session.spec.pipeline_id, self._tables.trainer_of(session)) in binding.granted

    def pipeline_for(self, worker: WorkerRecord, session: Session) -> str | None:
        """Return the pipeline from which a data worker process would make the session's steps; None if it must not.

        Where jobs share a stream under a name of their choice, they promise that their pipelines agree.
        """
        spec = session.spec
        # One that works for a stage of the program works for no other one.
        if worker.device != self._tables.loaders[session.loader].registration.device:
            return None
        if self.works_for(worker, session) or self.fits(worker, spec.pipeline_id, session.loader):
            return spec.pipeline_id
        if spec.sharing is None or worker.binding is None:
            return None
        agreed = worker.binding.streams.get(spec.sharing.key, "")
        return agreed if agreed in self._tables.pipelines else None

    def fits(self, worker: WorkerRecord, pipeline_id: str, loader: str) -> bool:
        """Return whether a process may run a pipeline of a loader: it works for this program now, or is fresh and no
        other process of its slot works for it.

        A program that runs again gets fresh processes: the last run may have left something behind. The ranks of one
        run are there at the same time.
        """
        tables = self._tables
        binding, trainer = worker.binding, tables.loaders[loader].registration.trainer
        if not self.suits(worker, loader):
            return False
        if binding is None:
            siblings = [tables.workers[peer] for peer in tables.slots.get(worker.slot, ())]
            return not any(
                sibling.binding and not sibling.draining and self.fits(sibling, pipeline_id, loader)
                for sibling in siblings
            )
        if (pipeline_id, trainer) in binding.granted:
            return True
        if not serves(binding.program, tables.program_of(pipeline_id)):
            return False
        trainers = binding.trainers
        if trainers is None or trainer in trainers:
            return True
        return any(other.registration.trainer in trainers for other in tables.loaders.values())

    def suits(self, worker: WorkerRecord, loader: str) -> bool:
        """Return whether a data worker has what a loader's stage needs, and a Python as good as that of its program."""
        registration = self._tables.loaders[loader].registration
        return worker.device == registration.device and not why_unfit(worker.interpreter, registration.interpreter)

    def bind(self, worker: WorkerRecord, session: Session, pipeline_id: str) -> None:
        """The data worker process gets a lease, and is one of the session's program from now on."""
        tables, spec, trainer = self._tables, session.spec, self._tables.trainer_of(session)
        if pipeline_id != spec.pipeline_id:
            return  # it goes on with its own program
        program = tables.program_of(pipeline_id)
        if worker.binding is None:
            worker.binding = Binding(program, {trainer})
            tables.rooms_changed = True
        binding = worker.binding
        binding.program = joined(binding.program, program)
        binding.trainers = {*(binding.trainers or ()), trainer}
        binding.granted.add((pipeline_id, trainer))
        if spec.sharing is not None:
            binding.streams[spec.sharing.key] = pipeline_id


# How many data workers each loader can count on, and telling it when that changes. Pure.


class Reachability:
    """Which data workers reach which loaders.

    Attributes:
        _tables: what is known.
        _placement: who can make what.
    """

    def __init__(self, tables: Tables, placement: WorkerPlacement) -> None:
        self._tables = tables
        self._placement = placement

    def mark_unreachable(self, lease: Lease, now: float, reason: str) -> list[Instruction]:
        """Note that a data worker could not deliver a lease to its loader: no other for a while."""
        tables = self._tables
        session = tables.sessions.get(lease.session_id)
        if session is None or lease.worker not in tables.workers:
            return []
        worker, rank = tables.workers[lease.worker], tables.loaders[session.loader].registration.rank
        is_news = worker.unreachable.get(session.loader, 0.0) <= now
        worker.unreachable[session.loader] = now + UNREACHABLE_S
        out: list[Instruction] = []
        if is_news:  # one event for all of its leases
            out += tables.tell(
                events.DataWorkerUnreachable(data_worker=worker.number, rank=rank, for_s=UNREACHABLE_S, cause=reason)
            )
        return out + self.announce(now)

    def announce(self, now: float) -> list[Instruction]:
        """Tell loaders whose number of data workers has changed."""
        out: list[Instruction] = []
        for peer, loader in self._tables.loaders.items():
            count = self.num_workers(peer, now)
            if count != loader.announced_workers:
                loader.announced_workers = count
                out.append(Send(peer, Membership(count)))
        return out

    def num_workers(self, loader: str, now: float) -> int:
        """Data workers that reach a loader: slots, whatever programs their processes serve."""
        tables = self._tables
        if tables.is_mixed:
            return self._num_slots(loader, now)
        return sum(
            worker.unreachable.get(loader, 0.0) <= now and self._placement.suits(worker, loader)
            for worker in tables.workers.values()
        )

    def _num_slots(self, loader: str, now: float) -> int:
        tables = self._tables
        pipeline_id = tables.loaders[loader].registration.pipeline_id
        fitting, others = set(tables.asked_at), set(tables.asked_at)
        count = 0
        unreached: set[str] = set()
        for worker in tables.workers.values():
            if not self._placement.suits(worker, loader):
                continue
            reaches = worker.unreachable.get(loader, 0.0) <= now
            fits = self._placement.fits(worker, pipeline_id, loader)
            if not worker.slot:
                count += fits and reaches
            elif reaches:
                (fitting if fits else others).add(worker.slot)
            elif fits:
                unreached.add(worker.slot)
        return count + len(fitting | (others - unreached))


# Which programs have a process in which slot of the data workers, and what is done where one has none.
#
# `WorkerPlacement` sees to it that a process gets steps of one program only. Pure.
#
# A slot is the place of one process of a supervisor, and what loaders, limits and people count as a data worker. Where
# a program has no process in a slot, the process whose program is over leaves there, to be forked anew; if all programs
# of the slot are still there, one more process is forked, which leaves when its program is over.

# A process that was asked for has registered by then; or the one that is to leave is at a long sample.
ROOM_S = 5.0


class ProcessSlots:
    """Sees to it that every program has a process in every slot.

    Attributes:
        _tables: what is known.
        _placement: who can make what.
        _reachability: tells loaders how many data workers they have.
        _streams: the streams that sessions share.
    """

    def __init__(
        self, tables: Tables, placement: WorkerPlacement, reachability: Reachability, streams: SharedStreams
    ) -> None:
        self._tables = tables
        self._placement = placement
        self._reachability = reachability
        self._streams = streams

    def make_room(self, now: float) -> list[Instruction]:
        """Ask for processes where programs lack them, and let go those that are in excess."""
        tables = self._tables
        if not (tables.rooms_changed or tables.asked_at):
            return []
        tables.asked_at = {slot: at for slot, at in tables.asked_at.items() if now - at < ROOM_S}
        if now < tables.grant_from:
            return []
        tables.rooms_changed = False
        out: list[Instruction] = []
        for slot, peers in tables.slots.items():
            staying = sorted(peer for peer in peers if not tables.workers[peer].draining)
            if not staying and not any(tables.workers[peer].renews for peer in peers):
                continue  # the whole data worker leaves
            if self._lacking(staying) is not None:
                if slot not in tables.asked_at:
                    tables.asked_at[slot] = now
                    out += self._ask(peers, staying)
            elif len(staying) > 1:
                out += self._let_go(staying)
        tables.is_mixed = bool(tables.asked_at) or any(len(peers) > 1 for peers in tables.slots.values())
        tables.is_mixed |= any(not worker.slot and worker.binding is not None for worker in tables.workers.values())
        return out + self._reachability.announce(now)

    def _lacking(self, peers: Collection[str]) -> Session | None:
        """A session that none of these processes may work for, though their Python is its program's."""
        workers = [self._tables.workers[peer] for peer in peers]
        sessions = self._tables.sessions.values()
        kinds = {(each.spec.pipeline_id, each.loader, each.spec.sharing): each for each in sessions}
        for session in kinds.values():
            # A slot's processes all run one Python with one device: another one would make no difference.
            at_home = not workers or self._placement.suits(workers[0], session.loader)
            if at_home and all(self._placement.pipeline_for(worker, session) is None for worker in workers):
                return session
        return None

    def _ask(self, peers: Collection[str], staying: Collection[str]) -> list[Instruction]:
        over = next((peer for peer in staying if self._is_over(self._tables.workers[peer])), None)
        if over is not None:
            self._tables.workers[over].renews = True
            cause = "its program is over or has changed, and a fresh process takes its place"
            return [*self.begin_drain(over, cause), Send(over, RenewWorker())]
        beside = next(iter(staying or peers))
        cause = "another program is there at the same time"
        event = events.ProcessAdded(data_worker=self._tables.workers[beside].number, cause=cause)
        return [*self._tables.tell(event), Send(beside, AddProcess())]

    def _let_go(self, staying: Collection[str]) -> list[Instruction]:
        """One of several processes of a slot whose program is over, or that has none."""
        for peer in staying:
            worker, others = self._tables.workers[peer], [other for other in staying if other != peer]
            if (worker.binding is None or self._is_over(worker)) and self._lacking(others) is None:
                self._tables.rooms_changed = True  # there may be more
                cause = "its program is over, and its slot has another process"
                return [*self.begin_drain(peer, cause), Send(peer, DrainWorker())]
        return []

    def begin_drain(self, peer: str, cause: str) -> list[Instruction]:
        """Let a data worker have no more leases: it leaves after the step in work."""
        worker = self._tables.workers[peer]
        out: list[Instruction] = []
        if not worker.draining:
            out = self._tables.tell(events.DataWorkerDrains(data_worker=worker.number, cause=cause))
        worker.draining = True
        self._tables.rooms_changed = True
        self._tables.note_load(peer)
        self._streams.groups.lose(peer)
        return out

    def end_processes(self, peer: str) -> list[Instruction]:
        """End the processes that have made steps of a loader, to be forked anew; it is told when none is left."""
        tables = self._tables
        loader = tables.loaders[peer]
        served_by = [name for name in sorted(loader.served_by) if name in tables.workers]
        # One that nobody can fork anew, a rank of an MPI world, keeps what it holds.
        loader.awaited = {name: tables.workers[name].slot for name in served_by if tables.workers[name].slot}
        loader.served_by.clear()
        out: list[Instruction] = []
        for name in loader.awaited:
            if not tables.workers[name].draining:
                tables.workers[name].renews = True
                cause = "its loader goes on without data workers, and needs what they hold"
                out += [*self.begin_drain(name, cause), Send(name, RenewWorker())]
        return out + self.has_ended()

    def has_ended(self, peer: str = "", slot: str = "") -> list[Instruction]:
        """Note that a process is gone, or those of a slot that had left are: tell loaders that waited for the last of
        them.

        One that leaves says so before it ends; that it has ended the next process of its slot shows.
        """
        out: list[Instruction] = []
        for name, loader in self._tables.loaders.items():
            if loader.awaited is not None:
                there = self._tables.workers
                loader.awaited = {
                    each: its_slot
                    for each, its_slot in loader.awaited.items()
                    if each != peer and (its_slot != slot or each in there)
                }
                if not loader.awaited:
                    loader.awaited = None
                    out.append(Send(name, ProcessesEnded()))
        return out

    def _is_over(self, worker: WorkerRecord) -> bool:
        """Whether the program of a process has ended, or has become another one: no loader of it is connected."""
        binding = worker.binding
        if binding is None:
            return False
        return not any(
            (binding.trainers is None or loader.registration.trainer in binding.trainers)
            and serves(binding.program, self._tables.program_of(loader.registration.pipeline_id))
            for loader in self._tables.loaders.values()
        )
