"""A real GPU, through PyTorch's allocator and events.

The limit is the allocator's own (`set_per_process_memory_fraction`), and caches are given back when it falls. What
finds no room is in memory of the host (`host_pool.py`). Where that cannot be had, a limit below what a job needs would
end it, so the job says so (`host_capacity_bytes`), and the coordinator has it pause. Nothing here makes a process use
CUDA that has not done so.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetstream.hetjob.gpu.devices.base import MemoryUse
from hetstream.hetjob.gpu.devices.host_pool import HostPool

# Launches between two events, and windows of so many that may be on the way: what runs on when a job is to pause.
_LAUNCHES = 16
_WINDOWS = 2


def is_in_use() -> bool:
    """Whether this process uses CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def current_gpu(gpus: Sequence[str]) -> str | None:
    """What the coordinator calls the GPU that this process uses, by the driver's word; None where it does not say.

    Args:
        gpus: that the job has on this node. One that is none of these is told, too: the coordinator refuses it.
    """
    if not is_in_use() or not all(gpu.startswith("GPU-") for gpu in gpus):
        return None  # of instances of a divided GPU, and of GPUs that only the site has named, it knows no such names
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    name = f"GPU-{uuid}"
    return next((gpu for gpu in gpus if name.startswith(gpu)), name) if uuid else None


def used_beside() -> list[int]:
    """Numbers of the GPUs, beside the current one, on which this process has tensors; as PyTorch counts them."""
    own = torch.cuda.current_device()
    return [other for other in range(torch.cuda.device_count()) if other != own and torch.cuda.memory_allocated(other)]


class CudaGpu:
    """The current GPU of this process.

    Args:
        name: what the coordinator calls it.
        host_bytes: memory of the host that may stand in.
    """

    def __init__(self, name: str, host_bytes: int = 0) -> None:
        self.name = name
        self._host_bytes = host_bytes
        self._pool: HostPool | None = None
        self._unmarked = 0
        self._marks: collections.deque[torch.cuda.Event] = collections.deque()

    def memory(self) -> MemoryUse:
        """As `Device.memory`."""
        if not is_in_use():
            return MemoryUse(0, 0, 0, 0)
        pool = self._host_pool()
        if pool is None:
            return MemoryUse(torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated(), 0, 0)
        held_bytes = torch.cuda.memory_reserved() - pool.capacity_bytes
        peak_bytes = torch.cuda.max_memory_allocated()
        # More than the GPU's part of the allocator has was on the host, also if it is back by now.
        host_bytes = max(pool.used_bytes(), peak_bytes - held_bytes)
        return MemoryUse(held_bytes, peak_bytes, host_bytes, pool.capacity_bytes)

    def begin_mini_batch(self) -> None:
        """As `Device.begin_mini_batch`."""
        if is_in_use():
            torch.cuda.reset_peak_memory_stats()

    def set_limit(self, limit_bytes: int) -> None:
        """As `Device.set_limit`."""
        if not is_in_use():
            return
        pool = self._host_pool()
        if pool is not None:
            limit_bytes += pool.capacity_bytes  # the allocator counts it as the GPU's
        _, total_bytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes))
        if torch.cuda.memory_reserved() > limit_bytes:
            torch.cuda.empty_cache()

    def _host_pool(self) -> HostPool | None:
        """The pool, made when the process is first seen to use CUDA; None where there can be none."""
        if self._host_bytes and not torch.cuda.is_current_stream_capturing():
            host_bytes, self._host_bytes = self._host_bytes, 0
            try:
                self._pool = HostPool(host_bytes)
            except (RuntimeError, OSError) as error:
                sys.stderr.write(f"hetstream: no memory of the host stands in for the GPU's: {error}\n")
            torch.cuda.reset_peak_memory_stats()
        return self._pool

    def is_idle(self) -> bool:
        """As `Device.is_idle`, of the current stream."""
        return not is_in_use() or bool(torch.cuda.current_stream().query())

    def launched(self) -> int:
        """As `Device.launched`. While a graph is captured nothing runs, and nothing may be waited for."""
        self._unmarked += 1
        if self._unmarked < _LAUNCHES or torch.cuda.is_current_stream_capturing():
            return 0
        self._unmarked = 0
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        self._marks.append(mark)
        if len(self._marks) <= _WINDOWS:
            return 0
        first = self._marks.popleft()
        self._marks[0].synchronize()
        return int(first.elapsed_time(self._marks[0]) * 1e6)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls the agent around every operator of a process that uses CUDA, those of backward passes and optimizers, too.

    CUDA does not survive a fork, so a forked child of a process that uses it does not use it.

    Args:
        before, after: called around each.
    """

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before, self._after = before, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The marks that optimizers set for profilers are no kernels.
        is_gpu_work = is_in_use() and func.namespace != "profiler"
        if is_gpu_work:
            self._before()
        result = func(*args, **kwargs or {})
        if is_gpu_work:
            self._after()
        return result
