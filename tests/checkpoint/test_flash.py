"""The checkpointer in one process: what it saves, what it gives back, what it refuses, and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetstream import Adaptive, Best, CheckpointOptions, Every, FlashCheckpointer, Retention
from hetstream.base.errors import OptionsError
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.errors import (
    CheckpointError,
    DirectoryInUse,
    DirectoryNotWritable,
    NoCheckpoint,
    StateMismatch,
    UnsupportedState,
)
from hetstream.checkpoint.flash import sources
from hetstream.checkpoint.flash.ranks import Alone
from hetstream.checkpoint.flash.saving import Copier
from hetstream.checkpoint.memory.segment import Segment
from hetstream.checkpoint.memory.view import StoreView, find_stores
from hetstream.checkpoint.record.layout import Generation
from tests.checkpoint.processes import PYTHON_PATH

ROOT = Path(__file__).resolve().parents[2]
WaitUntil = Callable[..., None]


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value), "epoch": int(value)}


def test_what_is_changed_after_a_save_does_not_change_what_was_saved(make: Any) -> None:
    state = state_of(1)
    with make() as checkpointer:
        assert checkpointer.restore(state) is None
        assert checkpointer.save(1, state)
        state["w"].zero_()
        state["epoch"] = 9
        assert checkpointer.restore(state) == 1
    assert state["w"].sum() == 1000
    assert state["epoch"] == 1


def test_a_new_start_takes_the_newest_from_disk_and_memory_is_empty(make: Any, memory: Path, tmp_path: Path) -> None:
    with make() as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step), metrics={"loss": 1 / step})
    assert find_stores([memory]) == []
    with make() as checkpointer:
        loaded = checkpointer.load()
        assert (loaded.step, loaded.attempt, loaded.sources, loaded.notes) == (3, 1, ("disk",), ())
        assert torch.equal(loaded.state["w"], state_of(3)["w"])
        assert [*loaded.state] == ["w", "epoch"]
    assert (tmp_path / "ckpt" / "latest").resolve().name == "step-0000000003.1"


def test_a_later_start_beats_a_higher_step(make: Any) -> None:
    with make() as checkpointer:
        checkpointer.save(100, state_of(100))
    with make() as checkpointer:
        checkpointer.save(60, state_of(60))
    with make() as checkpointer:
        assert checkpointer.load().step == 60


@pytest.mark.shows("a damaged or missing file: the checkpoint before is used, and a warning says why")
@pytest.mark.shows("a flipped bit is found, its tensors are named, and the checkpoint before is used")
def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_used(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make() as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
            assert checkpointer.wait(60)
    file = next((tmp_path / "ckpt" / "step-0000000002.1").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)
    with make() as checkpointer:
        state = state_of(0)
        assert checkpointer.restore(state) == 1
        assert state["w"].sum() == 1000
        loaded = checkpointer.load()
    assert "step 2 of attempt 1 on disk is not usable" in caplog.text
    assert "is damaged in 1 of 1 chunks" in caplog.text
    assert loaded.step == 1
    assert any("damaged" in note for note in loaded.notes)


@pytest.mark.shows("a damaged or missing file: the checkpoint before is used, and a warning says why")
@pytest.mark.shows("a flipped bit is found, its tensors are named, and the checkpoint before is used")
@pytest.mark.shows("a trainer that dies during the copy leaves no checkpoint without data")
def test_training_does_not_begin_anew_when_no_checkpoint_is_whole(make: Any, tmp_path: Path) -> None:
    with make() as checkpointer:
        checkpointer.save(1, state_of(1))
    for file in (tmp_path / "ckpt").glob("step-*/*.safetensors"):
        os.truncate(file, 100)
    with make() as checkpointer, pytest.raises(NoCheckpoint, match=r"none of the checkpoints.*has 100 bytes"):
        checkpointer.restore(state_of(0))
    with make() as checkpointer, pytest.raises(NoCheckpoint, match="another directory"):
        checkpointer.load()


def test_what_is_in_memory_is_read_before_a_restore_asks_and_used_only_while_it_is_so(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make() as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.close(keep_memory=True)
    read = []
    described = sources._described
    monkeypatch.setattr(sources, "_described", lambda segment: read.append(1) or described(segment))
    for step_after in (None, 2):
        with make() as checkpointer:
            checkpointer._saving.background.wait()
            assert len(read) == 1
            if step_after:
                checkpointer.save(step_after, {**state_of(2), "more": torch.ones(3)})
            state = state_of(0) | ({"more": torch.zeros(3)} if step_after else {})
            assert checkpointer.restore(state) == (step_after or 1)
            assert len(read) == (2 if step_after else 1)
            assert (state["w"][0], state["epoch"]) == ((2, 2) if step_after else (1, 1))
            checkpointer.close(keep_memory=True)
        read.clear()


def test_torn_memory_is_passed_over_and_said(make: Any, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make() as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
        assert checkpointer.wait(60)
        checkpointer.close(keep_memory=True)
    [found] = find_stores([memory])
    newest = max(found.path.glob("slot-*"), key=lambda path: Segment.open(path, writable=True).header.generation)
    data = bytearray(newest.read_bytes())
    data[4100] ^= 1
    newest.write_bytes(data)
    with make() as checkpointer:
        loaded = checkpointer.load()
    assert (loaded.step, loaded.sources) == (2, ("disk",))
    assert "the metadata of step 2 of attempt 1 is damaged" in caplog.text


@pytest.mark.shows("a save follows the layout of the state: new keys, and tensors that grew")
@pytest.mark.shows("the payload may change its size from save to save, also while an older one is read")
def test_saves_of_any_change_of_the_state_come_back(make: Any) -> None:
    states = [
        {"a": torch.rand(10)},
        {"a": torch.rand(10), "b": torch.rand(1000)},
        {"b": torch.rand(1000).double()},
        {"a": torch.rand(3, 3).t(), "c": {"d": None, "e": [torch.rand(0), 1]}},
        {},
        {"a": torch.rand(100_000)},
        {"a": 3},
    ]
    with make() as checkpointer:
        for step, state in enumerate(states, 1):
            assert checkpointer.save(step, state)
            back = checkpointer.load().state
            assert repr(back) == repr(state)


@pytest.mark.shows("the layout of the state has changed: every difference is named, nothing is changed")
def test_a_changed_layout_is_refused_with_all_differences_and_the_state_is_as_it_was(make: Any) -> None:
    with make() as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3), "old": torch.ones(1), "n": 1})
        state = {"w": torch.zeros(4), "new": torch.zeros(1), "n": 0}
        before = torch.get_rng_state()
        with pytest.raises(StateMismatch, match=r"3 difference.*new: missing.*old: unexpected.*w: shape"):
            checkpointer.restore(state)
        assert state["n"] == 0
        assert torch.equal(torch.get_rng_state(), before)
        assert checkpointer.restore(state, strict=False) == 1
        assert state["n"] == 1


@pytest.mark.shows("later saves allocate nothing: the same files, descriptors and memory")
def test_a_hundred_saves_take_no_more_memory_and_files(make: Any) -> None:
    state = {f"w{index}": torch.rand(1000) for index in range(50)}
    with make() as checkpointer:
        for step in range(20):
            checkpointer.save(step, state)
        gc.collect()
        descriptors, memory_kib = len(os.listdir("/proc/self/fd")), _resident_kib()
        for step in range(20, 120):
            checkpointer.save(step, state)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert _resident_kib() - memory_kib < 1024
        assert checkpointer.stats().num_saves == 120


def _resident_kib() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1])


@pytest.mark.shows("with three slots a save never waits; with two it waits and says how long")
def test_every_save_is_in_memory_also_while_the_writer_is_stopped(make: Any, wait_until: WaitUntil) -> None:
    with make() as checkpointer:
        checkpointer.save(1, state_of(1))
        assert checkpointer.wait(60)
        writer = checkpointer.stats().writer_pid
        os.kill(writer, signal.SIGSTOP)
        try:
            for step in range(2, 12):
                assert checkpointer.save(step, state_of(step))
                assert checkpointer.load().step == step
            assert not checkpointer.wait(0.05)
            assert checkpointer.stats().persisted == Generation(1, 1)
        finally:
            os.kill(writer, signal.SIGCONT)
        assert checkpointer.wait(60)
        assert checkpointer.stats().persisted == Generation(1, 11)


def test_a_writer_that_dies_is_replaced_and_said(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with make() as checkpointer:
        checkpointer.save(1, state_of(1))
        assert checkpointer.wait(60)
        os.kill(checkpointer.stats().writer_pid, signal.SIGKILL)
        checkpointer._storage.writer.process.wait()
        checkpointer.save(2, state_of(2))
        assert checkpointer.wait(60)
    assert "the checkpoint writer has ended with code -9: another is started" in caplog.text


# Beside the program


@pytest.mark.shows("`save_async` copies beside the program, and what is changed too early is found")
def test_a_save_beside_training_waits_at_the_fence_and_before_each_optimizer_step(make: Any) -> None:
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = {"model": model, "optimizer": optimizer}
    with make(check_async=True) as checkpointer:
        checkpointer.guard(optimizer)
        for step in range(1, 6):
            saved = model.weight.detach().clone()
            assert checkpointer.save_async(step, state)
            model(torch.rand(4, 200)).sum().backward()
            optimizer.step()  # fences
            assert not torch.equal(model.weight, saved)
            assert torch.equal(checkpointer.load().state["model"]["weight"], saved)
        with pytest.raises(ValueError, match="mine"):
            raise ValueError("mine")
    optimizer.step()  # the guard is gone


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies in threads wait for it."""
    go_on = threading.Event()
    copy = Copier.copy

    def late(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            go_on.wait(60)
        copy(*args)

    monkeypatch.setattr(Copier, "copy", late)
    return go_on


@pytest.mark.shows("`save_async` copies beside the program, and what is changed too early is found")
def test_a_parameter_that_is_changed_too_early_is_found(make: Any, held_up: threading.Event) -> None:
    model = torch.nn.Linear(3, 3)
    with make(check_async=True) as checkpointer:
        checkpointer.save(1, {"model": model})
        checkpointer.save_async(2, {"model": model})
        torch.nn.init.ones_(model.weight)
        held_up.set()
        with pytest.raises(CheckpointError, match=r"1 tensor changed while save_async copied them: model.weight"):
            checkpointer.fence()
        assert checkpointer.load().step == 1


@pytest.mark.shows("`save_async` copies beside the program, and what is changed too early is found")
def test_what_a_forward_pass_changes_is_taken_at_once(make: Any, held_up: threading.Event) -> None:
    model = torch.nn.BatchNorm1d(3)
    state = {"model": model, "mean": torch.zeros(3)}
    with make(check_async=True) as checkpointer:
        checkpointer.save_async(1, state)
        model(torch.rand(4, 3))
        state["mean"].fill_(1)
        held_up.set()
        checkpointer.fence()
        back = checkpointer.load().state
    assert back["model"]["num_batches_tracked"] == 0
    assert back["model"]["running_mean"].sum() == 0
    assert back["mean"].sum() == 0


# Refusals


@pytest.mark.shows("arguments that break a rule are refused, all at once")
def test_misuse_is_an_error_at_once(make: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"num_slots=1.*stop_signals.*close_timeout_s"):
        CheckpointOptions(num_slots=1, stop_signals=(signal.SIGKILL,), close_timeout_s=-1)
    with pytest.raises(OptionsError, match=r"num_slots='3'.*stop_signals=15.*fallback=3.*close_timeout_s='1'"):
        CheckpointOptions(num_slots="3", stop_signals=15, fallback=3, close_timeout_s="1")  # type: ignore[arg-type]
    assert CheckpointOptions(shared_memory="/tmp").shared_memory == Path("/tmp")  # type: ignore[arg-type]
    for wrong in ({"shared": "model"}, {"shared": ("model", 3)}, {"shared": 3}, {"interval": "5"}, {"keep": 3}):
        with pytest.raises(OptionsError, match=rf"^{next(iter(wrong))}=.*: (a collection of|a number of|a rule)"):
            make(**wrong)
    words = r"interval=2\.5.*keep=Best.*ranks=7: an object with rank"
    with pytest.raises(OptionsError, match=words):
        make(interval=2.5, keep=Best("loss"), ranks=7)
    with pytest.raises(OptionsError, match=r"options=\{\}: CheckpointOptions"):
        FlashCheckpointer(tmp_path / "ckpt", options={})  # type: ignore[arg-type]
    assert not (tmp_path / "ckpt").exists()
    with make(shared=("model",)) as checkpointer:
        for step, state, words in (
            (1, [], "a dict with names as keys"),
            (1, {1: 2}, "a dict with names as keys"),
            (1, {"model": 1, "_rng": 2}, "is taken"),
            (1, {"w": 1}, r"shared=\('model',\): the state has no model, only w"),
            (-1, {"model": 1}, "step=-1"),
            ("1", {"model": 1}, "step='1'"),
        ):
            with pytest.raises(OptionsError, match=words):
                checkpointer.save(step, state)
        with pytest.raises(UnsupportedState, match=r"model\.f is a builtins\.function"):
            checkpointer.save(1, {"model": {"f": test_misuse_is_an_error_at_once}})
        for metrics in ({"loss": "low"}, [1.0], {"loss": torch.zeros(2)}):
            with pytest.raises(OptionsError, match="a dict of names and numbers"):
                checkpointer.save(1, {"model": 1}, metrics=metrics)
        assert checkpointer.save(np.int64(5), {"model": 1}, metrics={"loss": torch.ones(1)})
        with pytest.raises(OptionsError, match="step 4 of attempt 1"):
            checkpointer.save(4, {"model": 1})
    with pytest.raises(OptionsError, match="closed"):
        checkpointer.save(6, {"model": 1})
    checkpointer.close()


def test_ranks_that_do_not_know_each_other_are_refused(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WORLD_SIZE", "HOROVOD_SIZE"):
        monkeypatch.setenv(name, "2")
        with pytest.raises(OptionsError, match=rf"{name}=2, and neither torch.distributed nor Horovod is initialised"):
            make()
        assert not (tmp_path / "ckpt").exists()
        monkeypatch.setenv(name, "1")
    with make() as checkpointer:
        assert checkpointer.save(1, state_of(1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with make(ranks=Alone()) as checkpointer:
        assert checkpointer.load().step == 1


@pytest.mark.shows("two jobs cannot have one checkpoint directory")
def test_two_programs_cannot_have_one_directory(make: Any) -> None:
    with make(), pytest.raises(DirectoryInUse, match="is in use by job local"):
        make()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryNotWritable):
        FlashCheckpointer(tmp_path / "file" / "ckpt")


@pytest.mark.shows("shared memory that is too small is refused before a byte is written, and a file takes its place")
def test_full_memory_uses_a_file_and_says_so(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, memory: Path, tmp_path: Path
) -> None:
    _be_full(monkeypatch, memory)
    with make() as checkpointer:
        assert checkpointer.save(1, state_of(1))
        assert checkpointer.load().state["epoch"] == 1
    assert "checkpoints leave shared memory" in caplog.text
    assert not (tmp_path / "ckpt" / ".memory").exists()


@pytest.mark.shows("`/dev/shm` is full: refused before a byte is written, and training goes on")
@pytest.mark.shows("shared memory that is too small is refused before a byte is written, and a file takes its place")
def test_where_there_is_no_room_at_all_training_goes_on(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _be_full(monkeypatch, Path("/"))
    with make() as checkpointer:
        assert not checkpointer.save(1, state_of(1))
        assert not checkpointer.save_async(2, state_of(2))
        assert checkpointer.stats().num_failed == 2
        assert checkpointer.load() is None
        monkeypatch.undo()
        assert checkpointer.save(3, state_of(3))
    assert "step 1 is not saved, training goes on" in caplog.text


def _be_full(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """File systems below a directory have no room from here on."""
    real = os.statvfs

    def statvfs(path: Any) -> Any:
        found = real(path)
        if not Path(path).is_relative_to(root):
            return found
        return os.statvfs_result((found.f_bsize, found.f_frsize, found.f_blocks, 0, 0, *found[5:]))

    monkeypatch.setattr(os, "statvfs", statvfs)


# When to save and when to stop


def test_a_fixed_interval_counts_steps(make: Any) -> None:
    with make(interval=3) as checkpointer:
        checkpointer.restore(state_of(0))
        assert [step for step in range(1, 11) if checkpointer.should_save(step)] == [3, 6, 9]


def test_an_interval_by_cost_begins_with_a_save_and_then_follows_what_it_measured(make: Any) -> None:
    with make(interval=Adaptive(max_overhead=0.01)) as checkpointer:
        checkpointer.restore(state_of(0))
        assert checkpointer.should_save(1)
        checkpointer.save(1, state_of(1))
        checkpointer.should_save(2)
        assert "every" in checkpointer.stats().interval
    with make(interval=Every(seconds=1000)) as checkpointer:
        assert [step for step in range(1, 5) if checkpointer.should_save(step)] == [1]


def test_a_signal_asks_to_stop_and_the_programs_own_handler_runs(make: Any) -> None:
    seen: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with make(stop_signals=(signal.SIGTERM, signal.SIGUSR1)) as checkpointer:
            assert not checkpointer.stopping
            os.kill(os.getpid(), signal.SIGUSR1)
            assert checkpointer.stopping
            assert seen == [signal.SIGUSR1]
            os.kill(os.getpid(), signal.SIGTERM)  # the program looks, so it lives
        os.kill(os.getpid(), signal.SIGTERM)  # the same request, which a launcher passes on
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGUSR1, former)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.shows("the newest generation that all ranks have is restored, memory and disk mixed")
def test_a_step_that_is_saved_again_is_a_checkpoint_of_its_own(make: Any, tmp_path: Path) -> None:
    with make(keep=Retention(keep_last=None)) as checkpointer:
        for value in (1, 2, 3):
            checkpointer.save(9, state_of(value))
            assert checkpointer.wait(60)
        checkpointer.save(10, state_of(4))
    names = ["step-0000000009.1", "step-0000000009.1.1", "step-0000000009.1.2", "step-0000000010.1"]
    found = CheckpointDirectory(tmp_path / "ckpt").checkpoints()
    assert sorted(one.path.name for one in found) == names
    assert [one.generation for one in found] == [(1, 10, 0), (1, 9, 2), (1, 9, 1), (1, 9, 0)]
    shutil.rmtree(tmp_path / "ckpt" / names.pop())
    with make() as checkpointer:
        assert checkpointer.load().state["epoch"] == 3


def test_a_jobs_writer_asks_to_stop(make: Any, memory: Path) -> None:
    with make() as checkpointer:
        assert not checkpointer.stopping
        [found] = find_stores([memory])
        with StoreView(found.path) as view:
            view.ask_to_stop("the job ends soon")
        assert checkpointer.stopping


PROGRAM = """
    import os, signal, sys, threading, torch
    from pathlib import Path
    from hetstream import FlashCheckpointer
    from hetstream.checkpoint.flash.options import CheckpointOptions
    checkpointer = FlashCheckpointer(sys.argv[1], options=CheckpointOptions(shared_memory=Path(sys.argv[2])))
    checkpointer.save(1, {"w": torch.ones(3)})
    END
"""
ENDS = {
    "end": ("", 0, False),
    "exit": ("sys.exit(3)", 3, False),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); threading.Event().wait(60)", -signal.SIGINT, False),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait(60)", -signal.SIGTERM, False),
    "exception": ("1 / 0", 1, True),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, True),
}


@pytest.mark.shows("nothing is left after a normal end; after SIGKILL only what belongs to nobody alive is removed")
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.slow) if how in ("exit", "SIGKILL") else how for how in ENDS]
)
def test_every_end_brings_the_newest_to_disk_and_only_a_crash_leaves_memory(
    how: str, tmp_path: Path, memory: Path, wait_until: WaitUntil
) -> None:
    end, code, leaves_memory = ENDS[how]
    program = textwrap.dedent(PROGRAM).replace("END", end)
    argv = [sys.executable, "-c", program, str(tmp_path / "ckpt"), str(memory)]
    assert subprocess.run(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHON_PATH}, timeout=120).returncode == code
    latest = tmp_path / "ckpt" / "latest"
    # First what it does: it may not have started yet.
    wait_until(latest.is_symlink, 60, "the checkpoint")
    wait_until(
        lambda: not any(one.writer_alive for one in find_stores([memory])), 60, "the end of the checkpoint writer"
    )
    assert latest.readlink() == Path("step-0000000001.1")
    # A checkpoint writer ends before the last file of its memory is gone.
    wait_until(lambda: bool(find_stores([memory])) == leaves_memory, 10, "the end of the memory, or its stay")


def test_retention_is_kept_over_starts(make: Any, tmp_path: Path) -> None:
    for attempt in range(2):
        with make(keep=Retention(keep_last=1, keep_every=2)) as checkpointer:
            for step in range(1 + 3 * attempt, 4 + 3 * attempt):
                checkpointer.save(step, state_of(step))
                assert checkpointer.wait(60)
    names = {one.name for one in (tmp_path / "ckpt").glob("step-*")}
    assert {"step-0000000002.1", "step-0000000004.2", "step-0000000006.2"} <= names
    assert "step-0000000001.1" not in names
    assert "step-0000000005.2" not in names


def test_a_forked_child_leaves_everything_alone(make: Any) -> None:
    with make() as checkpointer:
        checkpointer.save(1, state_of(1))
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                checkpointer.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert checkpointer.save(2, state_of(2))
        assert checkpointer.wait(60)


def test_the_writer_does_without_torch() -> None:
    code = "import hetstream.checkpoint.persist.writer, sys; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=False).returncode == 0
