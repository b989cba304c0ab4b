"""One loader's batches, from data workers or from this process: the same pipeline, the same bytes.

Used by `data_loader.py` and, for torch's own class, by `unmodified.py`.
"""

from __future__ import annotations

import atexit
import builtins
import collections
import importlib
import itertools
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.utils.data
from torch.utils.data._utils import pin_memory as torch_pin

from mpi_dataworkers.address import parse_service
from mpi_dataworkers.client import Delivered, MakeItYourself, Pass, ServiceClient
from mpi_dataworkers.codec import Buffer, split
from mpi_dataworkers.config import Identity, buffer_bytes_from_environment
from mpi_dataworkers.errors import PipelineError, RemoteError
from mpi_dataworkers.loader.order import ListedPass, Order
from mpi_dataworkers.messages import Batch, BatchFailed, LoaderStats, ProvideDefinition
from mpi_dataworkers.ops.pipeline import (
    Pipeline,
    SampleError,
    acting_as_data_worker,
    define,
    enter_data_worker,
    generators_kept,
)
from mpi_dataworkers.ops.tree import resolve_class, unflatten

# A listed order is drawn from the program's sampler this many steps beyond the window.
_LIST_AHEAD_STEPS = 64
_pin_memory: Any = torch_pin.pin_memory
_ordinals = itertools.count()
_open_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


class Stream:
    """What one loader object keeps between iterations: its pipeline, its connection, its statistics."""

    def __init__(
        self,
        pipeline: Pipeline,
        service: str | None,
        identity: Identity,
        pin: bool,
        timeout_s: float,
        min_window: int,
        description: dict[str, str],
    ) -> None:
        self.pipeline = pipeline
        self.timeout_s = timeout_s
        self.min_window = min_window
        self._pin = pin
        self._client: ServiceClient | None = None
        self._stats = LoaderStats()
        self._fallback: Pipeline | None = None
        if service is not None:
            self._client = ServiceClient(
                parse_service(service),
                identity,
                next(_ordinals),
                self.definition(),
                description,
                self._prepare,
                buffer_bytes_from_environment(),
            )
            _open_streams.add(self)

    @property
    def client(self) -> ServiceClient | None:
        return self._client

    @property
    def stats(self) -> LoaderStats:
        return self._stats

    def count(self, **changes: float) -> None:
        """Add to the statistics."""
        fields = {name: getattr(self._stats, name) + value for name, value in changes.items()}
        self._stats = msgspec.structs.replace(self._stats, **fields)
        if self._client is not None:
            dropped = self._client.duplicates_dropped
            self._stats = msgspec.structs.replace(self._stats, duplicates_dropped=dropped)
            self._client.stats = self._stats

    def definition(self) -> ProvideDefinition:
        """The pipeline as it is now, for data workers.

        Asked for at each pass: programs change their dataset between epochs (another transform, say), as they can with
        torch's worker processes, which are forked anew.

        Raises:
            PipelineError: it cannot be pickled.
        """
        defined = define(self.pipeline)
        return ProvideDefinition(defined.definition_id, defined.sys_path, defined.working_dir, defined.blob)

    def check_length(self) -> None:
        """Refuse a dataset whose length changed since it was sent to the data workers.

        Raises:
            PipelineError: it did.
        """
        known = self.pipeline.num_samples
        if known >= 0 and len(self.pipeline.dataset) != known:
            raise PipelineError(
                f"the dataset had {known} samples when this loader started and has {len(self.pipeline.dataset)} now; "
                "data workers hold the first form. Make a new DataLoader for the new data."
            )

    def make_locally(self, order: Order, step: int, seed: int, epoch: int) -> Delivered:
        """Make a step in this process; the trainer's own random state is untouched."""
        indices = order.indices(step)
        if indices is None:
            raise IndexError(step)
        with generators_kept(), acting_as_data_worker(self.pipeline):
            if self._fallback is None:
                self._fallback = enter_data_worker(self.pipeline, 0, 1)
            try:
                batch = self._fallback.make_batch(indices, order.seeds(step, indices, seed, epoch))
            except SampleError as error:
                raise error.user_error() from None
        return Delivered(self._pinned(batch), len(indices), 0)

    def _prepare(self, header: Batch, frames: Sequence[Buffer]) -> Any:
        return self._pinned(unflatten(header.spec, split(frames, header.buffers)))

    def _pinned(self, batch: Any) -> Any:
        return _pin_memory(batch) if self._pin and torch.cuda.is_available() else batch

    def close(self) -> None:
        """Leave the service."""
        if self._client is not None:
            self._client.close()
        _open_streams.discard(self)

    def close_with(self, owner: object) -> None:
        """Leave the service when the loader object is no more: programs make a new loader for each epoch."""
        if self._client is not None:
            weakref.finalize(owner, self._client.request_close).atexit = False


