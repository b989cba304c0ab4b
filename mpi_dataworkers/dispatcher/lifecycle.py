"""The life of a lease: granted, adopted, trimmed, taken back. Pure.

A lease goes ACTIVE -> SENT -> (gone). ACTIVE: a worker makes its steps. SENT: the worker has sent them all and the
loader has not reported all of them. From either it may be revoked. The end of an ACTIVE lease may be trimmed off, which
fences nothing: steps that were already made are as good as any.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import msgspec

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.instructions import Instruction, Send
from hetstream.mpi_dataworkers.dispatcher.placement import Placement
from hetstream.mpi_dataworkers.dispatcher.records import Lease, Session
from hetstream.mpi_dataworkers.dispatcher.shared_streams import SharedStreams
from hetstream.mpi_dataworkers.dispatcher.tables import Tables
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.wire.messages import (
    GrantLease,
    LeaseRevoked,
    ListedOrder,
    RevokeLease,
    ShardOrder,
    StepList,
    StepsLost,
)


class LeaseLifecycle:
    """Makes, changes and ends leases; who gets which is decided elsewhere.

    Attributes:
        _tables: what is known.
        _placement: who can make what.
        _streams: the streams that sessions share.
    """

    def __init__(self, tables: Tables, placement: Placement, streams: SharedStreams) -> None:
        self._tables = tables
        self._placement = placement
        self._streams = streams

    def grant(
        self,
        peer: str,
        session: Session,
        steps: range,
        now: float,
        cached: bool = False,
        again: bool = False,
        snapshot: bytes = b"",
    ) -> Send:
        """Lease steps to a data worker.

        Args:
            peer: the data worker, which can make them.
            session: whose steps.
            steps: which; the caller takes them out of what is to be leased.
            now: the time, s.
            cached: it made them, or is making them, for another session too.
            again: they were leased before, for whichever session.
            snapshot: where a reader of the shard was at or before the first of them.
        """
        tables, worker, first, stop = self._tables, self._tables.workers[peer], steps.start, steps.stop
        tables.leases_granted += 1
        token = tables.token_base + tables.leases_granted
        spec = session.spec
        if not self._placement.works_for(worker, session):
            pipeline_id = self._placement.pipeline_for(worker, session) or spec.pipeline_id
            self._placement.bind(worker, session, pipeline_id)
            if pipeline_id != spec.pipeline_id:
                spec = msgspec.structs.replace(spec, pipeline_id=pipeline_id)
        shift = session.shift(first)
        tables.leases[token] = Lease(token, spec.session_id, peer, first, stop, now, shift, cached, begun_at=now)
        session.tokens.add(token)
        worker.tokens.add(token)
        tables.loaders[session.loader].served_by.add(peer)
        if cached:
            worker.cached_tokens.add(token)
        tables.note_load(peer)
        listed = _join_steps(first, stop, session.lists) if isinstance(spec.order, ListedOrder) else None
        left_out = {step: failures.left_out for step, failures in session.failures.items() if step in steps}
        return Send(peer, GrantLease(token, spec, first, stop, listed, shift, again, left_out, snapshot))

    def adopt(self, lease: Lease) -> None:
        """A data worker holds a lease of the dispatcher before this one."""
        tables = self._tables
        tables.leases[lease.token] = lease
        tables.workers[lease.worker].tokens.add(lease.token)
        session = tables.sessions.get(lease.session_id)
        if session is not None:
            steps = range(lease.first, lease.stop)
            session.tokens.add(lease.token)
            tables.loaders[session.loader].served_by.add(lease.worker)
            session.retries.difference_update(steps)
            session.requeued = [step for step in session.requeued if step not in steps]
            if lease.stop > session.frontier:
                skipped = session.missing(range(session.frontier, lease.first))
                session.requeued = sorted({*session.requeued, *skipped})
                session.frontier = lease.stop
            self._streams.note_lease(lease, session)

    def keep_together(self, session: Session, peer: str) -> None:
        """A worker has a lease of a session that is kept together, and so of all ranks' that read the same rounds."""
        if not session.spec.kept_together or session.holder == peer:
            return
        session.holder = peer
        for other in self._tables.sessions.values() if session.reads_rounds else ():
            if other.shard == session.shard:
                other.holder = peer

    def trim(self, lease: Lease, stop: int) -> None:
        """Take the steps at or above `stop` out of a lease; whoever calls says where they go."""
        if stop <= lease.first:
            self._tables.forget(lease)
        else:
            lease.stop, lease.trimmed = stop, True

    def requeue(self, session: Session, steps: range) -> None:
        """Put those of the steps that are neither there nor leased first in the queue of their session."""
        leases = self._tables.leases
        leased = [range(leases[token].first, leases[token].stop) for token in session.tokens]
        free = [step for step in session.missing(steps) if not any(step in taken for taken in leased)]
        session.requeued = sorted({*session.requeued, *free})

    def revoke(
        self,
        lease: Lease,
        reason: str,
        reconnect: bool = False,
        orderly: bool = False,
        suspects: Sequence[int] = (),
    ) -> list[Instruction]:
        """Take a lease back and put its missing steps first in the queue of its session.

        In a session that is read at most once they are lost, unless the data worker left in an orderly way. `suspects`
        are as in `LeaseRevoked`.
        """
        tables = self._tables
        tables.forget(lease)
        tables.leases_revoked += 1
        out = tables.tell(events.LeaseRevoked(**self.event_fields(lease, lease.first), cause=reason))
        if lease.worker in tables.workers:
            tables.workers[lease.worker].work.leases_revoked += 1
            out.append(Send(lease.worker, RevokeLease(lease.token, lease.session_id, reconnect, reason)))
        session = tables.sessions.get(lease.session_id)
        if session is not None:
            out.append(Send(session.loader, LeaseRevoked(lease.session_id, lease.token, as_ranges(suspects))))
            missing = session.missing(range(lease.first, lease.stop))
            if missing and session.spec.at_most_once and not orderly:
                return out + self._lose_steps(session, missing)
            self.requeue(session, range(lease.first, lease.stop))
        return out

    def _lose_steps(self, session: Session, missing: list[int]) -> list[Instruction]:
        """Give up steps of a session that is read at most once; of a shard all that follow, too."""
        session_id, cause = session.spec.session_id, "a data worker held them, and the session is read at most once"
        if isinstance(session.spec.order, ShardOrder):
            ranges = [(missing[0], -1)]
            session.end_at(missing[0])
        else:
            ranges = as_ranges(missing)
            session.lost.update(missing)
        out = self._tables.tell(events.StepsGivenUp(session=session_id, ranges=ranges, cause=cause))
        return out + [Send(session.loader, StepsLost(session_id, first, stop)) for first, stop in ranges]

    def event_fields(self, lease: Lease, first_step: int) -> dict[str, Any]:
        """What an event about a lease says of it, from `first_step` on."""
        worker = self._tables.workers.get(lease.worker)
        return {
            "lease": lease.token,
            "session": lease.session_id,
            "data_worker": worker.number if worker is not None else -1,
            "first_step": first_step,
            "stop_step": lease.stop,
        }


def _join_steps(first: int, stop: int, lists: dict[int, bytes]) -> StepList:
    counts = array.array("i", (len(lists[step]) // 8 for step in range(first, stop)))
    return StepList(first, counts.tobytes(), b"".join(lists[step] for step in range(first, stop)))
