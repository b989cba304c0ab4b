"""How long a loader's steps take. Pure; called by `partition.py`."""

from __future__ import annotations

# Rates are looked at after so many steps.
STEPS_OF_A_LOOK = 100


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
