"""The generation that all ranks restore, tried until it is whole on all of them: the talk behind `agreement.py`.

Called by `destinations.py`. Each rank says what it has, all choose the same, each looks at its own, and nothing is used
before all of them have found it whole.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.errors import Damaged, MissingRanks, NoCheckpoint, OtherRelease
from hetstream.checkpoint.flash.distributed import Communicator, gather, together
from hetstream.checkpoint.flash.host import Host
from hetstream.checkpoint.flash.ports import RecordsElsewhere
from hetstream.checkpoint.flash.restore.source import Disk, Memory
from hetstream.checkpoint.flash.restore.stored import StoredPart
from hetstream.checkpoint.policy.lineage import Lineage
from hetstream.checkpoint.record.agreement import (
    Choice,
    Offer,
    OfferedRecord,
    Source,
    choose_generation,
    steps_of,
    with_disk,
)
from hetstream.checkpoint.record.generation import Generation

_log = logging.getLogger(__name__)

_ON_DISK = "on disk: "
# A reader that holds nothing may find each newest one removed again; far more than any training keeps.
_MAX_TRIES = 1000
_WHERE = {"memory": "in memory", "replica": "in the memory of another host", "disk": "on disk"}


class _Wanted(msgspec.Struct, frozen=True):
    """What a rank asks for: a step, or None for the newest."""

    step: int | None


class Destination(Protocol):
    """What is done with a generation, in two phases: all ranks have prepared it before one of them applies it."""

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
class Newest:
    """What this rank can restore from, and what all ranks can.

    Attributes:
        ranks: that have to agree.
        directory: of the checkpoints.
        lineage: of the directory, the same on every rank.
        memory: of this rank; None: the disk alone counts.
        elsewhere: records that other hosts keep; None without.
        host: of this rank; None: each rank is for itself.
    """

    ranks: Communicator
    directory: CheckpointDirectory
    lineage: Lineage
    memory: Memory | None = None
    elsewhere: RecordsElsewhere | None = None
    host: Host | None = None

    def all_steps(self) -> tuple[list[int], list[int]]:
        """The steps that all ranks can restore, ascending: those of the line, and others that were left behind."""
        return steps_of(self._exchange(self._offer(with_left=True)), self.lineage)

    def choose(self) -> Choice:
        """The newest generation that all ranks have, as far as names and manifests tell."""
        return choose_generation(self._exchange(self._offer(with_left=False)), self.lineage)

    def use(self, destination: Destination, step: int | None = None) -> Choice | None:
        """Let all ranks try the newest generation, then the next one, until it is whole on all of them.

        Args:
            destination: what to do with it.
            step: only generations of this step; they may have been left behind.

        Returns:
            The generation that was applied; None: there is none.

        Raises:
            OptionsError: the ranks have asked for different steps.
            NoCheckpoint: there are checkpoints on disk, and none of them can be used; or none of this step is there.
            OtherRelease: another release of hetstream wrote the newest one, or the one of this step.
        """
        wanted = gather(self.ranks, _Wanted(step))
        if any(request != wanted[0] for request in wanted):
            steps = ", ".join(str(request.step) for request in wanted)
            raise OptionsError(f"the ranks ask for different steps, by rank: {steps}. All have to restore the same one")
        offer = self._offer(with_left=step is not None)
        logged: set[str] = set()
        unusable: list[tuple[Generation, Source, str]] = []
        num_tries = 0
        is_on_disk = any(gather(self.ranks, bool(offer.disk) or any(map(_is_of_disk, offer.problems))))
        while True:
            offers = self._exchange(offer)
            choice = choose_generation(offers, self.lineage, step)
            _refuse_other_release(offers, choice, step)
            for note in choice.notes:
                if note not in logged:
                    _log.warning("%s", note)
                    logged.add(note)
            if choice.generation is None:
                if step is not None:
                    raise NoCheckpoint(_told(step, offers, self.lineage, self.directory.path, choice.notes))
                if is_on_disk:
                    raise self._none_usable(choice.notes)
                return None
            problem = self._try(choice, destination)
            if problem is None:
                return choice
            if problem:
                unusable.append((choice.generation, choice.sources[self.ranks.rank], problem))
            num_tries += 1
            if num_tries > _MAX_TRIES:
                raise NoCheckpoint(
                    f"{self.directory.path}: {num_tries} checkpoints one after the other cannot be used, the last one "
                    f"because {problem or 'of another rank'}. See hetstream ckpt ls {self.directory.path}"
                )
            # What a training has saved meanwhile is newer than what this rank knew of.
            offer = self._offer(with_left=step is not None)
            for source in unusable:
                offer = offer.without(*source)

    def _none_usable(self, notes: list[str]) -> NoCheckpoint:
        path, why = self.directory.path, "; ".join(notes)
        none = f"none of the checkpoints in {path} can be used"
        if self.directory.read_only:
            return NoCheckpoint(f"{none}: {why}. See hetstream ckpt verify {path}")
        return NoCheckpoint(
            f"{none}, and training does not begin anew without being told: {why}. See hetstream ckpt "
            f"verify {path}; to begin anew, delete it, or give another directory"
        )

    def _try(self, choice: Choice, destination: Destination) -> str | None:
        """None: it is done. Text: this rank's source is not usable, and why; empty if it is another rank's."""
        generation, rank = choice.generation, self.ranks.rank
        assert generation is not None
        with contextlib.ExitStack() as held:
            problem = ""
            disk: Disk | None = None

            def fetch() -> None:
                if choice.sources[rank] == "replica" and self.elsewhere:
                    self.elsewhere.fetch(generation, choice.holders[rank])

            def compare() -> None:
                nonlocal disk
                if choice.sources[rank] == "disk":
                    neighbours = self.host.stores if self.host else (rank,)
                    readers = [neighbour for neighbour in neighbours if choice.sources[neighbour] == "disk"]
                    num_ranks, num_saved = len(choice.sources), choice.world_size
                    disk = Disk(self.directory, generation, rank, num_ranks, num_saved, readers, held)
                    disk.compare()

            def prepare() -> None:
                parts: list[StoredPart] = []
                if disk:
                    parts = disk.open()
                elif self.memory:
                    parts = held.enter_context(self.memory.open(generation, choice.sharers[rank]))
                destination.prepare(parts, choice)

            def apply() -> int:
                destination.apply()
                return 0

            def attempted(act: Callable[[], None]) -> int:
                nonlocal problem
                try:
                    act()
                except (Damaged, NoCheckpoint, MissingRanks, OSError) as error:
                    problem = f"{generation} {_WHERE[choice.sources[rank]]} is not usable: {error}"
                    if choice.sources[rank] == "disk" and not self.directory.has(generation):
                        problem = f"{generation} was removed from {self.directory.path} while it was read"
                return 0

            # Each waits for all ranks, as others of the host use what comes, and what was compared.
            if "replica" in choice.sources:
                together(self.ranks, lambda: attempted(fetch))
            if "disk" in choice.sources:
                together(self.ranks, lambda: 0 if problem else attempted(compare))
            if any(gather(self.ranks, bool(problem))):
                return problem
            together(self.ranks, lambda: attempted(prepare))
            if any(gather(self.ranks, bool(problem))):
                return problem
            together(self.ranks, apply)
        return None

    def _exchange(self, offer: Offer) -> list[Offer]:
        return with_disk(gather(self.ranks, offer))

    def _offer(self, *, with_left: bool) -> Offer:
        """What this rank has; what was left behind on disk only if that may be chosen, too."""
        memory, problems = self.memory.offered() if self.memory else ([], [])
        disk: list[OfferedRecord] = []
        unread: list[tuple[Generation, str]] = []
        for checkpoint in self.directory.scan() if not self.host or self.host.holds_shared else ():
            if not with_left and not self.lineage.holds(checkpoint.generation):
                continue
            if checkpoint.problem:
                problems.append(f"{_ON_DISK}{checkpoint.generation} is not usable: {checkpoint.problem}")
                if checkpoint.is_of_other_release:
                    unread.append((checkpoint.generation, checkpoint.problem))
            else:
                disk.append(OfferedRecord(checkpoint.generation, checkpoint.world_size))
        replicas = self.elsewhere.offered() if self.elsewhere else []
        return Offer(memory, disk, problems, replicas, host=self.host.name if self.host else "", unread=unread)


def _refuse_other_release(offers: list[Offer], choice: Choice, step: int | None) -> None:
    """End on all ranks where an older checkpoint would be restored in the place of one that is whole."""
    for generation, problem in (unread for offer in offers for unread in offer.unread):
        is_newer = choice.generation is None or generation > choice.generation
        if is_newer if step is None else generation.step == step:
            raise OtherRelease(problem)


def _told(step: int, offers: list[Offer], lineage: Lineage, path: Path, notes: list[str]) -> str:
    """Why a step that was asked for cannot be restored, and what can."""
    line, left = steps_of(offers, lineage)
    among = f"all {len(offers)} ranks have" if len(offers) > 1 else "there are"
    others = f"{among} " + (f"the steps {_listed(line)}" if line else "none")
    others += f"; left behind: {_listed(left)}" if left else ""
    why = "".join(f"; {note}" for note in notes)
    return f"{path}: no checkpoint of step {step} can be restored: {others}{why}. See hetstream ckpt ls {path}"


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _is_of_disk(problem: str) -> bool:
    return problem.startswith(_ON_DISK)
