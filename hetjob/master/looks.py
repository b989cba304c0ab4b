"""When to ask Slurm about companions: as seldom as it tells anything new. Pure; the clock is an argument.

The dispatcher says which companions work, and that at once; only what is on its way, in or out, is asked of Slurm. A
thousand jobs that all do so must cost slurmctld next to nothing, most of all when it is slow.
"""

from __future__ import annotations

from collections.abc import Hashable

# Something has just changed: what comes next, comes soon. What has not for long may wait in the queue for days.
_SOONEST_S, _LATEST_S = 2.0, 600.0
# The next look is due when this share of the time since the last change has passed again.
_SHARE = 0.5


class Looks:
    """Remembers when Slurm was asked, also in vain, and what had changed by then."""

    def __init__(self) -> None:
        self._state: Hashable = None
        self._changed_s = float("-inf")
        self._asked_s = float("-inf")

    @property
    def changed_s(self) -> float:
        """When something had last changed, or a little later."""
        return self._changed_s

    def is_due(self, state: Hashable, is_settled: bool, now: float) -> bool:
        """Whether to ask now; the caller then does.

        Args:
            state: what is known of the companions; compared with that of the last call.
            is_settled: all of them work, or there are none.
            now: seconds, never going back.
        """
        if state != self._state:
            self._state, self._changed_s = state, now
        never = self._asked_s == float("-inf")
        interval_s = min(_LATEST_S, max(_SOONEST_S, _SHARE * (now - self._changed_s)))
        if not never and (is_settled or now - self._asked_s < interval_s):
            return False
        self._asked_s = now
        return True
