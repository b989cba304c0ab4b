"""Small batches that are made in quick succession leave a data worker in one message. Pure; used by `worker.py`.

A message has its price (system calls and thread switches on both sides), whatever its size. Each step in it is still a
batch of its own to the loader, which takes it in or drops it by its own step and token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetstream.mpi_dataworkers.wire.codec import FUSE_BELOW_BYTES, Leaf, Parcel, shared_bytes, size_of
from hetstream.mpi_dataworkers.wire.messages import Batch, Batches, Delivery

# What one message gathers at most: many times what its price buys in copies, little against a loader's window, and
# below the 4 MiB from which NumPy asks for huge pages: most messages are not full.
GATHER_BYTES = 3 << 20
# No finished batch waits longer than this for company, if the steps go on taking as long as they do.
GATHER_S = 0.001


class Gatherer:
    """What a data worker has made for one loader and not yet sent, in order.

    Args:
        room: lends memory of so many bytes from which the transport sends without a copy, or None where it has none.
    """

    def __init__(self, room: Callable[[int], memoryview | None] = lambda _: None) -> None:
        self._lend = room
        self._ready: list[tuple[Delivery, Sequence[Leaf]]] = []
        self._batches: list[Batch] = []
        self._parcel: Parcel | None = None
        self._since = 0.0
        self._room = 0

    def place(self, buffers: Sequence[Leaf], now: float) -> list[tuple[int, int, int]]:
        """Find places in the open message for a batch that is `add`ed next; small buffers are copied there.

        Args:
            buffers: of its tensors.
            now: when it was made, s.
        """
        self._room = shared_bytes(buffers)
        if self._parcel is not None and not self._parcel.has_room(self._room):
            self._close()
        if self._parcel is None:
            self._parcel, self._since = self._new_parcel(buffers), now
        return self._parcel.add(buffers)

    def _new_parcel(self, buffers: Sequence[Leaf]) -> Parcel:
        num_bytes = max(self._room, GATHER_BYTES)
        # Large buffers leave from where they lie, and the transport lays them out itself.
        are_small = all(size_of(buffer) < FUSE_BELOW_BYTES for buffer in buffers)
        return Parcel(num_bytes, self._lend(num_bytes) if are_small else None)

    def add(self, batch: Batch) -> None:
        """Add the batch whose buffers were placed last."""
        self._batches.append(batch)

    def add_alone(self, delivery: Delivery, frames: Sequence[Leaf]) -> None:
        """Add a message of its own, behind all that was added before."""
        self._close()
        self._ready.append((delivery, frames))

    def due(self, now: float, step_s: float) -> list[tuple[Delivery, Sequence[Leaf]]]:
        """Take out what is to be sent now.

        Args:
            now: the time, s.
            step_s: what the last step took; the next one will take about as long.
        """
        parcel = self._parcel
        if parcel is not None:
            is_full = parcel.has_large or not parcel.has_room(max(1, self._room))
            if is_full or now + step_s > self._since + GATHER_S:
                self._close()
        ready, self._ready = self._ready, []
        return ready

    def rest(self) -> list[tuple[Delivery, Sequence[Leaf]]]:
        """Take out all that is left."""
        self._close()
        ready, self._ready = self._ready, []
        return ready

    def _close(self) -> None:
        if self._parcel is not None:
            header = self._batches[0] if len(self._batches) == 1 else Batches(self._batches)
            self._ready.append((header, self._parcel.frames()))
            self._parcel, self._batches = None, []
