"""Which loaders of the ranks of one job belong together, and when two of them cannot. Pure; used by `loaders.py`.

Loaders of two ranks are the same if they have one description, and one number among those of it in their process. That
one rank has loaders which another has not is no error: rank 0 alone validates. These are:

* two processes that are the same rank of one job and whose n-th loaders differ: two programs of one name;
* two ranks that divide their data, and differ in what the same lines of the program made: each would read its share of
  other data, and nobody would notice.

A loader that divides its data with ranks that never make it reads a share of which nobody has the rest. When it was
made nobody can know; it is told when it has taken steps and a minute is over.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from hetstream.mpi_dataworkers.wire.messages import RegisterLoader


def description_of(loader: RegisterLoader) -> Hashable:
    """What two loaders that belong together have in common, but for the number of their kind."""
    return loader.job_name, frozenset(loader.description.items())


def key_of(loader: RegisterLoader) -> Hashable:
    """The same for the loaders of all ranks that belong together."""
    return description_of(loader), loader.occurrence


def is_same_process(first: RegisterLoader, second: RegisterLoader) -> bool:
    """Whether one process made both loaders."""
    return (first.host, first.pid) == (second.host, second.pid)


def cannot_be_one_job(ours: RegisterLoader, theirs: RegisterLoader, loaders: Collection[RegisterLoader]) -> bool:
    """Whether two loaders of one job name prove that their programs do not read the same data.

    Args:
        ours, theirs: the loaders.
        loaders: all that are there.
    """
    if theirs.job_name != ours.job_name or theirs.description == ours.description:
        return False
    if ours.rank != theirs.rank:
        at_one_place = ours.place == theirs.place != ""
        return at_one_place and ours.divides and theirs.divides and ours.world_size == theirs.world_size
    if is_same_process(ours, theirs) or ours.ordinal != theirs.ordinal:
        return False
    # A process that is started again may leave out loaders that the old one has.
    return not any(
        description_of(loader) == description_of(ours) and is_same_process(loader, theirs) for loader in loaders
    )


def conflict(ours: RegisterLoader, theirs: RegisterLoader) -> str:
    """Say in what two loaders differ that belong together."""
    keys = sorted({*theirs.description, *ours.description})
    differences = [
        f"{key}: {theirs.description.get(key)} there, {ours.description.get(key)} here"
        for key in keys
        if theirs.description.get(key) != ours.description.get(key)
    ]
    where = f", at {ours.made_at}" if ours.rank != theirs.rank else ""
    return (
        f"job name {ours.job_name!r} is in use by process {theirs.pid} on {theirs.host}, rank {theirs.rank}, with "
        f"another pipeline{where} ({'; '.join(differences)}). Ranks of one job name must read the same data: give a "
        "loader that is this rank's alone rank=0, world_size=1, and another program another job_name (or "
        "HETSTREAM_JOB_NAME)."
    )


class RanksSeen:
    """Which ranks have, or had, a loader, for as long as a loader of the job is there."""

    def __init__(self) -> None:
        self._ranks: dict[Hashable, set[int]] = {}
        self._of_job: dict[str, set[Hashable]] = {}

    def note(self, loader: RegisterLoader) -> None:
        """A loader is there."""
        if loader.divides:
            description = description_of(loader)
            self._ranks.setdefault(description, set()).add(loader.rank)
            self._of_job.setdefault(loader.job_name, set()).add(description)

    def forget(self, job_name: str) -> None:
        """No loader of the job is there any more."""
        for description in self._of_job.pop(job_name, ()):
            del self._ranks[description]

    def missing(self, loader: RegisterLoader) -> list[int]:
        """The ranks with which a loader divides its data, and that never had it."""
        if not loader.divides:
            return []
        return sorted(set(range(loader.world_size)) - self._ranks.get(description_of(loader), set()))
