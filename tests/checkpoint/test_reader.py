"""A program that reads checkpoints beside the training that saves them: no lock, no writes, nothing half read."""

from __future__ import annotations

import multiprocessing.popen_fork  # noqa: F401, children under another user may not read this Python's files
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint  # for the same children

from hetstream import CheckpointReader, FlashCheckpointer, Retention
from hetstream.base.errors import OptionsError
from hetstream.checkpoint.disk import commit
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.rank_file import open_file
from hetstream.checkpoint.errors import CheckpointError, NoCheckpoint, StateMismatch
from hetstream.checkpoint.flash import candidates
from hetstream.checkpoint.flash.sources import DiskSource, StoredPart
from hetstream.checkpoint.record.layout import Generation
from hetstream.slurm_plugin.cli import main
from tests.base.users import run_as

ROOT = Path(__file__).resolve().parents[2]
WaitUntil = Callable[..., None]
ALL = Retention(keep_last=None)
STRANGER = 12345
# Each step fills all tensors with its number; retention leaves one checkpoint.
TRAINING = """
import sys, torch
from hetstream import FlashCheckpointer, Retention
model = torch.nn.Linear(300, 300)
with FlashCheckpointer(sys.argv[1], keep=Retention(keep_last=1)) as checkpointer:
    for step in range(1, 1000):
        with torch.no_grad():
            model.weight.fill_(step)
            model.bias.fill_(step)
        checkpointer.save(step, {"model": model, "step": step})
        checkpointer.wait()
        if step == 1:
            print("saves", flush=True)
        if checkpointer.stopping:
            break
"""


