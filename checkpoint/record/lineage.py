"""Which records a training goes on from, and which of them all its ranks restore. Pure.

A training is a line of records. Each start of the job goes on behind the newest of them, until the user goes back: by
`restore(step=)`, or by deleting the newest checkpoint. Then the line leads from the record that was gone back to
straight to the attempt that did so, and what lies between is *left behind*: it is never chosen again unless its step is
asked for, whatever becomes newest. Going back to a record that was left behind makes it part of the line again.

The checkpointer of every rank asks with the same offers what to restore. The newest generation that every rank has
wins: in its memory, in another host's, or on disk. What was newer and had to be passed over is named with the reason: a
training that silently goes back is the worst that a checkpoint can do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec

from hetstream.base.text import count_words, list_words
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
        """Return whether a start was one of this directory, and not one of its copy's or of what has its name."""
        directory_id, _, start = start_id.partition("-")
        return directory_id == self.directory_id and (not start or start in self.starts)

    def left_by(self, generation: Generation) -> Branch | None:
        """Return the branch by which a record was left behind; None: it is on the line."""
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
        """Return whether a record is on the line."""
        return self.left_by(generation) is None

    def newest(self, generations: Iterable[Generation]) -> Generation | None:
        """Return the newest of some records that is on the line."""
        return max(filter(self.holds, generations), default=None)

    def gone_back(self, attempt: int, start: Generation | None) -> Lineage:
        """Return the line once an attempt, the newest, has gone back to a record."""
        others = [branch for branch in self.branches if branch.attempt != attempt]
        branches = sorted([*others, Branch(attempt, start)], key=lambda branch: branch.attempt, reverse=True)
        return msgspec.structs.replace(self, branches=tuple(branches))


def is_newest_removed(lineage: Lineage, there: Collection[Generation], known: Iterable[Generation]) -> bool:
    """Return whether somebody has deleted the newest checkpoint of the line. Retention never does.

    Args:
        lineage: of the directory.
        there: its committed checkpoints.
        known: generations that checkpoint writers have seen committed.
    """
    seen, newest = lineage.newest(known), lineage.newest(there)
    return seen is not None and (newest is None or seen > newest)


Source = Literal["memory", "replica", "disk"]


class OfferedRecord(msgspec.Struct, frozen=True):
    """A whole record that a rank can read.

    Attributes:
        generation: which.
        world_size: ranks that saved it.
        shared_elsewhere: as in `Record`; it is of use beside the record of a rank that has the shared keys.
    """

    generation: Generation
    world_size: int
    shared_elsewhere: bool = False


class Replica(msgspec.Struct, frozen=True):
    """A whole record of another rank that a host's memory holds.

    Attributes:
        rank: whose it is.
        generation: which.
        world_size: ranks that saved it.
        shared_elsewhere: as in `OfferedRecord`.
    """

    rank: int
    generation: Generation
    world_size: int
    shared_elsewhere: bool = False


class Offer(msgspec.Struct, frozen=True):
    """What one rank could restore from.

    Attributes:
        memory: records in this host's memory.
        disk: committed checkpoints that this rank can see.
        problems: what is there and cannot be used, in words.
        replicas: records of other ranks in this host's memory.
        unfetchable: generations of this rank that could not be brought from other hosts.
        host: whose memory it is; the same text for ranks that can read each other's; "" where that is not known.
        unusable: generations on disk that this rank has found to be of no use.
        unread: generations on disk that another release of hetstream wrote, with what is said of them.
    """

    memory: list[OfferedRecord] = []
    disk: list[OfferedRecord] = []
    problems: list[str] = []
    replicas: list[Replica] = []
    unfetchable: list[Generation] = []
    host: str = ""
    unusable: list[Generation] = []
    unread: list[tuple[Generation, str]] = []

    def without(self, generation: Generation, source: Source, problem: str) -> Offer:
        """Return the offer after a record of it turned out to be unusable."""
        memory = [held for held in self.memory if source != "memory" or held.generation != generation]
        disk = [held for held in self.disk if source != "disk" or held.generation != generation]
        unfetchable = [*self.unfetchable, *([generation] if source == "replica" else [])]
        unusable = [*self.unusable, *([generation] if source == "disk" else [])]
        problems = [*self.problems, problem]
        return Offer(memory, disk, problems, self.replicas, unfetchable, self.host, unusable, self.unread)


