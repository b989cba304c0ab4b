"""Who may share which GPU, and as what: by files that root or the coordinator's user wrote, never by what a job says.

Slurm's prolog, or the packer, writes one file for each job that holds a GPU of the node, and the epilog removes it:
`GRANTS/JOB.json` with `{"uid": 1000, "job_class": "guaranteed", "gpus": ["GPU-1a2b"]}`. A guaranteed job counts from
then on, also before its program has begun, and if it never has an agent.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from hetstream.base.access import UntrustedFile, others_can_write
from hetstream.base.files import Directory
from hetstream.base.typed_json import decode
from hetstream.hetjob.errors import GpuJobRefused
from hetstream.hetjob.gpu.devices.emulated_file import resolved
from hetstream.hetjob.gpu.introduction import Introduction
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.coordinator.agentless import Holder

_log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Admitted:
    """What a process was admitted as.

    Attributes:
        job: that it belongs to. Reports name this one, whatever the process calls itself.
        job_class: of the job.
    """

    job: str
    job_class: JobClass


class Admission(Protocol):
    """Says who may share a GPU."""

    def admit(self, peer: Peer, introduction: Introduction) -> Admitted:
        """What the process is.

        Raises:
            GpuJobRefused: it may not share this GPU.
        """

    def is_reserved(self, gpu: str) -> bool:
        """Whether a guaranteed job has the GPU."""

    def holder_of(self, pid: int) -> Holder | None:
        """Whose a process is that has not come; None: of no job that was given a GPU, or nobody knows."""

    def check_guaranteed(self, gpu: str, job: str, others: Collection[str]) -> None:
        """Whether a process of a guaranteed job may come to a GPU.

        Args:
            gpu: it.
            job: that the process was admitted to.
            others: guaranteed jobs that have processes there.

        Raises:
            GpuTaken: another guaranteed job has it.
        """


class GrantedJobs:
    """The jobs that a directory of grants names.

    Args:
        directory: of the files; root's or this user's own, and nobody else can write to it.
        job_of: which Slurm job a process belongs to, by the kernel's word; None: nobody knows.
    """

    def __init__(self, directory: Path, job_of: Callable[[int], str | None] | None = None) -> None:
        self._directory = directory
        self._job_of = job_of or slurm_job_of
        self._complained: set[str] = set()

    def admit(self, peer: Peer, introduction: Introduction) -> Admitted:
        """As `Admission.admit`. Where control groups tell the process's job, what it says itself does not count."""
        job = self._job_of(peer.pid) or introduction.job
        grant = self._grant(job) if _JOB.fullmatch(job) else None
        if grant is None or grant.uid != peer.uid:  # whose else it may be is not this user's to know
            raise GpuJobRefused(f"job {job!r} of user {peer.uid} was given no GPU of this node to share")
        if introduction.gpu not in grant.gpus:
            raise GpuJobRefused(f"job {job} may use {', '.join(grant.gpus) or 'no GPU'}, not {introduction.gpu!r}")
        return Admitted(job, grant.job_class)

    def is_reserved(self, gpu: str) -> bool:
        """As `Admission.is_reserved`. Where the directory cannot be read, any GPU may be a guaranteed job's."""
        try:
            with Directory.open(self._directory) as directory:
                names = directory.names()
        except OSError as error:
            self._complain(self._directory.name, error)
            return True
        jobs = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        grants = [self._grant(job) for job in jobs if _JOB.fullmatch(job)]
        return any(grant and grant.job_class is JobClass.GUARANTEED and gpu in grant.gpus for grant in grants)

    def holder_of(self, pid: int) -> Holder | None:
        """As `Admission.holder_of`. Where control groups do not tell, a process names its job, a job of its user's."""
        job_by_kernel = self._job_of(pid)
        job = job_by_kernel or _own_word(pid)
        grant = self._grant(job) if _JOB.fullmatch(job) else None
        if grant is None or (not job_by_kernel and grant.uid != _uid_of(pid)):
            return None
        return Holder(job, grant.job_class, grant.uid)

    def check_guaranteed(self, gpu: str, job: str, others: Collection[str]) -> None:
        """As `Admission.check_guaranteed`: Slurm has given the GPU to all of them, so that is only told."""
        for other in others:
            text = "GPU given twice gpu=%s job=%s: guaranteed job %s has it, too. They count as one; see gres.conf"
            self._warn_once(f"{gpu} {job} {other}", text, gpu, job, other)

    def _grant(self, job: str) -> Grant | None:
        """A grant; what others could have written, or cannot be read, is none, and that is said once."""
        name = f"{job}.json"
        try:
            with Directory.open_safe(self._directory) as directory:
                if others_can_write(os.fstat(directory.descriptor), directory.descriptor):
                    raise UntrustedFile(f"others can write to {self._directory}")
                grant = decode(directory.read(name, _MOST_BYTES), Grant)
                return msgspec.structs.replace(grant, gpus=tuple(map(resolved, grant.gpus)))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            self._complain(name, error)
            return None

    def _complain(self, name: str, error: Exception) -> None:
        self._warn_once(name, "GPU grant not used file=%s: %s", name, error)

    def _warn_once(self, key: str, text: str, *values: object) -> None:
        if key not in self._complained:
            self._complained.add(key)
            _log.warning(text, *values)


def slurm_job_of(pid: int) -> str | None:
    """The Slurm job whose control group a process is in (proctrack/cgroup)."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return None
    found = _CGROUP_JOB.search(groups)
    return found[1] if found else None


def _own_word(pid: int) -> str:
    """The Slurm job that a process has in its environment; empty where that cannot be read, or says nothing."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    name = b"SLURM_JOB_ID="
    return next((os.fsdecode(entry[len(name) :]) for entry in entries if entry.startswith(name)), "")


def _uid_of(pid: int) -> int | None:
    """The user that a process runs as. Not the owner of its files in /proc: a process can have those be root's."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:  # it has gone
        return None
    found = re.search(r"^Uid:\t\d+\t(\d+)", status, re.M)
    return int(found[1]) if found else None


def check_rank(introduction: Introduction, job: str, others: Iterable[Introduction | None]) -> None:
    """Whether the processes of a job that were launched together say the same of how many they are.

    Args:
        introduction: of a process that comes.
        job: that it was admitted to.
        others: of those of the job's processes that are there.

    Raises:
        GpuJobRefused: they do not, so one of them is not what it says, and would be waited for in vain.
    """
    rank, num_ranks = introduction.rank, introduction.num_ranks
    if not num_ranks:
        return
    if rank >= num_ranks:
        raise GpuJobRefused(f"it says that it is rank {rank} of {num_ranks} on this node, and ranks count from 0")
    for other in others:
        if other and other.launch == introduction.launch and other.num_ranks not in (0, num_ranks):
            raise GpuJobRefused(
                f"it says that {num_ranks} processes of job {job} were launched together on this node, and rank "
                f"{other.rank} of them says {other.num_ranks}. Start all of them by one torchrun or srun"
            )
