"""Who gets which steps next. Pure.

Here, too: what a lease goes through (`LeaseLifecycle`), steps that failed (`Retries`), idle data workers (`Stealing`).
Beside it: who can make what (`placement.py`), streams that sessions share (`sharing.py`).
"""

from __future__ import annotations

import array
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.placement import WorkerPlacement
from hetstream.mpi_dataworkers.dispatcher.sharing import SharedStreams
from hetstream.mpi_dataworkers.dispatcher.tables import (
    LEASES_PER_WORKER,
    MAX_LEASE_STEPS,
    STEAL_GAIN_S,
    TARGET_LEASE_S,
    Instruction,
    Lease,
    Send,
    Session,
    Tables,
    UnexplainedLoss,
    WorkerRecord,
)
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.wire.failures import OnFailure, StepFailures
from hetstream.mpi_dataworkers.wire.messages import (
    BatchFailed,
    Failure,
    GrantLease,
    LeaseRevoked,
    ListedOrder,
    RevokeLease,
    ShardOrder,
    StepList,
    StepsLost,
    TrimLease,
)

# The life of a lease: granted, adopted, trimmed, taken back. Pure.
#
# A lease goes ACTIVE -> SENT -> (gone). ACTIVE: a worker makes its steps. SENT: the worker has sent them all and the
# loader has not reported all of them. From either it may be revoked. The end of an ACTIVE lease may be trimmed off,
# which fences nothing: steps that were already made are as good as any.


class LeaseLifecycle:
    """Makes, changes and ends leases; who gets which is decided elsewhere.

    Attributes:
        _tables: what is known.
        _placement: who can make what.
        _streams: the streams that sessions share.
    """

    def __init__(self, tables: Tables, placement: WorkerPlacement, streams: SharedStreams) -> None:
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
        """Return what an event about a lease says of it, from `first_step` on."""
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


# Giving idle data workers the end of leases that others have not come to. Pure.

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

    def __init__(self, tables: Tables, placement: WorkerPlacement, lifecycle: LeaseLifecycle) -> None:
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
            if worker.tokens or any(
                session.leasable() > 0 and self._placement.may_try(peer, session, now)
                for session in tables.sessions.values()
            ):
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
            # What a loader made itself meanwhile nobody makes again; of a listed order the indices are gone.
            num_steps = max(0, lease.stop - max(first, session.consumed))
            yield _Waiting(lease, session, ahead_s, num_steps, step_s)
            ahead_s += num_steps * step_s

    def _may_steal(self, thief: str, lease: Lease, session: Session, now: float) -> bool:
        spec = session.spec
        chosen = any(lease.first <= step < lease.stop for step in session.failures)  # for who has not failed it
        any_worker_can = not spec.kept_together and spec.sharing is None and not chosen
        return any_worker_can and self._placement.may_try(thief, session, now)


# Steps that failed: which are tried again and where, and which data workers are then to blame. Pure.
#
# `failures.py` has the verdict on one step, `tables.py` what is known of a data worker with one pipeline.

# A step that was lost so often with its data worker is tried while no other one of that kind is: the next loss is its.
_ALONE_FROM = 2
# A supervisor that is there has another process in the place of one that has died by then.
_EXPLAINED_S = 2.0


