"""What an agent asks of PyTorch's CUDA, on a fake that keeps CUDA's rules: captures, streams, memory of the host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetstream.hetjob.gpu import cuda as module
from hetstream.hetjob.gpu.cuda import CudaGpu, Graphs, HostPool, is_capturing, is_like_the_gpus, watch_triton
from hetstream.hetjob.gpu.orders import NO_LIMIT
from tests.hetjob.gpu.fake_cuda import TOTAL_BYTES, FakeCuda

MIB = 2**20


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(module, "available_bytes", lambda: 2**40)
    return FakeCuda(monkeypatch)


def test_of_each_stream_little_is_in_flight(cuda: FakeCuda) -> None:
    gpu, busy_ns = CudaGpu("GPU-1a2b"), [0, 0]
    for number in range(400):
        cuda.current = cuda.streams[number % 2]
        cuda.kernel()
        busy_ns[number % 2] += gpu.launched()
    for stream, busy in zip(cuda.streams, busy_ns, strict=True):
        assert stream.launched == 200
        assert stream.launched - stream.ended <= 3 * 16
        assert busy / 1e6 == pytest.approx(200, abs=4 * 16), "a millisecond for each kernel"


def test_a_gpu_is_idle_when_all_streams_are_that_were_launched_on(cuda: FakeCuda) -> None:
    gpu = CudaGpu("GPU-1a2b")
    prefetching = cuda.current = cuda.streams[1]
    cuda.kernel()
    gpu.launched()
    cuda.current = cuda.streams[0]
    assert not gpu.is_idle()
    prefetching.ended = prefetching.launched
    assert gpu.is_idle()


def test_the_replay_of_a_graph_is_not_one_launch_of_sixteen(cuda: FakeCuda) -> None:
    gpu = CudaGpu("GPU-1a2b")
    for _ in range(10):
        cuda.kernel()
        gpu.launches_much()
        gpu.launched()
    assert cuda.current.launched - cuda.current.ended == 1, "the one before has ended"


def test_while_a_graph_is_captured_nothing_is_asked_that_would_end_the_capture(cuda: FakeCuda) -> None:
    gpu = CudaGpu("GPU-1a2b", 2**26)
    Graphs(cuda.graph_class, lambda: None, lambda: None, lambda: None)
    for _ in range(40):
        cuda.kernel()
        gpu.launched()
    graph = cuda.graph_class()
    graph.capture_begin()
    assert is_capturing()
    assert [gpu.launched() for _ in range(40)] == [0] * 40
    assert not gpu.is_idle()
    assert gpu.memory().host_capacity_bytes == 0, "the pool is made later"
    graph.capture_end()
    assert not is_capturing()
    assert gpu.memory().host_capacity_bytes == 2**26


def test_another_threads_capture_counts_too(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the usual mode of a capture no thread may ask for streams."""
    Graphs(cuda.graph_class, lambda: None, lambda: None, lambda: None)
    graph = cuda.graph_class()
    graph.capture_begin()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert is_capturing()
    graph.capture_end()
    assert not is_capturing()


def test_a_replay_passes_the_gate_and_is_a_mini_batch_if_it_has_an_optimizers_step(cuda: FakeCuda) -> None:
    said: list[str] = []

    def note(text: str) -> Callable[[], None]:
        return lambda: said.append(text)

    graphs = Graphs(cuda.graph_class, note("gate"), note("launched"), note("boundary"))
    forward, whole = cuda.graph_class(), cuda.graph_class()
    assert not graphs.takes_step(), "a step that is made now is a boundary now"
    for graph, has_step in ((forward, False), (whole, True)):
        graph.capture_begin()
        assert not has_step or graphs.takes_step()
        graph.capture_end()
    assert said == [], "what is captured does not run"
    forward.replay()
    whole.replay()
    assert said == ["gate", "launched", "gate", "launched", "boundary"]
    said.clear()
    whole.capture_begin()  # the graph is captured anew, without the step
    whole.capture_end()
    whole.replay()
    assert said == ["gate", "launched"]


