"""An epoch of an indexed dataset: its steps from data workers, or made in process; the same pipeline, the same bytes.

Used by `data_loader.py` and, for torch's own class, by `unmodified.py`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from hetstream.mpi_dataworkers.errors import ServiceUnavailable
from hetstream.mpi_dataworkers.loader.definitions import Sent
from hetstream.mpi_dataworkers.loader.delivered import Delivered, Ended, LocalFallback
from hetstream.mpi_dataworkers.loader.loader_connection import LoaderConnection
from hetstream.mpi_dataworkers.loader.local_workers import FailedStep, LocalWorkers, early_end
from hetstream.mpi_dataworkers.loader.order import ListedSteps, LookAhead, Order, steps_to_gather
from hetstream.mpi_dataworkers.loader.session import LoaderSession, SessionRequest
from hetstream.mpi_dataworkers.loader.user_errors import LocalFailure, rebuild_error, summary_of
from hetstream.mpi_dataworkers.ops.index_form import pack_indices
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep
from hetstream.mpi_dataworkers.wire.messages import BatchFailed


class RemoteIterator(Iterator[Any]):
    """One pass over an epoch from data workers; ends at the end of the epoch, or when it is dropped (by `break`, say).

    An exception, of user code or of the service, is raised at its step and never looks like the end: user code's is
    raised once and the next call gives the next step, as in torch; the service's is raised again by each call.

    Args:
        connection: the loader's.
        order: which samples each step has.
        seed: base of the random state of samples.
        epoch: the epoch.
        first_step: where to begin.
        owner: what the connection closes with, kept alive for as long as it is iterated.
        look_ahead: how far a program's own sampler is drawn.
        sent: what data workers run; default the pipeline as it is now.
    """

    def __init__(
        self,
        connection: LoaderConnection,
        order: Order,
        seed: int,
        epoch: int,
        first_step: int,
        owner: object,
        look_ahead: LookAhead = LookAhead(),  # noqa: B008, it is frozen
        sent: Sent | None = None,
    ) -> None:
        assert connection.client is not None
        self._owner = owner
        self._connection = connection
        self._client = connection.client
        self._order = order
        self._seed = seed
        self._epoch = epoch
        self._started = time.monotonic()
        self._look_ahead = look_ahead
        self._first_step = self._listed = first_step
        self._unsent: list[bytes] = []
        self._end_is_sent = order.num_steps >= 0
        self.position = first_step
        self._sent = sent or connection.definition()
        self._session: LoaderSession | None = self._open_session()
        self._extend(taking=False)

    def _open_session(self) -> LoaderSession:
        """Open a session at the position."""
        definition = self._sent.message
        connection, order, seed, shared = self._connection, self._order, self._seed, self._connection.shared
        request = SessionRequest(
            definition=definition,
            epoch=self._epoch,
            seed=seed,
            order=order.order,
            first_step=self.position,
            num_steps=order.num_steps,
            min_window=connection.min_window,
            errors=connection.skipped.policy,
            sharing=shared.with_others(definition.definition_id, seed, order.order, order.num_steps)
            if shared
            else None,
            shift=(shared.shift or 0) if shared else 0,
        )
        return self._client.open_session(request)

    def _go_on_as_child(self) -> LoaderSession:
        """In a process that was forked in the middle of the epoch: go on from there with a session of its own."""
        client, order = self._connection.client, self._order
        if client is None:
            raise ServiceUnavailable(
                f"process {os.getpid()} was forked in the middle of an epoch and reaches no dispatcher to go on with it"
            )
        self._client = client
        self._session = session = self._open_session()
        if isinstance(order, ListedSteps):
            # What the parent drew from the sampler is there.
            drawn = range(self.position, self._listed)
            self._unsent = []
            steps = [
                pack_indices(indices, order.form(step))
                for step in drawn
                if (indices := order.indices(step)) is not None
            ]
            client.extend(session, steps, self._end_is_sent)
        return session

    def _extend(self, taking: bool) -> None:
        """Draw from the program's sampler, and send what was drawn."""
        session, order = self._session, self._order
        if session is None or not isinstance(order, ListedSteps) or self._end_is_sent:
            return
        position = session.buffer.position
        goal = self._look_ahead.goal(position, session.window, taking, self._listed > self._first_step)
        try:
            while self._listed < goal and (indices := order.indices(self._listed)) is not None:
                self._unsent.append(pack_indices(indices, order.form(self._listed)))
                self._listed += 1
        finally:  # also what it gave before it raised
            self._end_is_sent = order.num_steps >= 0
            is_needed = self._listed - len(self._unsent) <= position < self._listed
            if self._end_is_sent or is_needed or len(self._unsent) >= steps_to_gather(goal, position):
                steps, self._unsent = self._unsent, []
                if steps or self._end_is_sent:
                    self._client.extend(session, steps, self._end_is_sent)

    def __next__(self) -> Any:
        while (item := self._next_item()).num_samples == 0:
            pass
        return item.payload

    def _next_item(self) -> Delivered:
        session = self._session
        if session is None:
            raise StopIteration
        if self._client.is_inherited:
            session = self._go_on_as_child()
        step = session.buffer.position
        self._extend(taking=True)
        if step == self._order.num_steps:
            self._connection.count(epochs=1)
            self.close()
            raise StopIteration
        started = time.monotonic()
        item = self._take(session, started)
        self.position = step + 1
        self._order.forget(step)
        if isinstance(item, BatchFailed):
            raise rebuild_error(item)
        if isinstance(item.payload, LocalFailure):
            raise item.payload.error
        if item.num_skipped:
            self._connection.leave_out(self._epoch, step, item.num_skipped, item.left_out)
        if item.num_samples == 0:
            return item
        self._connection.count(
            steps=1, samples=item.num_samples, bytes=item.num_bytes, wait_s=time.monotonic() - started
        )
        if self._connection.shared is not None and item.origin != "local":
            self._connection.count(
                shared_steps=item.origin == "cache",
                repeated_steps=item.origin == "again",
                skipped_steps=self._connection.shared.skipped(item.shift),
            )
        return item

    def _take(self, session: LoaderSession, started: float) -> Delivered | BatchFailed:
        timeout_s = self._connection.timeout_s
        try:
            _, item = self._client.take([session], started + timeout_s if timeout_s > 0 else None)
        except TimeoutError:
            raise RuntimeError(f"DataLoader timed out after {timeout_s:g} seconds") from None
        if isinstance(item, LocalFallback):
            self._client.say_local(item.reason)
            return self._client.put_local(session, self._made_here(item.step))
        if isinstance(item, BatchFailed) and item.failure.is_final and self._connection.makes_what_fails_there:
            self._client.say_local(f"data workers cannot: {summary_of(item.failure)}")
            return self._made_here(item.step)
        assert not isinstance(item, Ended)  # its last step was taken: `_next_item` has seen that
        self._client.say_streaming()
        return item

    def _made_here(self, step: int) -> Delivered:
        self._connection.count(local_steps=1)
        try:
            return self._connection.make_locally(self._sent, self._order, step, self._seed, self._epoch)
        except Exception as error:  # noqa: BLE001, user code may raise anything; raised in the step's place
            return Delivered(LocalFailure(error), -1, 0)

    def close(self) -> None:
        """End the session; safe to call twice."""
        if self._session is not None:
            ended, self._session = self._session, None
            self._connection.count(elapsed_s=time.monotonic() - self._started)
            self._client.close_session(ended)

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None and not self._connection.closed:  # at the interpreter's end connections are closed first
            self._connection.count(elapsed_s=time.monotonic() - self._started)
            self._client.abandon(session)


