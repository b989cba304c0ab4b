"""Into which streams of steps the data of one loader is divided: shards, parts or copies; and a position in them.

`PassShards` says how far they were read. No I/O.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.data

from hetstream.mpi_dataworkers.errors import PipelineError, StateError
from hetstream.mpi_dataworkers.ops.index_form import INTS, IndexForm, form_of
from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.order.bucketing import BucketPlan, order_of
from hetstream.mpi_dataworkers.order.interleave import Interleave, Slot, deal
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.order.sharding import EpochPlan, Indices, SampleSeeds, derive_seed
from hetstream.mpi_dataworkers.order.visitation import Cut, ShardingPlan
from hetstream.mpi_dataworkers.process.handlers import of_handler
from hetstream.mpi_dataworkers.wire.messages import ListedOrder, Ranges, ShardOrder, WorkerSeeds

# Which samples each step of one pass has, as the loader sees it. No I/O.
#
# A planned order is a function of (seed, epoch) that data workers compute themselves; a listed order comes from the
# program's own sampler and is drawn as it is needed.

_LARGEST_INDEX = 2**63 - 1
# Most steps that torch's own workers make again before they go on with a pass.
_MOST_MADE_AGAIN = 256
# Without another bound, a listed order is drawn from the program's sampler this many steps beyond the window.
_LIST_AHEAD_STEPS = 64


@dataclass(frozen=True)
class LookAhead:
    """How far a program's sampler is drawn ahead of the training loop.

    Attributes:
        num_steps: as far as torch's own loader draws it, `prefetch_factor * num_workers`; None for no bound but the
            window.
        num_unseen: from the first one on, so many steps of the pass can be drawn at any time, and nobody can tell.
    """

    num_steps: int | None = None
    num_unseen: int = 0

    def goal(self, position: int, window: int, taking: bool, has_begun: bool, as_torch: bool = False) -> int:
        """Up to which step to draw.

        Args:
            position: the training loop's next step.
            window: steps that may be under way.
            taking: the training loop asks for that step now.
            has_begun: a step of the pass was drawn.
            as_torch: no further than torch's own loader, though nobody sees it of the sampler: see `ComparedPass`.
        """
        beyond_window = position + window + _LIST_AHEAD_STEPS
        if self.num_steps is None:
            return beyond_window
        torchs = position + self.num_steps + taking
        if as_torch:
            return torchs
        return max(torchs, min(self.num_unseen, beyond_window)) if has_begun or torchs > 0 else 0


def steps_to_gather(goal: int, position: int) -> int:
    """Steps that are drawn before they are sent together: each message takes time from the training loop."""
    return min(32, max(1, (goal - position) // 4))


class PlannedSteps:
    """Steps of an order that is a function of (seed, epoch)."""

    def __init__(self, plan: EpochPlan | BucketPlan, rank: int) -> None:
        self.num_steps = plan.num_steps
        self.wire_order = order_of(plan, rank)
        self._plan = plan

    @property
    def num_known(self) -> int:
        """Steps whose samples are known now."""
        return self.num_steps

    def indices(self, step: int) -> Indices | None:
        """Sample indices of a step, or None after the last."""
        return self._plan.indices(step, self.wire_order.rank) if step < self.num_steps else None

    def seeds(self, step: int, indices: Indices, seeds: PassSeeds) -> SampleSeeds:  # noqa: ARG002, see ListedSteps
        """Seeds of the step's samples."""
        return seeds.of_step(indices)

    def form(self, step: int) -> IndexForm:  # noqa: ARG002, see ListedSteps
        """In which form the dataset is asked for a step's samples."""
        return INTS

    def forget(self, step: int) -> None:
        """Nothing is kept."""


