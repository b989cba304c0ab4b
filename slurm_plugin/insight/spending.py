"""What a cluster costs: (samples, prices) -> cost of what jobs hold, of what is free, of trainers that wait. Pure.

Used by `hetstream report` and `hetstream serve`. Nodes that are out of use cost nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetstream.slurm_plugin.insight.observation import Sample
from hetstream.slurm_plugin.insight.prices import Prices

# A sample says how things were until the next one; not for longer, since nobody looked.
_LONGEST_GAP_S = 3600.0
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Spending:
    """Cost of an hour, or of several.

    Attributes:
        hours: that were looked at.
        held: cost of the GPUs and CPUs that jobs held.
        waited: of that, GPUs whose trainers waited for data, as far as that is known.
        free: of those that no job held.
    """

    hours: float = 0.0
    held: float = 0.0
    waited: float = 0.0
    free: float = 0.0


def hourly(sample: Sample, prices: Prices) -> Spending:
    """Return what an hour costs as things are."""
    return Spending(
        1.0,
        prices.of(sample.gpus_allocated, sample.cpus_allocated),
        prices.of(sample.gpus_starved, 0.0),
        prices.of(sample.gpus - sample.gpus_allocated, sample.cpus - sample.cpus_allocated),
    )


def spent(samples: Sequence[Sample], prices: Prices) -> Spending:
    """Return what the history of a cluster has cost.

    Args:
        samples: the oldest first.
        prices: the same for all of it.
    """
    total = Spending()
    for sample, following in pairwise(samples):
        hours = min(following.taken_s - sample.taken_s, _LONGEST_GAP_S) / _HOUR_S
        rate = hourly(sample, prices)
        total = Spending(
            total.hours + hours,
            total.held + rate.held * hours,
            total.waited + rate.waited * hours,
            total.free + rate.free * hours,
        )
    return total