@atexit.register
def _close_streams() -> None:
    for stream in list(_open_streams):
        stream.close()


class StreamIterator(Iterator[Any]):
    """One pass over an epoch from data workers; ends at the end of the epoch, or when it is dropped (by `break`, say).

    An exception, of user code or of the service, is raised at its step and never looks like the end: user code's is
    raised once and the next call gives the next step, as in torch; the service's is raised again by each call.

    Args:
        stream: the loader's stream.
        order: which samples each step has.
        seed: base of the random state of samples.
        epoch: the epoch.
        first_step: where to begin.
        owner: the loader object, kept alive for as long as it is iterated.
    """

    def __init__(self, stream: Stream, order: Order, seed: int, epoch: int, first_step: int, owner: object) -> None:
        assert stream.client is not None
        self._owner = owner
        self._stream = stream
        self._client = stream.client
        self._order = order
        self._seed = seed
        self._epoch = epoch
        self._started = time.monotonic()
        self._listed = first_step
        self.position = first_step
        self._pass: Pass | None = self._client.open_pass(
            stream.definition(), epoch, seed, order.order, first_step, order.num_steps, stream.min_window
        )
        self._extend()

    def _extend(self) -> None:
        """Draw from the program's sampler as far as the window may reach."""
        if self._pass is None or not isinstance(self._order, ListedPass) or self._order.num_steps >= 0:
            return
        goal = self._pass.buffer.position + self._pass.window + _LIST_AHEAD_STEPS
        if self._listed > goal - _LIST_AHEAD_STEPS // 2:
            return
        steps: list[bytes] = []
        while self._listed < goal and (indices := self._order.indices(self._listed)) is not None:
            steps.append(indices.tobytes())
            self._listed += 1
        self._client.extend(self._pass, steps, self._order.num_steps >= 0)

    def __next__(self) -> Any:
        one = self._pass
        if one is None:
            raise StopIteration
        step = one.buffer.position
        self._extend()
        if step == self._order.num_steps:
            self._stream.count(epochs=1)
            self.close()
            raise StopIteration
        started = time.monotonic()
        item = self._take(one, started)
        self.position = step + 1
        self._order.forget(step)
        if isinstance(item, BatchFailed):
            raise rebuild_error(item)
        if isinstance(item.payload, _LocalFailure):
            raise item.payload.error
        self._stream.count(steps=1, samples=item.num_samples, bytes=item.num_bytes, wait_s=time.monotonic() - started)
        return item.payload

    def _take(self, one: Pass, started: float) -> Delivered | BatchFailed:
        timeout_s = self._stream.timeout_s
        try:
            item = self._client.take(one, started + timeout_s if timeout_s > 0 else None)
        except TimeoutError:
            raise RuntimeError(f"DataLoader timed out after {timeout_s:g} seconds") from None
        if isinstance(item, MakeItYourself):
            self._client.say_local(item.reason)
            self._stream.count(local_steps=1)
            try:
                made = self._stream.make_locally(self._order, item.step, self._seed, self._epoch)
            except Exception as error:  # noqa: BLE001, user code may raise anything; raised in the step's place
                made = Delivered(_LocalFailure(error), 0, 0)
            return self._client.put_local(one, made)
        self._client.say_streaming()
        return item

    def close(self) -> None:
        """End the pass; safe to call twice."""
        if self._pass is not None:
            ended, self._pass = self._pass, None
            self._stream.count(elapsed_s=time.monotonic() - self._started)
            self._client.close_pass(ended)

    def __del__(self) -> None:
        one = getattr(self, "_pass", None)
        if one is not None:
            self._stream.count(elapsed_s=time.monotonic() - self._started)
            self._client.abandon(one)


