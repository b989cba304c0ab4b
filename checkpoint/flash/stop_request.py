"""Signals that ask the program to stop: one is noted, the program's own handler still runs, and the program goes on.

Called by `stopping.py`. A program that looks whether it is asked to stop ends in its own time. One that never looks
dies of SIGTERM, as it would without a checkpointer.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_log = logging.getLogger(__name__)

# Slurm, torchrun and a wrapper may each pass the same request on: what comes within this time is one.
REPEAT_S = 10.0


class StopRequest:
    """Whether a signal has asked the process to stop. Listens from `install` to `remove`.

    Args:
        signals: those that ask; for example SIGTERM, and what `sbatch --signal` sends.
        before_death: called when SIGTERM is about to end the process.
        clock: seconds, as `time.monotonic` counts them.

    Attributes:
        pid: of the process that is asked; its children have the handler too.
        previous: the handlers that were there before, by signal.
        is_removed: `remove` has been called.
    """

    def __init__(
        self, signals: Iterable[int], before_death: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._signals = tuple(signals)
        self._before_death = before_death
        self._clock = clock
        self.previous: dict[int, Any] = {}
        self.pid = os.getpid()
        self._is_watched = False
        self.is_removed = False
        self._received: list[int] = []
        self._asked_s = -math.inf

    def install(self) -> None:
        """Begin to listen. Python lets only the main thread do so: in others nothing happens, and the log says so."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "signals are not watched for: only the main thread can, and the checkpointer was made in another"
            )
            return
        for number in self._signals:
            self.previous[number] = _in_use(number, signal.signal(number, self._handle))

    def note_asked(self) -> None:
        """The program has been asked to end, in whatever way: a SIGTERM that follows soon is the same request."""
        if self._asked_s == -math.inf:
            self._asked_s = self._clock()

    def remove(self) -> None:
        """Give the signals back.

        Our handler stays, and hands on what comes, where the program has set handlers of its own meanwhile, and in
        another thread than the main one. It also stays in a program that was just asked to end: the same request may
        come once more, and must not end what is ending in order.
        """
        self.is_removed = True
        if self._is_asked_just_now():
            return
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self.previous.items():
            if signal.getsignal(number) == self._handle:
                # None: a handler that was not set from Python, and cannot be set again from it.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    @property
    def reason(self) -> str:
        """Which signal came first; "" if none has."""
        return f"{signal.Signals(self._received[0]).name} came" if self._received else ""

    def note_watched(self) -> None:
        """The program looks, and will end in its own time: SIGTERM does not end it, unless it comes again later."""
        self._is_watched = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self.previous.get(number)
        is_own = os.getpid() == self.pid
        if number not in self._received and not self.is_removed:
            self._received.append(number)
            self._asked_s = self._clock()
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_IGN:
            return
        elif number == signal.SIGTERM and not (is_own and self._is_asked_just_now()):
            # The program never looks, or the signal came again after REPEAT_S, or this is a child of the program.
            if is_own:
                self._before_death()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _is_asked_just_now(self) -> bool:
        return self._is_watched and self._clock() < self._asked_s + REPEAT_S


def _in_use(number: int, handler: Any) -> Any:
    """The handler that is in use: in place of one that `remove` has left installed, the one that it hands on to."""
    owner = getattr(handler, "__self__", None)
    while isinstance(owner, StopRequest) and owner.is_removed:
        handler = owner.previous.get(number)
        owner = getattr(handler, "__self__", None)
    return handler
