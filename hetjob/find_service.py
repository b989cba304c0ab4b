"""Find the service that a user means: by its address file, by a job's directory or number, or the only one there is.

Called by `hetstream top` and `hetstream events`. Reads directories, asks nobody but through `ask_slurm`.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from hetjob.errors import ServiceNotFound, SlurmCommandError, UsageError
from mpi_dataworkers.address import parse_service

_ADDRESS = "address"
_JOB_ID = re.compile(r"(\d+)(\+\d+)?")


def find_address_file(
    job: str | None,
    service: str | None,
    environ: Mapping[str, str],
    here: Path,
    ask_slurm: Callable[[str], Path],
) -> Path:
    """The address file of a service, which is gone when the job has ended; its directory is not.

    Args:
        job: a directory, or a Slurm job id.
        service: `file:PATH`; wins over the environment's HETSTREAM_SERVICE, which counts where no job is named.
        environ: the environment.
        here: the current directory.
        ask_slurm: from a job id to the directory that it was submitted from; raises if Slurm does not know it.

    Raises:
        UsageError: no job is named where there is no service, or several; what is named is no job.
        ServiceNotFound: the named job has none, or Slurm does not say where it would be.
    """
    if job is not None and service is not None:
        raise UsageError("name a job, or --service, not both")
    if job is None:
        named = service or environ.get("HETSTREAM_SERVICE")
        return parse_service(named) if named else _only_one(here)
    if (number := _JOB_ID.fullmatch(job)) is None:
        if not Path(job).is_dir():
            raise UsageError(f"{job!r} is neither a directory nor a job id")
        return Path(job) / _ADDRESS
    directory = job_directory(here, number[1]) or _asked(ask_slurm, number[1]) or _no_job(number[1])
    return directory / _ADDRESS


def job_directory(submit_dir: Path, job_id: str) -> Path | None:
    """The directory of a job's last start; None if it has none, or none that this user may see."""
    found = [path for path in (submit_dir / ".hetstream").glob(f"job-{job_id}*") if _restarts(path, job_id) >= 0]
    return max(found, key=lambda path: _restarts(path, job_id), default=None)


def _asked(ask_slurm: Callable[[str], Path], job_id: str) -> Path | None:
    try:
        return job_directory(ask_slurm(job_id), job_id)
    except SlurmCommandError as error:
        raise ServiceNotFound(
            f"no directory .hetstream/job-{job_id} here, and Slurm does not say where job {job_id} was submitted "
            f"({error.argv[0]}: {error.reason}): run this there, or give the path of that directory"
        ) from error


def _restarts(path: Path, job_id: str) -> int:
    parts = re.fullmatch(rf"job-{job_id}(?:-restart-(\d+))?", path.name)
    return int(parts[1] or 0) if parts else -1


def _no_job(job_id: str) -> Path:
    raise ServiceNotFound(
        f"no directory .hetstream/job-{job_id} here or where the job was submitted: give the path of that directory, "
        "or is this a job without data workers?"
    )


def _is_own(path: Path) -> bool:
    """Whether a file and its directory are this user's, and neither is a link: anybody can make names in /tmp."""
    try:
        found = path.parent.lstat(), path.lstat()
    except OSError:
        return False
    is_kind = stat.S_ISDIR(found[0].st_mode) and stat.S_ISREG(found[1].st_mode)
    return is_kind and all(one.st_uid == os.getuid() for one in found)


def _only_one(here: Path) -> Path:
    candidates = [
        *(here / ".hetstream").glob("job-*/address"),
        *Path(tempfile.gettempdir()).glob("hetstream-*/address"),
    ]
    found = sorted(path for path in candidates if _is_own(path))
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"several services run: name one of {', '.join(str(path.parent) for path in found)}")
    raise UsageError(
        "no running service found: no job was submitted from this directory and no `hetstream run` runs on this host. "
        "Name a job id, a job's directory, or --service file:PATH"
    )
