"""When a job's time limit will end it, and when to say so: early enough that the newest state gets to disk.

Called by the checkpoint writers of a job, each in a thread. Slurm's own warning, `sbatch --signal`, does not reach
trainers: with `B:` the batch shell alone gets it, and holds it back until its `srun` has ended; without, every process
of every step gets it, and those that do not expect it end of it. The time limit can be asked for, and may be raised
meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime

from hetstream.hetjob.errors import SlurmCommandError

log = logging.getLogger(__name__)

# For the step that a trainer is at, its save, and the commit. `KillWait`, 30 s as a rule, comes on top.
_MARGIN_S = 60.0
# How often the lead is reckoned anew, and how soon a Slurm that does not answer is asked again.
_LOOK_S = 30.0


def lead_s(persist_s: Iterable[float], left_s: float) -> float:
    """How long before its end a job is to be warned.

    Args:
        persist_s: how long each store of this host takes to disk; they go one after the other.
        left_s: how long the job had from its start, or from when it was first asked.

    Returns:
        The time of two rounds, as one may have just begun, and a margin; at most half of the job.
    """
    return min(_MARGIN_S + 2 * sum(persist_s), left_s / 2)


class JobEnd:
    """Watches the end of a job. `reason` says why to stop, once it is time.

    Args:
        job_id: for messages.
        ask: when Slurm will end the job, in seconds since 1970; None if it does not say.
        persist_s: how long each store of this host takes to disk.
        clock: seconds since 1970.
        wait: sleeps so many seconds; true if it was told to end meanwhile.
    """

    def __init__(
        self,
        job_id: str,
        ask: Callable[[], float | None],
        persist_s: Callable[[], Iterable[float]],
        *,
        clock: Callable[[], float] = time.time,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._job_id = job_id
        self._ask = ask
        self._persist_s = persist_s
        self._clock = clock
        self._ended = threading.Event()
        self._wait = wait or self._ended.wait
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why trainers are to stop; "" as long as there is time."""
        return self._reason

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def watch(self) -> None:
        """Return when it is time, when Slurm says that there is no end, or after `end`."""
        end_s = self._end_s()
        if end_s is None:
            return
        left_s = end_s - self._clock()
        while True:
            early_s = lead_s(self._persist_s(), left_s)
            wait_s = end_s - early_s - self._clock()
            if wait_s > 0:
                if self._wait(min(wait_s, _LOOK_S)):
                    return
                continue
            latest_s = self._end_s()
            if latest_s is None:
                return
            if latest_s <= end_s:
                break
            log.info("job=%s may run until %s now", self._job_id, _time_words(latest_s))
            end_s = latest_s
        self._reason = f"job {self._job_id} ends at {_time_words(end_s)}, its time limit"
        log.info("%s: trainers are asked to save and to end, %.0f s before", self._reason, early_s)

    def _end_s(self) -> float | None:
        """What Slurm says; None if it says none, or after `end`."""
        while True:
            try:
                return self._ask()
            except SlurmCommandError as error:
                log.warning("job=%s: when it ends is not known: %s", self._job_id, error)
                if self._wait(_LOOK_S):
                    return None


def _time_words(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%H:%M:%S")
