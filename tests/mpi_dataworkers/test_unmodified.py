"""The start-up hook against torch itself: the same order, the same random numbers of the program, and the same bytes
with data workers and without."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hook_programs as programs
import numpy as np
import pytest
import torch
from hooking import assert_no_local_step, connection_of, hooked, sent_pipelines_of
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils.collate import default_collate_fn_map

from hetstream import DataLoader as OwnLoader
from hetstream.mpi_dataworkers.hook import environment, patch
from hetstream.mpi_dataworkers.loader.shards import LookAhead
from hetstream.mpi_dataworkers.loader.unmodified import look_ahead_of
from tests.conftest import WaitUntil

_Iterator: Any = torch_dataloader._BaseDataLoaderIter


@pytest.fixture
def streamed(three: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hook, with three data workers."""
    with hooked(three.name, monkeypatch):
        yield


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hook, without a service."""
    with hooked(None, monkeypatch):
        yield


# --- order ----------------------------------------------------------------------------------------------------------


def values(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def epochs(loader: Any, count: int = 2) -> list[Any]:
    return [[values(batch) for batch in loader] for _ in range(count)]


def shuffled(num_workers: int) -> Any:
    return epochs(DataLoader(programs.Numbers(30), 4, shuffle=True, num_workers=num_workers))


def persistent(num_workers: int) -> Any:
    loader = DataLoader(programs.Numbers(30), 4, shuffle=True, num_workers=max(1, num_workers), persistent_workers=True)
    first = [values(batch) for batch in itertools.islice(loader, 2)]  # and leave the pass open
    return first, epochs(loader, 3)


def eager(num_workers: int) -> Any:
    return epochs(DataLoader(programs.Numbers(10), batch_sampler=programs.Eager(), num_workers=num_workers), 3)


def left_early_with_a_generator(num_workers: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(programs.Numbers(30), 4, shuffle=True, generator=generator, num_workers=num_workers)
    return [[values(batch) for batch in itertools.islice(loader, 2)] for _ in range(3)]


def side_by_side(num_workers: int) -> Any:
    loaders = [DataLoader(programs.Numbers(20), 4, shuffle=True, num_workers=num_workers) for _ in range(2)]
    return [[values(one), values(other)] for one, other in zip(*loaders, strict=True)]


def with_replacement(num_workers: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    found = []
    for sampler in (
        RandomSampler(range(100), replacement=True, num_samples=200, generator=generator),
        WeightedRandomSampler([0.5] * 9, 40, generator=generator),
        RandomSampler(range(10), num_samples=35, generator=generator),
    ):
        loader = DataLoader(programs.Numbers(100), 4, sampler=sampler, num_workers=num_workers)
        for _ in range(2):
            found += [(values(batch), torch.rand(1, generator=generator).item()) for batch in loader]
    return found


def distributed(num_workers: int) -> Any:
    sampler: Any = DistributedSampler(programs.Numbers(30), num_replicas=2, rank=1)
    loader = DataLoader(programs.Numbers(30), 4, sampler=sampler, num_workers=num_workers)
    found = []
    for epoch in (5, 0, 5):
        sampler.set_epoch(epoch)
        found.append([values(batch) for batch in loader])
    return found


def drawing(num_workers: int) -> Any:
    sampler = programs.Drawing(60)
    loader = DataLoader(programs.Numbers(100), 2, sampler=sampler, num_workers=num_workers)
    return [(values(batch), random.random(), sampler.num_drawn) for batch in loader]


def following(num_workers: int) -> Any:
    sampler = programs.Following()
    found = []
    for number, batch in enumerate(DataLoader(programs.Numbers(200), 2, sampler=sampler, num_workers=num_workers)):
        found.append(values(batch))
        if number == 10:
            sampler.first = 100
    return found


def endless(num_workers: int) -> Any:
    sampler = programs.Endless(50)
    loader = DataLoader(programs.Numbers(100), 2, sampler=sampler, num_workers=num_workers)
    return [values(batch) for batch in itertools.islice(loader, 40)], sampler.num_drawn


def once_only(num_workers: int) -> Any:
    loader = DataLoader(programs.Numbers(10), 3, sampler=iter(range(10)), num_workers=num_workers)  # type: ignore[arg-type]
    return epochs(loader)


def keys(num_workers: int) -> Any:
    loader = DataLoader(programs.Keyed(26), 2, sampler=programs.Letters(), num_workers=num_workers)
    return epochs(loader, 3)


def keys_once_only(num_workers: int) -> Any:
    sampler: Any = (letter for letter in "abcde")
    return epochs(DataLoader(programs.Keyed(26), 2, sampler=sampler, num_workers=num_workers))


def turning(num_workers: int) -> Any:
    return epochs(DataLoader(programs.Keyed(26), batch_sampler=programs.Turning(), num_workers=num_workers))


def whole_batches(num_workers: int) -> Any:
    """As torch's documentation disables automatic batching: the sampler's lists are the dataset's indices."""
    generator = torch.Generator().manual_seed(3)
    sampler: Any = BatchSampler(RandomSampler(range(12), generator=generator), 4, drop_last=False)
    loader = DataLoader(
        torch.arange(12),  # type: ignore[arg-type]
        sampler=sampler,
        batch_size=None,
        generator=generator,
        num_workers=num_workers,
    )
    return epochs(loader)


