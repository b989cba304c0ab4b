"""Which data worker made which batch of a stream that several jobs read. Pure.

Sessions with one share key read one endless stream of batches: position = epoch * steps of an epoch + step (+ a shift,
in window mode). The dispatcher leases a position that a worker has made, or is making, to that worker again, which
serves it from its cache (`mpi_dataworkers/worker/steps.py`). What is kept here are hints: a wrong one costs making a
batch again, never a wrong batch.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import NamedTuple

from hetstream.mpi_dataworkers.dispatcher.tables import Lease, Session
from hetstream.mpi_dataworkers.wire.messages import OpenSession, ProvidePipeline, Ranges, RegisterLoader

# Which loaders of the ranks of one job belong together, and when two of them cannot. Pure; used by `peers.py`.
#
# Loaders of two ranks are the same if they have one description, and one number among those of it in their process.
# That one rank has loaders which another has not is no error: rank 0 alone validates. These are:
#
# * two processes that are the same rank of one job and whose n-th loaders differ: two programs of one name;
# * two ranks that divide their data, and differ in what the same lines of the program made: each would read its share
#   of other data, and nobody would notice.
#
# A loader that divides its data with ranks that never make it reads a share of which nobody has the rest. When it was
# made nobody can know; it is told when it has taken steps and a minute is over.


def description_of(loader: RegisterLoader) -> Hashable:
    """Job name and description: alike in the loaders of all ranks that read one data set together."""
    return loader.job_name, frozenset(loader.description.items())


def key_of(loader: RegisterLoader) -> Hashable:
    """Key that the loaders of all ranks share which read one data set together."""
    return description_of(loader), loader.occurrence


def is_same_process(first: RegisterLoader, second: RegisterLoader) -> bool:
    """Return whether one process made both loaders."""
    return (first.host, first.pid) == (second.host, second.pid)


def cannot_be_one_job(ours: RegisterLoader, theirs: RegisterLoader, loaders: Collection[RegisterLoader]) -> bool:
    """Return whether two loaders of one job name prove that their programs do not read the same data.

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
        """Return the ranks with which a loader divides its data, and that never had it."""
        if not loader.divides:
            return []
        return sorted(set(range(loader.world_size)) - self._ranks.get(description_of(loader), set()))


# Positions of one stream whose makers are remembered; workers say which of them left their caches.
_MAX_POSITIONS = 8192

# What two pipelines of one name must have in common.
_STRUCTURE = ("dataset", "length", "collate_fn", "batched")


