"""Who gets which steps next. Pure.

Beside it: who can make what (`placement.py`), what a lease goes through (`lifecycle.py`), streams that sessions share
(`shared_streams.py`), steps that failed (`retries.py`), and idle data workers (`stealing.py`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from hetstream.mpi_dataworkers.dispatcher.instructions import Instruction, Send
from hetstream.mpi_dataworkers.dispatcher.lifecycle import LeaseLifecycle
from hetstream.mpi_dataworkers.dispatcher.limits import (
    LEASES_PER_WORKER,
    MAX_LEASE_STEPS,
    STEAL_GAIN_S,
    TARGET_LEASE_S,
)
from hetstream.mpi_dataworkers.dispatcher.placement import Placement
from hetstream.mpi_dataworkers.dispatcher.records import Session, WorkerRecord
from hetstream.mpi_dataworkers.dispatcher.retries import Retries
from hetstream.mpi_dataworkers.dispatcher.shared_streams import SharedStreams
from hetstream.mpi_dataworkers.dispatcher.stealing import Stealing
from hetstream.mpi_dataworkers.dispatcher.tables import Tables


class Leasing:
    """Hands out leases.

    Args:
        tables: what is known.
        now: time of the start, s.

    Attributes:
        placement: who can make what.
        streams: the streams that sessions share.
        lifecycle: makes, changes and ends leases.
        retries: what becomes of steps that failed.
        _tables: what is known.
        _stealing: gives idle data workers what others have not begun.
        _next_steal: idle data workers are looked for again at this time, s.
    """

    def __init__(self, tables: Tables, now: float) -> None:
        self.placement = Placement(tables)
        self.streams = SharedStreams()
        self.lifecycle = LeaseLifecycle(tables, self.placement, self.streams)
        self.retries = Retries(tables, self.placement, self.lifecycle)
        self._tables = tables
        self._stealing = Stealing(tables, self.placement, self.lifecycle)
        self._next_steal = now

    def assign(self, now: float) -> list[Instruction]:
        """Hand out leases while a worker has a free place and a session has steps to lease."""
        tables = self._tables
        out: list[Instruction] = []
        if now < tables.grant_from:
            return out
        if now >= self._next_steal:
            self._next_steal = now + STEAL_GAIN_S
            out += self._stealing.steal(now)
        out += self.retries.grant(now)
        out += self._grant_cached(now)
        # Fewest leases first, so that a window is spread before anyone gets a second lease.
        for free in tables.free:
            for peer in list(free):
                unleased = [session for session in tables.sessions.values() if session.leasable() > 0]
                if not unleased:
                    return out
                session = self._neediest_session(peer, unleased, now)
                if session is not None:
                    out.append(self._grant(peer, session, self._lease_size(peer, session), now))
                    if session.spec.sharing is not None:
                        out += self._grant_cached(now)
        return out

    def _grant_cached(self, now: float) -> list[Instruction]:
        """Lease steps that a worker made, or is making, for another session to that worker, also beyond its share."""
        out: list[Instruction] = []
        for session in self._tables.sessions.values() if self.streams.groups else ():
            group = self.streams.group_of(session)
            while group is not None and session.leasable() > 0:
                self.streams.follow(session, group)
                holder = group.holder(session.position(session.next_step()))
                if holder is None or not self._may_serve(self._tables.workers[holder], session, now):
                    break
                out.append(self._grant(holder, session, MAX_LEASE_STEPS, now))
        return out

    def _may_serve(self, worker: WorkerRecord, session: Session, now: float) -> bool:
        return not worker.draining and self.placement.can_make(worker, session, now)

    def _neediest_session(self, peer: str, unleased: Sequence[Session], now: float) -> Session | None:
        """Of the sessions that have steps to lease, the one whose steps a data worker is to make first."""
        able = [
            session
            for session in unleased
            if self.placement.may_try(peer, session, now) and self._may_have(peer, session, now)
        ]
        if len(able) < 2:
            return able[0] if able else None
        # What another data worker holds together is taken from it last.
        return min(able, key=lambda session: (session.holder not in ("", peer), session.fill()))

    def _may_have(self, peer: str, session: Session, now: float) -> bool:
        """Whether a data worker may have a lease of the session, which another one may be keeping together."""
        holder = self._tables.workers.get(session.holder)
        if not session.spec.kept_together or session.holder == peer or holder is None:
            return True
        if not self.placement.may_try(session.holder, session, now):
            return True
        # One that has nothing takes a shard of one that has several; it pays for it by reading up to the position.
        held: dict[str, set[Hashable]] = {peer: set(), session.holder: set()}
        for other in self._tables.sessions.values():
            if other.holder in held and (other.leasable() > 0 or other.tokens):
                held[other.holder].add(other.shard)
        return not held[peer] and len(held[session.holder]) > 1

    def _lease_size(self, peer: str, session: Session) -> int:
        """Steps that a data worker makes in `TARGET_LEASE_S`, but no more than its share of what is to be leased.

        One of the last stage has at least so many that each of the stage before has one to make while another is taken.
        """
        num_workers = 1 if session.spec.kept_together else len(self._tables.workers)
        ahead = 1
        if self._tables.loaders[session.loader].registration.device == "gpu":
            num_earlier = sum(worker.device == "cpu" for worker in self._tables.workers.values())
            num_workers -= num_earlier
            ahead += math.ceil(num_earlier / num_workers)
        share = max(1, session.leasable() // (LEASES_PER_WORKER * num_workers))
        step_s = self._tables.workers[peer].step_s.get(session.spec.session_id, session.step_s)
        wanted = int(TARGET_LEASE_S / step_s) if step_s > 0 else 1
        return max(1, min(share, max(wanted, ahead), MAX_LEASE_STEPS))

    def _grant(self, peer: str, session: Session, size: int, now: float) -> Send:
        """Lease the next steps of a session, at most `size`, to a data worker."""
        # The holder's own reader is already there.
        goes_on = session.holder == peer and not session.requeued
        self.lifecycle.keep_together(session, peer)
        requeued = session.requeued
        if requeued:
            first = requeued[0]
            stop = first + 1
            while stop - first < size and stop - first < len(requeued) and requeued[stop - first] == stop:
                stop += 1
        else:
            first = session.frontier
            stop = min(first + size, session.consumed + session.window, session.known_steps)
        stop, cached, again = self.streams.fit(peer, session, first, stop)
        if requeued:
            session.requeued = requeued[stop - first :]
        else:
            session.frontier = stop
        snapshot = b"" if goes_on or not session.spec.kept_together else session.snapshot_at(first)
        return self.lifecycle.grant(peer, session, range(first, stop), now, cached, again, snapshot)
