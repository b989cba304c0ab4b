"""An emulated GPU: no GPU at all, but what matters of one for sharing, with real processes and real work.

All training processes compute on one core of the machine, as kernels of several processes take turns on a GPU. Memory
is counted, not given: each tensor that an operator makes counts against the GPU's size, by the rules of PyTorch's
caching allocator, with segments in proportion to the GPU's. Tensors that found no room count as the host's, and each
operator that touches them keeps the core busy for as long as a bus would need for their bytes. What it shows about
speeds is about this emulation alone.
"""

from __future__ import annotations

import bisect
import enum
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetstream.base.process import generation
from hetstream.hetjob.gpu.device import MemoryUse
from hetstream.hetjob.gpu.emulated_file import PREFIX, EmulatedGpuFile
from hetstream.hetjob.gpu.orders import NO_LIMIT

# Where tensors go: a model of PyTorch's caching allocator, with a limit and memory of the host that stands in. Pure.
#
# The rules are those of CUDACachingAllocator.cpp (c10/cuda, PyTorch 2.9 and later) as it is configured by default: no
# expandable segments, one stream. A request is rounded up to blocks, the smallest cached block that is large enough is
# used and split, and only where there is none a new segment is taken from the GPU. The limit counts only then: what is
# cached is used without asking. Where no segment may be taken, free blocks of the host's pool are used before cached
# segments are given back (`use_on_oom`, `cuda.py`). `benchmarks/allocator_trace.py` compares the model with a
# real allocator.

_MIB = 2**20
# Of the host's pool, so much is for small blocks: see `HostPool` in `cuda.py`.
_SMALL_PART = 16