def counting_epochs(num_workers: int) -> Any:
    sampler = programs.CountsEpochs(range(20))
    loader = DataLoader(programs.Numbers(20), 4, sampler=sampler, num_workers=num_workers)
    return [[(values(batch), sampler.epoch) for batch in loader] for _ in range(2)]


def filtering(num_workers: int) -> Any:
    return epochs(programs.FilteringLoader(programs.Numbers(10), batch_size=4, num_workers=num_workers))


def infinite(num_workers: int) -> Any:
    loader = programs.InfiniteLoader(programs.Numbers(10), batch_size=4, shuffle=True, num_workers=num_workers)
    found = epochs(loader)
    loader.reset()
    return found, epochs(loader)


PROGRAMS = [
    shuffled,
    persistent,
    eager,
    left_early_with_a_generator,
    side_by_side,
    with_replacement,
    distributed,
    drawing,
    following,
    endless,
    once_only,
    keys,
    keys_once_only,
    turning,
    whole_batches,
    counting_epochs,
    filtering,
    infinite,
]
WITHOUT_WORKERS = {shuffled, left_early_with_a_generator, distributed, drawing, once_only, counting_epochs, infinite}


@pytest.mark.parametrize(
    ("program", "num_workers"),
    [
        pytest.param(program, number, marks=() if number or program in WITHOUT_WORKERS else pytest.mark.slow)
        for program in PROGRAMS
        for number in (0, 2)
    ],
)
def test_order_and_the_programs_own_random_numbers_are_torchs(
    three: Any, monkeypatch: pytest.MonkeyPatch, program: Callable[[int], Any], num_workers: int
) -> None:
    def run() -> Any:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        found = program(num_workers)
        return found, torch.rand(1).item(), random.random(), np.random.rand()

    plain = run()
    with hooked(None, monkeypatch):
        assert run() == plain, "without data workers"
    with hooked(three.name, monkeypatch):
        assert run() == plain, "with data workers"


def test_only_what_nobody_can_see_is_drawn_further_ahead_than_torch_does() -> None:
    data, generator = programs.Numbers(40), torch.Generator()
    seen = programs.CountsEpochs(data)
    shard: Any = DistributedSampler(data, num_replicas=2, rank=0)
    for loader, expected in (
        (DataLoader(data, 4), LookAhead(0, 9)),
        (DataLoader(data, 4, shuffle=True, num_workers=2), LookAhead(4, 9)),
        (DataLoader(data, 4, shuffle=True, generator=generator), LookAhead(0, 9)),
        (DataLoader(data, 4, sampler=shard, num_workers=1, prefetch_factor=5), LookAhead(5, 4)),
        (DataLoader(data, batch_size=None, sampler=WeightedRandomSampler([1.0] * 4, 7)), LookAhead(0, 6)),
        (DataLoader(data, 4, sampler=seen), LookAhead(0, 0)),
        (DataLoader(data, 4, sampler=RandomSampler(data, True, generator=generator)), LookAhead(0, 0)),
        (DataLoader(data, 4, sampler=RandomSampler(data, num_samples=50, generator=generator)), LookAhead(0, 0)),
        (DataLoader(data, batch_sampler=programs.Eager(), num_workers=2), LookAhead(4, 0)),
    ):
        assert look_ahead_of(loader) == expected


