"""Which records of the queue a job id names. Pure; called by `hetstream why` and `hetstream jobs`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hetstream.slurm_plugin.client.array_tasks import CUT, has_task
from hetstream.slurm_plugin.client.model import Job


def find_jobs(jobs: Iterable[Job], name: str) -> list[Job]:
    """The records that a job id names: `29`, `31` with all components, `31+1`, `33` with all tasks, `33_4`.

    Raises:
        ValueError: it has another form.
    """
    match = re.fullmatch(r"(\d+)(?:\+(\d+)|_(\d+))?", name)
    if not match:
        raise ValueError(f"job id {name!r}: must be N, N+COMPONENT or N_TASK")
    number, offset, task = int(match[1]), match[2], match[3]
    if offset is not None:
        return [job for job in jobs if job.het and (job.het.het_job_id, job.het.offset) == (number, int(offset))]
    if task is not None:
        of_array = [job for job in jobs if job.array_job_id == number]
        found = [job for job in of_array if has_task(job.array_tasks, int(task))]
        # Where indices are cut, it may be one of those that are not shown.
        return found or [job for job in of_array if CUT in job.array_tasks]
    return [
        job
        for job in jobs
        if number in (job.job_id, job.array_job_id) or (job.het is not None and job.het.het_job_id == number)
    ]
