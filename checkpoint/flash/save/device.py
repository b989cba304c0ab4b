"""The copy of a save: tensors of any device into a slot.

CPU tensors are copied in pieces, by as many threads as are free to take one. Tensors of a GPU are copied on a stream of
their own into pinned memory; the slot is pinned once, when it is first used. Tensors of any other device are left to
torch, one after the other: their addresses mean nothing here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from hetstream.checkpoint.flash.tensors import Move

_log = logging.getLogger(__name__)

# Copies of so many bytes are shared by threads; of fewer, waiting for the GIL between two would take longer.
_SHARED_BYTES = 64 << 10
# What a thread takes at a time, and for how much another one is worth its start. More threads than the limit are not
# faster than memory is.
_PIECE_BYTES = 8 << 20
_THREAD_BYTES = 64 << 20
_MAX_THREADS = 8
_MAX_INTERRUPTS = 100


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
                self._copy_without_streams(destinations, tensors, moves)
                return
            try:
                for device in devices:
                    chosen = [index for index, tensor in enumerate(tensors) if tensor.device == device]
                    with torch.cuda.stream(self._streams[device]):
                        torch._foreach_copy_(
                            [destinations[index] for index in chosen],
                            [tensors[index] for index in chosen],
                            non_blocking=True,
                        )
                here = [index for index, tensor in enumerate(tensors) if tensor.device.type != "cuda"]
                self._copy_without_streams(
                    [destinations[index] for index in here], [tensors[index] for index in here], moves
                )
            finally:
                # After an error too: who gives the slot up gives it to the next save.
                settle([self._streams[device].synchronize for device in devices])

    @staticmethod
    def _copy_without_streams(
        destinations: list[torch.Tensor], tensors: list[torch.Tensor], moves: Sequence[Move]
    ) -> None:
        pairs = [*zip(destinations, tensors, strict=True)]
        for destination, tensor in pairs:
            if not tensor.is_cpu:
                destination.copy_(tensor.cpu())
        in_memory = [pair for pair in pairs if pair[1].is_cpu]
        copy_in_memory([one for one, _ in in_memory], [one for _, one in in_memory], moves)


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
    remaining = deque(piece for move in shared for piece in (_pieces(*move) if move[2] > _PIECE_BYTES else (move,)))
    shared_bytes = sum(move[2] for move in shared)
    wanted = min(torch.get_num_threads(), _MAX_THREADS, shared_bytes // _THREAD_BYTES)
    helpers = [_Helper(remaining) for _ in range(1, wanted)]
    try:
        for helper in helpers:
            helper.start()
        if left_to_torch[0]:
            torch._foreach_copy_(*left_to_torch)
        for move in moves:
            if move[2] < _SHARED_BYTES:
                ctypes.memmove(*move)
        _copy_pieces(remaining)
    except BaseException:
        remaining.clear()
        raise
    finally:
        settle([helper.end for helper in helpers], remaining.clear)


def settle(ends: Iterable[Callable[[], object]], hasten: Callable[[], object] = lambda: None) -> None:
    """Call functions that wait, each until it has returned: what they wait for writes to memory that others get.

    An interrupt meanwhile (Ctrl-C, a signal handler that raises) is raised when all have.

    Args:
        ends: each may be called again.
        hasten: called when an interrupt has come, and the result is of no more use.
    """
    interrupt: BaseException | None = None
    for end in ends:
        for _ in range(_MAX_INTERRUPTS):  # a device that is lost fails each time, and writes no more
            try:
                end()
                break
            except BaseException as error:  # noqa: BLE001, raised below
                interrupt = error
                hasten()
    if interrupt:
        raise interrupt


class _Helper:
    """A thread that copies pieces until none is left.

    Args:
        remaining: the pieces, for all threads.
    """

    def __init__(self, remaining: deque[Move]) -> None:
        self._remaining = remaining
        # Each side first says what it does, and then looks what the other one does: at least one of them sees it.
        self._has_begun = False
        self._is_over = False
        # Thread.join would do, but Ctrl-C in it makes Python take the thread for ended (bpo-45274).
        self._is_done = threading.Event()

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._work, name="checkpoint copy").start()

    def end(self) -> None:
        """Wait until it copies no more, and never will. It may be called again."""
        self._is_over = True
        if self._has_begun:
            self._is_done.wait()

    def _work(self) -> None:
        self._has_begun = True
        try:
            if not self._is_over:
                _copy_pieces(self._remaining)
        finally:
            self._is_done.set()


def _copy_pieces(remaining: deque[Move]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            ctypes.memmove(*remaining.popleft())  # without the GIL


def _pieces(into: int, start: int, num_bytes: int) -> Iterator[Move]:
    return ((into + at, start + at, min(_PIECE_BYTES, num_bytes - at)) for at in range(0, num_bytes, _PIECE_BYTES))


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.nbytes == other.nbytes


def _devices_of(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    """The GPUs that tensors are on."""
    if not torch.cuda.is_available():
        return []
    return list({tensor.device: None for tensor in tensors if tensor.is_cuda})