class ListedSteps:
    """Steps as the program's own sampler gives them; drawn as they are needed.

    Args:
        index_sampler: what gives the indices of each step.
        batched: a step is a list of them; else it is one, for which the dataset may be given a list.
        beginning: how the sampler began, for a later resume.

    Attributes:
        has_raised: the sampler has ended with an error.
    """

    def __init__(self, index_sampler: Iterable[Any], batched: bool, beginning: str = "") -> None:
        self.num_steps = -1
        self.wire_order = ListedOrder(batched)
        self.beginning, self.has_raised = beginning, False
        self._iterator = iter(index_sampler)
        self._given: list[Any] = []  # by the sampler, for the next step
        self._batched = batched
        self._drawn: dict[int, Indices] = {}
        self._forms: dict[int, IndexForm] = {}
        self._digests = {0: b""}  # of all that was drawn before a step
        self._next = 0

    @property
    def num_known(self) -> int:
        """Steps that were drawn."""
        return self._next

    def indices(self, step: int) -> Indices | None:
        """Sample indices of a step, or None after the last.

        Raises:
            PipelineError: the sampler gives something else than whole numbers.
        """
        while self._next <= step and self.num_steps < 0:
            if not self._given:
                try:
                    self._given.extend(itertools.islice(self._iterator, 1))
                except Exception as error:
                    self.has_raised = not of_handler(error)
                    raise
            if not self._given:
                self.num_steps = self._next
                break
            drawn = self._given[0]
            indices = _as_indices(drawn, self._batched)
            if indices is None:
                self._end_at(drawn)
                break
            self._drawn[self._next] = indices
            self._forms[self._next] = form_of(drawn, self._batched)
            chained = hashlib.blake2b(self._digests[self._next], digest_size=16)
            chained.update(indices.tobytes())
            self._digests[self._next + 1] = chained.digest()
            self._next, self._given = self._next + 1, []  # at once: a signal's handler may raise anywhere
        return self._drawn.get(step)

    def _end_at(self, drawn: Any) -> None:
        raise PipelineError(
            f"{self._refusal(drawn)} Keep this loader local (num_workers of torch), or map keys to numbers in the "
            "dataset."
        )

    def _refusal(self, drawn: Any) -> str:
        return f"the sampler gave {drawn!r} for step {self._next}; data workers need whole-number indices."

    def seeds(self, step: int, indices: Indices, seeds: PassSeeds) -> SampleSeeds:
        """Seeds of the step's samples."""
        return seeds.of_step(indices, step)

    def form(self, step: int) -> IndexForm:
        """In which form the sampler gave a step's indices."""
        return self._forms[step]

    def forget(self, step: int) -> None:
        """Drop a step that the training loop has taken."""
        self._drawn.pop(step, None)
        self._forms.pop(step, None)
        self._digests.pop(step, None)

    def drawn(self, step: int) -> str:
        """Digest of the indices of all steps before this one, the training loop's next."""
        return self._digests[step].hex()

    def skip(self, num_steps: int, drawn: str) -> None:
        """Draw the steps that were taken before a resume.

        Raises:
            StateError: they are others than those that were taken.
        """
        for step in range(num_steps):
            if self.indices(step) is None:
                raise StateError(f"the sampler ends at step {step}, the state was saved at step {num_steps}")
            self.forget(step)
        if num_steps and self.drawn(num_steps) != drawn:
            raise StateError(
                f"the sampler gave other samples for the first {num_steps} steps when the state was saved: its data, "
                "its seed or its epoch differ (is set_epoch called as it was then?), or it has no state and draws "
                "anew each time. Use shuffle=True with seed=, or a sampler with set_epoch, or with state_dict and "
                "load_state_dict"
            )


def _as_indices(drawn: Any, batched: bool) -> Indices | None:
    """A step's sample indices, or None where they are no whole numbers, or none at all.

    Unbatched, a list is one index: the dataset is asked for all its samples at once. It has the shape (1, n).
    """
    is_one = not batched and type(drawn) is list
    try:
        array = np.asarray(drawn if batched or is_one else [drawn])
    except ValueError:  # lists of different lengths
        return None
    if array.dtype.kind not in "iu" or array.ndim != 1 or array.size == 0:
        return None
    if array.dtype.kind == "u" and int(array.max()) > _LARGEST_INDEX:
        return None
    given = drawn if batched or is_one else [drawn]
    if type(given) in (list, tuple) and type(given[0]) is not int and any(map(_says_more, given)):
        return None
    indices = array.astype(np.int64)
    return indices[np.newaxis] if is_one else indices


def _says_more(index: Any) -> bool:
    """Whether an index is a whole number that has attributes of its own, which would not travel with it."""
    return isinstance(index, int) and bool(getattr(index, "__dict__", None)) and not isinstance(index, enum.Enum)


