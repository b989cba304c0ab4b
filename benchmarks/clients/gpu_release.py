"""How long a process needs to give memory of its GPU back and to take it again, for benchmarks.gpu_sharing.

Takes one JSON object: `gpu`, an emulated one's file or nothing for a real one, a model and its sizes (`gpu_models.py`;
`fill_bytes` for batches that need so much memory), `repeats` at most, and `seconds` after which there are no more.
Prints one JSON object: `shrink_ms`, from the limit to the memory in the allocator, `seen_ms`, from there until the
driver counts it as free, `grow_ms`, by which the first step after a rise is longer than usual, and `step_ms`, each of
them a list; `freed_bytes` by the last shrink, and `expandable`, whether the allocator's segments are.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.clients.gpu_models import job_of
from benchmarks.clients.gpu_training import end, filling
from hetstream.hetjob.gpu.cuda import CudaGpu
from hetstream.hetjob.gpu.device import Device
from hetstream.hetjob.gpu.emulation import EmulatedGpu, Kernels
from hetstream.hetjob.gpu.orders import NO_LIMIT

_HOST_BYTES = 2**30
_LEAST_REPEATS = 3
# So much of what was given back must be free by the driver's count, within this time.
_SEEN_PART, _SEEN_S = 0.9, 2.0


def main() -> None:
    """Shrink and grow at boundaries, as an agent does."""
    request = json.loads(sys.argv[1])
    device = "cpu" if request["gpu"] else "cuda"
    gpu: Device = EmulatedGpu(request["gpu"], _HOST_BYTES) if request["gpu"] else CudaGpu("", _HOST_BYTES)
    if isinstance(gpu, EmulatedGpu):
        Kernels(gpu, lambda: None, lambda: None).__enter__()
    else:
        torch.set_float32_matmul_precision("high")
        torch.zeros(1, device=device)
        gpu.memory()  # makes the host's pool, which is no part of what is measured
    if "fill_bytes" in request:
        request["size"] = filling(request, device)
    torch.manual_seed(0)
    job = job_of(request, device)
    batch = job.batch_of(job.size)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.001)

    def step_ms() -> float:
        began_s = time.monotonic()
        optimizer.zero_grad()
        job.loss_of(batch).backward()
        optimizer.step()
        _finish(device)
        return (time.monotonic() - began_s) * 1000

    for _ in range(2):
        step_ms()
    found = shrink_and_grow(gpu, device, request, step_ms, optimizer.zero_grad)
    print(json.dumps({**found, "expandable": _is_expandable(device)}))
    end(device, gpu)


def shrink_and_grow(
    gpu: Device, device: str, request: dict[str, Any], step_ms: Callable[[], float], drop: Callable[[], None]
) -> dict[str, Any]:
    """Give back what is not in use and take it again, over and over."""
    free_bytes = _driver(device)
    usual, shrinks, seen, growing, freed = [], [], [], [], 0
    end_s = time.monotonic() + request.get("seconds", 1e9)
    while len(usual) < request["repeats"] and (time.monotonic() < end_s or len(usual) < _LEAST_REPEATS):
        usual.append(step_ms())
        drop()
        full_bytes, before_bytes = gpu.memory().held_bytes, free_bytes()
        began_s = time.monotonic()
        gpu.set_limit(0)
        _finish(device)
        applied_s = time.monotonic()
        freed = full_bytes - gpu.memory().held_bytes
        if freed > 0:
            shrinks.append((applied_s - began_s) * 1000)
            if device == "cuda" and _is_seen(free_bytes, before_bytes + int(freed * _SEEN_PART)):
                seen.append((time.monotonic() - applied_s) * 1000)
        gpu.set_limit(NO_LIMIT)
        growing.append(step_ms())
    usual_ms = statistics.median(usual)
    grows = [max(0.0, took_ms - usual_ms) for took_ms in growing]
    return {"shrink_ms": shrinks, "seen_ms": seen, "grow_ms": grows, "step_ms": usual, "freed_bytes": freed}


def _is_seen(free_bytes: Callable[[], int], least_bytes: int) -> bool:
    """Wait until so much is free. False: it did not come."""
    end_s = time.monotonic() + _SEEN_S
    while free_bytes() < least_bytes:
        if time.monotonic() > end_s:
            return False
    return True


def _driver(device: str) -> Callable[[], int]:
    """What counts the memory that is free: NVML, which is not this process's own count; without it, the runtime."""
    if device != "cuda":
        return lambda: 0
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except Exception as error:  # noqa: BLE001 - not installed, no such name, or a driver that does not say: the other one does
        sys.stderr.write(f"no NVML, so the runtime counts: {error}\n")
        return lambda: int(torch.cuda.mem_get_info()[0])
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)


def _is_expandable(device: str) -> bool:
    return device == "cuda" and any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
