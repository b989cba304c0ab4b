"""Work with the memory of checkpoints beside the program: what is begun later waits for what was begun before."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hetstream.base.errors import HetstreamError

_log = logging.getLogger(__name__)


class Background:
    """One thread after the other. A failure is logged: without memory prepared, the next save allocates it."""

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
            begin.wait()  # Python would have the caller wait until this thread lets go of the GIL
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
