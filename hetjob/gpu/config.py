"""Settings of a process that shares its GPU. Only this file reads them from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hetstream.base.errors import OptionsError
from hetstream.base.faults import InjectionPoints
from hetstream.base.process import other_job
from hetstream.hetjob.errors import GpuJobRefused
from hetstream.hetjob.gpu.emulated_file import resolved
from hetstream.hetjob.gpu.orders import JobClass, LocalRank, gpu_of, local_rank
from hetstream.hetjob.site.site_file import site_value

# Where the coordinator of a node listens.
DEFAULT_SOCKET = "/run/hetstream/gpu.sock"
_DEFAULT_HOST_BYTES = 2**30


@dataclass(frozen=True)
class SharingSettings:
    """How a process shares its GPU.

    Attributes:
        gpu: the GPU, as the coordinator calls it; empty: the environment does not say which of several.
        job_class: of the process.
        job: id of the Slurm job, or a name.
        socket: of the coordinator.
        host_bytes: memory of the host that may stand in for memory of the GPU.
        coordinator_uid: user that the coordinator runs as, if that is neither root nor this user.
        gpus: all that the job has on this node.
        rank: of the process among those of the job on this node.
        problem: why the environment does not say which GPU it is; empty if it does.
        program: name that all processes of the program have in common, by `hetstream gpu run`; empty: none.
    """

    gpu: str
    job_class: JobClass
    job: str
    socket: str
    host_bytes: int
    coordinator_uid: int | None = None
    gpus: tuple[str, ...] = ()
    rank: LocalRank = LocalRank()  # noqa: RUF009
    problem: str = ""
    program: str = ""


def settings_from_environment(
    environ: Mapping[str, str] = os.environ, pid: int | None = None
) -> SharingSettings | None:
    """Return what the environment says; None: the process does not share its GPU, or it was the job's that submitted
    this one.

    Args:
        environ: of a process.
        pid: this process; None: the one that calls.

    Raises:
        OptionsError: a variable breaks its rule.
    """
    gpus = tuple(resolved(gpu) for gpu in environ.get("HETSTREAM_GPU", "").split(",") if gpu)
    if not gpus or other_job("HETSTREAM_GPU", environ):
        return None
    problems = []
    classes = [kind.value for kind in JobClass]
    job_class = environ.get("HETSTREAM_JOB_CLASS", JobClass.OPPORTUNISTIC.value)
    if job_class not in classes:
        problems.append(f"HETSTREAM_JOB_CLASS={job_class}: use one of {', '.join(classes)}")
    host_bytes = environ.get("HETSTREAM_GPU_HOST_BYTES", str(_DEFAULT_HOST_BYTES))
    if not host_bytes.isdecimal():
        problems.append(f"HETSTREAM_GPU_HOST_BYTES={host_bytes}: use a whole number of bytes")
    coordinator_uid = None
    try:
        coordinator_uid = coordinator_uid_of(environ)
    except OptionsError as error:
        problems.append(str(error))
    if problems:
        raise OptionsError("; ".join(problems))
    rank, gpu, problem = local_rank(environ), "", ""
    numbers = tuple(filter(None, environ.get("HETSTREAM_GPU_NUMBERS", "").split(",")))
    program = environ.get("HETSTREAM_GPU_JOB", "")
    try:
        gpu = gpu_of(gpus, numbers, rank, environ.get("CUDA_VISIBLE_DEVICES"))
        if not gpu:
            return None
    except GpuJobRefused as error:
        problem = str(error)
    return SharingSettings(
        gpu=gpu,
        gpus=gpus,
        rank=rank,
        problem=problem,
        job_class=JobClass(job_class),
        job=environ.get("SLURM_JOB_ID") or program or f"process {pid or os.getpid()}",
        program=program,
        socket=environ.get("HETSTREAM_GPU_SOCKET", DEFAULT_SOCKET),
        host_bytes=int(host_bytes),
        coordinator_uid=coordinator_uid,
    )


def coordinator_uid_of(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the user that the coordinator may run as, beside root and this user; None: nobody else.

    Raises:
        OptionsError: what is given is no user's number.
    """
    uid = site_value("HETSTREAM_GPU_COORDINATOR_UID", environ)
    if uid and not uid.isdecimal():
        raise OptionsError(f"HETSTREAM_GPU_COORDINATOR_UID={uid}: use the number of a user")
    return int(uid) if uid else None


def faults_from_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Requests of a test to hurt this process; empty without."""
    return environ.get("HETSTREAM_GPU_FAULT", "")


# Points of the agents and of the coordinator at which a test can have one die or stop (`base/faults.py`).

POINTS = {
    "agent.connected": "the coordinator has accepted a connection and knows nothing of the process",
    "agent.introduced": "the process has said who it is and has no answer",
    "agent.answered": "it has its pages and has mapped nothing",
    "agent.reporting": "its statistics are to be written",
    "agent.reported": "its statistics are written, and the coordinator has not been woken",
    "agent.boundary": "a mini-batch has ended and nobody knows",
    "agent.limited": "it keeps to a limit, and has not said so",
    "agent.pausing": "it waits for leave to launch",
    "coordinator.accepted": "a process has connected and nothing of it is read",
    "coordinator.heard": "a first message has come and nothing is decided",
    "coordinator.pages_made": "a process is admitted, and its pages are nobody's but the coordinator's",
    "coordinator.answered": "it has its pages, and no order",
    "coordinator.decided": "orders are made and not written",
    "coordinator.ordered": "the next process's order is written, those of the others are not",
}
FAULTS = InjectionPoints("HETSTREAM_GPU_FAULT", POINTS, faults_from_environment())
reach = FAULTS.reach
