"""How the connection's thread wakes the training thread."""

from __future__ import annotations

import contextlib
import queue


class Notification:
    """Says that something changed. Made of C code alone where the training thread waits: a KeyboardInterrupt inside the
    Python methods of a `threading.Condition` would leave its lock held for ever."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def notify(self) -> None:
        """Something changed."""
        if self._queue.empty():
            self._queue.put(None)

    def wait(self, timeout_s: float) -> None:
        """Return when something has changed since the last wait, or after `timeout_s`."""
        with contextlib.suppress(queue.Empty):
            self._queue.get(timeout=timeout_s)
