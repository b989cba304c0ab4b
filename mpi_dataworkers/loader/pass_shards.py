"""The steps of one pass by shard, and how far each shard was read. No I/O.

A step source (`remote_source.py`, `local_source.py`) reads them. `division.py` says which shards there are.
"""

from __future__ import annotations

from typing import Any

from hetstream.mpi_dataworkers.loader.division import Division, interleave_of, snapshots_of
from hetstream.mpi_dataworkers.loader.step_indices import ListedSteps, Order
from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.order.interleave import Interleave, Slot
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.order.visitation import Cut
from hetstream.mpi_dataworkers.wire.messages import Ranges, ShardOrder, WorkerSeeds


class PassShards:
    """The shards of one pass: whose step is next, and how far each was read.

    Indexed data that is not divided is one shard, with the number 0. `undivided` and `divided` make either.

    Args:
        seed, epoch: of the order and of the random state of samples; with `repeat`, each pass has another epoch.
        interleave: in which order the shards are read.
        order: the one shard's steps, of data that is not divided.
        division: what the shards are, of data that is.
        num_copies: of divided data, where each data worker goes over all of it.
        worker_seeds: what random numbers follow from instead of seed and epoch, in a program that only knows torch.

    Attributes:
        seeds: what the random numbers of samples follow from.
        epoch: as given.
        order: as given; None for divided data.
        position: steps of the pass that were taken.
        slots: shards that are being read.
        snapshots: state of each shard's reader, by shard, taken at the shard's position or before it.
        width: shards that are read at a time.
        any_order: steps are given as they come: of several shards whichever has one, of a single one any step.
        in_order: the steps of each shard are given in its order.
        at_most_once: the pass goes on without the steps of a data worker that is lost.
    """

    def __init__(
        self,
        seed: int,
        epoch: int,
        interleave: Interleave,
        *,
        order: Order | None = None,
        division: Division | None = None,
        num_copies: int = 1,
        worker_seeds: WorkerSeeds | None = None,
    ) -> None:
        self.seeds, self.epoch = PassSeeds(seed, epoch, worker_seeds), epoch
        self.order = order
        self.position = 0
        self.slots = interleave.slots
        self.snapshots: dict[int, bytes] = {}
        self.width = division.width(num_copies) if division is not None else 1
        self.any_order = division is not None and division.any_order
        self.in_order = division is None or not (division.any_order and division.sharding_plan.cut is Cut.STEPS)
        self.at_most_once = division is not None and division.sharding_plan.visitation == "at_most_once"
        self._interleave, self._division, self._num_copies = interleave, division, num_copies
        # Steps of a single shard that were taken out of order before the pass was continued.
        self._taken_out_of_order: set[int] = set()

    @classmethod
    def undivided(
        cls, order: Order, seed: int, epoch: int, first_step: int = 0, worker_seeds: WorkerSeeds | None = None
    ) -> PassShards:
        """Indexed data in one order, from a step on."""
        shards = cls(seed, epoch, Interleave(range(1), width=1), order=order, worker_seeds=worker_seeds)
        shards.position = shards.slots[0].step = first_step
        return shards

    @classmethod
    def divided(
        cls, division: Division, seed: int, epoch: int, num_copies: int, state: dict[str, Any] | None
    ) -> PassShards:
        """Data that is divided.

        Args:
            division: what the shards are.
            seed, epoch: of the order and of the random state of samples.
            num_copies: see the class; a state has its own.
            state: position to continue from, of `state`; None for the beginning.
        """
        num_copies = int(state["copies"]) if state else num_copies
        interleave = interleave_of(division, num_copies, state)
        shards = cls(seed, epoch, interleave, division=division, num_copies=num_copies)
        if state:
            shards.position = int(state["step"])
            shards.snapshots = dict(snapshots_of(state))
            shards.note_taken_out_of_order(state["taken_out_of_order"])
        return shards

    @property
    def next_slot(self) -> int:
        """Number of the slot whose step is next."""
        return self._interleave.next_slot

    def steps_of(self, shard: int) -> Order | ShardOrder:
        """Which samples the steps of a shard have."""
        if self._division is not None:
            return self._division.steps_of(shard, self.epoch)
        assert self.order is not None
        return self.order

    def took(self, slot_index: int, next_step: int, snapshot: bytes = b"", position: int = -1) -> None:
        """A step of a shard was taken. To say so once more with a position, also after a part of it, changes nothing.

        Args:
            slot_index: of its slot.
            next_step: the shard's next step; those that were skipped over were lost.
            snapshot: where the shard's reader is now; empty if it has not said so.
            position: of the pass, behind the step; -1 for the next one.
        """
        slot = self.slots[slot_index]
        self.position = self.position + 1 if position < 0 else position
        if snapshot:
            self.snapshots[slot.shard] = snapshot
        if self.order is not None and slot.step < next_step:
            self.order.forget(slot.step)
        if slot.step < next_step or position < 0:
            self._interleave.taken(slot_index, next_step - slot.step)

    def ended(self, slot_index: int) -> Slot | None:
        """The shard in this slot has no more steps.

        Returns:
            The slot of the shard that is read in its place; None when there is none, and the slot is removed.
        """
        self.snapshots.pop(self.slots[slot_index].shard, None)
        return self._interleave.ended(slot_index)

    def has_more(self) -> bool:
        """Whether a step is left. Draws the program's sampler."""
        return bool(self.slots) if self.order is None else self.order.indices(self.position) is not None

    def taken_out_of_order(self) -> Ranges:
        """Steps of a single shard, beyond its position, that were taken before the pass was continued."""
        first = self.slots[0].step if self.slots else 0
        return as_ranges(sorted(step for step in self._taken_out_of_order if step >= first))

    def note_taken_out_of_order(self, steps: Ranges) -> None:
        """Remember steps of a single shard, beyond its position, that were taken: the pass is about to be continued."""
        self._taken_out_of_order = {step for first, stop in steps for step in range(first, stop)}

    def skip_taken(self) -> None:
        """Move past steps that were taken before the pass was continued."""
        while self.slots[self.next_slot].step in self._taken_out_of_order:
            self._interleave.taken(self.next_slot)

    def beginning(self) -> str | None:
        """How the program's sampler began, of `sampler_state`; None without one."""
        return self.order.beginning if isinstance(self.order, ListedSteps) else None

    def drawn(self) -> str:
        """Digest of what the program's sampler gave for the steps that were taken; "" without one."""
        return self.order.drawn(self.position) if isinstance(self.order, ListedSteps) else ""

    def state(self, taken_out_of_order: Ranges) -> dict[str, Any] | None:
        """Position in each shard that is being read, as plain values; None where `position` says all.

        Args:
            taken_out_of_order: steps of a single shard, beyond its position, that were taken.
        """
        if self._division is None:
            return None
        named = {str(shard): snapshot for shard, snapshot in self.snapshots.items()}
        return {
            "rank": self._division.shard_owner[0],
            "step": self.position,
            "copies": self._num_copies,
            "taken_out_of_order": [list(steps) for steps in taken_out_of_order],
            "snapshots": named,
        } | self._interleave.state()
