"""The GPUs of a node, as the coordinator counts their memory."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from hetstream.base.errors import UsageError
from hetstream.hetjob.gpu.devices.emulated_file import PREFIX, EmulatedGpuFile, resolved

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
        """Memory that a process holds; None: nobody counts."""
        return None if self.held_bytes is None else self.held_bytes.get(pid, 0)


def of_this_namespace(reading: GpuReading) -> GpuReading:
    """Without processes that have gone, and those that the driver calls by other numbers than this container does."""
    if reading.held_bytes is None:
        return reading
    return replace(reading, held_bytes={pid: held for pid, held in reading.held_bytes.items() if _is_there(pid)})


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
        """What it said last; never waits."""

    def close(self) -> None:
        """Stop looking at it."""


@dataclass(frozen=True)
class StatedGpu:
    """A GPU of which only the size is known, and that only because somebody has said so."""

    name: str
    capacity_bytes: int

    def reading(self) -> GpuReading:
        """Nobody counts."""
        return GpuReading()

    def close(self) -> None:
        """Nothing is open."""


class EmulatedGpu:
    """An emulated GPU (`hetjob/gpu/devices/emulation.py`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._file = EmulatedGpuFile(name.removeprefix(PREFIX))
        self.capacity_bytes = self._file.capacity_bytes
        self._reading = GpuReading()
        self._read_s = -_READING_S

    def reading(self) -> GpuReading:
        """What its file says, or said some milliseconds ago: it takes longer to read than to decide."""
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
    """A GPU by its name: a UUID, `emulation:FILE`, or `NAME=BYTES` for one of that size.

    Raises:
        UsageError: it is neither.
    """
    if text.startswith(PREFIX):
        try:
            return EmulatedGpu(resolved(text))
        except (OSError, ValueError) as error:
            raise UsageError(f"--gpu {text}: {error}. Make one: hetstream gpu emulate FILE") from error
    name, equals, size = text.partition("=")
    if text.startswith(_UUID) and not equals:
        from hetstream.slurm_plugin.coordinator.nvml import NvmlGpu

        return NvmlGpu(text)
    if not name or not size.isdecimal() or int(size) <= 0:
        raise UsageError(
            f"--gpu {text}: write a UUID of nvidia-smi -L, NAME=BYTES, such as GPU-1a2b=150000000000, or emulation:FILE"
        )
    return StatedGpu(name, int(size))
