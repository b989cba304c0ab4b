"""How much of a GPU's memory each opportunistic job may hold. Pure.

The guaranteed job has no limit. What it had at its peak, and some more, is kept free for it: when it takes more, some
of its tensors are on the host for one mini-batch, the others' limits fall at once, and rise again in steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetstream.slurm_plugin.coordinator.measurements import SharingJob

# Kept free beside the guaranteed job's peak, as a part of the GPU's memory.
_HEADROOM = 0.05
_RAISE = 0.1
# Limits that change all the time would have allocators give back and take again all the time.
_LEAST_RAISE = 0.02


def left_bytes(capacity_bytes: int, peak_bytes: int) -> int:
    """What a guaranteed job with such a peak leaves."""
    return max(0, capacity_bytes - peak_bytes - int(_HEADROOM * capacity_bytes))


def demand_bytes(job: SharingJob, capacity_bytes: int) -> int:
    """What a job would use of the GPU if there were no limit; all of it, as long as it has shown nothing."""
    record = job.statistics
    if record is None or record.boundaries == 0:
        return capacity_bytes
    return min(capacity_bytes, record.peak_bytes + int(_HEADROOM * capacity_bytes))


def kept_bytes(job: SharingJob, capacity_bytes: int) -> int:
    """The limit that a job keeps to, whoever has told it that; nothing, as long as it has not said so."""
    return min(capacity_bytes, job.statistics.limit_bytes) if job.statistics else 0


def divided(available_bytes: int, demands_bytes: Mapping[str, int]) -> dict[str, int]:
    """Equal parts, of which nobody has more than he asks for; what is over goes to the others."""
    limits: dict[str, int] = {}
    left = available_bytes
    for number, name in enumerate(sorted(demands_bytes, key=lambda name: (demands_bytes[name], name))):
        limits[name] = min(demands_bytes[name], left // (len(demands_bytes) - number))
        left -= limits[name]
    return limits


def stepwise(
    capacity_bytes: int, before: Mapping[str, int], wanted: Mapping[str, int], may_rise: bool
) -> dict[str, int]:
    """The way to new limits: down at once, up by a tenth of the GPU at a time, and never by little.

    Args:
        capacity_bytes: of the GPU.
        before: limits as they are; who has none begins with 0.
        wanted: limits as they should be.
        may_rise: whether it is time for a step upwards.
    """
    limits = {}
    for name, want_bytes in wanted.items():
        old_bytes = before.get(name, 0)
        if want_bytes <= old_bytes:
            limits[name] = want_bytes
        elif may_rise and want_bytes - old_bytes >= _LEAST_RAISE * capacity_bytes:
            limits[name] = min(want_bytes, old_bytes + int(_RAISE * capacity_bytes))
        else:
            limits[name] = old_bytes
    return limits


def overdrawn(jobs: Sequence[SharingJob], limits: Mapping[str, int]) -> list[SharingJob]:
    """Jobs that hold more than they may."""
    return [job for job in jobs if job.held_bytes > limits.get(job.name, 0)]
