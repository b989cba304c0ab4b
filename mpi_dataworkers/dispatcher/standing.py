"""How a data worker does with a pipeline: whether it makes its steps, or fails what others can make. Pure.

Used by `retries.py`. A data worker on a host where something is missing fails in an instant, and would get lease after
lease. So one that fails what others then make, or cannot load a pipeline, gets no leases of it for a time that grows.
"""

from __future__ import annotations

from dataclasses import dataclass

# The first pause, and the longest; each is twice as long as the one before.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
# Failures of this many steps that others made, with no step made in between: it is no accident.
_FAILURES_IN_A_ROW = 2


@dataclass
class Standing:
    """How one data worker does with one pipeline.

    Attributes:
        is_sound: it has made a step since it last failed one.
        cannot_load: the last thing it said is that the pipeline cannot be used there.
        blamed: steps that it failed and another one made, since it made one itself.
        pauses: how often it was paused since then.
        paused_until: it gets no leases before, s.
    """

    is_sound: bool = False
    cannot_load: bool = False
    blamed: int = 0
    pauses: int = 0
    paused_until: float = 0.0

    def made_step(self) -> None:
        """It made a step: all is forgiven."""
        self.is_sound, self.cannot_load, self.blamed, self.pauses, self.paused_until = True, False, 0, 0, 0.0

    def failed_step(self, is_final: bool, now: float) -> float:
        """It failed a step, with `is_final` because it cannot use the pipeline.

        Returns:
            For how long it is paused now, s; 0 when it is not, or was already.
        """
        self.is_sound = False
        self.cannot_load = is_final
        return self._pause(now) if is_final else 0.0

    def made_by_another(self, now: float) -> float:
        """Another one made what it failed; returns as `failed_step`."""
        self.blamed += 1
        return self._pause(now) if self.blamed >= _FAILURES_IN_A_ROW else 0.0

    def _pause(self, now: float) -> float:
        if now < self.paused_until:
            return 0.0
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.pauses, 16))
        self.pauses += 1
        self.paused_until = now + pause_s
        return pause_s
