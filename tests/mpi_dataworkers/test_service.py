"""The data plane with real processes and real signals: exactly once, in order, the same bytes, through every death."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets
import torch

import hetstream
from hetstream import DataLoader
from hetstream.mpi_dataworkers.errors import (
    AuthenticationError,
    PipelineError,
    RemoteError,
    ServiceError,
    ServiceUnavailable,
    Superseded,
)
from hetstream.mpi_dataworkers.hook import environment
from hetstream.mpi_dataworkers.transports.zmq import CONTROL_FRAME_BYTES, new_keys
from tests.mpi_dataworkers.batches import as_bytes, check_that_a_lost_worker_costs_nothing

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 5}

RunProgram = Callable[..., "subprocess.CompletedProcess[str]"]


def ids_of(batches: list[tuple[bytes, list[int]]]) -> list[int]:
    return [index for _, ids in batches for index in ids]


@pytest.mark.shows("dynamic sharding gives each element once, also with fewer elements than data workers")
@pytest.mark.shows("without a cluster the loader makes the same bytes in process")
@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("processes", [1, 3])
def test_streamed_epochs_equal_local_epochs_byte_for_byte(service: Any, loaders: Any, processes: int) -> None:
    service.start_workers(processes)
    streamed = loaders(datasets.Augmented(203), service=service.name)
    local = loaders(datasets.Augmented(203))
    for _ in range(2):
        batches = as_bytes(streamed)
        assert batches == as_bytes(local)
        assert sorted(ids_of(batches)) == list(range(203))
    assert streamed.stats()["samples"] == 406
    assert len(streamed) == len(batches)


@pytest.mark.shows("the last, partial batch comes, or `drop_last` leaves it out")
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 16, "drop_last": True},
        {"shuffle": False},
        {"sampler": [3, 1, 2, 3, 0]},
        {"batch_sampler": [[4, 5], [9], [1, 2, 3]], "batch_size": 1, "shuffle": None},
        {"batch_size": None, "shuffle": None, "sampler": range(20)},
        {"generator": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_torchs_keywords_mean_what_they_mean(three: Any, loaders: Any, options: dict[str, Any]) -> None:
    for key in ("sampler",):
        if key in options:
            options = {"shuffle": None} | options

    def generator() -> dict[str, Any]:
        return {"generator": torch.Generator().manual_seed(9)} if "generator" in options else {}

    streamed = loaders(datasets.Augmented(100), service=three.name, **(options | generator()))
    local = loaders(datasets.Augmented(100), **(options | generator()))
    if options.get("batch_size", 1) is None:
        assert [(v.tolist(), i) for v, i in streamed] == [(v.tolist(), i) for v, i in local]
    else:
        assert as_bytes(streamed) == as_bytes(local)
        assert len(streamed) == len(local)


def test_without_batches_the_samplers_lists_are_the_datasets_indices(three: Any, loaders: Any) -> None:
    options = {"batch_size": None, "shuffle": None, "sampler": [[19, 5, 33], [4], 4, [0, -1]]}
    local = loaders(datasets.AskedForLists(40), **options)
    streamed = loaders(datasets.AskedForLists(40), **options, service=three.name)
    expected = [[(v.tolist(), i) for v, i in made] for made in local]
    assert [[i for _, i in made] for made in expected] == [[19, 5, 33], [4], [4, 4], [0, -1]]
    assert [[(v.tolist(), i) for v, i in made] for made in streamed] == expected
    assert streamed.stats()["local_steps"] == 0


@pytest.mark.shows("`__getitems__`, IterableDataset with `get_worker_info()` and datasets with a state work")
def test_a_dataset_that_reads_batches_at_once(three: Any, loaders: Any) -> None:
    assert as_bytes(loaders(datasets.InBatches(50), service=three.name)) == as_bytes(loaders(datasets.InBatches(50)))


@pytest.mark.shows("dynamic sharding gives each element once, also with fewer elements than data workers")
@pytest.mark.parametrize("length", [0, 1, 7])
def test_tiny_datasets_end(three: Any, loaders: Any, length: int) -> None:
    loader = loaders(datasets.Augmented(length), service=three.name, shuffle=False)
    for _ in range(3):
        assert ids_of(as_bytes(loader)) == list(range(length))


@pytest.mark.shows("what a lost data worker had not delivered is leased anew; what had arrived is not made again")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_data_worker_lost_in_mid_epoch_costs_nothing(
    service: Any, loaders: Any, tmp_path: Path, number: signal.Signals
) -> None:
    flag = tmp_path / "struck"
    service.start_workers(2)
    loader = loaders(datasets.Striking(400, 77, flag, number), service=service.name)
    reference = loaders(datasets.Augmented(400))
    check_that_a_lost_worker_costs_nothing(loader, reference, flag, number)


@pytest.mark.shows("a data worker that is killed in mid-shard costs nothing, and its leases are free at once")
def test_the_death_of_a_whole_data_worker_is_seen_at_once(service: Any, loaders: Any) -> None:
    service.start_workers(1)
    victim = service.start_workers(2)
    loader = loaders(datasets.Augmented(800), service=service.name)
    seen = []
    for values, ids in loader:
        seen.append((values.numpy().tobytes(), ids.tolist()))
        if len(seen) == 20:
            victim.kill()
            victim.wait()
    assert seen == as_bytes(loaders(datasets.Augmented(800)))
    service.stop()
    log = service.log("dispatcher")
    assert log.count("lost: its connection closed") >= 2
    assert "silent" not in log


@pytest.mark.shows("the dispatcher may restart before, within and between epochs")
def test_a_dispatcher_killed_in_mid_epoch_comes_back_where_it_was(service: Any, loaders: Any, wait_until: Any) -> None:
    service.start_workers(2)
    loader = loaders(datasets.Augmented(800), service=service.name)
    seen = []
    for values, ids in loader:
        seen.append((values.numpy().tobytes(), ids.tolist()))
        if len(seen) == 20:
            address = service.address_file.read_text()
            service.kill_dispatcher()
            service.start_dispatcher()
    assert seen == as_bytes(loaders(datasets.Augmented(800)))
    # All steps may have been on their way before it was killed: the epoch does not wait for it.
    wait_until(lambda: "incarnation=2" in service.log("dispatcher"), timeout_s=30, what="the new start")
    assert service.address_file.read_text() == address
    assert loader.stats()["local_steps"] == 0


def test_without_data_workers_the_trainer_goes_on_and_says_so(
    service: Any, loaders: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loaders(datasets.Where(40), service=service.name, shuffle=False)
    places = {int(pid) for _, pids, _ in loader for pid in pids}
    assert places == {os.getpid()}
    assert loader.stats()["local_steps"] == 5
    assert (
        sum(
            "no data worker has come yet, or none reaches this process; the program makes" in line
            for line in caplog.messages
        )
        == 1
    )


def test_a_service_that_dies_whole_leaves_the_trainer_working(service: Any, loaders: Any) -> None:
    worker = service.start_workers(1)
    loader = loaders(datasets.Augmented(800), service=service.name)
    seen = []
    for values, ids in loader:
        seen.append((values.numpy().tobytes(), ids.tolist()))
        if len(seen) == 5:
            service.kill_dispatcher()
            worker.kill()
            worker.wait()
    assert seen == as_bytes(loaders(datasets.Augmented(800)))
    assert loader.stats()["local_steps"] > 0


def test_many_signals_end_a_process_as_one_does(service: Any) -> None:
    worker = service.start_workers(2)
    for _ in range(200):
        for process in (service.dispatcher, worker):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
    assert service.dispatcher.wait(timeout=10) == 0
    assert worker.wait(timeout=10) == 0
    assert (service.directory / "work" / "summary.json").exists()


@pytest.mark.shows("a data worker that joins serves in the same epoch")
def test_workers_that_come_later_take_over(service: Any, loaders: Any) -> None:
    loader = loaders(datasets.Where(20_000), service=service.name, shuffle=False)
    places, ids = [], []
    for index, pids, numbers in loader:
        ids += index.tolist()
        places += list(zip(pids.tolist(), numbers.tolist(), strict=True))
        if len(ids) == 16:
            service.start_workers(1)
        if any(pid != os.getpid() for pid, _ in places):
            break
    assert ids == list(range(len(ids)))
    assert places[-1][1] == 0, "get_worker_info() in the data worker"


@pytest.mark.shows("an iteration may be left early and begun again, and `close()` may be called twice")
@pytest.mark.shows("each iteration is the next epoch, with an order of its own, unless `set_epoch` chooses one")
def test_leaving_the_loop_early_and_iterating_again(three: Any, loaders: Any) -> None:
    loader = loaders(datasets.Augmented(400), service=three.name)
    first = next(iter(loader))
    loader.set_epoch(0)
    assert torch.equal(first[0], next(iter(loader))[0])
    loader.set_epoch(3)
    assert sorted(ids_of(as_bytes(loader))) == list(range(400))


@pytest.mark.shows("ten epochs in a row are whole, and two iterators of one loader do not disturb each other")
def test_two_iterators_of_one_loader_are_independent(three: Any, loaders: Any) -> None:
    loader = loaders(datasets.Augmented(64), service=three.name)
    pairs = list(zip(loader, loader, strict=True))
    first, second = ([i for pair in pairs for i in pair[side][1].tolist()] for side in (0, 1))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second


# --- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.shows("a state of four ranks continues with 1, 2, 3 or 8 in the same global order")
def test_state_taken_in_mid_epoch_continues_there_with_other_workers(service: Any, loaders: Any) -> None:
    service.start_workers(1)
    whole = as_bytes(loaders(datasets.Augmented(200)))
    loader = loaders(datasets.Augmented(200), service=service.name)
    passing = iter(loader)
    begin = [next(passing) for _ in range(11)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(begin) == 11
    loader.close()
    service.start_workers(2)
    resumed = loaders(datasets.Augmented(200), service=service.name)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert as_bytes(resumed) == whole[11:]
    assert ids_of(as_bytes(resumed)) != ids_of(whole), "then comes the next epoch, whole"


@pytest.mark.shows("a state that is saved after an exception goes on behind the step that raised")
def test_state_after_a_caught_exception_counts_the_failed_step() -> None:
    loader, other = (DataLoader(datasets.Poisoned(64), batch_size=8) for _ in range(2))
    passing = iter(loader)
    for _ in range(4):
        next(passing)
    with pytest.raises(datasets.UserError):
        next(passing)
    assert loader.state_dict()["step"] == 5
    other.load_state_dict(loader.state_dict())
    assert next(iter(other))[1].tolist() == next(passing)[1].tolist() == list(range(40, 48))


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.shows("a step that fails is tried elsewhere, then raised, skipped or put in quarantine, never in silence")
@pytest.mark.shows("what cannot be pickled is named; remote exceptions keep type and traceback")
def test_an_exception_in_user_code_keeps_its_type_and_names_the_sample(three: Any, loaders: Any) -> None:
    loader = loaders(datasets.Poisoned(100), service=three.name, shuffle=False)
    passing = iter(loader)
    before = [next(passing)[1].tolist() for _ in range(4)]
    assert before == [list(range(first, first + 8)) for first in (0, 8, 16, 24)]
    where = r"on \S+ \(\S+, Python .*\), sample 37"
    with pytest.raises(datasets.UserError, match=rf"sample 37 is bad\n\nin a data worker {where}:\n.*Traceback"):
        next(passing)
    after = [ids.tolist() for _, ids in passing]
    assert after[0] == list(range(40, 48)), "a program that goes on gets the next batch, not the end of the epoch"
    assert len(after) == 8


def test_user_errors_in_the_trainer_itself_are_raised_at_their_step(service: Any, loaders: Any) -> None:
    passing = iter(loaders(datasets.Poisoned(64), service=service.name, shuffle=False))
    for _ in range(4):
        next(passing)
    with pytest.raises(datasets.UserError, match="sample 37 is bad") as caught:
        next(passing)
    assert sys.version_info < (3, 11) or caught.value.__notes__ == ["hetstream: sample 37"]
    assert len(list(passing)) == 3


@pytest.mark.shows("once the service is lost, every call raises")
def test_a_lost_service_is_never_the_end_of_an_epoch(service: Any, loaders: Any) -> None:
    loader = loaders(datasets.Augmented(800), service=service.name, job_name="mine")
    passing = iter(loader)
    next(passing)
    loader._connection.client._failure = Superseded("another process took this place")
    for _ in range(2):
        with pytest.raises(Superseded):
            list(passing)


def test_a_dataset_that_worker_init_fn_prepares_works_in_the_trainer_too(service: Any, loaders: Any) -> None:
    options = {"worker_init_fn": datasets.prepare, "shuffle": False, "service": service.name}
    assert [i for batch in loaders(datasets.Prepared(20), **options) for i in batch.tolist()] == list(range(20))
    service.start_workers()
    assert [i for batch in loaders(datasets.Prepared(20), **options) for i in batch.tolist()] == list(range(20))


def test_a_dataset_that_the_program_changes_between_epochs_changes_for_data_workers(three: Any, loaders: Any) -> None:
    dataset = datasets.Prepared(20)
    loader = loaders(dataset, worker_init_fn=datasets.prepare, shuffle=False, service=three.name)
    for scale in (1, 10, 100):
        dataset.scale = scale
        assert [i for batch in loader for i in batch.tolist()] == [scale * i for i in range(20)]
    assert loader.stats()["local_steps"] == 0


def test_an_object_that_cannot_be_rebuilt_here_is_an_error_at_its_step(three: Any, loaders: Any) -> None:
    loader = loaders(datasets.Odd(20), collate_fn=list, service=three.name)
    with pytest.raises(RemoteError, match=r"cannot be rebuilt in the trainer: .*not a number"):
        next(iter(loader))


@pytest.mark.shows("a dataset of 6 MiB reaches a data worker that comes later")
def test_a_dataset_larger_than_a_frame_reaches_the_data_workers(three: Any, loaders: Any) -> None:
    dataset = datasets.Augmented(16)
    dataset.table = os.urandom(3 * CONTROL_FRAME_BYTES + 5)
    loader = loaders(dataset, service=three.name)
    assert len(list(loader)) == 2
    assert loader.stats()["local_steps"] == 0


@pytest.mark.parametrize(("transports", "transport"), [("", "shm"), ("tcp,ipc", "ipc"), ("tcp", "tcp")])
def test_the_transport_is_the_best_that_is_allowed(
    three: Any, loaders: Any, monkeypatch: pytest.MonkeyPatch, transports: str, transport: str
) -> None:
    monkeypatch.setenv("HETSTREAM_TRANSPORT", transports)
    loader = loaders(datasets.Augmented(80), service=three.name)
    assert len(list(loader)) == 10
    assert [*loader.stats()["transport"]] == [transport]


@pytest.mark.slow  # 5 s until a batch counts as not received, 10 s until the next try
def test_a_batch_connection_in_doubt_is_made_anew(
    service: Any, loaders: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETSTREAM_TRANSPORT", "tcp")
    service.start_workers()
    loader = loaders(datasets.Augmented(100_000_000), service=service.name)
    passing = iter(loader)
    next(passing)
    (receiver,) = loader._connection.client._connection._endpoint._batch_receivers
    (connection,) = receiver._connections.values()
    connection.socket.shutdown(socket.SHUT_RDWR)  # as after a malformed batch
    wait_until(
        lambda: [next(passing) for _ in range(300)] and connection not in list(receiver._connections.values()),
        timeout_s=30,
        what="the end of the connection",
    )
    before = loader.stats()["transport"]["tcp"]
    wait_until(
        lambda: [next(passing) for _ in range(300)] and loader.stats()["transport"]["tcp"] > before,
        timeout_s=30,
        what="batches by a new connection",
    )
    log = service.log("dispatcher")
    assert "the loader has closed the connection" in log or "not received" in log or "is gone" in log, log


def test_a_loader_for_each_epoch_leaves_nothing_behind(three: Any, wait_until: Any) -> None:
    before = threading.active_count()
    for _ in range(3):
        ids = [i for _, batch in DataLoader(datasets.Augmented(40), batch_size=8, service=three.name) for i in batch]
        assert len(ids) == 40
    next(iter(DataLoader(datasets.Augmented(40), batch_size=8, service=three.name)))
    wait_until(lambda: threading.active_count() == before, what="the end of the loaders' threads")


@pytest.mark.shows("what cannot be pickled is named; remote exceptions keep type and traceback")
def test_an_unpicklable_dataset_is_named(three: Any) -> None:
    with pytest.raises(PipelineError, match=r"dataset\.transform\['crop'\]\.lock \(_thread\.lock\) cannot be pickled"):
        DataLoader(datasets.Holding(10), service=three.name)


@pytest.mark.parametrize("options", [{}, {"sharding": "data", "num_shards": 2}], ids=str)
def test_a_dataset_may_grow_between_epochs_and_its_functions_may_be_others(
    three: Any, loaders: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    file = tmp_path / "length"
    for service in (three.name, None):
        file.write_bytes(b"x" * 40)
        loader = loaders(datasets.Growing(file), service=service, **options)
        for length in (40, 41, 39):
            file.write_bytes(b"x" * length)
            assert sorted(index for batch in loader for index in batch.tolist()) == list(range(length))
        loader.collate_fn = sum
        assert sum(loader) == sum(range(39))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 0, "world_size": 2}, "the other ranks, which divide it with this one, may not know"),
        ({"sharing": "lossless"}, "other jobs, which share the batches, do not know"),
        ({"lengths": [1] * 40, "bucket_boundaries": [5]}, "lengths= has the old number"),
    ],
    ids=["ranks", "sharing", "lengths"],
)
def test_a_dataset_does_not_grow_where_others_count_on_its_length(
    three: Any, loaders: Any, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    file = tmp_path / "length"
    file.write_bytes(b"x" * 40)
    loader = loaders(datasets.Growing(file), service=three.name, **options)
    next(iter(loader))
    file.write_bytes(b"x" * 41)
    with pytest.raises(PipelineError, match=f"had 40 samples and has 41 now: {says}"):
        iter(loader)


def test_a_state_goes_on_with_the_length_that_it_was_saved_with(loaders: Any, tmp_path: Path) -> None:
    file = tmp_path / "length"
    file.write_bytes(b"x" * 40)
    loader = loaders(datasets.Growing(file))
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    file.write_bytes(b"x" * 41)
    with pytest.raises(PipelineError, match="the state that was loaded has the old number"):
        iter(loader)


def test_a_dataset_of_another_length_in_the_data_worker_is_refused(service: Any, loaders: Any, tmp_path: Path) -> None:
    file = tmp_path / "length"
    file.write_bytes(b"x" * 40)
    loader = loaders(datasets.Growing(file), service=service.name)
    passing = iter(loader)
    file.write_bytes(b"x" * 30)
    service.start_workers()
    with pytest.raises(PipelineError, match="30 samples in a data worker and 40 in the trainer"):
        list(passing)


@pytest.mark.shows("one name with another policy or pipeline is refused, and the difference is named")
def test_one_job_name_with_two_datasets_is_refused(service: Any, run_program: RunProgram) -> None:
    program = """
