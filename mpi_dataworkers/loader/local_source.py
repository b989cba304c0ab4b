"""Steps of a pass made in process. Used by `data_loader.py` and, for torch's own class, by `unmodified.py`.

torch's own DataLoader (`local_workers.py`) runs the pipeline that data workers run: the batches have the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from hetstream.mpi_dataworkers.handlers import of_handler
from hetstream.mpi_dataworkers.loader.delivered import Delivered
from hetstream.mpi_dataworkers.loader.loader_connection import LoaderConnection
from hetstream.mpi_dataworkers.loader.local_workers import (
    FailedStep,
    LocalWorkers,
    ShardEnd,
    early_end,
    read_shards,
    request_of,
)
from hetstream.mpi_dataworkers.loader.pass_shards import PassShards
from hetstream.mpi_dataworkers.loader.skipped import SkippedSamples
from hetstream.mpi_dataworkers.loader.step_indices import Order
from hetstream.mpi_dataworkers.ops.origins import PassSeeds


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
