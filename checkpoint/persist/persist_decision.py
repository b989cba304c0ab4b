"""Which generation a checkpoint writer writes next, so that ranks which nobody synchronises write the same ones. Pure.

Each rank's checkpoint writer writes when it can, and a checkpoint needs a part from every rank. Left alone, each would
take the newest of its own trainer, and with ranks a step apart no set would ever be complete. So the first to begin
announces its generation (its directory on disk is the announcement), the others join it, and nobody begins another
before that one is committed. A checkpoint writer that has lost what was announced, because its trainer overwrote it,
announces a newer one, and the others follow.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hetstream.checkpoint.record.generation import Generation


@dataclass(frozen=True)
class PersistDecision:
    """What to do next.

    Attributes:
        generation: to write; None: nothing now.
        reason: why.
    """

    generation: Generation | None
    reason: str


def decide_persist(
    held: Collection[Generation],
    written: Collection[Generation],
    announced: Collection[Generation],
    committed: Generation | None,
    *,
    last_chance: bool,
) -> PersistDecision:
    """Decide.

    Args:
        held: complete generations of this rank in memory.
        written: generations whose part of this rank is on disk.
        announced: generations that some rank has begun and that are not committed.
        committed: the newest committed one.
        last_chance: no newer one will come into memory, or there is no time left to wait for it.
    """
    useful = {generation for generation in held if committed is None or generation > committed}
    if not useful:
        return PersistDecision(None, "all that is in memory is on disk, or older than what is")
    newest = max(useful)
    begun = sorted(
        (generation for generation in announced if committed is None or generation > committed), reverse=True
    )
    for generation in begun:
        if generation in written:
            if not last_chance:
                return PersistDecision(None, f"{generation} waits for other ranks' parts")
        elif generation in useful:
            return PersistDecision(generation, "other ranks have begun it")
        elif generation > newest:
            if not last_chance:
                return PersistDecision(None, f"other ranks have begun {generation}, which is still to come here")
        elif not last_chance:
            break  # it was overwritten in memory; so will be those before it
    if newest in written:
        return PersistDecision(None, f"{newest} waits for other ranks' parts")
    return PersistDecision(newest, "it is the newest")
