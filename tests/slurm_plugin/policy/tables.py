"""Tables of jobs for the tests of policies: arbitrary ones, and ones written by hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from hetstream.slurm_plugin.policy.policies import POLICIES
from hetstream.slurm_plugin.policy.table import JobTable, Policy, Pool, job_table

POINTS = 4


def arbitrary_table(seed: int, max_jobs: int, one_size: bool) -> JobTable:
    """Jobs with concave curves, some flat, some whose bends lie between whole data workers."""
    draw = np.random.default_rng(seed)
    num_jobs = int(draw.integers(0, max_jobs + 1))

    def one_of(*values: float) -> npt.NDArray[np.float64]:
        return draw.choice(np.array(values), num_jobs)

    minimum = draw.integers(0, 5, num_jobs) * draw.integers(0, 2, num_jobs)
    widths = draw.integers(0, 40, (num_jobs, POINTS - 1))
    slopes = -np.sort(-draw.integers(0, 9, (num_jobs, POINTS - 1)), axis=1)
    rise = np.cumsum(np.concatenate([draw.integers(0, 50, (num_jobs, 1)), widths * slopes], axis=1), axis=1)
    return job_table(
        job_id=100 + np.arange(num_jobs),
        wanted=minimum + draw.integers(0, 41, num_jobs),
        minimum=minimum,
        current=draw.integers(0, 41, num_jobs),
        cpus=np.full(num_jobs, draw.integers(1, 9)) if one_size else draw.integers(1, 9, num_jobs),
        cap=one_of(3, 1 << 31, 1 << 31),
        gpus=one_of(0, 1, 2, 8),
        weight=one_of(0.5, 1, 3),
        curve_cpus=np.cumsum(np.concatenate([np.zeros((num_jobs, 1)), widths], axis=1), axis=1),
        curve_speed=rise / np.maximum(rise[:, -1:], 1),
        remaining_s=one_of(np.nan, 0, 60, 3600, 86400),
        remaining_sigma=one_of(0, 0.5, 9),
        total_s=one_of(np.nan, 3600, 90000),
        age_s=one_of(0, 100, 1e6),
        starved_s=one_of(0, 100, 1e6),
        held_s=one_of(0, 100, np.inf),
        stale_s=one_of(0, 100, 1e6),
        tenant=draw.integers(0, 3, num_jobs),
        user=draw.integers(0, 3, num_jobs),
    )


def tables(max_jobs: int = 8, one_size: bool = False) -> st.SearchStrategy[JobTable]:
    """Any jobs.

    Args:
        max_jobs: at most so many.
        one_size: all data workers have as many CPUs.
    """
    return st.integers(0, 2**63).map(lambda seed: arbitrary_table(seed, max_jobs, one_size))


def lines(knees: list[int], wanted: int = 1000, **columns: npt.ArrayLike) -> JobTable:
    """Jobs whose speed grows evenly from 0 to 1 at their knee, in CPUs, and no further."""
    curve = np.array([[0.0, float(knee), 2.0 * knee] for knee in knees])
    curves: dict[str, npt.ArrayLike] = {"curve_cpus": curve, "curve_speed": [0.0, 1.0, 1.0]}
    return job_table(np.arange(1, len(knees) + 1), wanted, **{**curves, **columns})


def grows(policy: Policy) -> bool:
    """Whether a policy promises growth: what it gives a job that is alone with more CPUs than it can use.

    A policy may choose to give nobody more than the minimum; tests of how a policy fills the pool are then none of it.
    """
    return bool(policy(lines([8]), Pool(100), 0.0).workers[0] > 0)


GROWING = sorted(name for name in POLICIES if grows(POLICIES[name]))