class _LocalFailure:
    """In the place of a batch: user code raised while the loader made the step itself."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def rebuild_error(failed: BatchFailed) -> Exception:
    """The exception of a data worker as its own type, with the sample and the remote traceback in its text."""
    module, name = failed.error_type
    where = f"sample {failed.sample_index}" if failed.sample_index >= 0 else f"step {failed.step}"
    text = f"{failed.text}\n\nin a data worker, {where}:\n{failed.remote_traceback}"
    try:
        if module not in ("builtins", "__main__"):
            importlib.import_module(module)
        kind = getattr(builtins, name) if module == "builtins" else resolve_class(module, name)
        error = kind(text)
    except Exception:  # noqa: BLE001, a class that is not here or takes other arguments: any exception may come
        return RemoteError(f"{module}.{name}: {text}")
    fit = isinstance(error, Exception) and not isinstance(error, StopIteration)  # which would look like the end
    return error if fit else RemoteError(f"{module}.{name}: {text}")


# --- in process -----------------------------------------------------------------------------------------------------


class _StepDataset(torch.utils.data.Dataset[Any]):
    """Steps as elements: lets torch's own worker processes run the pipeline, a batch an element."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __getitem__(self, indices_and_seeds: Any) -> Any:
        indices, seeds = indices_and_seeds
        in_trainer = torch.utils.data.get_worker_info() is None
        try:
            if in_trainer:
                with generators_kept():
                    return self._pipeline.make_batch(indices, seeds)
            return self._pipeline.make_batch(indices, seeds)
        except SampleError as error:
            raise error.user_error() from None


def _no_collate(batch: Any) -> Any:
    return batch


class LocalIterator(Iterator[Any]):
    """One pass in process, through torch's own DataLoader with the user's `num_workers`."""

    def __init__(
        self, stream: Stream, order: Order, seed: int, epoch: int, first_step: int, torch_options: dict[str, Any]
    ) -> None:
        self._stream = stream
        steps: Iterable[Any] = iter(self._steps(order, seed, epoch, first_step))
        loader = torch.utils.data.DataLoader(
            _StepDataset(stream.pipeline),
            batch_size=None,
            sampler=steps,
            collate_fn=_no_collate,
            generator=torch.Generator(),  # its own, so that the program's generators are not advanced
            **torch_options,
        )
        self.position = first_step
        self._sizes: collections.deque[int] = collections.deque()
        self._iterator = torch_iter(loader)
        self._started = time.monotonic()
        self._open = True

    def _steps(self, order: Order, seed: int, epoch: int, first_step: int) -> Iterator[Any]:
        for step in itertools.count(first_step):
            indices = order.indices(step)
            if indices is None:
                return
            order.forget(step)
            self._sizes.append(len(indices))
            yield indices, order.seeds(step, indices, seed, epoch)

    def __next__(self) -> Any:
        started = time.monotonic()
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._open:
                self._stream.count(epochs=1)
            self.close()
            raise
        except Exception:
            if self._sizes:  # none, when it was the program's sampler that raised
                self._sizes.popleft()
                self.position += 1
            raise
        self.position += 1
        self._stream.count(steps=1, samples=self._sizes.popleft(), local_steps=1, wait_s=time.monotonic() - started)
        return batch

    def close(self) -> None:
        """Note how long the pass took; safe to call twice."""
        if self._open:
            self._open = False
            self._stream.count(elapsed_s=time.monotonic() - self._started)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


def torch_iter(loader: Any) -> Iterator[Any]:
    """Iterate a loader as torch does, also where the hook has changed the class."""
    method: Any = torch.utils.data.DataLoader.__iter__
    iterator: Iterator[Any] = getattr(method, "__wrapped__", method)(loader)
    return iterator
