"""How long trainers wait for data: asked of the running hetstream jobs whose service this user may talk to.

Called by `hetstream util` and `hetstream advise`. It reads the jobs' address files, so it sees the user's own jobs
(root: those on file systems that root can read), and waits a few seconds at most for one that does not answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hetjob.errors import HetstreamError
from hetjob.find_service import job_directory
from slurm_plugin.client.model import Job


def wait_shares(jobs: Iterable[Job]) -> dict[str, float]:
    """Label of each running job that tells -> share of time that its training loops waited for data, 0 to 1.

    Of a heterogeneous job component 0 is named, which has the trainers.
    """
    found = {}
    for job in jobs:
        if not job.is_running or not job.work_dir or job.trainer or (job.het and job.het.offset):
            continue
        try:
            directory = job_directory(Path(job.work_dir), str(job.het.het_job_id if job.het else job.job_id))
            path = directory / "address" if directory else None
            if path is None or not os.access(path, os.R_OK):
                continue
        except OSError:
            continue  # another user's directory
        share = _ask(path)
        if share is not None:
            found[job.label] = share
    return found


def _ask(path: Path) -> float | None:
    # Only here: it brings ZeroMQ, which no reading of a cluster needs.
    from mpi_dataworkers.status_client import StatusClient, running_service

    try:
        with StatusClient(running_service(path)) as client:
            loaders = client.fetch().loaders
    except HetstreamError:
        return None  # it is ending, or on a host that this one does not reach: then nothing is known of it
    elapsed_s = sum(loader.totals.elapsed_s for loader in loaders)
    return min(1.0, sum(loader.totals.wait_s for loader in loaders) / elapsed_s) if elapsed_s > 0 else None
