"""Streams under the start-up hook beside torch alone, batch by batch: a program that knows nothing of hetstream gets
torch's own batches, whoever makes them, and where data workers make others, torch goes on."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stream_programs as programs
import torch
from hooking import connection_of, hooked
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data import dataloader as torch_dataloader

from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.mpi_dataworkers.loader import unmodified_streams
from hetstream.mpi_dataworkers.loader.client import ServiceClient
from hetstream.mpi_dataworkers.ops.batch_comparison import compare

# More worker processes than this machine has CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

_WORKERS = 3
Loader = Callable[[], DataLoader[Any]]


def loader_of(dataset: Callable[[], Any], **options: Any) -> Loader:
    return lambda: DataLoader(dataset(), **{"batch_size": 4, "num_workers": _WORKERS} | options)


STREAMS: dict[str, Loader] = {
    "divides itself": loader_of(programs.Numbers),
    "drop_last": loader_of(programs.Numbers, drop_last=True),
    "one worker": loader_of(programs.Numbers, num_workers=1),
    "more workers than data workers": loader_of(programs.Numbers, num_workers=7),
    "no batches": loader_of(lambda: programs.Numbers(60), batch_size=None),
    "no batches, collated": loader_of(lambda: programs.Numbers(60), batch_size=None, collate_fn=str),
    "has a length": loader_of(programs.WithLength),
    "uneven": loader_of(programs.Uneven, num_workers=7),
    "undivided": loader_of(programs.Undivided),
    "divided by worker_init_fn": loader_of(programs.Divided, worker_init_fn=programs.divide),
    "seeded by worker_init_fn": loader_of(programs.Numbers, worker_init_fn=programs.seed_by_worker),
    "generators of its own": loader_of(programs.OwnGenerators),
    "holds a module": loader_of(programs.HoldsAModule),
    "read ahead by threads": loader_of(programs.ReadsAhead),
    "collate_fn draws": loader_of(programs.Numbers, collate_fn=programs.noisy_collate),
    "counts its passes": loader_of(programs.CountsItsPasses),
    "a sample ends it": loader_of(programs.StopsBySample),
    "kept workers": loader_of(programs.Numbers, persistent_workers=True),
    "kept workers that count": loader_of(programs.CountsItsPasses, persistent_workers=True),
    "kept workers that share": loader_of(programs.SharesItsEpoch, persistent_workers=True),
    "a value of multiprocessing": loader_of(programs.SharesAValue),
    "kept workers that share a value": loader_of(programs.SharesAValue, persistent_workers=True),
    "kept workers with generators": loader_of(programs.OwnGenerators, persistent_workers=True),
    "a generator of the loader": lambda: loader_of(programs.Numbers, generator=torch.Generator().manual_seed(9))(),
}


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the least is compared."""
    monkeypatch.setattr(unmodified_streams, "_DEEPER", 0.0)


def one_pass(loader: DataLoader[Any], waits_at: int = 24) -> Iterator[Any]:
    """The batches of a pass; at some step the program is busy for as long as data workers need to get there."""
    iterator: Any = iter(loader)
    for number, batch in enumerate(iterator):
        yield batch
        if number == waits_at and hasattr(iterator, "_streamed"):
            programs.until_data_workers_go_on(iterator)


def passes(make: Loader, number: int = 3) -> list[Any]:
    torch.manual_seed(11)
    loader = make()
    got = []
    for epoch in range(number):
        if isinstance(loader.dataset, programs.Numbers) and not isinstance(loader.dataset, programs.CountsItsPasses):
            loader.dataset.set_epoch(epoch)
        got.append([*one_pass(loader)])
    got.append(torch.rand(2))  # the program's own random numbers go on as without data workers
    return got if "_hetstream" not in vars(loader) else [*got, loader]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", STREAMS)