class Place(enum.Enum):
    """Where a tensor is."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class AllocatorRules:
    """Sizes by which an allocator goes, in bytes.

    Attributes:
        block_bytes: requests are rounded up to a multiple of this (kMinBlockSize).
        small_bytes: larger requests are kept apart from those up to this (kSmallSize).
        small_segment_bytes: segments for small requests (kSmallBuffer).
        large_segment_bytes: segments for requests below `least_own_bytes` (kLargeBuffer).
        least_own_bytes: from here on, a request has a segment of its own (kMinLargeAlloc).
        own_multiple_bytes: such segments are a multiple of this (kRoundLarge).
    """

    block_bytes: int = 512
    small_bytes: int = _MIB
    small_segment_bytes: int = 2 * _MIB
    large_segment_bytes: int = 20 * _MIB
    least_own_bytes: int = 10 * _MIB
    own_multiple_bytes: int = 2 * _MIB

    @classmethod
    def scaled(cls, large_segment_bytes: int) -> AllocatorRules:
        """Return the same proportions for a smaller GPU, whose large segments have this size; blocks stay as
        they are.
        """
        small_bytes = max(cls.block_bytes, large_segment_bytes // 20 // cls.block_bytes * cls.block_bytes)
        return cls(
            small_bytes=small_bytes,
            small_segment_bytes=2 * small_bytes,
            large_segment_bytes=large_segment_bytes,
            least_own_bytes=large_segment_bytes // 2,
            own_multiple_bytes=2 * small_bytes,
        )

    def rounded(self, num_bytes: int) -> int:
        """Return bytes of the block for a request."""
        return max(1, -(-num_bytes // self.block_bytes)) * self.block_bytes

    def segment_for(self, block_bytes: int) -> int:
        """Return bytes of a new segment for a block of this size."""
        if block_bytes <= self.small_bytes:
            return self.small_segment_bytes
        if block_bytes < self.least_own_bytes:
            return self.large_segment_bytes
        return -(-block_bytes // self.own_multiple_bytes) * self.own_multiple_bytes


PYTORCH = AllocatorRules()


class Block:
    """A part of a segment, in one piece: used by one tensor, or free. Its neighbours lie in the same segment."""

    __slots__ = ("address", "after", "before", "is_free", "num_bytes", "pool")

    def __init__(self, pool: _Pool, address: int, num_bytes: int) -> None:
        self.pool, self.address, self.num_bytes = pool, address, num_bytes
        self.before: Block | None = None
        self.after: Block | None = None
        self.is_free = True

    @property
    def place(self) -> Place:
        """Where it is."""
        return self.pool.place


class _Pool:
    """Free blocks of one kind, by size and then by address."""

    def __init__(self, place: Place, least_rest_bytes: int) -> None:
        self.place = place
        self._least_rest_bytes = least_rest_bytes
        self._free: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        bisect.insort(self._free, (block.num_bytes, block.address, block))

    def take(self, num_bytes: int) -> Block | None:
        """Return the smallest block that is large enough; what it has more is cut off if it is worth being a block."""
        at = bisect.bisect_left(self._free, (num_bytes,))
        if at == len(self._free):
            return None
        block = self._free.pop(at)[2]
        surplus_bytes = block.num_bytes - num_bytes
        if surplus_bytes >= self._least_rest_bytes:
            surplus = Block(self, block.address + num_bytes, surplus_bytes)
            surplus.before, surplus.after = block, block.after
            if block.after:
                block.after.before = surplus
            block.after, block.num_bytes = surplus, num_bytes
            self.add(surplus)
        block.is_free = False
        return block

    def give(self, block: Block) -> None:
        """A tensor is gone; free neighbours become one block with it."""
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                block.address = min(block.address, other.address)
                block.num_bytes += other.num_bytes
                if other is block.before:
                    block.before = other.before
                    if block.before:
                        block.before.after = block
                else:
                    block.after = other.after
                    if block.after:
                        block.after.before = block
        block.is_free = True
        self.add(block)

    def remove_whole_segments(self) -> int:
        """Have no segments any more that are wholly free; their bytes."""
        kept = [entry for entry in self._free if entry[2].before or entry[2].after]
        num_bytes = sum(entry[0] for entry in self._free) - sum(entry[0] for entry in kept)
        self._free = kept
        return num_bytes

    def _remove(self, block: Block) -> None:
        del self._free[bisect.bisect_left(self._free, (block.num_bytes, block.address))]


class Allocator:
    """One process's memory.

    Args:
        take: asks the GPU for bytes; says whether they are this process's now.
        give: returns bytes to the GPU.
        rules: sizes of blocks and segments.
        host_capacity_bytes: memory of the host that stands in when the GPU has none.
    """

    def __init__(
        self,
        take: Callable[[int], bool],
        give: Callable[[int], None],
        rules: AllocatorRules = PYTORCH,
        host_capacity_bytes: int = 0,
    ) -> None:
        self._take, self._give, self._rules = take, give, rules
        self._host_capacity_bytes = host_capacity_bytes
        self._limit_bytes = NO_LIMIT
        self._held_bytes = self._next_address = 0
        # What is left of a small block is a block if it has any size; of a large one, if it is not a small one.
        least = (rules.block_bytes, rules.small_bytes + 1)
        self._pools = {place: tuple(_Pool(place, least_bytes) for least_bytes in least) for place in Place}
        self._used = {Place.DEVICE: 0, Place.HOST: 0}
        self._peak_bytes = self._host_peak_bytes = 0
        self._fill_host()

    def allocate(self, num_bytes: int) -> Block:
        """Find a place for a tensor.

        Raises:
            MemoryError: there is none.
        """
        size_bytes = self._rules.rounded(num_bytes)
        is_large = size_bytes > self._rules.small_bytes
        device, host = self._pools[Place.DEVICE][is_large], self._pools[Place.HOST][is_large]
        block = device.take(size_bytes)
        if block is None and self._take_segment(device, size_bytes):
            block = device.take(size_bytes)
        if block is None:
            block = host.take(size_bytes)
        if block is None and self.release_cached() and self._take_segment(device, size_bytes):
            block = device.take(size_bytes)
        if block is None:
            raise MemoryError(
                f"GPU out of memory: {num_bytes:,} bytes asked for, {self._held_bytes:,} held, limit "
                f"{self._limit_bytes:,}, on the host {self._used[Place.HOST]:,} of {self._host_capacity_bytes:,}"
            )
        self._used[block.place] += block.num_bytes
        self._peak_bytes = max(self._peak_bytes, sum(self._used.values()))
        self._host_peak_bytes = max(self._host_peak_bytes, self._used[Place.HOST])
        return block

    def free(self, block: Block) -> None:
        """A tensor is gone. Its memory of the GPU stays cached."""
        self._used[block.place] -= block.num_bytes
        block.pool.give(block)

    def set_limit(self, limit_bytes: int) -> None:
        """From now on hold no more than this; if more is held, all that is cached in whole segments is given back."""
        self._limit_bytes = limit_bytes
        if self._held_bytes > limit_bytes:
            self.release_cached()

    def release_cached(self) -> int:
        """Give back all segments that nothing is in, as `empty_cache` does; how many bytes."""
        num_bytes = sum(pool.remove_whole_segments() for pool in self._pools[Place.DEVICE])
        if num_bytes:
            self._held_bytes -= num_bytes
            self._give(num_bytes)
        return num_bytes

    def begin_mini_batch(self) -> None:
        """Peaks are counted from here."""
        self._peak_bytes, self._host_peak_bytes = sum(self._used.values()), self._used[Place.HOST]

    def memory(self) -> MemoryUse:
        """Return what is held now, and was at most."""
        return MemoryUse(self._held_bytes, self._peak_bytes, self._host_peak_bytes, self._host_capacity_bytes)

    def _take_segment(self, pool: _Pool, block_bytes: int) -> bool:
        num_bytes = self._rules.segment_for(block_bytes)
        if self._held_bytes + num_bytes > self._limit_bytes or not self._take(num_bytes):
            return False
        self._held_bytes += num_bytes
        self._add_segment(pool, num_bytes)
        return True

    def _add_segment(self, pool: _Pool, num_bytes: int) -> None:
        pool.add(Block(pool, self._next_address, num_bytes))
        self._next_address += num_bytes

    def _fill_host(self) -> None:
        """The host's pool is filled once, for both kinds of blocks, and never becomes larger."""
        small, large = self._pools[Place.HOST]
        segments = self._host_capacity_bytes // _SMALL_PART // self._rules.small_segment_bytes
        for _ in range(segments):
            self._add_segment(small, self._rules.small_segment_bytes)
        left_bytes = self._host_capacity_bytes - segments * self._rules.small_segment_bytes
        if left_bytes:
            self._add_segment(large, left_bytes)


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
        """Return one kernel."""
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