def test_the_sampler_is_drawn_when_torch_would_and_then_as_far_as_can_be() -> None:
    own = LookAhead()
    assert own.goal(position=10, window=8, taking=False, has_begun=False) == 10 + 8 + 64
    with_workers = LookAhead(4)
    assert with_workers.goal(0, 8, taking=False, has_begun=False) == 4
    assert with_workers.goal(0, 8, taking=True, has_begun=True) == 5
    assert with_workers.goal(7, 8, taking=True, has_begun=True) == 12
    unseen = LookAhead(0, 100)
    assert unseen.goal(0, 8, taking=False, has_begun=False) == 0, "torch draws nothing before the first step is taken"
    assert unseen.goal(0, 8, taking=True, has_begun=False) == 72
    assert unseen.goal(95, 8, taking=True, has_begun=True) == 100, "the last step when torch draws it"
    assert unseen.goal(100, 8, taking=True, has_begun=True) == 101


def test_accelerates_samplers_are_known_by_name() -> None:
    accelerate = pytest.importorskip("accelerate.data_loader")
    data = programs.Numbers(40)
    batches = BatchSampler(accelerate.SeedableRandomSampler(data, data_seed=1), 4, drop_last=False)
    shard = accelerate.BatchSamplerShard(batches, num_processes=2, process_index=1)
    assert look_ahead_of(DataLoader(data, batch_sampler=batches)) == LookAhead(0, 9)
    assert look_ahead_of(DataLoader(data, batch_sampler=shard)) == LookAhead(0, 4)
    skipping = accelerate.SkipBatchSampler(shard, skip_batches=2)
    assert look_ahead_of(DataLoader(data, batch_sampler=skipping)) == LookAhead(0, 2)


# --- loaders and iterators ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("streamed")
def test_iterators_are_torchs_with_its_attributes_and_without_worker_processes() -> None:
    loader = DataLoader(programs.Numbers(10), 4, num_workers=1, persistent_workers=True)
    iterator: Any = iter(loader)
    assert isinstance(iterator, _Iterator)
    assert not hasattr(iterator, "_workers")
    assert len(iterator) == 3
    next(iterator)
    assert (iterator._num_yielded, iterator._num_workers) == (1, 1)
    base_seed = iterator._base_seed
    assert iter(loader) is loader._iterator is iterator, "torch keeps it, with persistent_workers"
    assert (iterator._num_yielded, iterator._base_seed) == (0, base_seed)
    assert len(list(iterator)) == 3
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(NotImplementedError):
        pickle.dumps(loader)
    assert_no_local_step(loader)


@pytest.mark.usefixtures("streamed")
def test_copies_and_pickles_of_a_loader_are_loaders_of_their_own() -> None:
    loader = DataLoader(programs.Numbers(10), 4)
    assert epochs(loader, 1) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert epochs(other) == epochs(loader)
        assert connection_of(other) is not connection_of(loader)
        assert_no_local_step(other)


@pytest.mark.usefixtures("streamed")
def test_a_loader_that_collates_with_its_own_method_is_freed_with_its_connection(wait_until: WaitUntil) -> None:
    loader = programs.FilteringLoader(programs.Numbers(8), batch_size=4)
    assert epochs(loader, 1) == [[[100, 200, 300, 400], [500, 600, 700, 800]]]
    client, known = connection_of(loader).client, weakref.ref(loader)
    sent = sent_pipelines_of(loader).last
    assert sent is not None
    assert connection_of(loader).sent_pipeline().message is sent.message, "what hetstream keeps in it is not sent"
    del loader
    # The thread of the last pass may still be about to end.
    wait_until(lambda: gc.collect() >= 0 and known() is None)
    assert client is not None
    assert client._left.acquire(timeout=10), "it has left the service"
    client._left.release()


