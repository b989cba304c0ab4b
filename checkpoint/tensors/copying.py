"""Copies within main memory: in pieces, by as many threads as are free to take one. For saves and for restores."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from hetstream.checkpoint.tensors.leaves import Move

# Copies of so many bytes are shared by threads; of fewer, waiting for the GIL between two would take longer.
_SHARED_BYTES = 64 << 10
# What a thread takes at a time, and for how much another one is worth its start. More threads than the limit are not
# faster than memory is.
_PIECE_BYTES = 8 << 20
_THREAD_BYTES = 64 << 20
_MAX_THREADS = 8
_MAX_INTERRUPTS = 100


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


def _are_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.nbytes == other.nbytes
