"""Starts the job master, and starts it again when something kills it. The first process of its step; does nothing else.

A job master that is started again finds the dispatcher's journal and its companions, so the training sees a pause. When
the keeper itself is killed, the job master ends in order, and the whole service with it.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence

from hetstream.hetjob.master.state import FIRST_DELAY_S, LONGEST_DELAY_S, STEADY_AFTER_S
from hetstream.hetjob.processes import next_signal, signals_held, start_child

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# With an exit code so soon after its start it has said what is wrong: the same would happen again.
_EARLY_S = 10.0


def keep(command: Sequence[str]) -> int:
    """Run a command until it ends by itself or a signal asks for the end, which it gets too.

    Returns:
        Its exit code; 0 if it was asked to end.
    """
    failures = 0
    with signals_held(_STOP_SIGNALS):
        while True:
            began = time.monotonic()
            child = start_child(command)
            stopping = False
            while (returncode := child.poll()) is None:
                if next_signal(_STOP_SIGNALS, STEADY_AFTER_S) is not None:
                    stopping = True
                    child.terminate()
            lived_s = time.monotonic() - began
            if stopping or returncode == 0 or (returncode > 0 and lived_s < _EARLY_S):
                return 0 if stopping else returncode
            failures = 0 if lived_s >= STEADY_AFTER_S else failures
            delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**failures)
            failures += 1
            log.error("the job master ended with %d: starting it again in %g s", returncode, delay_s)
            if next_signal(_STOP_SIGNALS, delay_s) is not None:
                return 0
