"""Who gets which steps: the records that the dispatcher keeps, and how leases are handed out, stolen and taken back.

The base of `state.DispatcherState`, which takes in the messages. No socket, no clock, no disk.

A lease goes ACTIVE -> SENT -> (gone). ACTIVE: a worker makes its steps. SENT: the worker has sent them all and the
loader has not reported all of them. From either it may be revoked. The end of an ACTIVE lease may be trimmed off, which
fences nothing: steps that were already made are as good as any.
"""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.records import (
    Binding,
    Instruction,
    Lease,
    LeaseStatus,
    LoaderRecord,
    Send,
    SessionRecord,
    WorkerRecord,
)
from hetstream.mpi_dataworkers.dispatcher.sharing import ShareGroup, ShareGroups
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.rates import RecentRates
from hetstream.mpi_dataworkers.wire.messages import (
    Failure,
    GrantLease,
    LeaseRevoked,
    ListedOrder,
    Membership,
    OpenSession,
    Program,
    ProvideDefinition,
    RevokeLease,
    ShardOrder,
    StepList,
    StepsLost,
    TrimLease,
)
from hetstream.mpi_dataworkers.worker.failures import StepFailures, Verdict
from hetstream.mpi_dataworkers.worker.programs import joined, serves, why_unfit

# A worker that could not reach a loader is not sent there again for this long.
UNREACHABLE_S = 10.0
# One lease in work and one waiting: the worker never idles for a round trip.
LEASES_PER_WORKER = 2
# Long enough that control costs nothing, short enough that the tail of a window is shared among workers.
TARGET_LEASE_S = 0.02
MAX_LEASE_STEPS = 128
# A steal has to bring the end of the stolen lease forward by this much; what a worker does next is looked at as often.
STEAL_GAIN_S = TARGET_LEASE_S
# What the loader has is known this late.
_REPORT_DELAY_S = 0.15
# A worker that failed this many steps, of which nobody knows yet whether others can make them, waits for that.
_MAX_UNEXPLAINED = 2
# A worker that has made no step of a pass may have to load its pipeline first.
_UNKNOWN_STEP_S = 1.0

_NO_PROGRAM = Program("", [])

# Long enough for one burst of messages, which is what the server logs at a time.
_STORY_LENGTH = 512