class PartlyListedSteps(ListedSteps):
    """A listed pass that ends before the first step which data workers cannot make.

    Attributes:
        unlisted: what the sampler gives from that step on; None while there is no such step.
        reason: why they cannot.
    """

    unlisted: Iterator[Any] | None = None
    reason = ""

    def __init__(self, index_sampler: Iterable[Any], batched: bool) -> None:
        super().__init__(index_sampler, batched)
        self._taken: list[Any] = []  # what the sampler gave for the first steps

    def forget(self, step: int) -> None:
        """Drop a step that the training loop has taken, but for the first ones and `taken`."""
        if step == len(self._taken) < _MOST_MADE_AGAIN and step in self._drawn:
            self._taken.append(self._forms[step].given(self._drawn[step]))
        super().forget(step)

    def _end_at(self, drawn: Any) -> None:
        self.reason = self._refusal(drawn).rstrip(".")
        self.unlisted = itertools.chain([drawn], self._iterator)
        self.num_steps = self._next

    def from_step(self, step: int) -> Iterator[Any]:
        """What the sampler gives from a step on that was not taken: what was drawn already, and then the others."""
        drawn = [self._forms[number].given(self._drawn[number]) for number in range(step, self._next)]
        return (
            itertools.chain(drawn, self._given, self._iterator)
            if self.unlisted is None
            else itertools.chain(drawn, self.unlisted)
        )

    def steps_before(self, step: int) -> list[Any]:
        """What the sampler gave for all steps before this one, which were taken; empty where that is not kept."""
        return self._taken[:step] if step <= len(self._taken) else []


Order = PlannedSteps | ListedSteps


# A state with more was not written by a loader: there are not so many data workers.
_MAX_COPIES = 1 << 16


