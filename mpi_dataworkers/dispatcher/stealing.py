"""Giving idle data workers the end of leases that others have not come to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.instructions import Instruction, Send
from hetstream.mpi_dataworkers.dispatcher.lifecycle import LeaseLifecycle
from hetstream.mpi_dataworkers.dispatcher.limits import STEAL_GAIN_S
from hetstream.mpi_dataworkers.dispatcher.placement import Placement
from hetstream.mpi_dataworkers.dispatcher.records import Lease, Session, WorkerRecord
from hetstream.mpi_dataworkers.dispatcher.tables import Tables
from hetstream.mpi_dataworkers.wire.messages import TrimLease

# What the loader has is known this late.
_REPORT_DELAY_S = 0.15
# A worker that has made no step of a session may have to load its pipeline first.
_UNKNOWN_STEP_S = 1.0


@dataclass(frozen=True)
class _Theft:
    """Steps [cut, stop) of a lease could go to an idle worker; the last step would be made `gain_s` earlier."""

    lease: Lease
    cut: int
    gain_s: float


@dataclass(frozen=True)
class _Waiting:
    """The part of a lease that its worker has not begun.

    Attributes:
        lease, session: which, and whose.
        ahead_s: time until the worker comes to that part.
        num_steps: steps in it.
        step_s: time that the worker takes for each.
    """

    lease: Lease
    session: Session
    ahead_s: float
    num_steps: int
    step_s: float


class Stealing:
    """Decides which steps go from a busy data worker to an idle one.

    Attributes:
        _tables: what is known.
        _placement: who can make what.
        _lifecycle: trims and makes leases.
    """

    def __init__(self, tables: Tables, placement: Placement, lifecycle: LeaseLifecycle) -> None:
        self._tables = tables
        self._placement = placement
        self._lifecycle = lifecycle

    def steal(self, now: float) -> list[Instruction]:
        """Give workers that have nothing to do the end of leases that others have not come to.

        Only where the last step is then made earlier by `STEAL_GAIN_S`, as far as the speeds are known: so steps do not
        go back and forth, and a slow worker does not take them from a fast one.
        """
        tables = self._tables
        out: list[Instruction] = []
        for peer in list(tables.free[0]):
            worker = tables.workers[peer]
            if worker.tokens or any(self._has_steps_for(peer, session, now) for session in tables.sessions.values()):
                continue
            best = max(self._thefts(peer, now), key=lambda theft: theft.gain_s, default=None)
            if best is not None and best.gain_s >= STEAL_GAIN_S:
                lease, session, stop = best.lease, tables.sessions[best.lease.session_id], best.lease.stop
                out += tables.tell(
                    events.LeaseTrimmed(
                        **self._lifecycle.event_fields(lease, first_step=best.cut),
                        to_data_worker=worker.number,
                        cause=f"the last step is made {best.gain_s:.2f} s earlier",
                    )
                )
                self._lifecycle.trim(lease, best.cut)
                out.append(Send(lease.worker, TrimLease(lease.token, best.cut)))
                out.append(self._lifecycle.grant(peer, session, range(best.cut, stop), now))
        return out

    def _has_steps_for(self, peer: str, session: Session, now: float) -> bool:
        return session.leasable() > 0 and self._placement.may_try(peer, session, now)

    def _thefts(self, thief: str, now: float) -> Iterable[_Theft]:
        step_times_s = self._tables.workers[thief].step_s
        for worker in self._tables.workers.values():
            for part in self._waiting(worker, now):
                if not part.num_steps or not self._may_steal(thief, part.lease, part.session, now):
                    continue
                thief_s = step_times_s.get(part.lease.session_id, _UNKNOWN_STEP_S)
                end_s = part.ahead_s + part.num_steps * part.step_s
                stolen = min(part.num_steps, int(end_s / (thief_s + part.step_s)))
                if stolen:
                    new_end_s = max(stolen * thief_s, part.ahead_s + (part.num_steps - stolen) * part.step_s)
                    yield _Theft(part.lease, part.lease.stop - stolen, end_s - new_end_s)

    def _waiting(self, worker: WorkerRecord, now: float) -> Iterator[_Waiting]:
        """What a worker has not begun, in the order in which it comes to it."""
        ahead_s = slowest_s = 0.0
        for place, token in enumerate(sorted(worker.tokens)):
            lease = self._tables.leases[token]
            session = self._tables.sessions.get(lease.session_id)
            if session is None:
                continue
            elapsed_s = now - lease.begun_at
            step_s = max(worker.step_s.get(lease.session_id, session.step_s), slowest_s)
            first = lease.first
            if place == 0:
                made = len(range(lease.first, lease.stop)) - len(session.missing(range(lease.first, lease.stop)))
                step_s = max(step_s, (elapsed_s - _REPORT_DELAY_S) / (made + 1))
                first += 1 + max(made, int(elapsed_s / step_s) if step_s > 0 else 0)
                ahead_s = slowest_s = step_s
            num_steps = max(0, lease.stop - first)
            yield _Waiting(lease, session, ahead_s, num_steps, step_s)
            ahead_s += num_steps * step_s

    def _may_steal(self, thief: str, lease: Lease, session: Session, now: float) -> bool:
        spec = session.spec
        chosen = any(lease.first <= step < lease.stop for step in session.failures)  # for who has not failed it
        any_worker_can = not spec.kept_together and spec.sharing is None and not chosen
        return any_worker_can and self._placement.may_try(thief, session, now)