class Retries:
    """Takes note of failures, and leases failed steps again.

    Attributes:
        _tables: what is known.
        _placement: who can make what.
        _lifecycle: makes and revokes leases.
    """

    def __init__(self, tables: Tables, placement: WorkerPlacement, lifecycle: LeaseLifecycle) -> None:
        self._tables = tables
        self._placement = placement
        self._lifecycle = lifecycle

    def grant(self, now: float) -> list[Instruction]:
        """Lease steps that failed, each alone, to data workers that have not failed them where there are such."""
        out: list[Instruction] = []
        for session in self._tables.sessions.values():
            for step in sorted(session.retries) if session.retries else ():
                if step in session.unexplained:
                    out += self._note_unexplained(session, step, now)
                    continue
                if session.times_lost(step) >= _ALONE_FROM and self._tries_alone(session):
                    continue
                peer = self._who_tries_again(session, session.failures[step], now)
                if peer is not None:
                    session.retries.discard(step)
                    self._lifecycle.keep_together(session, peer)
                    out.append(self._lifecycle.grant(peer, session, range(step, step + 1), now))
        return out

    def _tries_alone(self, session: Session) -> bool:
        """Whether a step that is to be tried by itself is being tried."""
        leases = (self._tables.leases[token] for token in session.tokens)
        return any(session.times_lost(lease.first) >= _ALONE_FROM for lease in leases)

    def note_lost(
        self, session: Session, suspects: Sequence[int], token: int, peer: str, failure: Failure, now: float
    ) -> None:
        """A data worker was lost, and nobody has said at which of the steps that it held, if at any.

        A step that was lost twice is leased by itself, while no other one like it is. When it is lost again, and no
        supervisor says why, that is a failure of the step.
        """
        spec = session.spec
        if isinstance(spec.order, ShardOrder) or spec.sharing is not None or spec.at_most_once:
            return
        for step in set(suspects).intersection(session.requeued):
            was_alone = session.times_lost(step) >= _ALONE_FROM
            session.losses.setdefault(step, []).append(peer)
            if session.times_lost(step) >= _ALONE_FROM:
                session.requeued.remove(step)
                session.retries.add(step)
                session.failures.setdefault(step, StepFailures()).hosts.add(failure.host)
            if was_alone:
                session.unexplained[step] = UnexplainedLoss(now + _EXPLAINED_S, token, peer, failure)

    def explain(self, peer: str) -> None:
        """The supervisor of a data worker that was lost has said how it ended, and at which step."""
        for session in self._tables.sessions.values():
            for step, peers in session.losses.items():
                if peer in peers:
                    peers.remove(peer)
                    session.unexplained.pop(step, None)

    def _note_unexplained(self, session: Session, step: int, now: float) -> list[Instruction]:
        loss = session.unexplained[step]
        if now < loss.until:
            return []
        del session.unexplained[step]
        session.retries.discard(step)
        return self.note_failure(session, step, loss.token, loss.peer, loss.failure, now)

    def _who_tries_again(self, session: Session, failures: StepFailures, now: float) -> str | None:
        """A data worker with a free place: best on a host where the step has not failed, and that makes other steps."""
        tables = self._tables
        able = self._placement.able(session, now)
        elsewhere = [peer for peer in able if able[peer] not in failures.hosts]
        fit = [peer for peer in elsewhere if self._placement.is_fit(peer, session, now)]
        others = fit or elsewhere or [peer for peer in able if peer not in failures.workers] or able
        free = [peer for peers in tables.free for peer in peers if peer in others]
        pipeline_id = session.spec.pipeline_id
        return min(free, key=lambda peer: not tables.workers[peer].is_sound(pipeline_id), default=None)

    def note_made(self, peer: str, session: Session, steps: range, now: float) -> list[Instruction]:
        """Note that a data worker made these steps; who failed them before did so by its own fault."""
        pipeline_id, workers = session.spec.pipeline_id, self._tables.workers
        workers[peer].standing(pipeline_id).made_step()
        out: list[Instruction] = []
        for step in session.failures.keys() & steps if session.failures else ():
            failures = session.failures[step]
            for other in failures.workers & workers.keys() - {peer}:
                pause_s = workers[other].standing(pipeline_id).made_by_another(now)
                out += self._tell_pause(other, pipeline_id, pause_s, "others make the steps that it fails")
            failures.settle()
        return out

    def note_failure(
        self, session: Session, step: int, token: int, peer: str, failure: Failure, now: float
    ) -> list[Instruction]:
        """Count a failure of a step that the loader may still need, and act on the verdict."""
        if session.has(step):
            return []
        spec = session.spec
        failures = session.failures.setdefault(step, StepFailures())
        is_late = token <= failures.last_token  # of a lease from before something was left out
        verdict, out = (OnFailure.TRY_AGAIN, []) if is_late else self._judge(peer, session, step, failure, now)
        out += self._tables.tell(
            events.StepFailed(
                session=spec.session_id,
                step=step,
                sample=failure.sample_index,
                host=failure.host,
                pid=failure.pid,
                verdict=verdict.value,
                traceback=failure.remote_traceback,
                cause=f"{failure.error_type[1]}: {_first_line(failure.text)}",
            )
        )
        leases = [self._tables.leases[held] for held in session.tokens]
        elsewhere = [lease for lease in leases if lease.first <= step < lease.stop]
        if verdict is not OnFailure.TRY_AGAIN:
            # A process that dies is heard of late: its step may be with another one already.
            failures.last_token = self._tables.token_base + self._tables.leases_granted
            for lease in elsewhere:
                out += self._lifecycle.revoke(lease, f"its step {step} is {verdict.value}")
        elif elsewhere:
            return out
        session.requeued = [requeued for requeued in session.requeued if requeued != step]
        if verdict is not OnFailure.RAISE:
            session.retries.add(step)
            return out
        session.lost.add(step)
        return [*out, Send(session.loader, BatchFailed(spec.session_id, step, failure))]

    def _judge(
        self, peer: str, session: Session, step: int, failure: Failure, now: float
    ) -> tuple[OnFailure, list[Instruction]]:
        """Count a failure of a step, and decide what becomes of the step and of who failed it."""
        pipeline_id, worker = session.spec.pipeline_id, self._tables.workers.get(peer)
        failures = session.failures[step]
        if worker is None:  # it was lost with all that it said
            able = self._placement.able(session, now)
            return failures.note(peer, failure, session.spec.errors, failure.host, True, able), []
        standing = worker.standing(pipeline_id)
        was_sound = standing.is_sound
        pause_s = standing.failed_step(failure.is_final, now)
        cause = f"it cannot use the pipeline: {_first_line(failure.text)}"
        out = self._tell_pause(peer, pipeline_id, pause_s, cause)
        able = self._placement.able(session, now)
        if failure.is_final:
            able = self._placement.not_known_to_fail(able, pipeline_id)
        return failures.note(peer, failure, session.spec.errors, worker.host, was_sound, able), out

    def _tell_pause(self, peer: str, pipeline_id: str, pause_s: float, cause: str) -> list[Instruction]:
        if pause_s <= 0:
            return []
        number, host = self._tables.workers[peer].number, self._tables.workers[peer].host
        return self._tables.tell(
            events.DataWorkerPaused(data_worker=number, host=host, pipeline_id=pipeline_id, for_s=pause_s, cause=cause)
        )


def _first_line(text: str) -> str:
    """The beginning of a text that may be long, for a log."""
    return text.partition("\n")[0][:200]


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
        self.placement = WorkerPlacement(tables)
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
                if holder is None or (worker := self._tables.workers[holder]).draining:
                    break
                if not self.placement.can_make(worker, session, now):
                    break
                out.append(self._grant(holder, session, MAX_LEASE_STEPS, now))
        return out

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