import sys, subprocess
from hetstream import DataLoader
from sample_datasets import Augmented
with DataLoader(Augmented(int(sys.argv[1])), batch_size=8, job_name="mine"):
    if sys.argv[1] == "40":
        sys.exit(subprocess.run([sys.executable, __file__, "41"]).returncode)
"""
    result = run_program(program, service.directory, "40", HETSTREAM_SERVICE=service.name)
    assert "job name 'mine' is in use by process" in result.stderr
    assert "length: 40 there, 41 here" in result.stderr
    assert result.returncode == 1


@pytest.mark.shows("the ranks of one job name divide one stream; other names are independent")
def test_a_rank_that_is_started_twice_goes_on_in_the_newer_process(service: Any, run_program: RunProgram) -> None:
    program = """
import sys, subprocess
from hetstream import DataLoader
from sample_datasets import Augmented
loader = DataLoader(Augmented(4000), batch_size=8, job_name="mine", buffer_bytes=4096)  # less than what is left
passing = iter(loader)
next(passing)
if len(sys.argv) == 1:
    print(subprocess.run([sys.executable, __file__, "again"], capture_output=True, text=True).stdout, end="")
    for _ in passing:
        pass
else:
    print("newer:", sum(len(ids) for _, ids in passing) + 8)
"""
    service.start_workers()
    # A small buffer: the older process must not have the whole epoch before the newer one comes.
    variables = {"HETSTREAM_SERVICE": service.name, "HETSTREAM_BUFFER_BYTES": "20000"}
    result = run_program(program, service.directory, **variables)
    assert result.stdout == "newer: 4000\n"
    assert "rank 0 of job 'mine' was registered again by process" in result.stderr
    assert "If these are two programs, give each a job_name" in result.stderr


def test_a_wrong_key_is_refused_on_both_sides(service: Any, tmp_path: Path, wait_until: Any) -> None:
    wait_until(service.address_file.exists)
    fields = json.loads(service.address_file.read_text())
    foreign = tmp_path / "foreign"
    public, secret = new_keys()
    changes = {"client_public_key": public, "client_secret_key": secret}
    foreign.write_text(json.dumps(fields | changes))
    foreign.chmod(0o600)
    command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "internal", "worker", "--service", f"file:{foreign}"]
    # At the same time: either believes it after seconds.
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        with pytest.raises(AuthenticationError, match="refused the key in the address file"):
            DataLoader(datasets.Augmented(3), service=f"file:{foreign}")
        _, said = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert "refused the key in the address file" in said


def test_another_dispatchers_key_is_named(
    service: Any, tmp_path: Path, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(service.address_file.exists)
    fields = json.loads(service.address_file.read_text())
    foreign = tmp_path / "foreign"
    foreign.write_text(json.dumps(fields | {"server_public_key": new_keys()[0]}))
    foreign.chmod(0o600)
    monkeypatch.setattr("hetstream.mpi_dataworkers.loader.process_connection.CONNECT_TIMEOUT_S", 1.0)
    with pytest.raises(AuthenticationError, match="the server key in the address file is not its key"):
        DataLoader(datasets.Augmented(3), service=f"file:{foreign}")


def test_an_address_file_that_others_can_read_is_refused(service: Any, wait_until: Any) -> None:
    wait_until(service.address_file.exists)
    assert stat.S_IMODE(service.address_file.stat().st_mode) == 0o600
    service.address_file.chmod(0o640)
    with pytest.raises(ServiceError, match=r"mode 0640.*must be yours with mode 0600"):
        DataLoader(datasets.Augmented(3), service=service.name)


def test_a_second_dispatcher_on_one_directory_is_refused(service: Any, wait_until: Any) -> None:
    wait_until(service.address_file.exists)
    first = service.dispatcher
    service.start_dispatcher()
    assert service.dispatcher.wait(timeout=20) == 1
    service.dispatcher = first
    assert f"is in use by the dispatcher with process id {first.pid}" in service.log("dispatcher")


@pytest.mark.shows("damaged state is refused, the file named; a torn last record is dropped")
def test_damaged_state_is_refused_and_named(service: Any, wait_until: Any) -> None:
    wait_until(service.address_file.exists)
    service.kill_dispatcher()
    for path in (service.directory / "work").glob("journal.sqlite*"):
        path.write_bytes(b"not a database, but long enough to look at" * 30)
    service.start_dispatcher()
    assert service.dispatcher.wait(timeout=20) == 1
    assert "journal.sqlite cannot be used" in service.log("dispatcher")


@pytest.mark.shows("a dispatcher needs a work directory: there is always a journal")
def test_a_dispatcher_needs_a_work_dir() -> None:
    command = [
        sys.executable,
        "-m",
        "hetstream.slurm_plugin.cli",
        "internal",
        "dispatcher",
        "--bind",
        "tcp://127.0.0.1:0",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "required: --work-dir, --address-file" in result.stderr


# --- what is left, how long it takes --------------------------------------------------------------------------------


@pytest.mark.shows("a data worker that is killed in mid-shard costs nothing, and its leases are free at once")
def test_a_lost_data_worker_holds_up_the_trainer_for_seconds_at_most(service: Any, loaders: Any) -> None:
    """A second is the goal of `make bench-kill`; 4 s would be a lease's time-out, a loaded machine may add to it."""
    service.start_workers(1)
    victim = service.start_workers(1)
    loader = loaders(datasets.Augmented(4000), service=service.name, buffer_bytes=4000)
    passing, longest_s = iter(loader), 0.0
    for _ in range(50):
        next(passing)
    victim.kill()
    begun = time.monotonic()
    for _ in passing:
        longest_s, begun = max(longest_s, time.monotonic() - begun), time.monotonic()
    print(f"longest wait after SIGKILL: {longest_s:.2f} s")
    assert longest_s < 4.0
    assert loader.stats()["local_steps"] == 0


