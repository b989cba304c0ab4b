"""How much memory and time a command may take to read a directory or a file that others may have made: in proportion to
what lies on disk. A file of some kilobytes that says it is a terabyte is refused before it fills the machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.limits import TimeExceeded, limited
from hetstream.checkpoint.errors import DamagedCheckpoint

# What the program takes by itself, most of it torch; and what for each byte on disk: a mapping that may be written to,
# a copy, and one to be converted.
_BASE_BYTES = 2 << 30
_FACTOR = 4
_BASE_CPU_S = 60
_CPU_S_PER_GB = 30
_MAX_ENTRIES = 1_000_000


@dataclass(frozen=True)
class Bounds:
    """What reading a source may take.

    Attributes:
        source: what is read.
        num_bytes: what it takes on disk.
    """

    source: Path
    num_bytes: int

    @staticmethod
    def of(source: Path) -> Bounds:
        """Those of a file or a directory."""
        return Bounds(source, bytes_on_disk(source))

    @property
    def memory_bytes(self) -> int:
        """Beyond what the process has."""
        return _BASE_BYTES + _FACTOR * self.num_bytes

    @property
    def cpu_s(self) -> int:
        """Of all threads together."""
        return _BASE_CPU_S + _CPU_S_PER_GB * self.num_bytes // 10**9

    def memory_exceeded(self) -> DamagedCheckpoint:
        """The error that says so."""
        return self._exceeded(f"{self.memory_bytes} bytes of memory")

    def time_exceeded(self) -> DamagedCheckpoint:
        """The error that says so."""
        return self._exceeded(f"{self.cpu_s} s of processor time")

    def _exceeded(self, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self.source} takes {self.num_bytes} bytes on disk, and more than {what} to read: "
            "it is damaged, or a trap"
        )


@contextlib.contextmanager
def bounded(source: Path) -> Iterator[None]:
    """Read a directory of checkpoints, or a file, within these bounds.

    Args:
        source: what is read.

    Raises:
        DamagedCheckpoint: it takes more memory or time than what is right can take.
    """
    bounds = Bounds.of(source)
    with explained(bounds), limited(bounds.memory_bytes, bounds.cpu_s):
        yield


@contextlib.contextmanager
def explained(bounds: Bounds) -> Iterator[None]:
    """What the errors of a process that has reached its bounds become.

    Raises:
        DamagedCheckpoint: in place of each.
    """
    try:
        yield
    except MemoryError as error:
        raise bounds.memory_exceeded() from error
    except TimeExceeded as error:
        raise bounds.time_exceeded() from error
    except OSError as error:
        # A file that is mapped takes room as well.
        if error.errno != errno.ENOMEM:
            raise
        raise bounds.memory_exceeded() from error
    except RuntimeError as error:
        # torch's own word for it.
        if "can't allocate memory" not in str(error):
            raise
        raise bounds.memory_exceeded() from error


def bytes_on_disk(source: Path) -> int:
    """What a file takes on disk, or all files in a directory and one below; holes and links count nothing."""
    total = 0
    left = _MAX_ENTRIES
    folders = [(str(source), 0)] if source.is_dir() else []
    if not folders:
        with contextlib.suppress(OSError):
            total = _blocks(os.stat(source))
    while folders:
        folder, depth = folders.pop()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                left -= 1
                if left < 0:
                    return total
                if entry.is_dir(follow_symlinks=False):
                    folders += [(entry.path, depth + 1)] if depth == 0 else []
                else:
                    total += _blocks(entry.stat(follow_symlinks=False))
    return total


def _blocks(status: os.stat_result) -> int:
    return status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