@pytest.mark.usefixtures("streamed")
def test_an_iterator_outlives_its_loader() -> None:
    for options in ({}, {"num_workers": 1, "persistent_workers": True}):
        iterator = iter(DataLoader(programs.Numbers(400), 4, **options))  # type: ignore[arg-type]
        gc.collect()
        assert [batch[0].item() for batch in iterator] == list(range(0, 400, 4))


@pytest.mark.usefixtures("streamed")
def test_a_class_that_makes_its_own_iterators_stays_local_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = programs.OwnIteratorLoader(programs.Numbers(4), batch_size=2)
    assert epochs(loader) == [[[0, 1], [2, 3]]] * 2
    (said,) = [record.getMessage() for record in caplog.records]
    reason = (
        "OwnIteratorLoader makes an iterator of its own, _SingleProcessDataLoaderIter, instead of asking "
        "DataLoader._get_iterator for one"
    )
    assert said == f"hetstream: a DataLoader over Numbers stays local: {reason}"


class Points(programs.Numbers):
    def __getitem__(self, index: int) -> Any:
        return slice(index, index + 1)


def of_slices(batch: list[slice], *, collate_fn_map: Any = None) -> Any:
    del collate_fn_map
    return torch.tensor([each.start for each in batch])


@pytest.mark.shows("what is registered for torch's `default_collate`, settings of torch and the umask travel")
def test_what_a_program_registers_for_collating_is_there(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, slice, of_slices)
    with hooked(three.name, monkeypatch):
        loader = DataLoader(Points(4), 2, num_workers=1)
        assert epochs(loader, 2) == [[[0, 1], [2, 3]]] * 2
        assert_no_local_step(loader)


