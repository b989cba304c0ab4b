"""A training program, for benchmarks.gpu_sharing; it knows nothing of sharing.

Takes one JSON object: `steps`, or `seconds` and `least_steps`; `wait_ms` of waiting for data before each step; a model
and its sizes (`gpu_models.py`; an MLP of `width`, `rows` and `layers` if it names none); `device` (the CPU if it says
nothing); and:

- `fill_bytes`: make the batches so large that a step needs so much memory of a GPU.
- `host_bytes`: memory of the host that stands in for the GPU's from the beginning.
- `to_gpu`, `go`: files that it waits for before it uses the GPU, and before its first step.
- `bursts`: batches in a step, after each of which it may wait; `control`: a file with what to do (`gpu_peers.py`).

Prints one line for each step: when it ended, and how long it computed, in nanoseconds of CLOCK_MONOTONIC. Other lines
begin with a word: `imported`, `ready`, `size` of the batches, `peak` bytes of the GPU, `losses` of all steps.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.clients.gpu_models import Job, job_of
from benchmarks.clients.gpu_peers import Control
from benchmarks.gpu_laws import size_that_fills

# Two batches tell how large one is that fills the memory, unless a request names other ones (`try_sizes`).
_SIZES = (16, 64)
_LOOK_S = 0.001


def main() -> None:
    """Train."""
    request = json.loads(sys.argv[1])
    print("imported", flush=True)
    _wait_for(request.get("to_gpu"))
    device = request.get("device", "cpu")
    if device == "cuda":
        torch.zeros(1, device=device)  # from here on there is a context
        torch.backends.cudnn.deterministic = True  # the losses of two runs are to be the same
        torch.set_float32_matmul_precision("high")
    pool = _host_pool(request.get("host_bytes", 0))
    torch.manual_seed(0)
    if "fill_bytes" in request:
        request["size"] = filling(request, device)
        print("size", request["size"], flush=True)
        torch.manual_seed(0)
    job = job_of(request, device)
    batch = job.batch_of(job.size)
    if device == "cuda":
        torch.cuda.synchronize()
    print("ready", flush=True)
    _wait_for(request.get("go"))
    losses = train(request, job, batch)
    if device == "cuda":
        print("peak", torch.cuda.max_memory_allocated())
    if "control" not in request:
        print("losses", json.dumps([float(loss) for loss in losses]), flush=True)
    end(device, pool)


def end(device: str, _kept: object = None) -> None:
    """End a program that used a GPU, and no sooner what is kept: nothing is torn down that the driver frees anyway."""
    sys.stdout.flush()
    if device == "cuda":
        os._exit(0)


def train(request: Mapping[str, Any], job: Job, batch: Any) -> list[torch.Tensor]:
    """Make the steps, and a line for each. Returns the losses, but of programs that are controlled."""
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.001)
    bursts = request.get("bursts", 1)
    control = Control(request["control"], bursts) if "control" in request else None
    is_cuda = request.get("device") == "cuda"
    data = threading.Event()
    losses: list[torch.Tensor] = []
    end_s = time.monotonic() + request.get("seconds", 1e9)
    for number in range(request.get("steps", 10**9)):
        if control:
            control.begin_step()
        data.wait(request["wait_ms"] / 1000)
        began_ns, waited_ns = time.monotonic_ns(), 0
        for burst in range(bursts):
            loss = job.loss_of(batch)
            if burst == 0:
                optimizer.zero_grad()
            loss.backward()
            if control and control.gaps[burst] and burst < bursts - 1:
                waited_ns += _wait(control.gaps[burst], is_cuda)
        if control is None:
            losses.append(loss.detach())
        optimizer.step()
        if is_cuda:
            torch.cuda.synchronize()
        now_ns = time.monotonic_ns()
        print(now_ns, now_ns - began_ns - waited_ns, flush=True)
        if control:
            control.end_step((now_ns - began_ns) / 1e9)
            _wait(control.gaps[-1], is_cuda)
        if time.monotonic() > end_s and number + 1 >= request.get("least_steps", 1):
            break
    return losses


def _wait(gap_s: float, is_cuda: bool) -> int:
    """Leave the GPU idle. Returns how long, in nanoseconds."""
    if is_cuda:
        torch.cuda.synchronize()
    began_ns = time.monotonic_ns()
    if gap_s:
        time.sleep(gap_s)
    return time.monotonic_ns() - began_ns


def _wait_for(path: str | None) -> None:
    while path and not Path(path).exists():
        time.sleep(_LOOK_S)


def _host_pool(num_bytes: int) -> object:
    if not num_bytes:
        return None
    from hetstream.hetjob.gpu.cuda import HostPool

    return HostPool(num_bytes)


def filling(request: Mapping[str, Any], device: str) -> int:
    """The size of a batch whose step needs as much memory of the GPU as is asked for."""
    sizes = tuple(request.get("try_sizes", _SIZES))
    _peak_bytes(request, device, sizes[0])  # libraries take their own memory at first
    peaks = tuple(_peak_bytes(request, device, size) for size in sizes)
    return size_that_fills(sizes, peaks, request["fill_bytes"])


def _peak_bytes(request: Mapping[str, Any], device: str, size: int) -> int:
    job = job_of(request, device)
    torch.cuda.reset_peak_memory_stats()
    job.loss_of(job.batch_of(size)).backward()
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated()
    del job
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak_bytes


if __name__ == "__main__":
    main()
