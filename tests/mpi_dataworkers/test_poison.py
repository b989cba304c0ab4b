"""Samples that cannot be made: tried elsewhere, then raised, skipped or put in quarantine; never lost in silence."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets

from hetstream import DataLoader
from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.errors import DataWorkerDied, PipelineError, RemoteError, StateError
from hetstream.mpi_dataworkers.loader import statistics
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.wire.failures import OnFailure, StepFailures
from hetstream.mpi_dataworkers.wire.messages import (
    BatchFailed,
    ErrorPolicy,
    FailStep,
    Failure,
    Fate,
    FinishLease,
    GrantLease,
    LeaseRevoked,
    LoaderStats,
    OpenSession,
    PlannedOrder,
    RegisterLoader,
    RegisterWorker,
    ReportProgress,
    SessionSpec,
)
from hetstream.mpi_dataworkers.worker import process
from hetstream.mpi_dataworkers.worker.supervisor import FRESH_PROCESS

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 8}

LOADER = "loader"


def bad(sample_index: int = -1, is_final: bool = False) -> Failure:
    return Failure(sample_index, ("builtins", "ValueError"), "bad", "trace", "host", 1, is_final)


def ids_of(loader: Any) -> list[list[int]]:
    return [ids.tolist() for _, ids in loader]


# --- decisions ------------------------------------------------------------------------------------------------------


def test_a_verdict_comes_after_max_attempts_and_a_sample_left_out_begins_a_new_count() -> None:
    policy = ErrorPolicy("skip", 2)
    failures = StepFailures()
    verdicts = [failures.note("w0", bad(index), policy) for index in (5, 5, 6, 6, 6, 6)]
    assert verdicts == [OnFailure.TRY_AGAIN, OnFailure.LEAVE_OUT] * 3
    assert [failure.sample_index for failure in failures.left_out] == [5, 6, -1], "one that is gone fails no more"
    assert [failures.note("w0", bad(), policy) for _ in range(2)] == [OnFailure.TRY_AGAIN, OnFailure.RAISE]
    assert StepFailures().note("w0", bad(3), ErrorPolicy("raise", 1)) is OnFailure.RAISE
    assert StepFailures().note("w0", bad(is_final=True), ErrorPolicy("quarantine", 1)) is OnFailure.RAISE


class Simulated:
    """A dispatcher with one loader in one pass and workers w0, w1, ..., whose messages tests send."""

    def __init__(self, policy: ErrorPolicy, workers: int = 2, steps: int = 4) -> None:
        self.state = DispatcherState(1, 0.0)
        self.leases: dict[str, list[GrantLease]] = {}
        self.failed: list[BatchFailed] = []
        self.now = 1.0
        order = PlannedOrder(steps, 1, 1, 0, False, False, 0)
        self.send(LOADER, RegisterLoader("job", 0, 0, 1, "host", 1, "d", {}))
        for number in range(workers):
            self.send(f"w{number}", RegisterWorker("host", number, "", []))
        session = SessionSpec("s", "d", 0, 0, order, ["tcp://loader:1"], errors=policy)
        self.send(LOADER, OpenSession(session, steps, 0, [], steps, None))

    def send(self, peer: str, message: Any) -> None:
        for one in self.state.handle(peer, message, self.now):
            message = getattr(one, "message", None)
            if isinstance(message, GrantLease):
                self.leases.setdefault(one.peer, []).append(message)
            elif isinstance(message, BatchFailed):
                self.failed.append(message)
        self.state.validate()

    def fail(self, step: int, failure: Failure) -> str:
        token = next(t for t, lease in self.state.tables.leases.items() if lease.first <= step < lease.stop)
        worker = self.state.tables.leases[token].worker
        self.send(worker, FailStep(token, step, failure))
        return worker


@pytest.mark.shows("a step that fails is tried elsewhere, then raised, skipped or put in quarantine, never in silence")
def test_a_failed_step_goes_to_a_worker_that_has_not_failed_it() -> None:
    service = Simulated(ErrorPolicy(max_attempts=3), workers=3)
    tried = [service.fail(0, bad(0)) for _ in range(3)]
    assert sorted(tried) == ["w0", "w1", "w2"]
    (failed,) = service.failed
    assert (failed.step, failed.failure.sample_index) == (0, 0)
    assert 0 not in {step for lease in service.state.tables.leases.values() for step in range(lease.first, lease.stop)}


@pytest.mark.shows("a step that fails is tried elsewhere, then raised, skipped or put in quarantine, never in silence")
def test_with_one_worker_a_step_is_tried_there_again_and_not_for_ever() -> None:
    service = Simulated(ErrorPolicy(max_attempts=3), workers=1)
    assert [service.fail(0, bad(0)) for _ in range(3)] == ["w0"] * 3
    assert len(service.failed) == 1
    service.send(LOADER, ReportProgress("s", 1, [], 4, LoaderStats()))
    assert not service.state.tables.sessions["s"].failures, "nothing is kept of steps that the loader has passed"


def test_a_skipped_sample_is_named_in_the_next_lease_of_its_step() -> None:
    service = Simulated(ErrorPolicy("skip", max_attempts=1), workers=1)
    service.fail(1, bad(1))
    lease = service.leases["w0"][-1]
    assert (lease.first_step, lease.stop_step) == (1, 2)
    assert [failure.sample_index for failure in lease.left_out[1]] == [1]
    service.fail(1, bad())
    assert [failure.sample_index for failure in service.leases["w0"][-1].left_out[1]] == [1, -1]
    service.fail(1, bad())
    assert [one.step for one in service.failed] == [1], "nothing is left to leave out"


# --- real processes -------------------------------------------------------------------------------------------------

BAD = {9, 10, 37}
WHERE = ["data workers", "in process", "own processes", "fallback"]


def place_of(where: str, service: Any) -> dict[str, Any]:
    """Options of a loader whose samples are made there."""
    if where == "data workers":
        service.start_workers(2)
    if where in ("data workers", "fallback"):
        return {"service": service.name}
    return {"num_workers": 1} if where == "own processes" else {}


@pytest.mark.shows("a step that fails is tried elsewhere, then raised, skipped or put in quarantine, never in silence")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("policy", ["skip", "quarantine"])
def test_bad_samples_are_left_out_in_order_counted_and_told(
    service: Any, loaders: Any, where: str, policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"on_error": policy, "max_attempts": 2}
    if policy == "quarantine":
        options["quarantine_dir"] = tmp_path / "quarantine"
    options |= place_of(where, service)
    whole = range(64, 72)
    loader = loaders(datasets.Spoiled(80, BAD | set(whole), tmp_path / "log"), **options)
    expected = [[i for i in range(first, first + 8) if i not in BAD] for first in range(0, 80, 8) if first != 64]
    assert ids_of(loader) == expected
    stats = loader.stats()
    assert (stats["skipped"], stats["samples"], stats["steps"]) == (11, 69, 9)
    assert [(one.epoch, one.sample_index) for one in loader.skipped_samples] == [(0, i) for i in (*sorted(BAD), *whole)]
    assert loader.skipped_samples[0].error == "UserError: sample 9 is bad"
    assert sum("skipped sample" in line for line in caplog.messages) == 11
    tries = datasets.tries_of(tmp_path / "log")
    assert {tries.count(index) for index in (*BAD, *whole)} == {2}
    assert ids_of(loader) == expected, "the next epoch"
    again = datasets.tries_of(tmp_path / "log")[len(tries) :]
    assert loader.stats()["skipped"] == 22
    if policy == "skip":
        assert len(again) == 22
        return
    assert not again, "samples in quarantine are not tried again"
    (file,) = (tmp_path / "quarantine").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["index"] for line in lines] == [*sorted(BAD), *whole]
    assert set(lines[0]) == {"epoch", "step", "index", "type", "text", "traceback", "host", "pid"}
    assert (lines[0]["type"], lines[0]["step"]) == ("sample_datasets.UserError", 1)
    resumed = loaders(datasets.Spoiled(80, BAD | set(whole), tmp_path / "log"), **options)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert ids_of(resumed) == expected
    assert len(datasets.tries_of(tmp_path / "log")) == len(tries)


def test_a_sample_that_fails_once_is_made_elsewhere(service: Any, loaders: Any, tmp_path: Path) -> None:
    service.start_workers(2)
    loader = loaders(datasets.FailsOnce(80, 37, tmp_path / "flag"), service=service.name)
    assert ids_of(loader) == ids_of(loaders(datasets.Augmented(80)))
    assert (tmp_path / "flag").exists()
    assert loader.stats()["skipped"] == 0
    assert "step=4 sample=37 failed on" in service.log("dispatcher")


def test_a_collate_function_that_fails_skips_its_step_and_a_pipeline_that_cannot_be_used_is_raised(
    service: Any, loaders: Any
) -> None:
    service.start_workers()
    options = {"service": service.name, "on_error": "skip", "max_attempts": 2}
    loader = loaders(datasets.Augmented(40), collate_fn=datasets.collate_without_20, **options)
    assert ids_of(loader) == [list(range(first, first + 8)) for first in (0, 8, 24, 32)]
    assert loader.stats()["skipped"] == 8
    assert [(one.epoch, one.sample_index) for one in loader.skipped_samples] == [(0, -1)]
    with pytest.raises(PipelineError, match="cannot be rebuilt in a data worker"):
        next(iter(loaders(datasets.OnlyHere(), **options)))


def expected_of_stream(length: int, bad: set[int], num_shards: int, batch_size: int) -> list[list[int]]:
    """Batches of a stream without its bad elements: each shard fills its batches with what follows."""
    shards = [[i for i in range(shard, length, num_shards) if i not in bad] for shard in range(num_shards)]
    steps = [[ids[at : at + batch_size] for at in range(0, len(ids), batch_size)] for ids in shards]
    return [step for turn in itertools.zip_longest(*steps) for step in turn if step]


@pytest.mark.shows("a step that fails is tried elsewhere, then raised, skipped or put in quarantine, never in silence")
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("sharding", ["hint", "data"])
def test_bad_elements_of_a_stream_are_left_out_in_order_counted_and_told(
    service: Any, loaders: Any, where: str, sharding: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"num_shards": 2, "batch_size": 4, "sharding": sharding}
    options |= {"on_error": "quarantine", "quarantine_dir": tmp_path / "quarantine"}
    options |= place_of(where, service)
    bad = {0, 9, 10, 11, 32, 76, 78, 79}  # 76, 78: the end of a shard; 79: that of the other
    dataset = datasets.SpoiledLog(80, bad) if sharding == "hint" else datasets.SpoiledPlainLog(80, bad)
    loader = loaders(dataset, **options)
    expected = expected_of_stream(80, bad, 2, 4)
    assert ids_of(loader) == expected
    stats = loader.stats()
    assert (stats["skipped"], stats["samples"], stats["steps"]) == (8, 72, len(expected))
    assert sum("skipped sample" in line for line in caplog.messages) == 8
    errors = [one.error for one in loader.skipped_samples]
    assert {
        f"UserError: element {i // 2 if sharding == 'hint' else i} of shard {i % 2}: element {i} is bad" for i in bad
    } == set(errors)
    assert [one.epoch for one in loader.skipped_samples] == [0] * 8
    (file,) = (tmp_path / "quarantine").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["text"] for line in lines] == [error.removeprefix("UserError: ") for error in errors]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert ids_of(loader) == expected, "the next epoch meets them again"
    assert loader.stats()["skipped"] == 16
    assert loader.state_dict()["quarantined"] == []


@pytest.mark.shows("a step that fails is tried elsewhere, then raised, skipped or put in quarantine, never in silence")
def test_what_a_stream_left_out_once_is_left_out_by_who_takes_over_and_by_who_continues(
    service: Any, loaders: Any, tmp_path: Path
) -> None:
    service.start_workers(2)
    options = {"service": service.name, "on_error": "skip", "num_shards": 2, "batch_size": 4, "buffer_bytes": 4000}
    dataset = datasets.UnsteadyLog(2000, 10, tmp_path / "failed", 1501, tmp_path / "struck")
    loader = loaders(dataset, **options)
    passing = iter(loader)
    seen = [next(passing)[1].tolist() for _ in range(100)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) < 2000
    whole = seen + [ids.tolist() for _, ids in passing]
    assert (tmp_path / "failed").exists()
    assert (tmp_path / "struck").exists()
    assert sorted(i for ids in whole for i in ids) == [i for i in range(2000) if i != 10]
    assert whole == expected_of_stream(2000, {10}, 2, 4)
    for make in (options, options | {"service": None}):
        resumed = loaders(dataset, **make)
        resumed.load_state_dict(state)
        assert seen + ids_of(resumed) == whole, "although the element can be made now"


def test_of_a_stream_only_elements_are_left_out(service: Any, loaders: Any) -> None:
    for on_error in ("skip", "quarantine"):
        with pytest.raises(OptionsError, match=r"Log.__iter__ is a generator.*return map\(self.decode"):
            loaders(datasets.PoisonedLog(40), on_error=on_error)
    with pytest.raises(OptionsError, match="with length_of: all ranks must form the same rounds"):
        loaders(datasets.SpoiledLog(4, set()), on_error="skip", length_of=len, bucket_boundaries=[4])
    with pytest.raises(PipelineError, match=r"HiddenGenerator.__iter__ is a generator"):
        next(iter(loaders(datasets.HiddenGenerator(40), on_error="skip")))
    with pytest.raises(PipelineError, match="Stuck raised 1001 times in a row"):
        next(iter(loaders(datasets.Stuck(40), on_error="skip")))
    service.start_workers()
    options: dict[str, Any] = {"service": service.name, "on_error": "skip", "max_attempts": 2, "num_shards": 1}
    loader = loaders(datasets.SpoiledLog(40, {17}), collate_fn=datasets.collate_without_20, **options)
    assert ids_of(loader) == [[*range(8)], [*range(8, 16)], [*range(25, 33)], [*range(33, 40)]]
    assert [one.sample_index for one in loader.skipped_samples] == [17, -1]
    assert loader.stats()["skipped"] == 1 + 8
    with pytest.raises(DataWorkerDied, match="ended with code 7"):
        list(loaders(datasets.DeadlyLog(16, 3), **options))


def test_a_quarantine_file_that_cannot_be_written_any_more_is_told(loaders: Any, tmp_path: Path) -> None:
    folder = tmp_path / "quarantine"
    dataset = datasets.Spoiled(40, {9}, tmp_path / "log")
    loader = loaders(dataset, on_error="quarantine", max_attempts=1, quarantine_dir=folder)
    folder.rmdir()
    folder.touch()
    passing = iter(loader)
    next(passing)
    with pytest.raises(PipelineError, match=r"sample 9 is to be put in quarantine, and .* cannot be written: File exi"):
        next(passing)
    assert next(passing)[1].tolist() == list(range(16, 24))


def test_quarantine_is_bounded_and_states_with_more_are_refused(
    loaders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "MAX_QUARANTINED", 3)
    dataset = datasets.Spoiled(40, set(range(0, 40, 8)), tmp_path / "log")
    loader = loaders(dataset, on_error="quarantine", max_attempts=1)
    with pytest.raises(PipelineError, match="4 samples of the dataset are broken, more than the 3 that can be in"):
        list(loader)
    state = loader.state_dict()
    assert state["quarantined"] == [0, 8, 16]
    for damaged in ([1, 2, 3, 4], [-1], ["a"], "abc"):
        with pytest.raises(StateError, match="no list of at most 3 quarantined"):
            loader.load_state_dict(state | {"quarantined": damaged})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_error": "ignore"}, "on_error='ignore': must be"),
        ({"max_attempts": 0}, "max_attempts=0: must be"),
        ({"sample_timeout_s": 0}, "sample_timeout_s=0: must be"),
        ({"quarantine_dir": "/tmp"}, "goes with on_error='quarantine'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_policies_are_checked_when_the_loader_is_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionsError, match=says):
        DataLoader(datasets.Augmented(4), **options)


# --- processes that hang and die ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [pytest.param("sleeps", marks=pytest.mark.slow), "holds the GIL"])
def test_a_hung_transform_is_raised_with_its_stack_and_its_process_replaced(
    service: Any, loaders: Any, how: str
) -> None:
    service.start_workers()
    loader = loaders(datasets.Hanging(24, 11, how), service=service.name, sample_timeout_s=2, max_attempts=2)
    passing = iter(loader)
    assert next(passing)[1].tolist() == list(range(8))
    with pytest.raises(DataWorkerDied, match=r"hung: .*sample_timeout_s=2, at sample 11 of step 1") as raised:
        next(passing)
    assert "in hang_for_ever" in str(raised.value), "the stack is in the trainer's exception"
    assert next(passing)[1].tolist() == list(range(16, 24)), "the process was replaced"
    assert "in hang_for_ever" in service.log("worker")
    log = service.log("dispatcher")
    assert log.count("sample=11 failed on") == 2
    assert "in the place of a process that hung" in log


@pytest.mark.shows("what cannot be pickled is named; remote exceptions keep type and traceback")
@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("exit", RemoteError, r"builtins\.SystemExit: 3\b"),
        ("interrupt", RemoteError, "builtins.KeyboardInterrupt: "),
        ("cancelled", RemoteError, "CancelledError: by a library"),
        ("no text", datasets.NoText, None),
        ("no UTF-8", ValueError, r"file \\udc80\.jpg is bad"),
        ("long", ValueError, "characters left out"),
    ],
)
def test_whatever_user_code_raises_reaches_its_trainer_and_costs_no_data_worker(
    three: Any, loaders: Any, how: str, kind: type[Exception], says: str | None
) -> None:
    before = three.log("dispatcher").count("lost")
    loader = loaders(datasets.Surprising(24, 11, how), service=three.name, batch_size=4, job_name=how)
    passing = iter(loader)
    assert [next(passing)[1].tolist()[0] for _ in range(2)] == [0, 4]
    with pytest.raises(kind) as caught:
        next(passing)
    assert kind is not RemoteError or isinstance(caught.value, RuntimeError)  # what programs for torch catch
    if says is not None:
        assert re.search(says, str(caught.value))
        assert "), sample 11" in str(caught.value)
        assert len(str(caught.value)) < 200_000
    assert [ids.tolist()[0] for _, ids in passing] == [12, 16, 20]
    assert loader.stats()["local_steps"] == 0
    assert three.log("dispatcher").count("lost") == before


def test_a_stream_that_raises_what_ends_programs_is_told_and_costs_no_data_worker(three: Any, loaders: Any) -> None:
    before = three.log("dispatcher").count("lost")
    loader = loaders(datasets.SurprisingElements(), service=three.name, batch_size=4, sharding="off", job_name="odd")
    with pytest.raises(RemoteError, match="SystemExit"):
        list(loader)
    assert three.log("dispatcher").count("lost") == before


@pytest.mark.parametrize("num_bytes", [10, 2 << 20], ids=["small", "one copy for all"])
def test_a_module_that_ends_the_program_when_it_is_imported_is_told_and_costs_no_data_worker(
    three: Any, loaders: Any, num_bytes: int
) -> None:
    with pytest.raises(PipelineError, match="cannot be rebuilt in a data worker: SystemExit: 2"):
        next(iter(loaders(datasets.ExitsElsewhere(num_bytes), service=three.name, job_name=f"exits-{num_bytes}")))
    batches = loaders(datasets.Augmented(24), service=three.name, job_name=f"after-{num_bytes}")
    assert [ids.tolist()[0] for _, ids in batches] == [0, 8, 16]
    assert batches.stats()["local_steps"] == 0


@pytest.mark.shows("a killed process makes nobody hang, and its end is reported in words")
@pytest.mark.parametrize("how", ["segfault", "7", "0", "1", str(FRESH_PROCESS)])
def test_a_sample_that_ends_its_process_is_left_out_and_nothing_else(service: Any, loaders: Any, how: str) -> None:
    service.start_workers(2)
    loader = loaders(datasets.Deadly(80, {11, 12, 50}, how), service=service.name, on_error="skip", max_attempts=2)
    assert [i for ids in ids_of(loader) for i in ids] == [i for i in range(80) if i not in (11, 12, 50)]
    assert [one.sample_index for one in loader.skipped_samples] == [11, 12, 50]
    word = "was killed by signal 11 (SIGSEGV)" if how == "segfault" else f"ended with code {how}"
    assert word in loader.skipped_samples[0].error
    assert word in service.log("dispatcher")
    assert loader.stats()["local_steps"] == 0
    assert service.workers[0].poll() is None


def test_a_sample_that_holds_the_gil_for_long_costs_nobody_a_data_worker(service: Any, loaders: Any) -> None:
    service.start_workers(1)
    loader = loaders(datasets.HoldsTheGil(24, 11, 6), service=service.name)
    assert ids_of(loader) == ids_of(loaders(datasets.Augmented(24)))
    assert loader.stats()["local_steps"] == 0
    assert "lost" not in service.log("dispatcher")


@pytest.mark.parametrize("how", ["hung", "killed"])
def test_what_a_sample_has_started_ends_with_its_process(
    service: Any, loaders: Any, tmp_path: Path, wait_until: Any, how: str
) -> None:
    service.start_workers()
    note = tmp_path / "child"
    loader = loaders(datasets.LeavesAChild(16, note, how), service=service.name, sample_timeout_s=1.0)
    assert [i for ids in ids_of(loader) for i in ids] == list(range(16))
    stat = Path(f"/proc/{note.read_text()}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().split()[2] == "Z", 10, "the end of what it had started")


def test_a_process_that_dies_again_and_again_is_raised_in_the_trainer(service: Any, loaders: Any) -> None:
    service.start_workers()
    passing = iter(loaders(datasets.Deadly(24, {3}, "7"), service=service.name))
    with pytest.raises(DataWorkerDied, match="ended with code 7, at sample 3 of step 0"):
        next(passing)
    assert len(list(passing)) == 2
    assert service.log("dispatcher").count("in the place of a process that ended with code 7") == 3


def test_a_late_report_of_a_death_does_not_count_against_a_step_that_was_changed() -> None:
    service = Simulated(ErrorPolicy("skip", max_attempts=1), workers=1)
    token = next(one for one, lease in service.state.tables.leases.items() if lease.first == 0)
    service.fail(0, bad(0))
    renewed = service.leases["w0"][-1]
    assert [failure.sample_index for failure in renewed.left_out[0]] == [0]
    fate = Fate("ended with code 7", "s", token, 0, bad(0))
    service.send("w9", RegisterWorker("host", 9, "w8", [], fate))
    assert [failure.sample_index for failure in service.leases["w0"][-1].left_out.get(0, [])] in ([], [0])
    assert service.state.tables.sessions["s"].failures[0].attempts == 0
    assert renewed.token in service.state.tables.leases, "nor is the lease taken back"


def lost(service: Simulated, worker: str) -> None:
    """A data worker's connection closes: nobody says what it was at."""
    for instruction in service.state.peer_gone(worker, service.now):
        message = getattr(instruction, "message", None)
        if isinstance(message, GrantLease):
            service.leases.setdefault(instruction.peer, []).append(message)
        elif isinstance(message, BatchFailed):
            service.failed.append(message)
    service.state.validate()


