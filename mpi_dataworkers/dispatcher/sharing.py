"""Which data worker made which batch of a stream that several jobs read. Pure; used by `shared_streams.py`.

Sessions with one share key read one endless stream of batches: position = epoch * steps of an epoch + step (+ a shift,
in window mode). The dispatcher leases a position that a worker has made, or is making, to that worker again, which
serves it from its cache (`mpi_dataworkers/worker/cache.py`). What is kept here are hints: a wrong one costs making a
batch again, never a wrong batch.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hetstream.mpi_dataworkers.dispatcher.matching import is_same_process
from hetstream.mpi_dataworkers.wire.messages import ProvidePipeline, Ranges, RegisterLoader

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
        """Whether this position was given to a worker before."""
        at = bisect.bisect_right(self._leased, (position, 1 << 62)) - 1
        return at >= 0 and position < self._leased[at][1]

    def holder(self, position: int) -> str | None:
        """The worker that has, or soon will have, this position in its cache."""
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
        """Where a new reader in window mode begins that would begin at `position`: not ahead of everybody."""
        return position if self.head is None else min(position, self.head)

    def follow(self, position: int) -> int:
        """Where a reader in window mode goes on that would read `position` next: past what has left the caches."""
        if self.head is None or position >= self.head or position in self._holders:
            return position
        return min((held for held in self._holders if held > position), default=self.head)


class ShareGroups:
    """The streams that are read now; one is forgotten with its last session."""

    def __init__(self) -> None:
        self._groups: dict[str, ShareGroup] = {}

    def join(self, key: str, session_id: str) -> ShareGroup:
        """A session begins to read the stream."""
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
        """The stream, while somebody reads it."""
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
