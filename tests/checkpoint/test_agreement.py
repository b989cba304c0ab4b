"""Which generation is restored: the newest that every rank has, and what was passed over is said."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.agreement import Held, Offer, agree
from checkpoint.generation import Generation


def offer(memory: Sequence[tuple[int, ...]] = (), disk: Sequence[tuple[int, ...]] = (), world_size: int = 2) -> Offer:
    """Memory and disk as attempt, step and repeat."""
    return Offer(
        [Held(Generation(*one), world_size) for one in memory],
        [Held(Generation(*one), world_size) for one in disk],
    )


def test_nothing_is_nothing() -> None:
    choice = agree([offer(), offer()])
    assert choice.generation is None
    assert choice.notes == []


def test_the_newest_in_memory_of_all_ranks_wins() -> None:
    choice = agree([offer([(1, 20), (1, 30)], [(1, 10)]), offer([(1, 20), (1, 30)], [(1, 10)])])
    assert choice.generation == Generation(1, 30)
    assert choice.sources == ["memory", "memory"]
    assert choice.notes == []


def test_each_rank_died_at_another_save() -> None:
    choice = agree([offer([(1, 20), (1, 30)]), offer([(1, 10), (1, 20)])])
    assert choice.generation == Generation(1, 20)
    assert choice.notes == ["step 30 of attempt 1 is passed over: only rank(s) 0 have it, of 2 rank(s)"]


def test_a_rank_on_a_new_host_takes_from_disk_what_the_other_has_in_memory() -> None:
    choice = agree([offer([(1, 20)], [(1, 20)]), offer([], [(1, 20)])])
    assert choice.generation == Generation(1, 20)
    assert choice.sources == ["memory", "disk"]


def test_a_later_attempt_beats_a_higher_step() -> None:
    choice = agree([offer([(2, 60)], [(1, 100)], 1)])
    assert choice.generation == Generation(2, 60)
    assert choice.sources == ["memory"]


def test_disk_wins_when_it_is_newer() -> None:
    assert agree([offer([(1, 20)], [(1, 40)], 1)]).sources == ["disk"]


def test_memory_of_another_number_of_ranks_is_not_used() -> None:
    choice = agree([offer([(1, 30)], [(1, 20)], 2)])
    assert choice.generation == Generation(1, 20)
    assert choice.world_size == 2
    assert "saved by 2 rank(s), now there are 1" in choice.notes[0]


def test_a_record_that_turns_out_damaged_is_passed_over_by_all_and_named() -> None:
    offers = [offer([(1, 30)], [(1, 20), (1, 30)]), offer([(1, 30)], [(1, 20), (1, 30)])]
    offers[1] = offers[1].without(Generation(1, 30), "memory", "slot-0 is damaged")
    choice = agree(offers)
    assert (choice.generation, choice.sources) == (Generation(1, 30), ["memory", "disk"])
    offers[1] = offers[1].without(Generation(1, 30), "disk", "rank-00001 is damaged in bytes 0-7")
    choice = agree(offers)
    assert choice.generation == Generation(1, 20)
    assert "step 30 of attempt 1 is passed over" in choice.notes[0]
    assert choice.notes[1:] == ["rank 1: slot-0 is damaged", "rank 1: rank-00001 is damaged in bytes 0-7"]


_generation = st.builds(Generation, st.integers(1, 2), st.integers(0, 4), st.integers(0, 1))
_generations = st.lists(_generation, max_size=5, unique=True)


@given(st.lists(st.tuples(_generations, _generations), min_size=1, max_size=3))
def test_the_choice_is_the_newest_that_everybody_has(
    held: list[tuple[list[Generation], list[Generation]]],
) -> None:
    offers = [offer(memory, disk, len(held)) for memory, disk in held]
    choice = agree(msgspec.json.decode(msgspec.json.encode(offers), type=list[Offer]))
    everywhere = set.intersection(*({*memory, *disk} for memory, disk in held))
    assert choice.generation == max(everywhere, default=None)
    if choice.generation:
        newer = {one for memory, disk in held for one in (*memory, *disk) if one > choice.generation}
        assert len(choice.notes) == len(newer)
