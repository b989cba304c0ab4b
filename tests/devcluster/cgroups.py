"""Control groups of a cluster's own, for `proctrack/cgroup` and constrained devices.

Called by boot, supervisor and teardown. Slurm names its groups after nodes and jobs, which two clusters may have in
common. So the supervisor, with all that it starts, lives in a group with the cluster's name and takes that for the
root: clusters stay out of each other's way, and of the machine's own Slurm. Cgroup v1 only: there a group can be made
in the hierarchies that are needed and in no other.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from tests.devcluster import kernel
from tests.devcluster.render import version_tuple

ROOT = Path("/sys/fs/cgroup")
# Of proctrack/cgroup, and of task/cgroup with ConstrainDevices and ConstrainRAMSpace.
HIERARCHIES = ("freezer", "devices", "memory")
# Slurm 25.05 has dropped cgroup v1.
FIRST_WITHOUT_V1 = (25, 5)

_EMPTY_WITHIN_S, _LOOK_S = 10.0, 0.05


def why_not(version: str, root: Path = ROOT) -> str:
    """Why this machine cannot give a cluster control groups; "" if it can.

    Args:
        version: Slurm's version, for example `24.11.5`.
        root: where the hierarchies are mounted.
    """
    if version_tuple(version) >= FIRST_WITHOUT_V1:
        return f"Slurm {version} uses cgroup v2 only, which --cgroups was not made for: give --slurm 22.05 or 24.11"
    missing = [name for name in HIERARCHIES if not (root / name / "cgroup.procs").exists()]
    if missing:
        return f"no cgroup v1 hierarchy is mounted at {', '.join(str(root / name) for name in missing)}"
    closed = [name for name in HIERARCHIES if not os.access(root / name, os.W_OK)]
    if closed:
        return f"{', '.join(str(root / name) for name in closed)} cannot be written to: is it mounted read-only?"
    return ""


def groups_of(cluster_name: str, root: Path = ROOT) -> list[Path]:
    """The cluster's groups that are there, the innermost first; Slurm's own are below them."""
    found: list[Path] = []
    for hierarchy in HIERARCHIES:
        for directory, _, _ in os.walk(root / hierarchy / cluster_name, topdown=False):
            found.append(Path(directory))
    return found


def remove_groups(cluster_name: str, root: Path = ROOT) -> None:
    """Remove the cluster's groups; no process may be left in them.

    A process leaves its group a moment after it has gone from /proc, so a group that is busy is tried again.

    Raises:
        OSError: a group is still busy after some seconds.
    """
    deadline = time.monotonic() + _EMPTY_WITHIN_S
    while groups := groups_of(cluster_name, root):
        try:
            for group in groups:
                group.rmdir()
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOENT) or time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_S)


def enter(cluster_name: str) -> None:
    """Move this process, and all that it will start, into groups of the cluster that look like the machine's roots.

    Raises:
        OSError: the kernel refuses.
    """
    for hierarchy in HIERARCHIES:
        group = ROOT / hierarchy / cluster_name
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    kernel.unshare_mounts(also=kernel.CLONE_NEWCGROUP)
    for hierarchy in HIERARCHIES:
        kernel.mount_groups_anew(str(ROOT / hierarchy), hierarchy)
