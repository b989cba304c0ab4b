"""One pass over the data, wherever its steps come from.

A `StepSource` gives the steps: `remote_source.py` from data workers, `local_source.py` in process. `pass_shards.py`
says which they are. `position.py` begins the passes and, for torch's own class, `unmodified.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

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

    def take(self) -> Delivered | None:
        """Wait for the next step.

        Returns:
            The step; it has no samples if all of them were skipped. None at the end of the pass.

        Raises:
            Exception: user code raised it when the step was made; the step counts as taken.
            HetstreamError: the service failed; each later call raises it again.
        """

    def again(self) -> Callable[[], Any] | None:
        """What makes the batch of the last step that was taken once more, in this process; None where it cannot be."""

    def shard_state(self) -> dict[str, Any] | None:
        """Position in each shard that is being read, as plain values; None where the number of steps says all."""

    def close(self) -> None:
        """Make no more steps. Called once."""

    def abandon(self) -> None:
        """Make no more steps; unlike `close` it takes no lock, as a finaliser calls it."""


class PassIterator(Iterator[Any]):
    """One pass over the data; ends at the end of the data, or when it is dropped (by `break`, say).

    An error is raised at its step and never looks like the end of the data. One of user code is raised once, and the
    next call gives the next step, as in torch. One of the service is raised again by each call.

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
        source.begin()

    def __next__(self) -> Any:
        waited_s = 0.0  # for this step, and for those before it whose samples were all skipped
        while self._is_open:
            if not same_stages(stages := self._connection.pipeline.stages, self._stages):
                self._source.restart()
                self._stages = stages
            self._source.prepare()
            started = time.monotonic()
            step = self._source.take()
            waited_s += time.monotonic() - started
            if step is None:
                self._connection.count(epochs=1)
                self.close()
                break
            if step.num_skipped:
                step_index = self.shards.position - 1
                self._connection.leave_out(self.shards.epoch, step_index, step.num_skipped, step.left_out)
            if step.num_samples > 0:
                self._count(step, waited_s)
                return self._connection.deliver(self.shards.position - 1, step.payload, self._source.again)
        raise StopIteration

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
            self._end()
            self._source.close()

    def _end(self) -> None:
        self._is_open = False
        self._connection.count(elapsed_s=time.monotonic() - self._started)
        optimizer_calls.pause()

    def __del__(self) -> None:
        # When the interpreter ends, connections are closed first; the modules that `_end` needs may be gone after that.
        if getattr(self, "_is_open", False) and not self._connection.closed:
            self._end()
            self._source.abandon()
