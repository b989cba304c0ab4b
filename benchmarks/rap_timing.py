"""What `rap_predict.py` measures on: one thread of this CPU, and a GPU where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from benchmarks import machine
from benchmarks.latency_model import CACHE_BYTES
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.features.native import compiler
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.fused import FusedTransform, Launch, triton_launch
from hetstream.mpi_dataworkers.process.interpreter import keep_freed_memory

# A timing is the least of so many, each of at least so long.
TIMINGS, WINDOW_S = 2, 0.0005
# Twice this is more than any batch of these needs; a larger piece would not be kept.
_PIECE_BYTES = 128 << 20
# Of a kernel, in one replay: launched one by one from Python, a host takes longer than many a kernel.
LAUNCHES = 20


class Timed(Protocol):
    """Where a graph's time is measured."""

    name: str
    caches: Sequence[int]

    def seconds_of(self, graph: FeatureGraph, batch: Mapping[str, Any], window_s: float) -> float:
        """How long it computes a batch."""


class OnCpu:
    """`FeatureTransform` as data workers run it: in CPU time of this thread, in memory that the process keeps.

    Else glibc gives memory back after a batch or keeps it, as it happens, and large batches take a third more or less.
    Even so the first batches get pages that nobody has had, until freed pieces of all sizes lie about; a data worker
    makes thousands of them. So the process begins with memory that was in use before.
    """

    name = "CPU"

    def __init__(self) -> None:
        keep_freed_memory()
        pieces = [torch.ones(_PIECE_BYTES, dtype=torch.uint8) for _ in range(2)]
        del pieces
        self.native = compiler() is not None
        self.caches: Sequence[int] = machine.caches() or CACHE_BYTES

    def seconds_of(self, graph: FeatureGraph, batch: Mapping[str, Any], window_s: float) -> float:
        """CPU time of a call."""
        transform = FeatureTransform(graph, native=self.native)
        return least_s(lambda: transform(batch), window_s, time.thread_time)


class OnGpu:
    """The one kernel of `FusedTransform`, without its copies, captured with others of its kind in a CUDA graph."""

    name = "GPU"

    def __init__(self) -> None:
        self.caches: Sequence[int] = (int(torch.cuda.get_device_properties(0).L2_cache_size),)

    def seconds_of(self, graph: FeatureGraph, batch: Mapping[str, Any], window_s: float) -> float:
        """Time of the kernel."""
        run = kernel_of(graph, batch, "cuda", triton_launch())
        run()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(LAUNCHES):
                run()

        def clock() -> float:
            torch.cuda.synchronize()
            return time.perf_counter()

        return least_s(captured.replay, window_s, clock) / LAUNCHES


def devices() -> list[Timed]:
    """All that there are."""
    return [OnCpu(), *([OnGpu()] if torch.cuda.is_available() else [])]


def kernel_of(graph: FeatureGraph, batch: Mapping[str, Any], device: str, launch: Launch) -> Callable[[], object]:
    """What launches a graph's kernel on a batch that is on the device already."""
    taken: list[tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], int, int, int]] = []
    transform = FusedTransform(graph, device=device, launch=lambda *given: taken.append(given))
    taken.clear()  # when it is made it tries whether kernels can be launched
    transform(batch)
    [given] = taken
    return lambda: launch(*given)


def least_s(run: Callable[[], object], window_s: float, clock: Callable[[], float]) -> float:
    """Time of a call: the least of several means."""
    run()
    began = clock()
    run()
    calls = max(1, round(window_s / max(clock() - began, 1e-6)))
    means = []
    for _ in range(TIMINGS):
        began = clock()
        for _ in range(calls):
            run()
        means.append((clock() - began) / calls)
    return min(means)
