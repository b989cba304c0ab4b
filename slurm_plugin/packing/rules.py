"""The numbers by which the packer decides, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackingRules:
    """When a GPU takes an opportunistic job, and when one is taken away.

    Attributes:
        most_used: a GPU that is in use for this share of ten seconds, or more, takes nobody (AntMan's 80 %).
        oldest_s: an older reading counts as none. Nodes report every 5 s.
        most_jobs: opportunistic jobs of one GPU: what is left of it, divided by more, is hardly worth the memory.
        settle_s: a GPU that has just got a job gets no other before its use can be seen.
        most_paused_s: a job that was paused for so long would do better elsewhere.
        most_placements: in one call, so that commands to Slurm stay few; who is left comes next time.
        first_delay_s, longest_delay_s: how long an evicted job waits: twice as long each time. The GPU that it was on
            waits for the first of them. Slurm itself starts no job within two minutes after it was requeued.
        least_limit_s: Slurm may start a job with so short a time limit, so that it does not wait for others' planned
            starts. The packer gives it its own back when it runs, and may be away for so long before.
        start_s: a job that has not started so long after it was placed is taken back.
        keep_s: a placeholder that has not started so long after it was submitted finds no room.
        upgrade_s: nodes that do not call a job guaranteed so long after they were told to are told again.
        most_upgrade_trials: then that job stays what it is for a while.
        refused_s: so long, as one does that Slurm refused to place or to upgrade.
        busy_s: and so long where nothing was decided: 26.05 takes no other partition of a job that is new, at times
            for longer than the client tries.
    """

    most_used: float = 0.8
    oldest_s: float = 30.0
    most_jobs: int = 2
    settle_s: float = 20.0
    most_paused_s: float = 300.0
    most_placements: int = 50
    first_delay_s: float = 120.0
    longest_delay_s: float = 3600.0
    least_limit_s: float = 600.0
    start_s: float = 90.0
    keep_s: float = 20.0
    upgrade_s: float = 60.0  # longer than a reading counts
    most_upgrade_trials: int = 3
    refused_s: float = 300.0
    busy_s: float = 30.0

    def delay_s(self, num_evictions: int) -> float:
        """How long to wait after so many evictions."""
        doublings = min(num_evictions - 1, 20)  # no longer than the longest, and no overflow
        return min(self.longest_delay_s, self.first_delay_s * 2**doublings) if num_evictions > 0 else 0.0