class Leasing:
    """The records of data workers, loaders, sessions and leases, and what is decided about leases.

    Args:
        incarnation: number of this start of the dispatcher, from 1; the high half of every fencing token, so that
            tokens grow across restarts without journaling each one.
        now: time of the start, s, on the clock of all later calls.
        grant_from: nothing is leased before this time.
    """

    def __init__(self, incarnation: int, now: float, grant_from: float) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.loaders: dict[str, LoaderRecord] = {}
        self.sessions: dict[str, SessionRecord] = {}
        self.leases: dict[int, Lease] = {}
        self.definitions: dict[str, ProvideDefinition] = {}
        self._slots: dict[str, set[str]] = {}  # which workers are in each slot
        self.leases_granted = 0
        self.leases_revoked = 0
        self.recent = RecentRates(now, 0)  # of `leases_granted`
        self.story: deque[events.Event] = deque(maxlen=_STORY_LENGTH)
        self.events_told = 0
        self._shared = ShareGroups()
        # Workers that may get a lease, in the order in which they came free, by the number of leases that they have.
        self._free: list[dict[str, None]] = [{} for _ in range(LEASES_PER_WORKER)]
        self._token_base = incarnation << 32
        self._grant_from = grant_from
        self._next_steal = now
        # Something has changed which may leave a program without a process: see `rooms.py`.
        self._rooms_changed = False

    def _grant_retries(self, now: float) -> list[Instruction]:
        """Lease steps that failed, each alone, to data workers that have not failed them where there are such."""
        out: list[Instruction] = []
        for record in self.sessions.values():
            for step in sorted(record.retries) if record.retries else ():
                peer = self._who_tries_again(record, record.failures[step], now)
                if peer is not None:
                    record.retries.discard(step)
                    self._hold(record, peer)
                    out.append(self._grant_steps(peer, record, range(step, step + 1), now))
        return out

    def _who_tries_again(self, record: SessionRecord, failures: StepFailures, now: float) -> str | None:
        """A data worker with a free place: best on a host where the step has not failed, and that makes other steps."""
        able = self._able(record, now)
        elsewhere = [peer for peer in able if able[peer] not in failures.hosts]
        fit = [peer for peer in elsewhere if self._is_fit(peer, record, now)]
        others = fit or elsewhere or [peer for peer in able if peer not in failures.workers] or able
        free = [peer for peers in self._free for peer in peers if peer in others]
        return min(free, key=lambda peer: not self.workers[peer].is_sound(record.session.definition_id), default=None)

    def _able(self, record: SessionRecord, now: float) -> dict[str, str]:
        """Hosts of the data workers that can be given steps of the session, now or when they come free, by peer id."""
        return {
            peer: worker.host
            for peer, worker in self.workers.items()
            if not worker.draining and self._can_make(worker, record, now)
        }

    def _is_fit(self, peer: str, record: SessionRecord, now: float) -> bool:
        """Whether nothing is known against a data worker: it is not paused, and few of its failures are unexplained."""
        standing = self.workers[peer].standings.get(record.session.definition_id)
        if standing is None or standing.is_sound:
            return True
        unexplained = sum(peer in failures.workers for failures in record.failures.values())
        return now >= standing.paused_until and unexplained < _MAX_UNEXPLAINED

    def _may_try(self, peer: str, record: SessionRecord, now: float) -> bool:
        """Whether a data worker is to be given steps of the session: where none is fit, who is there has to try."""
        if not self._can_make(self.workers[peer], record, now):
            return False
        return self._is_fit(peer, record, now) or not any(
            self._is_fit(other, record, now) for other in self._able(record, now)
        )

    def _note_made(self, peer: str, record: SessionRecord, steps: range, now: float) -> None:
        """A data worker made these steps; who failed them before did so by its own fault."""
        definition_id = record.session.definition_id
        self.workers[peer].standing(definition_id).made_step()
        for step in record.failures.keys() & steps if record.failures else ():
            failures = record.failures[step]
            for other in failures.workers & self.workers.keys() - {peer}:
                pause_s = self.workers[other].standing(definition_id).made_by_another(now)
                self._tell_pause(other, definition_id, pause_s, "others make the steps that it fails")
            failures.settle()

    def _note_verdict(self, peer: str, record: SessionRecord, step: int, failure: Failure, now: float) -> Verdict:
        """Count a failure of a step, and decide what becomes of it."""
        definition_id, worker = record.session.definition_id, self.workers[peer]
        standing, failures = worker.standing(definition_id), record.failures[step]
        was_sound = standing.is_sound
        pause_s = standing.failed_step(failure.is_final, now)
        self._tell_pause(peer, definition_id, pause_s, f"it cannot use the pipeline: {first_line(failure.text)}")
        able = self._able(record, now)
        if failure.is_final:
            able = self._not_known_to_fail(able, definition_id)
        return failures.note(peer, failure, record.session.errors, worker.host, was_sound, able)

    def _not_known_to_fail(self, able: dict[str, str], definition_id: str) -> dict[str, str]:
        """Those of the data workers that use the pipeline, or on whose hosts none has said that it cannot."""
        standings = {peer: self.workers[peer].standings.get(definition_id) for peer in able}
        failed = {able[peer] for peer, its in standings.items() if its is not None and its.cannot_load}
        sound = {peer for peer, its in standings.items() if its is not None and its.is_sound}
        return {peer: host for peer, host in able.items() if peer in sound or host not in failed}

    def _tell_pause(self, peer: str, definition_id: str, pause_s: float, cause: str) -> None:
        if pause_s > 0:
            number, host = self.workers[peer].number, self.workers[peer].host
            event = events.DataWorkerPaused(
                data_worker=number, host=host, definition_id=definition_id, for_s=pause_s, cause=cause
            )
            self._tell(event)

    def _assign(self, now: float) -> list[Instruction]:
        """Hand out leases while a worker has a free place and a session has steps to lease."""
        out: list[Instruction] = []
        if now < self._grant_from:
            return out
        if now >= self._next_steal:
            self._next_steal = now + STEAL_GAIN_S
            out += self._steal(now)
        out += self._grant_retries(now)
        out += self._grant_cached(now)
        # Fewest leases first, so that a window is spread before anyone gets a second lease.
        for free in self._free:
            for peer in list(free):
                unleased = [record for record in self.sessions.values() if record.leasable() > 0]
                if not unleased:
                    return out
                worker = self.workers[peer]
                record = self._neediest_session(peer, unleased, now)
                if record is not None:
                    out.append(self._grant(peer, worker, record, now))
                    if record.session.sharing is not None:
                        out += self._grant_cached(now)
        return out

    def _note_load(self, peer: str) -> None:
        """File a worker under the number of its leases, after each change of it: `_assign` looks at no busy one."""
        worker = self.workers.get(peer)
        load = LEASES_PER_WORKER if worker is None or worker.draining else worker.num_making
        for number, free in enumerate(self._free):
            if number == load:
                free[peer] = None
            else:
                free.pop(peer, None)

    def _grant_cached(self, now: float) -> list[Instruction]:
        """Lease steps that a worker made, or is making, for another session to that worker, also beyond its share."""
        out: list[Instruction] = []
        for record in self.sessions.values() if self._shared else ():
            group = self._group_of(record)
            while group is not None and record.leasable() > 0:
                self._follow(record, group)
                first = record.next_step()
                holder = group.holder(record.position(first))
                if holder is None or not self._may_serve(self.workers[holder], record, now):
                    break
                out.append(self._grant(holder, self.workers[holder], record, now, MAX_LEASE_STEPS))
        return out

    def _may_serve(self, worker: WorkerRecord, record: SessionRecord, now: float) -> bool:
        return not worker.draining and self._can_make(worker, record, now)

    def _can_make(self, worker: WorkerRecord, record: SessionRecord, now: float) -> bool:
        """Whether a data worker reaches the session's loader, and may run its program."""
        reaches = worker.unreachable.get(record.loader, 0.0) <= now
        return reaches and self._definition_for(worker, record) is not None

    def _works_for(self, worker: WorkerRecord, record: SessionRecord) -> bool:
        """Whether a data worker has had leases of this pipeline and trainer, so that no more need be asked."""
        trainer = self.loaders[record.loader].registration.trainer
        return worker.binding is not None and (record.session.definition_id, trainer) in worker.binding.granted

    def _definition_for(self, worker: WorkerRecord, record: SessionRecord) -> str | None:
        """The pipeline from which a data worker process would make the session's steps; None if it must not.

        Where jobs share a stream under a name of their choice, they promise that their pipelines agree.
        """
        session = record.session
        if self._works_for(worker, record) or self._fits(worker, session.definition_id, record.loader):
            return session.definition_id
        if session.sharing is None or worker.binding is None:
            return None
        agreed = worker.binding.streams.get(session.sharing.key, "")
        return agreed if agreed in self.definitions else None

    def _fits(self, worker: WorkerRecord, definition_id: str, loader: str) -> bool:
        """Whether a process may run a pipeline of a loader: it works for this program now, or is fresh and no other
        process of its slot works for it.

        A program that runs again gets fresh processes: the last run may have left something behind. The ranks of one
        run are there at the same time.
        """
        binding, trainer = worker.binding, self.loaders[loader].registration.trainer
        if not self._runs_its_python(worker, loader):
            return False
        if binding is None:
            others = [self.workers[peer] for peer in self._slots.get(worker.slot, ())]
            return not any(
                one.binding and not one.draining and self._fits(one, definition_id, loader) for one in others
            )
        if (definition_id, trainer) in binding.granted:
            return True
        if not serves(binding.program, self._program_of(definition_id)):
            return False
        trainers = binding.trainers
        if trainers is None or trainer in trainers:
            return True
        return any(other.registration.trainer in trainers for other in self.loaders.values())

    def _runs_its_python(self, worker: WorkerRecord, loader: str) -> bool:
        return not why_unfit(worker.interpreter, self.loaders[loader].registration.interpreter)

    def _program_of(self, definition_id: str) -> Program:
        definition = self.definitions.get(definition_id)
        return definition.program if definition is not None else _NO_PROGRAM

    def _bind(self, worker: WorkerRecord, record: SessionRecord, definition_id: str) -> None:
        """The data worker process gets a lease, and is one of the session's program from now on."""
        session, trainer = record.session, self.loaders[record.loader].registration.trainer
        if definition_id != session.definition_id:
            return  # it goes on with its own program
        program = self._program_of(definition_id)
        if worker.binding is None:
            worker.binding = Binding(program, {trainer})
            self._rooms_changed = True
        binding = worker.binding
        binding.program = joined(binding.program, program)
        binding.trainers = {*(binding.trainers or ()), trainer}
        binding.granted.add((definition_id, trainer))
        if session.sharing is not None:
            binding.streams[session.sharing.key] = definition_id

    def _group_of(self, record: SessionRecord) -> ShareGroup | None:
        sharing = record.session.sharing
        return self._shared.get(sharing.key) if sharing is not None else None

    def _join_group(self, record: SessionRecord, message: OpenSession, held: list[Lease]) -> None:
        session = record.session
        if session.sharing is None:
            return
        group = self._shared.join(session.sharing.key, session.session_id)
        shift = message.shift
        if _follows_window(record) and not (message.consumed or message.received or held):
            position = record.position(0) + shift
            shift += group.enter(max(0, position)) - position
        record.shifts = [(0, shift)]
        for lease in held:
            self._note_place(lease, record)

    def _follow(self, record: SessionRecord, group: ShareGroup) -> None:
        """In window mode, move a session on whose next steps have left the caches."""
        if record.requeued or not _follows_window(record):
            return
        position = record.position(record.frontier)
        moved = group.follow(position) - position
        if moved:
            record.shifts.append((record.frontier, record.shift(record.frontier) + moved))

    def _note_place(self, lease: Lease, record: SessionRecord) -> None:
        """A worker still makes these steps of a session, says the worker: others of the group get them there too."""
        group = self._group_of(record)
        if group is not None:
            if lease.shift != record.shift(lease.first):
                record.shifts.append((lease.first, lease.shift))
                record.shifts.sort()
            group.lease(record.position(lease.first), record.position(lease.stop - 1) + 1, lease.worker)

    def _neediest_session(self, peer: str, unleased: Sequence[SessionRecord], now: float) -> SessionRecord | None:
        """Of the sessions that have steps to lease, the one whose steps a data worker is to make first."""
        able = [one for one in unleased if self._may_try(peer, one, now) and self._may_have(peer, one, now)]
        if len(able) < 2:
            return able[0] if able else None
        # What another data worker holds together is taken from it last.
        return min(able, key=lambda record: (record.holder not in ("", peer), record.fill()))

    def _may_have(self, peer: str, record: SessionRecord, now: float) -> bool:
        """Whether a data worker may have a lease of the session, which another one may be keeping together."""
        holder = self.workers.get(record.holder)
        if not record.session.kept_together or record.holder == peer or holder is None:
            return True
        if not self._may_try(record.holder, record, now):
            return True
        # One that has nothing takes a shard of one that has several; it pays for it by reading up to the position.
        held: dict[str, set[Hashable]] = {peer: set(), record.holder: set()}
        for other in self.sessions.values():
            if other.holder in held and (other.leasable() > 0 or other.tokens):
                held[other.holder].add(other.shard)
        return not held[peer] and len(held[record.holder]) > 1

    def _hold(self, record: SessionRecord, peer: str) -> None:
        """A worker has a lease of a session that is kept together, and so of all ranks' that read the same rounds."""
        if not record.session.kept_together or record.holder == peer:
            return
        record.holder = peer
        for other in self.sessions.values() if record.reads_rounds else ():
            if other.shard == record.shard:
                other.holder = peer

    def _grant(self, peer: str, worker: WorkerRecord, record: SessionRecord, now: float, size: int = 0) -> Send:
        kept_together = record.session.kept_together
        # The holder's own reader is already there.
        goes_on = record.holder == peer and not record.requeued
        self._hold(record, peer)
        if size == 0:
            share = max(1, record.leasable() // (LEASES_PER_WORKER * (1 if kept_together else len(self.workers))))
            step_s = worker.step_s.get(record.session.session_id, record.step_s)
            wanted = int(TARGET_LEASE_S / step_s) if step_s > 0 else 1
            size = max(1, min(share, wanted, MAX_LEASE_STEPS))
        if record.requeued:
            first = record.requeued[0]
            stop = first + 1
            while stop - first < size and stop - first < len(record.requeued) and record.requeued[stop - first] == stop:
                stop += 1
        else:
            first = record.frontier
            stop = min(first + size, record.consumed + record.window, record.known_steps)
        stop, cached, again = self._place(peer, record, first, stop)
        if record.requeued:
            record.requeued = record.requeued[stop - first :]
        else:
            record.frontier = stop
        snapshot = b"" if goes_on or not kept_together else record.snapshot_at(first)
        return self._grant_steps(peer, record, range(first, stop), now, cached, again, snapshot)

    def _grant_steps(
        self,
        peer: str,
        record: SessionRecord,
        of: range,
        now: float,
        cached: bool = False,
        again: bool = False,
        snapshot: bytes = b"",
    ) -> Send:
        worker, first, stop = self.workers[peer], of.start, of.stop
        self.leases_granted += 1
        token = self._token_base + self.leases_granted
        session = record.session
        if not self._works_for(worker, record):
            definition_id = self._definition_for(worker, record) or session.definition_id
            self._bind(worker, record, definition_id)
            if definition_id != session.definition_id:
                session = msgspec.structs.replace(session, definition_id=definition_id)
        shift = record.shift(first)
        self.leases[token] = Lease(token, session.session_id, peer, first, stop, now, shift, cached, begun_at=now)
        record.tokens.add(token)
        worker.tokens.add(token)
        if cached:
            worker.cached_tokens.add(token)
        self._note_load(peer)
        steps = _join_steps(first, stop, record.lists) if isinstance(session.order, ListedOrder) else None
        left_out = {step: one.left_out for step, one in record.failures.items() if step in of}
        return Send(peer, GrantLease(token, session, first, stop, steps, shift, again, left_out, snapshot))

    def _place(self, peer: str, record: SessionRecord, first: int, stop: int) -> tuple[int, bool, bool]:
        """Fit a lease of steps [first, stop) into the stream that the session shares.

        Returns:
            Where the lease must stop, so that all of it is alike; whether the worker has it in its cache, or will have;
            whether it was leased before.
        """
        group = self._group_of(record)
        if group is None:
            return stop, False, False
        self._follow(record, group)
        alike = _what_is_known(group, record, first)
        at = first + 1
        while at < stop and _what_is_known(group, record, at) == alike:
            at += 1
        holder, again, _ = alike
        cached = holder == peer
        if not cached:
            group.lease(record.position(first), record.position(at - 1) + 1, peer)
        return at, cached, again

    def _steal(self, now: float) -> list[Instruction]:
        """Give workers that have nothing to do the end of leases that others have not come to.

        Only where the last step is then made earlier by `STEAL_GAIN_S`, as far as the speeds are known: so steps do not
        go back and forth, and a slow worker does not take them from a fast one.
        """
        out: list[Instruction] = []
        for peer in list(self._free[0]):
            worker = self.workers[peer]
            if worker.tokens or any(self._has_steps_for(peer, record, now) for record in self.sessions.values()):
                continue
            best = max(self._thefts(peer, now), key=lambda theft: theft.gain_s, default=None)
            if best is not None and best.gain_s >= STEAL_GAIN_S:
                lease, record, stop = best.lease, self.sessions[best.lease.session_id], best.lease.stop
                self._tell(
                    events.LeaseTrimmed(
                        **self._of_lease(lease, first_step=best.cut),
                        to_data_worker=worker.number,
                        cause=f"the last step is made {best.gain_s:.2f} s earlier",
                    )
                )
                self._trim(lease, best.cut)
                out.append(Send(lease.worker, TrimLease(lease.token, best.cut)))
                out.append(self._grant_steps(peer, record, range(best.cut, stop), now))
        return out

    def _has_steps_for(self, peer: str, record: SessionRecord, now: float) -> bool:
        return record.leasable() > 0 and self._may_try(peer, record, now)

    def _thefts(self, thief: str, now: float) -> Iterable[_Theft]:
        for worker in self.workers.values():
            ahead_s = 0.0  # until the worker comes to the part of the lease that it has not begun
            slowest_s = 0.0
            for place, token in enumerate(sorted(worker.tokens)):
                lease = self.leases[token]
                record = self.sessions.get(lease.session_id)
                if record is None:
                    continue
                elapsed_s = now - lease.begun_at
                step_s = max(worker.step_s.get(lease.session_id, record.step_s), slowest_s)
                first = lease.first
                if place == 0:
                    made = len(range(lease.first, lease.stop)) - len(record.missing(range(lease.first, lease.stop)))
                    step_s = max(step_s, (elapsed_s - _REPORT_DELAY_S) / (made + 1))
                    first += 1 + max(made, int(elapsed_s / step_s) if step_s > 0 else 0)
                    ahead_s = slowest_s = step_s
                num_steps = max(0, lease.stop - first)
                if num_steps and self._may_steal(thief, lease, record, now):
                    thief_s = self.workers[thief].step_s.get(lease.session_id, _UNKNOWN_STEP_S)
                    end_s = ahead_s + num_steps * step_s
                    stolen = min(num_steps, int(end_s / (thief_s + step_s)))
                    if stolen:
                        new_end_s = max(stolen * thief_s, ahead_s + (num_steps - stolen) * step_s)
                        yield _Theft(lease, lease.stop - stolen, end_s - new_end_s)
                ahead_s += num_steps * step_s

    def _may_steal(self, thief: str, lease: Lease, record: SessionRecord, now: float) -> bool:
        session = record.session
        chosen = any(lease.first <= step < lease.stop for step in record.failures)  # for who has not failed it
        any_worker_can = not session.kept_together and session.sharing is None and not chosen
        return any_worker_can and self._may_try(thief, record, now)

    def _trim(self, lease: Lease, stop: int) -> None:
        """Take the steps at or above `stop` out of a lease; whoever calls says where they go."""
        if stop <= lease.first:
            self._forget(lease)
        else:
            lease.stop, lease.trimmed = stop, True

    def _requeue(self, record: SessionRecord, steps: range) -> None:
        """Put those of the steps that are neither there nor leased first in the queue of their session."""
        others = [range(self.leases[token].first, self.leases[token].stop) for token in record.tokens]
        free = [step for step in record.missing(steps) if not any(step in other for other in others)]
        record.requeued = sorted({*record.requeued, *free})

    def _revoke(self, lease: Lease, reason: str, reconnect: bool = False, orderly: bool = False) -> list[Instruction]:
        """Take a lease back and put its missing steps first in the queue of its session.

        In a session that is read at most once they are lost, unless the data worker left in an orderly way.
        """
        self._forget(lease)
        self.leases_revoked += 1
        self._tell(events.LeaseRevoked(**self._of_lease(lease, lease.first), cause=reason))
        out: list[Instruction] = []
        if lease.worker in self.workers:
            self.workers[lease.worker].work.leases_revoked += 1
            out.append(Send(lease.worker, RevokeLease(lease.token, lease.session_id, reconnect, reason)))
        record = self.sessions.get(lease.session_id)
        if record is not None:
            out.append(Send(record.loader, LeaseRevoked(lease.session_id, lease.token)))
            missing = record.missing(range(lease.first, lease.stop))
            if missing and record.session.at_most_once and not orderly:
                return out + self._lose_steps(record, missing)
            self._requeue(record, range(lease.first, lease.stop))
        return out

    def _lose_steps(self, record: SessionRecord, missing: list[int]) -> list[Instruction]:
        """Give up steps of a session that is read at most once; of a shard all that follow, too."""
        session_id, cause = record.session.session_id, "a data worker held them, and the pass is read at most once"
        if isinstance(record.session.order, ShardOrder):
            self._tell(events.StepsGivenUp(session=session_id, ranges=[(missing[0], -1)], cause=cause))
            record.end_at(missing[0])
            return [Send(record.loader, StepsLost(session_id, missing[0], -1))]
        self._tell(events.StepsGivenUp(session=session_id, ranges=as_ranges(missing), cause=cause))
        record.lost.update(missing)
        return [Send(record.loader, StepsLost(session_id, first, stop)) for first, stop in as_ranges(missing)]

    def _forget(self, lease: Lease) -> None:
        del self.leases[lease.token]
        worker = self.workers.get(lease.worker)
        if worker is not None and lease.token in worker.tokens:
            worker.tokens.discard(lease.token)
            worker.cached_tokens.discard(lease.token)
            self._note_load(lease.worker)
        if lease.session_id in self.sessions:
            self.sessions[lease.session_id].tokens.discard(lease.token)
            self.sessions[lease.session_id].sent.discard(lease.token)

    def _mark_unreachable(self, lease: Lease, now: float, reason: str) -> list[Instruction]:
        record = self.sessions.get(lease.session_id)
        if record is None or lease.worker not in self.workers:
            return []
        worker, rank = self.workers[lease.worker], self.loaders[record.loader].registration.rank
        is_news = worker.unreachable.get(record.loader, 0.0) <= now
        worker.unreachable[record.loader] = now + UNREACHABLE_S
        if is_news:  # one event for all of its leases
            self._tell(
                events.DataWorkerUnreachable(data_worker=worker.number, rank=rank, for_s=UNREACHABLE_S, cause=reason)
            )
        return self._announce(now)

    def _reachable_workers(self, loader: str, now: float) -> int:
        return sum(
            worker.unreachable.get(loader, 0.0) <= now and self._runs_its_python(worker, loader)
            for worker in self.workers.values()
        )

    def _announce(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for peer, loader in self.loaders.items():
            count = self._reachable_workers(peer, now)
            if count != loader.announced_workers:
                loader.announced_workers = count
                out.append(Send(peer, Membership(count)))
        return out

    def _tell(self, event: events.Event) -> None:
        self.story.append(event)
        self.events_told += 1

    def _of_lease(self, lease: Lease, first_step: int) -> dict[str, Any]:
        worker = self.workers.get(lease.worker)
        return {
            "lease": lease.token,
            "session": lease.session_id,
            "data_worker": worker.number if worker is not None else -1,
            "first_step": first_step,
            "stop_step": lease.stop,
        }

    def validate(self) -> None:
        """Check the invariants; tests call it after every event.

        Raises:
            AssertionError: with the story, when one does not hold.
        """
        story = "\n".join(event.render() for event in self.story)
        for load, free in enumerate(self._free):
            loads = {p for p, worker in self.workers.items() if worker.num_making == load and not worker.draining}
            assert set(free) == loads, f"workers with {load} leases are filed wrongly\n{story}"
        for token, lease in self.leases.items():
            active = lease.worker in self.workers and token in self.workers[lease.worker].tokens
            assert active == (lease.status is LeaseStatus.ACTIVE), f"lease {token} and its worker disagree\n{story}"
        for record in self.sessions.values():
            leased = [s for t in record.tokens for s in range(self.leases[t].first, self.leases[t].stop)]
            assert record.requeued == sorted(set(record.requeued)), f"requeued steps out of order\n{story}"
            assert not set(leased) & set(record.requeued), f"a step is leased and requeued\n{story}"
            assert not record.retries & {*leased, *record.requeued}, f"a step to be tried again is leased\n{story}"
            covered = {*leased, *record.requeued, *record.retries}
            lost = [s for s in record.missing(range(record.consumed, record.frontier)) if s not in covered]
            assert not lost, f"steps {lost} are neither there nor leased nor requeued\n{story}"


def first_line(text: str) -> str:
    """The beginning of a text that may be long, for a log."""
    return text.partition("\n")[0][:200]


def _what_is_known(group: ShareGroup, record: SessionRecord, step: int) -> tuple[str | None, bool, int]:
    position = record.position(step)
    return group.holder(position), group.was_leased(position), record.shift(step)


def _follows_window(record: SessionRecord) -> bool:
    return record.session.sharing is not None and record.session.sharing.mode == "window"


@dataclass(frozen=True)
class _Theft:
    """Steps [cut, stop) of a lease could go to an idle worker; the last step would be made `gain_s` earlier."""

    lease: Lease
    cut: int
    gain_s: float


def _join_steps(first: int, stop: int, lists: dict[int, bytes]) -> StepList:
    counts = array.array("i", (len(lists[step]) // 8 for step in range(first, stop)))
    return StepList(first, counts.tobytes(), b"".join(lists[step] for step in range(first, stop)))
