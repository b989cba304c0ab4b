"""What all ranks can restore, newest first: the communication behind `record/lineage.py`.

Called by `destinations.py`. Each rank offers what it has, all choose the same generation, and try it (`RestoreTrial`).
If it is not whole on every rank, they choose the next one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.errors import Damaged, MissingRanks, NoCheckpoint, OtherRelease
from hetstream.checkpoint.flash.ownership import OtherHosts
from hetstream.checkpoint.flash.ranks import Communicator, Host, gather, together
from hetstream.checkpoint.flash.sources import DiskSource, MemorySource, StoredPart
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import (
    Choice,
    Lineage,
    Offer,
    OfferedRecord,
    Source,
    choose_generation,
    on_its_way,
    steps_of,
    with_disk,
)

# One generation, tried on all ranks: each checks its own part, and none applies it before all have found theirs whole.
#
# `RestoreCandidates` tries the next one if this one cannot be used.

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
    elsewhere: OtherHosts | None = None
    host: Host | None = None


class RestoreTrial:
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


_log = logging.getLogger(__name__)

_ON_DISK = "on disk: "
# A reader that holds nothing may find each newest one removed again; far more than any training keeps.
_MAX_TRIES = 1000
# What a killed training of another number of ranks has left in memory gets to disk in this time, or is passed over.
_ON_ITS_WAY_S = 20.0
_POLL_S = 0.05


class _RequestedStep(msgspec.Struct, frozen=True):
    """The step that a rank asks for; None: the newest."""

    step: int | None


@dataclass(frozen=True)
class RestoreCandidates:
    """The generations that all ranks can restore.

    Attributes:
        ranks: that have to agree.
        sources: of this rank.
        lineage: of the directory, the same on every rank.
    """

    ranks: Communicator
    sources: Sources
    lineage: Lineage

    def all_steps(self) -> tuple[list[int], list[int]]:
        """Return the steps that all ranks can restore, ascending: those of the line, and others that were left
        behind.
        """
        return steps_of(self._exchange(self._offer(with_left=True)), self.lineage)

    def newest(self) -> Choice:
        """Return the newest generation that all ranks have, as far as names and manifests tell."""
        return choose_generation(self._exchange(self._offer(with_left=False)), self.lineage)

    def restore_into(self, destination: Destination, step: int | None = None) -> Choice | None:
        """Bring the newest generation that is whole on all ranks to its destination. Every rank calls it.

        Args:
            destination: prepares and applies the generation.
            step: only generations of this step, also those that were left behind; None: the newest.

        Returns:
            The generation that was applied; None: there is none.

        Raises:
            OptionsError: the ranks have asked for different steps.
            NoCheckpoint: there are checkpoints on disk, and none of them can be used; or none of this step is there.
            OtherRelease: another release of hetstream wrote the newest one, or the one of this step.
        """
        self._check_same_step(step)
        tries = _Tries(self.sources.directory.path)
        offer = self._offer(with_left=step is not None)
        has_on_disk = bool(offer.disk) or any(problem.startswith(_ON_DISK) for problem in offer.problems)
        is_on_disk = any(gather(self.ranks, has_on_disk))
        has_waited = False
        while True:
            offers = self._exchange(offer)
            choice = choose_generation(offers, self.lineage, step)
            awaited = None if has_waited or step is not None else on_its_way(offers, self.lineage, choice)
            if awaited is not None:
                self._await_disk(awaited)
                offer, has_waited = tries.without_unusable(self._offer(with_left=False)), True
                continue
            _refuse_other_release(offers, choice, step)
            tries.log(choice.notes)
            if choice.generation is None:
                if step is not None:
                    path = self.sources.directory.path
                    raise NoCheckpoint(_why_not_this_step(step, offers, self.lineage, path, choice.notes))
                if is_on_disk:
                    raise self._none_usable(choice.notes)
                return None
            together(self.ranks, destination.begin)
            outcome = RestoreTrial(self.ranks, self.sources, choice, destination).run()
            if isinstance(outcome, Applied):
                return choice
            tries.note(choice.generation, choice.sources[self.ranks.rank], outcome)
            # What a training has saved meanwhile is newer than what this rank knew of.
            offer = tries.without_unusable(self._offer(with_left=step is not None))

    def _await_disk(self, generation: Generation) -> None:
        """Give the checkpoint writers of another number of ranks the time to bring what these have left to disk."""
        if self.ranks.rank == 0:
            _log.info("waiting for %s: another number of ranks has left it in memory, on its way to disk", generation)
        deadline_s = time.monotonic() + _ON_ITS_WAY_S
        while any(gather(self.ranks, not self.sources.directory.has(generation) and time.monotonic() < deadline_s)):
            time.sleep(_POLL_S)

    def _check_same_step(self, step: int | None) -> None:
        requests = gather(self.ranks, _RequestedStep(step))
        if any(request != requests[0] for request in requests):
            steps = ", ".join(str(request.step) for request in requests)
            raise OptionsError(f"the ranks ask for different steps, by rank: {steps}. All have to restore the same one")

    def _none_usable(self, notes: list[str]) -> NoCheckpoint:
        path, why = self.sources.directory.path, "; ".join(notes)
        none = f"none of the checkpoints in {path} can be used"
        if self.sources.directory.read_only:
            return NoCheckpoint(f"{none}: {why}. See hetstream ckpt verify {path}")
        return NoCheckpoint(
            f"{none}, and training does not begin anew without being told: {why}. See hetstream ckpt "
            f"verify {path}; to begin anew, delete it, or give another directory"
        )

    def _exchange(self, offer: Offer) -> list[Offer]:
        return with_disk(gather(self.ranks, offer))

    def _offer(self, *, with_left: bool) -> Offer:
        """What this rank has; what was left behind on disk only if that may be chosen, too."""
        sources, host = self.sources, self.sources.host
        memory, problems = sources.memory.offered() if sources.memory else ([], [])
        disk: list[OfferedRecord] = []
        unread: list[tuple[Generation, str]] = []
        for checkpoint in sources.directory.scan() if not host or host.holds_shared else ():
            if not with_left and not self.lineage.holds(checkpoint.generation):
                continue
            if checkpoint.problem:
                problems.append(f"{_ON_DISK}{checkpoint.generation} is not usable: {checkpoint.problem}")
                if checkpoint.is_of_other_release:
                    unread.append((checkpoint.generation, checkpoint.problem))
            else:
                disk.append(OfferedRecord(checkpoint.generation, checkpoint.world_size))
        replicas = sources.elsewhere.offered() if sources.elsewhere else []
        return Offer(memory, disk, problems, replicas, host=host.name if host else "", unread=unread)


class _Tries:
    """The generations that were tried in one restore and could not be used.

    Args:
        path: of the directory, for messages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._logged: set[str] = set()
        self._unusable: list[tuple[Generation, Source, str]] = []
        self._count = 0

    def log(self, notes: list[str]) -> None:
        """Log what is newer than the choice and cannot be used, each once."""
        for note in notes:
            if note not in self._logged:
                _log.warning("%s", note)
                self._logged.add(note)

    def note(self, generation: Generation, source: Source, outcome: UnusableHere | UnusableElsewhere) -> None:
        """A generation could not be used, here or on another rank.

        Raises:
            NoCheckpoint: it was one too many.
        """
        why = "of another rank"
        if isinstance(outcome, UnusableHere):
            why = outcome.problem
            self._unusable.append((generation, source, why))
        self._count += 1
        if self._count > _MAX_TRIES:
            raise NoCheckpoint(
                f"{self._path}: {self._count} checkpoints one after the other cannot be used, the last one because "
                f"{why}. See hetstream ckpt ls {self._path}"
            )

    def without_unusable(self, offer: Offer) -> Offer:
        """Return what a rank has, without what it could not use."""
        for record in self._unusable:
            offer = offer.without(*record)
        return offer


def _refuse_other_release(offers: list[Offer], choice: Choice, step: int | None) -> None:
    """End on all ranks where an older checkpoint would be restored in the place of one that is whole."""
    for generation, problem in (unread for offer in offers for unread in offer.unread):
        is_newer = choice.generation is None or generation > choice.generation
        if is_newer if step is None else generation.step == step:
            raise OtherRelease(problem)


def _why_not_this_step(step: int, offers: list[Offer], lineage: Lineage, path: Path, notes: list[str]) -> str:
    """Why a step that was asked for cannot be restored, and what can."""
    line, left = steps_of(offers, lineage)
    among = f"all {len(offers)} ranks have" if len(offers) > 1 else "there are"
    others = f"{among} " + (f"the steps {_listed(line)}" if line else "none")
    others += f"; left behind: {_listed(left)}" if left else ""
    why = "".join(f"; {note}" for note in notes)
    return f"{path}: no checkpoint of step {step} can be restored: {others}{why}. See hetstream ckpt ls {path}"


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
