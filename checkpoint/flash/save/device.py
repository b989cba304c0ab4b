"""The copy of a save: tensors of any device into a slot.

Tensors in main memory are copied as `tensors/copying.py` does. Tensors of a GPU are copied on a stream of
their own into pinned memory; the slot is pinned once, when it is first used. Tensors of any other device are left to
torch, one after the other: their addresses mean nothing here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetstream.checkpoint.tensors.copying import copy_in_memory, settle
from hetstream.checkpoint.tensors.leaves import Move

_log = logging.getLogger(__name__)


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
        copy_in_memory([source for source, _ in in_memory], [target for _, target in in_memory], moves)


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


def _devices_of(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    """The GPUs that tensors are on."""
    if not torch.cuda.is_available():
        return []
    return list({tensor.device: None for tensor in tensors if tensor.is_cuda})
