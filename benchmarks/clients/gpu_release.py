"""How long a process needs to give memory of its GPU back and to take it again, for benchmarks.gpu_sharing.

Takes one JSON object: `gpu`, an emulated one's file or nothing for a real one, `width`, `rows`, `layers` of a program
that trains, and `repeats`. Prints one JSON object: `shrink_ms`, from the limit to the memory, `grow_ms`, by which the
first step after a rise is longer than usual, and `step_ms`, each of them a list.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from hetstream.hetjob.gpu.devices.base import Device
from hetstream.hetjob.gpu.devices.cuda import CudaGpu
from hetstream.hetjob.gpu.devices.emulation import EmulatedGpu, Kernels
from hetstream.hetjob.gpu.orders import NO_LIMIT

_HOST_BYTES = 2**30
_USUAL_STEPS = 3


def main() -> None:
    """Shrink and grow at boundaries, as an agent does."""
    request = json.loads(sys.argv[1])
    torch.manual_seed(0)
    device = "cpu" if request["gpu"] else "cuda"
    gpu: Device = EmulatedGpu(request["gpu"], _HOST_BYTES) if request["gpu"] else CudaGpu("", _HOST_BYTES)
    if isinstance(gpu, EmulatedGpu):
        Kernels(gpu, lambda: None, lambda: None).__enter__()
    width = request["width"]
    modules = [module for _ in range(request["layers"]) for module in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*modules).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    batch = torch.randn(request["rows"], width, device=device)

    def step_ms() -> float:
        began_s = time.monotonic()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        _finish(device)
        return (time.monotonic() - began_s) * 1000

    usual, shrinks, grows = [], [], []
    for _ in range(request["repeats"]):
        optimizer.zero_grad()
        usual.append(statistics.median(step_ms() for _ in range(_USUAL_STEPS)))
        optimizer.zero_grad()
        full_bytes = gpu.memory().held_bytes
        began_s = time.monotonic()
        gpu.set_limit(0)
        _finish(device)
        if gpu.memory().held_bytes < full_bytes:
            shrinks.append((time.monotonic() - began_s) * 1000)
        gpu.set_limit(NO_LIMIT)
        grows.append(max(0.0, step_ms() - usual[-1]))
    print(json.dumps({"shrink_ms": shrinks, "grow_ms": grows, "step_ms": usual}))


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