class Choice(msgspec.Struct, frozen=True):
    """What all ranks do.

    Attributes:
        generation: to restore; None: nothing is there.
        world_size: ranks that saved it.
        sources: by rank.
        notes: what was passed over and why, newest first; then the problems of each rank.
        holders: by rank, the ranks on whose hosts its record is, where the source is `replica`.
        sharers: by rank, the rank of its host whose record in memory has the shared keys for it; None: its own has.
    """

    generation: Generation | None
    world_size: int
    sources: list[Source]
    notes: list[str]
    holders: list[list[int]] = []
    sharers: list[int | None] = []


def with_disk(offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers of all ranks where one rank of each host, the lowest, has looked at the disk for the others."""
    first: dict[str, Offer] = {}
    for offer in offers:
        first.setdefault(offer.host, offer)
    return [
        msgspec.structs.replace(
            offer, disk=[held for held in first[offer.host].disk if held.generation not in offer.unusable]
        )
        if offer.host
        else offer
        for offer in offers
    ]


def steps_of(offers: Sequence[Offer], lineage: Lineage) -> tuple[list[int], list[int]]:
    """Return the steps that every rank can restore, ascending: those of the line, and others that were left behind.

    Args:
        offers: of every rank, by rank.
        lineage: of the directory.
    """
    found = _Found(offers)
    whole = {generation for generation in found.known if not found.missing(generation)}
    line = {generation.step for generation in whole if lineage.holds(generation)}
    return sorted(line), sorted({generation.step for generation in whole} - line)


def choose_generation(offers: Sequence[Offer], lineage: Lineage = Lineage(), step: int | None = None) -> Choice:  # noqa: B008
    """Choose the newest generation that every rank can restore: from its memory, another host's, or the disk.

    Args:
        offers: of every rank, by rank.
        lineage: of the directory: what was left behind is not chosen.
        step: choose one of this step; where no other is to be had, also one that was left behind.
    """
    found = _Found(offers)
    memory, disk, replica = found.memory, found.disk, found.replica

    def is_wanted(generation: Generation) -> bool:
        return lineage.holds(generation) if step is None else generation.step == step

    def age(generation: Generation) -> tuple[bool, Generation]:
        return lineage.holds(generation), generation

    notes: list[str] = []
    chosen: Generation | None = None
    for generation in sorted(filter(is_wanted, found.known), key=age, reverse=True):
        missing = found.missing(generation)
        if not missing:
            chosen = generation
            break
        notes.append(f"{generation} is passed over: {_why(generation, offers, missing)}")
    notes += [
        f"rank {rank}: {problem}" if len(offers) > 1 else problem
        for rank, offer in enumerate(offers)
        for problem in offer.problems
    ]
    if chosen is None:
        return Choice(None, 0, [], notes)
    sources: list[Source] = [
        "memory" if chosen in memory[rank] else "replica" if chosen in replica[rank] else "disk"
        for rank in range(len(offers))
    ]
    on_disk = [of_rank[chosen] for of_rank in disk if chosen in of_rank]
    return Choice(
        chosen,
        on_disk[0] if on_disk else len(offers),
        sources,
        notes,
        [replicas.get(chosen, []) for replicas in replica],
        [
            found.sharers[offer.host, chosen] if sources[rank] != "disk" and (rank, chosen) in found.lacking else None
            for rank, offer in enumerate(offers)
        ],
    )


def on_its_way(offers: Sequence[Offer], lineage: Lineage, choice: Choice) -> Generation | None:
    """Return the newest generation that another number of ranks has left in memory, and that is newer than the choice:
    the checkpoint writers of those ranks bring it to disk, where any number can read it.
    """
    records = [(held.generation, held.world_size) for offer in offers for held in offer.memory]
    records += [(replica.generation, replica.world_size) for offer in offers for replica in offer.replicas]
    held = {each for each, size in records if size != len(offers) and lineage.holds(each)}
    newer = [each for each in held if choice.generation is None or each > choice.generation]
    return max(newer, default=None)


class _Found:
    """What ranks can restore.

    Args:
        offers: of every rank, by rank.

    Attributes:
        memory: by rank, the generations in its memory.
        disk: by rank, the generations that it sees on disk, each with the number of ranks that saved it.
        replica: by rank, the generations that it could get from elsewhere, and from which ranks' hosts.
        known: the generations that any rank has heard of.
        lacking: the ranks and generations whose records in memory are without the shared keys. In `memory` and
            `replica` are those alone whose host has a sharer.
        sharers: by host and generation, the lowest rank whose record in memory has the shared keys.
    """

    def __init__(self, offers: Sequence[Offer]) -> None:
        # A record in memory is one rank's own: with another number of ranks only the disk has all of them.
        self.memory = [{held.generation for held in offer.memory if held.world_size == len(offers)} for offer in offers]
        self.disk = [{held.generation: held.world_size for held in offer.disk} for offer in offers]
        self.replica = _replicas(offers)
        self.known = {held.generation for offer in offers for held in (*offer.memory, *offer.disk)}
        self.known |= {replica.generation for offer in offers for replica in offer.replicas}
        self.lacking = {
            (replica.rank, replica.generation)
            for offer in offers
            for replica in offer.replicas
            if replica.shared_elsewhere
        }
        for rank, offer in enumerate(offers):
            self.lacking |= {(rank, held.generation) for held in offer.memory if held.shared_elsewhere}
        self.sharers: dict[tuple[str, Generation], int] = {}
        for rank, offer in enumerate(offers):
            for generation in {*self.memory[rank], *self.replica[rank]}:
                if (rank, generation) not in self.lacking:
                    self.sharers.setdefault((offer.host, generation), rank)
        for rank, generation in self.lacking:
            if rank < len(offers) and (offers[rank].host, generation) not in self.sharers:
                self.memory[rank].discard(generation)
                self.replica[rank].pop(generation, None)

    def missing(self, generation: Generation) -> list[int]:
        """Return the ranks that cannot restore a generation."""
        everywhere = zip(self.memory, self.replica, self.disk, strict=True)
        return [rank for rank, places in enumerate(everywhere) if not any(generation in place for place in places)]


def _replicas(offers: Sequence[Offer]) -> list[dict[Generation, list[int]]]:
    """For each rank, which generations it could get from elsewhere, and from which ranks' hosts.

    It goes through the rank's own memory, where nothing may come after something newer.
    """
    found: list[dict[Generation, list[int]]] = [{} for _ in offers]
    newest = [max((held.generation for held in offer.memory), default=None) for offer in offers]
    for holder, offer in enumerate(offers):
        for replica in offer.replicas:
            if replica.world_size != len(offers) or not 0 <= replica.rank < len(offers):
                continue
            own = newest[replica.rank]
            if replica.generation not in offers[replica.rank].unfetchable and (
                own is None or own <= replica.generation
            ):
                found[replica.rank].setdefault(replica.generation, []).append(holder)
    return found


def _why(generation: Generation, offers: Sequence[Offer], missing: Sequence[int]) -> str:
    sizes = {held.world_size for offer in offers for held in offer.memory if held.generation == generation}
    sizes |= {replica.world_size for offer in offers for replica in offer.replicas if replica.generation == generation}
    if sizes - {len(offers)}:
        return (
            f"it is in memory only and was saved by {count_words(max(sizes), 'rank')}, now there are {len(offers)}; "
            "the disk has no such checkpoint"
        )
    lacking = _Found(offers).lacking
    if all((rank, generation) in lacking for rank in missing):
        first = missing[0]
        return f"rank {first} has its own part, and no rank on its host has the part that is equal on all"
    having = [str(rank) for rank in range(len(offers)) if rank not in missing]
    where = f"it is only on {list_words('rank', having)}" if having else "no rank has it whole"
    return f"{where}, of {count_words(len(offers), 'rank')}"
