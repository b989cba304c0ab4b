"""One pass over the data, wherever its steps come from, and where the training loop is.

A `StepSource` gives the steps: `RemoteSource` from data workers, `LocalSource` in process. `shards.py`
says which they are. `PositionTracker` begins the passes and, for torch's own class, `unmodified.py`.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import msgspec
import torch
from msgspec.structs import replace

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import PipelineError
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
        batch = self._connection.deliver(number, step.payload)
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


# Where a training loop is: the epoch, the pass of that epoch, and the step. Kept by `DataLoader`.
#
# An epoch is what `set_epoch` names. An iteration is one `iter()` of the loader, and reads one epoch. A pass goes over
# the data once. An epoch has `repeat` passes, and `repeat` is mostly 1.


class Position(msgspec.Struct, frozen=True):
    """What the training loop has taken.

    Attributes:
        epoch: which epoch.
        pass_index: which of its passes.
        step: steps taken of that pass.
        shards: position in each shard of the pass; None where `step` says all.
        beginning: the state of the program's own sampler at the beginning of the pass, as `shards.py` writes it;
            None before the pass has begun, and without such a sampler.
        drawn: digest of what the program's own sampler gave for the steps taken.
        is_loaded: the position was loaded, and `set_epoch` has not named its epoch. If it is at the end of that epoch,
            the iteration reads the next one.
    """

    epoch: int
    pass_index: int = 0
    step: int = 0
    shards: dict[str, Any] | None = None
    beginning: str | None = None
    drawn: str = ""
    is_loaded: bool = False

    def order_epoch(self, repeat: int | None) -> int:
        """The number from which order and augmentation are made in place of the epoch: no two passes have the same."""
        return self.epoch * (repeat or 1) + self.pass_index


class LoaderPosition:
    """Where one loader is.

    Attributes:
        next: where the next iteration begins.
        taken: what the training loop has taken.
    """

    def __init__(self) -> None:
        self.next = self.taken = Position(0)

    def begin_iteration(self) -> Position:
        """Give the position at which this iteration begins, and have the iteration after it begin the next epoch."""
        begun, self.next = self.next, Position(self.next.epoch + 1)
        return begun

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a loaded position inside that epoch is kept."""
        self.next = replace(self.next, is_loaded=False) if epoch == self.next.epoch else Position(epoch)

    def load(self, loaded: Position) -> None:
        """Continue from a saved position."""
        self.next = self.taken = loaded

    def move_past(self, ended_epoch: int) -> None:
        """The loaded epoch had nothing left, and the iteration reads the next one: the iteration after it follows."""
        if self.next == Position(ended_epoch + 1):
            self.next = Position(ended_epoch + 2)


class PositionTracker(Iterator[Any]):
    """One iteration: reads the passes of an epoch, and keeps the loader's position up to date.

    Args:
        position: the loader's.
        begin: begins a pass at a position. It is the loader's, and keeps the loader alive.
        num_steps: gives the number of steps of an iteration.
        repeat: passes of an epoch; None for an endless stream.
        dataset_name: what an error calls the dataset.
        finish: makes of a batch what the training loop gets, if that is something else.
        is_prefetched: batches are fetched before the training loop asks for them. Then only `taken` follows them, and
            the loader's position is for the caller to update.

    Attributes:
        taken: position behind the batch that was given last.
    """

    def __init__(
        self,
        position: LoaderPosition,
        begin: Callable[[Position], PassIterator],
        num_steps: Callable[[], int],
        repeat: int | None,
        dataset_name: str,
        finish: Callable[[Any], Any] | None = None,
        is_prefetched: bool = False,
    ) -> None:
        self._position = position
        self._begin, self._num_steps, self._repeat = begin, num_steps, repeat
        self._dataset_name, self._finish = dataset_name, finish
        self._is_prefetched = is_prefetched
        self._pass: PassIterator | None = None
        at = position.begin_iteration()
        # A loaded epoch may have nothing left: then this iteration reads the next one.
        self._may_read_next_epoch = at.is_loaded
        self._begin_pass(at)
        position.taken = self.taken

    def _move_to(self, taken: Position) -> None:
        self.taken = taken
        if not self._is_prefetched:
            self._position.taken = taken

    def _begin_pass(self, at: Position) -> None:
        self._pass = begun = self._begin(at)
        self._at = replace(at, beginning=begun.shards.beginning(), drawn=begun.shards.drawn())
        self._pass_gave_batches = at.step > 0 or at.shards is not None  # before the position, if not now
        self._move_to(self._at)

    def __next__(self) -> Any:
        while self._pass is not None:
            try:
                has_batch = self._pass.wait()
            except Exception:
                self._may_read_next_epoch = False
                self._note_taken(self._pass)
                raise
            if not has_batch:
                self._end_pass(self._pass)
                continue
            self._note_taken(self._pass)
            self._pass_gave_batches |= not self._pass.has_raised
            self._may_read_next_epoch = False
            # On the last line: until then it stays, also if a handler of a signal raises.
            return next(self._pass) if self._finish is None else self._finish(next(self._pass))
        raise StopIteration

    def _end_pass(self, ended: PassIterator) -> None:
        """Begin the next pass, if there is one."""
        repeat, num_steps, at = self._repeat, ended.shards.position, self._at
        if repeat is None and num_steps > 0 and not self._pass_gave_batches:
            self._pass = None
            raise PipelineError(
                f"{self._dataset_name} gave no batch from its beginning to its end, because every sample was "
                "left out: an endless stream of it would never give one. stats() and the log say why."
            )
        # An endless stream of nothing ends.
        is_last = at.pass_index + 1 == repeat or (repeat is None and num_steps == 0)
        if is_last and self._may_read_next_epoch and self._pass_gave_batches:
            self._may_read_next_epoch = False
            self._position.move_past(at.epoch)
            self._begin_pass(Position(at.epoch + 1))
        elif is_last:
            self._move_to(Position(at.epoch + 1))
            self._pass = None
        else:
            self._begin_pass(Position(at.epoch, at.pass_index + 1))

    def _note_taken(self, current: PassIterator) -> None:
        at, shards = self._at, current.shards
        state, drawn = current.shard_state(), shards.drawn()
        self._move_to(Position(at.epoch, at.pass_index, shards.position, state, at.beginning, drawn))

    def __len__(self) -> int:
        return self._num_steps()