@dataclass(frozen=True)
class Division:
    """Into which streams the passes of one loader are divided.

    Attributes:
        sharding_plan: the policy, and into how many shards.
        num_samples: length of an indexed dataset, -1 for an IterableDataset.
        batch_size: samples in a step; 0: each step is one sample.
        drop_last, shuffle: as the loader's.
        seed: base of the order.
        copies_alike: copies have the same order (the user gave a seed).
        rank, world_size: which trainer this is.
        in_order: the order of the steps is that of the data; else that of their arrival.
        in_rounds: every rank reads all shards of an IterableDataset, its slice of rounds of like length.
    """

    sharding_plan: ShardingPlan
    num_samples: int
    batch_size: int
    drop_last: bool
    shuffle: bool
    seed: int
    copies_alike: bool
    rank: int
    world_size: int
    in_order: bool = True
    in_rounds: bool = False

    @property
    def shard_owner(self) -> tuple[int, int]:
        """Which rank this is, of how many that own shards; (0, 1) where each rank has a part of every shard."""
        return (self.rank, self.world_size) if self.num_samples < 0 and not self.in_rounds else (0, 1)

    def total_shards(self, num_copies: int) -> int:
        """How many shards there are, of all ranks together."""
        return num_copies if self.sharding_plan.cut is Cut.COPIES else self.sharding_plan.num_shards

    def shards(self, num_copies: int) -> Sequence[int]:
        """This rank's shards: its share of an IterableDataset's, of an indexed dataset its slice of each."""
        if self.sharding_plan.cut is Cut.COPIES:
            return range(num_copies)
        rank, num_ranks = self.shard_owner
        return range(rank, self.sharding_plan.num_shards, num_ranks)

    def width(self, num_copies: int) -> int:
        """How many of them are read at a time."""
        if self.sharding_plan.cut is Cut.COPIES:
            return max(1, num_copies)
        return max(1, self.sharding_plan.width // self.shard_owner[1])

    def steps_of(self, shard: int, epoch: int) -> PlannedSteps | ShardOrder:
        """Which samples the steps of one shard have."""
        cut, num_shards = self.sharding_plan.cut, self.sharding_plan.num_shards
        alike = cut is Cut.COPIES and (self.copies_alike or shard == 0)
        if self.num_samples < 0:
            seed_shard = 0 if alike else shard
            return ShardOrder(
                cut.value,
                shard,
                max(1, num_shards),
                self.batch_size,
                self.drop_last,
                self.shuffle,
                self.seed,
                seed_shard,
                *((self.rank, self.world_size) if self.in_rounds else ()),
            )
        num_samples, seed = self.num_samples, self.seed
        if cut is Cut.INDICES:
            num_samples = len(range(shard, self.num_samples, num_shards))
        if not alike and cut is not Cut.STEPS:
            seed = derive_seed(self.seed, shard) >> 1  # seeds travel as signed 64-bit numbers
        part = (shard, num_shards) if cut is Cut.INDICES else (0, 1)
        plan = EpochPlan(
            num_samples, self.batch_size, self.world_size, self.drop_last, self.shuffle, seed, epoch, *part
        )
        return PlannedSteps(plan, self.rank)

    @property
    def any_order(self) -> bool:
        """Whether steps are given as they come: of several streams whichever has one, of a single one any step."""
        return self.sharding_plan.cut is Cut.COPIES or not self.in_order

    @property
    def believes_length(self) -> bool:
        """Whether an IterableDataset's `__len__` says how many samples this loader gives, as for torch."""
        is_whole = self.world_size == 1 and self.sharding_plan.cut is not Cut.COPIES
        return self.num_samples < 0 and is_whole and not self.in_rounds

    def check(self) -> None:
        """Refuse samples that cannot be divided among the ranks.

        Raises:
            PipelineError: a shard has too few samples for its ranks.
        """
        if self.num_samples >= 0 and self.sharding_plan.cut is not Cut.COPIES:
            for shard in self.shards(0):
                self.steps_of(shard, epoch=0)

    def num_steps(self, epoch: int) -> int | None:
        """Steps of this rank in one pass; None when nobody knows."""
        if self.num_samples < 0 or self.sharding_plan.cut is Cut.COPIES:
            return None
        shards = (self.steps_of(shard, epoch) for shard in self.shards(0))
        return sum(steps.num_steps for steps in shards if isinstance(steps, PlannedSteps))


def snapshots_of(state: dict[str, Any] | None) -> Iterator[tuple[int, bytes]]:
    """Where the readers of shards were, by shard."""
    for shard, snapshot in (state["snapshots"] if state else {}).items():
        yield int(shard), snapshot


def interleave_of(division: Division, num_copies: int, state: dict[str, Any] | None) -> Interleave:
    """In which order the shards are read, from a saved position on."""
    order = Interleave(division.shards(num_copies), division.width(num_copies))
    if state is not None:
        order.load(state, division.total_shards(num_copies))
    return order


def own_position(division: Division, state: Any) -> dict[str, Any]:
    """A saved position as this rank's: of all ranks' together (`data_state.merge_states`) its part.

    Raises:
        StateError: it is none of this division, or another rank's.
    """
    rank, num_ranks = division.shard_owner
    try:
        copies, step, whose = int(state["copies"]), int(state["step"]), state["rank"]
        taken = [(int(first), int(stop)) for first, stop in state["taken_out_of_order"]]
        dict(snapshots_of(state))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"the state has no position in the shards of this loader: {error!r}") from error
    if not 0 < copies <= _MAX_COPIES or step < 0 or any(not 0 <= first < stop for first, stop in taken):
        raise StateError(f"the state has a damaged position in the shards of this loader: {state!r}")
    if whose is None:
        dealt = deal(state, division.total_shards(copies), rank, num_ranks, division.width(copies))
        mine = {str(shard) for shard, _ in dealt["slots"]}
        snapshots = {shard: snapshot for shard, snapshot in state["snapshots"].items() if shard in mine}
        state = {**state, **dealt, "rank": rank, "snapshots": snapshots}
    elif whose != rank:
        raise StateError(
            f"this is the state of rank {whose}, and this is rank {rank}: each rank of an IterableDataset has a state "
            "of its own (or load what merge_states() makes of all of them)"
        )
    interleave_of(division, copies, state)
    return dict(state)


# The steps of one pass by shard, and how far each shard was read. No I/O.
#
# A step source (`remote_source.py`, `pass_iterator.py`) reads them. `Division` says which shards there are.


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
        cls,
        division: Division,
        seed: int,
        epoch: int,
        num_copies: int,
        state: dict[str, Any] | None,
        worker_seeds: WorkerSeeds | None = None,
    ) -> PassShards:
        """Data that is divided.

        Args:
            division: what the shards are.
            seed, epoch: of the order and of the random state of samples.
            num_copies: see the class; a state has its own.
            state: position to continue from, of `state`; None for the beginning.
            worker_seeds: see the class.
        """
        num_copies = int(state["copies"]) if state else num_copies
        interleave = interleave_of(division, num_copies, state)
        shards = cls(seed, epoch, interleave, division=division, num_copies=num_copies, worker_seeds=worker_seeds)
        if state:
            shards.position = int(state["step"])
            shards.snapshots = dict(snapshots_of(state))
            shards.note_taken_out_of_order(state["taken_out_of_order"])
        return shards

    @property
    def next_slot(self) -> int:
        """Number of the slot whose step is next."""
        return self._interleave.next_slot

    @next_slot.setter
    def next_slot(self, slot: int) -> None:
        self._interleave.next_slot = slot

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


