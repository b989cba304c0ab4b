"""Real GPUs. What needs one is skipped where there is none."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from hetstream.hetjob.gpu import environment
from hetstream.hetjob.gpu.cuda import CudaGpu, Graphs, HostPool, Launches, watch_triton
from hetstream.hetjob.gpu.device import MemoryUse
from hetstream.hetjob.gpu.orders import NO_LIMIT

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PROGRAM = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("trained", torch.cuda.is_initialized())
"""


@pytest.mark.parametrize("job_class", [pytest.param("guaranteed", marks=pytest.mark.slow), "opportunistic"])
def test_a_program_that_uses_no_gpu_is_left_alone(job_class: str, tmp_path: Path) -> None:
    settings = {
        "HETSTREAM_GPU": "GPU-1a2b",
        "HETSTREAM_JOB_CLASS": job_class,
        "HETSTREAM_GPU_SOCKET": f"{tmp_path}/none.sock",
    }
    argv = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(argv, env=environment(settings) | settings, capture_output=True, text=True, timeout=100)
    assert done.stdout == "trained False\n", done.stderr


def test_without_cuda_nothing_is_held_and_nothing_is_initialised() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("another test has initialised CUDA")
    gpu = CudaGpu("GPU-1a2b")
    gpu.begin_mini_batch()
    gpu.set_limit(0)
    assert gpu.memory() == MemoryUse(0, 0, 0, 0)
    assert gpu.is_idle()
    assert not torch.cuda.is_initialized()


@pytest.mark.shows("an opportunistic job keeps to its memory limit, at its boundary, and shrinks and grows")
@pytest.mark.gpu
@needs_gpu
def test_a_lower_limit_gives_cached_memory_back_and_a_higher_one_lets_it_grow() -> None:
    gpu = CudaGpu("GPU-1a2b")
    tensor = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    assert gpu.memory().held_bytes >= 2**28
    del tensor
    gpu.set_limit(2**20)
    assert gpu.memory().held_bytes < 2**28
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**28, dtype=torch.uint8, device="cuda")
    gpu.set_limit(NO_LIMIT)
    torch.empty(2**28, dtype=torch.uint8, device="cuda")


def test_a_torch_without_cuda_has_no_pool_and_says_so() -> None:
    if hasattr(torch._C, "_cuda_customAllocator"):
        pytest.skip("this torch has CUDA")
    with pytest.raises(RuntimeError, match="this PyTorch takes no allocators"):
        HostPool(2**20)


def test_the_pool_is_filled_without_giving_pythons_lock_away_and_is_never_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`torch.empty` gives it away while the allocator is locked, which then calls Python: two threads wait for ever."""
    taken: list[int] = []

    class Pool:
        def __init__(self, _allocator: object, *, use_on_oom: bool) -> None:
            assert use_on_oom

        def snapshot(self) -> list[dict[str, int]]:
            return [{"total_size": sum(taken)}]

    make_storage = torch.UntypedStorage

    def storage(num_bytes: int, *, device: str) -> torch.UntypedStorage:
        assert device == "cuda"
        taken.append(num_bytes)
        return make_storage(num_bytes)

    def gives_the_lock_away(*_: object, **__: object) -> None:
        raise AssertionError("another thread may hold Python's lock and wait for the allocator")

    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda *_: object(), raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch, "UntypedStorage", storage)
    monkeypatch.setattr(torch, "empty", gives_the_lock_away)
    pool = HostPool(2**26)
    assert pool.capacity_bytes == sum(taken) == 2**26
    assert taken == [2**20] * 4 + [60 * 2**20]
    kept = weakref.ref(pool)
    del pool
    assert kept() is not None, "it would go when Python ends, after its functions"


@pytest.mark.shows("a shared GPU has three devices: CUDA, a virtual clock, and a live emulation")
@pytest.mark.gpu
@needs_gpu
def test_what_finds_no_room_on_the_gpu_is_on_the_host_and_the_next_one_on_the_gpu_again() -> None:
    gpu = CudaGpu("GPU-1a2b", 2**29)
    torch.zeros(1, device="cuda")
    assert gpu.memory().host_capacity_bytes >= 2**28
    gpu.set_limit(gpu.memory().held_bytes)
    try:
        tensor = torch.full((2**26,), 3, dtype=torch.uint8, device="cuda")
        assert gpu.memory().host_bytes >= 2**26
        assert int(tensor.sum()) == 3 * 2**26
        del tensor
    finally:
        gpu.set_limit(NO_LIMIT)
    gpu.begin_mini_batch()
    tensor = torch.full((2**26,), 3, dtype=torch.uint8, device="cuda")
    assert gpu.memory().host_bytes == 0
    del tensor


@pytest.mark.gpu
@needs_gpu
def test_little_is_in_flight_and_its_time_is_known() -> None:
    gpu = CudaGpu("GPU-1a2b")
    matrix = torch.ones(2048, 2048, device="cuda")
    busy_ns = 0
    for _ in range(200):
        matrix = matrix @ matrix / 2048
        busy_ns += gpu.launched()
    assert busy_ns > 0


@pytest.mark.gpu
@needs_gpu
def test_a_graph_is_captured_under_an_agents_hooks_and_its_replays_pass_the_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph_class = torch.cuda.CUDAGraph
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(graph_class, name, getattr(graph_class, name))  # as it is now, again afterwards
    gpu, said = CudaGpu("GPU-1a2b"), {"gate": 0, "boundary": 0}
    weight = torch.nn.Parameter(torch.ones(1024, 1024, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def before() -> None:
        said["gate"] += 1
        gpu.is_idle()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (weight * 2).sum().backward()
        optimizer.step()
        graphs.takes_step()

    graphs = Graphs(graph_class, before, gpu.launched, lambda: said.update(boundary=said["boundary"] + 1))
    with Launches(before, gpu.launched):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        gated, graph = said["gate"], graph_class()
        with torch.cuda.graph(graph):
            step()
        assert (said["gate"], said["boundary"]) == (gated, 0), "what is captured does not run"
        value = float(weight[0, 0])
        said["gate"] = 0
        for _ in range(5):
            graph.replay()
    assert (said["gate"], said["boundary"]) == (5, 5)
    assert float(weight[0, 0]) == pytest.approx(value - 5 * 0.1 * 2, rel=1e-5)


@pytest.mark.gpu
@needs_gpu
def test_a_kernel_that_triton_launches_on_the_gpu_passes_the_gate() -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'hetstream[triton]'")
    from hetstream.mpi_dataworkers.gpu_features import probes

    said: list[str] = []
    chains = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    before = [list(chain.calls) for chain in chains]
    made = torch.empty(probes.ARITHMETIC_BLOCK, device="cuda")
    try:
        watch_triton(triton, lambda: said.append("gate"), lambda: said.append("launched"))
        probes.launch_arithmetic(made, 1, 1)
    finally:
        for chain, calls in zip(chains, before, strict=True):
            chain.calls[:] = calls
    assert said == ["gate", "launched"]