KILLED = """
import sys
from hetstream import DataLoader
from sample_datasets import Augmented
loader = DataLoader(Augmented(100_000), batch_size=8)
passing = iter(loader)
next(passing)
print(*loader._connection.client.receivers, flush=True)
sys.stdin.read()
"""


@pytest.mark.shows("after SIGKILL no process, port, socket name or shared memory is left")
def test_nothing_remains_of_what_was_killed(service: Any, tmp_path: Path, wait_until: Any) -> None:
    """Files in /dev/shm are looked for after every test."""
    worker = service.start_workers(2)
    (tmp_path / "train.py").write_text(KILLED)
    variables = os.environ | {"HETSTREAM_SERVICE": service.name, "PYTHONPATH": os.pathsep.join(sys.path)}
    trainer = subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with trainer:
        assert trainer.stdout is not None
        addresses = trainer.stdout.readline().decode().split()
        addresses.append(json.loads(service.address_file.read_text())["address"])
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        assert len(children) == 2
        for one in (trainer, worker, service.dispatcher):
            one.kill()
            one.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), what="the end of the processes")
    names = {one.rpartition("@")[2] for one in addresses if "@" in one}
    ports = {f":{int(one.rpartition(':')[2]):04X} 00000000:0000 0A" for one in addresses if one.startswith("tcp")}
    assert len(names) == 2
    assert len(ports) == 2
    assert not [name for name in names if name in Path("/proc/net/unix").read_text()]
    assert not [port for port in ports if port in Path("/proc/net/tcp").read_text()], "a socket that listens"


