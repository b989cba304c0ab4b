"""Which policy divides, and within which limits: what `site policy` changes. Kept in the daemon's store. Pure.

Made by the command line, checked here, used by the registry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from hetstream.base import typed_json
from hetstream.hetjob.ports import RemainingWork
from hetstream.hetjob.site.client import SiteSettings
from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.insight.observation import MIN_INTERVAL_S
from hetstream.slurm_plugin.placement import DEFAULT_LINK_SHARE
from hetstream.slurm_plugin.policy.policies import DEFAULT_POLICY, FLOOR, MACHINE_CPUS_PER_GPU, MoveCost, policy_named
from hetstream.slurm_plugin.policy.table import Floats, JobTable

_Cpus = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an admin has set.

    Attributes:
        policy: by name.
        floor: share of its greatest speed that every job has, as far as the pool goes.
        cpus_per_gpu: of the site's machines, for jobs that have measured nothing.
        user_caps: CPUs of data workers at most, by user; `caps.EVERYBODY` for those that are not named.
        tenant_caps: the same by Slurm account.
        network_gbps: what a node's link carries; 0: not known, and then no budget.
        network_share: of each node's link that data workers of all jobs may use.
    """

    policy: str = DEFAULT_POLICY
    floor: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = FLOOR
    cpus_per_gpu: Annotated[float, msgspec.Meta(gt=0, le=1024)] = MACHINE_CPUS_PER_GPU
    user_caps: dict[str, _Cpus] = {}
    tenant_caps: dict[str, _Cpus] = {}
    network_gbps: Annotated[float, msgspec.Meta(ge=0, le=100_000)] = 0.0
    network_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = DEFAULT_LINK_SHARE

    def check(self) -> None:
        """Refuse the name of no policy.

        Raises:
            PolicyError: there is none of this name.
        """
        policy_named(self.policy)


def decode_settings(text: str | bytes) -> PolicySettings:
    """Read settings.

    Raises:
        PolicyError: they are none, or name no policy.
    """
    try:
        settings = typed_json.decode(text, PolicySettings)
    except msgspec.MsgspecError as error:
        raise PolicyError(f"not the settings of a policy: {error}") from error
    settings.check()
    return settings


# How often jobs report, the cluster is read and the policy asked. Others than the usual are for compressed time.


@dataclass(frozen=True)
class ReportIntervals:
    """The daemon's own times.

    Attributes:
        report_s: interval at which jobs report; longer where all together would exceed `max_reports_per_s`.
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


# How the daemon runs. Made by `hetstream site daemon`.


@dataclass(frozen=True)
class DaemonOptions:
    """How the daemon runs.

    Attributes:
        settings: where it listens.
        state_dir: what it keeps.
        allocating: whether jobs are told limits.
        partitions: whose CPUs are divided; None for those without GPUs.
        interval_s: between two readings of the cluster.
        pace: its other times.
        gpu_reporters: users who tell of the nodes' GPUs and may see all of that, beside root and the daemon's own.
    """

    settings: SiteSettings
    state_dir: Path
    allocating: bool
    partitions: tuple[str, ...] | None
    interval_s: float
    pace: ReportIntervals = field(default_factory=ReportIntervals)
    gpu_reporters: frozenset[int] = frozenset()


# How much work a job is believed to have left: (what it claims, what the daemon has seen) -> seconds. Pure.
#
# A job says itself how much is left, and some policies let those come first that end soon. So a claim counts as far as
# the daemon's own observation bears it out:
#
# * nobody has more left than the time limit lets him do;
# * a claim is a promise: with what the job can have done since its first claim, it says when the job will be over. The
#   earliest such end counts, so claiming again puts nothing off. A job that is still there when it has done all that
#   and a quarter more has at least as much left as it is late: the guess doubles as long as the job stays, and its
#   uncertainty is that of a guess.
#
# All in seconds of work at full speed, so a job that was given few data workers is not late for it. The daemon keeps
# the promises in its state directory with the reports they came with, so its next life holds jobs to them.

# Speeds are measured early, and estimates are wrong by so much without anybody's lying.
SLACK = 1.25
# Of the logarithm of what a late job has left: a job of which only its age is known goes on for as long again.
LATE_SIGMA = 1.0
# A job says itself how fast it is. Slower than this it cannot seem, or its promise would never be due.
LEAST_SPEED = 0.1
# Between two looks; the clock may jump, and the machine may have slept.
_LONGEST_S = 600.0


class Promise(NamedTuple):
    """What one job has promised.

    Attributes:
        done_s: work that it can have done since its first claim, in seconds at full speed.
        due_s: the least sum of that and a claim.
        seen_s: until when `done_s` counts, in seconds since the epoch.
    """

    done_s: float
    due_s: float
    seen_s: float

    @property
    def is_valid(self) -> bool:
        """Whether these can be numbers of ours: what comes from a file may be anything."""
        numbers = all(isinstance(number, float) and math.isfinite(number) for number in self)
        return numbers and self.done_s >= 0 and self.due_s >= 0


class Promises:
    """What jobs have claimed until now.

    Args:
        kept: by job, of an earlier life of the daemon.
    """

    def __init__(self, kept: Mapping[str, Promise] | None = None) -> None:
        self._kept = dict(kept or {})

    def believed(self, table: JobTable, jobs: Sequence[str], speed: Floats, left_s: Floats, now_s: float) -> JobTable:
        """Return the table with what is believed instead of what is claimed; the promises are brought up to date.

        Args:
            table: with what jobs claim.
            jobs: their names, by row.
            speed: of each with what it has, as a share of its greatest.
            left_s: until its time limit, infinite without one.
            now_s: seconds since the epoch.
        """
        first = Promise(0.0, np.inf, now_s)
        kept = np.array([self._kept.get(job, first) for job in jobs], np.float64).reshape(len(jobs), 3)
        done_s, due_s, seen_s = kept.T
        done_s = done_s + np.clip(now_s - seen_s, 0.0, _LONGEST_S) * np.maximum(speed, LEAST_SPEED)
        due_s = np.fmin(due_s, done_s + table.remaining_s)
        has_claimed = np.isfinite(due_s)
        self._kept.update(
            (job, Promise(done, due, now_s))
            for job, done, due, counts in zip(jobs, done_s.tolist(), due_s.tolist(), has_claimed.tolist(), strict=True)
            if counts
        )
        late_s = np.where(has_claimed, np.maximum(done_s - SLACK * due_s, 0.0), 0.0)
        is_late = late_s > np.nan_to_num(table.remaining_s)
        remaining_s = np.minimum(np.where(is_late, late_s, table.remaining_s), left_s)
        sigma = np.where(is_late, np.maximum(table.remaining_sigma, LATE_SIGMA), table.remaining_sigma)
        total_s = np.where(has_claimed, np.fmax(table.total_s, done_s + remaining_s), table.total_s)
        return replace(table, remaining_s=remaining_s, remaining_sigma=sigma, total_s=total_s)

    def of(self, jobs: Iterable[str]) -> dict[str, Promise]:
        """Return what those of these jobs have promised that have claimed anything."""
        return {job: self._kept[job] for job in jobs if job in self._kept}

    def forget(self, job: str) -> None:
        """It has ended."""
        self._kept.pop(job, None)


def claim_s(ideal_steps_per_s: float, remaining: RemainingWork) -> float:
    """Return what a job claims to have left, in seconds at full speed."""
    return remaining.steps / ideal_steps_per_s
