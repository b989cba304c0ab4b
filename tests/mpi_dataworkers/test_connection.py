"""The connection that the loaders of a process share."""

from __future__ import annotations

import collections
import json
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets
import torch

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.dispatcher import server
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.errors import RemoteError
from hetstream.mpi_dataworkers.hook import environment
from hetstream.mpi_dataworkers.loader import process_connection
from hetstream.mpi_dataworkers.loader.client import DISPATCHER_SILENCE_S
from hetstream.mpi_dataworkers.loader.process_connection import ConnectionOptions, join_service
from hetstream.mpi_dataworkers.transports.base import Disconnected, Received, ReceivedBatch, Reconnected, ToLoader
from hetstream.mpi_dataworkers.wire.address import ServiceAddress
from hetstream.mpi_dataworkers.wire.messages import (
    Alive,
    Batch,
    Batches,
    Delivery,
    LeaveLoader,
    LoaderHeartbeat,
    LoaderStats,
    Membership,
    Message,
    RegisterLoader,
)

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 5}

DEADLINE_S = 10.0
KEYS = "k" * 40, "k" * 40, "k" * 40, "00" * 32
OPTIONS = ConnectionOptions(ServiceAddress("tcp://127.0.0.1:1", *KEYS), frozenset({"tcp"}), False)


class FakeEndpoint:
    """What the dispatcher and data workers send, put in by the test, and what loaders sent."""

    receivers = ("tcp://127.0.0.1:2",)

    def __init__(self) -> None:
        self.incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self.closed = threading.Event()

    def send(self, loader: int, message: Message) -> None:
        self.sent.put((loader, message))

    def wake(self) -> None:
        self.incoming.put(None)

    def poll(self, timeout_s: float) -> tuple[list[Any], list[Any]]:
        try:
            one = self.incoming.get(timeout=timeout_s)
        except queue.Empty:
            return [], []
        if isinstance(one, Exception):
            raise one
        return ([], [one]) if isinstance(one, ReceivedBatch) else ([one], []) if one is not None else ([], [])

    def close(self) -> None:
        self.closed.set()


