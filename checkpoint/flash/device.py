"""The copy of a save: tensors of any device into a slot.

CPU tensors are copied in pieces, by as many threads as are free to take one. Tensors of a GPU are copied on a stream of
their own into pinned memory; the slot is pinned once, when it is first used.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from checkpoint.flash.tensors import Move

_log = logging.getLogger(__name__)

# Copies of so many bytes are shared by threads; of fewer, waiting for the GIL between two would take longer.
_SHARED_BYTES = 64 << 10
# What a thread takes at a time, and for how much another one is worth its start. More threads than the limit are not
# faster than memory is.
_PIECE_BYTES = 8 << 20
_THREAD_BYTES = 64 << 20
_MAX_THREADS = 8


class Copier:
    """Copies tensors; keeps one stream for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Order what `copy` will do behind what the GPUs have been given to do so far.

        Args:
            tensors: what will be copied.
        """
        for device in _devices_of(tensors):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def copy(self, destinations: list[torch.Tensor], tensors: list[torch.Tensor], moves: Sequence[Move] = ()) -> None:
        """Copy each tensor to its destination; when it returns, all bytes are there. The GIL is free meanwhile.

        Args:
            destinations: in main memory.
            tensors: of the same shapes and dtypes, on any device.
            moves: more, in main memory.
        """
        devices = _devices_of(tensors)
        with torch.no_grad():
            if not devices:
                copy_in_memory(destinations, tensors, moves)
                return
            for device in devices:
                chosen = [index for index, tensor in enumerate(tensors) if tensor.device == device]
                with torch.cuda.stream(self._streams[device]):
                    torch._foreach_copy_(
                        [destinations[index] for index in chosen],
                        [tensors[index] for index in chosen],
                        non_blocking=True,
                    )
            here = [index for index, tensor in enumerate(tensors) if tensor.device.type != "cuda"]
            copy_in_memory([destinations[index] for index in here], [tensors[index] for index in here], moves)
            for device in devices:
                self._streams[device].synchronize()


def pin(memory: torch.Tensor) -> Callable[[], object] | None:
    """Register a slot's memory with CUDA, so that copies run at full speed and beside the program.

    Without CUDA, nothing; where CUDA refuses, copies are slower, and it is logged.

    Args:
        memory: of the slot, as bytes.

    Returns:
        What undoes it, to be called before the memory is unmapped; None if nothing was done.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()
    code = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(code) != 0:
        _log.warning("a slot of %d bytes cannot be pinned (%s): saves from the GPU are slower", memory.nbytes, code)
        return None
    return functools.partial(runtime.cudaHostUnregister, address)


def copy_in_memory(
    destinations: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], moves: Sequence[Move] = ()
) -> None:
    """Copy CPU tensors; no thread waits while there is something left to copy. Autograd does not notice.

    Args:
        destinations: in main memory.
        tensors: of the same shapes, in main memory.
        moves: more, by their addresses.
    """
    left_to_torch: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    moves = [*moves]
    for destination, tensor in zip(destinations, tensors, strict=True):
        is_plain = tensor.is_contiguous() and destination.is_contiguous()
        if not is_plain or tensor.is_conj() or tensor.is_neg() or not _are_alike(tensor, destination):
            left_to_torch[0].append(destination)
            left_to_torch[1].append(tensor)
        else:
            moves.append((destination.data_ptr(), tensor.data_ptr(), tensor.nbytes))
    shared = [move for move in moves if move[2] >= _SHARED_BYTES]
    remaining = iter([piece for move in shared for piece in (_pieces(*move) if move[2] > _PIECE_BYTES else (move,))])

    def work() -> None:
        for piece in remaining:
            ctypes.memmove(*piece)  # without the GIL

    shared_bytes = sum(move[2] for move in shared)
    wanted = min(torch.get_num_threads(), _MAX_THREADS, shared_bytes // _THREAD_BYTES)
    helpers = [threading.Thread(target=work, name="checkpoint copy") for _ in range(1, wanted)]
    for helper in helpers:
        helper.start()
    if left_to_torch[0]:
        torch._foreach_copy_(*left_to_torch)
    for move in moves:
        if move[2] < _SHARED_BYTES:
            ctypes.memmove(*move)
    work()
    for helper in helpers:
        helper.join()


def _pieces(into: int, start: int, num_bytes: int) -> Iterator[Move]:
    return ((into + at, start + at, min(_PIECE_BYTES, num_bytes - at)) for at in range(0, num_bytes, _PIECE_BYTES))


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.nbytes == other.nbytes


def _devices_of(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    """The GPUs that tensors are on."""
    if not torch.cuda.is_available():
        return []
    return list({tensor.device: None for tensor in tensors if tensor.is_cuda})
