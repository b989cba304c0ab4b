"""The DataLoader that training programs use: torch's keywords, torch's iteration, batches made by data workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.utils.data

from mpi_dataworkers.config import identity_from_environment, service_from_environment
from mpi_dataworkers.errors import PipelineError, StateError
from mpi_dataworkers.loader.order import ListedPass, Order, PlannedPass
from mpi_dataworkers.loader.stream import LocalIterator, StreamIterator
from mpi_dataworkers.loader.torch_loader import distributed_identity, make_stream, torch_options, why_not_streamable
from mpi_dataworkers.sharding import EpochPlan

_STATE_VERSION = 1
_TorchLoader: Any = torch.utils.data.DataLoader


class DataLoader(_TorchLoader):  # type: ignore[misc]
    """torch's DataLoader, whose batches come from data workers when there is a service.

    Batch k of epoch e depends on the dataset, `seed`, e and k alone: not on the number of data workers, on which of
    them died, or on whether there is a service at all. Each sample's random augmentation is seeded from
    (seed, epoch, sample index). Iterating a second time gives the next epoch; `set_epoch` chooses one.

    With `torch.distributed` initialised (or under `srun`), rank r of R reads the r-th slice of each global batch of
    `batch_size * R` samples, and every rank has the same number of steps. With `sampler` or `batch_sampler` the
    program's own order is kept and each rank reads what its sampler says.

    Args:
        dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last, timeout,
            worker_init_fn, multiprocessing_context, generator, prefetch_factor, persistent_workers, pin_memory_device,
            in_order: as in torch.utils.data.DataLoader. `num_workers` counts local processes when there is no service,
            and with one only sizes the prefetch window.
        seed: base of the order and of all augmentation.
        service: `file:PATH` of a dispatcher's address file; default from HETSTREAM_SERVICE; in process without either.
        job_name: name under which the ranks of one program meet; default from Slurm or torchrun.

    Raises:
        PipelineError: the dataset or a keyword cannot be streamed; the message names it.
        ServiceUnavailable, AuthenticationError, JobNameConflict: the service cannot be used.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int = 0,
        service: str | None = None,
        job_name: str | None = None,
    ) -> None:
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **({"in_order": in_order} if not in_order else {}),
        )
        reason = why_not_streamable(self)
        if reason is not None:
            raise PipelineError(f"this loader cannot be streamed: {reason}. Use torch.utils.data.DataLoader for it.")
        listed = sampler is not None or batch_sampler is not None or batch_size is None or generator is not None
        identity = identity_from_environment(distributed_identity(), job_name)
        self.seed = seed
        self._listed_order = listed
        self._shuffle = bool(shuffle)
        self._rank, self._world_size = (0, 1) if listed else (identity.rank, identity.world_size)
        self._epoch = 0
        self._start_step = 0
        self._yielded = (0, 0)  # epoch, steps taken of it
        order = {"batch_size": str(batch_size), "shuffle": str(bool(shuffle)), "seed": str(seed)}
        self._order_description = order | {"drop_last": str(drop_last), "listed": str(listed)}
        if not listed:
            self._plan(0)  # a division that cannot work is an error here, not at the first epoch
        self._stream = make_stream(self, service or service_from_environment(), identity, self._order_description)
        self._stream.close_with(self)

    def _plan(self, epoch: int) -> EpochPlan:
        return EpochPlan(
            len(self.dataset),
            self.batch_size,
            self._world_size,
            self.drop_last,
            self._shuffle,
            self.seed,
            epoch,
        )

    def __len__(self) -> int:
        """Steps of this rank in an epoch."""
        return int(super().__len__()) if self._listed_order else self._plan(self._epoch).num_steps

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass over the current epoch; the next call begins the next epoch."""
        self._stream.check_length()
        epoch, first_step = self._epoch, self._start_step
        self._epoch, self._start_step = epoch + 1, 0
        self._yielded = (epoch, first_step)
        order = self._new_order(epoch, first_step)
        if self._stream.client is not None:
            passing: StreamIterator | LocalIterator = StreamIterator(
                self._stream, order, self.seed, epoch, first_step, self
            )
        else:
            passing = LocalIterator(self._stream, order, self.seed, epoch, first_step, torch_options(self))
        return _Counting(self, passing, epoch)

    def _new_order(self, epoch: int, first_step: int) -> Order:
        if not self._listed_order:
            return PlannedPass(self._plan(epoch), self._rank)
        for sampler in (self.sampler, self.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        return ListedPass(self._index_sampler, self.batch_sampler is not None, first_step)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; keeps the position when a loaded state is inside that epoch."""
        if epoch != self._epoch:
            self._epoch, self._start_step = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Position in the data: plain values, of the batches that the training loop has taken.

        Saved after the last batch of an epoch and loaded, the next iteration is empty, as the saved one would have
        been; saved after the iteration ended, it is the next epoch.
        """
        epoch, step = self._yielded
        return {
            "version": _STATE_VERSION,
            "epoch": epoch,
            "step": step,
            "seed": self.seed,
            "world_size": self._world_size,
            "pipeline": self._stream.pipeline.description() | self._order_description,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position, in constant time.

        Raises:
            StateError: the state is of another dataset, order or global batch size, or damaged.
        """
        mine = self._stream.pipeline.description() | self._order_description
        try:
            version, epoch, step = (int(state[key]) for key in ("version", "epoch", "step"))
            theirs, world_size = dict(state["pipeline"]), int(state["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"this is no state of a hetstream DataLoader: {error!r}") from error
        if version != _STATE_VERSION:
            raise StateError(f"the state has version {version}, this release reads version {_STATE_VERSION}")
        differences = [
            f"{key}: {theirs.get(key)} in the state, {mine.get(key)} here"
            for key in sorted({*mine, *theirs})
            if theirs.get(key) != mine.get(key)
        ]
        if world_size != self._world_size:
            differences.append(f"world_size: {world_size} in the state, {self._world_size} here")
        if self._listed_order and not _can_repeat(self.batch_sampler or self.sampler):
            raise StateError(
                f"the order of this loader comes from {type(self.sampler).__name__}, which draws anew each time and "
                "cannot go back to where it was. Use shuffle=True with seed=, or a sampler with set_epoch."
            )
        if differences:
            raise StateError(f"the state belongs to another run of the data: {'; '.join(differences)}")
        if step < 0 or epoch < 0 or (not self._listed_order and step > self._plan(epoch).num_steps):
            raise StateError(f"the state names step {step} of epoch {epoch}, which this dataset does not have")
        self._epoch, self._start_step, self._yielded = epoch, step, (epoch, step)

    def stats(self) -> dict[str, float]:
        """Counts since the loader was made: epochs, steps, samples, bytes, wait_s, elapsed_s, local_steps,
        duplicates_dropped; and now: wait_share, num_data_workers, batches_waiting."""
        values: dict[str, float] = msgspec.structs.asdict(self._stream.stats)
        client = self._stream.client
        values["wait_share"] = values["wait_s"] / values["elapsed_s"] if values["elapsed_s"] else 0.0
        values["num_data_workers"] = client.num_data_workers if client else 0
        values["batches_waiting"] = client.num_waiting() if client else 0
        return values

    def close(self) -> None:
        """Leave the service; safe to call twice. Also done when the interpreter ends."""
        self._stream.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _can_repeat(sampler: Any) -> bool:
    """Whether a sampler gives the same order when it is iterated again: a plain sequence, or one with `set_epoch`."""
    if isinstance(sampler, torch.utils.data.BatchSampler):
        return _can_repeat(sampler.sampler)
    plain = not isinstance(sampler, torch.utils.data.Sampler)
    return plain or isinstance(sampler, torch.utils.data.SequentialSampler) or hasattr(sampler, "set_epoch")


class _Counting(Iterator[Any]):
    """Keeps the loader's position: steps that the training loop has taken, and the next epoch at the end."""

    def __init__(self, loader: DataLoader, passing: StreamIterator | LocalIterator, epoch: int) -> None:
        self._loader = loader
        self._passing = passing
        self._epoch = epoch

    def __next__(self) -> Any:
        try:
            batch = next(self._passing)
        except StopIteration:
            self._loader._yielded = (self._epoch + 1, 0)
            raise
        except Exception:
            self._loader._yielded = (self._epoch, self._passing.position)
            raise
        self._loader._yielded = (self._epoch, self._passing.position)
        return batch

    def __len__(self) -> int:
        return len(self._loader)
