"""A real GPU, through PyTorch's allocator and events.

The limit is the allocator's own (`set_per_process_memory_fraction`), and caches are given back when it falls. What
finds no room is in memory of the host (`HostPool`). Where that cannot be had, a limit below what a job needs would
end it, so the job says so (`host_capacity_bytes`), and the coordinator has it pause. Nothing here makes a process use
CUDA that has not done so.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
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
# With `expandable_segments:True` all of this is as it is: the allocator makes no such segments in pools with functions
# of their own, gives blocks of the pool out without looking at them, counts what it has mapped as reserved, and unmaps
# what is free when caches are given back (CUDACachingAllocator.cpp of PyTorch 2.11: malloc, try_mempool_fallback).
# The allocator `backend:cudaMallocAsync` has no such pools, and says so.
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
        if not self._fill(min(num_bytes, available_bytes() // _PART_OF_AVAILABLE)):
            del self._pool  # gives its memory back, while its functions are there
            raise RuntimeError("the driver does not set and copy pinned memory as if it were the GPU's")
        # Also when Python ends: were the functions gone before the pool, it would give its memory back by nothing.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self.capacity_bytes = sum(segment["total_size"] for segment in self._pool.snapshot())

    def used_bytes(self) -> int:
        """Return what stands in now."""
        return sum(segment["allocated_size"] for segment in self._pool.snapshot())

    def _fill(self, num_bytes: int) -> bool:
        """Have the allocator take the pool's memory, with Python's lock held all the time. Whether it can be used.

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
        with _disable_current_modes():
            there: Any = torch.tensor([], dtype=torch.uint8, device=blocks[-1].device)
            return is_like_the_gpus(there.set_(blocks[-1], 0, (min(num_bytes, _SMALL_BYTES),)))


def is_like_the_gpus(there: torch.Tensor) -> bool:
    """Return whether memory of the pool can be set and copied. PyTorch takes it for the GPU's, and says so to CUDA.

    It copies with the kind device-to-device. By the runtime's rules a kind that is not the pointers' may do anything;
    by those of the driver, pinned and mapped memory is an address of the GPU like others. So this is tried.
    """
    here = torch.arange(len(there), device=there.device).to(torch.uint8)
    back = torch.zeros_like(here)
    there.copy_(here)
    back.copy_(there)
    if not torch.equal(back, here):
        return False
    there.zero_()
    back.copy_(there)
    return not back.any()


# Graphs that are captured now. Nothing runs meanwhile, and in the usual mode of a capture no thread of the process may
# ask for events or streams: the capture would fail.
_captures: list[Any] = []


def is_capturing() -> bool:
    """Return whether a graph is captured now, in whatever thread of this process."""
    return bool(_captures) or bool(torch.cuda.is_current_stream_capturing())


class Graphs:
    """The graphs that this process captures and replays: a replay is no operator, and calls no hook of an optimizer.

    Args:
        graph_class: torch.cuda.CUDAGraph; its methods call here from now on.
        before, after: called around each replay.
        at_boundary: called behind a replay of a graph in whose capture an optimizer made its step.
    """

    def __init__(
        self, graph_class: Any, before: Callable[[], None], after: Callable[[], None], at_boundary: Callable[[], None]
    ) -> None:
        self._with_step: weakref.WeakSet[Any] = weakref.WeakSet()
        begin, end, replay = graph_class.capture_begin, graph_class.capture_end, graph_class.replay

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            self._with_step.discard(graph)
            begin(graph, *args, **kwargs)
            _captures.append(graph)

        @functools.wraps(end)
        def capture_end(graph: Any) -> None:
            try:
                end(graph)
            finally:
                _captures[:] = [each for each in _captures if each is not graph]

        @functools.wraps(replay)
        def gated_replay(graph: Any) -> None:
            before()
            replay(graph)
            after()
            if graph in self._with_step:
                at_boundary()

        graph_class.capture_begin, graph_class.capture_end = capture_begin, capture_end
        graph_class.replay = gated_replay

    def takes_step(self) -> bool:
        """Called at the step of an optimizer: whether it is captured, so that it will only be made by replays."""
        self._with_step.update(_captures)
        return is_capturing()


