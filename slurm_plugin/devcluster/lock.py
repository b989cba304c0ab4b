"""One `up` or `down` at a time where two could collide. Called by boot.py, teardown.py and roots.py."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetstream.slurm_plugin.errors import DevclusterError

POLL_INTERVAL_S = 0.05

# Locking a directory that is there anyway leaves no lock file behind.
MACHINE = Path("/run")


@contextmanager
def locked(directory: Path, timeout_s: float, purpose: str) -> Iterator[None]:
    """Hold the lock of `directory`; it goes with the process that holds it.

    Args:
        directory: what to lock; it must exist.
        timeout_s: how long to wait for another holder.
        purpose: for the message.

    Raises:
        DevclusterError: another process held it all the time.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DevclusterError(
                        f"another process has held the lock of {directory} for {timeout_s:g} s ({purpose}): "
                        f"look at `fuser {directory}`"
                    ) from None
                time.sleep(POLL_INTERVAL_S)
        yield
    finally:
        os.close(descriptor)
