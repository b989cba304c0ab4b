"""Find the service that a user means: by its address file, by a job's directory or number, or the only one there is.

Called by `hetstream job`. Any number that Slurm knows a part of a job by names the job:
a component's, a companion's, an array task's. Reads directories, asks nobody but through `ask_slurm`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.files import Directory, temporary_place
from hetstream.base.process import other_job
from hetstream.hetjob.errors import ServiceNotFound, SlurmCommandError
from hetstream.hetjob.job.job import IN_SUBMIT_DIR, JOBS_DIR, for_user, places, setting
from hetstream.mpi_dataworkers.wire.address import parse_service

_ADDRESS = "address"
JOB_ID = re.compile(r"(\d+)(?:\+\d+|_\d+)?")


@dataclass(frozen=True)
class JobPlace:
    """Where the directory of a job is to be looked for.

    Attributes:
        job_id: of the leader of the job, whatever part of it was asked for.
        directory: that it was submitted from, or its `--chdir`.
        state: in Slurm's spelling.
        user: whose job it is; "" if that is not known.
        jobs_dir: place of its directory that its script names; "" if it names none, or that is not known.
    """

    job_id: str
    directory: Path
    state: str
    user: str = ""
    jobs_dir: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return self.state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED")


AskSlurm = Callable[[str], JobPlace]


def find_directory(job: str, here: Path, ask_slurm: AskSlurm, jobs_dir: str | None = None) -> Path:
    """Return the directory of a job, which stays when it has ended.

    Args:
        job: a directory, or a job id: of the job, of a component, a companion or an array task.
        here: the current directory.
        ask_slurm: where the job that a number names is; raises if Slurm does not know it.
        jobs_dir: place of the directories of jobs, with `%u` for the user; None: only where they were submitted, and
            in the home directory.

    Raises:
        UsageError: what is named is no job.
        ServiceNotFound: the job has no directory, or Slurm does not say where it would be.
    """
    number = JOB_ID.fullmatch(job)
    if number is None:
        if not Path(job).is_dir():
            raise UsageError(f"{job!r} is neither a directory nor a job id")
        return Path(job)
    own = None if "_" in job else job_directory(places([here], jobs_dir), number[1])
    if own is not None:
        return own
    try:
        place = ask_slurm(job)
    except SlurmCommandError as error:
        raise ServiceNotFound(
            f"no directory .hetstream/job-{number[1]} here, and Slurm does not say where job {job} was submitted "
            f"({error.argv[0]}: {error.reason}): run this there, or give the path of that directory"
        ) from error
    named = [for_user(directory, place.user) for directory in (place.jobs_dir, jobs_dir) if directory]
    directory = job_directory([*named, place.directory / IN_SUBMIT_DIR, *places([], None)], place.job_id)
    if directory is None:
        raise ServiceNotFound(_why_no_directory(job, place, named))
    return directory


def _why_no_directory(job: str, place: JobPlace, named: Sequence[Path]) -> str:
    if place.state == "PENDING":
        return f"job {job} is pending: it has a directory when it starts. See: hetstream why {place.job_id}"
    where = f"no directory .hetstream/job-{place.job_id} in {place.directory}, where job {job} works"
    ended = f" ({place.state})" if place.has_ended else ""
    others = f", nor in {' or '.join(map(str, named))}" if named else ""
    return f"{where}{ended}{others}: give the path of that directory, or is this a job without data workers?"


def find_address_file(
    job: str | None, service: str | None, environ: Mapping[str, str], here: Path, ask_slurm: AskSlurm
) -> Path:
    """Return the address file of a service, which is gone when the job has ended; its directory is not.

    Args:
        job: as for `find_directory`; None for the only service there is.
        service: `file:PATH`; wins over the environment's HETSTREAM_SERVICE, which counts where no job is named.
        environ: the environment.
        here: the current directory.
        ask_slurm: as for `find_directory`.

    Raises:
        UsageError: no job is named where there is no service, or several; what is named is no job.
        ServiceNotFound: as for `find_directory`.
    """
    if job is not None and service is not None:
        raise UsageError("name a job, or --service, not both")
    inherited = other_job("HETSTREAM_SERVICE", environ)
    if job is None and (named := service or ("" if inherited else environ.get("HETSTREAM_SERVICE"))):
        return parse_service(named)
    jobs_dir = setting(JOBS_DIR, environ)
    if job is None:
        return _only_one(places([here], jobs_dir))
    return find_directory(job, here, ask_slurm, jobs_dir) / _ADDRESS


def job_directory(places: Iterable[Path], job_id: str) -> Path | None:
    """Return the directory of a job's last start, in the first of some places that has one; None if this user sees
    none.
    """
    for place in places:
        # hetstream makes no link there; somebody else may, where the place is shared.
        named = [path for path in place.glob(f"job-{job_id}*") if _restarts(path, job_id) >= 0]
        found = [path for path in named if not path.is_symlink()]
        if found:
            return max(found, key=lambda path: _restarts(path, job_id))
    return None


def _restarts(path: Path, job_id: str) -> int:
    parts = re.fullmatch(rf"job-{job_id}(?:-restart-(\d+))?", path.name)
    return int(parts[1] or 0) if parts else -1


def _is_own(path: Path) -> bool:
    """Whether a file and its directory are this user's, and neither is a link: anybody can make names in /tmp."""
    try:
        with Directory.open(path.parent.parent) as place, place.enter(path.parent.name) as directory:
            os.close(directory.open_file(path.name))
            return directory.owner == os.getuid()
    except OSError:
        return False


def _only_one(places: Iterable[Path]) -> Path:
    candidates = [
        *(path for place in places for path in place.glob("job-*/address")),
        *temporary_place(make=False).glob("hetstream-*/address"),
    ]
    found = sorted(path for path in candidates if _is_own(path))
    if len(found) == 1:
        return found[0]
    if found:
        names = (path.parent.name.removeprefix("job-") for path in found)
        each = (name if name.isdigit() else str(path.parent) for name, path in zip(names, found, strict=True))
        raise UsageError(f"which one? {len(found)} run here: {', '.join(each)}. All of yours: hetstream job --me")
    raise UsageError(
        "no running service found: no job was submitted from this directory and no `hetstream run` runs on this host. "
        "Name a job id, a job's directory, or --service file:PATH"
    )
