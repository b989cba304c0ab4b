"""Who may share which GPU, and as what: by files that root or the coordinator's user wrote, never by what a job says.

Slurm's prolog, or the packer, writes one file for each job that holds a GPU of the node, and the epilog removes it:
`GRANTS/JOB.json` with `{"uid": 1000, "job_class": "guaranteed", "gpus": ["GPU-1a2b"]}`. A guaranteed job counts from
then on, also before its program has begun, and if it never has an agent.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from hetstream.base.typed_json import decode
from hetstream.hetjob.errors import GpuJobRefused
from hetstream.hetjob.gpu.introduction import Introduction
from hetstream.hetjob.gpu.orders import JobClass

_MOST_BYTES = 65536
_JOB = re.compile(r"[A-Za-z0-9_.+-]{1,64}")
_CGROUP_JOB = re.compile(r"/job_(\d+)(?:/|$)", re.M)


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one job was given.

    Attributes:
        uid: whose it is.
        job_class: what it may expect.
        gpus: GPUs that it may use, as the coordinator calls them.
    """

    uid: Annotated[int, msgspec.Meta(ge=0)]
    job_class: JobClass
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a connection, by the kernel's word."""

    pid: int
    uid: int


class Admission(Protocol):
    """Says who may share a GPU."""

    def admit(self, peer: Peer, introduction: Introduction) -> JobClass:
        """What the process is.

        Raises:
            GpuJobRefused: it may not share this GPU.
        """

    def is_reserved(self, gpu: str) -> bool:
        """Whether a guaranteed job has the GPU."""


class OwnJobs:
    """All processes of the coordinator's own user, as what they say they are: one user's jobs in one allocation."""

    def admit(self, peer: Peer, introduction: Introduction) -> JobClass:
        """As `Admission.admit`."""
        if peer.uid != os.geteuid():
            raise GpuJobRefused(f"it runs as user {peer.uid}, and this coordinator is for jobs of user {os.geteuid()}")
        return introduction.job_class

    def is_reserved(self, gpu: str) -> bool:  # noqa: ARG002
        """Nobody knows before a process says so."""
        return False


class GrantedJobs:
    """The jobs that a directory of grants names.

    Args:
        directory: of the files; root's or this user's own, and nobody else can write to it.
        job_of: which Slurm job a process belongs to, by the kernel's word; None: nobody knows.
    """

    def __init__(self, directory: Path, job_of: Callable[[int], str | None] | None = None) -> None:
        self._directory = directory
        self._job_of = job_of or slurm_job_of

    def admit(self, peer: Peer, introduction: Introduction) -> JobClass:
        """As `Admission.admit`. Where control groups tell the process's job, what it says itself does not count."""
        job = self._job_of(peer.pid) or introduction.job
        grant = self._grant(job) if _JOB.fullmatch(job) else None
        if grant is None:
            raise GpuJobRefused(f"job {job!r} was given no GPU of this node to share")
        if grant.uid != peer.uid:
            raise GpuJobRefused(f"job {job} is of user {grant.uid}, and the process of user {peer.uid}")
        if introduction.gpu not in grant.gpus:
            raise GpuJobRefused(f"job {job} may use {', '.join(grant.gpus) or 'no GPU'}, not {introduction.gpu!r}")
        return grant.job_class

    def is_reserved(self, gpu: str) -> bool:
        """As `Admission.is_reserved`."""
        jobs = [path.stem for path in self._directory.glob("*.json")]
        grants = [self._grant(job) for job in jobs if _JOB.fullmatch(job)]
        return any(grant and grant.job_class is JobClass.GUARANTEED and gpu in grant.gpus for grant in grants)

    def _grant(self, job: str) -> Grant | None:
        """A grant; what others could have written, or cannot be read, is none."""
        try:
            descriptor = os.open(self._directory / f"{job}.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            trusted = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not trusted or not stat.S_ISREG(status.st_mode):
                return None
            return decode(os.read(descriptor, _MOST_BYTES), Grant)
        except (OSError, msgspec.MsgspecError):
            return None
        finally:
            os.close(descriptor)


def slurm_job_of(pid: int) -> str | None:
    """The Slurm job whose control group a process is in (proctrack/cgroup)."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return None
    found = _CGROUP_JOB.search(groups)
    return found[1] if found else None
