"""Where a training loop is: the epoch, the pass of that epoch, and the step. Kept by `DataLoader`.

An epoch is what `set_epoch` names. An iteration is one `iter()` of the loader, and reads one epoch. A pass goes over
the data once. An epoch has `repeat` passes, and `repeat` is mostly 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader.pass_iterator import PassIterator


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


class _Raised:
    """In the place of a batch."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _record(value: Any, stream: Any) -> Any:
    for tensor in [value] if isinstance(value, torch.Tensor) else list(getattr(value, "__dict__", {}).values()):
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(stream)
    return value
