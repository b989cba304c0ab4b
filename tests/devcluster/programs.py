"""Where Slurm's programs are. Called by boot.py and the command line; it starts nothing but `slurmctld -V`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetstream.slurm_plugin.client.run import run_slurm
from tests.devcluster.errors import SlurmMissing
from tests.devcluster.spec import RootPaths

DAEMONS = ("munged", "slurmctld", "slurmd")
# What accounting needs beside them: Slurm's daemon, and a database that is MariaDB's wherever Slurm is from.
SLURMDBD, MARIADB = "slurmdbd", ("mariadbd", "mariadb-install-db")
COMMANDS = ("sbatch", "srun", "salloc", "sinfo", "squeue", "scancel", "scontrol")
# Daemons live in sbin directories, which an ordinary user's PATH lacks.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class SlurmPrograms:
    """One Slurm that can be booted.

    Attributes:
        version: for example `22.05.8`.
        munged, slurmctld, slurmd: the daemons.
        root: the Debian root they belong to; None is the machine's own Slurm.
        slurmdbd: the daemon of accounting; None where it is not there.
    """

    version: str
    munged: Path
    slurmctld: Path
    slurmd: Path
    root: RootPaths | None = None
    slurmdbd: Path | None = None


def search_path() -> str:
    """This process's PATH with the directories of daemons behind it."""
    return os.environ.get("PATH", "") + os.pathsep + SYSTEM_PATH


def missing_programs() -> list[str]:
    """The programs that a cluster needs and that are not on the host's PATH."""
    return missing_of((*DAEMONS, *COMMANDS))


def missing_of(names: Iterable[str]) -> list[str]:
    """Those of some programs that are not on the host's PATH."""
    path = search_path()
    return [name for name in names if shutil.which(name, path=path) is None]


def host_programs() -> SlurmPrograms:
    """Slurm as it is installed on this machine.

    Raises:
        SlurmMissing: a program is not there.
    """
    missing = missing_programs()
    if missing:
        raise SlurmMissing(
            f"not found on this machine: {', '.join(missing)}. Run: devcluster install (as root on Debian), "
            "or give --slurm with a version that has a Debian root"
        )
    path = search_path()
    munged, slurmctld, slurmd = (Path(shutil.which(daemon, path=path) or daemon) for daemon in DAEMONS)
    slurmdbd = shutil.which(SLURMDBD, path=path)
    return SlurmPrograms(
        version=slurm_version([str(slurmctld)]),
        munged=munged,
        slurmctld=slurmctld,
        slurmd=slurmd,
        slurmdbd=Path(slurmdbd) if slurmdbd else None,
    )


def slurm_version(slurmctld: Sequence[str]) -> str:
    """The version that `slurmctld -V` prints, for example `22.05.8` from `slurm-wlm 22.05.8`.

    Args:
        slurmctld: how slurmctld is started, without options.
    """
    return run_slurm([*slurmctld, "-V"], timeout_s=10).stdout.split()[-1]