def test_iter_may_be_wrapped_as_libraries_do(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    as_torch = DataLoader.__iter__
    seen = []

    @functools.wraps(as_torch)
    def timed(self: Any) -> Any:
        seen.append(type(self))
        return as_torch(self)

    with hooked(three.name, monkeypatch):
        patch.install()  # a second time changes nothing
        monkeypatch.setattr(DataLoader, "__iter__", timed)
        loader = DataLoader(programs.Numbers(4), 2, num_workers=1)
        assert epochs(loader, 1) == [[[0, 1], [2, 3]]]
        assert_no_local_step(loader)
    with hooked(None, monkeypatch):
        assert epochs(DataLoader(programs.Numbers(4), 2), 1) == [[[0, 1], [2, 3]]]
    assert seen == [DataLoader] * 2, "not the loaders that hetstream itself uses"


def test_a_resume_that_moves_torchs_own_iterator_continues_at_its_sample(
    three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hooked(three.name, monkeypatch), monkeypatch.context() as changed:
        as_torch, as_torch_reset = _Iterator.__init__, _Iterator._reset

        # As SpeechBrain does it.
        def recovering(self: Any, loader: Any, *arguments: Any) -> None:
            as_torch(self, loader, *arguments)
            for _ in range(loader.skip_to):
                next(self._sampler_iter)
            self._num_yielded, loader.skip_to = loader.skip_to, 0

        def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
            if not first_iter:
                as_torch_reset(self, loader)

        changed.setattr(_Iterator, "__init__", recovering)
        changed.setattr(_Iterator, "_reset", reset)
        for num_workers in (0, 2):
            loader: Any = DataLoader(programs.Numbers(10), 1, num_workers=num_workers)
            loader.skip_to = 4
            iterator: Any = iter(loader)
            assert iterator._num_yielded == 4
            assert [batch.item() for batch in iterator] == [4, 5, 6, 7, 8, 9]
            assert iterator._num_yielded == 10
            assert_no_local_step(loader)


@pytest.mark.usefixtures("streamed")
def test_named_tuples_have_the_programs_classes_wherever_it_has_made_them() -> None:
    loader = DataLoader(programs.Named(4), 2)
    for batch in loader:
        assert type(batch) is programs.Named.Sample
        assert type(batch.pair) is programs.Pair
        assert torch.equal(batch.pair.one, -batch.pair.other)
    assert_no_local_step(loader)


# --- datasets that change -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("streamed")
def test_a_dataset_that_grows_between_epochs_is_streamed_as_it_is() -> None:
    dataset = programs.Numbers(4)
    loader = DataLoader(dataset, 2, shuffle=True)
    for length in (4, 7, 5):
        dataset.length = length
        assert sorted(value for batch in loader for value in batch.tolist()) == list(range(length))
    loader.collate_fn = sum
    assert sum(loader) == 10
    assert_no_local_step(loader)


@pytest.mark.usefixtures("streamed")
def test_a_dataset_on_a_device_stays_with_the_trainer(caplog: pytest.LogCaptureFixture) -> None:
    data = torch.utils.data.TensorDataset(torch.empty(4, 2, device="meta"))  # stands for a GPU
    assert [batch[0].device.type for batch in DataLoader(data, 2)] == ["meta"] * 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert "TensorDataset stays local: it holds a tensor on meta, a device that data workers do not have" in said


@pytest.fixture
def lazy(tmp_path: Path) -> Iterator[programs.OpensLazily]:
    (tmp_path / "data").write_bytes(b"")
    dataset = programs.OpensLazily(tmp_path / "data", 8)
    yield dataset
    dataset.close()


@pytest.mark.usefixtures("streamed")
def test_a_dataset_that_the_program_has_looked_at_is_streamed_on(
    lazy: programs.OpensLazily, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(lazy, 4, num_workers=2)
    expected = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert epochs(loader, 1) == [expected]
    assert lazy[3] == 3
    assert epochs(loader) == [expected] * 2
    assert_no_local_step(loader)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "data workers keep the dataset as they got it: now the dataset cannot be sent to data workers" in said
    assert "dataset.file (_io.BufferedReader) cannot be pickled" in said
    caplog.clear()
    lazy.offset = 10  # what it holds besides the open file is compared with what was sent
    assert epochs(loader, 1) == [[[10, 11, 12, 13], [14, 15, 16, 17]]]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "stays local: dataset.offset changed since data workers got it, and now" in said


@pytest.mark.usefixtures("streamed")
def test_a_class_that_the_program_changes_is_neither_missed_nor_changed_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Levels(programs.OpensLazily):  # travels by value, as a class of a script
        level = 0

        def __getitem__(self, index: int) -> int:
            return super().__getitem__(index) + Levels.level

    (tmp_path / "data").write_bytes(b"")
    dataset = Levels(tmp_path / "data", 4)
    loader = DataLoader(dataset, 4, num_workers=2)
    assert epochs(loader, 1) == [[[0, 1, 2, 3]]]
    assert dataset[3] == 3
    Levels.level = 10
    assert epochs(loader, 1) == [[[10, 11, 12, 13]]]
    assert Levels.level == 10
    (said,) = [record.getMessage() for record in caplog.records]
    assert "Levels changed since data workers got it, and now" in said
    dataset.close()


def test_steps_made_in_the_trainer_leave_its_objects_and_its_place_alone(
    service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hetstream.mpi_dataworkers.loader.client.LOCAL_AFTER_S", 0.1)
    (tmp_path / "data").write_bytes(b"")
    lazy = programs.OpensLazily(tmp_path / "data", 8)
    told = programs.Told(8)
    with hooked(service.name, monkeypatch):
        loader = DataLoader(lazy, 4)
        assert epochs(loader, 1) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
        assert connection_of(loader).statistics.counters.local_steps == 2
        assert lazy.file is None, "a copy was read"
        sent = sent_pipelines_of(loader).last
        assert sent is not None
        with sent_pipelines_of(loader).entered(sent) as entered:
            entered._loaded.dataset.close()

        torch.manual_seed(3)
        loader = DataLoader(told, 4, num_workers=2, worker_init_fn=programs.open_and_seed)
        before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
        ids, num_workers, seeds, numpy_seeds = next(iter(loader))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index, union-attr]
        assert (ids.tolist(), num_workers.tolist()) == ([0] * 4, [2] * 4)
        assert (seeds % 2**32 == numpy_seeds).all()
        assert told.handle is None
        assert torch.utils.data.get_worker_info() is None


# --- worker processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base_seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_worker_init_fn_and_worker_info_are_as_in_torchs_worker_processes(
    three: Any, monkeypatch: pytest.MonkeyPatch, base_seed: int
) -> None:
    def seen() -> set[Any]:
        torch.manual_seed(base_seed)
        options = {"num_workers": 2, "worker_init_fn": programs.open_and_seed}
        loader = DataLoader(programs.Told(64), 1, **options)  # type: ignore[arg-type]
        return {tuple(one.item() for one in batch) for _ in range(2) for batch in loader}

    plain = seen()
    assert len(plain) == 4, "two epochs of two worker processes"
    with hooked(None, monkeypatch):
        assert seen() == plain
    with hooked(three.name, monkeypatch):
        found = seen()
    assert found <= plain
    assert len({seed for _, _, seed, _ in found}) >= 2, "each epoch has its base seed"


@pytest.mark.usefixtures("streamed")
def test_what_lightning_adds_to_loaders_works_in_every_data_worker() -> None:
    torch.manual_seed(42)
    loader = DataLoader(programs.Numbers(200), 1, num_workers=2, worker_init_fn=programs.seed_as_lightning)
    assert len(list(loader)) == 200
    assert connection_of(loader).client is not None
    assert_no_local_step(loader)


def test_generators_of_the_dataset_depend_on_the_sample_alone(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(num_workers: int) -> list[Any]:
        torch.manual_seed(5)
        dataset = programs.OwnGenerators(24)
        loader = DataLoader(dataset, 2, num_workers=num_workers)
        found = epochs(loader)
        assert dataset.by_name["python"].getstate() == random.Random(0).getstate(), "the program's own are untouched"
        return found

    with hooked(three.name, monkeypatch):
        streamed = drawn(2)
    with hooked(None, monkeypatch):
        assert drawn(2) == streamed
        assert drawn(0)[0] == streamed[0]
        assert drawn(0)[1] != streamed[1], "as with torch: without workers they are the program's, and go on"
    first, second = (np.array([sample for batch in epoch for sample in batch]) for epoch in streamed)
    assert (first == second).all(), "as with torch: its workers get copies of generators that nobody has used since"
    noise = first - np.array([[float(index), 0, 0, 0, 0] for index in range(24)])
    assert len(np.unique(noise)) == noise.size, "and so have each sample and each generator"


# --- hetstream's own loader -----------------------------------------------------------------------------------------


def test_the_programs_set_epoch_wins_over_the_loaders_count() -> None:
    def first(loader: Any) -> list[int]:
        return next(iter(loader)).tolist()  # type: ignore[no-any-return]

    data = programs.Numbers(12)
    plain: Any = DistributedSampler(data, num_replicas=1, rank=0)
    as_torch = DataLoader(data, 12, sampler=plain)
    expected = {}
    for epoch in range(6):
        plain.set_epoch(epoch)
        expected[epoch] = first(as_torch)
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0)
    with OwnLoader(data, 12, sampler=sampler) as loader:
        assert [first(loader) for _ in range(3)] == [expected[epoch] for epoch in range(3)], "nobody else counts"
        for epoch in (5, 0, 0, 1):
            sampler.set_epoch(epoch)
            assert first(loader) == expected[epoch]
    with OwnLoader(data, 12, sampler=sampler) as loader:
        assert first(loader) == expected[1], "set before the loader was made"


@pytest.mark.parametrize("kind", ["torch.utils.data", "hetstream"])
def test_an_iterator_that_lives_to_the_interpreters_end_says_nothing(
    three: Any, tmp_path: Path, run_program: Any, kind: str
) -> None:
    program = f"""
import torch.utils.data, hetstream
loader = {kind}.DataLoader(range(400), 4)
iterator = iter(loader)
next(iterator)
torch.kept = iterator  # when it goes, the modules that it needs have gone
"""
    variables = (
        environment(three.name, {}, in_process_loaders=True) if kind == "torch.utils.data" else {}
    )  # the second one in process
    result = run_program(program, tmp_path, **variables)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
