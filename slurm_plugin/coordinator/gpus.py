"""The GPUs of a node, as the coordinator counts their memory."""

from __future__ import annotations

import collections
import ctypes
import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from hetstream.base.errors import HetstreamError, UsageError
from hetstream.base.installed import install_command
from hetstream.hetjob.gpu.emulated_file import PREFIX, EmulatedGpuFile, resolved

_UUID = ("GPU-", "MIG-")
_READING_S = 0.01


@dataclass(frozen=True)
class GpuReading:
    """What a GPU says of itself.

    Attributes:
        used_bytes: of its memory, by whomever; None: nobody counts.
        utilisation: share of the last ten seconds in which anything ran on it; None: nobody counts.
        held_bytes: by the number of the process; None: nobody counts.
        is_lost: it answers no more.
        why_lost: what its driver says of that.
        computing: numbers of the processes that have computed on it since the reading before, as far as it says.
    """

    used_bytes: int | None = None
    utilisation: float | None = None
    held_bytes: Mapping[int, int] | None = None
    is_lost: bool = False
    why_lost: str = ""
    computing: Collection[int] = ()

    def held_by(self, pid: int) -> int | None:
        """Return memory that a process holds; None: nobody counts."""
        return None if self.held_bytes is None else self.held_bytes.get(pid, 0)


# The driver counts by the numbers that processes have on the host. /proc/self/ns/pid of the host's own namespace, by
# PROC_PID_INIT_INO of the kernel (include/uapi/linux/nsfs.h).
_NAMESPACE, _HOSTS_NAMESPACE = Path("/proc/self/ns/pid"), "pid:[4026531836]"


def of_this_namespace(reading: GpuReading) -> GpuReading:
    """Without processes that have gone. In a container where the driver's numbers are not ours, nobody counts.

    Without that, a job that lies would be compared with nothing, and an honest one with somebody else's process.
    """
    if reading.held_bytes is None:
        return reading
    there = {pid: held for pid, held in reading.held_bytes.items() if _is_there(pid)}
    if len(there) < len(reading.held_bytes) and not _is_on_host():
        return replace(reading, held_bytes=None, computing=())
    return replace(reading, held_bytes=there)


def _is_on_host() -> bool:
    """Whether processes have the same numbers here as on the host; in doubt they have."""
    try:
        return os.readlink(_NAMESPACE) == _HOSTS_NAMESPACE
    except OSError:
        return True


