"""Users, as Slurm names them: by name, and by number where a host knows no name. Called by the daemon and commands."""

from __future__ import annotations

import os
import pwd

from hetstream.slurm_plugin.client.model import Job


def names_of(uid: int) -> set[str]:
    """How Slurm may name a user. A name that is a number is left out: it would be another user's."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return {str(uid)}
    return {str(uid)} if name.isdecimal() else {str(uid), name}


def is_own(job: Job) -> bool:
    """Whether a job is this user's: by number where Slurm tells it, as each host has its own list of names."""
    return job.uid == os.geteuid() if job.uid is not None else job.user in names_of(os.geteuid())


def uid_of(name: str) -> int | None:
    """The user id of a name or number; None of a name that this host does not know."""
    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None
