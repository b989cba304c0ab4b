"""One pass over the data, wherever its steps come from.

A `StepSource` gives the steps: `RemoteSource` from data workers, `LocalSource` in process. `shards.py`
says which they are. `position.py` begins the passes and, for torch's own class, `unmodified.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.loader import step_times
from hetstream.mpi_dataworkers.loader.connection import LoaderConnection
from hetstream.mpi_dataworkers.loader.local_workers import (
    FailedStep,
    LocalWorkers,
    ShardEnd,
    early_end,
    read_shards,
    request_of,
)
from hetstream.mpi_dataworkers.loader.session import Delivered
from hetstream.mpi_dataworkers.loader.shards import Order, PassShards
from hetstream.mpi_dataworkers.loader.statistics import SkippedSamples
from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.ops.pipeline import same_stages
from hetstream.mpi_dataworkers.process.handlers import of_handler


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
        if step.cache is not None:
            self._connection.count_cache(step.cache)
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
        step_times.pause()

    def __del__(self) -> None:
        # When the interpreter ends, connections are closed first; the modules that `_end` needs may be gone after that.
        if getattr(self, "_is_open", False) and not self._connection.closed:
            self._end()
            self._source.abandon()


# Steps of a pass made in process. Used by `data_loader.py` and, for torch's own class, by `unmodified.py`.
#
# torch's own DataLoader (`local_workers.py`) runs the pipeline that data workers run: the batches have the same bytes.


class LocalSource:
    """The steps of a pass from torch's own DataLoader; a `StepSource`.

    Args:
        connection: the loader's.
        shards: the steps.
        torch_options: keywords of torch's DataLoader.

    Attributes:
        shards: as given.
    """

    def __init__(self, connection: LoaderConnection, shards: PassShards, torch_options: dict[str, Any]) -> None:
        self.shards = shards
        self._connection = connection
        self._torch_options = torch_options
        self._workers: LocalWorkers | None = None
        self._steps: Iterator[Any] = iter(())
        self._is_cut = False  # they are to begin anew
        self._given: list[Any] = []  # by them, for the next step
        self._taken: tuple[int, int, bytes, int] | None = None  # as `PassShards.took` is told

    def begin(self) -> None:
        """Start torch's worker processes."""
        connection, shards, options = self._connection, self.shards, self._torch_options
        if shards.order is None:
            self._steps = read_shards(connection.pipeline, shards, connection.skipped.policy, options)
            return
        self._workers = connection.local_workers or LocalWorkers(connection.pipeline, options)
        if options.get("persistent_workers"):
            connection.local_workers = self._workers
        steps = _StepsToMake(connection.skipped, shards.order, shards.seeds, shards.position)
        self._steps = self._workers.begin(self, steps)

    def restart(self) -> None:
        """Start torch's worker processes anew, with the batch stage that the pipeline has now."""
        self._steps, self._workers = iter(()), None  # ends those before
        self.begin()

    def prepare(self) -> None:
        """Nothing: torch's own loader draws the sampler when it makes a step."""

    def take(self) -> Delivered | BaseException | None:
        """Wait for the next step; see `StepSource`."""
        if self._workers is not None and not self._workers.is_current(self):
            raise RuntimeError(
                "another iteration of this DataLoader has begun; with persistent_workers=True there is one at a time"
            )
        shards = self.shards
        while True:
            if not self._given and not self._draw():
                break
            step = self._given[0]
            shards.skip_taken()
            slot_index = shards.next_slot
            if isinstance(step, ShardEnd):
                self._given = []
                shards.ended(slot_index)
                continue
            number = shards.slots[slot_index].step
            if isinstance(step, FailedStep):
                self._taken = slot_index, number + 1, b"", shards.position + 1
                return step.raised(number)
            made, snapshot = step
            self._taken = slot_index, number + 1, snapshot, shards.position + 1
            return Delivered.made_here(made.batch, made)
        self._steps = iter(())  # ends torch's processes
        if shards.has_more():
            raise early_end(shards.position)
        return None

    def _draw(self) -> bool:
        """Wait for torch's next step; whether there is one."""
        if self._is_cut:
            self.restart()
            self._is_cut = False
        try:
            self._given.extend(itertools.islice(self._steps, 1))
        except BaseException as error:
            # Ctrl-C, or a handler of a signal: the step was being made here, and is made once more.
            is_cut = not isinstance(error, Exception) or of_handler(error)
            self._is_cut = is_cut and not self._torch_options["num_workers"]
            raise
        return bool(self._given)

    def advance(self) -> None:
        """Move past that step; see `StepSource`."""
        if self._taken is not None:
            self.shards.took(*self._taken)
            self._given = []
            self._taken = None

    def again(self) -> Callable[[], Any] | None:
        """What makes the batch of the last step that was taken once more; see `StepSource`."""
        sent_pipelines = self._connection.sent_pipelines
        sent = sent_pipelines.last if sent_pipelines is not None else None
        return self._connection.makes_again(sent, self.shards) if sent is not None else None

    def shard_state(self) -> dict[str, Any] | None:
        """Position in each shard; see `StepSource`."""
        return self.shards.state(self.shards.taken_out_of_order())

    def close(self) -> None:
        """Nothing: torch ends its processes with its iterator."""

    def abandon(self) -> None:
        """Nothing: torch ends its processes with its iterator."""


# No method: torch's kept processes hold it, and must hold neither the source, with which the iteration ends, nor the
# connection, which holds them: torch ends processes that are in a cycle of references by force, after 5 s each.
class _StepsToMake(Iterator[Any]):
    """What torch's processes are given for each step. No generator: an exception of a handler would end it."""

    def __init__(self, skipped: SkippedSamples, order: Order, seeds: PassSeeds, first_step: int) -> None:
        self._skipped, self._order, self._seeds, self._step = skipped, order, seeds, first_step

    def __next__(self) -> Any:
        request = request_of(self._order, self._step, self._seeds, self._skipped.policy)
        if request is None:
            raise StopIteration
        self._step += 1
        return request
