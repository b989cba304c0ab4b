"""Batches on the trainer's device: one is prefetched while the training loop works. Called by `data_loader.py`.

On a CUDA device a batch is copied from pinned memory on a stream of its own while the training loop works on the one
before. The loop's current stream waits for the copy, the host does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hetstream.mpi_dataworkers.loader.position import LoaderPosition, Position, PositionTracker


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