class LocalEpoch(Iterator[Any]):
    """A pass in process, which counts how long it took."""

    def __init__(self, connection: LoaderConnection) -> None:
        self._connection = connection
        self._started = time.monotonic()
        self._open = True

    def _end(self) -> NoReturn:
        """Count the pass as a whole one, and say that it is over."""
        if self._open:
            self._connection.count(epochs=1)
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Note how long the pass took; safe to call twice."""
        if self._open:
            self._open = False
            self._connection.count(elapsed_s=time.monotonic() - self._started)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


class LocalIterator(LocalEpoch):
    """One pass in process, through torch's own DataLoader with the user's `num_workers`."""

    def __init__(
        self,
        connection: LoaderConnection,
        order: Order,
        seed: int,
        epoch: int,
        first_step: int,
        torch_options: dict[str, Any],
    ) -> None:
        self._epoch = epoch
        self._order = order
        self.position = first_step
        self._workers = connection.local_workers or LocalWorkers(connection.pipeline, torch_options, seed)
        if torch_options.get("persistent_workers"):
            connection.local_workers = self._workers
        self._iterator = self._workers.begin(self, self._steps(connection, order, seed, epoch, first_step))
        super().__init__(connection)

    @staticmethod
    def _steps(connection: LoaderConnection, order: Order, seed: int, epoch: int, first_step: int) -> Iterator[Any]:
        for step in itertools.count(first_step):
            indices = order.indices(step)
            if indices is None:
                return
            yield indices, order.seeds(step, indices, seed, epoch), connection.skipped.policy, order.form(step)

    def __next__(self) -> Any:
        while (made := self._next_made()).num_samples == 0:
            pass
        return made.batch

    def _next_made(self) -> MadeStep:
        started = time.monotonic()
        if self._open and not self._workers.is_current(self):
            raise RuntimeError(
                "another iteration of this DataLoader has begun; with persistent_workers=True there is one at a time"
            )
        made: MadeStep | FailedStep | None = next(self._iterator, None)
        if made is None:
            self._iterator = iter(())  # ends torch's processes
            if self._order.indices(self.position) is not None:
                raise early_end(self.position)
            self._end()
        step = self.position
        self._order.forget(step)
        self.position = step + 1
        if isinstance(made, FailedStep):
            made.reraise()
        assert isinstance(made, MadeStep)
        if made.num_skipped:
            self._connection.leave_out(self._epoch, step, made.num_skipped, made.left_out)
        if made.num_samples > 0:
            self._connection.count(steps=1, samples=made.num_samples, local_steps=1, wait_s=time.monotonic() - started)
        return made
