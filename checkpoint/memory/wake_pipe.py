"""The pipe in a store by which a trainer wakes its checkpoint writer."""

from __future__ import annotations

import contextlib
import os

from hetstream.checkpoint.memory.store_files import StoreFiles


class WakePipe:
    """The trainer's end; it is there without a checkpoint writer, too, and what is written then is not lost."""

    def __init__(self, files: StoreFiles) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(files.wake, 0o600)
        # Read and write: a pipe without a reader does not open for writing alone.
        self._descriptor = os.open(files.wake, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """Make the checkpoint writer look."""
        with contextlib.suppress(BlockingIOError):  # it has not looked at what is in the pipe
            os.write(self._descriptor, b"\0")

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)