def holder_of(service: Simulated, step: int) -> str:
    leases = service.state.tables.leases.values()
    return next((lease.worker for lease in leases if lease.first <= step < lease.stop), "")


def test_a_step_that_ends_data_worker_after_data_worker_is_given_up_and_its_neighbours_are_not() -> None:
    service = Simulated(ErrorPolicy(max_attempts=2), workers=2, steps=8)
    session, tables = service.state.tables.sessions["s"], service.state.tables
    number_lost, made = 0, set[int]()
    while not service.failed:
        dying = holder_of(service, 3)
        assert dying, "it is leased again"
        number_lost += 1
        # The control group takes all with it: each other step that is being made is lost, too.
        for worker in [dying, *sorted({lease.worker for lease in tables.leases.values()} - {dying})]:
            lost(service, worker)
        assert number_lost <= 4, "two losses, and as many attempts by itself"
        service.now += 3.0  # and no supervisor says a word
        for number in range(2):
            service.send(f"w{number_lost}-{number}", RegisterWorker("host", number, "", []))
        while not service.failed and not holder_of(service, 3):  # the others are made meanwhile
            token, lease = next(iter(tables.leases.items()))
            service.send(lease.worker, FinishLease(token, 0.001, {}))
            made.update(range(lease.first, lease.stop))
            service.send(LOADER, ReportProgress("s", 0, as_ranges(sorted(made)), 8, LoaderStats()))
    assert number_lost == 4
    (failed,) = service.failed
    assert failed.step == 3
    assert failed.failure.error_type[1] == "DataWorkerDied"
    assert "was lost while it made step 3" in failed.failure.text
    assert set(session.lost) == {3}