class FakeLoader:
    """Notes what it is told; raises where a message says so."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.connection: Any = None
        self.number = 0
        self.stays = True

    def joined(self, connection: Any, number: int) -> None:
        self.connection, self.number = connection, number

    def begin(self, now: float) -> None:
        assert now > 0
        self.connection.send(self.number, LoaderHeartbeat(LoaderStats()))

    def message_received(self, message: Any, now: float) -> None:
        assert now > 0
        if isinstance(message, Membership):
            raise ValueError(f"{message.num_data_workers} data workers are too many")
        self.told.put(message)

    def batches_received(self, _: Delivery, received: ReceivedBatch) -> None:
        self.told.put(received)

    def attend(self, now: float) -> bool:
        assert now > 0
        return self.stays

    def leave(self) -> None:
        self.connection.send(self.number, LeaveLoader(LoaderStats()))

    def has_left(self, failure: HetstreamError | None) -> None:
        self.told.put(("left", failure))


@pytest.fixture
def endpoints(monkeypatch: pytest.MonkeyPatch) -> list[FakeEndpoint]:
    """The endpoints that were opened."""
    opened: list[FakeEndpoint] = []

    def open_fake(*_: Any) -> FakeEndpoint:
        opened.append(FakeEndpoint())
        return opened[-1]

    monkeypatch.setattr(process_connection, "open_loader_endpoint", open_fake)
    return opened


def join(count: int, options: ConnectionOptions = OPTIONS) -> list[FakeLoader]:
    made = [FakeLoader() for _ in range(count)]
    for one in made:
        join_service(options, one, 1)
    return made


def leave(loaders: list[FakeLoader]) -> None:
    for one in loaders:
        one.stays = False
        one.connection.call(one.number)
    for one in loaders:
        assert one.told.get(timeout=DEADLINE_S) == ("left", None)
        one.connection.wait_for_end(DEADLINE_S)


def batch_of(session_id: str) -> Batch:
    return Batch(session_id, 0, 1, 1, b"", [])


def test_loaders_of_a_service_share_one_connection_and_the_last_one_closes_it(endpoints: list[FakeEndpoint]) -> None:
    loaders = join(3)
    others = join(1, ConnectionOptions(ServiceAddress("tcp://127.0.0.1:9", *KEYS), OPTIONS.transports, False))
    assert len(endpoints) == 2
    assert [one.number for one in loaders] == [1, 2, 3]
    assert sorted(endpoints[0].sent.get(timeout=DEADLINE_S)[0] for _ in range(3)) == [1, 2, 3]
    leave(loaders[:2])
    assert not endpoints[0].closed.is_set()
    leave(loaders[2:])
    assert endpoints[0].closed.wait(DEADLINE_S)
    assert not endpoints[1].closed.is_set()
    again = join(1)
    assert len(endpoints) == 3
    leave(again + others)


def test_messages_and_batches_reach_the_loader_that_they_are_for(endpoints: list[FakeEndpoint]) -> None:
    loaders = join(3)
    first, second, third = loaders
    (endpoint,) = endpoints
    second.connection.read("s2", second.number)
    third.connection.read("s3", third.number)
    small = ReceivedBatch(Batches([batch_of("s3"), batch_of("s3")]), [], "tcp")
    large = ReceivedBatch(batch_of("s2"), [], "tcp")
    for one in (
        ReceivedBatch(batch_of("nobody's"), [], "tcp"),
        small,
        large,
        ToLoader(1, Alive()),
        ToLoader(77, Alive()),
    ):
        endpoint.incoming.put(one)
    assert first.told.get(timeout=DEADLINE_S) == Alive()
    assert second.told.get(timeout=DEADLINE_S) == large
    assert third.told.get(timeout=DEADLINE_S) == small
    second.connection.stop_reading("s2")
    endpoint.incoming.put(large)
    endpoint.incoming.put(Reconnected())
    assert [one.told.get(timeout=DEADLINE_S) for one in loaders] == [Reconnected()] * 3
    leave(loaders)


def test_what_a_loader_raises_ends_that_loader_alone(endpoints: list[FakeEndpoint]) -> None:
    bad, good = join(2)
    (endpoint,) = endpoints
    endpoint.incoming.put(ToLoader(bad.number, Membership(9)))
    said, failure = bad.told.get(timeout=DEADLINE_S)
    assert said == "left"
    assert "ValueError: 9 data workers are too many" in str(failure)
    sent = [endpoint.sent.get(timeout=DEADLINE_S) for _ in range(3)]
    assert (bad.number, LeaveLoader(LoaderStats())) in sent, "the dispatcher is to know"
    endpoint.incoming.put(ToLoader(good.number, Alive()))
    assert good.told.get(timeout=DEADLINE_S) == Alive()
    leave([good])


def test_a_connection_that_fails_fails_all_its_loaders_and_the_next_one_gets_another(
    endpoints: list[FakeEndpoint],
) -> None:
    loaders = join(2)
    endpoints[0].incoming.put(HetstreamError("broken"))
    assert [str(one.told.get(timeout=DEADLINE_S)[1]) for one in loaders] == ["broken"] * 2
    loaders[0].connection.wait_for_end(DEADLINE_S)
    leave(join(1))
    assert len(endpoints) == 2


def test_the_end_of_a_connection_is_the_end_of_all_its_loaders() -> None:
    state = DispatcherState(1, 0.0)
    for number, peer in enumerate(("aa/1", "aa/2", "ab/1")):
        hello = RegisterLoader("job", number, 0, 1, "host", 1, "d", {})
        server._decide(state, Received(peer, hello), 0.0)
    server._decide(state, Received("aa", Disconnected()), 1.0)
    assert list(state.tables.loaders) == ["ab/1"]


# --- with a service -------------------------------------------------------------------------------------------------


def holdings() -> tuple[int, collections.Counter[str]]:
    threads = collections.Counter(thread.name.partition("_")[0] for thread in threading.enumerate())
    return len(list(Path("/proc/self/fd").iterdir())), threads


def test_a_loader_more_costs_no_descriptor_and_no_thread(three: Any, loaders: Any) -> None:
    made = [loaders(datasets.Augmented(2000), service=three.name)]
    assert len(list(made[0])) == 250
    before = holdings()
    made += [loaders(datasets.Augmented(40 + number), service=three.name) for number in range(59)]
    passes = [iter(one) for one in made[1:]]
    indices = [[int(index) for batch in one for index in batch[1]] for one in passes]
    num_files, threads = holdings()
    assert [sorted(one) for one in indices] == [list(range(40 + number)) for number in range(59)]
    # Data workers that the first one did not need come with one connection each.
    assert num_files <= before[0] + 3
    assert threads == before[1]
    assert [one.stats()["local_steps"] for one in made] == [0] * 60


def test_a_loader_that_was_closed_makes_its_steps_itself_at_once_and_says_why(
    three: Any, loaders: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loaders(datasets.Augmented(400), service=three.name)
    passing = iter(loader)
    began = [next(passing)]
    loader.close()
    began_at = time.monotonic()
    assert sorted(int(index) for batch in (*began, *passing) for index in batch[1]) == list(range(400))
    assert len(list(loader)) == 50
    assert time.monotonic() - began_at < DISPATCHER_SILENCE_S, "it did not wait for a dispatcher"
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == "hetstream: working locally, because it was closed"


class Gate:
    """Holds up whoever comes by in the trainer, until it is opened."""

    opened = threading.Event()
    reached = threading.Event()


class HangingBatch:
    """Hangs when it is rebuilt in the trainer."""

    def __init__(self, values: Any) -> None:
        self.values, self.pid = values, os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        Gate.reached.set()
        assert Gate.opened.wait(60)


class FailingBatch(HangingBatch):
    """Fails when it is rebuilt."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise SystemExit("no batch of mine")


