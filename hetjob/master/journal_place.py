"""The dispatcher's journal on a disk of the job's first node: a link in the job's directory leads to it.

The job master and its dispatcher run on that node until the job ends, so a dispatcher that is started again finds it.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from hetjob.errors import MasterError
from hetjob.job_environment import JobEnvironment
from hetstream.base.private import make_private
from mpi_dataworkers.dispatcher.journal import remove_leftovers


def lead_to(disk: Path, job: JobEnvironment) -> None:
    """Make a directory there with a name that nobody can have prepared, and the link to it.

    Raises:
        MasterError: it cannot be made there.
        OSError: the link cannot be made.
    """
    place = disk / f"hetstream-journal-{job.job_id}-{secrets.token_hex(8)}"
    try:
        make_private(place)
    except OSError as error:
        raise MasterError(
            f"the journal's directory {place} cannot be made on {job.node}: {error.strerror or error}. Name another "
            "place with --journal-dir, or none"
        ) from error
    job.work_dir.symlink_to(place)


def remove_left(work_dir: Path) -> None:
    """Remove what a dispatcher that was killed has left; of one on another node's disk only the link to it.

    Raises:
        ServiceError: the dispatcher lives.
    """
    remove_leftovers(work_dir.resolve())
    if work_dir.is_symlink():
        work_dir.unlink()


def remove(work_dir: Path) -> None:
    """Remove the journal, and the link to it if there is one. What cannot be removed stays."""
    shutil.rmtree(work_dir.resolve(), ignore_errors=True)
    if work_dir.is_symlink():
        work_dir.unlink()
