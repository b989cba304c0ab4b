"""How long a loader's steps take, and the rates that a cut depends on. Pure; called by `partition.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetstream.mpi_dataworkers.partitioner.cut import OperatorCost, Rates

# Rates are looked at after so many steps.
STEPS_OF_A_LOOK = 100
# Less of a change is no reason to decide again, and less of a wait is no sign that data workers are too slow.
_SHARE_THAT_COUNTS = 0.2
_WAIT_THAT_COUNTS = 0.1
# The wire's rate is never quite the same.
_RATIO_THAT_COUNTS = 1.5


def observed_rates(
    before: Rates, step_and_wait_s: tuple[float, float], num_data_workers: int, moved: Sequence[OperatorCost]
) -> Rates:
    """Rates as they are now, as if nothing were moved.

    Args:
        before: those of the last decision.
        step_and_wait_s: a step's time, and what of it was a wait for data.
        num_data_workers: as there are now.
        moved: what the moved operators take.
    """
    period_s, wait_s = step_and_wait_s
    step_s = max(1e-6, period_s - wait_s) + sum(cost.trainer_s for cost in moved)
    batch_s = before.batch_s
    all_workers_s = period_s * max(1, num_data_workers) - sum(cost.data_worker_s for cost in moved)
    if wait_s > _WAIT_THAT_COUNTS * period_s:
        batch_s = max(0.0, all_workers_s)  # the trainer waits, so they make batches as fast as they can
    else:
        batch_s = min(batch_s, max(0.0, all_workers_s))
    return replace(before, step_s=step_s, batch_s=batch_s, num_data_workers=num_data_workers)


def is_other(rates: Rates, before: Rates) -> bool:
    """Whether rates differ enough to decide again."""
    if rates.num_data_workers != before.num_data_workers:
        return True
    slower, faster = sorted((rates.wire_bytes_per_s, before.wire_bytes_per_s))
    if faster > _RATIO_THAT_COUNTS * slower:
        return True
    pairs = (rates.step_s, before.step_s), (rates.batch_s, before.batch_s)
    return any(abs(now - then) > _SHARE_THAT_COUNTS * max(rates.step_s, before.step_s) for now, then in pairs)


class Pace:
    """How long steps take, from one look at the loader's counters to the next."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_changes = 0
        self._before: tuple[float, float] | None = None

    def begin_again(self) -> None:
        """Count from here: other steps than usual were taken."""
        self.num_steps, self._before = 0, None

    def step_and_wait(self, now: float, wait_s: float) -> tuple[float, float] | None:
        """After each `STEPS_OF_A_LOOK` steps: a step's time, and what of it was a wait for data."""
        self.num_steps += 1
        if self.num_steps % STEPS_OF_A_LOOK:
            return None
        before, self._before = self._before, (now, wait_s)
        if before is None:
            return None
        return (now - before[0]) / STEPS_OF_A_LOOK, (wait_s - before[1]) / STEPS_OF_A_LOOK
