"""Threads that make memory for checkpoints ready beside the program, one after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hetstream.base.errors import HetstreamError

_log = logging.getLogger(__name__)


class Background:
    """Runs functions beside the program, in the order in which they were started.

    A failure is logged and no more: the next save allocates what is missing.
    """

    def __init__(self) -> None:
        self._newest: threading.Thread | None = None

    def start(self, act: Callable[[], None]) -> None:
        """Do something once what was started before is done."""
        self.start_planned(act, lambda: ())

    def start_planned(self, act: Callable[..., None], plan: Callable[[], tuple[int, ...]]) -> None:
        """Plan something at once, and do it once what was started before is done.

        Args:
            act: what to do.
            plan: gives the arguments of `act`.
        """
        former = self._newest
        begin = threading.Event()

        def work() -> None:
            begin.wait()  # `Thread.start` returns once this thread lets go of the GIL, so it does that first
            try:
                arguments = plan()
                if former:
                    former.join()
                act(*arguments)
            except (HetstreamError, OSError) as error:
                _log.warning("there is no memory for checkpoints yet: %s", error)

        self._newest = threading.Thread(target=work, name="checkpoint memory", daemon=True)
        self._newest.start()
        begin.set()

    def wait(self) -> None:
        """Until all of it is done."""
        if self._newest:
            self._newest.join()
