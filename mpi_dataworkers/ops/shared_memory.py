"""Which memory of this process its other processes see when it is written to.

A dataset can hold such memory: a tensor after `share_memory_()`, an array over `multiprocessing.shared_memory`, a
`numpy.memmap`. Torch's worker processes, which are forked, see what the trainer writes there later; of all else they
keep what it was when they began.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.wire.codec import Buffer

_T = TypeVar("_T")

_MAPS, _PAGES = Path("/proc/self/maps"), Path("/proc/self/pagemap")
# Looking takes no more than this share of the time, but for the first time, and where it is short.
_LOOK_SHARE = 0.01
# What may be saved up of that: one look that takes long by chance does not delay the next ones.
_MOST_LEFT_S = 0.01
# Of an entry of pagemap, see https://docs.kernel.org/admin-guide/mm/pagemap.html: the page is in memory, and of a file.
_IS_THERE, _IS_OF_FILE = 1 << 63, 1 << 61


def _shared_lines() -> Iterator[str]:
    with _MAPS.open(errors="surrogateescape", newline="\n") as lines:
        for line in lines:  # the names of files hold what `splitlines` takes for the end of a line
            if line.split(maxsplit=2)[1].endswith("s"):
                yield line.rstrip("\n")


def shared_mappings() -> frozenset[str]:
    """The shared mappings of this process, as the kernel writes them."""
    return frozenset(_shared_lines())


class SharedMappings:
    """The shared mappings of this process, as they are now (proc(5))."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for line in _shared_lines():
            start, stop = line.split(maxsplit=1)[0].split("-")
            self._starts.append(int(start, 16))
            self._stops.append(int(stop, 16))

    def __contains__(self, buffer: Buffer) -> bool:
        return self.hold(np.frombuffer(buffer, dtype=np.uint8))

    def hold(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether an array lies there."""
        address, _ = array.__array_interface__["data"]
        number = bisect.bisect_right(self._starts, address) - 1
        return number >= 0 and address < self._stops[number]


class PrivatePages:
    """Buffers in private mappings of files, of which this process has a page of its own as soon as it writes to it.

    Args:
        buffers: which; what they have in common with others on a page, at their ends, is looked at by its bytes.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._ends: list[np.ndarray[Any, Any]] = []
        self._pages: list[tuple[int, int]] = []  # number of the first one, and how many
        for buffer in buffers:
            array = np.frombuffer(buffer, dtype=np.uint8)
            before = -array.__array_interface__["data"][0] % PAGESIZE
            num_pages = max(0, array.nbytes - before) // PAGESIZE
            behind = before + num_pages * PAGESIZE
            self._ends += [array[:before], array[behind:]]
            self._pages.append(((array.__array_interface__["data"][0] + before) // PAGESIZE, num_pages))

    def own(self) -> list[bytes]:
        """One bit for each page: whether it is this process's own."""
        found = []
        with _PAGES.open("rb", buffering=0) as entries:
            for first, num_pages in self._pages:
                entries.seek(8 * first)
                pages = np.frombuffer(entries.read(8 * num_pages), dtype=np.uint64)
                found.append(np.packbits((pages & (_IS_THERE | _IS_OF_FILE)) == _IS_THERE).tobytes())
        return found

    def look(self) -> list[bytes]:
        """What is another one when this process has written to the buffers."""
        return [*self.own(), *(end.tobytes() for end in self._ends)]


class Looking:
    """How often something may be looked at: what that takes is a small share of the time.

    Args:
        saved_s: what looks may take beyond that.
        each_s: what they may take each time that is asked.
        clock: seconds.
        cpu_clock: seconds of this thread, which other processes do not prolong.
    """

    def __init__(
        self,
        saved_s: float = 0.0,
        each_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._each_s, self._clock, self._cpu_clock = each_s, clock, cpu_clock
        self._left_s, self._most_s, self._asked_at = saved_s, max(saved_s, _MOST_LEFT_S), clock()

    def look(self, look: Callable[[], _T]) -> _T | None:
        """What a look gives; None if looks have taken too much of the time."""
        now = self._clock()
        earned_s = self._each_s + _LOOK_SHARE * (now - self._asked_at)
        self._asked_at, self._left_s = now, min(self._left_s + earned_s, self._most_s)
        if self._left_s < 0:
            return None
        began_s = self._cpu_clock()
        found = look()
        self._left_s -= self._cpu_clock() - began_s
        return found


class WriteWatch:
    """Finds out that somebody writes into memory which is shared in the trainer.

    Args:
        look: gives something of that memory that is another one when somebody has written.
        before: what it gave at first; None to look now.
        looking: how often it may be looked.
    """

    def __init__(self, look: Callable[[], object], before: object = None, looking: Looking | None = None) -> None:
        self._look, self._looking = look, looking or Looking()
        self._before = look() if before is None else before

    def has_written(self) -> bool:
        """Look, unless that has taken too much of the time."""
        found = self._looking.look(self._look)
        return found is not None and found != self._before

    def check(self) -> None:
        """The same in a data worker, when samples were made.

        A cache that torch's worker processes fill for each other would stay empty where the program looks for it.

        Raises:
            PipelineError: they have written.
        """
        if self.has_written():
            raise PipelineError(
                "the dataset writes into shared memory while it makes samples. Of torch's worker processes the trainer "
                "and the others would see that; a data worker has a copy of its own. Fill the memory before the "
                "loader is iterated, or let worker processes of the program make the samples: torch's own DataLoader "
                "stays local with multiprocessing_context='fork' and num_workers of 1 or more"
            )
