"""Steps of one shard of an IterableDataset, of elements that follow one another. For others see `round_reader.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.generators import making_sample
from hetstream.mpi_dataworkers.ops.iterable import Shard, ShardSteps
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep, SampleError, seed_generators
from hetstream.mpi_dataworkers.order.sharding import derive_seed
from hetstream.mpi_dataworkers.wire.messages import Failure


class ShardReader(ShardSteps):
    """Makes the steps of one shard; arguments as `ShardSteps`.

    Attributes:
        snapshot: where the reader was after the last step, as `snapshots.pack` gives it, if the dataset or its iterator
            has a state, and what it has left out, if it has.
        snapshot_step: the step that comes next there.
    """

    def __init__(self, shard: Shard, at_sample: Callable[[int], None] = lambda _: None, skips: bool = False) -> None:
        super().__init__(shard, at_sample, skips)
        self.snapshot, self.snapshot_step = b"", 0

    def read(self, step: int, snapshot: bytes = b"", without: Collection[Failure] = ()) -> MadeStep | None:
        """Make one step: the next one costs its elements, another one as many as lie before it.

        Args:
            step: which one.
            snapshot: of a reader of this shard at or before the step, in whatever process; "" for the beginning.
            without: if there are any, the step's elements are read and left out, all of them.

        Returns:
            The step, or None when the shard has fewer.

        Raises:
            SampleError: user code raised; the step counts as read.
            PipelineError: the dataset does not divide itself, or cannot be copied.
        """
        self.is_last_try = bool(without)
        samples = self.samples_of(step, snapshot)
        if samples is None:
            return None
        self.snapshot, self.snapshot_step = self.save(), self.position
        failures = self.failures
        if without or not samples:
            return MadeStep(None, 0, len(samples) + len(failures), [*failures, *without])
        together = samples if self.shard.order.batch_size else samples[0]
        batch = self.pipeline.collated(together, derive_seed(self.seed, step))
        return MadeStep(batch, len(samples), len(failures), failures)

    def next_samples(self) -> list[Any] | None:
        """The elements of the next step; None at the end."""
        order = self.shard.order
        wanted = max(1, order.batch_size)
        samples: list[Any] = []
        self.failures = []
        seed = derive_seed(self.seed, self.position)
        seed_generators(seed)
        try:
            with self.as_worker(), making_sample(seed):
                while len(samples) < wanted and (found := self.next_element()) is not None:
                    samples += found
        except PipelineError:
            raise
        except Exception as error:
            if self.is_of_the_first():
                self.num_steps = self.position
                return None
            self.position += 1
            raise SampleError(-1) from error
        self.check_divided()
        if self.is_of_the_first():
            self.num_steps = self.position
            return None
        if order.drop_last and len(samples) < wanted:
            samples = []
        # A step that has nothing but what it left out is given, so that it is told.
        if not samples and not self.failures:
            self.num_steps = self.position
            return None
        self.position += 1
        return samples
