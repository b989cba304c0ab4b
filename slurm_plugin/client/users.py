"""Users, as Slurm names them: by name, and by number where a host knows no name. Called by all that reads jobs."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
from collections.abc import Iterable
from dataclasses import replace

from hetstream.slurm_plugin.client.model import Job, Partition, Reservation


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


def with_members(reservations: Iterable[Reservation], jobs: Iterable[Job]) -> tuple[Reservation, ...]:
    """The reservations; of those that are of groups, with the users of pending jobs who are members on this host.

    Slurm names the groups alone, and slurmctld has a list of their members from its own host.
    """
    found, groups_of = tuple(reservations), dict[str, set[str]]()
    if not any(reservation.groups for reservation in found):
        return found
    for user in {job.user for job in jobs if job.is_pending}:
        groups_of[user] = _groups(user)
    return tuple(
        replace(
            reservation,
            users=tuple(user for user, names in sorted(groups_of.items()) if not names.isdisjoint(reservation.groups)),
        )
        if reservation.groups
        else reservation
        for reservation in found
    )


def with_allowed_members(partitions: Iterable[Partition], jobs: Iterable[Job]) -> tuple[Partition, ...]:
    """The partitions; of those that are for groups, with the users of pending jobs who are members on this host."""
    found = tuple(partitions)
    if not any(partition.allow_groups for partition in found):
        return found
    groups_of = {user: _groups(user) for user in {job.user for job in jobs if job.is_pending}}
    return tuple(
        replace(
            partition,
            members=tuple(
                user for user, names in sorted(groups_of.items()) if not names.isdisjoint(partition.allow_groups)
            ),
        )
        if partition.allow_groups
        else partition
        for partition in found
    )


def _groups(user: str) -> set[str]:
    """Names and numbers of a user's groups; none where this host does not know the user."""
    try:
        gids = os.getgrouplist(user, pwd.getpwnam(user).pw_gid)
    except KeyError:
        return set()
    found = {str(gid) for gid in gids}
    for gid in gids:
        with contextlib.suppress(KeyError):
            found.add(grp.getgrgid(gid).gr_name)
    return found
