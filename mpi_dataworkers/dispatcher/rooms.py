"""Which programs have a process in which slot of the data workers, and what is done where one has none.

`placement.py` sees to it that a process gets steps of one program only. Pure.

A slot is the place of one process of a supervisor, and what loaders, limits and people count as a data worker. Where a
program has no process in a slot, the process whose program is over leaves there, to be forked anew; if all programs of
the slot are still there, one more process is forked, which leaves when its program is over.
"""

from __future__ import annotations

from collections.abc import Collection

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.instructions import Instruction, Send
from hetstream.mpi_dataworkers.dispatcher.placement import Placement
from hetstream.mpi_dataworkers.dispatcher.reachability import Reachability
from hetstream.mpi_dataworkers.dispatcher.records import Session, WorkerRecord
from hetstream.mpi_dataworkers.dispatcher.shared_streams import SharedStreams
from hetstream.mpi_dataworkers.dispatcher.tables import Tables
from hetstream.mpi_dataworkers.programs import serves
from hetstream.mpi_dataworkers.wire.messages import AddProcess, DrainWorker, ProcessesEnded, RenewWorker

# A process that was asked for has registered by then; or the one that is to leave is at a long sample.
ROOM_S = 5.0


class Rooms:
    """Sees to it that every program has a process in every slot.

    Attributes:
        _tables: what is known.
        _placement: who can make what.
        _reachability: tells loaders how many data workers they have.
        _streams: the streams that sessions share.
    """

    def __init__(
        self, tables: Tables, placement: Placement, reachability: Reachability, streams: SharedStreams
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
        """A process is gone, or those of a slot that had left are: tell loaders that waited for the last of them.

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