@pytest.mark.shows("with `shm` and no data worker on the host the loader makes the steps itself, and says so")
def test_where_no_transport_reaches_the_loader_works_itself(
    service: Any, loaders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.start_workers()
    loader = loaders(datasets.Augmented(40), service=service.name)
    endpoint = type(loader._connection.client._connection._endpoint)
    monkeypatch.setattr(endpoint, "receivers", ["shm:@hetstream-of-another-host"])  # as with HETSTREAM_TRANSPORT=shm
    assert as_bytes(loader) == as_bytes(loaders(datasets.Augmented(40)))
    assert loader.stats()["local_steps"] > 0
    assert "hetstream-of-another-host" in service.log("dispatcher") + service.log("worker")


def test_the_buffer_holds_what_it_may_from_the_first_batch_on(three: Any, loaders: Any, wait_until: Any) -> None:
    options = {"batch_size": 1, "num_workers": 1, "prefetch_factor": 2, "buffer_bytes": 8 << 20}
    loader = loaders(datasets.Heavy(40), service=three.name, **options)
    for _ in range(2):
        waiting = []
        passing = iter(loader)
        for step in range(40):
            # Once there are as many as may be, more would come at any moment.
            wait_until(lambda step=step: waiting_of(loader) >= min(2, 40 - step), what="batches")
            waiting.append(waiting_of(loader))
            next(passing)
        assert list(passing) == []
        assert max(waiting) <= 4, f"batches of 2 MiB that waited: {waiting}"
    assert loader.stats()["local_steps"] == 0


def waiting_of(loader: DataLoader) -> int:
    return int(loader.stats()["batches_waiting"])


# --- programs -------------------------------------------------------------------------------------------------------

BATCH_CLASSES = """
import collections, dataclasses, enum, sys, torch
from hetstream import DataLoader
from sample_datasets import Augmented

class Slotted:
    __slots__ = ("values",)
    def __init__(self, values):
        self.values = values

@dataclasses.dataclass(slots=True, frozen=True)
class Frozen:
    values: torch.Tensor

class Kind(enum.Enum):
    ONLY = 1

Named = collections.namedtuple("Named", "values")

def main():
    LocalNamed = collections.namedtuple("LocalNamed", "values")

    class Local:
        def __init__(self, values):
            self.values = values

    def of_each_call(values):
        class Fresh(Local):
            pass
        return Fresh(values)

    def collate(samples):
        values = torch.stack([values for values, _ in samples])
        makers = Slotted, Frozen, Named, LocalNamed, Local, of_each_call
        return [Kind.ONLY, *(maker(values + number) for number, maker in enumerate(makers))]

    batch = next(iter(loader := DataLoader(Augmented(8), batch_size=8, collate_fn=collate, service=sys.argv[1])))
    kind, *others = batch
    assert kind is Kind.ONLY
    assert [type(one) for one in others[:5]] == [Slotted, Frozen, Named, LocalNamed, Local], others
    assert [torch.equal(one.values, others[0].values + number) for number, one in enumerate(others)] == [True] * 6
    assert loader.stats()["local_steps"] == 0
    loader.close()

main()
print("done")
"""


def test_batches_may_be_of_classes_that_only_the_program_has(three: Any, run_program: Any, tmp_path: Path) -> None:
    finished = run_program(BATCH_CLASSES, tmp_path, three.name)
    assert finished.stdout == "done\n", finished.stderr


UNMODIFIED = """
import hashlib, json, torch
from torch.utils.data import DataLoader, IterableDataset
from sample_datasets import Augmented

class Mine(Augmented):
    def __getitem__(self, index):
        values, index = super().__getitem__(index)
        return {"values": values.to(torch.bfloat16), "id": index, "name": f"sample {index}"}

class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(5))

if __name__ == "__main__":
    torch.manual_seed(7)
    loader = DataLoader(Mine(203), batch_size=8, shuffle=True, num_workers=2)
    stream = DataLoader(Counting())
    for epoch in range(2):
        digest, ids = hashlib.sha256(), []
        for batch in loader:
            digest.update(batch["values"].float().numpy().tobytes())
            digest.update("".join(batch["name"]).encode())
            ids += batch["id"].tolist()
        rng, n = torch.rand(1).item(), len(list(stream))
        print(json.dumps({"bytes": digest.hexdigest(), "ids": ids, "rng": rng, "n": n}))
"""


def test_an_unmodified_program_streams_in_the_order_it_has_without_hetstream(
    service: Any, run_program: RunProgram
) -> None:
    service.start_workers(2)
    plain = run_program(UNMODIFIED, service.directory)
    local = run_program(UNMODIFIED, service.directory, **environment(None, {}, in_process_loaders=True))
    streamed = run_program(UNMODIFIED, service.directory, **environment(service.name, {}, in_process_loaders=True))
    assert plain.returncode == local.returncode == streamed.returncode == 0, streamed.stderr
    without, here, remote = ([json.loads(line) for line in one.stdout.splitlines()] for one in (plain, local, streamed))
    assert remote == here, "the same bytes as in process"
    for with_hook, plain_epoch in zip(remote, without, strict=True):
        assert {**with_hook, "bytes": ""} == {**plain_epoch, "bytes": ""}, "order and the program's own random numbers"
    reason = "a DataLoader over Counting stays local: torch promises that the program's own dataset makes these"
    assert streamed.stderr.count(reason) == 1
    assert service.log("dispatcher").count("opened") == 2


KEYED = """
from torch.utils.data import DataLoader, Dataset

class Keyed(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, key):
        return {"a": 1, "b": 2, "c": 3}[key]

loader = DataLoader(Keyed(), sampler=["c", "a", "b"], batch_size=2)
print([batch.tolist() for _ in range(2) for batch in loader])
"""


@pytest.mark.parametrize("streamed", [True, False])
def test_a_sampler_of_keys_stays_local_and_says_why_once(service: Any, run_program: RunProgram, streamed: bool) -> None:
    service.start_workers()
    result = run_program(
        KEYED, service.directory, **environment(service.name if streamed else None, {}, in_process_loaders=True)
    )
    assert result.stdout == "[[3, 1], [2], [3, 1], [2]]\n", result.stderr
    assert result.stderr.count("a DataLoader over Keyed stays local: the sampler gave ['c', 'a'] for step 0") == 1


def test_the_hook_hides_no_sitecustomize_and_is_quiet_elsewhere(tmp_path: Path, run_program: RunProgram) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('the site ran')")
    variables = environment(None, {"PYTHONPATH": str(tmp_path / "site")})
    result = run_program("import sys; print('torch' in sys.modules, 'zmq' in sys.modules)", tmp_path, **variables)
    assert result.stdout == "the site ran\nFalse False\n"
    assert result.stderr == ""


def test_two_hooks_of_hetstream_run_each_other_once_and_the_sites(tmp_path: Path) -> None:
    """As in a job that streams on a site whose TaskProlog shares GPUs."""
    package = Path(hetstream.__file__).parent
    hooks = [str(package / place) for place in ("mpi_dataworkers/hook/path", "hetjob/gpu/startup")]
    (tmp_path / "sitecustomize.py").write_text("print('the site ran')")
    for order in (hooks, hooks[::-1]):
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*order, str(tmp_path)])}
        argv = [sys.executable, "-c", "print('the program ran')"]
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=True)
        assert (done.stdout, done.stderr) == ("the site ran\nthe program ran\n", "")


