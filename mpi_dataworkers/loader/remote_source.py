"""Steps of a pass from data workers. Used by `data_loader.py` and, for torch's own class, by `unmodified.py`.

Each shard that is being read has a session with the service. While no data worker delivers, the same pipeline makes the
steps in process, with the same bytes.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any, NoReturn

import msgspec

from hetstream.mpi_dataworkers.errors import ServiceUnavailable
from hetstream.mpi_dataworkers.loader.canary import Differs
from hetstream.mpi_dataworkers.loader.client import LATE_STEP_S, LOCAL_AFTER_S, ServiceClient
from hetstream.mpi_dataworkers.loader.compared_pass import ComparedPass
from hetstream.mpi_dataworkers.loader.connection import LoaderConnection, SentPipeline, SharedStream
from hetstream.mpi_dataworkers.loader.isolated_steps import StepsApart
from hetstream.mpi_dataworkers.loader.session import (
    Delivered,
    Ended,
    LoaderSession,
    LocalFailure,
    LocalFallback,
    SessionRequest,
    Step,
)
from hetstream.mpi_dataworkers.loader.shards import ListedSteps, LookAhead, PassShards, steps_to_gather
from hetstream.mpi_dataworkers.loader.user_errors import made_at, rebuild_error, timed_out
from hetstream.mpi_dataworkers.loader.witness import LEAST_S, MOST_S
from hetstream.mpi_dataworkers.ops.index_form import pack_indices
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep, SampleError, Watched, describe_failure, generators_kept
from hetstream.mpi_dataworkers.ops.process_memory import Looking, WriteWatch
from hetstream.mpi_dataworkers.ops.streams import RankReader, Shard, ShardReader, open_shard, read_step
from hetstream.mpi_dataworkers.order.interleave import Slot
from hetstream.mpi_dataworkers.process.handlers import others
from hetstream.mpi_dataworkers.wire.messages import (
    BatchFailed,
    ErrorPolicy,
    Failure,
    ListedOrder,
    PlannedOrder,
    ShardOrder,
    Sharing,
)

# A program's own sampler, drawn ahead of the training loop, and its steps on their way to the dispatcher.
#
# `step_indices.LookAhead` says how far.


class SamplerAhead:
    """Draws a sampler's steps and sends them.

    Args:
        order: the steps.
        first_step: where the epoch begins or is continued.
        look_ahead: how far they may be drawn.
    """

    def __init__(self, order: ListedSteps, first_step: int, look_ahead: LookAhead) -> None:
        self._order = order
        self._look_ahead = look_ahead
        self._first_step = self._next_step = first_step
        self._end_is_sent = order.num_steps >= 0

    def draw(self, client: ServiceClient, session: LoaderSession, taking: bool, as_torch: bool) -> None:
        """Draw as far as is due, and send what was drawn.

        Args:
            client, session: to whom.
            taking: the training loop asks for the next step now.
            as_torch: no further than torch's own loader; data workers make no step that was not sent.
        """
        if self._end_is_sent:
            return
        order, position = self._order, session.buffer.position
        goal = self._look_ahead.goal(position, session.window, taking, self._next_step > self._first_step, as_torch)
        try:
            while self._next_step < goal and order.indices(self._next_step) is not None:
                self._next_step += 1
        finally:  # also what it gave before it raised
            has_ended, first_unsent = order.num_steps >= 0, session.known_steps
            is_needed = first_unsent <= position < self._next_step
            if has_ended or is_needed or self._next_step - first_unsent >= steps_to_gather(goal, position):
                self._send(client, session, has_ended)

    def send_again(self, client: ServiceClient, session: LoaderSession) -> None:
        """Send all that was drawn and not taken, to a new session."""
        self._send(client, session, self._end_is_sent)

    def _send(self, client: ServiceClient, session: LoaderSession, has_ended: bool) -> None:
        """Send what the session does not know."""
        order = self._order
        steps = [
            pack_indices(indices, order.form(step))
            for step in range(session.known_steps, self._next_step)
            if (indices := order.indices(step)) is not None
        ]
        if steps or has_ended:
            client.extend(session, steps, has_ended)
        self._end_is_sent = has_ended


# Longest wait for data workers that are there and deliver nothing: they may never get what torch's own worker has. A
# large dataset takes minutes to its first step.
_LATE_FOR_S = 240.0
# After a `timeout`, for the processes that hang; they have a second to leave.
_GONE_WITHIN_S = 3.0
# Of a loader's `timeout`, what data workers have for a step before torch's own worker process begins with it, too.
_TIMEOUT_SHARE = 0.5
# At shared memory of the program, for each step; what takes longer is looked at less often.
_SHORT_LOOK_S = 5e-5
_WRITTEN = (
    "the program has written into shared memory in the middle of a pass, which torch's workers see at once. The steps "
    "before that one may have been made of what was there before"
)


class RemoteSource:
    """The steps of a pass from data workers; a `StepSource`.

    Args:
        connection: the loader's; it has a client.
        shards: the steps.
        look_ahead: how far a program's own sampler is drawn.
        sent: what data workers run; default the pipeline as it is now.

    Attributes:
        shards: as given.
    """

    def __init__(
        self,
        connection: LoaderConnection,
        shards: PassShards,
        look_ahead: LookAhead = LookAhead(),  # noqa: B008, it is frozen
        sent: SentPipeline | None = None,
    ) -> None:
        assert connection.client is not None
        self.shards = shards
        self._connection, self._client = connection, connection.client
        self._ahead = look_ahead.num_steps or 2 * connection.pipeline.num_workers  # torch's own prefetch_factor
        self._sent = sent or connection.sent_pipeline()
        order = shards.order
        self._sampler = SamplerAhead(order, shards.position, look_ahead) if isinstance(order, ListedSteps) else None
        self._sessions: list[LoaderSession] = []  # of each slot
        self._shard_of: dict[str, int] = {}  # by session
        self._readers: dict[int, ShardReader | RankReader] = {}  # of shards whose steps are made here
        self._apart: dict[int, StepsApart] = {}  # of shards with steps that a data worker was at when it was lost
        self._compared: ComparedPass | None = None
        self._is_paused = False  # its sessions are closed, and opened again for the next step
        self._writes: WriteWatch | None = None
        self._taken: tuple[int, int, bytes, int] | None = None  # slot, step, snapshot, position of the pass behind it
        self._differs: tuple[int, str] | None = None  # what `Differs` says; it would hold this object in its frames

    def begin(self) -> None:
        """Open the sessions; batches start to come at once."""
        for slot in self.shards.slots:
            self._sessions.append(self._open_session(slot))
        self._draw(taking=False)
        connection, order = self._connection, self.shards.order
        if connection.canary is not None and connection.canary.makes_steps and self._sent.pickled.shared:
            # torch's workers see at once what the program writes there.
            self._writes = WriteWatch(
                self._sent.pickled.digest_of_shared, self._sent.shared_digest, Looking(each_s=_SHORT_LOOK_S)
            )
        if connection.canary is not None and order is not None:
            policy, num_known = connection.skipped.policy, order.num_known
            self._compared = ComparedPass(
                connection.canary,
                connection.pipeline,
                self.shards,
                policy,
                num_known,
                connection.pinned,
                self._sent.message.pipeline_id,
                self._ahead,
            )
            self._draw(taking=False)

    def _open_session(self, slot: Slot) -> LoaderSession:
        """Open a session at a shard's position."""
        shards, shared = self.shards, self._connection.shared
        steps, canary = shards.steps_of(slot.shard), self._connection.canary
        order, num_steps = (steps, -1) if isinstance(steps, ShardOrder) else (steps.wire_order, steps.num_steps)
        request = SessionRequest(
            pipeline=self._sent.message,
            seeds=shards.seeds,
            order=order,
            first_step=slot.step,
            num_steps=num_steps,
            min_window=self._connection.min_window,
            errors=self._connection.skipped.policy,
            sharing=None if shared is None else self._shared_with(shared, order, num_steps),
            shift=0 if shared is None else shared.shift or 0,
            sharers=min(shards.width, len(shards.slots)),
            at_most_once=shards.at_most_once,
            in_order=shards.in_order,
            taken_out_of_order=shards.taken_out_of_order(),
            snapshot=shards.snapshots.get(slot.shard, b""),
            window_if_writing=self._ahead if canary is not None and canary.makes_steps else 0,
        )
        session = self._client.open_session(request)
        self._shard_of[session.session_id] = slot.shard
        return session

    def _shared_with(
        self, shared: SharedStream, order: PlannedOrder | ListedOrder | ShardOrder, num_steps: int
    ) -> Sharing:
        assert not isinstance(order, ShardOrder)  # `options.py` refuses it
        sent = self._sent
        return shared.with_others(sent.message.pipeline_id, sent.stages, self.shards.seeds.seed, order, num_steps)

    def restart(self) -> None:
        """Close the sessions, and open new ones at their positions, with the stages that the pipeline has now."""
        connection = self._connection
        assert connection.sent_pipelines is not None
        self._sent = connection.sent_pipelines.with_stages(self._sent, connection.pipeline)
        self._readers.clear()
        self._close_apart(*self._apart)
        if self._compared is not None:
            self._compared.restart(connection.pipeline)
        if not self._client.is_inherited:  # in a process that was forked since, `prepare` opens new ones
            self._open_again()

    def _open_again(self) -> None:
        """Open new sessions in the middle of the pass, and send them what was drawn for those before."""
        shards, before = self.shards, self._sessions
        if before and not shards.in_order:
            shards.note_taken_out_of_order(before[0].buffer.taken_out_of_order())
        for session in before:
            self._client.close_session(session)
        self._sessions = [self._open_session(slot) for slot in shards.slots]
        for session, former in zip(self._sessions, before, strict=False):
            session.suspects |= former.suspects
        if self._sampler is not None and self._sessions:
            self._sampler.send_again(self._client, self._sessions[0])

    def prepare(self) -> None:
        """Draw the program's sampler; in a process that was forked since, connect first."""
        if self._client.is_inherited and self.shards.order is not None:
            self._go_on_as_child()
        elif self._is_paused:
            self._open_again()
        self._is_paused = False
        self._draw(taking=True)

    def _draw(self, taking: bool) -> None:
        if self._sampler is not None and self.shards.slots:
            as_torch = self._compared is None or self._compared.as_torch
            self._sampler.draw(self._client, self._sessions[0], taking, as_torch)
        if self._compared is not None and self.shards.order is not None:
            self._compared.ask(self.shards.order.num_known)

    def _go_on_as_child(self) -> None:
        """In a process that was forked in the middle of the pass: go on from there with a session of its own."""
        client = self._connection.client
        if client is None:
            raise ServiceUnavailable(
                f"process {os.getpid()} was forked in the middle of an epoch and reaches no dispatcher to go on with it"
            )
        self._client = client
        self._open_again()

    def take(self) -> Delivered | Exception | None:
        """Wait for the next step; see `StepSource`."""
        shards = self.shards
        while shards.slots:
            if self._differs is not None:
                raise Differs(*self._differs)
            if self._writes is not None and self._writes.has_written():
                self._differ(shards.position, _WRITTEN)
            slot_index, step = self._next_step()
            if isinstance(step, Ended):
                self._end_shard(slot_index, step)
                continue
            number = self._sessions[slot_index].buffer.next_step()
            if isinstance(step, Delivered):
                if step.wrote and self._connection.canary is not None:
                    self._connection.canary.writes(number, step.wrote)
                if self._compared is not None and self._compared.due <= number:
                    step = self._as_compared(self._compared, number, step)
                self._taken = slot_index, number, step.snapshot, shards.position + 1
                return step
            self._taken = slot_index, number, b"", shards.position + 1
            return self._as_torch_raises(number) or (
                rebuild_error(step) if isinstance(step, BatchFailed) else made_at(step.error, number)
            )
        return None

    def advance(self) -> None:
        """Move past that step; see `StepSource`."""
        if self._taken is not None:
            slot_index, number, snapshot, position = self._taken
            session = self._sessions[slot_index]
            self._client.advance(session, number)
            self.shards.took(slot_index, session.buffer.position, snapshot, position)
            self._taken = None

    def _as_compared(self, compared: ComparedPass, number: int, step: Delivered) -> Delivered:
        """Compare a step with the program's own, if it is one of those to compare; gives it as the program gets it.

        Raises:
            Differs: it is another.
        """
        difference = compared.difference(number, step)
        if difference is not None:
            self._connection.count(compared_steps=1, differing_steps=bool(difference))
        if difference:
            self._differ(number, difference)
        if difference is None:
            return step
        return msgspec.structs.replace(step, payload=compared.untouched(number, step.payload))

    def _differ(self, number: int, reason: str) -> NoReturn:
        self._differs = number, reason
        self._end_comparing()
        raise Differs(number, reason)

    def _next_step(self) -> tuple[int, Step | Ended]:
        """The next step, or the end of a shard, and the number of its slot."""
        first, sessions = self.shards.next_slot, self._sessions
        # Where the order is to be kept, only the next shard's step will do.
        candidates = sessions[first:] + sessions[:first] if self.shards.any_order else sessions[first : first + 1]
        chosen, step = self._take_from(candidates)
        slot_index = (first + chosen) % len(sessions)
        if isinstance(step, LocalFallback):
            number = step.step
            makes = (
                self._made_by_witness if self._has_witness(self._sessions[slot_index], number) else self._made_instead
            )
            step = makes(slot_index, step)
            if isinstance(step, LocalFailure):
                self._look_at_failure(number, describe_failure(step.error))
        elif isinstance(step, Delivered):
            if self._connection.canary is not None:
                self._connection.canary.late_since = math.inf
            self._client.say_streaming()
        if isinstance(step, BatchFailed):
            self._look_at_failure(step.step, step.failure)
        return slot_index, step

    def _look_at_failure(self, step: int, failure: Failure) -> None:
        """Raise what user code raised only if it would have raised it without data workers.

        Raises:
            Differs: it may not be raised.
        """
        if not self._connection.local_after_failure or self._compared is None:
            return
        why = self._compared.failed(step, failure)
        if not why and not self._compared.is_confirmed(failure):
            # Neither may have got what one process alone can have: look once more where no data worker has anything.
            self._is_paused = True
            for session in self._sessions:
                self._client.close_session(session)
            self._connection.end_processes()
            why = self._compared.failed(step, failure, is_alone=True)
        if why:
            self._connection.count(compared_steps=1, differing_steps=1)
            self._differ(step, why)

    def _as_torch_raises(self, step: int) -> Exception | None:
        """What a program that only knows torch gets for a step that has failed."""
        if not self._connection.local_after_failure or self._compared is None:
            return None
        return self._compared.raised(step)

    def _take_from(self, sessions: list[LoaderSession]) -> tuple[int, Step | LocalFallback | Ended]:
        """Wait for the next step of one of the sessions, and count the steps that were lost before it.

        Returns:
            The number of the session in `sessions`, and its step.

        Raises:
            RuntimeError: the loader's `timeout` passed, and torch's own worker process does not make the step.
        """
        timeout_s = self._connection.timeout_s
        number = sessions[0].buffer.position
        has_witness = self._has_witness(sessions[0], number)
        counts_lost = self.shards.at_most_once
        now = time.monotonic()
        # What is late already is not waited for anew at each step.
        is_late = self._connection.canary is not None and self._connection.canary.late_since < now
        since = now - LATE_STEP_S + LOCAL_AFTER_S if is_late else math.inf
        before_s = timeout_s * (1 if not has_witness else 0 if is_late else _TIMEOUT_SHARE)
        num_lost = sum(session.num_lost for session in sessions) if counts_lost else 0
        try:
            taken = self._client.take(sessions, now + before_s if timeout_s > 0 else None, since)
        except TimeoutError:
            if not has_witness:
                # What hangs is not to keep the next pass waiting, which has as little time.
                self.close()
                self._client.end_processes(_GONE_WITHIN_S)
                raise timed_out(timeout_s) from None
            taken = (
                0,
                LocalFallback(number, f"no data worker delivers it in time (timeout={timeout_s:g})", is_late=True),
            )
        if counts_lost:
            self._connection.count(lost_steps=sum(session.num_lost for session in sessions) - num_lost)
        return taken

    def _has_witness(self, session: LoaderSession, step: int) -> bool:
        """Whether torch's own worker process makes a step in the place of data workers."""
        canary = self._connection.canary
        is_suspect = step in session.suspects
        return self._compared is not None and canary is not None and canary.makes_steps and not is_suspect

    def _made_by_witness(self, slot_index: int, fallback: LocalFallback) -> Step | Ended:
        """Have torch's own worker process make a step that data workers do not deliver.

        A step that ends that process, too, is a suspect, though nobody has said at which step data workers were lost.

        Raises:
            Differs: the program's own loader is to make it: that process cannot, or it makes for a long time what data
                workers that are there do not deliver. They may wait for each other.
            RuntimeError: the loader's `timeout` passed, as torch's loader raises it.
        """
        compared, order, canary = self._compared, self.shards.order, self._connection.canary
        assert compared is not None
        assert order is not None
        assert canary is not None
        self._client.say_local(fallback.reason)
        session, number = self._sessions[slot_index], fallback.step
        # A step that may end that process would take the batch before it along, which comes from its memory.
        stop = min([order.num_known, *(suspect for suspect in session.suspects if suspect > number)])
        limit_s, timeout_s = LEAST_S if fallback.is_late else MOST_S, self._connection.timeout_s
        has_timeout = 0 < timeout_s <= limit_s
        made = compared.instead(number, stop, timeout_s if has_timeout else limit_s)
        if has_timeout and compared.was_late and not canary.is_kept:  # else the program's own loader looks for itself
            if not session.has_next():
                raise timed_out(timeout_s)
            return session.next_step()
        if compared.has_ended:
            session.suspects.add(number)
            return self._made_instead(slot_index, fallback)
        if isinstance(made, str):
            self._differ(number, f"{fallback.reason}, and {made}")
        now = time.monotonic()
        canary.late_since = min(canary.late_since, now) if fallback.is_late and not session.has_next() else math.inf
        if now - canary.late_since > _LATE_FOR_S:
            self._differ(number, f"{fallback.reason}, and torch's own worker process makes it")
        return self._client.put_local(session, Delivered(made.payload, made.num_samples, 0, "local"))

    def _made_instead(self, slot_index: int, fallback: LocalFallback) -> Step | Ended:
        """Make a step in this process instead of waiting for data workers; theirs is taken if it has come meanwhile."""
        self._client.say_local(fallback.reason)
        session = self._sessions[slot_index]
        made = self._made_here(slot_index, fallback.step)
        if made is None:
            self._client.end_session_at(session, fallback.step)
            return Ended.ENDED
        return self._client.put_local(session, made)

    def _made_here(self, slot_index: int, step: int) -> Delivered | LocalFailure | None:
        """Make a step in this process, or in a child of it; None when the shard has no such step."""
        shards, connection = self.shards, self._connection
        shard, is_suspect = shards.slots[slot_index].shard, step in self._sessions[slot_index].suspects
        try:
            steps = shards.steps_of(shard)
            if isinstance(steps, ShardOrder):
                is_apart = is_suspect or shard in self._apart  # where its reader is
                return self._read_apart(steps, step) if is_apart else self._read_here(steps, step)
            if not is_suspect:
                return connection.make_locally(self._sent, steps, step, shards.seeds)
            if self._compared is not None:
                self._compared.give_way()
            if shard not in self._apart:
                self._apart[shard] = connection.makes_apart(self._sent)
            return connection.make_apart(self._apart[shard], steps, step, shards.seeds)
        except SampleError as error:
            failure = error.user_error()
            return LocalFailure(failure if isinstance(failure, Exception) else error)
        except others() as error:  # user code may raise anything; raised in the step's place
            return LocalFailure(error)

    def _read_here(self, steps: ShardOrder, step: int) -> Delivered | None:
        """Read a step of an IterableDataset's shard in this process."""
        connection, shards, policy = self._connection, self.shards, self._connection.skipped.policy
        reader = self._reader(steps)
        with generators_kept(reader.pipeline.own_generators):
            made = read_step(reader, step, shards.snapshots.get(steps.shard, b""), policy)
        if made is None:
            return None
        return Delivered.made_here(connection.pinned(made.batch), made, reader.snapshot)

    def _reader(self, steps: ShardOrder) -> ShardReader | RankReader:
        """The reader of a shard in this process."""
        connection, shards = self._connection, self.shards
        if steps.shard not in self._readers:
            self._readers[steps.shard] = open_shard(
                Shard(connection.pipeline.with_own_generators(), steps, shards.seeds.seed, shards.epoch),
                skips=connection.skipped.policy.on_error != "raise",
            )
        return self._readers[steps.shard]

    def _read_apart(self, steps: ShardOrder, step: int) -> Delivered | None:
        """The same in a child of this process."""
        connection, shards = self._connection, self.shards

        def make(policy: ErrorPolicy, _: Watched, step: int, snapshot: bytes) -> tuple[MadeStep, bytes] | None:
            reader = self._reader(steps)
            made = read_step(reader, step, snapshot, policy)
            return None if made is None else (made, reader.snapshot)

        if steps.shard not in self._apart:
            self._apart[steps.shard] = StepsApart(make)
        snapshot = shards.snapshots.get(steps.shard, b"")
        found = self._apart[steps.shard].made(step, -1, connection.skipped.policy, step, snapshot)
        return None if found is None else Delivered.made_here(connection.pinned(found[0].batch), *found)

    def _end_shard(self, slot_index: int, how: Ended) -> None:
        session, slots = self._sessions[slot_index], self.shards.slots
        shard = self._shard_of[session.session_id]
        self._client.close_session(session)
        self._readers.pop(shard, None)
        self._close_apart(shard)
        if slot_index < len(slots) and slots[slot_index].shard == shard:  # else this is done again: it was interrupted
            self._connection.count(lost_shards=how is Ended.LOST)
            self.shards.ended(slot_index)
        if len(slots) < len(self._sessions):
            del self._sessions[slot_index]
        else:
            self._sessions[slot_index] = self._open_session(slots[slot_index])

    def shard_state(self) -> dict[str, Any] | None:
        """Position in each shard; see `StepSource`."""
        if self.shards.order is not None:
            return None
        return self.shards.state(self._sessions[0].buffer.taken_out_of_order() if self._sessions else [])

    def _close_apart(self, *shards: int) -> None:
        """End children that make steps of shards."""
        for apart in [self._apart.pop(shard) for shard in shards if shard in self._apart]:
            apart.close()

    def close(self) -> None:
        """Close the sessions."""
        self._end_comparing()
        self._close_apart(*self._apart)
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            self._client.close_session(session)

    def abandon(self) -> None:
        """Have the connection's thread close the sessions."""
        self._end_comparing()
        self._close_apart(*self._apart)
        for session in self._sessions:
            self._client.abandon(session)

    def _end_comparing(self) -> None:
        if self._compared is not None:
            self._compared.close()
