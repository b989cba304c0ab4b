"""The newest generation that all ranks have, tried until it is whole on all of them: the talk behind `agreement.py`.

Called by `restoring.py`. Each rank says what it has, all choose the same, each looks at its own, and nothing is used
before all of them have found it whole.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from checkpoint.agreement import Choice, Held, Offer, agree
from checkpoint.directory import CheckpointDirectory
from checkpoint.errors import Damaged, MissingRanks, NoCheckpoint
from checkpoint.flash.distributed import Communicator, gather, together
from checkpoint.flash.restore import Part
from checkpoint.flash.source import Memory, open_disk
from checkpoint.replica.trainer import TrainerReplicas
from checkpoint.segment import split_metadata
from checkpoint.store import Store
from checkpoint.structure import read_origin

_log = logging.getLogger(__name__)

_ON_DISK = "on disk: "
_WHERE = {"memory": "in memory", "replica": "in the memory of another host", "disk": "on disk"}

# Looks at a record up to its `yield`, and uses it behind it, when all ranks have got there.
Use = Callable[[list[Part], Choice], Iterator[None]]


class Newest:
    """What this rank can restore from, and what all ranks can.

    Args:
        ranks: that have to agree.
        directory: of the checkpoints.
        store: of this rank.
        memory: the generations in it.
        replicas: that other hosts keep; None without.
    """

    def __init__(
        self,
        ranks: Communicator,
        directory: CheckpointDirectory,
        store: Store,
        memory: Memory,
        replicas: TrainerReplicas | None,
    ) -> None:
        self._ranks = ranks
        self._directory = directory
        self._store = store
        self._memory = memory
        self._replicas = replicas

    def use(self, use: Use) -> None:
        """Let all ranks try the newest generation, then the next one, until it is whole on all of them.

        Raises:
            NoCheckpoint: there are checkpoints on disk, and none of them can be used.
        """
        offer = self._offer()
        said: set[str] = set()
        is_on_disk = any(gather(self._ranks, bool(offer.disk) or any(map(_is_of_disk, offer.problems))))
        while True:
            choice = agree(gather(self._ranks, offer))
            for note in choice.notes:
                if note not in said:
                    _log.warning("%s", note)
                    said.add(note)
            if choice.generation is None:
                if is_on_disk:
                    path = self._directory.path
                    raise NoCheckpoint(
                        f"none of the checkpoints in {path} can be used, and training does not begin anew without "
                        f"being told: {'; '.join(choice.notes)}. See hetstream ckpt verify {path}; to begin anew, give "
                        "another directory"
                    )
                return
            problem = self._try(choice, use)
            if problem is None:
                return
            offer = offer.without(choice.generation, choice.sources[self._ranks.rank], problem) if problem else offer

    def _try(self, choice: Choice, use: Use) -> str | None:
        """None: it is done. Text: this rank's source is not usable, and why; empty if it is another rank's."""
        generation, rank = choice.generation, self._ranks.rank
        assert generation is not None
        with contextlib.ExitStack() as held:
            problem = ""
            going: Iterator[None] = iter(())

            def look() -> int:
                nonlocal problem, going
                try:
                    if choice.sources[rank] == "replica" and self._replicas:
                        self._replicas.fetch(generation, choice.holders[rank])
                    if choice.sources[rank] == "disk":
                        parts = held.enter_context(open_disk(self._directory, generation, rank))
                    else:
                        parts = held.enter_context(self._memory.open(generation))
                    going = use(parts, choice)
                    next(going)
                except (Damaged, NoCheckpoint, MissingRanks, OSError) as error:
                    problem = f"{generation} {_WHERE[choice.sources[rank]]} is not usable: {error}"
                    return 1
                return 0

            together(self._ranks, look)
            if any(gather(self._ranks, bool(problem))):
                return problem
            together(self._ranks, lambda: sum(1 for _ in going))
        return None

    def _offer(self) -> Offer:
        memory, problems = [], []
        for content in self._store.held():
            generation = content.header.generation
            try:
                with self._store.read(content) as segment:
                    origin = read_origin(split_metadata(segment.metadata)[1])
            except Damaged as error:
                problems.append(str(error))
            else:
                if origin.rank == self._ranks.rank:
                    memory.append(Held(generation, origin.world_size))
        disk = []
        for checkpoint in self._directory.scan():
            if checkpoint.problem:
                problems.append(f"{_ON_DISK}{checkpoint.generation} is not usable: {checkpoint.problem}")
            else:
                disk.append(Held(checkpoint.generation, checkpoint.world_size))
        return Offer(memory, disk, problems, self._replicas.offered() if self._replicas else [])


def _is_of_disk(problem: str) -> bool:
    return problem.startswith(_ON_DISK)