def hanging(samples: list[Any]) -> HangingBatch:
    return HangingBatch(torch.stack([values for values, _ in samples]))


def failing(samples: list[Any]) -> FailingBatch:
    return FailingBatch(torch.stack([values for values, _ in samples]))


def test_a_loader_whose_batches_hang_or_fail_when_they_are_rebuilt_hurts_no_other(three: Any, loaders: Any) -> None:
    Gate.opened.clear()
    Gate.reached.clear()
    hung = iter(loaders(datasets.Augmented(80), service=three.name, collate_fn=hanging))
    failed = iter(loaders(datasets.Augmented(80), service=three.name, collate_fn=failing))
    other = loaders(datasets.Augmented(200), service=three.name)
    try:
        assert Gate.reached.wait(DEADLINE_S)
        with pytest.raises(RemoteError, match="no batch of mine"):
            next(failed)
        begun = time.monotonic()
        assert sorted(int(index) for batch in other for index in batch[1]) == list(range(200))
        assert time.monotonic() - begun < DEADLINE_S
        assert other.stats()["local_steps"] == 0
    finally:
        Gate.opened.set()
    assert type(next(hung)) is HangingBatch


def test_a_process_reads_from_two_services_at_once(three: Any, service: Any, loaders: Any) -> None:
    service.start_workers()
    pair = [loaders(datasets.Augmented(40), service=one.name) for one in (three, service)]
    first, second = ([int(index) for batch in one for index in batch[1]] for one in pair)
    assert first == second
    assert [one.stats()["local_steps"] for one in pair] == [0, 0]


