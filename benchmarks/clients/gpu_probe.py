"""What a GPU, its driver and PyTorch can do of what sharing needs, for benchmarks.gpu_sharing; changes nothing.

Prints one JSON object: name of a fact -> a number with its unit, or why it is not known. Each fact is looked at by
itself, so a driver that lacks one still tells the others.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from hetstream.hetjob.gpu.devices.host_pool import HostPool
from hetstream.slurm_plugin.coordinator.driver_checkpoint import driver

_COPIED_BYTES = 2**28
_SIDE = 4096


def main() -> None:
    """Look at all facts."""
    facts: dict[str, list[Any] | str] = {}
    for name, look in FACTS.items():
        try:
            facts[name] = list(look())
        except Exception as error:  # noqa: BLE001 - at the edge of each fact: its reason is its result
            facts[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(json.dumps(facts))


def _seconds(work: Callable[[], object]) -> float:
    work()
    torch.cuda.synchronize()
    began_s = time.monotonic()
    work()
    torch.cuda.synchronize()
    return time.monotonic() - began_s


def _copy_rate() -> tuple[float, str]:
    pinned = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    return _COPIED_BYTES / _seconds(lambda: pinned.to("cuda", non_blocking=True)) / 1e9, "GB/s"


def _pin_rate() -> tuple[float, str]:
    began_s = time.monotonic()
    torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    return _COPIED_BYTES / (time.monotonic() - began_s) / 1e9, "GB/s"


def _host_stands_in() -> tuple[float, str]:
    """A product of matrices on the host's pool: is it right, and how many times as long as on the GPU?"""
    first, second = (torch.randn(_SIDE, _SIDE, device="cuda") for _ in range(2))
    expected = first @ second
    on_gpu_s = _seconds(lambda: first @ second)
    pool = HostPool(3 * 4 * _SIDE * _SIDE)
    torch.cuda.empty_cache()
    _, total_bytes = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total_bytes)
    try:
        there = torch.empty_like(first)
        used_bytes = pool.used_bytes()
        there.copy_(first)
        on_host_s = _seconds(lambda: torch.mm(there, second))
        if used_bytes == 0:
            raise RuntimeError("the pool was not used when memory was short")
        if not torch.equal(there @ second, expected):
            raise RuntimeError("a product of what lies on the host is wrong")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return on_host_s / on_gpu_s, "x time"


def _launch_rate() -> tuple[float, str]:
    tensor = torch.zeros(1, device="cuda")
    return _seconds(lambda: [tensor.add_(1) for _ in range(1000)]) * 1e6 / 1000, "us"


def _driver_checkpoint() -> tuple[float, str]:
    driver()
    return 1.0, "there"


def _mps() -> tuple[float, str]:
    if shutil.which("nvidia-cuda-mps-control") is None:
        raise RuntimeError("no nvidia-cuda-mps-control in PATH")
    return 1.0, "there"


def _memory() -> tuple[float, str]:
    return torch.cuda.mem_get_info()[1] / 2**30, "GiB"


FACTS: dict[str, Callable[[], tuple[float, str]]] = {
    "memory": _memory,
    "pinned copies to the GPU": _copy_rate,
    "pinning memory": _pin_rate,
    "a launch": _launch_rate,
    "a product of matrices on the host's pool / on the GPU": _host_stands_in,
    "cuCheckpointProcess of the driver": _driver_checkpoint,
    "MPS": _mps,
}

if __name__ == "__main__":
    sys.exit(main())
