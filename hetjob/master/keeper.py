"""Starts the job master, and starts it again when something kills it. The first process of its step; does nothing else.

A job master that is started again finds the dispatcher's journal and its companions, so the training sees a pause. When
the keeper itself is killed, the job master ends in order, and the whole service with it.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence

from hetstream.base.signals import is_of_step
from hetstream.hetjob.master.state import FIRST_DELAY_S, LONGEST_DELAY_S, STEADY_AFTER_S
from hetstream.hetjob.processes import next_signal, signals_held, start_child

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# With an exit code so soon after its start it has said what is wrong: the same would happen again.
_EARLY_S = 10.0


def keep(command: Sequence[str], is_running: Callable[[], bool] = lambda: False) -> int:
    """Run a command until it ends by itself or a signal asks for the end, which it gets too.

    Args:
        command: of the job master.
        is_running: whether the job runs, and Slurm is not ending it; asked when Slurm sends a signal. Then that was a
            warning to the job's programs (`sbatch --signal`, the grace of a preemption).

    Returns:
        Its exit code; 0 if it was asked to end.
    """
    failures = 0

    def is_told_to_stop(timeout_s: float) -> bool:
        received = next_signal(_STOP_SIGNALS, timeout_s)
        if received is None:
            return False
        if is_of_step(received) and is_running():
            log.info("signal %d came to all steps while the job runs: the job master goes on", received.si_signo)
            return False
        return True

    with signals_held(_STOP_SIGNALS, and_all_others=True):
        while True:
            began = time.monotonic()
            child = start_child(command, is_told_twice=True)
            stopping = False
            while (returncode := child.poll()) is None:
                if is_told_to_stop(STEADY_AFTER_S):
                    stopping = True
                    child.terminate()
            lived_s = time.monotonic() - began
            if stopping or returncode == 0 or (returncode > 0 and lived_s < _EARLY_S):
                return 0 if stopping else returncode
            failures = 0 if lived_s >= STEADY_AFTER_S else failures
            delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**failures)
            failures += 1
            log.error("the job master ended with %d: starting it again in %g s", returncode, delay_s)
            if is_told_to_stop(delay_s):
                return 0
