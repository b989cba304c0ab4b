"""When a job has read each sample of its training data once: (moments of its loaders) -> seconds that are left. Pure.

Until then memory grows by what keeps samples, such as a dataset that caches them; afterwards growth has another cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetstream.mpi_dataworkers.wire.messages import LoaderStatus

# A loader that is no further than this in an epoch when it is first seen has begun it.
_BEGUN_SHARE = 0.02


class FirstPass:
    """Counts the steps of all ranks together, from when it is made.

    Whoever begins in the middle of an epoch has read each sample when the next one is over. The first loader of the
    program counts; a program that makes one for each epoch goes on counting.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], int] | None = None
        self._num_taken = 0
        self._needed: int | None = None
        self._begun = (0.0, 0)

    def left_s(self, loaders: Sequence[LoaderStatus], now: float) -> float | None:
        """Until each sample was read once, as fast as up to now; 0 from then on.

        Args:
            loaders: as the dispatcher knows them.
            now: on any clock that does not go back.

        Returns:
            None while the length of an epoch is not known, or no step was taken.
        """
        self._count(loaders)
        if self._needed is None:
            first = min((row.ordinal for row in loaders if row.epoch >= 0), default=None)
            rows = [row for row in loaders if row.ordinal == first and row.epoch >= 0]
            if not rows or min(row.num_steps for row in rows) <= 0:
                return None
            left = sum(max(0, row.num_steps - row.step) for row in rows)
            if any(row.step > _BEGUN_SHARE * row.num_steps for row in rows):
                left += sum(row.num_steps for row in rows)
            self._needed, self._begun = self._num_taken + left, (now, self._num_taken)
        if self._num_taken >= self._needed:
            return 0.0
        passed_s, taken = now - self._begun[0], self._num_taken - self._begun[1]
        return (self._needed - self._num_taken) * passed_s / taken if passed_s > 0 and taken > 0 else None

    def _count(self, loaders: Sequence[LoaderStatus]) -> None:
        known = self._steps
        self._steps = {**(known or {}), **{(row.ordinal, row.rank): row.totals.steps for row in loaders}}
        if known is not None:
            self._num_taken += sum(max(0, steps - known.get(key, 0)) for key, steps in self._steps.items())
