"""Who may share which GPU, and as what: by files that root or the coordinator's user wrote, never by what a job says.

Slurm's prolog, or the packer, writes one file for each job that holds a GPU of the node, and the epilog removes it:
`GRANTS/JOB.json` with `{"uid": 1000, "job_class": "guaranteed", "gpus": ["GPU-1a2b"]}`. A guaranteed job counts from
then on, also before its program has begun, and if it never has an agent.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from hetstream.base.access import UntrustedFile, others_can_write
from hetstream.base.errors import OptionsError
from hetstream.base.files import Directory
from hetstream.base.text import printable
from hetstream.base.typed_json import decode
from hetstream.hetjob.errors import GpuJobRefused, GpuTaken
from hetstream.hetjob.gpu.config import settings_from_environment
from hetstream.hetjob.gpu.emulated_file import resolved
from hetstream.hetjob.gpu.handshake import Introduction
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.coordinator.decide import context_bytes
from hetstream.slurm_plugin.coordinator.gpus import GpuReading

# Processes that hold memory of a GPU and have no agent for it: nobody can tell them to pause. Pure.
#
# The agent comes to a job by its environment, which is the job's own to change, and a program without torch has none.
# So the GPU is asked who holds its memory and who computes, and the kernel which job that is.
#
# An agent comes before the first launch, and before the first tensor. What a process has before is a context: a program
# that has named its GPU and then reads its data for minutes holds one, computes nothing, and is let alone.

# A process that ends has closed its connection before the driver has freed its memory. As long as who does not keep to
# a limit has (`decide.py`).
_GRACE_NS = 10_000_000_000
# A process from before the coordinator may have an agent: that comes back at its next launch or boundary, and until
# then computes nothing.
_FROM_BEFORE_NS = 600_000_000_000


@dataclass(frozen=True)
class Holder:
    """Whose a process is.

    Attributes:
        job: that it belongs to.
        job_class: of the job.
        uid: whose the job is.
    """

    job: str
    job_class: JobClass
    uid: int


@dataclass(frozen=True)
class Agentless:
    """A process that holds memory without an agent for this GPU.

    Attributes:
        pid: its number.
        holder: whose it is; None: of no job that was given a GPU here.
        held_bytes: memory of the GPU that it holds.
        is_from_before: it was there before the coordinator.
        tensors_ns: since when it has held more than a context; None: it does not.
        launched_ns: when it was first seen to compute; None: never.
        goes_on: it was seen again long after that.
    """

    pid: int
    holder: Holder | None
    held_bytes: int
    is_from_before: bool
    tensors_ns: int | None = None
    launched_ns: int | None = None
    goes_on: bool = False

    @property
    def is_hog(self) -> bool:
        """Whether it is an opportunistic job's with more than a context. A guaranteed job's processes need no agent."""
        return self.tensors_ns is not None and self._is_opportunistic

    @property
    def _is_opportunistic(self) -> bool:
        return self.holder is not None and self.holder.job_class is JobClass.OPPORTUNISTIC

    def complaint(self, now_ns: int) -> str:
        """Return why its job is to be taken away; empty: it is not."""
        if not self._is_opportunistic:
            return ""
        if self.goes_on:
            return f"process {self.pid} computes on the GPU without an agent, so that nobody can have it pause"
        patience_ns = _FROM_BEFORE_NS if self.is_from_before else _GRACE_NS
        if self.tensors_ns is not None and now_ns - self.tensors_ns > patience_ns:
            return (
                f"process {self.pid} holds {self.held_bytes:,} bytes of the GPU without an agent, so that nobody can "
                "have it pause"
            )
        return ""


def agentless(
    reading: GpuReading,
    capacity_bytes: int,
    with_agent: Mapping[int, bool],
    before: Mapping[int, Agentless] | None,
    holder_of: Callable[[int], Holder | None],
    now_ns: int,
) -> dict[int, Agentless] | None:
    """Return the processes on a GPU that have no agent for it, by their numbers; None where nobody counts.

    Args:
        reading: what the GPU says.
        capacity_bytes: memory of the GPU.
        with_agent: the processes that the coordinator knows; whether they keep to its orders for this GPU. One that
            keeps to those for another GPU of its job may have a context here, too, and compute a little by mistake.
        before: what the call before returned.
        holder_of: whose a process is. Asked each time: a number may be another process's by now.
        now_ns: the time.
    """
    if reading.held_bytes is None:
        return None
    most_bytes = context_bytes(capacity_bytes)
    found = {}
    for pid, num_bytes in reading.held_bytes.items():
        if not num_bytes or with_agent.get(pid, False):
            continue
        holder = holder_of(pid)
        known = before.get(pid) if before else None
        if known is None or known.holder != holder:
            known = Agentless(pid, holder, num_bytes, is_from_before=before is None)
        launched_ns, goes_on = known.launched_ns, known.goes_on
        if pid in reading.computing and pid not in with_agent:
            launched_ns = now_ns if launched_ns is None else launched_ns
            goes_on |= now_ns - launched_ns > _GRACE_NS
        tensors_ns = (known.tensors_ns or now_ns) if num_bytes > most_bytes else None
        found[pid] = Agentless(pid, holder, num_bytes, known.is_from_before, tensors_ns, launched_ns, goes_on)
    return found


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
        """Return what the process is.

        Raises:
            GpuJobRefused: it may not share this GPU.
        """

    def is_reserved(self, gpu: str) -> bool:
        """Return whether a guaranteed job has the GPU."""

    def holder_of(self, pid: int) -> Holder | None:
        """Return whose a process is that has not come; None: of no job that was given a GPU, or nobody knows."""

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
    """Return the Slurm job whose control group a process is in (proctrack/cgroup)."""
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


# One user's jobs on the GPUs of one allocation: nobody but the user says what they are, and there is no Prolog.
#
# A guaranteed job that was there before its coordinator comes to it at its next boundary, which may be a minute away.
# Until then nobody would know of it; so the coordinator looks once, when it begins, which processes of the user are
# guaranteed, by their environments, and have torch in their memory. A shell, or what a job has left behind, has the
# environment as well, but nothing on a GPU, and would keep it from others for as long as it lives. A job that has not
# come as far as torch comes to the coordinator before its first launch.

_PROC = Path("/proc")
# In the name of a file that each process maps that has imported torch.
_TORCH = b"libtorch"
# In /proc/PID/stat behind the name, which may hold blanks: the state, and when the process began.
_STATE, _BEGAN = 0, 19


@dataclass(frozen=True)
class GuaranteedProcess:
    """A process with torch that is guaranteed by its environment, or that starts such processes.

    Attributes:
        pid, began: the process; its number may be another one's later.
        job: as the coordinator calls it.
        gpu: one of those that the job has: which of them a process uses, its driver alone knows for sure.
    """

    pid: int
    began: str
    job: str
    gpu: str

    @property
    def is_there(self) -> bool:
        """Whether it has not ended."""
        return self.began != "" and _began(self.pid) == self.began


class OwnJobs:
    """All processes of the coordinator's own user, as what they say they are.

    Args:
        find: guaranteed processes that are there before the coordinator; called once, when it listens.
    """

    def __init__(self, find: Callable[[], Iterable[GuaranteedProcess]] = tuple) -> None:
        self._find = find
        self._awaited: list[GuaranteedProcess] | None = None

    def admit(self, peer: Peer, introduction: Introduction) -> Admitted:
        """As `Admission.admit`."""
        if peer.uid != os.geteuid():
            raise GpuJobRefused(f"it runs as user {peer.uid}, and this coordinator is for jobs of user {os.geteuid()}")
        return Admitted(printable(introduction.program or introduction.job), introduction.job_class)

    def is_reserved(self, gpu: str) -> bool:
        """Return whether a guaranteed job was there before the coordinator, and has not come to it."""
        return bool(self._awaited_on(gpu))

    def holder_of(self, pid: int) -> Holder | None:  # noqa: ARG002
        """As `Admission.holder_of`: nobody takes a user's jobs away from his own GPUs."""
        return None

    def check_guaranteed(self, gpu: str, job: str, others: Collection[str]) -> None:
        """As `Admission.check_guaranteed`."""
        for other in (*others, *(process.job for process in self._awaited_on(gpu))):
            if other != job:
                raise GpuTaken(
                    f"guaranteed job {other!r} has GPU {gpu}, and a GPU has one guaranteed job. Wait for its end, take "
                    f"another GPU, or use --class {JobClass.OPPORTUNISTIC.value}"
                )
        self._awaited = [process for process in self._awaited or () if process.gpu != gpu]

    def _awaited_on(self, gpu: str) -> list[GuaranteedProcess]:
        found = self._find() if self._awaited is None else self._awaited
        self._awaited = [process for process in found if process.is_there]
        return [process for process in self._awaited if process.gpu == gpu]


