"""What a loader counts: `stats()` shows it, the dispatcher is told it."""

from __future__ import annotations

import time

import msgspec

from hetstream.mpi_dataworkers.rates import RecentRates, step_time_s
from hetstream.mpi_dataworkers.wire.messages import FeatureCut, LoaderStats


class LoaderStatistics:
    """Counters since the loader was made, and rates over the last seconds. One thread counts, any may read.

    Attributes:
        features: where the loader's feature graph is cut; None without one.
    """

    def __init__(self) -> None:
        self.features: FeatureCut | None = None
        # The counters, without the time of the iteration that is open, which is counted at its end; when that began,
        # and when its last step was taken.
        self._state: tuple[LoaderStats, float | None, float] = LoaderStats(), None, 0.0
        self._recent = RecentRates(time.monotonic(), 0, 0, 0)

    @property
    def counters(self) -> LoaderStats:
        """Their values; `elapsed_s` without the iteration that is open."""
        return self._state[0]

    def count(self, changes: dict[str, float], duplicates_dropped: int) -> None:
        """Add to the counters; `duplicates_dropped` is a total."""
        counters, began, last_step_at = self._state
        totals: dict[str, float] = {"duplicates_dropped": duplicates_dropped}
        for name, change in changes.items():
            totals[name] = getattr(counters, name) + change
        counters = msgspec.structs.replace(counters, **totals)
        if "steps" in changes:
            last_step_at = time.monotonic()
            if began is None:
                began = last_step_at - changes.get("wait_s", 0.0)
            self._recent.note(last_step_at, counters.steps, counters.bytes, counters.wait_s)
        elif "elapsed_s" in changes:
            began = None
        self._state = counters, began, last_step_at

    def now(self) -> LoaderStats:
        """The counters, with the iteration that is open: it may be the only one, and take weeks."""
        counters, began, _ = self._state
        return _with_open(counters, began, time.monotonic())

    def at_last_step(self) -> LoaderStats:
        """The same when the last step was taken: of the wait that goes on, `wait_s` has nothing yet."""
        return _with_open(*self._state)

    def rates(self) -> dict[str, float]:
        """Steps and bytes per second, the training loop's share of waiting and own time for a step lately."""
        counters = self.counters
        steps, num_bytes, waited = self._recent.per_s(time.monotonic(), counters.steps, counters.bytes, counters.wait_s)
        rates = {"steps_per_s": steps, "bytes_per_s": num_bytes, "recent_wait_share": min(1.0, waited)}
        return rates | {"step_s": step_time_s(steps, waited)}


def _with_open(counters: LoaderStats, began: float | None, until: float) -> LoaderStats:
    open_s = 0.0 if began is None else until - began
    return msgspec.structs.replace(counters, elapsed_s=counters.elapsed_s + open_s)
