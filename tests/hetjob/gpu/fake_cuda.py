"""PyTorch's CUDA without a GPU, as far as an agent asks for it: streams, events, captures, and an allocator's counts.

Kernels end when the test says so. While a graph is captured CUDA allows less, and so does this: whoever asks for a
stream or an event then has spoiled the capture (cudaErrorStreamCaptureUnsupported). The allocator is the model of
PyTorch's (`emulation.py`); of segments that grow, free pages are given back, and not whole segments alone.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hetstream.hetjob.gpu.emulation import PYTORCH, Allocator, Block, Place

TOTAL_BYTES = 8 * 2**30


class FakeStream:
    """A stream, and how many kernels on it have been launched and have ended."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self.cuda_stream, self._cuda = number, cuda
        self.launched = self.ended = 0

    def query(self) -> bool:
        self._cuda.must_not_capture("cudaStreamQuery")
        return self.ended == self.launched


class FakeEvent:
    """An event; each kernel of its stream takes a millisecond."""

    cuda: FakeCuda

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.stream: FakeStream | None = None
        self.at = 0

    def record(self, stream: FakeStream) -> None:
        self.cuda.must_not_capture("an event outside of the capture")
        self.stream, self.at = stream, stream.launched

    def synchronize(self) -> None:
        self.cuda.must_not_capture("cudaEventSynchronize")
        assert self.stream is not None
        self.stream.ended = max(self.stream.ended, self.at)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert other.stream is self.stream, "the time between events of two streams says nothing of either"
        return float(other.at - self.at)


class FakePool:
    """A MemPool: what is taken within `use_mem_pool` is the host's."""

    def __init__(self, cuda: FakeCuda, *_: object, use_on_oom: bool) -> None:
        assert use_on_oom
        self._cuda = cuda

    def snapshot(self) -> list[dict[str, int]]:
        return [{"total_size": self._cuda.host_bytes, "allocated_size": self._cuda.host_used_bytes()}]


class FakeCuda:
    """One process's CUDA. Made by the fixture `cuda`.

    Attributes:
        streams: all; the first one is current.
        graph_class: stands for torch.cuda.CUDAGraph.
        is_expandable: segments grow.
        wrong: what the driver does to pinned memory: nothing, where this is set.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.streams = [FakeStream(self, number) for number in (0, 7)]
        self.current = self.streams[0]
        self.capturing: Any = None
        self.is_expandable = self.is_wrong = False
        self.host_bytes = 0
        self.free_bytes = TOTAL_BYTES
        self._is_host = False
        self._most_held_bytes = 0
        self._allocator: Allocator | None = None
        self.graph_class = self._graph_class()
        patch.setattr(FakeEvent, "cuda", self, raising=False)
        patch.setattr(torch._C, "_cuda_customAllocator", lambda *_: object(), raising=False)
        patch.setattr(ctypes, "CDLL", lambda _: object())
        patch.setattr(torch, "UntypedStorage", self._storage)
        fakes: dict[str, Any] = {
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: self.capturing is not None,
            "current_stream": lambda: self.current,
            "Event": FakeEvent,
            "MemPool": lambda *given, **named: FakePool(self, *given, **named),
            "use_mem_pool": self._use_pool,
            "memory_reserved": lambda: self._memory().held_bytes + self.host_bytes,
            "max_memory_reserved": lambda: self._most_held_bytes + self.host_bytes,
            "max_memory_allocated": lambda: self._memory().peak_bytes,
            "reset_peak_memory_stats": self._reset_peaks,
            "set_per_process_memory_fraction": self._set_fraction,
            "empty_cache": self._empty_cache,
            "mem_get_info": lambda: (self.free_bytes, TOTAL_BYTES),
        }
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)

    @property
    def allocator(self) -> Allocator:
        """Made when it is first asked for, so that it knows the host's pool."""
        if self._allocator is None:
            self._allocator = Allocator(self._take, self._give, PYTORCH, self.host_bytes)
        return self._allocator

    def kernel(self) -> None:
        """Launch one on the current stream."""
        if self.capturing is None:
            self.current.launched += 1

    def must_not_capture(self, what: str) -> None:
        if self.capturing is not None:
            raise AssertionError(f"{what} while a graph is captured (cudaErrorStreamCaptureUnsupported)")

    def host_used_bytes(self) -> int:
        return self.allocator._used[Place.HOST]

    def allocate(self, num_bytes: int) -> Block:
        return self.allocator.allocate(num_bytes)

    def _memory(self) -> Any:
        return self.allocator.memory()

    def _take(self, num_bytes: int) -> bool:
        if num_bytes > self.free_bytes:
            return False
        self.free_bytes -= num_bytes
        self._most_held_bytes = max(self._most_held_bytes, self.allocator._held_bytes + num_bytes)
        return True

    def _reset_peaks(self) -> None:
        self.allocator.begin_mini_batch()
        self._most_held_bytes = self.allocator._held_bytes

    def _give(self, num_bytes: int) -> None:
        self.free_bytes += num_bytes

    def _set_fraction(self, fraction: float) -> None:
        assert 0 <= fraction <= 1, "PyTorch refuses it"
        # The allocator counts the host's pool as the GPU's.
        self.allocator._limit_bytes = int(fraction * TOTAL_BYTES) - self.host_bytes

    def _empty_cache(self) -> None:
        self.must_not_capture("cudaFree")
        self.allocator.release_cached()
        if self.is_expandable:  # pages within segments that are in use, too
            kept = sum(self.allocator._used.values()) - self.host_used_bytes()
            self._give(self.allocator._held_bytes - kept)
            self.allocator._held_bytes = kept

    @contextlib.contextmanager
    def _use_pool(self, _: object) -> Iterator[None]:
        self._is_host = True
        try:
            yield
        finally:
            self._is_host = False

    def _storage(self, num_bytes: int, *, device: str) -> Any:
        assert device == "cuda"
        assert self._is_host, "only the pool is taken in this way"
        self.host_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()

    def _graph_class(self) -> Any:
        cuda = self

        class Graph:
            """Captures, and launches a kernel when it is replayed."""

            def capture_begin(self, pool: object = None) -> None:
                cuda.capturing = self

            def capture_end(self) -> None:
                cuda.capturing = None

            def replay(self) -> None:
                cuda.kernel()

        return Graph