def guaranteed_processes(socket: Path) -> list[GuaranteedProcess]:
    """This user's processes that are guaranteed, and whose coordinator listens at a path."""
    found: list[GuaranteedProcess] = []
    for name in filter(str.isdecimal, os.listdir(_PROC)):
        directory, began = _PROC / name, _began(int(name))
        try:
            text = (directory / "environ").read_bytes() if directory.stat().st_uid == os.geteuid() else b""
        except OSError:  # it has gone, or is of another user by now
            continue
        if b"HETSTREAM_GPU=" not in text:
            continue
        environ = dict(entry.partition("=")[::2] for entry in os.fsdecode(text).split("\0"))
        try:
            settings = settings_from_environment(environ, int(name))
        except OptionsError:  # it ends, as soon as it reads that
            continue
        if settings is None or settings.job_class is not JobClass.GUARANTEED:
            continue
        if os.path.realpath(settings.socket) == os.path.realpath(socket) and _has_torch(directory):
            job = printable(settings.program or settings.job)
            found.extend(GuaranteedProcess(int(name), began, job, gpu) for gpu in settings.gpus)
    return found


def _has_torch(directory: Path) -> bool:
    try:
        return _TORCH in (directory / "maps").read_bytes()
    except OSError:
        return False


def _began(pid: int) -> str:
    """When a process began, in clock ticks; empty if it has ended."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[_STATE] == "Z" else fields[_BEGAN]