def state_of(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(50, 50)
    torch.nn.init.constant_(model.weight, value)
    torch.nn.init.constant_(model.bias, value)
    return {"model": model, "n": int(value)}


def save_steps(checkpointer: FlashCheckpointer, *steps: int) -> None:
    for step in steps:
        assert checkpointer.save(step, state_of(step))
        assert checkpointer.wait(60)


def value_of(model: torch.nn.Linear) -> float:
    [value] = {*model.weight.flatten().tolist(), *model.bias.tolist()}
    return float(value)


def content_of(path: Path) -> dict[str, Any]:
    """All that could have been changed below a directory."""
    return {
        str(one.relative_to(path)): (status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        for one in [path, *path.rglob("*")]
        for status in [one.lstat()]
    }


@pytest.fixture
def directory(make: Any, tmp_path: Path) -> Path:
    """Checkpoints of steps 1 to 3, whose training has ended."""
    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 1, 2, 3)
    return tmp_path / "ckpt"


def test_an_evaluation_reads_while_training_saves_and_retention_removes(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    argv = [sys.executable, "-c", TRAINING, str(path)]
    seen = []
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE) as training:
        try:
            assert training.stdout
            assert training.stdout.readline() == b"saves\n"
            reader = CheckpointReader(path)
            model = torch.nn.Linear(300, 300)
            while len(set(seen)) < 12:
                seen.append(reader.restore({"model": model}))
                assert value_of(model) == seen[-1]
                loaded = reader.load()
                assert loaded.state["step"] == loaded.step == float(loaded.state["model"]["weight"][0, 0])
                assert loaded.sources == ("disk",)
                assert set(reader.all_steps()) <= set(range(1, 1000))
            assert training.poll() is None
        finally:
            training.send_signal(signal.SIGTERM)
            training.wait(60)
    assert seen == sorted(seen)


def test_nothing_is_written_or_locked_and_a_damaged_checkpoint_is_passed_over_unmarked(directory: Path) -> None:
    [file] = (directory / "step-0000000003.1").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = content_of(directory)
    reader = CheckpointReader(directory)
    state = state_of(0)
    generators = torch.get_rng_state()
    assert reader.restore(state) == 2
    assert (value_of(state["model"]), state["n"]) == (2.0, 2)
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of step 3 can be restored: .*damaged"):
        reader.restore(state, step=3)
    assert reader.load(step=1).state["n"] == 1
    assert torch.equal(torch.get_rng_state(), generators)
    assert content_of(directory) == before


def test_a_checkpoint_that_is_removed_while_it_is_read_is_an_error_or_the_newest_is_read(
    directory: Path, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    removed: list[Generation] = []

    def remove_first(where: CheckpointDirectory, generation: Generation, *more: Any) -> DiskSource:
        if not removed:
            removed.append(generation)
            assert commit.remove(directory, generation.directory_name)  # as retention does it
        return DiskSource(where, generation, *more)

    monkeypatch.setattr(candidates, "DiskSource", remove_first)
    reader = CheckpointReader(directory)
    with pytest.raises(
        NoCheckpoint, match=r"step 1 can be restored: there are the steps 2, 3; step 1 .* was removed from"
    ):
        reader.restore(state_of(0), step=1)
    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 4, 5)
    removed.clear()
    assert reader.load().step == 4
    assert removed == [Generation(2, 5)]
    assert "step 5 of attempt 2 was removed" in caplog.text


def test_a_checkpoint_that_is_removed_once_it_is_open_is_read_whole(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Removed(DiskSource):
        def open(self) -> list[StoredPart]:
            parts = super().open()
            verdicts = CheckpointDirectory(directory).retain(Retention(keep_last=1))
            assert [one.keep for one in verdicts] == [False, False, True]
            shutil.rmtree(directory / "step-0000000003.1")
            return parts

    monkeypatch.setattr(candidates, "DiskSource", Removed)
    state = state_of(0)
    assert CheckpointReader(directory).restore(state) == 3
    assert value_of(state["model"]) == 3.0
    assert not (directory / "step-0000000003.1").exists()


def test_what_is_read_is_copied_so_that_a_removed_file_ends_no_process(directory: Path) -> None:
    where = CheckpointDirectory(directory, read_only=True)
    with where.hold(Generation(1, 3)) as held:
        manifest = held.manifests[0]
        path = held.place.path / manifest.part.file_name
        with open_file(held.place, manifest, copies=True):
            maps = Path("/proc/self/smaps").read_text().split(str(path))[1]
        [anonymous_kib] = [int(line.split()[1]) for line in maps.splitlines() if line.startswith("Anonymous:")][:1]
    assert anonymous_kib * 1024 >= manifest.num_bytes


def test_only_what_is_asked_for_is_read_and_it_has_to_fit(directory: Path) -> None:
    reader = CheckpointReader(directory)
    state: dict[str, Any] = {"model": torch.nn.Linear(50, 50)}
    assert reader.restore(state) == 3
    assert [*state] == ["model"]
    with pytest.raises(StateMismatch, match="shape"):
        reader.restore({"model": torch.nn.Linear(50, 51)})
    with pytest.raises(StateMismatch, match="ema"):
        reader.restore({"model": torch.nn.Linear(50, 50), "ema": torch.zeros(3)})
    with pytest.raises(OptionsError, match="a number of steps"):
        reader.load(step=-3)


def test_where_there_is_nothing_it_says_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        reader = CheckpointReader(path)
        assert (reader.all_steps(), reader.latest_step()) == ([], None)
        with pytest.raises(NoCheckpoint, match="has no checkpoint"):
            reader.load()
        with pytest.raises(NoCheckpoint, match="step 3 can be restored: there are none"):
            reader.restore({}, step=3)
    assert not (tmp_path / "none").exists()


def test_what_was_left_behind_is_read_by_its_step_alone(make: Any, tmp_path: Path) -> None:
    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 1, 2, 3)
        checkpointer.restore(state_of(0), step=1)
        reader = CheckpointReader(tmp_path / "ckpt")
        assert (reader.all_steps(), reader.latest_step(), reader.load().step) == ([1], 1, 1)
        assert reader.load(step=3).step == 3


@pytest.fixture
def of_another_user(directory: Path) -> Iterator[Path]:
    """The directory, which others may read and not write to."""
    above = [one for one in directory.parents if one != Path("/tmp")]
    for path in above:
        path.chmod(path.stat().st_mode | 0o011)
    for path in [directory, *directory.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    return directory


def as_another_user(act: Callable[[], None]) -> int:
    """Do something as another user, in a child; its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")
def test_another_user_reads_what_he_cannot_write_to(of_another_user: Path) -> None:
    def read() -> None:
        assert not os.access(of_another_user, os.W_OK)
        state = state_of(0)
        assert CheckpointReader(of_another_user).restore(state) == 3
        assert value_of(state["model"]) == 3.0

    assert as_another_user(read) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")
def test_another_user_knows_what_was_left_behind_or_is_told_that_he_does_not(of_another_user: Path, make: Any) -> None:
    with make(keep=ALL) as checkpointer:  # writes the lineage anew, as each start does
        checkpointer.restore(state_of(0), step=1)
    reader = CheckpointReader(of_another_user)

    def read() -> None:
        assert (reader.all_steps(), reader.load().step) == ([1], 1)

    def refuse() -> None:
        with pytest.raises(CheckpointError, match=r"cannot be read: .*It says where training went back"):
            reader.latest_step()

    assert as_another_user(refuse) == 0
    (of_another_user / ".lineage.json").chmod(0o644)
    assert as_another_user(read) == 0


def modes(directory: Path) -> dict[str, int]:
    """Who may do what with each part of a directory of checkpoints, by name; of the newest step's files, by suffix."""
    newest_step = max(directory.glob("step-*"))
    parts = {one.suffix if one.parent == newest_step else one.name: one for one in directory.rglob("*")}
    return {name: stat.S_IMODE(one.stat().st_mode) for name, one in parts.items() if not one.is_symlink()}


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")
def test_who_is_of_the_directorys_group_reads_what_is_saved(tmp_path: Path, make: Any) -> None:
    """The owner gives the directory to a group once; what the training writes later is for it, too."""
    directory = tmp_path / "ckpt"
    directory.mkdir(mode=0o700)
    for path in (one for one in directory.parents if one != Path("/tmp")):
        path.chmod(path.stat().st_mode | 0o011)
    os.chown(directory, -1, STRANGER)
    directory.chmod(0o750)

    def read() -> None:
        reader = CheckpointReader(directory)
        assert (reader.all_steps(), reader.load().state["n"]) == ([1, 2], 2)
        assert main(["ckpt", "ls", str(directory)]) == 0
        assert main(["ckpt", "verify", str(directory)]) == 0
        assert main(["ckpt", "convert", str(directory), str(tmp_path / "out.pt"), "--to", "torch", "--dry-run"]) == 0

    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 1, 2, 3)
        checkpointer.restore(state_of(0), step=2)  # writes the lineage, which readers need, anew
        run_as(STRANGER, read)
    found = modes(directory)
    readable = {"step-0000000003.1", ".safetensors", ".json", "owner.json", ".lineage.json"}
    assert {name: found[name] for name in readable} == {
        name: 0o750 if name.startswith("step") else 0o640 for name in readable
    }
    # Locks, and what checkpoint writers alone need, stay the owner's; nothing is open to the rest of the world.
    assert (found[".lock"], found[".commit"]) == (0o600, 0o600)
    assert all(mode & 0o027 == 0 for mode in found.values())


def test_checkpoints_are_the_owners_alone_unless_the_directory_says_otherwise(tmp_path: Path, make: Any) -> None:
    with make(keep=ALL) as checkpointer:
        save_steps(checkpointer, 1)
    assert all(mode & 0o077 == 0 for mode in modes(tmp_path / "ckpt").values())
