"""Which programs have a process in which slot of the data workers, and what is done where one has none.

Between `leasing.py`, which leases a process steps of one program only, and `state.DispatcherState`. No socket, no
clock, no disk.

A slot is the place of one process of a supervisor, and what loaders, limits and people count as a data worker. Where a
program has no process in a slot, the process whose program is over leaves there, to be forked anew; if all programs of
the slot are still there, one more process is forked, which leaves when its program is over.
"""

from __future__ import annotations

from collections.abc import Collection

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.leasing import Leasing
from hetstream.mpi_dataworkers.dispatcher.records import Instruction, Send, SessionRecord, WorkerRecord
from hetstream.mpi_dataworkers.wire.messages import AddProcess, DrainWorker, RenewWorker
from hetstream.mpi_dataworkers.worker.programs import serves

# A process that was asked for has registered by then; or the one that is to leave is at a long sample.
ROOM_S = 5.0


class Rooms(Leasing):
    """Sees to it that every program has a process in every slot."""

    def __init__(self, incarnation: int, now: float, grant_from: float) -> None:
        super().__init__(incarnation, now, grant_from)
        # When something was asked of a slot, s; it counts as a data worker until the fresh process is there.
        self._asked_at: dict[str, float] = {}
        # Whether processes and data workers are two things now: several programs are there, or one makes room.
        self._is_mixed = False

    def _make_room(self, now: float) -> list[Instruction]:
        """Ask for processes where programs lack them, and let go those that are in excess."""
        if not (self._rooms_changed or self._asked_at):
            return []
        self._asked_at = {slot: at for slot, at in self._asked_at.items() if now - at < ROOM_S}
        if now < self._grant_from:
            return []
        self._rooms_changed = False
        out: list[Instruction] = []
        for slot, peers in self._slots.items():
            staying = sorted(peer for peer in peers if not self.workers[peer].draining)
            if not staying and not any(self.workers[peer].renews for peer in peers):
                continue  # the whole data worker leaves
            if self._lacking(staying) is not None:
                if slot not in self._asked_at:
                    self._asked_at[slot] = now
                    out += self._ask(peers, staying)
            elif len(staying) > 1:
                out += self._let_go(staying)
        self._is_mixed = bool(self._asked_at) or any(len(peers) > 1 for peers in self._slots.values())
        self._is_mixed |= any(not worker.slot and worker.binding is not None for worker in self.workers.values())
        return out + self._announce(now)

    def _lacking(self, peers: Collection[str]) -> SessionRecord | None:
        """A session that none of these processes may work for, though their Python is its program's."""
        workers = [self.workers[peer] for peer in peers]
        kinds = {(one.session.definition_id, one.loader, one.session.sharing): one for one in self.sessions.values()}
        for record in kinds.values():
            # A slot's processes all run one Python: another one would make no difference.
            at_home = not workers or self._runs_its_python(workers[0], record.loader)
            if at_home and all(self._definition_for(worker, record) is None for worker in workers):
                return record
        return None

    def _ask(self, peers: Collection[str], staying: Collection[str]) -> list[Instruction]:
        over = next((peer for peer in staying if self._is_over(self.workers[peer])), None)
        if over is not None:
            self.workers[over].renews = True
            self._begin_drain(over, "its program is over or has changed, and a fresh process takes its place")
            return [Send(over, RenewWorker())]
        beside = next(iter(staying or peers))
        cause = "another program is there at the same time"
        self._tell(events.ProcessAdded(data_worker=self.workers[beside].number, cause=cause))
        return [Send(beside, AddProcess())]

    def _let_go(self, staying: Collection[str]) -> list[Instruction]:
        """One of several processes of a slot whose program is over, or that has none."""
        for peer in staying:
            worker, others = self.workers[peer], [one for one in staying if one != peer]
            if (worker.binding is None or self._is_over(worker)) and self._lacking(others) is None:
                self._rooms_changed = True  # there may be more
                self._begin_drain(peer, "its program is over, and its slot has another process")
                return [Send(peer, DrainWorker())]
        return []

    def _begin_drain(self, peer: str, cause: str) -> None:
        worker = self.workers[peer]
        if not worker.draining:
            self._tell(events.DataWorkerDrains(data_worker=worker.number, cause=cause))
        worker.draining = True
        self._rooms_changed = True
        self._note_load(peer)
        self._shared.lose(peer)

    def _is_over(self, worker: WorkerRecord) -> bool:
        """Whether the program of a process has ended, or has become another one: no loader of it is connected."""
        binding = worker.binding
        if binding is None:
            return False
        return not any(
            (binding.trainers is None or one.registration.trainer in binding.trainers)
            and serves(binding.program, self._program_of(one.registration.definition_id))
            for one in self.loaders.values()
        )

    def _reachable_workers(self, loader: str, now: float) -> int:
        """Data workers that reach a loader: slots, whatever programs their processes serve."""
        if not self._is_mixed:
            return super()._reachable_workers(loader, now)
        definition_id = self.loaders[loader].registration.definition_id
        fitting, others = set(self._asked_at), set(self._asked_at)
        count = 0
        unreached: set[str] = set()
        for worker in self.workers.values():
            if not self._runs_its_python(worker, loader):
                continue
            reaches = worker.unreachable.get(loader, 0.0) <= now
            fits = self._fits(worker, definition_id, loader)
            if not worker.slot:
                count += fits and reaches
            elif reaches:
                (fitting if fits else others).add(worker.slot)
            elif fits:
                unreached.add(worker.slot)
        return count + len(fitting | (others - unreached))
