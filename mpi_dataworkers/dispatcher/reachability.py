"""How many data workers each loader can count on, and telling it when that changes. Pure."""

from __future__ import annotations

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.instructions import Instruction, Send
from hetstream.mpi_dataworkers.dispatcher.limits import UNREACHABLE_S
from hetstream.mpi_dataworkers.dispatcher.placement import Placement
from hetstream.mpi_dataworkers.dispatcher.records import Lease
from hetstream.mpi_dataworkers.dispatcher.tables import Tables
from hetstream.mpi_dataworkers.wire.messages import Membership


class Reachability:
    """Which data workers reach which loaders.

    Attributes:
        _tables: what is known.
        _placement: who can make what.
    """

    def __init__(self, tables: Tables, placement: Placement) -> None:
        self._tables = tables
        self._placement = placement

    def mark_unreachable(self, lease: Lease, now: float, reason: str) -> list[Instruction]:
        """A data worker could not deliver a lease to its loader: it gets none of that loader's for a while."""
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