def test_a_rank_in_a_forked_process_is_not_told_that_the_others_lack_its_loader(
    three: Any, loaders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = loaders(datasets.Augmented(16), rank=0, world_size=2, service=three.name)._connection.client
    assert parent._registration.message.divides
    with monkeypatch.context() as forked:
        forked.setattr(type(parent), "is_inherited", True)
        child = parent.in_this_process()
    try:
        assert not child._registration.message.divides
        assert child._registration.message.job_name == f"{parent._registration.message.job_name}.{os.getpid()}"
    finally:
        child.close()


FORKING = """
import json, os, signal, sys
import torch
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info
from sample_datasets import Augmented
from hetstream import DataLoader
from hetstream.mpi_dataworkers.errors import ServiceError

def read(passing):
    return [int(index) for batch in passing for index in batch[1]]

def in_child(work):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(50)
        os.write(writing, json.dumps(work()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(text)

torch.set_num_threads(1)
loader = DataLoader(Augmented(800), batch_size=8, shuffle=True, seed=5, service=sys.argv[1])
passing = iter(loader)
taken = [int(index) for batch in (next(passing) for _ in range(20)) for index in batch[1]]

def anew():
    loader.set_epoch(0)
    return [read(loader), loader.stats()["local_steps"]]

def on():
    before = loader.stats()["local_steps"]
    return [read(passing), loader.stats()["local_steps"] - before]

torch.manual_seed(3)
sampled = DataLoader(Augmented(400), batch_size=8, sampler=RandomSampler(range(400)), service=sys.argv[1])
drawing = iter(sampled)
first_drawn = [int(index) for index in next(drawing)[1]]

class Parts(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        return iter(range(worker.id, 4000, worker.num_workers))

parts = DataLoader(Parts(), batch_size=8, num_workers=2, service=sys.argv[1])
reading_parts = iter(parts)
next(reading_parts)

def inherited():
    try:
        return str(next(reading_parts))
    except ServiceError as error:
        return str(error)

print(json.dumps({"anew": [in_child(anew) for _ in range(2)], "on": in_child(on), "taken": taken, "rest": read(passing),
                  "drawn": in_child(lambda: read(drawing)), "rest_drawn": read(drawing), "first_drawn": first_drawn,
                  "inherited": in_child(inherited), "parts": sum(len(batch) for batch in reading_parts) + 8,
                  "local_steps": [one.stats()["local_steps"] for one in (loader, sampled, parts)]}))
for one in (loader, sampled, parts):
    one.close()
"""


def test_a_forked_process_has_a_connection_of_its_own(three: Any, run_program: Any, tmp_path: Path) -> None:
    finished = run_program(FORKING, tmp_path, three.name)
    assert finished.returncode == 0, finished.stderr
    assert "hetstream" not in finished.stderr, finished.stderr + three.log("dispatcher")[-2000:]
    said = json.loads(finished.stdout)
    whole = said["taken"] + said["rest"]
    assert sorted(whole) == list(range(800))
    assert said["anew"] == [[whole, 0]] * 2
    assert said["on"] == [said["rest"], 0]
    assert said["drawn"] == said["rest_drawn"], "the sampler's order, as the parent has it"
    assert sorted(said["first_drawn"] + said["rest_drawn"]) == list(range(400))
    assert "Iterate the DataLoader anew in the forked process" in said["inherited"]
    assert said["parts"] == 4000
    assert said["local_steps"] == [0, 0, 0]
    assert "was registered again" not in three.log("dispatcher")


# The loaders are dropped when the loops end, and the program ends at once.
DROPPING = """
from torch.utils.data import DataLoader
for _ in range(2):
    for batch in DataLoader(list(range(640)), batch_size=16):
        pass
"""


def test_the_last_counts_of_loaders_that_a_program_drops_at_its_end_arrive(
    three: Any, run_program: Any, tmp_path: Path, wait_until: Any
) -> None:
    before = three.log("dispatcher")
    done = run_program(DROPPING, tmp_path, **environment(three.name, {}, in_process_loaders=True))
    assert done.returncode == 0, done.stderr

    def said() -> str:
        return str(three.log("dispatcher")[len(before) :])

    wait_until(lambda: said().count("rank=0 left after") + said().count("rank=0 lost after") == 2, 10, "both ends")
    assert said().count("left after 40 steps") == 2
