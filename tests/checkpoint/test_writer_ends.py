"""A writer starts, or is told to end, while its trainer saves, closes or dies: what is in memory gets to disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.flash import storage
from hetstream.checkpoint.flash.storage import WriterLink
from hetstream.checkpoint.memory.view import StoreView
from hetstream.checkpoint.persist.writer import spawn_writer
from tests.checkpoint.processes import end_process
from tests.checkpoint.test_writer import TIMEOUT_S, Bench, bench

__all__ = ["bench"]
WaitUntil = Callable[..., None]


def test_a_writer_that_is_told_to_end_while_it_starts_brings_to_disk_what_a_dead_trainer_left(bench: Bench) -> None:
    trainer = bench.trainer()
    trainer.say("save 10")
    writer = spawn_writer(trainer.store, bench.directory)
    bench.undo.callback(end_process, writer)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        writer.send_signal(number)
    trainer.kill()
    assert writer.wait(TIMEOUT_S) == 0
    bench.check_whole((1, 10))


def test_the_signals_of_a_trainer_are_its_own_again_when_its_writer_is_started(bench: Bench) -> None:
    trainer = bench.trainer()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    writer = spawn_writer(trainer.store, bench.directory)
    bench.undo.callback(end_process, writer)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("dies", [True, False], ids=["and dies", "and lives"])
def test_what_a_trainer_saves_while_its_writer_ends_gets_to_disk(bench: Bench, dies: bool) -> None:
    trainer = bench.trainer()
    writer = bench.writer(trainer.store, "ending.looked", action="stop")
    trainer.say("save 10")
    bench.until_committed((1, 10))
    writer.send_signal(signal.SIGTERM)
    bench.until((bench.path / "marker-0").exists, "the last look")
    trainer.say("save 20")
    assert StoreView(trainer.store).writer_alive(), "so the trainer relies on it"
    if dies:
        trainer.kill()
    writer.send_signal(signal.SIGCONT)
    assert writer.wait(TIMEOUT_S) == 0
    bench.check_whole((1, 20))
    assert "there was no time" not in bench.said()


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(step))}


def test_a_program_that_ends_just_after_its_writer_loses_nothing(
    make: Any, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = make()
    checkpointer.save(1, state_of(1))
    assert checkpointer.wait(TIMEOUT_S)
    writer = checkpointer._storage.writer.process
    writer.send_signal(signal.SIGSTOP)
    checkpointer.save(2, state_of(2))
    has_writer = WriterLink.has_writer

    def had_writer(link: WriterLink) -> bool:
        assert has_writer(link)
        writer.kill()
        writer.wait()
        return True

    monkeypatch.setattr(WriterLink, "has_writer", had_writer)
    checkpointer.close()
    assert CheckpointDirectory(checkpointer._storage.directory.path).checkpoints()[0].generation.step == 2
    assert os.listdir(memory) == []


def test_a_writer_that_dies_between_two_saves_is_replaced_before_the_next(make: Any, wait_until: WaitUntil) -> None:
    with make(interval=1000) as checkpointer:
        checkpointer.save(1, state_of(1))
        assert checkpointer.wait(TIMEOUT_S)
        writer = checkpointer._storage.writer.process
        writer.send_signal(signal.SIGSTOP)
        checkpointer.save(2, state_of(2))
        writer.kill()
        writer.wait()

        def trained_on() -> bool:
            assert not checkpointer.should_save(3)
            persisted = checkpointer.stats().persisted
            return persisted is not None and persisted.step == 2

        wait_until(trained_on, TIMEOUT_S, "the generation that the dead checkpoint writer had left")


class OfNobody:
    """A store that never has a checkpoint writer."""

    path = "store"

    def __init__(self) -> None:
        self.when_renewed: list[Any] = []

    @staticmethod
    def status() -> None:
        """Nobody has said anything."""

    @staticmethod
    def is_writer_alive() -> bool:
        return False


def test_writers_that_die_one_after_the_other_are_started_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, started = [1000.0], []

    def spawn(*_: Any) -> Any:
        started.append(clock[0] - 1000.0)
        return SimpleNamespace(poll=lambda: 1, returncode=1)

    monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(storage, "spawn_writer", spawn)
    link = WriterLink(OfNobody(), Path("ckpt"))  # type: ignore[arg-type]
    link.start(job_has_writer=False)
    while clock[0] < 1200.0:
        clock[0] += 1.0
        link.check(between_saves=True)
    assert started == [0, 2, 6, 14, 30, 62, 122, 182]
    link.check()
    assert started[-1] == 200, "a save has a checkpoint writer at once"
