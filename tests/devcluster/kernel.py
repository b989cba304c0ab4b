"""Calls of the kernel that Python does not have, or only from 3.12 on: namespaces, mounts, adoption of orphans.

Called by the supervisor and its children before they become daemons. Each raises OSError where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
# <sched.h>, <sys/mount.h> and <sys/prctl.h>
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x02000000, 0x04000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 4096, 16384, 1 << 19
_MNT_DETACH = 2
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Let orphans below this process become its children instead of init's."""
    _check(_LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl PR_SET_CHILD_SUBREAPER")


def enter_namespace(path: os.PathLike[str], kind: int) -> None:
    """Move this process to a namespace that has a name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_LIBC.setns(descriptor, kind), f"setns {path}")
    finally:
        os.close(descriptor)


def unshare_mounts(also: int = 0) -> None:
    """Give this process mounts of its own: those of the machine still arrive here, and none of these goes back.

    Args:
        also: namespaces of other kinds that it shall have of its own, too.
    """
    _check(_LIBC.unshare(CLONE_NEWNS | also), "unshare mounts")
    _check(_LIBC.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "mount --make-rslave /")


def bind(source: str, place: str) -> None:
    """Let a file or directory be seen in the place of another."""
    _check(_LIBC.mount(source.encode(), place.encode(), None, _MS_BIND, None), f"mount --bind {source} {place}")


def mount_memory(place: str) -> None:
    """Mount a file system in memory that all users may write to."""
    flags = _MS_NOSUID | _MS_NODEV
    _check(_LIBC.mount(b"tmpfs", place.encode(), b"tmpfs", flags, b"mode=1777"), f"mount {place}")


def mount_groups_anew(place: str, hierarchy: str) -> None:
    """Mount a hierarchy of control groups (version 1) over itself: its root is then the group of this process."""
    # The kernel mounts no file system twice at one place.
    _check(_LIBC.umount2(place.encode(), _MNT_DETACH), f"umount {place}")
    _check(_LIBC.mount(b"cgroup", place.encode(), b"cgroup", 0, hierarchy.encode()), f"mount {place}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