# How a program's own sampler begins an epoch again where it began it before. Called by `data_loader.py`.
#
# A sampler is drawn ahead of the training loop, so its state at the loop's position is not to be had. What is kept is
# its state at the beginning of the epoch; a resume begins it again and draws the indices, without data, up to the
# position. One that has no state is begun as it is: whether it gives the same indices again is seen when they are
# drawn.

# torch's samplers that draw from `generator`, or from torch's global one where that is None.
_DRAWING = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)


def beginning_of(sampler: Any, in_epoch: bool) -> str:
    """The state of a sampler that is about to begin an epoch, as text.

    Args:
        sampler: the loader's sampler or batch_sampler.
        in_epoch: the epoch begins now; else it is a later one, and torch's global generator, which the program keeps
            in its own checkpoint, may go on before it begins.

    Returns:
        "repeats" when the sampler gives the same order again, or nothing can be kept of it; else its state.
    """
    kind, source = _kind_of(sampler)
    if kind == "generator":
        return f"generator {_pack(source.generator.get_state())}"
    if kind == "global":
        return f"global {_pack(torch.get_rng_state())}" if in_epoch else "repeats"
    if kind == "state":
        try:
            return f"state {json.dumps(source.state_dict())}"
        except Exception:  # noqa: BLE001, the sampler's own code; as one without a state, it is drawn as it is then
            return "repeats"
    return "repeats"


@contextlib.contextmanager
def beginning_again(sampler: Any, beginning: str) -> Iterator[None]:
    """Put a sampler to where it began; what is drawn inside the context is what it drew then.

    The program's own random state is afterwards what it was before.

    Raises:
        StateError: the state is of another kind of sampler, or damaged.
    """
    kind, source = _kind_of(sampler)
    saved, _, text = beginning.partition(" ")
    if saved in ("", "repeats", "unknown"):
        yield
        return
    if saved != kind:
        raise StateError(f"the state is of a sampler with {saved!r} state, {type(source).__name__} has {kind!r} state")
    before = torch.get_rng_state()
    try:
        if kind == "generator":
            source.generator.set_state(_unpack(text))
        elif kind == "global":
            torch.set_rng_state(_unpack(text))
        else:
            source.load_state_dict(json.loads(text))
    except Exception as error:  # a sampler's own load_state_dict may raise anything
        raise StateError(f"{type(source).__name__} cannot begin again from the state: {error}") from error
    try:
        yield
    finally:
        if kind == "global":
            torch.set_rng_state(before)


class SamplerEpochSetter:
    """Sets the epoch of samplers that have `set_epoch`, for a program that does not do it itself.

    A sampler whose `epoch` is not where it was left has been set by the program, which then sets it for good.

    Args:
        *samplers: the loader's own.
    """

    def __init__(self, *samplers: Any) -> None:
        # They begin at 0; what is not there was set before the loader was made.
        with_epochs = [sampler for sampler in samplers if hasattr(sampler, "set_epoch")]
        begins = [(sampler, 0 if hasattr(sampler, "epoch") else None) for sampler in with_epochs]
        self._left_at: list[tuple[Any, Any]] = begins
        self._set_by_program = False

    def begin(self, epoch: int) -> None:
        """The samplers are about to begin this epoch."""
        now = [getattr(sampler, "epoch", None) for sampler, _ in self._left_at]
        self._set_by_program |= any(found != left for found, (_, left) in zip(now, self._left_at, strict=True))
        if self._set_by_program:
            return
        for sampler, _ in self._left_at:
            sampler.set_epoch(epoch)
        self._left_at = [(sampler, getattr(sampler, "epoch", None)) for sampler, _ in self._left_at]


def _kind_of(sampler: Any) -> tuple[str, Any]:
    """What makes a sampler give an order again, and the object that holds it."""
    if hasattr(sampler, "set_epoch"):
        return "repeats", sampler
    if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
        return "state", sampler
    if isinstance(sampler, torch.utils.data.BatchSampler):
        return _kind_of(sampler.sampler)
    if isinstance(sampler, _DRAWING):
        if isinstance(sampler.generator, torch.Generator):
            return "generator", sampler
        is_torchs = type(sampler) in _DRAWING
        return ("global" if is_torchs else "repeats"), sampler
    return "repeats", sampler


def _pack(state: torch.Tensor) -> str:
    return base64.b64encode(zlib.compress(state.numpy().tobytes())).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text, validate=True))), dtype=torch.uint8)
