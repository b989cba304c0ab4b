"""Going back: by a step that is asked for, and by deleting a directory or its newest checkpoint, with memory newer."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetstream import CheckpointReader, FlashCheckpointer, Retention
from hetstream.base.errors import OptionsError
from hetstream.checkpoint.convert.dcp import Source, choose
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.errors import DamagedLineage, DirectoryReplaced, NoCheckpoint, SharedMemoryFull
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.view import find_stores, reason_to_keep, reason_to_remove
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Branch, Lineage, is_newest_removed
from hetstream.slurm_plugin.cli import main
from tests.checkpoint.parts import delete_in_use, write_checkpoint
from tests.checkpoint.test_writer import Bench, bench
from tests.checkpoint.trainers import SIGKILL, Trainers, wait_for_disk

__all__ = ["bench"]
WaitUntil = Callable[..., None]
ALL = Retention(keep_last=None)


def g(attempt: int, step: int) -> Generation:
    return Generation(attempt, step)


# The line, without a file


@pytest.mark.parametrize(
    ("branches", "on_line", "left"),
    [
        pytest.param([], [g(1, 5), g(2, 1)], [], id="nobody went back"),
        pytest.param([Branch(2, g(1, 10))], [g(1, 10), g(2, 11), g(3, 1)], [g(1, 20)], id="once"),
        pytest.param([Branch(2)], [g(2, 1)], [g(1, 1)], id="anew"),
        pytest.param(
            [Branch(3, g(2, 12)), Branch(2, g(1, 10))],
            [g(1, 10), g(2, 12), g(3, 13)],
            [g(1, 20), g(2, 14)],
            id="twice, one behind the other",
        ),
        pytest.param(
            [Branch(4, g(1, 20)), Branch(2, g(1, 10))],
            [g(1, 10), g(1, 20), g(4, 21)],
            [g(1, 30), g(2, 11), g(3, 15)],
            id="back to what was left behind",
        ),
        pytest.param(
            [Branch(6, g(2, 11)), Branch(4, g(1, 20)), Branch(2, g(1, 10))],
            [g(1, 10), g(2, 11), g(6, 12)],
            [g(1, 20), g(2, 12), g(4, 21)],
            id="and back again",
        ),
    ],
)
def test_the_line_leads_through_what_was_gone_back_to(
    branches: list[Branch], on_line: list[Generation], left: list[Generation]
) -> None:
    made = Lineage()
    for branch in reversed(branches):
        made = made.gone_back(branch.attempt, branch.start)
    assert made == Lineage("", tuple(branches))
    assert [one for one in (*on_line, *left) if made.holds(one)] == on_line
    assert made.newest([*on_line, *left]) == max(on_line)


def test_only_the_newest_checkpoint_of_the_line_is_missed() -> None:
    line = Lineage("", (Branch(2, g(1, 10)),))
    assert is_newest_removed(Lineage(), [g(1, 10)], [g(1, 20)])
    assert is_newest_removed(Lineage(), [], [g(1, 20)])
    assert not is_newest_removed(Lineage(), [g(1, 20), g(1, 30)], [g(1, 20), g(1, 10)])
    assert not is_newest_removed(line, [g(1, 10)], [g(1, 20)])
    assert is_newest_removed(line, [g(1, 10)], [g(1, 20), g(2, 11)])
    assert not is_newest_removed(Lineage(), [], [])


# Deleting, with trainers that were killed


@pytest.fixture(scope="module")
def undisturbed(zygote: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Trainers:
    trainers = Trainers(zygote, tmp_path_factory.mktemp("undisturbed"), Path("/dev/shm"))
    assert trainers.one("run", "--steps", "10") == 0
    return trainers


def test_a_deleted_directory_begins_anew_though_memory_is_newer(
    trainers: Trainers, undisturbed: Trainers, wait_until: WaitUntil
) -> None:
    assert trainers.one("run", "--kill-at", "7", "--waits") == SIGKILL
    wait_for_disk(trainers, wait_until)
    shutil.rmtree(trainers.path / "run")
    assert trainers.one("run", "--steps", "10") == 0
    assert trainers.starts("run") == [0, 0]
    assert trainers.done("run") == undisturbed.done("run")
    assert find_stores([trainers.memory]) == []
    # Later than all that was in memory.
    assert (trainers.path / "run" / "latest").readlink() == Path("step-0000000010.2")


@pytest.mark.parametrize(("emptied", "start"), [("step-0000000006.1", 4), ("step-*", 0), ("*", 0)])
def test_the_newest_checkpoint_deleted_goes_back_to_the_one_before(
    trainers: Trainers, undisturbed: Trainers, wait_until: WaitUntil, emptied: str, start: int
) -> None:
    assert trainers.one("run", "--kill-at", "7", "--waits") == SIGKILL
    wait_for_disk(trainers, wait_until)
    assert [found.generations[0] for found in find_stores([trainers.memory])] == [g(1, 6)]
    for path in (trainers.path / "run").glob(emptied):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            shutil.rmtree(path)
        elif not path.name.startswith("."):  # as a shell's * has it
            path.unlink()
    assert trainers.one("run", "--kill-at", f"{start + 1}") == SIGKILL  # before it has saved
    assert trainers.one("run", "--steps", "10") == 0
    assert trainers.starts("run") == [0, start, start]
    assert trainers.done("run") == undisturbed.done("run")


def test_ranks_of_which_one_alone_lost_its_memory_go_back_together(trainers: Trainers, wait_until: WaitUntil) -> None:
    assert trainers.group("run", 2, "--kill-at", "7", "--waits") == [SIGKILL, SIGKILL]
    wait_for_disk(trainers, wait_until)
    for found in find_stores([trainers.memory]):
        if found.holder.rank == 0:
            shutil.rmtree(found.path)
    shutil.rmtree(trainers.path / "run" / "step-0000000006.1")
    assert trainers.group("run", 2, "--steps", "8") == [0, 0]
    assert [trainers.starts("run", rank) for rank in range(2)] == [[0, 4], [0, 4]]
    assert trainers.done("run", 0)["step"] == 8


@pytest.mark.parametrize("is_trained", [False, True], ids=["a backup", "a copy that was trained on"])
def test_memory_is_not_used_for_a_copy_from_before_in_its_directorys_place(
    make: Callable[..., FlashCheckpointer],
    tmp_path: Path,
    memory: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_trained: bool,
) -> None:
    path, copy = tmp_path / "ckpt", tmp_path / "copy"
    state = {"weight": torch.full((4,), 10.0)}
    with make() as first:
        first.save(10, state)
    shutil.copytree(path, copy, symlinks=True)
    if is_trained:
        branch = CheckpointDirectory(copy)
        assert branch.acquire(JobIdentity.of_this_process("local")) == 2
        write_checkpoint(copy, g(2, 15), start_id=branch.lineage().start_id)
        branch.release()
    monkeypatch.setenv("HETSTREAM_CKPT_WRITER", "1")  # of the job: there is none, and memory gets ahead of the disk
    second = make()
    assert second.restore(state) == 10
    second.save(20, {"weight": torch.full((4,), 20.0)})
    second.close(keep_memory=True)
    monkeypatch.delenv("HETSTREAM_CKPT_WRITER")
    shutil.rmtree(path)
    copy.rename(path)
    assert [found.is_orphaned for found in find_stores([memory])] == [True]
    with make() as third:
        assert third.all_steps() == ([10, 15] if is_trained else [10])
        assert "a copy from before has taken its place" in caplog.text
        if not is_trained:
            assert third.restore(state) == 10
            assert state["weight"].tolist() == [10.0] * 4
        third.save(30, state)
    caplog.clear()


def test_a_writer_of_the_training_before_writes_nothing_into_a_copy_from_before(tmp_path: Path) -> None:
    path, copy = tmp_path / "ckpt", tmp_path / "copy"
    for is_copied in (False, True):
        start = CheckpointDirectory(path)
        start.acquire(JobIdentity.of_this_process("1"))
        start_id = start.lineage().start_id
        start.release()
        write_checkpoint(path, g(1, 6 + is_copied), start_id=start_id)
        if not is_copied:
            shutil.copytree(path, copy, symlinks=True)
    shutil.rmtree(path)
    copy.rename(path)
    with pytest.raises(DirectoryReplaced, match="a copy from before"):
        write_checkpoint(path, g(1, 8), start_id=start_id)


def test_a_writer_of_the_training_before_writes_nothing_into_a_new_directory(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    first = CheckpointDirectory(path)
    first.acquire(JobIdentity.of_this_process("1"))
    before = first.lineage().start_id
    first.release()
    assert CheckpointDirectory(path).lineage().start_id == before != ""
    write_checkpoint(path, g(1, 5), start_id=before)
    shutil.rmtree(path)
    path.mkdir(mode=0o700)
    with pytest.raises(DirectoryReplaced, match="not the directory that this training began in"):
        write_checkpoint(path, g(1, 6), start_id=before)
    second = CheckpointDirectory(path)
    second.acquire(JobIdentity.of_this_process("1"))
    second.release()
    assert second.lineage().start_id not in ("", before)
    with pytest.raises(DirectoryReplaced):
        write_checkpoint(path, g(1, 6), start_id=before)
    assert not list(path.glob("step-*"))


def test_a_stopped_writer_of_the_training_before_wakes_up_beside_a_new_directory(bench: Bench) -> None:
    def start() -> None:
        directory = CheckpointDirectory(bench.directory)
        directory.acquire(JobIdentity.of_this_process("77"))
        directory.release()

    start()
    trainer = bench.trainer()
    trainer.say("save 10")
    writer = bench.writer(trainer.store, "writer.chosen", action="stop")
    bench.until((bench.path / "marker-0").exists, "a stopped checkpoint writer")
    trainer.kill()
    delete_in_use(bench.directory)
    start()
    os.kill(writer.pid, signal.SIGCONT)
    assert writer.wait(60) == 0
    assert "is not the directory that this training began in" in bench.said()
    assert not list(bench.directory.glob("step-*"))


def test_a_writer_does_not_write_again_what_somebody_deleted(bench: Bench) -> None:
    writer = bench.job_writer()
    trainer = bench.trainer()
    trainer.say("save 10")
    bench.until(
        lambda: bench.status(trainer.store).persisted == g(1, 10), "a checkpoint writer that has seen the commit"
    )
    trainer.kill()
    delete_in_use(bench.directory / "step-0000000010.1")
    writer.send_signal(signal.SIGTERM)
    assert writer.wait(60) == 0
    assert not list(bench.directory.glob("step-*"))


def test_a_directory_that_is_deleted_while_a_program_trains_is_said_and_awaited_in_vain(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make() as checkpointer:
        save_steps(checkpointer, 1)
        delete_in_use(tmp_path / "ckpt")
        assert checkpointer.save(2, state_of(2))
        assert not checkpointer.wait(60)
        directory = CheckpointDirectory(tmp_path / "ckpt")
        directory.acquire(JobIdentity.of_this_process("1"))
        directory.release()
        assert checkpointer.save(3, state_of(3))
        assert "do not get to disk" in caplog.text
    assert not list((tmp_path / "ckpt").glob("step-*"))
    with make() as checkpointer:
        assert checkpointer.restore(state_of(0)) is None


def test_a_training_whose_directory_was_replaced_neither_reads_the_new_one_nor_writes_into_it(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ckpt"
    state = state_of(1)
    with make() as checkpointer:
        save_steps(checkpointer, 1)
        path.rename(tmp_path / "moved away")
        other = CheckpointDirectory(path)
        other.acquire(JobIdentity.of_this_process("2"))
        write_checkpoint(path, g(1, 50), start_id=other.lineage().start_id)
        for ask in (checkpointer.all_steps, checkpointer.load, lambda: checkpointer.restore(state)):
            with pytest.raises(DirectoryReplaced, match="not the directory that this training began in"):
                ask()
        before = {name: (path / name).read_bytes() for name in ("owner.json", "history.jsonl", ".lineage.json")}
    assert "the end of attempt 1 could not be written down" in caplog.text
    assert {name: (path / name).read_bytes() for name in before} == before
    assert value_of(state) == (1.0, 1)
    other.release()


def test_an_attempt_is_above_all_that_memory_holds_though_the_directory_has_forgotten_it(
    make: Any, tmp_path: Path
) -> None:
    for _ in range(3):
        with make(keep=ALL) as checkpointer:
            checkpointer.save(9, {"w": torch.ones(1)})
            checkpointer.close(keep_memory=True)
    backup = tmp_path / "ckpt"
    owner = backup / "owner.json"
    owner.write_text(owner.read_text().replace('"attempt":3', '"attempt":1'))
    (backup / "history.jsonl").unlink()
    for path in backup.glob("step-*.[23]"):
        shutil.rmtree(path)
    with make() as checkpointer:
        state = {"w": torch.zeros(1)}
        assert checkpointer.restore(state) == 9  # that of attempt 1, as the newer ones are gone
        assert checkpointer.save(10, state)
        assert checkpointer.stats().saved == g(4, 10)


# restore(step=), all_steps()


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((100,), value), "n": int(value)}


def value_of(state: dict[str, Any]) -> tuple[float, int]:
    return float(state["w"][0]), state["n"]


def save_steps(checkpointer: FlashCheckpointer, *steps: int) -> None:
    for step in steps:
        assert checkpointer.save(step, state_of(step))
        assert checkpointer.wait(60)


def test_a_step_that_is_saved_again_after_one_that_was_refused_gets_to_disk(make: Any) -> None:
    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 5, 6)
        for refused in (3, 1 << 64, -1):
            with pytest.raises(OptionsError):
                checkpointer.save(refused, state_of(0))
        assert checkpointer.save(6, state_of(60))
        assert checkpointer.wait(60)
        checkpointer.restore(state_of(0), step=5)
        state = state_of(0)
        assert checkpointer.restore(state, step=6) == 6
        assert value_of(state) == (60.0, 60)


def test_steps_that_are_made_once_more_after_a_save_that_failed_are_saved(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise SharedMemoryFull("for the test")

    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 5)
        with monkeypatch.context() as patched:
            patched.setattr(Store, "begin", full)
            assert not checkpointer.save(8, state_of(8))
        state = state_of(0)
        assert checkpointer.restore(state) == 5
        save_steps(checkpointer, 6)
        assert checkpointer.restore(state) == 6
        assert checkpointer.all_steps() == [5, 6]
    caplog.clear()


def test_a_step_that_is_asked_for_is_restored_and_later_saves_come_behind_it(make: Any, tmp_path: Path) -> None:
    state = state_of(0)
    with make(keep=ALL) as checkpointer:
        assert checkpointer.all_steps() == []
        save_steps(checkpointer, 1, 2, 3, 4, 5)
        assert checkpointer.all_steps() == [1, 2, 3, 4, 5]
        assert checkpointer.restore(state, step=2) == 2
        assert value_of(state) == (2.0, 2)
        assert checkpointer.all_steps() == [1, 2]
        assert (tmp_path / "ckpt" / "latest").readlink() == Path("step-0000000002.1")
        save_steps(checkpointer, 3)
        assert checkpointer.stats().saved == g(2, 3)
        assert (tmp_path / "ckpt" / "latest").readlink() == Path("step-0000000003.2")
        assert checkpointer.all_steps() == [1, 2, 3]
        save_steps(checkpointer, 4)
    with make(keep=ALL) as checkpointer:
        assert checkpointer.restore(state) == 4
        assert checkpointer.load().attempt == 2
        assert checkpointer.all_steps() == [1, 2, 3, 4]
        # What was left behind can be had by its step, and training goes on from there.
        assert checkpointer.restore(state, step=5) == 5
        assert checkpointer.all_steps() == [1, 2, 3, 4, 5]
        assert checkpointer.load(step=4).attempt == 1
    with make(keep=ALL) as checkpointer:
        assert checkpointer.restore(state) == 5


def test_a_step_that_only_memory_has_is_restored_and_what_was_saved_after_it_never_gets_to_disk(
    make: Any, tmp_path: Path
) -> None:
    state = state_of(0)
    with make(num_slots=4) as checkpointer:
        save_steps(checkpointer, 1)
        os.kill(checkpointer._storage.writer.process.pid, signal.SIGSTOP)
        for step in (2, 3, 4):
            checkpointer.save(step, state_of(step))
        assert checkpointer.all_steps() == [1, 2, 3, 4]
        assert checkpointer.restore(state, step=3) == 3
        assert value_of(state) == (3.0, 3)
        assert checkpointer.all_steps() == [1, 2, 3]
        checkpointer.save(4, state_of(40))
        os.kill(checkpointer._storage.writer.process.pid, signal.SIGCONT)
        assert checkpointer.wait(60)
    with make() as checkpointer:
        assert checkpointer.restore(state) == 4
        assert value_of(state) == (40.0, 40)
    assert not (tmp_path / "ckpt" / "step-0000000004.1").exists()


def test_a_step_that_is_not_there_is_an_error_with_those_that_are(make: Any) -> None:
    with make(keep=ALL) as checkpointer:
        with pytest.raises(NoCheckpoint, match="no checkpoint of step 7 can be restored: there are none"):
            checkpointer.restore(state_of(0), step=7)
        save_steps(checkpointer, 1, 2, 3)
        checkpointer.restore(state_of(0), step=1)
        with pytest.raises(NoCheckpoint, match="step 7 can be restored: there are the steps 1; left behind: 2, 3"):
            checkpointer.load(step=7)
        for wrong in (-1, "2", 1.5):
            with pytest.raises(OptionsError, match="a number of steps"):
                checkpointer.restore(state_of(0), step=wrong)
        assert checkpointer.all_steps() == [1]


def test_a_damaged_step_that_is_asked_for_is_not_replaced_by_another(make: Any, tmp_path: Path) -> None:
    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 1, 2, 3)
    [file] = (tmp_path / "ckpt" / "step-0000000002.1").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with make(keep=ALL) as checkpointer:
        with pytest.raises(NoCheckpoint, match=r"step 2 can be restored: there are the steps 1, 3; .*damaged"):
            checkpointer.restore(state_of(0), step=2)
        assert checkpointer.restore(state_of(0)) == 3


def test_a_trainer_that_went_back_and_was_killed_stays_there(
    trainers: Trainers, undisturbed: Trainers, wait_until: WaitUntil
) -> None:
    assert trainers.one("run", "--kill-at", "7", "--waits") == SIGKILL
    # Killed when it is on disk that it went back, and step 6 is still in memory.
    fault = f"lineage.written:1:kill:{trainers.path / 'marker'}"
    assert trainers.one("run", "--from-step", "4", HETSTREAM_CKPT_FAULT=fault) == SIGKILL
    assert g(1, 6) in next(iter(find_stores([trainers.memory]))).generations
    assert trainers.one("run", "--kill-at", "5") == SIGKILL
    assert trainers.one("run", "--steps", "10") == 0
    assert trainers.starts("run") == [0, 4, 4]
    assert trainers.done("run") == undisturbed.done("run")


def test_two_ranks_go_back_to_one_step(trainers: Trainers, wait_until: WaitUntil) -> None:
    assert trainers.group("run", 2, "--kill-at", "9", "--waits") == [SIGKILL, SIGKILL]
    assert trainers.group("run", 2, "--from-step", "6", "--kill-at", "7", "--waits") == [SIGKILL, SIGKILL]
    assert trainers.group("run", 2, "--steps", "12") == [0, 0]
    assert [trainers.starts("run", rank) for rank in range(2)] == [[0, 6, 6], [0, 6, 6]]
    assert (trainers.path / "run" / "latest").readlink() == Path("step-0000000012.3")


def test_retention_counts_the_line_alone_and_what_was_left_behind_stays(make: Any, tmp_path: Path) -> None:
    with make(keep=Retention(keep_last=3)) as checkpointer:
        save_steps(checkpointer, 1, 2, 3)
        checkpointer.restore(state_of(0), step=1)
        save_steps(checkpointer, 2, 3, 4)
    names = {path.name for path in (tmp_path / "ckpt").glob("step-*")}
    left = {"step-0000000002.1", "step-0000000003.1"}
    assert names == {"step-0000000002.2", "step-0000000003.2", "step-0000000004.2", *left}
    directory = CheckpointDirectory(tmp_path / "ckpt")
    assert set(directory.left_behind()) == {g(1, 2), g(1, 3)}
    assert {one.directory_name for one in directory.remove_left_behind()} == left
    assert directory.left_behind() == {}


def test_what_was_left_behind_goes_only_when_the_line_has_something_newer(make: Any, tmp_path: Path) -> None:
    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 1, 2)
        checkpointer.restore(state_of(0), step=1)
    directory = CheckpointDirectory(tmp_path / "ckpt")
    assert directory.left_behind() == {}
    assert directory.remove_left_behind() == []


def test_the_log_says_what_somebody_deleted(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 1, 2)
        checkpointer.close(keep_memory=True)
    shutil.rmtree(tmp_path / "ckpt" / "step-0000000002.1")
    with caplog.at_level(logging.WARNING), make(keep=ALL) as checkpointer:
        assert checkpointer.all_steps() == [1]
    assert "step 2 of attempt 1 is not there any more: somebody has deleted it. Training goes back to step 1" in (
        caplog.text
    )


# A file that is not what was written


@pytest.mark.parametrize("content", ["", "{}x", '{"starts":7}', "[" * 100_000, " " * (2 << 20), None])
def test_a_damaged_lineage_is_an_error_and_no_other_history(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    """It says which checkpoints count: without it the newest may be one that was left behind."""
    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 1, 2, 3)
        checkpointer.restore(state_of(0), step=1)
    directory = tmp_path / "ckpt"
    file = directory / ".lineage.json"
    good = file.read_bytes()
    if content is None:
        file.unlink()
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_text(content)
    match = r"lineage\.json says where this training went back, .* cannot be used: .*remove it"
    for act in (make, CheckpointReader(directory).latest_step, CheckpointReader(directory).load):
        with pytest.raises(DamagedLineage, match=match):
            act()
    for words in ("ls", "gc"):
        assert main(["ckpt", words, str(directory)]) == 1
        said = capsys.readouterr().err
        assert ".lineage.json" in said
        assert said.count("\n") == 1
    assert content is None or file.read_text() == content
    assert sorted(one.name for one in directory.glob("step-*")) == [f"step-000000000{step}.1" for step in (1, 2, 3)]
    file.unlink()
    file.write_bytes(good)
    with make(keep=ALL) as checkpointer:
        assert checkpointer.all_steps() == [1]


def test_a_lineage_that_is_damaged_while_a_program_trains_is_said(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "ckpt" / ".lineage.json"
    with make() as checkpointer:
        save_steps(checkpointer, 1)
        good = file.read_bytes()
        file.write_text("what?")
        assert checkpointer.save(2, state_of(2))
        assert not checkpointer.wait(1)
        assert checkpointer.save(3, state_of(3))
        assert ".lineage.json says where this training went back" in caplog.text
        file.write_bytes(good)
    assert CheckpointDirectory(tmp_path / "ckpt").checkpoints()[0].generation == g(1, 3)


# The commands agree


def test_ls_and_gc_know_what_was_left_behind(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "ckpt")

    def said(*words: str) -> Any:
        assert main(["ckpt", *words]) == 0
        return capsys.readouterr().out

    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 1, 2, 3)
        checkpointer.restore(state_of(0), step=1)
        listed = json.loads(said("ls", "--json", path))
        assert listed["steps"] == checkpointer.all_steps() == [1]
        assert [one["state"] for one in listed["checkpoints"]] == ["left behind", "left behind", "committed"]
        assert listed["checkpoints"][0]["left_by"] == "attempt 2 went back to step 1"
        assert "committed, latest" in said("ls", path).splitlines()[4]
        save_steps(checkpointer, 2)
        assert json.loads(said("ls", "--json", path))["steps"] == [1, 2]
        assert "left behind: attempt 2 went back to step 1" in said("ls", path)
        found = json.loads(said("gc", "--dry-run", "--json", path))["found"]
        names = [os.path.basename(one["path"]) for one in found if one["action"] == "removed"]
        assert names == ["step-0000000003.1", "step-0000000002.1"]
        # A checkpoint of the same step that is on the line is meant.
        assert "step 2 of attempt 2" in str(choose(Source(tmp_path / "ckpt", "flash"), 2).generation)
        assert choose(Source(tmp_path / "ckpt", "flash"), None).generation == g(2, 2)
        assert choose(Source(tmp_path / "ckpt", "flash"), 3).generation == g(1, 3)
        said("gc", path)
    assert sorted(one.name for one in (tmp_path / "ckpt").glob("step-*")) == ["step-0000000001.1", "step-0000000002.2"]
    with make(keep=ALL) as checkpointer:
        assert checkpointer.restore(state_of(0)) == 2


def test_memory_of_a_deleted_directory_is_nobodys(
    make: Any, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make() as checkpointer:
        save_steps(checkpointer, 1)
        checkpointer.close(keep_memory=True)
    [found] = find_stores([memory])
    assert not found.is_orphaned
    shutil.rmtree(tmp_path / "ckpt")
    assert not find_stores([memory])[0].is_orphaned  # the disk may only be away
    directory = CheckpointDirectory(tmp_path / "ckpt")
    directory.acquire(JobIdentity.of_this_process("1"))
    directory.release()
    [found] = find_stores([memory])
    found = dataclasses.replace(found, persisted=None, writer_alive=False)
    assert found.is_orphaned
    assert reason_to_keep(found, {}, discard_unsaved=False) == ""
    assert "of a checkpoint directory that was deleted" in reason_to_remove(found)
