"""What a user is called. Reads this host's list of users, asks nobody else."""

from __future__ import annotations

import pwd


def user_name(uid: int) -> str:
    """The name of a user, or the number where this host has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
