"""Whether data workers deliver to a loader, and when it stops waiting and makes a step itself. No I/O but the log."""

from __future__ import annotations

import logging

from hetstream.mpi_dataworkers.wire.messages import Device

_log = logging.getLogger(__name__)

# With no data worker, or no dispatcher, for this long, the loader makes the step it waits for itself.
LOCAL_AFTER_S = 1.0
DISPATCHER_SILENCE_S = 5.0
# Nor does a step that is merely late hold up the trainer for ever.
LATE_STEP_S = 60.0
_NOBODY: dict[Device, str] = {
    "cpu": "no data worker is there, or none reaches this process",
    "gpu": "no data worker with a GPU is there, or none reaches this process",
}


class Availability:
    """What a loader knows of its data workers.

    Args:
        now: on the monotonic clock.
        device: what data workers make the loader's batches with.

    Attributes:
        num_workers: data worker processes that can reach this loader, as the dispatcher last said.
        is_local: steps are made in process, and the log says so.
    """

    def __init__(self, now: float, device: Device = "cpu") -> None:
        self._nobody = _NOBODY[device]
        self.num_workers = 0
        self.is_local = False
        self._no_workers_since = now

    def set_workers(self, count: int, now: float) -> None:
        """So many data workers are there now."""
        if count == 0 and self.num_workers > 0:
            self._no_workers_since = now
        self.num_workers = count

    def reason_to_work_locally(self, now: float, waiting_since: float, last_heard: float) -> str:
        """Why the step that is waited for is to be made in process; "" to go on waiting.

        Args:
            now: on the monotonic clock.
            waiting_since: when the wait for the step began.
            last_heard: when the dispatcher last said something.
        """
        # Once it works locally it does not wait anew for each step.
        has_waited = self.is_local or now - max(self._no_workers_since, waiting_since) > LOCAL_AFTER_S
        if self.num_workers == 0 and has_waited:
            return self._nobody
        silent_s = now - last_heard
        if silent_s > DISPATCHER_SILENCE_S and has_waited:
            return f"the dispatcher has been silent for {silent_s:.0f} s"
        if now - waiting_since > LATE_STEP_S:
            return f"{self.num_workers} data workers did not deliver it within {LATE_STEP_S:g} s"
        return ""

    def say_local(self, reason: str) -> None:
        """Log, once for each change, that steps are made in process."""
        if not self.is_local:
            _log.warning("hetstream: working locally, because %s", reason)
            self.is_local = True

    def say_streaming(self) -> None:
        """Log, once for each change, that data workers deliver again."""
        if self.is_local:
            _log.warning("hetstream: %d data workers deliver again", self.num_workers)
            self.is_local = False
