"""Job-level tuning as in GoldMiner (SIGMOD'23, 3.4.1): how large a data worker is, and whether any pays. Pure.

Called by `controller.py`. Local loading is measured first; then a data worker of 1 CPU, of 2, of 4, as long as the
speed grows with the CPUs; then the number (`policy.py`); then what the trainer's own CPUs are still needed for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetstream.hetjob.elastic.snapshot import Snapshot

# Twice the CPUs must bring this share of twice the speed to be worth it: below it two small ones are better.
LINEAR_SHARE = 0.8
# More data workers must bring this share of what their number promises.
MARGINAL_SHARE = 0.2
# Over local loading, data workers must bring at least so much: they cost CPUs that others could have.
LEAST_GAIN = 0.05
# What a trainer gets over what it was seen to use, so that a peak costs no GPU time.
_TRAINER_HEADROOM = 1.25


@dataclass(frozen=True, slots=True)
class LocalLoading:
    """What a job's own loading costs.

    Attributes:
        wait_s: time that the training loop waited for a step which it made itself; of several ranks, by their number.
    """

    wait_s: float

    @classmethod
    def seen(cls, steps_per_s: float, wait_share: float) -> LocalLoading | None:
        """From the rates without data workers; None if no step was made."""
        return cls(wait_share / steps_per_s) if steps_per_s > 0 else None

    def steps_per_s(self, now: Snapshot) -> float:
        """How fast the trainer of now, which may have become slower or faster, would be with local loading."""
        busy_s = (1 - now.wait_share) / now.steps_per_s if now.steps_per_s > 0 else math.inf
        return 1 / (busy_s + self.wait_s) if busy_s + self.wait_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class SizeProgress:
    """How far the search for a data worker's size is.

    Attributes:
        best: the size so far.
        best_rate_per_s: steps that one of this size makes per second; 0 while that was not measured.
        probing: the size that is to be measured next; None when the search is over.
    """

    best: int
    best_rate_per_s: float
    probing: int | None


class SizeSearch:
    """Finds the CPUs of one data worker.

    Args:
        smallest, largest: of them.
        progress: of a search that goes on.

    Attributes:
        progress: how far it is.
    """

    def __init__(self, smallest: int, largest: int, progress: SizeProgress | None = None) -> None:
        self._largest = largest
        self.progress = progress or SizeProgress(smallest, 0.0, smallest if smallest < largest else None)

    @property
    def best(self) -> int:
        return self.progress.best

    @property
    def probing(self) -> int | None:
        return self.progress.probing

    def measured(self, rate_per_s: float) -> str:
        """Take in the rate of one data worker of the size `probing`; returns what follows from it, in words.

        Raises:
            ValueError: the search is over.
        """
        if self.probing is None:
            raise ValueError("the search for a data worker's size is over")
        best, best_rate_per_s = self.best, self.progress.best_rate_per_s
        size, ratio = self.probing, self.probing / best
        gain = rate_per_s / best_rate_per_s if best_rate_per_s > 0 else ratio
        made = f"{size} CPU(s) make {rate_per_s:.1f} steps/s"
        if size != best:
            made += f", {gain:.1f} times what {best} make"
        if gain < LINEAR_SHARE * ratio:
            self.stop()
            return f"{made}: {best} it is"
        self.progress = SizeProgress(size, rate_per_s, min(2 * size, self._largest) if size < self._largest else None)
        return f"{made}: next {self.probing} are tried" if self.probing else f"{made}: {size} it is"

    def stop(self) -> None:
        """Be content with the best so far."""
        self.progress = replace(self.progress, probing=None)


def growth_paid(before_per_s: float, after_per_s: float, num_before: int, num_after: int) -> bool:
    """Whether more data workers can make more steps, by enough of what their number promised.

    Args:
        before_per_s, after_per_s: what all of them can make; not what was taken, which the trainer's load changes too.
        num_before, num_after: how many there were and are.
    """
    return after_per_s >= before_per_s * (1 + MARGINAL_SHARE * (num_after / max(num_before, 1) - 1))


def remote_pays(local_per_s: float, remote_per_s: float) -> bool:
    """Whether data workers are worth having at all."""
    return remote_per_s > local_per_s * (1 + LEAST_GAIN)


def trainer_cpus_needed(used: float) -> int:
    """CPUs that keep the speed of a trainer that was seen to use so many."""
    return max(1, math.ceil(used * _TRAINER_HEADROOM))