def _is_there(pid: int) -> bool:
    """Whether there is such a process; also where /proc hides those of others."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Gpu(Protocol):
    """One GPU."""

    @property
    def name(self) -> str:
        """What jobs call it."""

    @property
    def capacity_bytes(self) -> int:
        """Memory that jobs may hold together."""

    def reading(self) -> GpuReading:
        """Return what it said last; never waits."""

    def close(self) -> None:
        """Stop looking at it."""


@dataclass(frozen=True)
class StatedGpu:
    """A GPU of which only the size is known, and that only because somebody has said so."""

    name: str
    capacity_bytes: int

    def reading(self) -> GpuReading:
        """Return an empty reading: nobody counts what is on it."""
        return GpuReading()

    def close(self) -> None:
        """Nothing is open."""


class EmulatedGpu:
    """An emulated GPU (`hetjob/gpu/emulation.py`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._file = EmulatedGpuFile(name.removeprefix(PREFIX))
        self.capacity_bytes = self._file.capacity_bytes
        self._reading = GpuReading()
        self._read_s = -_READING_S

    def reading(self) -> GpuReading:
        """Return what its file says, or said some milliseconds ago: it takes longer to read than to decide."""
        now_s = time.monotonic()
        if now_s - self._read_s >= _READING_S:
            self._read_s = now_s
            try:
                held_bytes = self._file.held()
                self._reading = GpuReading(sum(held_bytes.values()), None, held_bytes)
            except (OSError, ValueError) as error:
                self._reading = GpuReading(is_lost=True, why_lost=str(error))
        return self._reading

    def close(self) -> None:
        """Close its file."""
        self._file.close()


def open_gpu(text: str) -> Gpu:
    """Return a GPU by its name: a UUID, `emulation:FILE`, or `NAME=BYTES` for one of that size.

    Raises:
        UsageError: it is neither.
    """
    if text.startswith(PREFIX):
        try:
            return EmulatedGpu(resolved(text))
        except (OSError, ValueError) as error:
            raise UsageError(f"--gpu {text}: {error}. Make one: hetstream internal gpu-emulate FILE") from error
    name, equals, size = text.partition("=")
    if text.startswith(_UUID) and not equals:
        return NvmlGpu(text)
    if not name or not size.isdecimal() or int(size) <= 0:
        raise UsageError(
            f"--gpu {text}: write a UUID of nvidia-smi -L, NAME=BYTES, such as GPU-1a2b=150000000000, or emulation:FILE"
        )
    return StatedGpu(name, int(size))


# Real GPUs, as NVIDIA's management library counts them: memory of each process, and how busy they are.
#
# A driver that hangs must not hold up anybody's orders, so a thread asks it, and the coordinator takes what was read
# last. A GPU that does not answer any more has vanished: nobody but its guaranteed job launches on it. The home of
# pynvml (package nvidia-ml-py).

_log = logging.getLogger(__name__)

_PERIOD_S = 0.5
# The driver's own utilisation is of its last moment; what it was over this time says more.
_UTILISATION_OVER_S = 10.0
# Silence after which a driver counts as one that does not answer.
_SILENT_S = 5.0
_MIG_PREFIX = "MIG-"


def load() -> ModuleType:
    """Return the library, ready.

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
        self._has_said_so = False
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
        found = GpuReading(used_bytes, utilisation, counted if knows else None, computing=computing)
        if not knows or of_this_namespace(found).held_bytes is not None:
            return found
        if not self._has_said_so:
            _log.warning(
                "GPU counted by numbers of the host gpu=%s: they are not this container's, so what jobs hold is"
                " compared with nothing. Run the coordinator on the host, or in its namespace (--pid=host)",
                self.name,
            )
            self._has_said_so = True
        return replace(found, held_bytes=None, computing=frozenset())

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


# Takes a process off its GPU and puts it back, by the driver: the last resort, when a job does not give memory back.
#
# The driver copies the process's memory of the GPU to the host and frees it; the process waits at its next call to CUDA
# until it is put back. Who calls this needs the rights over the process that a debugger has: its own user, or root; the
# coordinator has them not. Driver 570 and later; nothing of this runs without a GPU.

_SUCCESS = 0
# CUresult of cuda.h, of what can be said better than by a number.
_SAYS = {
    1: "there is no such process that uses CUDA",
    2: "there is not so much memory",
    3: "the driver is not ready",
    600: "the process did not come to rest in time",
    801: "this driver or virtual machine cannot do that",
}
# CUcheckpointLockArgs: how long the process may take to come to rest, in milliseconds, and reserved zeros. Without it
# the driver waits for ever.
_LOCK_MS = 10_000
_FUNCTIONS = ("Lock", "Checkpoint", "Restore", "Unlock")


class _LockOptions(ctypes.Structure):
    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7))


class ProcessState(enum.IntEnum):
    """Of a process, by the driver: `CUprocessState` in cuda.h."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


def driver() -> Any:
    """Return the driver's library, which has what it takes.

    Raises:
        HetstreamError: there is none, or it is too old.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise HetstreamError(f"no process can be taken off a GPU here: {error}") from error
    if not hasattr(library, "cuCheckpointProcessLock"):
        raise HetstreamError("no process can be taken off a GPU here: that needs NVIDIA's driver 570 or later")
    _check("cuInit", library.cuInit(0))
    return library


def suspend(pid: int, library: Any = None) -> None:
    """Take a process off its GPUs; one that is off stays off.

    Raises:
        HetstreamError: the driver cannot, or will not. Then the process runs as before.
    """
    library = library or driver()
    if _state(pid, library) is ProcessState.CHECKPOINTED:
        return
    if _state(pid, library) is ProcessState.RUNNING:
        _call(library, "Lock", pid)
    try:
        _call(library, "Checkpoint", pid)
    except HetstreamError:
        _call(library, "Unlock", pid)
        raise


def resume(pid: int, library: Any = None) -> None:
    """Put it back; one that is there stays there.

    Raises:
        HetstreamError: the driver cannot: the memory that it needs may be in use. It can be tried again.
    """
    library = library or driver()
    if _state(pid, library) is ProcessState.CHECKPOINTED:
        _call(library, "Restore", pid)
    if _state(pid, library) is ProcessState.LOCKED:
        _call(library, "Unlock", pid)


def _state(pid: int, library: Any) -> ProcessState:
    state = ctypes.c_int()
    failed = library.cuCheckpointProcessGetState(pid, ctypes.byref(state))
    _check(f"the state of process {pid}", failed)
    return ProcessState(state.value)


def _call(library: Any, what: str, pid: int) -> None:
    assert what in _FUNCTIONS
    options = ctypes.byref(_LockOptions(timeout_ms=_LOCK_MS)) if what == "Lock" else None
    _check(f"{what.lower()} of process {pid}", getattr(library, f"cuCheckpointProcess{what}")(pid, options))


def _check(what: str, failed: int) -> None:
    if failed != _SUCCESS:
        says = f"CUDA error {failed}" + (f" ({_SAYS[failed]})" if failed in _SAYS else "")
        raise HetstreamError(f"{what}: NVIDIA's driver says {says}. It needs its own user, or root")