def test_a_loss_that_a_supervisor_explains_is_no_loss_of_other_steps() -> None:
    service = Simulated(ErrorPolicy("skip", max_attempts=2), workers=1, steps=8)
    session = service.state.tables.sessions["s"]
    for number in range(1, 4):
        leases = service.state.tables.leases.items()
        token = next((token for token, lease in leases if lease.first <= 3 < lease.stop), 0)
        lost(service, f"w{number - 1}")
        assert session.losses
        fate = Fate("ended with code 7", "s", token, 3, bad(3))
        service.send(f"w{number}", RegisterWorker("host", number, f"w{number - 1}", [], fate))
        assert not any(session.losses.values())
        assert not session.unexplained
    assert [failure.sample_index for failure in session.failures[3].left_out] == [3]


def test_the_loader_is_told_which_steps_a_lost_data_worker_held() -> None:
    service = Simulated(ErrorPolicy(), workers=2, steps=8)
    held = [step for lease in service.state.tables.leases.values() for step in range(lease.first, lease.stop)]
    told: list[int] = []
    for worker in ("w0", "w1"):
        for instruction in service.state.peer_gone(worker, 1.0):
            if isinstance(message := getattr(instruction, "message", None), LeaseRevoked):
                told += [step for first, stop in message.suspects for step in range(first, stop)]
    assert sorted({*told}) == sorted(held)
    service.state.validate()


