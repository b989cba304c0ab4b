"""One user's jobs on the GPUs of one allocation: nobody but the user says what they are, and there is no Prolog.

A guaranteed job that was there before its coordinator comes to it at its next boundary, which may be a minute away.
Until then nobody would know of it; so the coordinator looks once, when it begins, which processes of the user are
guaranteed, by their environments, and have torch in their memory. A shell, or what a job has left behind, has the
environment as well, but nothing on a GPU, and would keep it from others for as long as it lives. A job that has not
come as far as torch comes to the coordinator before its first launch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.errors import OptionsError
from hetstream.base.text import printable
from hetstream.hetjob.errors import GpuJobRefused, GpuTaken
from hetstream.hetjob.gpu.config import settings_from_environment
from hetstream.hetjob.gpu.introduction import Introduction
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.coordinator.admission import Admitted, Peer
from hetstream.slurm_plugin.coordinator.agentless import Holder

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
        """Whether a guaranteed job was there before the coordinator, and has not come to it."""
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
        if settings is None or settings.job_class is not JobClass.GUARANTEED or settings.config_file:
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
