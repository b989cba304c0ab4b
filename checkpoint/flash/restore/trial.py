"""One generation, tried on all ranks: each checks its own part, and none applies it before all have found theirs whole.

Called by `candidates.py`, which tries the next one if this one cannot be used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.errors import Damaged, MissingRanks, NoCheckpoint
from hetstream.checkpoint.flash.distributed import Communicator, gather, together
from hetstream.checkpoint.flash.host import Host
from hetstream.checkpoint.flash.ports import RecordsElsewhere
from hetstream.checkpoint.flash.restore.source import DiskSource, MemorySource
from hetstream.checkpoint.flash.restore.stored import StoredPart
from hetstream.checkpoint.record.agreement import Choice

_WHERE = {"memory": "in memory", "replica": "in the memory of another host", "disk": "on disk"}


class Destination(Protocol):
    """Where a generation goes, in two phases: all ranks have prepared it before one of them applies it."""

    def begin(self) -> None:
        """There is something to restore. Every rank calls it, before one of them can fail: the program's objects may
        talk to each other when they are asked for their state."""

    def prepare(self, parts: list[StoredPart], choice: Choice) -> None:
        """Look at all of it and change nothing; called again with another one where this cannot be used.

        Args:
            parts: what was saved.
            choice: of the generation.

        Raises:
            Damaged: it cannot be used.
        """

    def apply(self) -> None:
        """Use what was prepared last."""


@dataclass(frozen=True)
class Applied:
    """The generation has come to its destination, on all ranks."""


@dataclass(frozen=True)
class UnusableHere:
    """This rank cannot use what it has of the generation.

    Attributes:
        problem: why.
    """

    problem: str


@dataclass(frozen=True)
class UnusableElsewhere:
    """Another rank cannot use what it has of the generation, and this one can."""


Outcome = Applied | UnusableHere | UnusableElsewhere


@dataclass(frozen=True)
class Sources:
    """What this rank can restore from.

    Attributes:
        directory: of the checkpoints.
        memory: of this rank; None: the disk alone counts.
        elsewhere: records that other hosts keep; None without.
        host: of this rank; None: each rank is for itself.
    """

    directory: CheckpointDirectory
    memory: MemorySource | None = None
    elsewhere: RecordsElsewhere | None = None
    host: Host | None = None


class Trial:
    """A choice of all ranks, tried on one of them.

    Args:
        ranks: that try it together.
        sources: of this rank.
        choice: of a generation.
        destination: where it goes.
    """

    def __init__(self, ranks: Communicator, sources: Sources, choice: Choice, destination: Destination) -> None:
        assert choice.generation is not None
        self._generation = choice.generation
        self._ranks = ranks
        self._sources = sources
        self._choice = choice
        self._destination = destination
        self._source = choice.sources[ranks.rank]
        self._problem = ""
        self._disk: DiskSource | None = None
        self._held = contextlib.ExitStack()

    def run(self) -> Outcome:
        """Fetch, compare, prepare, apply. Each phase ends on all ranks before the next one begins: others of the host
        use what was fetched, and what was compared."""
        with self._held:
            if "replica" in self._choice.sources:
                self._on_all(self._fetch)
            if "disk" in self._choice.sources:
                self._on_all(self._compare)
            if any(gather(self._ranks, bool(self._problem))):
                return self._failure()
            self._on_all(self._prepare)
            if any(gather(self._ranks, bool(self._problem))):
                return self._failure()
            together(self._ranks, self._destination.apply)
        return Applied()

    def _failure(self) -> UnusableHere | UnusableElsewhere:
        return UnusableHere(self._problem) if self._problem else UnusableElsewhere()

    def _fetch(self) -> None:
        """Bring this rank's record from another host into its memory."""
        if self._source == "replica" and self._sources.elsewhere:
            self._sources.elsewhere.fetch(self._generation, self._choice.holders[self._ranks.rank])

    def _compare(self) -> None:
        """Compare this rank's share of the files with their checksums."""
        if self._source != "disk":
            return
        rank, host = self._ranks.rank, self._sources.host
        neighbours = host.stores if host else (rank,)
        readers = [neighbour for neighbour in neighbours if self._choice.sources[neighbour] == "disk"]
        num_ranks, num_saved = len(self._choice.sources), self._choice.world_size
        directory = self._sources.directory
        self._disk = DiskSource(directory, self._generation, rank, num_ranks, num_saved, readers, self._held)
        self._disk.compare()

    def _prepare(self) -> None:
        """Open what this rank restores from, and show it to the destination."""
        parts: list[StoredPart] = []
        if self._disk:
            parts = self._disk.open()
        elif self._sources.memory:
            sharer = self._choice.sharers[self._ranks.rank]
            parts = self._held.enter_context(self._sources.memory.open(self._generation, sharer))
        self._destination.prepare(parts, self._choice)

    def _on_all(self, phase: Callable[[], None]) -> None:
        """Go through a phase on every rank; what is wrong with this rank's record is its problem from then on."""

        def attempt() -> None:
            if self._problem:
                return
            try:
                phase()
            except (Damaged, NoCheckpoint, MissingRanks, OSError) as error:
                self._problem = f"{self._generation} {_WHERE[self._source]} is not usable: {error}"
                if self._source == "disk" and not self._sources.directory.has(self._generation):
                    path = self._sources.directory.path
                    self._problem = f"{self._generation} was removed from {path} while it was read"

        together(self._ranks, attempt)
