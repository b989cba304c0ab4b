"""Which records a training goes on from after its user has gone back to an earlier one. Pure.

A training is a line of records. Each start of the job goes on behind the newest of them, until the user goes back: by
`restore(step=)`, or by deleting the newest checkpoint. Then the line leads from the record that was gone back to
straight to the attempt that did so, and what lies between is *left behind*: it is never chosen again unless its step is
asked for, whatever becomes newest. Going back to a record that was left behind makes it part of the line again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from hetstream.checkpoint.record.layout import Generation

_BEFORE_ALL = Generation(0, 0)


class Branch(msgspec.Struct, frozen=True):
    """An attempt that did not go on from the newest record, because the user said so.

    Attributes:
        attempt: its number.
        start: the record that it went on from; None: it began anew.
    """

    attempt: int
    start: Generation | None = None

    def __str__(self) -> str:
        return f"attempt {self.attempt} " + (f"went back to step {self.start.step}" if self.start else "began anew")


class Lineage(msgspec.Struct, frozen=True):
    """The line of a directory's records.

    Attributes:
        directory_id: random text that no other directory has, nor the same one once it was deleted and made again;
            "" where there is no directory of this release.
        branches: where the line does not lead through all records, the newest attempt first.
        starts: random texts of the job's starts in it, the newest first. A copy has the id of its original, and those
            starts that the original had by then.
        path: of the directory at its newest start, for people; "" if an earlier release wrote this.
    """

    directory_id: str = ""
    branches: tuple[Branch, ...] = ()
    starts: tuple[str, ...] = ()
    path: str = ""

    @property
    def start_id(self) -> str:
        """Of the newest start: the directory's id and the start's own."""
        return f"{self.directory_id}-{self.starts[0]}" if self.starts else self.directory_id

    def knows(self, start_id: str) -> bool:
        """Whether a start was one of this directory, and not one of its copy's or of what has its name."""
        directory_id, _, start = start_id.partition("-")
        return directory_id == self.directory_id and (not start or start in self.starts)

    def left_by(self, generation: Generation) -> Branch | None:
        """The branch by which a record was left behind; None: it is on the line."""
        limit: Generation | None = None
        leaving: Branch | None = None
        for branch in self.branches:
            if limit is not None and branch.attempt > limit.attempt:
                continue  # it was left behind itself
            if generation.attempt >= branch.attempt:
                break
            limit, leaving = branch.start or _BEFORE_ALL, branch
        return leaving if limit is not None and generation > limit else None

    def holds(self, generation: Generation) -> bool:
        """Whether a record is on the line."""
        return self.left_by(generation) is None

    def newest(self, generations: Iterable[Generation]) -> Generation | None:
        """The newest of some records that is on the line."""
        return max(filter(self.holds, generations), default=None)

    def gone_back(self, attempt: int, start: Generation | None) -> Lineage:
        """The line once an attempt, the newest, has gone back to a record."""
        others = [branch for branch in self.branches if branch.attempt != attempt]
        branches = sorted([*others, Branch(attempt, start)], key=lambda branch: branch.attempt, reverse=True)
        return msgspec.structs.replace(self, branches=tuple(branches))


def is_newest_removed(lineage: Lineage, there: Collection[Generation], known: Iterable[Generation]) -> bool:
    """Whether somebody has deleted the newest checkpoint of the line. Retention never does.

    Args:
        lineage: of the directory.
        there: its committed checkpoints.
        known: generations that checkpoint writers have seen committed.
    """
    seen, newest = lineage.newest(known), lineage.newest(there)
    return seen is not None and (newest is None or seen > newest)
