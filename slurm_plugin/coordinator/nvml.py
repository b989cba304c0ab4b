"""Real GPUs, as NVIDIA's management library counts them: memory of each process, and how busy they are.

A driver that hangs must not hold up anybody's orders, so a thread asks it, and the coordinator takes what was read
last. A GPU that does not answer any more has vanished: nobody but its guaranteed job launches on it. The home of
pynvml (package nvidia-ml-py).
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hetstream.base.errors import UsageError
from hetstream.base.installed import install_command
from hetstream.slurm_plugin.coordinator.gpus import GpuReading

_log = logging.getLogger(__name__)

_PERIOD_S = 0.5
# The driver's own utilisation is of its last moment; what it was over this time says more.
_UTILISATION_OVER_S = 10.0
# A driver that has said nothing for so long says nothing any more.
_SILENT_S = 5.0
_MIG_PREFIX = "MIG-"


def load() -> ModuleType:
    """The library, ready.

    Raises:
        UsageError: it is not installed, or there is no driver.
    """
    try:
        import pynvml
    except ImportError as error:
        raise UsageError(
            f"--gpu UUID needs the package nvidia-ml-py. Run: {install_command('nvml')}, or write NAME=BYTES"
        ) from error
    library: ModuleType = pynvml
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise UsageError(f"--gpu UUID needs NVIDIA's driver, which says: {error}") from error
    return library


class NvmlGpu:
    """A whole GPU, or an instance of one that MIG divides.

    Args:
        name: its UUID, as `nvidia-smi -L` shows it: GPU-... or MIG-...
        library: pynvml, or what stands for it.
        clock: seconds.

    Raises:
        UsageError: there is none, or MIG divides it.
    """

    def __init__(self, name: str, library: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._nvml = library or load()
        self._clock = clock
        self._sampled_us = 0
        self._utilisations: collections.deque[tuple[float, float]] = collections.deque()
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
            if not name.startswith(_MIG_PREFIX) and self._is_divided():
                raise UsageError(f"--gpu {name}: MIG divides it. Name its instances: nvidia-smi -L")
            self.capacity_bytes = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total)
        except self._nvml.NVMLError as error:
            raise UsageError(f"--gpu {name}: {error}. Names are in: nvidia-smi -L") from error
        self._taken_s = clock()
        self._reading = self.read()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"hetstream-nvml-{name}", daemon=True)
        self._thread.start()

    def reading(self) -> GpuReading:
        """As `Gpu.reading`."""
        is_silent = self._clock() - self._taken_s > _SILENT_S
        return GpuReading(is_lost=True) if is_silent else self._reading

    def close(self) -> None:
        """Ask no more. A driver that hangs is not waited for."""
        self._is_closed.set()
        self._thread.join(_PERIOD_S)

    def read(self) -> GpuReading:
        """Ask the driver now."""
        try:
            used_bytes = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            utilisation, computing = self._utilisation(), self._computing()
        except self._nvml.NVMLError as error:
            return GpuReading(is_lost=True, why_lost=str(error))
        counted = {int(process.pid): process.usedGpuMemory for process in processes}
        knows = all(num_bytes is not None for num_bytes in counted.values())  # of an instance of MIG it may not say
        return GpuReading(used_bytes, utilisation, counted if knows else None, computing=computing)

    def _is_divided(self) -> bool:
        try:
            current, _ = self._nvml.nvmlDeviceGetMigMode(self._handle)
        except self._nvml.NVMLError:  # it has no such thing
            return False
        return bool(current)

    def _utilisation(self) -> float | None:
        """Over the last ten seconds, 0 to 1; None of an instance of MIG."""
        if self.name.startswith(_MIG_PREFIX):
            return None
        now_s = self._clock()
        self._utilisations.append((now_s, self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100))
        while now_s - self._utilisations[0][0] > _UTILISATION_OVER_S:
            self._utilisations.popleft()
        return sum(busy for _, busy in self._utilisations) / len(self._utilisations)

    def _computing(self) -> frozenset[int]:
        """Processes of which the driver has samples since the last call, with anything in them."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._sampled_us)
        except self._nvml.NVMLError:  # nobody has computed, or it does not say (MIG, GPUs before Maxwell)
            return frozenset()
        self._sampled_us = max((int(sample.timeStamp) for sample in samples), default=self._sampled_us)
        return frozenset(int(sample.pid) for sample in samples if sample.smUtil)

    def _watch(self) -> None:
        while not self._is_closed.wait(_PERIOD_S):
            before, self._reading = self._reading, self.read()
            self._taken_s = self._clock()
            if self._reading.is_lost and not before.is_lost:
                _log.warning("GPU lost gpu=%s: %s", self.name, self._reading.why_lost)
