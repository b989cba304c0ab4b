"""In which order the steps of several shards come: round robin, a pure function of how long the shards are. Pure.

Used by `loader/pass_shards.py`. Some shards are read at a time, each in a slot of its own. The next step is that of
the shard in the next slot; a shard that has ended leaves its slot to the next shard, or, when there is none, the slot
goes. Who made the steps, and when they came, does not matter, so the order is the same for any number of data workers;
and the state is the position in each shard that is being read, and which shards are left.

The shards of a stream are dealt out among ranks. The positions of all ranks together (`gather`) can be dealt out anew
among any number of them (`deal`), in the order in which their steps would have come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hetstream.mpi_dataworkers.errors import StateError


@dataclass
class Slot:
    """A shard that is being read: its number and how many of its steps were taken."""

    shard: int
    step: int


class Interleave:
    """Round robin over shards.

    Args:
        shards: numbers of all shards of this pass, in the order in which they begin.
        width: how many are read at a time, at least 1.

    Attributes:
        slots: shards that are being read.
        next_slot: the one whose step is next.
    """

    def __init__(self, shards: Sequence[int], width: int) -> None:
        self._left = as_strides(shards)
        self.slots = [Slot(shard, 0) for shard in take(self._left, width)]
        self.next_slot = 0

    def taken(self, slot_index: int, steps: int = 1) -> None:
        """The shard in this slot gave a step; more than one when some before it were lost."""
        self.next_slot = (slot_index + 1) % len(self.slots)
        self.slots[slot_index].step += steps

    def ended(self, slot_index: int) -> Slot | None:
        """The shard in this slot has no more steps: what begins in its place, or None when the slot goes."""
        if self._left:
            begun = self.slots[slot_index] = Slot(take(self._left, 1)[0], 0)
            self.next_slot = (slot_index + 1) % len(self.slots)
            return begun
        del self.slots[slot_index]
        self.next_slot = slot_index % len(self.slots) if self.slots else 0
        return None

    def state(self) -> dict[str, Any]:
        """Position, as plain values."""
        return _state(self.slots, self.next_slot, self._left)

    def load(self, state: Any, num_shards: int) -> None:
        """Continue from a position.

        Args:
            state: of `state` or `deal`.
            num_shards: how many there are, for all ranks.

        Raises:
            StateError: it is none among these shards.
        """
        self.slots, self.next_slot, self._left = _read(state, num_shards)


def gather(states: Sequence[Any], num_shards: int) -> dict[str, Any]:
    """The position of several ranks that share one deal, as one.

    Args:
        states: each rank's position, in order of rank; a rank that has nothing left has no slots.
        num_shards: how many there are, for all ranks.

    Raises:
        StateError: they are no positions of one deal.
    """
    read = [_read(state, num_shards) for state in states]
    most_slots = max((len(slots) for slots, _, _ in read), default=0)
    gathered = [
        slots[(next_slot + number) % len(slots)]
        for number in range(most_slots)
        for slots, next_slot, _ in read
        if number < len(slots)
    ]
    left = sorted(shard for _, _, strides in read for stride in strides for shard in stride)
    named = [*left, *(slot.shard for slot in gathered)]
    if len(set(named)) < len(named):
        raise StateError("the states name a shard twice: they are not of the ranks of one run at one moment")
    return _state(gathered, 0, as_strides(left))


def deal(state: Any, num_shards: int, rank: int, num_ranks: int, width: int) -> dict[str, Any]:
    """One rank's position of a gathered one: the shards that are being read, in the order of their steps, then others.

    Args:
        state: of `gather`.
        num_shards: how many there are, for all ranks.
        rank, num_ranks: whose position; each shard has one rank.
        width: how many shards a rank reads at a time.

    Raises:
        StateError: it is no position among these shards.
    """
    slots, _, left = _read(state, num_shards)
    mine = slots[rank::num_ranks]
    first = (rank - len(slots)) % num_ranks  # who had the fewest goes on
    others = []
    for stride in left:
        others.append(stride[first::num_ranks])
        first = (first - len(stride)) % num_ranks
    others = [stride for stride in others if stride]
    mine += [Slot(shard, 0) for shard in take(others, max(0, width - len(mine)))]
    return _state(mine, 0, others)


def as_strides(shards: Iterable[int]) -> list[range]:
    """Ascending numbers as few ranges: the shards of a rank are evenly spaced for the most part."""
    if isinstance(shards, range):
        return [shards] if shards else []
    strides: list[range] = []
    for shard in shards:
        last = strides[-1] if strides else None
        if last is not None and len(last) == 1 and shard > last[0]:
            strides[-1] = range(last[0], shard + 1, shard - last[0])
        elif last is not None and shard == last[-1] + last.step:
            strides[-1] = range(last[0], shard + 1, last.step)
        else:
            strides.append(range(shard, shard + 1))
    return strides


def take(strides: list[range], count: int) -> list[int]:
    """Take the first numbers out, in place; fewer where there are no more."""
    taken: list[int] = []
    while strides and len(taken) < count:
        wanted = count - len(taken)
        taken += strides[0][:wanted]
        strides[0] = strides[0][wanted:]
        if not strides[0]:
            del strides[0]
    return taken


def _state(slots: list[Slot], next_slot: int, left: list[range]) -> dict[str, Any]:
    return {
        "slots": [[slot.shard, slot.step] for slot in slots],
        "next_slot": next_slot,
        "left": [[stride.start, stride.stop, stride.step] for stride in left],
    }


def _read(state: Any, num_shards: int) -> tuple[list[Slot], int, list[range]]:
    try:
        slots = [Slot(int(shard), int(step)) for shard, step in state["slots"]]
        next_slot = int(state["next_slot"])
        left = [range(int(start), int(stop), int(step)) for start, stop, step in state["left"]]
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is no position among shards: {error!r}") from error
    known = range(num_shards)
    inside = all(slot.shard in known and slot.step >= 0 for slot in slots) and 0 <= next_slot < max(1, len(slots))
    if not inside or any(not stride or stride[0] not in known or stride[-1] not in known for stride in left):
        raise StateError(f"the state names shards that this loader does not have: {state!r}")
    return slots, next_slot, left