def test_batches_are_torchs_own(name: str, three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = passes(STREAMS[name])
    with hooked(three.name, monkeypatch):
        *found, loader = passes(STREAMS[name])
        assert not compare(found, expected).differences
        counted = connection_of(loader).statistics.counters
    assert counted.steps == sum(map(len, expected[:-1]))
    assert counted.differing_steps == 0
    assert counted.compared_steps >= 2 * unmodified_streams._LATER_OF_EACH * loader.num_workers
    assert counted.local_steps < counted.steps  # data workers have made the others


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("dataset", [programs.SharesAMapping, programs.SharesANumber])
def test_kept_workers_end_where_shared_memory_cannot_be_followed(
    dataset: Any, three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = loader_of(dataset, persistent_workers=True)
    expected = passes(make)
    with hooked(three.name, monkeypatch):
        *found, _ = passes(make)
    assert not compare(found, expected).differences
    assert any("what its kept workers hold at the end of a pass cannot be sent" in each for each in caplog.messages)


LOCAL: dict[str, tuple[Loader, str]] = {
    "another process": (loader_of(programs.SaysItsProcess), "batch 0 of data workers is not torch's own"),
    "what its module counts": (
        loader_of(programs.CountsInItsModule, num_workers=7),
        "of data workers is not torch's own",
    ),
    "cannot travel": (loader_of(programs.HoldsAnIterator), "cannot be pickled"),
    "raises": (loader_of(programs.Raises), "raises ValueError"),
    "in the program's process": (loader_of(programs.Numbers, num_workers=0), "set num_workers=1 or more"),
}


def caught(make: Loader) -> list[Any]:
    """Batches, and what is raised in their place, by a program that goes on."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)
    loader, got = make(), list[Any]()
    for _ in range(2):
        iterator: Any = iter(loader)
        while True:
            try:
                got.append(next(iterator))
            except StopIteration:
                break
            except ValueError as error:
                got.append(str(error))
            if len(got) == 24 and hasattr(iterator, "_streamed"):
                with contextlib.suppress(unmodified_streams.Differs):
                    programs.until_data_workers_go_on(iterator)
    return got


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", LOCAL)
def test_torch_goes_on_where_data_workers_would_differ(
    name: str, three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = LOCAL[name]
    expected = caught(make)
    with hooked(three.name, monkeypatch):
        found = caught(make)
    assert len(found) == len(expected)
    assert [reason in message for message in caplog.messages if "stays local" in message] == [True]
    if name != "another process":
        differences = compare(found, expected).differences
        # torch names the line of a worker's exception, which is the same.
        assert not differences


@pytest.mark.usefixtures("soon")
def test_a_pass_that_is_left_and_two_loaders_in_turn(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> list[Any]:
        torch.manual_seed(5)
        training, validation = (
            DataLoader(programs.Numbers(240), 4, num_workers=2),
            DataLoader(programs.Undivided(40), 4, num_workers=1),
        )
        got = [*zip(range(9), training, strict=False)]
        for number, batch in enumerate(one_pass(training)):
            got.append((number, batch))
            if number % 30 == 29:
                got += enumerate(one_pass(validation, 5))
        return got

    expected = program()
    with hooked(three.name, monkeypatch):
        assert not compare(program(), expected).differences


@pytest.mark.usefixtures("soon")
def test_a_lost_data_workers_part_is_read_again(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(at_step: Callable[[int], None]) -> list[Any]:
        torch.manual_seed(5)
        loader, got = DataLoader(programs.Slow(400), 4, num_workers=2), []
        for number, batch in enumerate(one_pass(loader)):
            got.append(batch)
            at_step(number)
        return [*got, loader]

    *expected, _ = program(lambda _: None)
    victim = service.start_workers(2)

    def lose_all(number: int) -> None:
        if number == 40:
            service.start_workers(2)
            victim.kill()
            victim.wait()

    monkeypatch.setenv("HETSTREAM_BUFFER_BYTES", "1")  # data workers are not far ahead
    with hooked(service.name, monkeypatch):
        *found, loader = program(lose_all)
        assert not compare(found, expected).differences
        counted = connection_of(loader).statistics.counters
    assert counted.local_steps <= 40


@pytest.mark.usefixtures("soon")
def test_torch_reads_again_where_no_data_worker_is_left(
    service: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def program(at_step: Callable[[int], None]) -> list[Any]:
        torch.manual_seed(5)
        loader, got = DataLoader(programs.Numbers(400), 4, num_workers=2, prefetch_factor=1), []
        for number, batch in enumerate(one_pass(loader)):
            got.append(batch)
            at_step(number)
        return got

    monkeypatch.setattr(unmodified_streams, "_NONE_FOR_S", 0.5)
    expected = program(lambda _: None)
    workers = service.start_workers(2)

    def lose_all(number: int) -> None:
        if number == 30:
            workers.kill()
            workers.wait()

    monkeypatch.setenv("HETSTREAM_BUFFER_BYTES", "1")
    with hooked(service.name, monkeypatch):
        assert not compare(program(lose_all), expected).differences
    assert any("Its own workers read" in message for message in caplog.messages)


class _InTurn(torch_dataloader._MultiProcessingDataLoaderIter):
    """As LitData's: the worker begins whose turn it was when a state was taken."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        first = loader._latest_worker_idx
        self._first_workers = list(range(first, loader.num_workers)) if first and loader.restore else []
        super().__init__(loader)

    def _try_put_index(self) -> None:
        if not self._first_workers:
            super()._try_put_index()
            return
        worker = self._first_workers.pop(0)
        self._index_queues[worker].put((self._send_idx, self._next_index()))
        self._task_info[self._send_idx] = (worker,)
        self._tasks_outstanding += 1
        self._send_idx += 1


class _LoaderInTurn(DataLoader[Any]):
    restore, _latest_worker_idx = False, 0

    def _get_iterator(self) -> Any:
        return _InTurn(self)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("is_known", [True, False])
def test_an_iterator_that_is_known_to_read_as_torchs(
    is_known: bool, three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def program() -> list[Any]:
        torch.manual_seed(5)
        loader = _LoaderInTurn(programs.Uneven(), 2, num_workers=5)
        got = [*one_pass(loader)]
        loader.restore, loader._latest_worker_idx = True, 3
        return [*got, *one_pass(loader), loader]

    *expected, _ = program()
    if is_known:
        monkeypatch.setattr(unmodified_streams, "_READ_AS_TORCH", {f"{__name__}._InTurn"})
    with hooked(three.name, monkeypatch):
        *found, loader = program()
        assert not compare(found, expected).differences
        assert ("_hetstream" in vars(loader) and vars(loader)["_hetstream"].connection is not None) == is_known
        if is_known:
            counted = connection_of(loader).statistics.counters
            assert 0 < counted.local_steps < counted.steps == len(expected)
    assert any("_InTurn, instead of asking" in message for message in caplog.messages) == (not is_known)


class _Interrupted(Exception):
    """Of a handler of a signal."""


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("is_kept", [False, True], ids=["anew", "kept workers"])
def test_torch_goes_on_where_the_service_fails_and_a_handler_interrupts_it(
    is_kept: bool, three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def program(at_step: Callable[[int], None]) -> list[Any]:
        torch.manual_seed(5)
        loader = DataLoader(programs.Numbers(400), 4, num_workers=2, persistent_workers=is_kept)
        got: list[Any] = []
        for _ in range(2):
            passing = one_pass(loader)
            iterator: Any = None
            while True:
                at_step(len(got))
                try:
                    if iterator is None:
                        got.append(next(passing))
                    else:
                        got.append(next(iterator))
                except StopIteration:
                    break
                except _Interrupted:
                    # The generator has ended with it; its iterator goes on.
                    iterator = streaming[-1]
        return got

    streaming: list[Any] = []
    expected = program(lambda _: None)
    made, drop = unmodified_streams.StreamedStreamIter.__init__, unmodified_streams._drop
    take = ServiceClient.take
    fails_at, num_dropped = 130, [0]

    def noted(self: Any, *args: Any) -> None:
        streaming.append(self)
        made(self, *args)

    def failing(self: Any, *args: Any) -> Any:
        if failed:
            raise ServiceError("it is gone")
        return take(self, *args)

    def interrupted(plain: Any, number: int) -> None:
        num_dropped.append(number)
        if len(num_dropped) == 2 + is_kept:
            drop(plain, 3)
            raise _Interrupted
        drop(plain, number)

    failed: list[int] = []
    monkeypatch.setattr(unmodified_streams.StreamedStreamIter, "__init__", noted)
    monkeypatch.setattr(unmodified_streams, "_drop", interrupted)
    monkeypatch.setattr(ServiceClient, "take", failing)
    with hooked(three.name, monkeypatch):
        found = program(lambda number: failed.append(1) if number == fails_at else None)
    assert not compare(found, expected).differences
    assert len(num_dropped) == 3 + 2 * is_kept  # it was read again, twice
    assert any("it is gone. Its own workers read" in message for message in caplog.messages)


_RANKED = """
import sys
sys.path.insert(0, {programs!r})
import stream_programs as programs
import torch, torch.distributed, hashlib, os, time
from torch.utils.data import DataLoader
torch.distributed.init_process_group("gloo", init_method={store!r}, rank=int(os.environ["RANK"]), world_size=2)
torch.manual_seed(4)
loader = DataLoader(programs.OfRank(800), 4, num_workers=2)
for _ in range(2):
    digest = hashlib.sha256()
    iterator = iter(loader)
    for number, batch in enumerate(iterator):
        digest.update(b"".join(batch[key].numpy().tobytes() for key in sorted(batch)))
        while number == 70 and getattr(iterator, "_streamed", None) and iterator._plain is not None:
            iterator._look()
            time.sleep(0.02)
    print(number + 1, digest.hexdigest(), flush=True)
kept = vars(loader).get("_hetstream")
if kept is not None and kept.connection is not None:
    print("by data workers:", kept.connection.statistics.counters.local_steps < 2 * (number + 1), file=sys.stderr)
torch.distributed.destroy_process_group()
"""


def test_each_rank_finds_its_own(three: Any, tmp_path: Path) -> None:
    source = str(Path(programs.__file__).parent)

    def both(where: str, **variables: str) -> list[tuple[str, str]]:
        script = tmp_path / "ranked.py"
        script.write_text(_RANKED.format(programs=source, store=f"file://{tmp_path / where}"))
        environ = os.environ | {"WORLD_SIZE": "2", "PYTHONWARNINGS": "ignore"} | variables
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env=environ | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        return [rank.communicate(timeout=120) for rank in ranks]

    from hetstream.mpi_dataworkers.hook import environment

    expected, found = both("plain"), both("hooked", **environment(three.name))
    assert [out for out, _ in found] == [out for out, _ in expected]
    assert expected[0][0] != expected[1][0]
    assert all("by data workers: True" in err for _, err in found), found


class _Pipe(IterDataPipe[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_datapipes_stay_with_torch(
    three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with hooked(three.name, monkeypatch):
        assert len([*DataLoader(_Pipe(), num_workers=1)]) == 8
    assert any("DataPipes random numbers that all workers share" in message for message in caplog.messages)
