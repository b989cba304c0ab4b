"""The shards of an epoch and how far they were read: pure, and the same after a saved state."""

from __future__ import annotations

from typing import Any

import pytest
import sample_datasets as datasets
from torch.utils.data import BatchSampler, SequentialSampler

from hetstream.mpi_dataworkers.loader.options import LoaderOptions
from hetstream.mpi_dataworkers.loader.shards import Division, ListedSteps, PassShards, PlannedSteps
from hetstream.mpi_dataworkers.order.interleave import Slot
from hetstream.mpi_dataworkers.order.sharding import EpochPlan

DATA = datasets.Augmented(20)


def division_of(**keywords: Any) -> Division:
    options = LoaderOptions(DATA, 4, seed=3, **keywords)
    division = options.division(options.sharding_plan(), 0, 1)
    assert division is not None
    return division


def read(shards: PassShards, count: int) -> list[tuple[int, int]]:
    """Take so many steps, as far as there are: (shard, step) of each."""
    taken: list[tuple[int, int]] = []
    while shards.slots and len(taken) < count:
        number = shards.next_slot
        slot = shards.slots[number]
        steps = shards.steps_of(slot.shard)
        assert isinstance(steps, PlannedSteps)
        if slot.step == steps.num_steps:
            shards.ended(number)
            continue
        taken.append((slot.shard, slot.step))
        shards.took(number, slot.step + 1, b"at %d" % slot.step)
    return taken


def test_undivided_data_is_one_shard_and_its_position_says_all() -> None:
    steps = PlannedSteps(EpochPlan(20, 4, 1, False, False, 0, 0), 0)
    shards = PassShards.undivided(steps, 0, 0, first_step=3)
    assert (shards.slots, shards.position, shards.has_more()) == ([Slot(0, 3)], 3, True)
    assert read(shards, 9) == [(0, 3), (0, 4)]
    assert (shards.slots, shards.position, shards.has_more()) == ([], 5, False)
    assert shards.state([]) is None
    assert shards.in_order
    assert not shards.any_order


def test_what_was_taken_of_a_programs_sampler_is_forgotten_and_its_digest_is_kept() -> None:
    order = ListedSteps(BatchSampler(SequentialSampler(DATA), 4, False), batched=True)
    shards = PassShards.undivided(order, 0, 0)
    assert shards.drawn() == ""
    assert shards.has_more()
    shards.took(0, 1)
    digest = shards.drawn()
    assert digest
    assert order.indices(0) is None, "forgotten"
    again = ListedSteps(BatchSampler(SequentialSampler(DATA), 4, False), batched=True)
    again.skip(1, digest)
    assert PassShards.undivided(again, 0, 0, first_step=1).drawn() == digest


@pytest.mark.parametrize("before", range(7))
def test_a_state_at_any_step_goes_on_with_the_same_steps(before: int) -> None:
    division = division_of(sharding="data", num_shards=3)
    expected = read(PassShards.divided(division, 3, 0, 1, None), 99)
    assert len(expected) == 6
    shards = PassShards.divided(division, 3, 0, 1, None)
    assert read(shards, before) == expected[:before]
    state = shards.state([])
    resumed = PassShards.divided(division, 3, 0, 1, state)
    assert (resumed.position, resumed.snapshots, resumed.state([])) == (before, shards.snapshots, state)
    assert read(resumed, 99) == expected[before:]
    assert not resumed.has_more()


def test_steps_that_were_taken_out_of_order_are_passed_over() -> None:
    division = division_of(in_order=False)
    shards = PassShards.divided(division, 3, 0, 1, None)
    assert shards.any_order
    assert not shards.in_order
    shards.took(0, 1)
    state = shards.state([(2, 4)])
    resumed = PassShards.divided(division, 3, 0, 1, state)
    assert resumed.taken_out_of_order() == [(2, 4)]
    resumed.took(0, 2)
    resumed.skip_taken()
    assert resumed.slots == [Slot(0, 4)]
    assert resumed.taken_out_of_order() == []
