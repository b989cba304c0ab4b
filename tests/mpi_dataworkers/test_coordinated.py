"""Coordinated reads with real processes: all ranks of a step read one bucket of length, whatever happens to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import sample_datasets as datasets

from hetstream import DataLoader
from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.errors import StateError

BOUNDARIES = [10, 20, 40, 80]
LENGTHS = np.random.default_rng(1).lognormal(3, 0.7, 1200).astype(int)


@pytest.fixture
def ranks(service: Any) -> Iterator[Callable[..., list[DataLoader]]]:
    """Make the loaders of all ranks of one job, closed after the test."""
    made: list[DataLoader] = []

    def make(world_size: int, **options: Any) -> list[DataLoader]:
        for rank in range(world_size):
            common = {"batch_size": 4, "shuffle": True, "seed": 5, "service": service.name, "job_name": "job"}
            common |= {"rank": rank, "world_size": world_size}
            by_length = {"lengths": LENGTHS, "bucket_boundaries": BOUNDARIES, "drop_last": True}
            dataset = datasets.Augmented(len(LENGTHS))
            made.append(DataLoader(dataset, **(common | by_length | options)))
        return made[-world_size:]

    yield make
    for loader in made:
        loader.close()


def buckets_of(ids: Any) -> set[int]:
    return set(np.searchsorted(BOUNDARIES, LENGTHS[ids.numpy()], side="right").tolist())


def assert_rounds(loaders: list[DataLoader], at_round: Callable[[int], None] = lambda number: None) -> list[list[int]]:
    """Read an epoch; each round must be of one bucket and all ranks must end together. Returns the rounds' samples."""
    rounds = []
    for number, batches in enumerate(zip(*loaders, strict=True)):
        ids = [one for _, ids in batches for one in ids.tolist()]
        assert len({bucket for _, ids in batches for bucket in buckets_of(ids)}) == 1
        rounds.append(ids)
        at_round(number)
    everything = [one for ids in rounds for one in ids]
    assert len(everything) == len(set(everything))
    assert len(rounds) == len(loaders[0])
    return rounds


@pytest.mark.shows("a step has one bucket of lengths; what fills no round is mixed at the end")
@pytest.mark.shows("each round of like length is a function of (lengths, seed, epoch, step)")
@pytest.mark.parametrize(("processes", "world_size"), [(1, 1), (3, 2), (1, 5), (3, 5)])
def test_all_ranks_of_a_step_read_one_bucket(service: Any, ranks: Any, processes: int, world_size: int) -> None:
    service.start_workers(processes)
    loaders = ranks(world_size)
    first, second = assert_rounds(loaders), assert_rounds(loaders)
    assert first != second, "another epoch"
    stats = loaders[0].stats()
    assert stats["local_steps"] == 0
    assert 0 < stats["padding_waste"] < 0.5
    assert 0 <= stats["step_spread"] < 0.5


@pytest.mark.shows("rounds of like length do not mix when the dispatcher restarts")
@pytest.mark.shows("rounds of like length never mix when data workers come, go or are killed")
def test_rounds_never_mix_when_data_workers_and_the_dispatcher_come_and_go(
    service: Any, ranks: Any, wait_until: Any
) -> None:
    first = service.start_workers(1)

    def hurt(number: int) -> None:
        if number == 20:
            service.start_workers(2)
        elif number == 40:
            first.kill()
            first.wait()
        elif number == 60:
            registered = service.log("dispatcher").count("registered") + 2
            service.kill_dispatcher()
            service.start_dispatcher()
            wait_until(lambda: service.log("dispatcher").count("registered") >= registered, what="data workers again")

    loaders = ranks(3)
    rounds = assert_rounds(loaders, hurt)
    assert rounds == [
        [one for loader in loaders for one in loader._order.plan(0).indices(step, loader._order.rank).tolist()]
        for step in range(len(rounds))
    ]


@pytest.mark.shows("finite data read by length ends at one step for all ranks; too few elements are an error")
def test_finite_data_ends_at_one_step_for_all_ranks_and_nothing_is_lost(service: Any, ranks: Any) -> None:
    service.start_workers(2)
    loaders = ranks(5, drop_last=False)
    seen = [[one for _, ids in loader for one in ids.tolist()] for loader in loaders]
    assert sorted(one for ids in seen for one in ids) == list(range(len(LENGTHS)))
    assert len({loader.stats()["steps"] for loader in loaders}) == 1


@pytest.mark.shows("a restarted rank rejoins at its round")
def test_a_restarted_rank_rejoins_at_its_round(service: Any, ranks: Any) -> None:
    service.start_workers(2)
    first, second = (iter(loader) for loader in ranks(2))
    for _ in range(10):
        next(first), next(second)
    (_, loader) = ranks(2)  # both made again, as in one more process each; the second goes on
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 10})
    for (_, ids), (_, again) in zip(first, loader, strict=True):
        assert len(buckets_of(ids) | buckets_of(again)) == 1


def test_in_process_the_order_is_the_same(service: Any, ranks: Any) -> None:
    service.start_workers()
    streamed, local = (ranks(2, service=where) for where in (service.name, None))
    assert assert_rounds(streamed) == assert_rounds(local)


@pytest.mark.shows("`lengths` needs `bucket_boundaries`, and `rank` needs `world_size`")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bucket_boundaries": [3]}, "lengths is missing: lengths and bucket_boundaries must be given together"),
        ({"lengths": [1] * 8}, "bucket_boundaries is missing"),
        ({"lengths": [1] * 7, "bucket_boundaries": [3]}, "lengths has 7 entries for a dataset of 8 samples"),
        ({"lengths": [1] * 8, "bucket_boundaries": [3, 2]}, "ascending order"),
        ({"lengths": [1] * 8, "bucket_boundaries": [3], "sampler": [1]}, "with a sampler"),
        ({"lengths": 8, "bucket_boundaries": [3]}, "lengths=int: must be an array"),
        ({"lengths": [1] * 8, "bucket_boundaries": 3}, "bucket_boundaries a list"),
    ],
)
def test_half_or_wrong_settings_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionsError, match=says):
        DataLoader(datasets.Augmented(8), **options)


def test_a_state_of_other_lengths_is_refused() -> None:
    one, two = (DataLoader(datasets.Augmented(8), batch_size=2, lengths=[n] * 8, bucket_boundaries=[3]) for n in (1, 2))
    with pytest.raises(StateError, match="buckets: 3 of lengths"):
        one.load_state_dict(two.state_dict())
