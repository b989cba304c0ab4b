"""What becomes of a step that a data worker could not make: tried again, made without a sample, or given up. Pure.

Used by the dispatcher, and by a loader that makes a step itself, with one `StepFailures` for each step that failed. A
step is tried `max_attempts` times, and where there are others until it failed on another host, too: the fault may be
that of a data worker (a mount that is missing there) and not of the data. Then the loader's policy decides. Leaving a
sample out begins a new count, and a step has so many samples, so nothing is tried for ever.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy, Failure


class OnFailure(enum.Enum):
    """What to do with the step."""

    TRY_AGAIN = "tried again"
    LEAVE_OUT = "made without it"
    RAISE = "raised in the trainer"


@dataclass
class StepFailures:
    """The failures of one step.

    Attributes:
        attempts: how often it failed since something was left out, or since it was made.
        workers, hosts: the data workers that failed it since then, by peer id, and their hosts.
        failed_by_sound: one of them had just made other steps of the pipeline.
        left_out: what is left out of it, with what it did: samples in the order in which they failed, or, with index
            -1, all that is left.
        last_token: leases up to this token knew nothing of what was left out last.
    """

    attempts: int = 0
    workers: set[str] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    failed_by_sound: bool = False
    left_out: list[Failure] = field(default_factory=list)
    last_token: int = -1

    def note(
        self,
        worker: str,
        failure: Failure,
        policy: ErrorPolicy,
        host: str = "",
        is_sound: bool = False,
        able: Mapping[str, str] | None = None,
    ) -> OnFailure:
        """Count one more failure, and decide.

        Args:
            worker: peer id of the data worker that failed.
            failure: what it did.
            policy: the loader's.
            host: of the data worker.
            is_sound: it had made other steps of the pipeline since it last failed one.
            able: hosts of the data workers that could try the step, by peer id.
        """
        self.attempts += 1
        self.workers.add(worker)
        self.hosts.add(host)
        self.failed_by_sound |= is_sound
        if self.attempts < policy.max_attempts or self._must_fail_elsewhere(failure, able or {}):
            return OnFailure.TRY_AGAIN
        self.settle()
        known = {left_out.sample_index for left_out in self.left_out}
        if policy.on_error == "raise" or failure.is_final or -1 in known:
            return OnFailure.RAISE
        # A sample that is left out and yet at fault: nobody knows which one it is.
        self.left_out.append(
            msgspec.structs.replace(failure, sample_index=-1) if failure.sample_index in known else failure
        )
        return OnFailure.LEAVE_OUT

    def settle(self) -> None:
        """Begin a new count: the step was made, or what becomes of it is decided."""
        self.attempts = 0
        self.workers.clear()
        self.hosts.clear()
        self.failed_by_sound = False

    def _must_fail_elsewhere(self, failure: Failure, able: Mapping[str, str]) -> bool:
        untried = {worker: host for worker, host in able.items() if worker not in self.workers}
        if failure.is_final:  # nothing is wrong with the data where another can use the pipeline
            return bool(untried)
        if set(untried.values()) - self.hosts:
            return len(self.hosts) < 2 or not self.failed_by_sound
        return bool(untried) and len(self.workers) < 2