# Batches on the trainer's device: one is prefetched while the training loop works. Called by `data_loader.py`.
#
# On a CUDA device a batch is copied from pinned memory on a stream of its own while the training loop works on the one
# before. The loop's current stream waits for the copy, the host does not.


def check_device(device: Any) -> str:
    """Why batches cannot be put on a device of this name, or "" when they can."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"device={device!r}: {str(error).partition(chr(10))[0]}"
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            return f"device={device!r}: this process has no CUDA device"
        if (found.index or 0) >= count:
            return f"device={device!r}: this process has {count} CUDA devices, from cuda:0 on"
    elif found.type not in ("cpu", "meta"):
        return f"device={device!r}: must be a CUDA device, cpu or meta"
    return ""


def is_cuda_missing(device: Any) -> bool:
    """Whether this is a CUDA device, and this process has none at all."""
    try:
        return device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available()
    except (RuntimeError, TypeError, ValueError):
        return False


def move(value: Any, to: Callable[[Any], Any]) -> Any:
    """Rebuild a batch with `to` called on each tensor, and on each object that has a method `to` of its own.

    Goes into dicts, lists, tuples and named tuples; everything else stays as it is.
    """
    if isinstance(value, torch.Tensor) or (hasattr(value, "to") and not isinstance(value, type)):
        return to(value)
    if isinstance(value, Mapping):
        moved = {key: move(item, to) for key, item in value.items()}
        if type(value) is dict:
            return moved
        if isinstance(value, MutableMapping):  # a defaultdict, say, is made of something else than its items
            same = copy.copy(value)
            same.update(moved)
            return same
        return type(value)(moved)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple.__new__(type(value), [move(item, to) for item in value])
    if isinstance(value, list | tuple):
        return type(value)(move(item, to) for item in value)
    return value


class OnDevice(Iterator[Any]):
    """The batches of an iteration on a device, one of them prefetched.

    Args:
        batches: the batches, in host memory; it was told that they are prefetched.
        device: where to.
        position: the loader's; what was taken moves on when the training loop gets a batch, an exception or the end.
        finish: called with each batch before it is copied, where its copy runs.
    """

    def __init__(
        self,
        batches: PositionTracker,
        device: torch.device,
        position: LoaderPosition,
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        self._finish = finish
        self._batches = batches
        self._device = device
        self._position = position
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._prefetched: tuple[Any, Any, Position] | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        if self._prefetched is None:
            self._prefetched = self._fetch()
        batch, copied, position = self._prefetched
        if isinstance(batch, _Raised):
            self._prefetched = None
            self._position.taken = position
            raise batch.error
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            # Its memory belongs to the side stream's pool: not to be used again before the loop's work is done.
            move(batch, lambda item: _record(item, current))
        self._prefetched = self._fetch()  # if the program is interrupted meanwhile, the batch is given next time
        self._position.taken = position
        return batch

    def _fetch(self) -> tuple[Any, Any, Position]:
        """The next batch, its copy under way, the event of the copy's end, and the position behind it."""
        try:
            batch = next(self._batches)
            if self._side is None:
                return self._moved(batch), None, self._batches.taken
            with torch.cuda.stream(self._side):
                return self._moved(batch), self._side.record_event(), self._batches.taken
        except Exception as error:  # noqa: BLE001, raised when the training loop comes to it
            return _Raised(error), None, self._batches.taken

    def _moved(self, batch: Any) -> Any:
        return move(batch if self._finish is None else self._finish(batch), self._copy)

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value.to(self._device)
        if self._side is not None and value.device.type == "cpu" and not value.is_pinned():
            value = value.pin_memory()
        return value.to(self._device, non_blocking=True)


def _record(value: Any, stream: Any) -> Any:
    for tensor in [value] if isinstance(value, torch.Tensor) else list(getattr(value, "__dict__", {}).values()):
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(stream)
    return value
