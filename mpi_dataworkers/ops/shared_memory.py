"""Which memory of this process its other processes see when it is written to.

A dataset can hold such memory: a tensor after `share_memory_()`, an array over `multiprocessing.shared_memory`, a
`numpy.memmap`. Torch's worker processes, which are forked, see what the trainer writes there later; of all else they
keep what it was when they began.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpi_dataworkers.codec import Buffer
from mpi_dataworkers.errors import PipelineError

_MAPS = Path("/proc/self/maps")
# Looking takes no more than this share of the time, but for the first time.
_LOOK_SHARE = 0.01


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


class WriteWatch:
    """Finds out, in a data worker, that samples write into memory which is shared in the trainer.

    A cache that torch's worker processes fill for each other would stay empty where the program looks for it.

    Args:
        digest: of that memory, as it is now.
        clock: seconds.
    """

    def __init__(self, digest: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._digest, self._clock = digest, clock
        self._before = digest()
        self._look_at = clock()

    def check(self) -> None:
        """Look, unless it has just been looked; call it when samples were made.

        Raises:
            PipelineError: they have written.
        """
        began = self._clock()
        if began < self._look_at:
            return
        if self._digest() != self._before:
            raise PipelineError(
                "the dataset writes into shared memory while it makes samples. Of torch's worker processes the trainer "
                "and the others would see that; a data worker has a copy of its own. Fill the memory before the "
                "loader is iterated, or let worker processes of the program make the samples: torch's own DataLoader "
                "stays local with multiprocessing_context='fork' and num_workers of 1 or more"
            )
        ended = self._clock()
        self._look_at = ended + (ended - began) / _LOOK_SHARE
