"""Checkpoint writers that nobody synchronises settle on the same generations."""

from __future__ import annotations

import random

import pytest

from hetstream.checkpoint.persist.store_writer import decide_persist
from hetstream.checkpoint.record.layout import Generation


def g(*steps: int) -> set[Generation]:
    return {Generation(1, step) for step in steps}


@pytest.mark.parametrize(
    ("held", "written", "announced", "committed", "last_chance", "expected"),
    [
        pytest.param((), (), (), None, False, None, id="nothing in memory"),
        pytest.param((5, 6), (), (), None, False, 6, id="the newest, if nobody has begun"),
        pytest.param((5, 6), (), (), 6, False, None, id="all on disk"),
        pytest.param((5, 6), (), (), 7, False, None, id="older than what is on disk"),
        pytest.param((5, 6), (), (5,), None, False, 5, id="join what was begun"),
        pytest.param((5, 6), (), (7,), None, False, None, id="wait for what was begun by a rank ahead"),
        pytest.param((5, 6), (), (7,), None, True, 6, id="nothing will come: the newest"),
        pytest.param((5, 6), (), (3,), None, False, 6, id="what was begun is lost: a newer one"),
        pytest.param((5, 6), (5,), (5,), None, False, None, id="do not begin another before the last is committed"),
        pytest.param((5, 6), (5,), (5,), None, True, 6, id="except at the end"),
        pytest.param((5, 6), (6,), (5, 6), None, False, None, id="the newest begun counts"),
        pytest.param((5, 6), (6,), (5, 6), None, True, 5, id="at the end also what only others have"),
        pytest.param((5, 6), (5, 6), (5, 6), None, True, None, id="all done"),
        pytest.param((6, 8), (5,), (5, 7), None, False, 8, id="the second one is lost too"),
    ],
)
def test_turns(held, written, announced, committed, last_chance, expected) -> None:  # type: ignore[no-untyped-def]
    turn = decide_persist(
        g(*held),
        g(*written),
        g(*announced),
        None if committed is None else Generation(1, committed),
        last_chance=last_chance,
    )
    assert turn.generation == (None if expected is None else Generation(1, expected)), turn.reason


def test_ranks_settle() -> None:
    """Trainers up to two steps apart, three slots each, writers of any speed: nearly every set is completed."""
    commits = {seed: committed_of(random.Random(seed)) for seed in range(200)}
    # Even where trainers save much faster than checkpoint writers write, most parts are not written in vain.
    assert [seed for seed, (committed, most) in commits.items() if len(committed) < 0.5 * most - 1] == []
    assert [seed for seed, (committed, _) in commits.items() if committed != sorted(committed)] == []


def committed_of(rng: random.Random) -> tuple[list[Generation], int]:
    """What the ranks of one random run commit, in turn, and how much the one that wrote most has written."""
    num_ranks = rng.randrange(1, 5)
    steps = [0] * num_ranks
    writing: list[Generation | None] = [None] * num_ranks
    written: list[set[Generation]] = [set() for _ in range(num_ranks)]
    slots: list[list[Generation]] = [[] for _ in range(num_ranks)]
    announced: set[Generation] = set()
    committed: list[Generation] = []
    weights = [rng.random() + 0.02 for _ in range(2 * num_ranks)]
    for _ in range(3000):
        (move,) = rng.choices(range(2 * num_ranks), weights)
        rank = move % num_ranks
        if move < num_ranks:
            if steps[rank] <= min(steps) + 1:
                steps[rank] += 1
                slots[rank].append(Generation(1, steps[rank]))
                for old in [one for one in slots[rank][:-1] if one != writing[rank]][: max(0, len(slots[rank]) - 3)]:
                    slots[rank].remove(old)
        elif done := writing[rank]:
            written[rank].add(done)
            writing[rank] = None
            if all(done in one for one in written):
                committed.append(done)
                announced -= {one for one in announced if one <= done}
        # To write takes long, to look does not.
        for rank in range(num_ranks):
            if writing[rank] is None and rng.random() < 0.5:
                newest = max(committed, default=None)
                turn = decide_persist(slots[rank], written[rank], announced, newest, last_chance=False)
                if turn.generation:
                    announced.add(turn.generation)
                    writing[rank] = turn.generation
    return committed, max(map(len, written))