def watch_triton(triton: ModuleType, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call functions around each kernel that a program launches by Triton itself, which is no operator of torch.

    Args:
        triton: the module, which has been imported.
        before, after: the functions.
    """

    def unless_captured(call: Callable[[], None]) -> Callable[..., None]:
        return lambda *_: call() if is_in_use() and not is_capturing() else None

    runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    try:  # since Triton 3.5
        runtime.launch_enter_hook.add(unless_captured(before))
        runtime.launch_exit_hook.add(unless_captured(after))
    except AttributeError:
        sys.stderr.write("hetstream: this Triton has no hooks: what it launches by itself is not held back\n")


def compile_nothing() -> None:
    """Have `torch.compile` leave functions as they are from now on, and say so once.

    Below a mode that sees operators PyTorch compiles nothing: up to 2.11 without a word, from 2.13 on with an error
    where `fullgraph=True` was asked for.
    """
    made = torch.compile
    said: list[bool] = []

    @functools.wraps(made)
    def compile(*args: Any, **kwargs: Any) -> Any:  # as it is called
        if not said:
            said.append(True)
            sys.stderr.write(
                "hetstream: torch.compile leaves functions as they are in an opportunistic job, whose operators are "
                "held back one by one\n"
            )
            torch.compiler.set_stance("force_eager")
        return made(*args, **kwargs)

    torch.compile = compile


# Launches of one window, and windows that may be on the way: what runs on when a job is to pause.
_LAUNCHES = 16
_WINDOWS = 2


def is_in_use() -> bool:
    """Return whether this process uses CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def current_gpu(gpus: Sequence[str]) -> str | None:
    """Return what the coordinator calls the GPU that this process uses, by the driver's word; None where it does not
    say.

    Args:
        gpus: that the job has on this node. One that is none of these is told, too: the coordinator refuses it.
    """
    if not is_in_use() or not all(gpu.startswith("GPU-") for gpu in gpus):
        return None  # of instances of a divided GPU, and of GPUs that only the site has named, it knows no such names
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    name = f"GPU-{uuid}"
    return next((gpu for gpu in gpus if name.startswith(gpu)), name) if uuid else None


def used_beside() -> list[int]:
    """Return numbers of the GPUs, beside the current one, on which this process has tensors; as PyTorch counts them."""
    own = torch.cuda.current_device()
    return [other for other in range(torch.cuda.device_count()) if other != own and torch.cuda.memory_allocated(other)]


@dataclass
class _Stream:
    """A stream on which the process launches.

    Attributes:
        stream: torch's.
        unmarked: launches since its last mark.
        marks: events behind each `_LAUNCHES` launches.
    """

    stream: Any
    unmarked: int = 0
    marks: collections.deque[torch.cuda.Event] = field(default_factory=collections.deque)


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
        self._streams: dict[int, _Stream] = {}

    def memory(self) -> MemoryUse:
        """As `Device.memory`."""
        if not is_in_use():
            return MemoryUse(0, 0, 0, 0)
        pool = self._host_pool()
        if pool is None:
            return MemoryUse(torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated(), 0, 0)
        held_bytes = torch.cuda.memory_reserved() - pool.capacity_bytes
        peak_bytes = torch.cuda.max_memory_allocated()
        # More than the GPU's part of the allocator had in this mini-batch was on the host, also if it is back by now.
        most_held_bytes = torch.cuda.max_memory_reserved() - pool.capacity_bytes
        host_bytes = max(pool.used_bytes(), peak_bytes - most_held_bytes)
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
        if self._host_bytes and not is_capturing():
            host_bytes, self._host_bytes = self._host_bytes, 0
            try:
                self._pool = HostPool(host_bytes)
            except (RuntimeError, OSError) as error:
                sys.stderr.write(f"hetstream: no memory of the host stands in for the GPU's: {error}\n")
            torch.cuda.reset_peak_memory_stats()
        return self._pool

    def is_idle(self) -> bool:
        """As `Device.is_idle`, of the current stream and of all on which launches were seen."""
        if not is_in_use():
            return True
        if is_capturing():
            return False  # and no stream may be asked
        streams = [torch.cuda.current_stream(), *(each.stream for each in self._streams.values())]
        return all(stream.query() for stream in streams)

    def launched(self) -> int:
        """As `Device.launched`, on the current stream. While a graph is captured nothing runs, or may be waited for."""
        if is_capturing():
            return 0
        used = self._current()
        used.unmarked += 1
        if used.unmarked < _LAUNCHES:
            return 0
        used.unmarked = 0
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(used.stream)
        used.marks.append(mark)
        if len(used.marks) <= _WINDOWS:
            return 0
        first = used.marks.popleft()
        used.marks[0].synchronize()
        return int(first.elapsed_time(used.marks[0]) * 1e6)

    def launches_much(self) -> None:
        """The next launch is of many kernels, as the replay of a graph is: it is marked by itself."""
        self._current().unmarked = _LAUNCHES - 1

    def _current(self) -> _Stream:
        stream = torch.cuda.current_stream()
        return self._streams.setdefault(stream.cuda_stream, _Stream(stream))


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
        # The marks that optimizers set for profilers are no kernels, and what is captured does not run.
        is_gpu_work = is_in_use() and func.namespace != "profiler" and not is_capturing()
        if is_gpu_work:
            self._before()
        result = func(*args, **kwargs or {})
        if is_gpu_work:
            self._after()
        return result
