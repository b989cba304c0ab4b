"""Coordinated reads of a stream: rounds as a pure function of the elements, and from real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_datasets as datasets
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetstream import DataLoader
from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.errors import PipelineError, StateError
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline
from hetstream.mpi_dataworkers.ops.streams import Shard, SharedRounds, open_shard
from hetstream.mpi_dataworkers.order.bucketing import RoundFormer, StreamBuckets
from hetstream.mpi_dataworkers.wire.messages import ShardOrder

BOUNDARIES = [10, 20, 40]
NUM_ELEMENTS = 600
# Of each element, by its number.
LENGTHS = np.random.default_rng(2).integers(1, 60, NUM_ELEMENTS)


def length_of(element: Any) -> int:
    return int(LENGTHS[element[1]])


def bucket_of(number: int) -> int:
    return int(np.searchsorted(BOUNDARIES, LENGTHS[number], side="right"))


def rounds_of(buckets: list[int], batch_size: int, world_size: int, drop_last: bool) -> list[list[list[int]]]:
    former = RoundFormer[int](batch_size, world_size, drop_last)
    rounds = [one for number, bucket in enumerate(buckets) for one in former.add(number, bucket)]
    return rounds + list(former.end())


elements = st.lists(st.integers(0, 4), max_size=150)


@pytest.mark.shows("each round of like length is a function of (lengths, seed, epoch, step)")
@given(elements, st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_rounds_lose_and_repeat_nothing(buckets: list[int], batch_size: int, world_size: int, drop_last: bool) -> None:
    if 0 < len(buckets) < world_size and not drop_last:
        with pytest.raises(PipelineError, match=f"a shard has {len(buckets)} elements for {world_size} ranks"):
            rounds_of(buckets, batch_size, world_size, drop_last)
        return
    rounds = rounds_of(buckets, batch_size, world_size, drop_last)
    given_out = [number for one in rounds for batch in one for number in batch]
    assert len(given_out) == len(set(given_out))
    full = batch_size * world_size
    kept = sum(buckets.count(bucket) // full * full for bucket in set(buckets))
    assert len(given_out) == (kept if drop_last else len(buckets))
    most = batch_size + (batch_size == 1)  # see RoundFormer._divide
    for number, one in enumerate(rounds):
        sizes = [len(batch) for batch in one]
        assert len(one) == world_size, "every rank has the step"
        assert min(sizes) >= 1
        assert max(sizes) <= most
        assert max(sizes) - min(sizes) <= 1
        in_buckets = {buckets[element] for batch in one for element in batch}
        # All full rounds but one that was divided again with what was left.
        if number < kept // full - 1 or drop_last:
            assert len(in_buckets) == 1
            assert sizes == [batch_size] * world_size
            arrived = [element for batch in one for element in batch]
            assert arrived == sorted(arrived)


@pytest.mark.shows("a step has one bucket of lengths; what fills no round is mixed at the end")
def test_leftovers_fewer_than_ranks_are_divided_with_the_last_round() -> None:
    assert rounds_of([0] * 8 + [1], 4, 2, False) == [[[0, 1], [2, 3]], [[4, 5], [6, 7, 8]]]
    assert rounds_of([0] * 8 + [1, 2], 4, 2, False) == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8], [9]]]


def reader(rank: int, shared: SharedRounds | None, dataset: Any = None) -> Any:
    order = ShardOrder("itself", 0, 1, 4, False, False, 0, 0, rank, 2)
    buckets = StreamBuckets(length_of, tuple(BOUNDARIES))
    pipeline = Pipeline(dataset or datasets.Log(200), collate, -1, stream_buckets=buckets)
    return open_shard(Shard(pipeline, order, 5, 0), shared=shared, pipeline_id="d")


def collate(samples: list[Any]) -> Any:
    return torch.stack([values for values, _ in samples]) + torch.rand(1), [index for _, index in samples]


def steps_of(one: Any, first: int = 0) -> list[Any]:
    made = []
    while (step := one.read(first + len(made))) is not None:
        made.append((step.batch[0].numpy().tobytes(), step.batch[1]))
    return made


class Counted(datasets.Log):
    """Counts how many elements were read, by all copies."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            Counted.read += 1
            yield element


def test_one_process_reads_a_shard_once_for_all_ranks_wherever_they_are() -> None:
    alone = [steps_of(reader(rank, None)) for rank in range(2)]
    shared = SharedRounds()
    Counted.read = 0
    first, second = (reader(rank, shared, Counted(200)) for rank in range(2))
    ahead = [first.read(step).batch[1] for step in range(12)]
    assert [ids for _, ids in steps_of(second)] == [ids for _, ids in alone[1]]
    assert ahead + [ids for _, ids in steps_of(first, 12)] == [ids for _, ids in alone[0]]
    assert Counted.read == 200
    assert first.num_steps == second.num_steps == len(alone[0])
    again = reader(1, shared, Counted(200))
    assert steps_of(again, 7) == alone[1][7:], "a rank that comes back; its slices were taken"
    assert Counted.read == 400


