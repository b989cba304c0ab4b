"""A job's remaining work in words: who says how much it is, and what the daemon believes. Pure."""

from __future__ import annotations

import math

from hetstream.hetjob.site.messages import JobNow
from hetstream.slurm_plugin.render.table import duration_words

_SOURCES = {
    "directive": "--total-steps of the script",
    "loader": "--total-epochs of the script and the loader's length",
    "integration": "the callback for its framework",
    "history": "similar jobs of the past and its time limit",
    "time_limit": "half of what is left of its time limit",
}
# A claim and what is believed of it are equal but for rounding.
_SAME = 0.01


def remaining_words(job: JobNow) -> str:
    """One line."""
    if job.claimed_s is None:
        return "remaining work: nobody says how much, so it counts as the median of the others"
    claimed, sigma = job.claimed_s, job.claimed_sigma or 0.0
    line = f"remaining work: {duration_words(claimed)} at full speed by {_SOURCES.get(job.remaining_source, '?')}"
    if sigma:
        line += f", right within a factor of {math.exp(sigma):.1f} two times of three"
    left = job.remaining_s if job.remaining_s is not None else claimed
    if left > claimed * (1 + _SAME) + 1:
        return f"{line}; believed: {duration_words(left)}, as it is still there after what it claimed before"
    if left < claimed * (1 - _SAME) - 1:
        return f"{line}; believed: {duration_words(left)}, when its time limit ends it"
    return line