def test_kernels_that_triton_launches_pass_the_gate(cuda: FakeCuda, capfd: pytest.CaptureFixture[str]) -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'hetstream[triton]'")
    said: list[str] = []
    chains = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    before = [list(chain.calls) for chain in chains]
    try:
        watch_triton(triton, lambda: said.append("gate"), lambda: said.append("launched"))
        for chain in chains:  # as Triton's launcher calls them
            chain(SimpleNamespace())
        assert said == ["gate", "launched"]
        cuda.capturing = object()
        for chain in chains:
            chain(SimpleNamespace())
        assert said == ["gate", "launched"]
    finally:
        for chain, calls in zip(chains, before, strict=True):
            chain.calls[:] = calls
    watch_triton(SimpleNamespace(), lambda: None, lambda: None)  # type: ignore[arg-type]
    assert "this Triton has no hooks: what it launches by itself is not held back" in capfd.readouterr().err


COMPILED = """
import torch
from hetstream.hetjob.gpu.cuda import Launches, compile_nothing
Launches(lambda: None, lambda: None).__enter__()
compile_nothing()
double = torch.compile(lambda x: x + x, fullgraph=True)
layer = torch.nn.Linear(2, 2)
layer.compile(fullgraph=True)
print(double(torch.ones(2)).tolist(), layer(torch.ones(1, 2)).shape)
"""


def test_compiled_functions_run_as_they_are_and_that_is_said_once() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[2.0, 2.0] torch.Size([1, 2])\n", done.stderr
    assert done.stderr.count("torch.compile leaves functions as they are in an opportunistic job") == 1


class Unlike(torch.Tensor):
    """Memory to which a driver does not copy, or which it does not set."""

    fails = "copy_"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == cls.fails and type(args[0]) is cls:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class NotSet(Unlike):
    fails = "zero_"


def test_a_drivers_copies_and_sets_of_host_memory_are_tried_before_they_are_relied_on() -> None:
    memory = torch.empty(1000, dtype=torch.uint8)
    assert is_like_the_gpus(memory)
    assert not is_like_the_gpus(memory.as_subclass(Unlike))
    assert not is_like_the_gpus(memory.as_subclass(NotSet))


def test_where_they_are_wrong_there_is_no_pool_and_the_job_goes_on_without(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "is_like_the_gpus", lambda _: False)
    with pytest.raises(RuntimeError, match="does not set and copy pinned memory"):
        HostPool(2**26)
    cuda.host_bytes = 0  # what a pool that is gone has given back
    gpu = CudaGpu("GPU-1a2b", 2**26)
    assert gpu.memory().host_capacity_bytes == 0
    assert "no memory of the host stands in for the GPU's: the driver does not" in capfd.readouterr().err
    gpu.set_limit(100 * MIB)
    with pytest.raises(MemoryError):
        cuda.allocate(200 * MIB)


@pytest.mark.parametrize("is_expandable", [False, True])
def test_limits_hold_and_caches_are_given_back_with_whole_segments_and_with_those_that_grow(
    cuda: FakeCuda, is_expandable: bool
) -> None:
    cuda.is_expandable = is_expandable
    gpu = CudaGpu("GPU-1a2b", 2**28)
    assert gpu.memory().host_capacity_bytes == 2**28
    small = [cuda.allocate(9 * MIB) for _ in range(20)]
    large = cuda.allocate(500 * MIB)
    for block in small[1:]:
        cuda.allocator.free(block)
    cuda.allocator.free(large)
    full_bytes = gpu.memory().held_bytes
    gpu.set_limit(50 * MIB)
    held_bytes = gpu.memory().held_bytes
    assert held_bytes == (9 * MIB if is_expandable else 20 * MIB)
    assert full_bytes >= 700 * MIB
    assert gpu.memory().host_bytes == 0, "what was given back just now had been the GPU's"
    gpu.begin_mini_batch()
    on_host = cuda.allocate(100 * MIB)
    use = gpu.memory()
    assert (use.host_bytes, use.held_bytes) == (100 * MIB, held_bytes), "what finds no room is the host's"
    cuda.allocator.free(on_host)
    gpu.set_limit(NO_LIMIT)
    gpu.begin_mini_batch()
    cuda.allocate(100 * MIB)
    assert gpu.memory().host_bytes == 0
    assert gpu.memory().held_bytes + cuda.free_bytes == TOTAL_BYTES
