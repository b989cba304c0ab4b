"""The memory of one connection between processes of a host: made by the loader, written by the data worker.

Used by `shm.py`. An extent is read in place, and its offset goes back to the data worker when its last view is dropped.
"""

from __future__ import annotations

import collections
import fcntl
import mmap
import os
import socket
import struct
import weakref

import numpy as np
import numpy.typing as npt

from hetstream.base.forks import generation
from hetstream.mpi_dataworkers.errors import ProtocolError

# How an extent's offset goes back.
OFFSET = struct.Struct("<Q")

_Bytes = npt.NDArray[np.uint8]


class Pool:
    """A loader's side of one connection's memory. Lives until the program has dropped the last batch in it."""

    def __init__(self, connection: socket.socket, capacity_bytes: int) -> None:
        self._connection = connection
        self._generation = generation()
        self._unsent: collections.deque[int] = collections.deque()
        self.descriptor = os.memfd_create("hetstream-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, capacity_bytes)
            # Whoever could shrink the file could kill its readers.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapped = mmap.mmap(self.descriptor, capacity_bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self._memory: _Bytes = np.frombuffer(mapped, dtype=np.uint8)

    def close_descriptor(self) -> None:
        """Once the data worker has its own."""
        os.close(self.descriptor)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """An extent, given back when no view of it is left.

        Raises:
            ProtocolError: it is not inside the pool.
        """
        if offset + num_bytes > self._memory.nbytes:
            raise ProtocolError(f"{num_bytes} bytes at {offset} are outside the pool of {self._memory.nbytes}")
        extent = self._memory[offset : offset + num_bytes]
        weakref.finalize(extent, self._give_back, offset).atexit = False
        return extent.data

    def _give_back(self, offset: int) -> None:
        """Runs where the last view of a batch is dropped, in any thread: one system call, and no lock."""
        if generation() != self._generation:
            return  # a forked child has dropped its copy of the program's objects
        self._unsent.append(offset)
        self.send_offsets()

    def send_offsets(self) -> None:
        """Send what could not be sent before; the data worker takes them off when it needs room."""
        while self._unsent:
            offset = self._unsent.popleft()
            try:
                self._connection.send(OFFSET.pack(offset), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._unsent.appendleft(offset)
                return
            except OSError:
                self._unsent.clear()  # the data worker is gone, and the pool with it
                return

    def __del__(self) -> None:
        # Closed here and not with the connection: then no thread can be about to send on it.
        self._connection.close()
