"""What a user or a group is called. Reads this host's lists, asks nobody else."""

from __future__ import annotations

import grp
import pwd


def user_name(uid: int) -> str:
    """The name of a user, or the number where this host has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """The name of a group, or the number where this host has no name for it."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
