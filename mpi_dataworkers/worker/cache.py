"""A data worker's sliding window of finished batches, for loaders that read the same stream. Pure: no socket, no clock.

Used by `steps.py` for sessions that share (`messages.Sharing`). What is kept is the flattened batch, ready to be sent
again: several jobs' copies of one step are one piece of memory. The oldest batches leave first.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass

from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.wire.codec import Buffer
from hetstream.mpi_dataworkers.wire.messages import Ranges


@dataclass(frozen=True)
class CachedBatch:
    """A flattened batch: what `ops.tree.flatten` and `codec.fuse` made of it. Nobody writes to its frames."""

    num_samples: int
    spec: bytes
    buffers: list[tuple[int, int, int]]
    frames: list[Buffer]

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return len(self.spec) + sum(memoryview(frame).nbytes for frame in self.frames)


class BatchCache:
    """Finished batches by (share key, position), the newest that fit.

    Args:
        limit_bytes: most bytes to hold; a batch that is larger alone is not kept.

    Attributes:
        num_bytes: what it holds now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.num_bytes = 0
        self._limit_bytes = limit_bytes
        self._batches: OrderedDict[tuple[str, int], CachedBatch] = OrderedDict()
        self._dropped: defaultdict[str, list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._batches)

    def get(self, key: str, position: int) -> CachedBatch | None:
        """The batch, if it is still here."""
        return self._batches.get((key, position))

    def put(self, key: str, position: int, batch: CachedBatch) -> None:
        """Keep a batch and drop the oldest ones that no longer fit beside it."""
        if (key, position) in self._batches:
            return
        self._batches[key, position] = batch
        self.num_bytes += batch.num_bytes
        while self.num_bytes > self._limit_bytes:
            (old_key, old_position), old = self._batches.popitem(last=False)
            self.num_bytes -= old.num_bytes
            self._dropped[old_key].append(old_position)

    def take_dropped(self) -> dict[str, Ranges]:
        """Positions dropped since the last call, by share key, as ascending ranges [first, stop)."""
        if not self._dropped:
            return {}
        dropped, self._dropped = self._dropped, defaultdict(list)
        return {key: as_ranges(sorted(positions)) for key, positions in dropped.items()}
