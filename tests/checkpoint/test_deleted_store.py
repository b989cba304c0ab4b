"""Somebody deletes a store below its living trainer, as systemd-logind does at a logout: training goes on."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetstream import FlashCheckpointer
from hetstream.checkpoint.errors import SharedMemoryFull
from hetstream.checkpoint.flash import saving
from hetstream.checkpoint.memory import store as store_module
from hetstream.checkpoint.memory.segment import join_metadata
from hetstream.checkpoint.memory.store import Store, WakePipe
from hetstream.checkpoint.memory.store_files import StoreFiles, StoreIdentity
from hetstream.checkpoint.memory.view import StoreView, find_stores
from hetstream.checkpoint.record.layout import Generation
from tests.checkpoint.programs.store_reader import newest_unpersisted
from tests.checkpoint.programs.store_trainer import check, payload_of, save
from tests.checkpoint.test_replica_restore import Job, job
from tests.checkpoint.test_store import identity, shared_memory, steps, store
from tests.checkpoint.test_writer import Bench, bench
from tests.checkpoint.trainers import SIGKILL, Trainers

__all__ = ["bench", "identity", "job", "shared_memory", "store"]
SIZE = 80_000
WaitUntil = Callable[..., None]
SAID = "somebody has deleted this checkpoint store"


def delete(path: Path, names: str = "*") -> None:
    """As logind does it: file by file, then the directory; again, where a process has made a file meanwhile."""
    for _ in range(100):
        for found in path.glob(names):
            found.unlink(missing_ok=True)
        if names != "*":
            return
        try:
            return path.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
    pytest.fail(f"{path} is never empty")


# The store


@pytest.mark.parametrize("names", ["*", "slot-*", "trainer.lock", "wake"])
def test_a_store_whose_files_are_deleted_is_made_anew_by_the_next_save(
    store: Store,
    caplog: pytest.LogCaptureFixture,
    names: str,
) -> None:
    save(store, 1, SIZE)
    for step in (2, 3):
        before = store.path
        delete(before, names)
        save(store, step, SIZE)
        assert store.path != before
        assert not before.exists()
        assert steps(store) == [step, step - 1]
        with StoreView(store.path) as view, newest_unpersisted(view) as segment:
            assert segment is not None
            assert check(segment) == step
    # Once, with the cause and what can be done.
    assert caplog.text.count(SAID) == 1
    assert "RemoveIPC" in caplog.text
    assert "loginctl enable-linger" in caplog.text


def test_a_store_that_is_deleted_during_the_copy_holds_what_was_copied(store: Store) -> None:
    save(store, 1, SIZE)
    payload = payload_of(2, SIZE)
    metadata = join_metadata(b"layout", b"step 2 " * 2)
    with store.begin(SIZE, len(metadata)) as slot:
        slot.payload[: SIZE // 2] = payload[: SIZE // 2]
        delete(store.path)
        slot.payload[SIZE // 2 :] = payload[SIZE // 2 :]
        slot.publish(Generation(1, 2), metadata, "0" * 32)
    with StoreView(store.path) as view, newest_unpersisted(view) as segment:
        assert segment is not None
        assert check(segment) == 2
    save(store, 3, SIZE)
    assert steps(store) == [3, 2]


def test_a_save_that_is_given_up_after_the_deletion_leaves_the_one_before(store: Store) -> None:
    save(store, 1, SIZE)
    with store.begin(SIZE, 10):
        delete(store.path)
    assert store.renew_if_deleted()
    assert not store.renew_if_deleted()
    assert steps(store) == [1]


def test_a_store_that_cannot_be_made_anew_is_said_and_tried_again(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> Any:
        raise SharedMemoryFull("there is no room")

    save(store, 1, SIZE)
    delete(store.path)
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "make_store", full)
        assert not store.renew_if_deleted()
        assert not store.renew_if_deleted()
        with pytest.raises(SharedMemoryFull):
            save(store, 2, SIZE)
    assert caplog.text.count("cannot be made anew") == 1
    save(store, 3, SIZE)
    assert steps(store) == [3, 1]


def test_a_store_that_is_deleted_while_it_is_adopted_is_made_anew(
    identity: StoreIdentity,
    shared_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store.open(identity, shared_memory=shared_memory)
    save(store, 1, SIZE)
    store.close(keep=True)
    wake_pipe = store_module.WakePipe
    deleted: list[Path] = []

    def delete_first(files: StoreFiles) -> WakePipe:
        if not deleted:
            deleted.append(files.path)
            delete(files.path)
        return wake_pipe(files)

    monkeypatch.setattr(store_module, "WakePipe", delete_first)
    with Store.open(identity, shared_memory=shared_memory) as store:
        assert deleted == [Path(deleted[0])] != [store.path]
        assert steps(store) == []
        save(store, 2, SIZE)
        assert steps(store) == [2]


@pytest.mark.parametrize("point", ["store.closing", "store.closed"])
def test_a_store_that_is_deleted_while_it_is_closed_is_said_and_no_error_of_the_program(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, point: str
) -> None:
    save(store, 1, SIZE)
    path = store.path
    monkeypatch.setattr(store_module, "reach", lambda reached: delete(path) if reached == point else None)
    store.close()
    assert not path.exists()
    assert ("What was not on disk by then is lost" in caplog.text) == (point == "store.closing")


# A program


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value), "n": int(value)}


def saved_on_disk(made: Callable[..., FlashCheckpointer]) -> int:
    with made() as checkpointer:
        state = state_of(0)
        step = checkpointer.restore(state)
        assert step == state["n"] == float(state["w"][-1])
        return step


def test_training_goes_on_and_all_gets_to_disk(make: Any, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make() as checkpointer:
        for step in range(1, 5):
            assert checkpointer.save(step, state_of(step))
            assert checkpointer.wait(60)
            delete(checkpointer._storage.store.path)
        assert checkpointer.load().sources == ("memory",)
    assert caplog.text.count(SAID) == 1
    assert "is lost" not in caplog.text
    assert find_stores([memory]) == []
    assert saved_on_disk(make) == 4


@pytest.mark.parametrize("then", ["should_save", "wait", "close"])
def test_what_no_writer_had_written_when_the_store_was_deleted_gets_to_disk(make: Any, memory: Path, then: str) -> None:
    with make() as checkpointer:
        assert checkpointer.save(1, state_of(1))
        assert checkpointer.wait(60)
        writer = checkpointer._storage.writer.process.pid
        os.kill(writer, signal.SIGSTOP)
        assert checkpointer.save(2, state_of(2))
        delete(checkpointer._storage.store.path)
        os.kill(writer, signal.SIGCONT)
        if then == "should_save":
            checkpointer.should_save(3)
            assert [one.generations[0].step for one in find_stores([memory])] == [2]
        if then == "wait":
            assert checkpointer.wait(60)
            assert checkpointer.stats().persisted.step == 2
    assert find_stores([memory]) == []
    assert saved_on_disk(make) == 2


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_store_that_is_deleted_while_a_state_is_copied_holds_it(
    make: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with make() as checkpointer:
        assert checkpointer.save(1, state_of(1))
        with monkeypatch.context() as patched:
            patched.setattr(saving, "reach", lambda _point: delete(checkpointer._storage.store.path))
            assert getattr(checkpointer, how)(2, state_of(2))
            checkpointer.fence()
        assert checkpointer._storage.store.held()[0].header.generation.step == 2
        assert checkpointer.load().step == 2
        assert checkpointer.wait(60)
    assert saved_on_disk(make) == 2


@pytest.mark.parametrize("point", ["store.copied", "store.renewed"])
def test_a_trainer_that_is_killed_while_it_makes_the_store_anew_goes_on_from_the_disk(
    trainers: Trainers, point: str
) -> None:
    assert trainers.one("whole", "--steps", "10") == 0
    fault = f"{point}:1:kill:{trainers.path / 'marker'}"
    run = ("run", "--steps", "10", "--waits", "--delete-store-at", "7")
    assert trainers.one(*run, HETSTREAM_CKPT_FAULT=fault) == SIGKILL
    assert trainers.one(*run[:4]) == 0
    assert trainers.starts("run") == [0, 6]
    assert trainers.done("run") == trainers.done("whole")


# Other processes


def test_a_jobs_writer_lets_go_of_a_deleted_store_and_serves_the_new_one(bench: Bench) -> None:
    writer = bench.job_writer()
    trainer = bench.trainer()
    for step in (1, 2, 3):
        trainer.say(f"save {step}")
        bench.until_committed((1, step))
        [found] = find_stores([bench.path / "stores"])
        delete(found.path)
    trainer.end()
    writer.send_signal(signal.SIGTERM)
    assert writer.wait(60) == 0
    bench.check_whole((1, 3))
    assert find_stores([bench.path / "stores"]) == []


def test_peers_find_the_store_that_was_made_anew(job: Job) -> None:
    job.start((0, 1), with_replicas=True)
    job.say("train")
    assert job.say("replicated") == job.say("committed")
    for found in job.stores():
        shutil.rmtree(found.path)
    job.say("train")
    newest = job.say("replicated")
    job.say("committed")
    # What both hosts hold is whole: one is lost, and its rank goes on from the other's memory.
    job.lose(1)
    job.forget_on_disk(after=1)
    assert job.start((0, 1), with_replicas=True) == newest
    job.end()


def test_the_log_of_a_program_has_no_errors(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), make() as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.wait(60)
        delete(checkpointer._storage.store.path)
        checkpointer.save(2, state_of(2))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
