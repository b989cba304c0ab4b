"""What becomes of a step that a data worker could not make: tried again, made without a sample, or given up. Pure.

Used by the dispatcher, and by a loader that makes a step itself, with one `StepFailures` for each step that failed. A
step is tried on another data worker where there is one, at most `max_attempts` times; then the loader's policy decides.
Leaving a sample out begins a new count, and a step has so many samples, so nothing is tried for ever.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from mpi_dataworkers.messages import ErrorPolicy, Failure


class Verdict(enum.Enum):
    """What to do with the step."""

    TRY_AGAIN = "tried again"
    LEAVE_OUT = "made without it"
    RAISE = "raised in the trainer"


@dataclass
class StepFailures:
    """The failures of one step.

    Attributes:
        attempts: how often it failed since something was left out.
        workers: peer ids of the data workers that failed it since then.
        left_out: what is left out of it, with what it did: samples in the order in which they failed, or, with index
            -1, all that is left.
        last_token: leases up to this token knew nothing of what was left out last.
    """

    attempts: int = 0
    workers: set[str] = field(default_factory=set)
    left_out: list[Failure] = field(default_factory=list)
    last_token: int = -1

    def note(self, worker: str, failure: Failure, policy: ErrorPolicy) -> Verdict:
        """Count one more failure, and decide."""
        self.attempts += 1
        self.workers.add(worker)
        if self.attempts < policy.max_attempts:
            return Verdict.TRY_AGAIN
        known = {one.sample_index for one in self.left_out}
        if policy.on_error == "raise" or failure.is_final or -1 in known:
            return Verdict.RAISE
        # A sample that is left out and yet at fault: nobody knows which one it is.
        self.left_out.append(
            msgspec.structs.replace(failure, sample_index=-1) if failure.sample_index in known else failure
        )
        self.attempts = 0
        self.workers.clear()
        return Verdict.LEAVE_OUT