@pytest.mark.shows("an iteration may be left early and begun again, and `close()` may be called twice")
def test_a_program_that_does_not_close_its_loader_ends_at_once(service: Any, run_program: RunProgram) -> None:
    program = """
import time
from hetstream import DataLoader
from sample_datasets import Augmented
loader = DataLoader(Augmented(4000), batch_size=8)
passing = iter(loader)
next(passing)
import atexit
started = time.monotonic()
import hetstream.mpi_dataworkers.loader.connection as connection
atexit.unregister(connection._close_connections)
atexit.register(lambda: print("ended in", time.monotonic() - started < 2))
atexit.register(connection._close_connections)
"""
    service.start_workers()
    result = run_program(program, service.directory, HETSTREAM_SERVICE=service.name)
    assert (result.returncode, result.stdout, result.stderr) == (0, "ended in True\n", "")


@pytest.mark.shows("a process that comes before the others waits for them, 30 s at most")
def test_no_dispatcher_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetstream.mpi_dataworkers.loader.process_connection.CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(ServiceUnavailable, match=r"nowhere did not appear within 0\.2 s\. Is the dispatcher running"):
        DataLoader(datasets.Augmented(3), service=f"file:{tmp_path / 'nowhere'}")


def test_the_summary_holds_what_every_loader_delivered(service: Any, loaders: Any) -> None:
    service.start_workers()
    loader = loaders(datasets.Augmented(40), service=service.name)
    as_bytes(loader)
    loader.close()
    service.stop()
    summary = json.loads((service.directory / "work" / "summary.json").read_text())
    (row,) = summary["loaders"]
    assert (row["epochs"], row["steps"], row["samples"], row["local_steps"]) == (1, 5, 40, 0)
    assert 0 < row["wait_s"] <= row["elapsed_s"]
    assert summary["data_workers_seen"] == 1


