"""The GPUs of a node, as the coordinator counts their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hetstream.base.errors import UsageError
from hetstream.hetjob.gpu.devices.emulated_file import EmulatedGpuFile

EMULATION = "emulation:"


class Gpu(Protocol):
    """One GPU."""

    @property
    def name(self) -> str:
        """What jobs call it."""

    @property
    def capacity_bytes(self) -> int:
        """Memory that jobs may hold together."""

    def held_by(self, pid: int) -> int | None:
        """Memory that a process holds, by the GPU's own count; None: nobody counts."""

    def close(self) -> None:
        """Stop looking at it."""


@dataclass(frozen=True)
class StatedGpu:
    """A GPU of which only the size is known, and that only because somebody has said so."""

    name: str
    capacity_bytes: int

    def held_by(self, pid: int) -> int | None:  # noqa: ARG002
        """Nobody counts."""
        return None

    def close(self) -> None:
        """Nothing is open."""


class EmulatedGpu:
    """An emulated GPU (`hetjob/gpu/devices/emulation.py`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._file = EmulatedGpuFile(name.removeprefix(EMULATION))
        self.capacity_bytes = self._file.capacity_bytes

    def held_by(self, pid: int) -> int | None:
        """What its file says."""
        return self._file.held_by(pid)

    def close(self) -> None:
        """Close its file."""
        self._file.close()


def open_gpu(text: str) -> Gpu:
    """A GPU by its name: `emulation:FILE`, or `NAME=BYTES` for one of that size.

    Raises:
        UsageError: it is neither.
    """
    if text.startswith(EMULATION):
        try:
            return EmulatedGpu(text)
        except (OSError, ValueError) as error:
            raise UsageError(f"--gpu {text}: {error}") from error
    name, _, size = text.partition("=")
    if not name or not size.isdecimal() or int(size) <= 0:
        raise UsageError(f"--gpu {text}: write NAME=BYTES, such as GPU-1a2b=150000000000, or emulation:FILE")
    return StatedGpu(name, int(size))
