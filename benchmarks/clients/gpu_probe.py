"""What a GPU, its driver and PyTorch can do of what sharing needs, for benchmarks.gpu_sharing; changes nothing.

Prints a JSON object for each fact: its name -> a number with its unit, or why it is not known. Each fact is looked at
by itself and for some seconds at most, so a driver that lacks one, or hangs at it, still tells those before. A second
process of this program (`beside`) keeps the GPU busy, is taken off it by the driver, and put back: that comes last.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.clients.gpu_training import end
from hetstream.hetjob.gpu.cuda import CudaGpu, HostPool, Launches
from hetstream.slurm_plugin.coordinator.gpus import driver, resume, suspend

_COPIED_BYTES = 2**28
_SIDE = 4096
_BESIDE = "beside"
_BESIDE_S = 1.0
# What waits for another process or for the driver is given up after this. The first fact starts CUDA.
_FACT_S = 15.0
# cuda.h: CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_HOST_NUMA = 141


def main() -> None:
    """Look at all facts."""
    if sys.argv[1:2] == [_BESIDE]:
        _keep_busy()
        return
    signal.signal(signal.SIGALRM, _too_long)
    for name, look in FACTS.items():
        signal.setitimer(signal.ITIMER_REAL, _FACT_S)
        found: list[Any] | str
        try:
            found = list(look())
        except Exception as error:  # noqa: BLE001 - at the edge of each fact: its reason is its result
            found = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({name: found}), flush=True)
    end("cuda", _pool)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"not known after {_FACT_S:.0f} s")


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


def _versions() -> tuple[float, str]:
    driver_version = ctypes.c_int()
    driver().cuDriverGetVersion(ctypes.byref(driver_version))
    major, minor = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}, capability"
    return driver_version.value / 1000, f"CUDA of the driver; {name} {major}.{minor}"


@functools.cache
def _pool() -> HostPool:
    """One, until this process ends: tensors may lie in it, and all that there are would be used."""
    torch.zeros(1, device="cuda")
    return HostPool(4 * 4 * _SIDE * _SIDE)


@contextlib.contextmanager
def _short_of_memory() -> Iterator[HostPool]:
    """Whatever finds no room in what is held now is on the host."""
    pool = _pool()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total_bytes = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total_bytes)
    try:
        yield pool
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _stands_in(make: Callable[[], torch.Tensor], work: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, str]:
    """Work on what lies on the host: is it right, and how many times as long as on the GPU does it take?"""
    here = make()
    expected = work(here)
    on_gpu_s = _seconds(lambda: work(here))
    with _short_of_memory() as pool:
        there = torch.empty_like(here)
        if pool.used_bytes() == 0:
            raise RuntimeError("the pool was not used when memory was short")
        there.copy_(here)
        torch.cuda.set_per_process_memory_fraction(1.0)
        on_host_s = _seconds(lambda: work(there))
        if not torch.allclose(work(there), expected, rtol=1e-3, atol=1e-3):
            raise RuntimeError("the result is wrong")
    return on_host_s / on_gpu_s, "x time"


def _matrices_on_host() -> tuple[float, str]:
    second = torch.randn(_SIDE, _SIDE, device="cuda") / _SIDE
    return _stands_in(lambda: torch.randn(_SIDE, _SIDE, device="cuda"), lambda first: first @ second)


def _convolution_on_host() -> tuple[float, str]:
    layer = torch.nn.Conv2d(64, 64, 3, padding=1, device="cuda").requires_grad_(False)
    return _stands_in(lambda: torch.randn(16, 64, 112, 112, device="cuda"), layer)


def _copy_on_host() -> tuple[float, str]:
    return _stands_in(lambda: torch.randn(_SIDE, _SIDE, device="cuda"), torch.clone)


def _pool_before_cache() -> tuple[float, str]:
    """Memory is short, and the cache has a free block that is too small: is that given back, or is the pool used?"""
    cached = [torch.empty(32 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(4)]
    with _short_of_memory() as pool:
        del cached
        one = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
        is_first = pool.used_bytes() > 0
        del one
    return float(is_first), "1: the pool is used before cached blocks are released"


def _host_numa() -> tuple[float, str]:
    value = ctypes.c_int()
    failed = driver().cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(_HOST_NUMA), ctypes.c_int(0))
    if failed:
        raise RuntimeError(f"the driver says CUDA error {failed}")
    return float(value.value), "1: pages of virtual memory may lie on the host"


def _green_contexts() -> tuple[float, str]:
    torch.cuda.init()
    found = hasattr(torch.cuda, "green_contexts") or hasattr(torch.cuda, "GreenContext")
    return float(found), "1: this PyTorch has them"


def _gpm() -> tuple[float, str]:
    import pynvml

    pynvml.nvmlInit()
    support = pynvml.nvmlGpmQueryDeviceSupport(pynvml.nvmlDeviceGetHandleByIndex(0))
    return float(support.isSupportedDevice), "1: NVML tells how busy SMs are"


def _keep_busy() -> None:
    """Multiply matrices, and say a sum now and then; until nobody reads them."""
    matrix = torch.ones(_SIDE, _SIDE, device="cuda")
    while True:
        for _ in range(20):
            product = matrix @ matrix
        print(float(product[0, 0]), time.monotonic_ns(), flush=True)


@contextlib.contextmanager
def _beside() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, __file__, _BESIDE], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            if not other.stdout.readline():
                raise RuntimeError("the process beside this one has ended")
            yield other
        finally:
            other.kill()


def _time_slices() -> tuple[float, str]:
    matrix = torch.ones(_SIDE, _SIDE, device="cuda")

    def products_s() -> list[float]:
        end_s, taken = time.monotonic() + _BESIDE_S, []
        while time.monotonic() < end_s:
            taken.append(_seconds(lambda: matrix @ matrix))
        return taken

    alone = statistics.median(products_s())
    with _beside():
        beside = products_s()
    slowest = max(beside) * 1e3
    return statistics.median(beside) / alone, f"x time; the slowest {slowest:.1f} ms, alone {alone * 1e3:.1f} ms"


def _suspended() -> tuple[float, str]:
    """A process is taken off the GPU and put back: are its memory and its results right?"""
    library = driver()
    with _beside() as other:
        assert other.stdout is not None
        full_bytes = torch.cuda.mem_get_info()[0]
        began_s = time.monotonic()
        suspend(other.pid, library)
        took_s = time.monotonic() - began_s
        freed = torch.cuda.mem_get_info()[0] - full_bytes
        resumed_ns = time.monotonic_ns()
        resume(other.pid, library)
        while True:
            value, when_ns = other.stdout.readline().split()
            if int(when_ns) > resumed_ns:
                break
    if float(value) != _SIDE or freed <= 0:
        raise RuntimeError(f"it computed {value} for {_SIDE}, and {freed:,} bytes became free")
    return took_s * 1e3, f"ms; {freed / 2**20:.0f} MiB became free, and its results are right afterwards"


def _launch_rate() -> tuple[float, str]:
    tensor = torch.zeros(1, device="cuda")
    return _seconds(lambda: [tensor.add_(1) for _ in range(1000)]) * 1e6 / 1000, "us"


def _hooked_rate() -> tuple[float, str]:
    """An operator of an opportunistic job, which passes by an agent's hooks, against one without."""
    tensor, gpu = torch.zeros(1, device="cuda"), CudaGpu("")

    def launch() -> None:
        for _ in range(1000):
            tensor.add_(1)

    bare_s = _seconds(launch)
    with Launches(lambda: None, gpu.launched):
        hooked_s = _seconds(launch)
    return hooked_s / bare_s, f"x time; {hooked_s * 1e3:.1f} us an operator"


def _mps() -> tuple[float, str]:
    if shutil.which("nvidia-cuda-mps-control") is None:
        raise RuntimeError("no nvidia-cuda-mps-control in PATH")
    return 1.0, "there"


def _memory() -> tuple[float, str]:
    return torch.cuda.mem_get_info()[1] / 2**30, "GiB"


FACTS: dict[str, Callable[[], tuple[float, str]]] = {
    "versions": _versions,
    "memory": _memory,
    "pinned copies to the GPU": _copy_rate,
    "pinning memory": _pin_rate,
    "a launch": _launch_rate,
    "a launch with an agent's hooks / without": _hooked_rate,
    "a product of matrices on the host's pool / on the GPU": _matrices_on_host,
    "a convolution on the host's pool / on the GPU": _convolution_on_host,
    "a copy from the host's pool / on the GPU": _copy_on_host,
    "the host's pool when memory is short": _pool_before_cache,
    "HOST_NUMA": _host_numa,
    "green contexts": _green_contexts,
    "GPM of NVML": _gpm,
    "a product of matrices beside another process / alone": _time_slices,
    "MPS": _mps,
    "a process taken off by cuCheckpointProcess": _suspended,
}

if __name__ == "__main__":
    sys.exit(main())
