"""Every setting that the data plane reads from the environment, in one place. No other module reads `os.environ`.

HETSTREAM_SERVICE        file:PATH of the dispatcher's address file
HETSTREAM_JOB_NAME       name under which the ranks of one program meet (default: from Slurm or torchrun)
HETSTREAM_BUFFER_BYTES   bytes of finished batches a loader holds ahead of the training loop (default 512 MiB)
HETSTREAM_HOOK           1 while the start-up hook is active
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from mpi_dataworkers.errors import ConfigError

DEFAULT_BUFFER_BYTES = 512 << 20


@dataclass(frozen=True)
class Identity:
    """Who this process is among the trainers.

    Attributes:
        rank: 0-based rank.
        world_size: number of ranks.
        job_name: common to all ranks of one program run, and to no other run.
        is_named: the user gave the name; else it was made from Slurm's or torchrun's variables.
    """

    rank: int
    world_size: int
    job_name: str
    is_named: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} of world size {self.world_size}: rank must be in [0, world size)")
        if not self.job_name or not self.job_name.isprintable():
            raise ConfigError(f"job name {self.job_name!r}: must be non-empty printable text")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name)
    if value is None or value == "":
        return None
    try:
        return int(value)
    except ValueError as error:
        raise ConfigError(f"environment variable {name}={value!r}: must be a whole number") from error


def service_from_environment(environ: Mapping[str, str] = os.environ) -> str | None:
    """The service to connect to, or None to work in process."""
    return environ.get("HETSTREAM_SERVICE") or None


def buffer_bytes_from_environment(environ: Mapping[str, str] = os.environ) -> int:
    """Bytes a loader may hold ahead of the training loop."""
    value = _number(environ, "HETSTREAM_BUFFER_BYTES")
    if value is None:
        return DEFAULT_BUFFER_BYTES
    if value <= 0:
        raise ConfigError(f"environment variable HETSTREAM_BUFFER_BYTES={value}: must be positive")
    return value


def identity_from_environment(
    known: tuple[int, int] | None, job_name: str | None = None, environ: Mapping[str, str] = os.environ
) -> Identity:
    """Find rank, world size and job name.

    Args:
        known: (rank, world size) when torch.distributed or Horovod is initialised; it wins.
        job_name: an explicit name; it wins over the environment.
        environ: the environment; torchrun's RANK and WORLD_SIZE come before Slurm's SLURM_PROCID and
            SLURM_STEP_NUM_TASKS (https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES).
    """
    if known is None:
        # SLURM_STEP_NUM_TASKS and not SLURM_NTASKS, which the batch script has too, where one process runs.
        for rank_name, size_name in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
            rank, size = _number(environ, rank_name), _number(environ, size_name)
            if rank is not None and size is not None:
                known = (rank, size)
                break
    rank, world_size = known or (0, 1)
    given = job_name if job_name is not None else environ.get("HETSTREAM_JOB_NAME")
    if given is not None:
        return Identity(rank, world_size, given, is_named=True)
    variables = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
    name = ".".join(environ[key] for key in variables if environ.get(key)) or "local"
    if world_size == 1:
        name = f"{name}.{uuid.uuid4().hex[:12]}"  # nobody has to meet here, so nobody can collide
    return Identity(rank, world_size, name)
