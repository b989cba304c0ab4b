"""How much work a job has left, by the best that says so: (what is known, loaders) -> `RemainingWork`. Pure.

In this order, each with its own uncertainty:

1. `directive`: steps in all, as the script says (`--total-steps`), less those that were taken;
2. `loader`: epochs in all, as the script says (`--total-epochs`), by the length of an epoch, which the loader knows;
3. `integration`: what Lightning or the Hugging Face Trainer plans, as its callback tells;
4. `history`: the share of their time limit that similar jobs used, of this job's time limit;
5. `time_limit`: half of what is left of it.

The site daemon takes none of these at its word (`slurm_plugin/daemon/claimed_work.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetstream.hetjob.site.measured import MOST, RemainingSource, RemainingWork
from hetstream.mpi_dataworkers.wire.messages import LoaderStatus

# Of the logarithm of what is left. The number of a user is exact; an epoch may be cut short, and the loader of another
# phase may come; a framework's number is the most, and early stopping ends before it.
_DIRECTIVE_SIGMA, _EPOCHS_SIGMA, _INTEGRATION_SIGMA = 0.0, 0.1, 0.2
# Of a time limit nobody knows how much is used: half of it, give or take a factor of four.
_LIMIT_SHARE, _LIMIT_SIGMA = 0.5, 1.4


@dataclass(frozen=True)
class UsualLength:
    """How long similar jobs ran.

    Attributes:
        limit_share: of their time limit, as the median.
        sigma: of its logarithm.
        num_jobs: how many jobs that rests on.
    """

    limit_share: float
    sigma: float
    num_jobs: int

    def __post_init__(self) -> None:
        if not (0 < self.limit_share <= 1 and 0 <= self.sigma <= 10):
            raise ValueError(f"{self}: 0 < limit_share <= 1, 0 <= sigma <= 10")


def nothing_usual() -> UsualLength | None:
    """Where nobody remembers similar jobs."""
    return None


@dataclass(frozen=True)
class Work:
    """What is known of the work before it begins.

    Attributes:
        total_steps: of the training loop, by the directive; None where not given.
        total_epochs: the same in epochs.
        end_s: when Slurm ends the job, in seconds since the epoch; None where not known.
        start_s: when Slurm started it; None where not known.
        usual_length: says how long similar jobs ran; asked only where nothing better is known.
    """

    total_steps: int | None = None
    total_epochs: int | None = None
    end_s: float | None = None
    start_s: float | None = None
    usual_length: Callable[[], UsualLength | None] = nothing_usual


def remaining(work: Work, loaders: Sequence[LoaderStatus], ideal: float, time_s: float) -> RemainingWork | None:
    """How many steps of all ranks together are left, by the best that says so; None where nothing does.

    Args:
        work: what is known of it.
        loaders: as the dispatcher knows them; the first of the program is the one that counts.
        ideal: steps a second of a trainer that never waits.
        time_s: seconds since the epoch.
    """
    first = min((row.ordinal for row in loaders if row.epoch >= 0), default=None)
    rows = [row for row in loaders if row.ordinal == first and row.epoch >= 0]
    lengths = [row.num_steps for row in rows]
    knows_length = bool(rows) and min(lengths) > 0
    if work.total_steps is not None and rows:
        done = [row.epoch * row.num_steps + row.step if knows_length else row.totals.steps for row in rows]
        return _counted(work.total_steps * len(rows), sum(done), _DIRECTIVE_SIGMA, "directive")
    if work.total_epochs is not None and knows_length:
        done_steps = sum(row.epoch * row.num_steps + row.step for row in rows)
        return _counted(work.total_epochs * sum(lengths), done_steps, _EPOCHS_SIGMA, "loader")
    plans = [row.training for row in rows if row.training is not None]
    if plans:
        total, done_steps = sum(plan.total for plan in plans), sum(plan.done for plan in plans)
        return _counted(total, done_steps, _INTEGRATION_SIGMA, "integration")
    return _by_time(work, ideal, time_s)


def _counted(total: int, done: int, sigma: float, source: RemainingSource) -> RemainingWork:
    return RemainingWork(min(float(max(0, total - done)), MOST), sigma, source, min(float(max(total, 1)), MOST))


def _by_time(work: Work, ideal: float, time_s: float) -> RemainingWork | None:
    """What the time limit and, where they are known, similar jobs say."""
    if work.end_s is None:
        return None
    left_s = max(0.0, work.end_s - time_s)
    usual = work.usual_length() if work.start_s is not None and work.start_s < work.end_s else None
    if usual is None or work.start_s is None:
        return RemainingWork(min(left_s * _LIMIT_SHARE * ideal, MOST), _LIMIT_SIGMA, "time_limit")
    usual_s = usual.limit_share * (work.end_s - work.start_s)
    # A job that is still there after its usual length goes on for as long again as it is late: nothing else is known.
    expected_s = min(left_s, math.fabs(usual_s - max(0.0, time_s - work.start_s)))
    return RemainingWork(min(expected_s * ideal, MOST), usual.sigma, "history")
