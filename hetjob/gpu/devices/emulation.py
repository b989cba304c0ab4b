"""An emulated GPU: no GPU at all, but what matters of one for sharing, with real processes and real work.

All training processes compute on one core of the machine, as kernels of several processes take turns on a GPU. Memory
is counted, not given: each tensor that an operator makes counts against the GPU's size, by the rules of PyTorch's
caching allocator, with segments in proportion to the GPU's. Tensors that found no room count as the host's, and each
operator that touches them keeps the core busy for as long as a bus would need for their bytes. What it shows about
speeds is about this emulation alone.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetstream.base.forks import generation
from hetstream.hetjob.gpu.devices.allocator import Allocator, AllocatorRules, Block, Place
from hetstream.hetjob.gpu.devices.base import MemoryUse
from hetstream.hetjob.gpu.devices.emulated_file import PREFIX, EmulatedGpuFile

# Numbers, and other tensors that a GPU would keep in parameters of kernels.
_LEAST_BYTES = 1024


class EmulatedGpu:
    """One emulated GPU in this process.

    Args:
        path: of the GPU's file.
        host_capacity_bytes: memory of the host that stands in.
    """

    def __init__(self, path: str, host_capacity_bytes: int) -> None:
        self._file = EmulatedGpuFile(path)
        rules = AllocatorRules.scaled(self._file.segment_bytes)
        self._allocator = Allocator(self._file.take, self._file.give, rules, host_capacity_bytes)
        self._blocks: dict[int, tuple[int, Block]] = {}  # of storages, by address
        self._lock = threading.RLock()  # a storage may be dropped in any thread, in the middle of anything
        self._busy_ns = 0
        self.name = f"{PREFIX}{path}"
        os.sched_setaffinity(0, {self._file.core})
        torch.set_num_threads(1)

    def memory(self) -> MemoryUse:
        """As `Device.memory`."""
        with self._lock:
            return self._allocator.memory()

    def begin_mini_batch(self) -> None:
        """As `Device.begin_mini_batch`."""
        with self._lock:
            self._allocator.begin_mini_batch()

    def set_limit(self, limit_bytes: int) -> None:
        """As `Device.set_limit`."""
        with self._lock:
            self._allocator.set_limit(limit_bytes)

    def is_idle(self) -> bool:
        """Kernels end before their launch returns."""
        return True

    def launched(self) -> int:
        """As `Device.launched`."""
        busy_ns, self._busy_ns = self._busy_ns, 0
        return busy_ns

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One kernel."""
        began_ns = time.monotonic_ns()
        result = func(*args, **kwargs)
        with self._lock:
            for tensor in tree_leaves(result):
                self._count(tensor)
            over_bus = sum(self._on_host(tensor) for tensor in tree_leaves((args, kwargs, result)))
        if over_bus:
            until_ns = time.monotonic_ns() + over_bus * 1_000_000_000 // self._file.bus_bytes_per_s
            while time.monotonic_ns() < until_ns:
                pass
        self._busy_ns += time.monotonic_ns() - began_ns
        return result

    def _count(self, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if num_bytes < _LEAST_BYTES or key in self._blocks:
            return
        self._blocks[key] = num_bytes, self._allocator.allocate(num_bytes)
        weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        with self._lock:
            self._allocator.free(self._blocks.pop(key)[1])

    def _on_host(self, tensor: object) -> int:
        """How many bytes of a tensor are on the other side of the bus."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            return 0
        num_bytes, block = self._blocks.get(tensor.untyped_storage()._cdata, (0, None))
        return num_bytes if block and block.place is Place.HOST else 0


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has every operator of the program run as a kernel of an emulated GPU, when the agent lets it.

    Args:
        gpu: where.
        before, after: called around each.
    """

    def __init__(self, gpu: EmulatedGpu, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu, self._before, self._after = gpu, before, after
        self._generation = generation()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A process of a DataLoader has no GPU, and the marks that optimizers set for profilers are no kernels.
        if generation() != self._generation or func.namespace == "profiler":
            return func(*args, **kwargs or {})
        self._before()
        result = self._gpu.run(func, args, kwargs or {})
        self._after()
        return result
