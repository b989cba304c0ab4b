"""A /run of a cluster's own, for sites where Slurm has its sockets or its configuration there and nowhere else.

`enter` is called by the supervisor before it starts any daemon; the files are made by site_setup.py. Slurm's commands
reach such a cluster from inside, so `command_text` is what stands in their place on PATH: it needs root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.devcluster import kernel


def enter(mounts: Iterable[Sequence[str]]) -> None:
    """Give this process, and all that it will start, directories in the place of others; all else is the machine's.

    Args:
        mounts: pairs of a directory and the place where it shall be seen.

    Raises:
        OSError: the kernel refuses.
    """
    kernel.unshare_mounts()
    for source, place in mounts:
        kernel.bind(source, place)


def command_text(program: Path, mark: str, pid_file: Path) -> str:
    """A script that runs one of Slurm's commands where the cluster's /run is.

    Args:
        program: the command.
        mark: the name of a file that only the cluster's /run has.
        pid_file: of a process that is in there.
    """
    return (
        "#!/bin/sh\n"
        f'[ -e /run/{mark} ] && exec {program} "$@"\n'
        f'exec nsenter --mount="/proc/$(cat {pid_file})/ns/mnt" --wdns="$PWD" {program} "$@"\n'
    )