DISTRIBUTED = """
import json, os, sys, torch
import torch.distributed as dist
from hetstream import DataLoader
from sample_datasets import Augmented

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loader = DataLoader(Augmented(101), batch_size=8, shuffle=True, seed=2)
epochs = []
for epoch in range(2):
    ids = []
    for values, batch in loader:
        optimizer.zero_grad()
        model(values.flatten(1)).mean().backward()  # a rank that is short of a batch would hang here
        optimizer.step()
        ids.append(batch.tolist())
    epochs.append(ids)
json.dump(epochs, open(f"ledger.{dist.get_rank()}", "w"))
dist.destroy_process_group()
"""


@pytest.mark.shows("the ranks of one job name divide one stream; other names are independent")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ddp_ranks_share_each_epoch_and_end_together(service: Any, run_program: RunProgram, ranks: int) -> None:
    service.start_workers(2)
    launcher = (
        "import sys; from torch.distributed.run import main\n"
        f"open('ddp.py', 'w').write({DISTRIBUTED!r})\n"
        f"main(['--standalone', '--nproc-per-node={ranks}', 'ddp.py'])\n"
    )
    result = run_program(launcher, service.directory, HETSTREAM_SERVICE=service.name, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    ledgers = [json.loads((service.directory / f"ledger.{rank}").read_text()) for rank in range(ranks)]
    for epoch in range(2):
        assert len({len(ledger[epoch]) for ledger in ledgers}) == 1, "every rank the same number of steps"
        assert sorted(i for ledger in ledgers for step in ledger[epoch] for i in step) == list(range(101))
