"""How long jobs like a new one run, as a share of their time limit: (job, past jobs) -> `UsualLength`. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

from hetstream.hetjob.elastic.remaining_work import UsualLength
from hetstream.slurm_plugin.model.alike import most_alike, smoothed, without_outliers
from hetstream.slurm_plugin.model.past_job import Features, PastJob

# What one past job says of the next is wrong by a factor of two as often as not; a few that agree are not exact either.
_SIGMA_OF_ONE, _LEAST_SIGMA, _LARGEST_SIGMA = 0.7, 0.3, 1.4
# A job that failed at once says nothing of a length.
_LEAST_SHARE = 1e-4


def usual_length(new: Features, past: Sequence[PastJob]) -> UsualLength | None:
    """What follows from the most similar past jobs of which it is known; None if there are none."""
    known = [job for job in past if job.limit_share is not None and _LEAST_SHARE <= job.limit_share <= 1]
    shares = [job.limit_share for job in most_alike(new, known) if job.limit_share is not None]
    if not shares:
        return None
    sigma = stdev(map(math.log, shares)) if len(shares) > 1 else _SIGMA_OF_ONE
    usual = math.exp(smoothed([math.log(share) for share in without_outliers(shares)]))
    return UsualLength(min(1.0, usual), min(max(sigma, _LEAST_SIGMA), _LARGEST_SIGMA), len(shares))
