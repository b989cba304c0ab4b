"""The order of shards and of mixtures: pure, so every position of every small case is tried."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.errors import StateError
from hetstream.mpi_dataworkers.order.interleave import (
    Interleave,
    Mixer,
    Stop,
    as_strides,
    check_mixture,
    choices_of,
    deal,
    gather,
    take,
)

LENGTHS = st.lists(st.integers(0, 4), max_size=6)


def walk(order: Interleave, lengths: list[int]) -> list[tuple[int, int]]:
    """All further steps, as (shard, step)."""
    steps = []
    while order.slots:
        place = order.slots[order.next_slot]
        if place.step == lengths[place.shard]:
            order.ended(order.next_slot)
        else:
            steps.append((place.shard, place.step))
            order.taken(order.next_slot)
    return steps


@given(lengths=LENGTHS, width=st.integers(1, 8))
def test_every_step_of_every_shard_comes_once_and_in_its_order(lengths: list[int], width: int) -> None:
    steps = walk(Interleave(range(len(lengths)), width), lengths)
    assert sorted(steps) == [(shard, step) for shard, length in enumerate(lengths) for step in range(length)]
    for shard, length in enumerate(lengths):
        assert [step for one, step in steps if one == shard] == list(range(length))


def test_shards_take_turns_and_the_next_begins_where_one_ended() -> None:
    assert walk(Interleave(range(3), 2), [1, 3, 2]) == [(0, 0), (1, 0), (1, 1), (2, 0), (1, 2), (2, 1)]


@settings(deadline=None)
@given(lengths=LENGTHS, width=st.integers(1, 4))
def test_a_state_taken_at_any_step_continues_there(lengths: list[int], width: int) -> None:
    whole = walk(Interleave(range(len(lengths)), width), lengths)
    running = Interleave(range(len(lengths)), width)
    for number in range(len(whole) + 1):
        restored = Interleave(range(len(lengths)), width)
        restored.load(json.loads(json.dumps(running.state())), len(lengths))
        assert walk(restored, lengths) == whole[number:]
        while running.slots:
            place = running.slots[running.next_slot]
            if place.step < lengths[place.shard]:
                running.taken(running.next_slot)
                break
            running.ended(running.next_slot)


FOREIGN = [
    None,
    {},
    {"slots": 3},
    {"slots": [[9, 0]], "next_slot": 0, "left": []},
    {"slots": [[0, -1]], "next_slot": 0, "left": []},
    {"slots": [], "next_slot": 0, "left": [[0, 9, 1]]},
    {"slots": [], "next_slot": 0, "left": [[0, 9, 0]]},
    {"slots": [], "next_slot": 0, "left": [[1, 1, 1]]},
]


@pytest.mark.parametrize("state", FOREIGN)
def test_a_foreign_position_is_refused(state: object) -> None:
    with pytest.raises(StateError):
        Interleave(range(2), 2).load(state, 2)


@given(numbers=st.sets(st.integers(0, 40)), count=st.integers(0, 50))
def test_numbers_are_kept_as_few_ranges(numbers: set[int], count: int) -> None:
    strides = as_strides(sorted(numbers))
    assert [number for stride in strides for number in stride] == sorted(numbers)
    assert take(strides, count) == sorted(numbers)[:count]
    assert [number for stride in strides for number in stride] == sorted(numbers)[count:]
    assert len(as_strides([*range(3, 900, 4), *range(901, 2000)])) == 2


def run_of(num_ranks: int, width: int, lengths: list[int]) -> list[Interleave]:
    return [Interleave(range(rank, len(lengths), num_ranks), max(1, width // num_ranks)) for rank in range(num_ranks)]


def steps_of(ranks: list[Interleave], lengths: list[int], num_steps: int) -> list[tuple[int, int]]:
    """So many steps of each rank, while it has some, in the order of the steps and ranks."""
    taken = []
    for _ in range(num_steps):
        for order in ranks:
            while order.slots:
                place = order.slots[order.next_slot]
                if place.step < lengths[place.shard]:
                    taken.append((place.shard, place.step))
                    order.taken(order.next_slot)
                    break
                order.ended(order.next_slot)
    return taken


def dealt_anew(ranks: list[Interleave], num_shards: int, num_ranks: int, width: int) -> list[Interleave]:
    whole = json.loads(json.dumps(gather([order.state() for order in ranks], num_shards)))
    anew = [Interleave([], 1) for _ in range(num_ranks)]
    for rank, order in enumerate(anew):
        order.load(deal(whole, num_shards, rank, num_ranks, max(1, width // num_ranks)), num_shards)
    return anew


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), max_size=12),
    width=st.integers(1, 8),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    num_steps=st.integers(0, 7),
)
def test_positions_of_all_ranks_are_dealt_out_anew_and_nothing_is_lost(
    lengths: list[int], width: int, sizes: list[int], num_steps: int
) -> None:
    ranks = run_of(sizes[0], width, lengths)
    seen = steps_of(ranks, lengths, num_steps)
    for size in sizes[1:]:
        ranks = dealt_anew(ranks, len(lengths), size, width)
        seen += steps_of(ranks, lengths, num_steps)
    seen += [step for order in ranks for step in walk(order, lengths)]
    assert sorted(seen) == [(shard, step) for shard, length in enumerate(lengths) for step in range(length)]


@pytest.mark.shows("a state of four ranks continues with 1, 2, 3 or 8 in the same global order")
@pytest.mark.parametrize("sizes", [(4, 2), (2, 8), (8, 1), (1, 4), (4, 4)])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
def test_with_shards_of_one_length_the_common_order_stays(sizes: tuple[int, int], num_steps: int) -> None:
    lengths = [10] * 8
    whole = steps_of(run_of(sizes[0], 8, lengths), lengths, 80)
    before = run_of(sizes[0], 8, lengths)
    seen = steps_of(before, lengths, num_steps)
    after = dealt_anew(before, 8, sizes[1], 8)
    assert seen + steps_of(after, lengths, 80) == whole


def test_positions_that_name_a_shard_twice_are_refused() -> None:
    states = [Interleave(range(rank, 8, 2), 2).state() for rank in (0, 0)]
    with pytest.raises(StateError, match="name a shard twice"):
        gather(states, 8)


def mixed(mixer: Mixer, lengths: list[int], counts: list[int], limit: int = 10**6) -> list[tuple[int, int]]:
    """Further elements as (part, element); `counts` are the positions in the parts, kept up to date."""
    elements: list[tuple[int, int]] = []
    while len(elements) < limit and (part := mixer.choose()) is not None:
        if counts[part] < lengths[part]:
            elements.append((part, counts[part]))
            counts[part] += 1
            mixer.taken()
        elif mixer.exhausted(part):
            counts[part] = 0
    return elements


@pytest.mark.shows("datasets can be zipped, concatenated, and mixed by weights")
def test_mixing_keeps_the_weights() -> None:
    parts = Counter(part for part, _ in mixed(Mixer([1, 3], 5, 0, "first_exhausted"), [10**6] * 2, [0, 0], 4000))
    assert parts[0] / 4000 == pytest.approx(0.25, abs=0.03)


@pytest.mark.shows("a mixture ends by each of its three stop rules after the documented number of elements")
@pytest.mark.parametrize("seed", range(5))
def test_stop_rules_give_the_documented_counts(seed: int) -> None:
    lengths = [3, 10, 5]
    weights = [1.0, 2.0, 1.0]
    every = Counter(mixed(Mixer(weights, seed, 0, "all_exhausted"), lengths, [0] * 3))
    assert every == Counter({(part, element): 1 for part in range(3) for element in range(lengths[part])})
    first = mixed(Mixer(weights, seed, 0, "first_exhausted"), lengths, [0] * 3)
    counts = Counter(part for part, _ in first)
    assert any(counts[part] == lengths[part] for part in range(3))
    assert all(counts[part] <= lengths[part] for part in range(3))
    cycled = Counter(mixed(Mixer(weights, seed, 0, "cycle_until_all"), lengths, [0] * 3))
    assert all(cycled[part, element] >= 1 for part in range(3) for element in range(lengths[part]))
    assert any({cycled[part, element] for element in range(lengths[part])} == {1} for part in range(3))


def test_epochs_and_seeds_mix_differently_and_the_same_ones_alike() -> None:
    runs = [
        mixed(Mixer([1, 1], seed, epoch, "all_exhausted"), [20, 20], [0, 0])
        for seed, epoch in ((1, 0), (1, 1), (2, 0), (1, 0))
    ]
    assert runs[0] == runs[3]
    assert runs[0] not in runs[1:3]


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "cycle_until_all"])
def test_a_mixture_continues_from_any_step(stop: Stop) -> None:
    lengths = [2, 5, 0, 3]
    whole = mixed(Mixer([1, 2, 1, 1], 3, 1, stop), lengths, [0] * 4, 40)
    running, counts = Mixer([1, 2, 1, 1], 3, 1, stop), [0] * 4
    for number in range(len(whole)):
        restored = Mixer([1, 2, 1, 1], 3, 1, stop)
        restored.load(json.loads(json.dumps(running.state())))
        assert mixed(restored, lengths, list(counts), 40 - number) == whole[number:]
        mixed(running, lengths, counts, 1)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    data=st.data(),
    seed=st.integers(0, 2**40),
    stop=st.sampled_from(["first_exhausted", "all_exhausted", "cycle_until_all"]),
)
def test_all_choices_at_once_are_those_of_the_mixer(
    lengths: list[int], data: st.DataObject, seed: int, stop: Stop
) -> None:
    weights = [data.draw(st.sampled_from([0.1, 1.0, 2.5])) for _ in lengths]
    one_by_one = [part for part, _ in mixed(Mixer(weights, seed, 0, stop), lengths, [0] * len(lengths))]
    assert choices_of(lengths, weights, seed, stop).tolist() == one_by_one


def test_problems_of_a_mixture_are_told_all_at_once() -> None:
    with pytest.raises(ConfigError, match=r"2 parts need .*; .*positive number; seed='a': .*; stop='never'"):
        check_mixture(2, [1, -1, 2], "a", "never")  # type: ignore[arg-type]