def test_an_element_that_raises_takes_the_place_of_a_round_in_every_rank() -> None:
    def outcomes(one: Any) -> list[Any]:
        made: list[Any] = []
        while True:
            try:
                if (step := one.read(len(made))) is None:
                    return made
                made.append(step.batch[1])
            except Exception as error:  # noqa: BLE001, whatever user code raises is its step's outcome
                made.append(str(error.__cause__))

    shared = SharedRounds()
    first, second = (outcomes(reader(rank, shared, datasets.PoisonedLog(200))) for rank in range(2))
    assert first.count("element 37 is bad") == 1
    assert first.index("element 37 is bad") == second.index("element 37 is bad")
    assert len(first) == len(second)


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(three: Any) -> Iterator[Callable[..., list[DataLoader]]]:
    """Make the loaders of two ranks of one job, closed after the test."""
    made: list[DataLoader] = []

    def make(dataset: Any = None, **options: Any) -> list[DataLoader]:
        for rank in range(2):
            common = {"batch_size": 4, "seed": 5, "service": three.name, "job_name": "job", "num_shards": 3}
            common |= {"rank": rank, "world_size": 2, "length_of": length_of, "bucket_boundaries": BOUNDARIES}
            made.append(DataLoader(dataset or datasets.Log(NUM_ELEMENTS), **({"num_shards": 8} | common | options)))
        return made[-2:]

    yield make
    for loader in made:
        loader.close()


def read(loaders: list[DataLoader], after: Callable[[int], None] = lambda number: None) -> list[list[Any]]:
    """Read an epoch in step: all ranks end together, every element comes once, full rounds are of one bucket."""
    rounds = []
    for number, batches in enumerate(zip(*loaders, strict=True)):
        rounds.append([(values.numpy().tobytes(), ids.tolist()) for values, ids in batches])
        after(number)
    everything = [index for one in rounds for _, ids in one for index in ids]
    assert sorted(everything) == list(range(NUM_ELEMENTS))
    mixed = [one for one in rounds if len({bucket_of(index) for _, ids in one for index in ids}) > 1]
    # At most so many of each shard: its leftovers fill fewer rounds than there are buckets.
    assert len(mixed) <= 3 * len(BOUNDARIES)
    return rounds


@pytest.mark.shows("a step has one bucket of lengths; what fills no round is mixed at the end")
@pytest.mark.shows("each round of like length is a function of (lengths, seed, epoch, step)")
@pytest.mark.shows("finite data read by length ends at one step for all ranks; too few elements are an error")
def test_all_ranks_read_rounds_of_one_bucket_and_end_together(ranks: Any) -> None:
    streamed, local = ranks(), ranks(service=None)
    assert read(streamed) == read(local)
    assert read(streamed) == read(local), "another epoch"
    assert [loader.stats()["local_steps"] for loader in streamed] == [0, 0]


@pytest.mark.shows("rounds of like length never mix when data workers come, go or are killed")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_data_worker_killed_in_mid_shard_mixes_and_loses_nothing(
    service: Any, ranks: Any, tmp_path: Path, processes: int
) -> None:
    service.start_workers(processes)
    flag = tmp_path / "struck"
    dataset = datasets.StrikingLog(NUM_ELEMENTS, 301, flag, signal.SIGKILL)
    assert read(ranks(dataset, service=service.name)) == read(ranks(service=None))
    assert flag.exists()
    assert int(flag.read_text()) != os.getpid()


@pytest.mark.shows("rounds of like length do not mix when the dispatcher restarts")
def test_a_dispatcher_killed_in_mid_shard_mixes_and_loses_nothing(service: Any, ranks: Any) -> None:
    service.start_workers(2)

    def restart(number: int) -> None:
        if number in (5, 30):
            service.kill_dispatcher()
            service.start_dispatcher()

    streamed = ranks(service=service.name, buffer_bytes=4000)
    assert read(streamed, restart) == read(ranks(service=None))
    assert service.log("dispatcher").count("dispatcher ready") == 3


@pytest.mark.shows("a restarted rank rejoins at its round")
def test_a_rank_that_restarts_rejoins_at_its_round(ranks: Any) -> None:
    expected = [one[1] for one in read(ranks(service=None))]
    first, second = ranks()
    pair = iter(first), iter(second)
    for _ in range(20):
        next(pair[0]), next(pair[1])
    state = first.state_dict()
    assert state == second.state_dict(), "a rank goes on from any rank's state"
    del pair
    second.load_state_dict(state)
    assert [(values.numpy().tobytes(), ids.tolist()) for values, ids in second] == expected[20:]


@pytest.mark.shows("finite data read by length ends at one step for all ranks; too few elements are an error")
def test_a_shard_with_fewer_elements_than_ranks_is_refused_with_what_to_do(ranks: Any) -> None:
    for loader in ranks(datasets.Log(4), service=None):
        with pytest.raises(PipelineError, match=r"a shard has 1 elements for 2 ranks.*drop_last=True"):
            list(loader)
    assert [list(loader) for loader in ranks(datasets.Log(4), service=None, drop_last=True)] == [[], []]


@pytest.mark.shows("`lengths` needs `bucket_boundaries`, and `rank` needs `world_size`")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bucket_boundaries": None}, "bucket_boundaries=None with length_of"),
        ({"bucket_boundaries": [3, 2]}, "ascending order"),
        ({"length_of": 3}, "length_of=3: must be a function"),
        ({"lengths": [1]}, "lengths and length_of"),
        ({"batch_size": None}, "batch_size=None: a round is a batch"),
        ({"sharding": "off", "num_shards": None}, "the ranks would not read alike"),
        ({"visitation": "at_most_once"}, "the ranks would not read alike"),
        ({"in_order": False}, "in_order=False"),
        ({"dataset": datasets.Augmented(8), "num_shards": None}, "give the lengths of all samples"),
    ],
)
def test_what_does_not_go_with_rounds_is_refused(ranks: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionsError, match=says):
        ranks(**options)


def test_lengths_that_are_none_and_states_of_other_rounds_are_refused(ranks: Any) -> None:
    loader, _ = ranks(service=None, length_of=datasets.no_length)
    with pytest.raises(PipelineError, match="length_of gives -1"):
        next(iter(loader))
    with pytest.raises(StateError, match="buckets"):
        loader.load_state_dict(ranks(service=None)[0].state_dict())
