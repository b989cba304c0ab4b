"""One pass over the data, wherever its steps come from.

A `StepSource` gives the steps: `remote_source.py` from data workers, `local_source.py` in process. `pass_shards.py`
says which they are. `position.py` begins the passes and, for torch's own class, `unmodified.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.loader import optimizer_calls
from hetstream.mpi_dataworkers.loader.delivered import Delivered
from hetstream.mpi_dataworkers.loader.loader_connection import LoaderConnection
from hetstream.mpi_dataworkers.loader.pass_shards import PassShards
from hetstream.mpi_dataworkers.ops.pipeline import same_stages


class StepSource(Protocol):
    """Gives the steps of a pass.

    Attributes:
        shards: the steps by shard, and how far each shard was read.
    """

    shards: PassShards

    def begin(self) -> None:
        """Begin to make steps. If it raises, `abandon` ends what has begun."""

    def restart(self) -> None:
        """Go on at the next step with the stages that the connection has now; steps made ahead are dropped.

        Raises:
            HetstreamError: it cannot, and nothing has changed.
        """

    def prepare(self) -> None:
        """Draw what the next step needs from the program's own sampler; its time does not count as waiting for data."""

    def take(self) -> Delivered | BaseException | None:
        """Wait for the next step. It stays until `advance`: before that, another call gives the same one.

        Returns:
            The step; it has no samples if all of them were skipped. Or what user code raised when it was made. None at
            the end of the pass.

        Raises:
            Exception: a handler of a signal raised it; nothing is lost.
            HetstreamError: the service failed; each later call raises it again.
        """

    def advance(self) -> None:
        """Move past the step that `take` has given. To do so once more, also after a part of it, changes nothing."""

    def again(self) -> Callable[[], Any] | None:
        """What makes the batch of the last step that was taken once more, in this process; None where it cannot be."""

    def shard_state(self) -> dict[str, Any] | None:
        """Position in each shard that is being read, as plain values; None where the number of steps says all."""

    def close(self) -> None:
        """Make no more steps. Called once, or again where a handler of a signal has interrupted it."""

    def abandon(self) -> None:
        """Make no more steps; unlike `close` it takes no lock, as a finaliser calls it."""


class _Raised:
    """In the place of a batch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class PassIterator(Iterator[Any]):
    """One pass over the data; ends at the end of the data, or when it is dropped (by `break`, say).

    An error is raised at its step and never looks like the end of the data. One of user code is raised once, and the
    next call gives the next step, as in torch. One of the service is raised again by each call. One that a handler of a
    signal raises in the middle of a call (a watchdog, Ctrl-C) takes no step along: what a call has got stays here until
    its last line, and the next call goes on from there.

    Args:
        connection: the loader's.
        source: gives the steps.
        owner: the loader. The pass keeps it alive, because the connection closes when it is dropped.

    Attributes:
        shards: of the source.
    """

    def __init__(self, connection: LoaderConnection, source: StepSource, owner: object) -> None:
        self._owner = owner
        self._connection = connection
        self._source = source
        self.shards = source.shards
        self._started = time.monotonic()
        self._is_open = True
        self._stages = connection.pipeline.stages
        self._step: Delivered | BaseException | None = None  # that the source has given, and the program does not have
        self._batch: list[Any] = []  # of that step, as the program gets it
        self._waited_s = 0.0  # for that step, and for those before it whose samples were all skipped
        source.begin()

    @property
    def has_batch(self) -> bool:
        """Whether the next batch was taken, as the call that took it was interrupted."""
        return bool(self._batch) or self._step is not None

    @property
    def has_raised(self) -> bool:
        """Whether what `wait` has waited for is an exception of user code."""
        return bool(self._batch) and isinstance(self._batch[0], _Raised)

    def __next__(self) -> Any:
        if not self.wait():
            raise StopIteration
        if self.has_raised:
            raise self._batch.pop().error
        return self._batch.pop()

    def wait(self) -> bool:
        """Wait for the next batch, or an exception in its place, and move past its step. It is given by the next call.

        Returns:
            Whether there is one; False at the end.
        """
        while not self._batch:
            if self._step is None:
                self._take_step()
            if self._step is None:
                return False
            assert self._step is not None
            self._source.advance()
            self._batch, self._step = self._batch_of(self._step), None
        return True

    def _take_step(self) -> None:
        """Wait for the next step, if there is one. No variable here has it: frames of an exception stay with it."""
        if not self._is_open:
            return
        if not same_stages(stages := self._connection.pipeline.stages, self._stages):
            self._source.restart()
            self._stages = stages
        self._source.prepare()
        started = time.monotonic()
        try:
            self._step = self._source.take()
        finally:
            self._waited_s += time.monotonic() - started
        if self._step is None:
            self._connection.count(epochs=1)
            self.close()

    def _batch_of(self, step: Delivered | BaseException) -> list[Any]:
        """What the program gets of a step; nothing where all its samples were skipped."""
        if isinstance(step, BaseException):
            self._waited_s = 0.0
            return [_Raised(step)]
        number = self.shards.position - 1
        if step.num_skipped:
            try:
                self._connection.leave_out(self.shards.epoch, number, step.num_skipped, step.left_out)
            except HetstreamError as error:
                return [_Raised(error)]
        if not step.num_samples:
            return []
        batch = self._connection.deliver(number, step.payload, self._source.again)
        self._count(step, self._waited_s)
        self._waited_s = 0.0
        return [batch]

    def _count(self, step: Delivered, wait_s: float) -> None:
        connection, is_local = self._connection, step.origin == "local"
        connection.count(steps=1, samples=step.num_samples, bytes=step.num_bytes, local_steps=is_local, wait_s=wait_s)
        if connection.shared is not None and not is_local:
            connection.count(
                shared_steps=step.origin == "cache",
                repeated_steps=step.origin == "again",
                skipped_steps=connection.shared.skipped(step.shift),
            )

    def shard_state(self) -> dict[str, Any] | None:
        """Position in each shard that is being read, as plain values; None where the number of steps says all."""
        return self._source.shard_state()

    def close(self) -> None:
        """End the pass; safe to call twice."""
        if self._is_open:
            self._source.close()
            self._end()

    def _end(self) -> None:
        self._is_open = False
        self._connection.count(elapsed_s=time.monotonic() - self._started)
        optimizer_calls.pause()

    def __del__(self) -> None:
        # When the interpreter ends, connections are closed first; the modules that `_end` needs may be gone after that.
        if getattr(self, "_is_open", False) and not self._connection.closed:
            self._end()
            self._source.abandon()
