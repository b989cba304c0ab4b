"""Which generation is restored: the newest that every rank has, and what was passed over is said."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Lineage, Offer, OfferedRecord, Replica, choose_generation, on_its_way


def offer(memory: Sequence[tuple[int, ...]] = (), disk: Sequence[tuple[int, ...]] = (), world_size: int = 2) -> Offer:
    """Memory and disk as attempt, step and repeat."""
    return Offer(
        [OfferedRecord(Generation(*one), world_size) for one in memory],
        [OfferedRecord(Generation(*one), world_size) for one in disk],
    )


def test_nothing_is_nothing() -> None:
    choice = choose_generation([offer(), offer()])
    assert choice.generation is None
    assert choice.notes == []


def test_the_newest_in_memory_of_all_ranks_wins() -> None:
    choice = choose_generation([offer([(1, 20), (1, 30)], [(1, 10)]), offer([(1, 20), (1, 30)], [(1, 10)])])
    assert choice.generation == Generation(1, 30)
    assert choice.sources == ["memory", "memory"]
    assert choice.notes == []


def test_what_another_number_of_ranks_has_in_memory_is_waited_for_if_it_is_newer() -> None:
    offers = [offer([(1, 20), (1, 30)], [(1, 10)], world_size=1), offer([], [(1, 10)], world_size=1)]
    choice = choose_generation(offers)
    assert choice.generation == Generation(1, 10)
    assert on_its_way(offers, Lineage(), choice) == Generation(1, 30)
    there = [msgspec.structs.replace(each, disk=[OfferedRecord(Generation(1, 30), 1)]) for each in offers]
    assert on_its_way(there, Lineage(), choose_generation(there)) is None
    same = [offer([(1, 30)]), offer([(1, 20)])]  # as many ranks, which wait for nobody
    assert on_its_way(same, Lineage(), choose_generation(same)) is None


def test_each_rank_died_at_another_save() -> None:
    choice = choose_generation([offer([(1, 20), (1, 30)]), offer([(1, 10), (1, 20)])])
    assert choice.generation == Generation(1, 20)
    assert choice.notes == ["step 30 of attempt 1 is passed over: it is only on rank 0, of 2 ranks"]


def test_a_rank_on_a_new_host_takes_from_disk_what_the_other_has_in_memory() -> None:
    choice = choose_generation([offer([(1, 20)], [(1, 20)]), offer([], [(1, 20)])])
    assert choice.generation == Generation(1, 20)
    assert choice.sources == ["memory", "disk"]


def part(step: int, host: str, *, holds_shared: bool, disk: Sequence[int] = ()) -> Offer:
    """A rank with one generation in memory."""
    held = [OfferedRecord(Generation(1, step), 2, shared_elsewhere=not holds_shared)]
    return Offer(held, [OfferedRecord(Generation(1, one), 2) for one in disk], host=host)


def test_the_shared_keys_are_in_the_memory_of_another_rank_of_the_host() -> None:
    choice = choose_generation([part(20, "a", holds_shared=True), part(20, "a", holds_shared=False)])
    assert (choice.generation, choice.sources, choice.sharers) == (Generation(1, 20), ["memory"] * 2, [None, 0])
    # The other way round, too: who has them is what they say, and not their number.
    assert choose_generation([part(20, "a", holds_shared=False), part(20, "a", holds_shared=True)]).sharers == [1, None]


def test_memory_without_the_shared_keys_is_of_no_use_on_another_host() -> None:
    first, second = part(20, "a", holds_shared=True, disk=[10]), part(20, "b", holds_shared=False, disk=[10])
    choice = choose_generation([first, second])
    assert (choice.generation, choice.sources, choice.sharers) == (Generation(1, 10), ["disk"] * 2, [None] * 2)
    assert choice.notes == [
        "step 20 of attempt 1 is passed over: rank 1 has its own part, and no rank on its host has the part that is "
        "equal on all"
    ]
    # The disk has all of it.
    choice = choose_generation(
        [part(20, "a", holds_shared=True, disk=[20]), part(20, "b", holds_shared=False, disk=[20])]
    )
    assert (choice.sources, choice.sharers) == (["memory", "disk"], [None, None])


def test_memory_is_of_no_use_when_the_shared_keys_are_of_another_step() -> None:
    choice = choose_generation([part(10, "a", holds_shared=True), part(20, "a", holds_shared=False)])
    assert choice.generation is None


def test_the_shared_keys_come_from_a_replica_before_who_needs_them_looks() -> None:
    lost = Offer(host="a")
    keeper = Offer(
        [OfferedRecord(Generation(1, 20), 3)],
        replicas=[
            Replica(0, Generation(1, 20), 3),
            Replica(1, Generation(1, 20), 3, shared_elsewhere=True),
        ],
        host="b",
    )
    choice = choose_generation([lost, lost, keeper])
    assert choice.sources == ["replica", "replica", "memory"]
    assert choice.holders == [[2], [2], []]
    assert choice.sharers == [None, 0, None]


def test_a_later_attempt_beats_a_higher_step() -> None:
    choice = choose_generation([offer([(2, 60)], [(1, 100)], 1)])
    assert choice.generation == Generation(2, 60)
    assert choice.sources == ["memory"]


def test_disk_wins_when_it_is_newer() -> None:
    assert choose_generation([offer([(1, 20)], [(1, 40)], 1)]).sources == ["disk"]


def test_memory_of_another_number_of_ranks_is_not_used() -> None:
    choice = choose_generation([offer([(1, 30)], [(1, 20)], 2)])
    assert choice.generation == Generation(1, 20)
    assert choice.world_size == 2
    assert "saved by 2 ranks, now there are 1" in choice.notes[0]


def test_a_record_that_turns_out_damaged_is_passed_over_by_all_and_named() -> None:
    offers = [offer([(1, 30)], [(1, 20), (1, 30)]), offer([(1, 30)], [(1, 20), (1, 30)])]
    offers[1] = offers[1].without(Generation(1, 30), "memory", "slot-0 is damaged")
    choice = choose_generation(offers)
    assert (choice.generation, choice.sources) == (Generation(1, 30), ["memory", "disk"])
    offers[1] = offers[1].without(Generation(1, 30), "disk", "rank-00001 is damaged in bytes 0-7")
    choice = choose_generation(offers)
    assert choice.generation == Generation(1, 20)
    assert "step 30 of attempt 1 is passed over" in choice.notes[0]
    assert choice.notes[1:] == ["rank 1: slot-0 is damaged", "rank 1: rank-00001 is damaged in bytes 0-7"]


_generation = st.builds(Generation, st.integers(1, 2), st.integers(0, 4), st.integers(0, 1))
_generations = st.lists(_generation, max_size=5, unique=True)


@pytest.mark.shows("the newest generation that all ranks have is restored, memory and disk mixed")
@given(st.lists(st.tuples(_generations, _generations), min_size=1, max_size=3))
def test_the_choice_is_the_newest_that_everybody_has(
    held: list[tuple[list[Generation], list[Generation]]],
) -> None:
    offers = [offer(memory, disk, len(held)) for memory, disk in held]
    choice = choose_generation(msgspec.json.decode(msgspec.json.encode(offers), type=list[Offer]))
    everywhere = set.intersection(*({*memory, *disk} for memory, disk in held))
    assert choice.generation == max(everywhere, default=None)
    if choice.generation:
        newer = {one for memory, disk in held for one in (*memory, *disk) if one > choice.generation}
        assert len(choice.notes) == len(newer)
