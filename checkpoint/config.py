"""Every setting that checkpoints read from the environment, in one place. No other module reads `os.environ`.

HETSTREAM_CKPT_WRITER    1: the job has a checkpoint writer on this node; a trainer starts its own only if that one does
                         not come
HETSTREAM_CKPT_DIR       the checkpoint directory that the job's script names, for programs that name none
HETSTREAM_TAKES_OVER     the job whose training this one takes over while that one still runs (hetstream migrate)
HETSTREAM_CKPT_HOST      name or number under which other hosts reach this one; without it the host's name
HETSTREAM_CKPT_FAULT     for tests: where a process is to die, see `errors.py`

Of Slurm, SLURM_JOB_ID, SLURM_JOB_ID_HET_GROUP_0 and SLURM_HET_GROUP_ID say whose memory it is: `job_and_component`.
Which of a launcher's variables say that this process is one of several ranks is in `hetstream/base/process.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hetstream.base.process import (
    OF_ANY_PROGRAM,
    OF_ONE_TRAINING,
    lone_horovod,
    of_own_job,
    one_of_several,
    other_job,
    own_job,
)

# Not resolved: in a checkout a link leads to this folder.
_INSTALLED_IN = str(Path(os.path.abspath(__file__)).parents[2])

JOB_WRITER = "HETSTREAM_CKPT_WRITER"
DIRECTORY = "HETSTREAM_CKPT_DIR"
TAKES_OVER = "HETSTREAM_TAKES_OVER"
# In place of a job's id, without Slurm.
NO_JOB = "local"


def job_has_writers(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the job's script has started checkpoint writers."""
    return environ.get(JOB_WRITER, "") == "1" and not other_job(JOB_WRITER, environ)


def directory_of_job(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the checkpoint directory that the job's own script names, and not another job's; None if it names none."""
    return Path(environ[DIRECTORY]) if environ.get(DIRECTORY) and not other_job(DIRECTORY, environ) else None


def takes_over(environ: Mapping[str, str] = os.environ) -> str:
    """Slurm's id of the job whose training this one takes over; "" if none."""
    return environ.get(TAKES_OVER, "").strip()


def job_and_component(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Slurm's id of the job, that of the leader in a heterogeneous job, and which of its components this is.

    Without Slurm the job is "local".
    """
    component = of_own_job(environ).get("SLURM_HET_GROUP_ID", "")
    return own_job(environ) or NO_JOB, int(component) if component.isdecimal() else 0


def several_ranks(environ: Mapping[str, str] = os.environ, *, is_horovod: bool = False) -> str:
    """Return which setting says that this process is one of several ranks, as in "WORLD_SIZE=2"; "" if none does.

    Args:
        environ: where.
        is_horovod: the program uses Horovod; else processes of mpirun or srun may each train for itself.
    """
    return one_of_several((*OF_ONE_TRAINING, *(OF_ANY_PROGRAM if is_horovod else ())), environ)


def wrong_with_horovod(size: int, environ: Mapping[str, str] = os.environ) -> str:
    """See `lone_horovod`."""
    return lone_horovod(size, environ)


def host_of_this_process(environ: Mapping[str, str] = os.environ) -> str:
    """Return what this host is called by the others."""
    return environ.get("HETSTREAM_CKPT_HOST") or os.uname().nodename


def faults_from_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Requests of a test to hurt this process, as `errors.py` reads them; empty without."""
    return environ.get("HETSTREAM_CKPT_FAULT", "")


def environment_of_writer(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what a writer's process needs to find this package: its trainer may have found it by its own directory."""
    # Absolute: the checkpoint writer runs in another directory.
    given = [os.path.abspath(path) for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**environ, "PYTHONPATH": os.pathsep.join([_INSTALLED_IN, *given])}