@pytest.mark.shows("a killed process makes nobody hang, and its end is reported in words")
def test_how_processes_end_in_words(tmp_path: Path) -> None:
    assert process.how_it_ended(7, True) == "ended with code 7"
    assert process.how_it_ended(-9, False) == "was killed by signal 9 (SIGKILL)"
    assert process.how_it_ended(-9, True) == "was killed by the kernel: out of memory"
    assert process.fate_of("ended with code 7", None, "", "h", 1).failure is None
    cases = [("3:cpu:/job\n0::/job\n", "job/memory.events"), ("4:memory:/job\n", "memory/job/memory.oom_control")]
    for groups, file in cases:
        (tmp_path / "groups").write_text(groups)
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("low 0\noom_kill 3\noom_group_kill 0\n")
        assert process.count_oom_kills(tmp_path / "groups", tmp_path) == 3
    assert process.count_oom_kills(tmp_path / "none", tmp_path) == 0


class MemoryGroup:
    """A memory cgroup of the test's own, version 2 or 1, in which the kernel really kills."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.is_v2 = (directory / "memory.max").exists()

    def leave(self, num_bytes: int) -> None:
        """Let the processes in it have so many bytes more than they use now."""
        used = self.directory / ("memory.current" if self.is_v2 else "memory.usage_in_bytes")
        limit = self.directory / ("memory.max" if self.is_v2 else "memory.limit_in_bytes")
        limit.write_text(str(int(used.read_text()) + num_bytes))

    def is_empty(self) -> bool:
        return not (self.directory / "cgroup.procs").read_text()


@pytest.fixture
def memory_group(wait_until: Any) -> Iterator[MemoryGroup]:
    """A cgroup below the root of the memory controller, where the machine lets us make one."""
    root = Path("/sys/fs/cgroup")
    unified = (root / "cgroup.subtree_control").exists()
    if unified and "memory" not in (root / "cgroup.subtree_control").read_text().split():
        pytest.skip("the memory controller is not enabled below the root of cgroup version 2")
    directory = (root if unified else root / "memory") / f"hetstream-test-{os.getpid()}"
    try:
        directory.mkdir()
        (directory / ("memory.swap.max" if unified else "memory.swappiness")).write_text("0")
    except OSError as error:
        with contextlib.suppress(OSError):
            directory.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    group = MemoryGroup(directory)
    yield group
    wait_until(group.is_empty, 30, "the end of the processes in the cgroup")
    directory.rmdir()


@pytest.mark.shows("a killed process makes nobody hang, and its end is reported in words")
@pytest.mark.shows("the kernel ends the process that runs user code before its parent")
def test_a_process_that_the_kernel_kills_for_memory_is_told_as_such(
    memory_group: MemoryGroup, service: Any, loaders: Any, wait_until: Any
) -> None:
    wait_until(service.address_file.exists, 30, "the dispatcher")
    with (service.directory / "worker.log").open("ab") as log:
        words = [sys.executable, "-c", IN_GROUP, str(memory_group.directory), "--service", service.name]
        service.workers.append(subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
    wait_until(lambda: "registered" in service.log("dispatcher"), 60, "the data worker")
    loader = loaders(datasets.Greedy(80, 11), service=service.name, max_attempts=2, on_error="skip")
    passing = iter(loader)
    seen = next(passing)[1].tolist()
    memory_group.leave(200 << 20)
    seen += [index for _, ids in passing for index in ids.tolist()]
    assert seen == [index for index in range(80) if index != 11]
    (left_out,) = loader.skipped_samples
    assert "was killed by the kernel: out of memory, at sample 11 of step 1" in left_out.error
    told = "in the place of a process that was killed by the kernel: out of memory"
    assert service.log("dispatcher").count(told) == 2
    assert loader.stats()["local_steps"] == 0
    # A kill that is not the kernel's is not taken for one, although the counter has counted.
    pid = int((Path(f"/proc/{service.workers[0].pid}/task/{service.workers[0].pid}/children")).read_text())
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "was killed by signal 9 (SIGKILL)" in service.log("worker"), 30, "its report")


@pytest.mark.shows("the kernel ends the process that runs user code before its parent")
def test_a_sample_that_takes_all_memory_does_not_end_the_trainer_beside_it(
    memory_group: MemoryGroup, tmp_path: Path
) -> None:
    program = Path(__file__).parent / "programs" / "oom_trainer.py"
    run = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "run", "--data-workers", "1", "--"]
    command = [*run, sys.executable, str(program), str(memory_group.directory)]
    enter = f'echo $$ > {memory_group.directory}/cgroup.procs && exec "$@"'
    words = ["sh", "-c", enter, "sh", *command]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    expected = "40 samples, then: Caught MemoryError in DataLoader worker process 0."
    assert done.stdout.startswith(expected), done.stdout + done.stderr


# Begins in the cgroup, so that all that it uses is counted there.
IN_GROUP = """
import os, sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
from hetstream.slurm_plugin.cli import main
sys.exit(main(["internal", "worker", *sys.argv[2:]]))
"""
