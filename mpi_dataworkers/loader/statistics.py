"""What a loader counts: `stats()` shows it, the dispatcher is told it."""

from __future__ import annotations

import time

import msgspec

from hetstream.mpi_dataworkers.rates import RecentRates, step_time_s
from hetstream.mpi_dataworkers.wire.messages import LoaderStats


class LoaderStatistics:
    """Counters since the loader was made, and rates over the last seconds.

    Attributes:
        counters: their values; `elapsed_s` without the iteration that is open.
    """

    def __init__(self) -> None:
        self.counters = LoaderStats()
        self._recent = RecentRates(time.monotonic(), 0, 0, 0)
        # When the iteration that is open began; its time is counted at its end.
        self._began: float | None = None

    def count(self, changes: dict[str, float], duplicates_dropped: int) -> None:
        """Add to the counters; `duplicates_dropped` is a total."""
        fields = {name: getattr(self.counters, name) + value for name, value in changes.items()}
        fields["duplicates_dropped"] = duplicates_dropped
        self.counters = msgspec.structs.replace(self.counters, **fields)
        if "steps" in changes:
            now = time.monotonic()
            if self._began is None:
                self._began = now - changes.get("wait_s", 0.0)
            self._recent.note(now, self.counters.steps, self.counters.bytes, self.counters.wait_s)
        elif "elapsed_s" in changes:
            self._began = None

    def now(self) -> LoaderStats:
        """The counters, with the iteration that is open: it may be the only one, and take weeks."""
        return msgspec.structs.replace(self.counters, elapsed_s=self.elapsed_s())

    def elapsed_s(self) -> float:
        """Time inside iterations, with the one that is open."""
        open_s = 0.0 if self._began is None else time.monotonic() - self._began
        return self.counters.elapsed_s + open_s

    def rates(self) -> dict[str, float]:
        """Steps and bytes per second, the training loop's share of waiting and own time for a step lately."""
        counters = self.counters
        steps, num_bytes, waited = self._recent.per_s(time.monotonic(), counters.steps, counters.bytes, counters.wait_s)
        rates = {"steps_per_s": steps, "bytes_per_s": num_bytes, "recent_wait_share": min(1.0, waited)}
        return rates | {"step_s": step_time_s(steps, waited)}
