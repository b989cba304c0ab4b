"""A real GPU, through PyTorch's allocator and events.

The limit is the allocator's own (`set_per_process_memory_fraction`), and caches are given back when it falls. What
finds no room is in memory of the host (`cuda.py`). Where that cannot be had, a limit below what a job needs would
end it, so the job says so (`host_capacity_bytes`), and the coordinator has it pause. Nothing here makes a process use
CUDA that has not done so.
"""

from __future__ import annotations

import collections
import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hetstream.base.limits import available_bytes
from hetstream.hetjob.gpu.device import MemoryUse

# Memory of the host that stands in for a GPU's: pinned, mapped, and given to PyTorch's allocator in advance.
#
# When the allocator may take no more memory of the GPU, it takes free blocks of pools that are made for that
# (`MemPool(use_on_oom=True)`, PyTorch 2.8 and later). It never makes such a pool larger, so it is filled once, for the
# stream that is current then, and for both sizes of blocks that the allocator keeps apart. Blocks come back to the GPU
# by themselves: the next mini-batch asks there first. Managed memory is not used: more of it than there is hangs some
# GPUs.
#
# Nothing of this runs without a GPU; tests that need one are marked.

# cuda.h: CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_FLAGS = 0x01 | 0x02
# Tensors up to this have blocks of their own kind. They get so much of the pool.
_SMALL_BYTES = 2**20
_SMALL_PART = 16
# Pinned memory counts in the job's control group, which ends a job that takes too much.
_PART_OF_AVAILABLE = 4


class HostPool:
    """The pool of this process. It lasts as long as the process: tensors may lie in it until its end.

    Args:
        num_bytes: of the host.

    Raises:
        RuntimeError: this PyTorch or the driver cannot do it, or there is not so much memory.
        OSError: there is no driver.
    """

    def __init__(self, num_bytes: int) -> None:
        make: Any = getattr(torch._C, "_cuda_customAllocator", None)
        if make is None:
            raise RuntimeError("this PyTorch takes no allocators")
        driver = ctypes.CDLL("libcuda.so.1")

        def allocate(size: int, _device: int, _stream: int | None) -> int | None:
            address = ctypes.c_void_p()
            failed = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(_FLAGS))
            return None if failed else address.value

        def free(address: int | None, _size: int, _stream: int | None) -> None:
            driver.cuMemFreeHost(ctypes.c_void_p(address))

        # As torch.cuda.memory.CUDAPluggableAllocator has them. They must not be collected while the pool is there.
        self._functions = (
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(allocate),
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)(free),
        )
        addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in self._functions)
        self._allocator = make(*addresses)
        try:
            make_pool: Any = torch.cuda.MemPool
            self._pool = make_pool(self._allocator, use_on_oom=True)
        except TypeError as error:
            raise RuntimeError("the pools of this PyTorch are not used when memory is short") from error
        # Also when Python ends: were the functions gone before the pool, it would give its memory back by nothing.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._fill(min(num_bytes, available_bytes() // _PART_OF_AVAILABLE))
        self.capacity_bytes = sum(segment["total_size"] for segment in self._pool.snapshot())

    def used_bytes(self) -> int:
        """What stands in now."""
        return sum(segment["allocated_size"] for segment in self._pool.snapshot())

    def _fill(self, num_bytes: int) -> None:
        """Have the allocator take the pool's memory, with Python's lock held all the time.

        PyTorch's allocator calls `allocate` while it is locked, and that needs Python's lock. `torch.empty` gives
        Python's lock away for as long: a thread that then drops a tensor has it, and waits for the allocator for ever.
        A storage is made without giving it away. Later nothing of the pool is taken from the host or given back.
        """
        small = num_bytes // _SMALL_PART // _SMALL_BYTES
        storage: Any = torch.UntypedStorage
        # Of the program's own modes none is to see this memory.
        with _disable_current_modes(), torch.cuda.use_mem_pool(self._pool):
            blocks = [storage(_SMALL_BYTES, device="cuda") for _ in range(small)]
            blocks.append(storage(num_bytes - small * _SMALL_BYTES, device="cuda"))
            del blocks


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