def different_under_one_name(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Say how two loaders' pipelines differ that have one explicit `pipeline_name`; empty when they may share."""
    name = ours.get("pipeline_name", "")
    if not name or theirs.get("pipeline_name", "") != name:
        return ""
    parts = [
        f"{key}: {theirs.get(key)} there, {ours.get(key)} here"
        for key in _STRUCTURE
        if theirs.get(key) != ours.get(key)
    ]
    if not parts:
        return ""
    return (
        f"pipeline name {name!r} is in use for another pipeline ({'; '.join(parts)}). Loaders that share batches under "
        "one pipeline_name must read the same data; give this one another name."
    )


class Reader(NamedTuple):
    """One pass of a loader.

    Attributes:
        loader: who reads.
        key: of its stream; "" if it does not share.
        pipeline: its pipeline; None if that is not here.
    """

    loader: RegisterLoader
    key: str
    pipeline: ProvidePipeline | None


def shares_with_nobody(ours: Reader, others: Iterable[Reader]) -> str:
    """Say why a pass that is to be shared is not, though another job's looks the same; empty when it is, or none does.

    Args:
        ours: the pass.
        others: all others that are read now.
    """
    loader = ours.loader
    if not ours.key or loader.description.get("pipeline_name", ""):
        return ""
    alike = [
        other
        for other in others
        if other.key
        and not is_same_process(loader, other.loader)
        and (other.loader.rank, other.loader.world_size) == (loader.rank, loader.world_size)
        and other.loader.description == loader.description
    ]
    if not alike or any(other.key == ours.key for other in alike):
        return ""
    theirs = alike[0]
    return (
        f"the loader of job {loader.job_name!r} shares no batches with the one of job {theirs.loader.job_name!r}, "
        "whose dataset has the same class and length: without a pipeline_name only what is the same to the last byte "
        f"is shared, and {_different_in(theirs.pipeline, ours.pipeline)}. If the two read the same data, give "
        "both one pipeline_name."
    )


def _different_in(theirs: ProvidePipeline | None, ours: ProvidePipeline | None) -> str:
    """In what two pipelines differ, as the end of a sentence."""
    if theirs is None or ours is None:
        return "what travels to the data workers differs"
    if theirs.program.working_dir != ours.program.working_dir:
        return f"they run in {theirs.program.working_dir} there, in {ours.program.working_dir} here"
    parts = {
        "the directories that they import from": theirs.program.sys_path != ours.program.sys_path,
        "modules of theirs": theirs.program.modules != ours.program.modules,
        "their command lines, their environment or other settings": theirs.settings != ours.settings,
        "the dataset or the functions with it": (theirs.blob, theirs.contents) != (ours.blob, ours.contents),
    }
    return " and ".join(part for part, differs in parts.items() if differs) + " differ"


class ShareGroup:
    """One stream of batches.

    Attributes:
        members: sessions that read it now.
        head: positions at or above it were never leased; None before the first lease.
    """

    def __init__(self) -> None:
        self.members: set[str] = set()
        self.head: int | None = None
        self._holders: OrderedDict[int, str] = OrderedDict()
        self._leased: Ranges = []

    def lease(self, first: int, stop: int, worker: str) -> None:
        """A worker is to make positions [first, stop)."""
        for position in range(first, stop):
            self._holders[position] = worker
            self._holders.move_to_end(position)
        while len(self._holders) > _MAX_POSITIONS:
            self._holders.popitem(last=False)
        self.head = max(stop, self.head or 0)
        merged = (first, stop)
        apart: Ranges = []
        for begin, end in self._leased:
            if end < merged[0] or begin > merged[1]:
                apart.append((begin, end))
            else:
                merged = (min(begin, merged[0]), max(end, merged[1]))
        bisect.insort(apart, merged)
        self._leased = apart

    def was_leased(self, position: int) -> bool:
        """Return whether this position was given to a worker before."""
        at = bisect.bisect_right(self._leased, (position, 1 << 62)) - 1
        return at >= 0 and position < self._leased[at][1]

    def holder(self, position: int) -> str | None:
        """Return the worker that has, or soon will have, this position in its cache."""
        return self._holders.get(position)

    def drop(self, worker: str, ranges: Ranges) -> None:
        """These positions left the worker's cache."""
        for first, stop in ranges:
            for position in range(first, stop):
                if self._holders.get(position) == worker:
                    del self._holders[position]

    def lose(self, worker: str) -> None:
        """The worker is gone, with its cache."""
        for position in [position for position, holder in self._holders.items() if holder == worker]:
            del self._holders[position]

    def enter(self, position: int) -> int:
        """Return where a new reader in window mode begins that would begin at `position`: not ahead of everybody."""
        return position if self.head is None else min(position, self.head)

    def follow(self, position: int) -> int:
        """Return where a reader in window mode goes on that would read `position` next: past what has left the
        caches.
        """
        if self.head is None or position >= self.head or position in self._holders:
            return position
        return min((held for held in self._holders if held > position), default=self.head)


class ShareGroups:
    """The streams that are read now; one is forgotten with its last session."""

    def __init__(self) -> None:
        self._groups: dict[str, ShareGroup] = {}

    def join(self, key: str, session_id: str) -> ShareGroup:
        """Note that a session begins to read the stream. Return who reads it together."""
        group = self._groups.setdefault(key, ShareGroup())
        group.members.add(session_id)
        return group

    def leave(self, key: str, session_id: str) -> None:
        """A session ends."""
        group = self._groups.get(key)
        if group is not None:
            group.members.discard(session_id)
            if not group.members:
                del self._groups[key]

    def get(self, key: str) -> ShareGroup | None:
        """Return the stream, while somebody reads it."""
        return self._groups.get(key)

    def drop(self, worker: str, dropped: Mapping[str, Ranges]) -> None:
        """Positions left a worker's cache."""
        for key, ranges in dropped.items():
            if key in self._groups:
                self._groups[key].drop(worker, ranges)

    def lose(self, worker: str) -> None:
        """A worker is gone."""
        for group in self._groups.values():
            group.lose(worker)

    def __len__(self) -> int:
        return len(self._groups)


# Where sessions are in the streams that they share, and who has those batches in its cache. Pure.
#
# `ShareGroup` keeps each stream by itself; here are the sessions that read it.


class SharedStreams:
    """The streams that sessions share.

    Attributes:
        groups: the streams that are read now, by share key.
    """

    def __init__(self) -> None:
        self.groups = ShareGroups()

    def group_of(self, session: Session) -> ShareGroup | None:
        """Return the stream that a session shares; None if it shares none."""
        sharing = session.spec.sharing
        return self.groups.get(sharing.key) if sharing is not None else None

    def join(self, session: Session, message: OpenSession, held: list[Lease]) -> None:
        """A session is opened, of which data workers may hold leases already."""
        spec = session.spec
        if spec.sharing is None:
            return
        group = self.groups.join(spec.sharing.key, spec.session_id)
        shift = message.shift
        if _follows_window(session) and not (message.consumed or message.received or held):
            position = session.position(0) + shift
            shift += group.enter(max(0, position)) - position
        session.shifts = [(0, shift)]
        for lease in held:
            self.note_lease(lease, session)

    def leave(self, session: Session) -> None:
        """A session is closed."""
        if session.spec.sharing is not None:
            self.groups.leave(session.spec.sharing.key, session.spec.session_id)

    def follow(self, session: Session, group: ShareGroup) -> None:
        """In window mode, move a session on whose next steps have left the caches."""
        if session.requeued or not _follows_window(session):
            return
        position = session.position(session.frontier)
        moved = group.follow(position) - position
        if moved:
            session.shifts.append((session.frontier, session.shift(session.frontier) + moved))

    def note_lease(self, lease: Lease, session: Session) -> None:
        """A worker still makes these steps of a session, says the worker: others of the group get them there too."""
        group = self.group_of(session)
        if group is not None:
            if lease.shift != session.shift(lease.first):
                session.shifts.append((lease.first, lease.shift))
                session.shifts.sort()
            group.lease(session.position(lease.first), session.position(lease.stop - 1) + 1, lease.worker)

    def fit(self, peer: str, session: Session, first: int, stop: int) -> tuple[int, bool, bool]:
        """Fit a lease of steps [first, stop) into the stream that the session shares.

        Returns:
            Where the lease must stop, so that all of it is alike; whether the worker has it in its cache, or will have;
            whether it was leased before.
        """
        group = self.group_of(session)
        if group is None:
            return stop, False, False
        self.follow(session, group)
        alike = _what_is_known(group, session, first)
        at = first + 1
        while at < stop and _what_is_known(group, session, at) == alike:
            at += 1
        holder, again, _ = alike
        cached = holder == peer
        if not cached:
            group.lease(session.position(first), session.position(at - 1) + 1, peer)
        return at, cached, again


def _what_is_known(group: ShareGroup, session: Session, step: int) -> tuple[str | None, bool, int]:
    position = session.position(step)
    return group.holder(position), group.was_leased(position), session.shift(step)


def _follows_window(session: Session) -> bool:
    return session.spec.sharing is not None and session.spec.sharing.mode == "window"
