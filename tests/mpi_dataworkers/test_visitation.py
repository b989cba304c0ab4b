"""How often each element comes, and in which order: every policy and promise with real data workers and real kills."""

from __future__ import annotations

import copy
import json
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets
import torch
from torch.utils.data import IterableDataset

from hetstream import DataLoader, ShardingPolicy, merge_states
from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.errors import JobNameConflict, PipelineError, StateError
from tests.mpi_dataworkers.batches import as_bytes, check_that_a_lost_worker_costs_nothing


def ids_of(loader: Any) -> list[int]:
    return [index for _, ids in loader for index in ids.tolist()]


@pytest.fixture
def loaders() -> Iterator[Callable[..., DataLoader]]:
    """Make loaders that are closed after the test."""
    made: list[DataLoader] = []

    def make(dataset: Any, **options: Any) -> DataLoader:
        # As many shards as there can be data workers, where the program would say so by num_workers.
        divided = isinstance(dataset, IterableDataset) and "sharding" not in options
        made.append(DataLoader(dataset, **{"batch_size": 4} | ({"num_shards": 8} if divided else {}) | options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.mark.shows("`__iter__` may be called again, and `__len__` gives batches or TypeError")
@pytest.mark.shows("one shard, or an indexed dataset without shuffle, is the sequence itself")
def test_a_stream_gives_the_same_batches_for_any_number_of_data_workers(three: Any, loaders: Any) -> None:
    streamed, local = loaders(datasets.Log(203), service=three.name), loaders(datasets.Log(203))
    for _ in range(2):
        batches = as_bytes(streamed)
        assert batches == as_bytes(local)
        assert sorted(index for _, ids in batches for index in ids) == list(range(203))
    assert streamed.stats()["local_steps"] == 0
    with pytest.raises(TypeError):
        len(streamed)


@pytest.mark.shows("one shard, or an indexed dataset without shuffle, is the sequence itself")
def test_one_shard_is_the_sequence_itself(three: Any, loaders: Any) -> None:
    loader = loaders(datasets.PlainLog(50), service=three.name, num_shards=1)
    assert ids_of(loader) == list(range(50))


@pytest.mark.shows("dynamic sharding gives each element once, also with fewer elements than data workers")
@pytest.mark.shows("the last, partial batch comes, or `drop_last` leaves it out")
@pytest.mark.parametrize("where", ["service", "local", "process"])
@pytest.mark.parametrize("length", [0, 1, 3, 41])
def test_short_streams_end_at_once_and_exactly(three: Any, loaders: Any, length: int, where: str) -> None:
    options = {"service": {"service": three.name}, "local": {}, "process": {"num_workers": 2}}[where]
    loader = loaders(datasets.Log(length), **options)
    for _ in range(2):
        assert sorted(ids_of(loader)) == list(range(length))
    dropping = loaders(datasets.Log(length), drop_last=True, num_shards=2, **options)
    assert len(ids_of(dropping)) == sum((len(range(shard, length, 2)) // 4) * 4 for shard in range(2))


@pytest.mark.shows("every record of every file once, also with the list shuffled")
@pytest.mark.parametrize("policy", ["data", "file", "file_or_data", "dynamic"])
@pytest.mark.parametrize("shuffle", [None, True])
def test_files_come_once_whole_under_each_policy(
    three: Any, loaders: Any, tmp_path: Path, policy: str, shuffle: bool | None
) -> None:
    files = [tmp_path / f"part{number}" for number in range(11)]
    for number, file in enumerate(files):
        file.write_text("".join(f"{100 * number + line}\n" for line in range(number)))
    if policy == "data":
        shuffle = None
    options: dict[str, Any] = {"sharding": policy, "num_shards": 3, "shuffle": shuffle, "batch_size": None}
    streamed = loaders(datasets.Folder(files), service=three.name, **options)
    first, second = list(streamed), list(streamed)
    assert sorted(first) == sorted(100 * number + line for number in range(11) for line in range(number))
    assert first == list(loaders(datasets.Folder(files), **options))
    assert (first == second) == (not shuffle)
    assert sorted(second) == sorted(first)


@pytest.mark.shows('a stream with `sharding="off"` gives each element as often as there are data workers')
def test_off_gives_every_element_as_often_as_there_are_data_workers(three: Any, loaders: Any) -> None:
    for dataset in (datasets.Augmented(30), datasets.PlainLog(30)):
        loader = loaders(dataset, service=three.name, sharding=ShardingPolicy.OFF)
        assert Counter(ids_of(loader)) == Counter(list(range(30)) * 3)
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.shows("without sharding all data workers have the same order only if there is a seed")
@pytest.mark.parametrize("seed", [None, 3])
def test_off_shuffles_alike_only_with_a_seed(three: Any, loaders: Any, seed: int | None) -> None:
    loader = loaders(datasets.Augmented(16), service=three.name, sharding="off", shuffle=True, seed=seed)
    iterator = iter(loader)
    batches = [next(iterator)[1].tolist() for _ in range(12)]
    assert list(iterator) == []
    orders: dict[tuple[int, ...], int] = Counter(tuple(batch) for batch in batches)
    assert sorted(index for batch in batches for index in batch) == sorted(list(range(16)) * 3)
    assert set(orders.values()) == ({3} if seed is not None else {1})


def test_indices_divided_by_a_fixed_number_keep_length_and_order(three: Any, loaders: Any) -> None:
    options: dict[str, Any] = {"sharding": "data", "num_shards": 5, "shuffle": True, "seed": 1}
    streamed = loaders(datasets.Augmented(53), service=three.name, **options)
    local = loaders(datasets.Augmented(53), **options)
    batches = as_bytes(streamed)
    assert batches == as_bytes(local)
    assert len(batches) == len(streamed) == 5 * 3
    assert all(len({index % 5 for index in ids}) == 1 for _, ids in batches)
    assert sorted(index for _, ids in batches for index in ids) == list(range(53))


# How a stopped one is noticed does not depend on what it makes: see `test_service.py`. It takes 15 s.
@pytest.mark.shows("a data worker that is killed in mid-shard costs nothing, and its leases are free at once")
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)],
    ids=["killed", "stopped"],
)
def test_a_data_worker_lost_in_mid_shard_costs_nothing(
    service: Any, loaders: Any, tmp_path: Path, number: signal.Signals
) -> None:
    flag = tmp_path / "struck"
    service.start_workers(2)
    loader = loaders(datasets.StrikingLog(400, 77, flag, number), service=service.name)
    reference = loaders(datasets.Log(400))
    check_that_a_lost_worker_costs_nothing(loader, reference, flag, number)


def test_a_dispatcher_killed_in_mid_shard_comes_back_where_it_was(service: Any, loaders: Any) -> None:
    service.start_workers(2)
    # Room for a few steps of each shard, so that most of them are made after the restart.
    loader = loaders(datasets.Log(900), service=service.name, buffer_bytes=4000)
    seen = []
    for values, ids in loader:
        seen.append((values.numpy().tobytes(), ids.tolist()))
        if len(seen) == 20:
            service.kill_dispatcher()
            service.start_dispatcher()
    assert seen == as_bytes(loaders(datasets.Log(900)))
    assert loader.stats()["local_steps"] == 0


def test_without_data_workers_a_stream_is_read_in_the_trainer(service: Any, loaders: Any) -> None:
    loader = loaders(datasets.Log(100), service=service.name)
    before = torch.random.get_rng_state()
    assert as_bytes(loader) == as_bytes(loaders(datasets.Log(100)))
    assert loader.stats()["local_steps"] > 0
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("iterable", [True, False], ids=["stream", "indices"])
def test_at_most_once_goes_on_without_what_a_lost_worker_held(
    service: Any, loaders: Any, tmp_path: Path, iterable: bool
) -> None:
    flag = tmp_path / "struck"
    service.start_workers(2)
    striking = datasets.StrikingLog if iterable else datasets.Striking
    dataset = striking(400, 77, flag, signal.SIGKILL)
    loader = loaders(dataset, service=service.name, visitation="at_most_once")
    ids = ids_of(loader)
    stats = loader.stats()
    assert flag.exists()
    assert 77 not in ids
    assert len(set(ids)) == len(ids), "nothing twice"
    if iterable:
        # Of each shard that the data worker held, the rest.
        for shard in range(8):
            missing = [index for index in range(shard, 400, 8) if index not in ids]
            assert missing == list(range(missing[0], 400, 8)) if missing else shard != 77 % 8
        assert 1 <= stats["lost_shards"] <= 8
    else:
        assert len(ids) + 4 * stats["lost_steps"] == 400
        assert stats["lost_steps"] > 0
    assert sorted(ids_of(loader)) == list(range(400)), "the next epoch has all of it again"


@pytest.mark.parametrize("options", [{}, {"sharding": "off"}, {"sharding": "data", "num_shards": 3}], ids=str)
def test_steps_as_they_come_are_the_same_steps_also_after_a_resume(
    three: Any, loaders: Any, options: dict[str, Any]
) -> None:
    make = {"shuffle": True, "seed": 2, "service": three.name, "in_order": False} | options
    whole = sorted(as_bytes(loaders(datasets.Augmented(200), **make)))
    reference = sorted(as_bytes(loaders(datasets.Augmented(200), shuffle=True, seed=2, **options)))
    assert whole == (sorted(reference * 3) if "off" in options.values() else reference)
    loader = loaders(datasets.Augmented(200), **make)
    iterator = iter(loader)
    first = as_bytes(islice(iterator, 17))
    state = json.loads(json.dumps(loader.state_dict()))
    del iterator
    resumed = loaders(datasets.Augmented(200), **make)
    resumed.load_state_dict(state)
    assert sorted(first + as_bytes(resumed)) == whole
    here = loaders(datasets.Augmented(200), **make | {"service": None})
    here.load_state_dict(state)
    assert sorted(first + as_bytes(here)) == whole


@pytest.mark.parametrize("at", [0, 1, 13, 25, 26, 27, 40])
def test_the_state_of_a_stream_continues_at_any_step_with_other_workers(three: Any, loaders: Any, at: int) -> None:
    whole = [*as_bytes(loader := loaders(datasets.Log(100))), *as_bytes(loader)]
    saved = loaders(datasets.Log(100))
    taken = 0
    while taken < at:
        for _ in saved:
            taken += 1
            if taken == at:
                break
    state = json.loads(json.dumps(saved.state_dict()))
    assert len(json.dumps(state)) < 2000
    resumed = loaders(datasets.Log(100), service=three.name)
    resumed.load_state_dict(state)
    rest = as_bytes(resumed)
    while len(rest) < len(whole) - at:
        rest += as_bytes(resumed)
    assert rest == whole[at:]


def test_a_state_of_another_division_is_refused(loaders: Any) -> None:
    loader = loaders(datasets.Log(100), num_shards=4)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(StateError, match="num_shards: 4 in the state, 8 here"):
        loaders(datasets.Log(100)).load_state_dict(loader.state_dict())
    position = {"slots": [[0, 1]], "next_slot": 0, "left": []}
    whole = {"rank": 0, "copies": 1, "step": 1, "taken_out_of_order": [], "snapshots": {}} | position
    for damage in (
        {"slots": [[99, 1]]},
        {"copies": 10**11},
        {"next_slot": 3},
        {"taken_out_of_order": [[3, 2]]},
        {"snapshots": {"0": "x"}},
    ):
        with pytest.raises(StateError):
            loader.load_state_dict(loader.state_dict() | {"shards": json.dumps(whole | damage)})
    loader.load_state_dict(loader.state_dict() | {"shards": json.dumps(whole)})


def ranks_of(loaders: Any, dataset: Any, world_size: int, **options: Any) -> list[DataLoader]:
    given = {"num_shards": 8, "world_size": world_size, "job_name": f"{world_size} ranks"} | options
    return [loaders(dataset, rank=rank, **given) for rank in range(world_size)]


def taken(loaders_of_ranks: list[DataLoader], num_steps: int) -> list[int]:
    """Elements of so many steps of each rank; the loops are then left."""
    return [i for loader in loaders_of_ranks for _, ids in islice(loader, num_steps) for i in ids.tolist()]


@pytest.mark.shows("a state of four ranks continues with 1, 2, 3 or 8 in the same global order")
@pytest.mark.parametrize("dataset", ["stream", "with state", "files"])
@pytest.mark.parametrize("where", ["service", "local"])
def test_a_stream_continues_at_another_world_size(
    three: Any, loaders: Any, tmp_path: Path, where: str, dataset: str
) -> None:
    files = [tmp_path / f"part-{number}" for number in range(20)]
    for number, file in enumerate(files):
        file.write_text("\n".join(str(index) for index in range(number, 400, 20)))
    data, options = {
        "stream": (datasets.Log(400), {}),
        "with state": (datasets.Ledger(400, tmp_path / "read"), {}),
        "files": (datasets.Numbered(files), {"sharding": "dynamic", "shuffle": True}),
    }[dataset]
    options |= {"service": three.name} if where == "service" else {}
    seen: list[int] = []
    states: list[dict[str, Any]] = []
    for world_size in (4, 2, 3, 1):
        ranks = ranks_of(loaders, data, world_size, **options)
        if states:
            merged = json.loads(json.dumps(merge_states(states[::-1])))
            for loader in ranks:
                loader.load_state_dict(merged)
        if world_size > 1:
            seen += taken(ranks, 7)
        states = [loader.state_dict() for loader in ranks]
        assert len(json.dumps(states)) < 3000 * world_size
    file = tmp_path / "read"
    file.unlink(missing_ok=True)
    before = len(seen)
    seen += taken(ranks, 1000)
    assert sorted(seen) == list(range(400))
    if dataset == "with state":
        # An idle data worker that takes a shard over may read the last steps again which nobody has taken yet.
        read = sorted({int(line) for line in file.read_text().split()})
        assert read == sorted(seen[before:]), "nothing that was taken is read again"
    assert sorted(taken(ranks, 1000)) == list(range(400)), "the next epoch"


def test_states_that_are_not_of_all_ranks_of_one_run_are_refused(loaders: Any) -> None:
    ranks = ranks_of(loaders, datasets.Log(96), 2)
    taken(ranks, 3)
    first, second = states = [loader.state_dict() for loader in ranks]
    with pytest.raises(StateError, match="needs the state of each rank"):
        merge_states([])
    with pytest.raises(StateError, match="1 states of a run with 2 ranks"):
        merge_states([first])
    with pytest.raises(StateError, match="two of the states are of one rank"):
        merge_states([first, first])
    with pytest.raises(StateError, match="different data, orders or world sizes"):
        merge_states([first, ranks_of(loaders, datasets.Log(96), 2, seed=1)[1].state_dict()])
    with pytest.raises(StateError, match=r"is for an IterableDataset .* global_batch_size="):
        merge_states([loaders(datasets.Augmented(40)).state_dict()])
    with pytest.raises(StateError, match=r"world_size: 2 in the state, 1 here .*as one of merge_states\(\)"):
        ranks_of(loaders, datasets.Log(96), 1)[0].load_state_dict(first)
    with pytest.raises(StateError, match="this is the state of rank 1, and this is rank 0"):
        ranks_of(loaders, datasets.Log(96), 2)[0].load_state_dict(second)
    with pytest.raises(StateError, match="num_shards: 8 in the state, 9 here"):
        loaders(datasets.Log(96), num_shards=9).load_state_dict(merge_states(states))


def test_ranks_that_have_not_begun_and_ranks_that_have_ended_are_merged(loaders: Any) -> None:
    ranks = ranks_of(loaders, datasets.Log(96), 2)
    fresh = [loader.state_dict() for loader in ranks]
    begun = taken(ranks[:1], 5)
    inside = ranks[0].state_dict()
    (alone,) = ranks_of(loaders, datasets.Log(96), 1)
    alone.load_state_dict(merge_states(fresh))
    assert sorted(taken([alone], 1000)) == list(range(96)), "nobody has begun"
    alone.load_state_dict(merge_states([inside, fresh[1]]))
    assert sorted(begun + taken([alone], 1000)) == list(range(96)), "one has not begun"
    theirs = taken(ranks[1:], 1000)
    alone.load_state_dict(merge_states([inside, ranks[1].state_dict()]))
    assert sorted(begun + theirs + taken([alone], 1000)) == list(range(96)), "one has ended"


def test_a_stream_that_does_not_divide_itself_for_two_ranks_is_an_error_that_names_the_choices(
    three: Any, loaders: Any
) -> None:
    for options in ({}, {"service": three.name, "job_name": "undivided"}, {"worker_init_fn": datasets.seed_numpy}):
        loader = loaders(datasets.PlainLog(20), rank=0, world_size=2, num_shards=None, **options)
        with pytest.raises(PipelineError, match=r"did not ask .*get_worker_info.*DATA.*FILE.*One rank alone"):
            next(iter(loader))
    with pytest.raises(ConfigError, match="has no attribute `files`"):
        loaders(datasets.PlainLog(20), sharding="file")


@pytest.mark.shows("`__getitems__`, IterableDataset with `get_worker_info()` and datasets with a state work")
@pytest.mark.parametrize("where", ["service", "local", "process"])
def test_worker_init_fn_can_divide_a_stream(three: Any, loaders: Any, where: str) -> None:
    options = {"service": {"service": three.name}, "local": {}, "process": {"num_workers": 1}}[where]
    loader = loaders(datasets.DividedLog(50), worker_init_fn=datasets.divide, **options)
    assert sorted(index for batch in loader for index in batch.tolist()) == list(range(50))


@pytest.mark.parametrize("where", ["service", "local", "process"])
def test_an_exception_in_a_stream_is_raised_at_its_step(three: Any, loaders: Any, where: str) -> None:
    options = {"service": {"service": three.name}, "local": {}, "process": {"num_workers": 1}}[where]
    iterator = iter(loaders(datasets.PoisonedLog(100), num_shards=2, **options))
    seen: list[int] = []
    with pytest.raises(datasets.UserError, match="element 37 is bad"):
        seen.extend(index for _, ids in iterator for index in ids.tolist())
    assert not {37, 39} & set(seen)
    rest = ids_of(iterator)
    # As in torch, what a generator that raised had left is not read.
    assert sorted(seen + rest) == sorted([*range(0, 100, 2), *range(1, 33, 2)])


def test_ranks_divide_the_shards(three: Any, loaders: Any) -> None:
    ranks = [
        loaders(datasets.Log(101), service=three.name, rank=rank, world_size=3, job_name="ranks") for rank in range(3)
    ]
    parts = [ids_of(loader) for loader in ranks]
    assert sorted(index for part in parts for index in part) == list(range(101))
    assert all(parts)


@pytest.mark.shows("dynamic sharding gives each element once, also with fewer elements than data workers")
@pytest.mark.shows("one name with another policy or pipeline is refused, and the difference is named")
@pytest.mark.shows("the ranks of one job name divide one stream; other names are independent")
def test_one_job_name_with_two_policies_is_refused_and_names_the_difference(three: Any, loaders: Any) -> None:
    options: dict[str, Any] = {"service": three.name, "job_name": "policies", "world_size": 2}

    def ranks(*shardings: str | None) -> list[Any]:
        """What two ranks make with the same lines of one program."""
        return [
            loaders(datasets.Augmented(40), **options, rank=rank, sharding=sharding)
            for rank, sharding in enumerate(shardings)
        ]

    with pytest.raises(JobNameConflict, match="sharding: DYNAMIC there, DATA here"):
        ranks(None, "data")
    parts = [ids_of(loader) for loader in ranks(None, None)]
    assert sorted(parts[0] + parts[1]) == list(range(40)), "two loaders of one name divide one stream"


def test_a_loader_of_rank_0_alone_ends_no_other_rank(three: Any, loaders: Any) -> None:
    train, validation, test = (datasets.Augmented(n) for n in (40, 24, 32))
    options: dict[str, Any] = {"service": three.name, "job_name": "alone"}
    made: dict[int, list[Any]] = {0: [], 1: []}
    for rank in (0, 1):
        for data in (train, validation, test) if rank == 0 else (train, test):
            whole = {"rank": 0, "world_size": 1} if data is validation else {"rank": rank, "world_size": 2}
            made[rank].append(loaders(data, **options, **whole))
    assert sorted(i for rank in (0, 1) for i in ids_of(made[rank][0])) == list(range(40))
    assert sorted(ids_of(made[0][1])) == list(range(24))
    assert sorted(ids_of(made[0][2]) + ids_of(made[1][1])) == list(range(32))


@pytest.mark.shows("`repeat=k` goes over the data k times; an endless repeat of one element does not stall")
@pytest.mark.parametrize("dataset", [datasets.Augmented(10), datasets.Log(10)], ids=["indices", "stream"])
@pytest.mark.parametrize("where", ["service", "local"])
def test_repeat_gives_each_element_so_often(three: Any, loaders: Any, dataset: Any, where: str) -> None:
    options = {"service": three.name} if where == "service" else {}
    loader = loaders(dataset, repeat=3, shuffle=isinstance(dataset, datasets.Augmented) or None, **options)
    iterator = iter(loader)
    first = ids_of(islice(iterator, 5))
    state = json.loads(json.dumps(loader.state_dict()))
    rest = as_bytes(iterator)
    assert Counter(first + [index for _, ids in rest for index in ids]) == Counter(list(range(10)) * 3)
    again = loaders(dataset, repeat=3, shuffle=isinstance(dataset, datasets.Augmented) or None, **options)
    again.load_state_dict(state)
    assert as_bytes(again) == rest


@pytest.mark.shows("`repeat=k` goes over the data k times; an endless repeat of one element does not stall")
def test_an_endless_repeat_of_one_element_does_not_stall(three: Any, loaders: Any) -> None:
    for dataset in (datasets.Augmented(1), datasets.Log(1)):
        loader = loaders(dataset, service=three.name, repeat=None)
        assert ids_of(islice(iter(loader), 40)) == [0] * 40
        with pytest.raises(TypeError):
            len(loader)
    assert ids_of(loaders(datasets.Augmented(0), service=three.name, repeat=None)) == []
    assert ids_of(loaders(datasets.Log(0), service=three.name, repeat=None)) == []


@pytest.mark.shows("ten epochs in a row are whole, and two iterators of one loader do not disturb each other")
def test_ten_epochs_and_two_iterators_at_once(three: Any, loaders: Any) -> None:
    loader = loaders(datasets.Log(20), service=three.name)
    for _ in range(10):
        assert sorted(ids_of(loader)) == list(range(20))
    first, second = iter(loader), iter(loader)
    pairs = [(one[1].tolist(), two[1].tolist()) for one, two in zip(first, second, strict=True)]
    for side in range(2):
        assert sorted(index for pair in pairs for index in pair[side]) == list(range(20))


@pytest.mark.shows("a data worker that joins serves in the same epoch")
def test_a_data_worker_that_joins_takes_a_shard_in_the_same_epoch(service: Any, loaders: Any) -> None:
    service.start_workers(1)
    loader = loaders(datasets.WhereLog(1500), service=service.name, batch_size=1)
    seen: list[tuple[int, int]] = []
    for index, process in loader:
        seen.append((int(index), int(process)))
        if len(seen) == 20:
            service.start_workers(1)
    assert len({process for _, process in seen}) == 2
    assert sorted(index for index, _ in seen) == list(range(1500))


@pytest.mark.shows("`__getitems__`, IterableDataset with `get_worker_info()` and datasets with a state work")
@pytest.mark.parametrize("kind", [datasets.Ledger, datasets.LedgerOfIterators])
@pytest.mark.parametrize("where", ["service", "local", "process"])
def test_a_stream_with_a_state_is_not_read_again_after_a_resume(
    three: Any, loaders: Any, tmp_path: Path, kind: Any, where: str
) -> None:
    options = {"service": {"service": three.name}, "local": {}, "process": {"num_workers": 1}}[where]
    file = tmp_path / "read"
    whole = as_bytes(loaders(kind(200, file), num_shards=3))
    saved = loaders(kind(200, file), num_shards=3, **options)
    iterator = iter(saved)
    assert as_bytes(islice(iterator, 23)) == whole[:23]
    state = json.loads(json.dumps(saved.state_dict()))
    assert len(json.dumps(state)) < 2000
    del iterator
    saved.close()
    file.unlink()
    resumed = loaders(kind(200, file), num_shards=3, **options)
    resumed.load_state_dict(state)
    assert as_bytes(resumed) == whole[23:]
    again = Counter(int(line) for line in file.read_text().split())
    assert sorted(again) == sorted(index for _, ids in whole[23:] for index in ids), "nothing before the state"


@pytest.mark.shows("what a lost data worker had not delivered is leased anew; what had arrived is not made again")
def test_another_data_worker_takes_a_shard_with_a_state_over_where_it_was(
    service: Any, loaders: Any, tmp_path: Path
) -> None:
    file = tmp_path / "read"
    first = service.start_workers(1)
    # Room for some ten steps of each shard, so that the first data worker is not at the end when it leaves.
    loader = loaders(datasets.Ledger(1000, file), num_shards=2, service=service.name, buffer_bytes=2000)
    seen = []
    for values, ids in loader:
        seen.append((values.numpy().tobytes(), ids.tolist()))
        if len(seen) == 60:
            service.start_workers(1)
            first.send_signal(signal.SIGTERM)
            first.wait()
    assert seen == as_bytes(loaders(datasets.Ledger(1000, tmp_path / "other"), num_shards=2))
    times = Counter(int(line) for line in file.read_text().split())
    assert sorted(times) == list(range(1000))
    # The step in work when it was told to stop may be made again; what lies before it, hundreds of elements, is not.
    assert sum(times.values()) - 1000 <= 2 * 4


@pytest.mark.shows("what a lost data worker had not delivered is leased anew; what had arrived is not made again")
def test_what_a_takeover_without_a_state_costs_is_reading_a_shard_up_to_its_position(
    service: Any, loaders: Any, tmp_path: Path
) -> None:
    first = service.start_workers(1)
    options = {"num_shards": 4, "collate_fn": partial(datasets.noted_collate, tmp_path / "collated")}
    dataset = datasets.NotedLog(1000, tmp_path / "read")
    # Room for some five steps of each shard, so that the first data worker is not at the end when it leaves.
    loader = loaders(dataset, service=service.name, buffer_bytes=2000, **options)
    for number, _ in enumerate(loader):
        if number == 120:
            service.start_workers(1)
            first.send_signal(signal.SIGTERM)
            first.wait()
    times = Counter(int(line) for line in (tmp_path / "read").read_text().split())
    assert sorted(times) == list(range(1000))
    assert max(times.values()) == 2, "each shard changed hands once"
    assert max(index for index, count in times.items() if count == 2) < 900, "not what was still to come"
    # Passed over: neither collated nor sent. The step in work when it was told to stop may be made again.
    collated = Counter(int(line) for line in (tmp_path / "collated").read_text().split())
    assert sorted(collated) == sorted(index for shard in range(4) for index in range(shard, 1000, 16))
    assert sum(collated.values()) - len(collated) <= 4


def test_a_state_that_cannot_be_pickled_is_told(loaders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.Ledger, "state_dict", lambda self: {"position": threading.Lock()})
    with pytest.raises(PipelineError, match=r"state_dict\(\) of Ledger holds what cannot be pickled"):
        next(iter(loaders(datasets.Ledger(20, tmp_path / "read"))))


@pytest.mark.shows("a state that JSON and pickle would read differently is refused; a stranger's HDF5 leads nowhere")
@pytest.mark.parametrize("where", ["service", "local", "process"])
def test_a_state_may_hold_what_json_does_not(three: Any, loaders: Any, where: str) -> None:
    options: dict[str, Any] = {"service": {"service": three.name}, "local": {}, "process": {"num_workers": 1}}[where]
    whole = as_bytes(loaders(datasets.TensorLedger(60), **options))
    saved = loaders(datasets.TensorLedger(60), **options)
    passing = iter(saved)
    begin = as_bytes(next(passing) for _ in range(9))
    state = saved.state_dict()
    kept = copy.deepcopy(state)
    next(passing)
    assert state["dataset_states"].keys() == kept["dataset_states"].keys()
    assert state["shards"] == kept["shards"], "a state that was given does not change"
    positions = {shard: one["state"]["at"] for shard, one in state["dataset_states"].items()}
    assert all(isinstance(at[("place", 0)], torch.Tensor) for at in positions.values()), "as the object that it is"
    resumed = loaders(datasets.TensorLedger(60), **options)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert begin + as_bytes(resumed) == whole
    # What one reader takes for JSON and the other does not would be unpickled.
    code = "cos\nsystem\n(S'true'\ntR."
    for text in (
        code,
        " {}",
        "\n{}",
        "\t {}",
        "\r{}",
        "\ufeff{}",
        "\ufeff" + code,
        "[]",
        "null",
        "{",
        "7",
        "",
        '{"a": "\ud800"}',
        7,
    ):
        pretended = json.loads(state["shards"]) | {"snapshots": {"0": text}}
        with pytest.raises(StateError, match="damaged position"):
            resumed.load_state_dict(state | {"shards": json.dumps(pretended)})


def test_a_stream_is_divided_as_torch_divides_it(three: Any, loaders: Any) -> None:
    """The program's num_workers says into how many shards, whoever reads them; with 0 it is the sequence itself."""
    for num_workers in (0, 1, 2):
        torchs = torch.utils.data.DataLoader(datasets.Log(50), batch_size=4, num_workers=num_workers)
        want = ids_of(torchs)
        for options in ({"num_workers": num_workers}, {"num_workers": num_workers, "service": three.name}):
            assert ids_of(loaders(datasets.Log(50), num_shards=None, **options)) == want
    seen = list(loaders(datasets.SeesWorker(), num_shards=None, batch_size=None, service=three.name))
    assert seen == [None], "get_worker_info() is None where the program has no worker processes"


@pytest.mark.parametrize("where", ["service", "local"])
def test_a_dataset_that_does_not_divide_itself_is_read_once(three: Any, loaders: Any, where: str) -> None:
    options: dict[str, Any] = {"service": {"service": three.name}, "local": {}}[where]
    for _ in range(2):
        assert ids_of(loaders(datasets.PlainLog(30), num_shards=4, **options)) == list(range(30))
    loader = loaders(datasets.PlainLog(30), num_shards=4, worker_init_fn=datasets.seed_numpy, **options)
    assert ids_of(loader) == list(range(30)), "a worker_init_fn that has no use of its number divides nothing"
    failing = iter(loaders(datasets.PoisonedPlainLog(30), num_shards=3, **options))
    with pytest.raises(ValueError, match="element 2"):
        next(failing)
    assert ids_of(failing) == [], "a generator ends with its exception; and it is told once, not by each shard"
    with pytest.raises(PipelineError, match="only after its first elements"):
        list(loaders(datasets.AsksLate(30), num_shards=2, **options))


def test_what_a_stream_says_of_its_length_is_believed(loaders: Any) -> None:
    class Sized(datasets.PlainLog):
        def __len__(self) -> int:
            return self.length

    assert len(loaders(Sized(10))) == 3
    assert len(loaders(Sized(10), drop_last=True)) == 2
    assert len(loaders(Sized(10), repeat=2)) == 6
    with pytest.raises(TypeError):
        len(loaders(Sized(10), rank=0, world_size=2))
