"""How often jobs report, the cluster is read and the policy asked. Others than the usual are for compressed time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetstream.slurm_plugin.insight.monitor import MIN_INTERVAL_S
from hetstream.slurm_plugin.policy.steadiness import MoveCost


@dataclass(frozen=True)
class Pace:
    """The daemon's own times.

    Attributes:
        report_s: jobs report this often, or less if there are so many that it would be more than `max_reports_per_s`.
        max_reports_per_s: of all jobs together.
        round_s: between two rounds of the policy at least.
        unknown_s: after which a job reports again that Slurm did not know when it was last read.
        least_interval_s: between two readings of the cluster at least.
        move: what a change of a job's data workers costs.
    """

    report_s: float = 10.0
    max_reports_per_s: float = 50.0
    round_s: float = 1.0
    unknown_s: float = 5.0
    least_interval_s: float = MIN_INTERVAL_S
    move: MoveCost = field(default_factory=MoveCost)
