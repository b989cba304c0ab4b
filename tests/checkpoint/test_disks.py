"""Disks that are full, read-only or another user's: real file systems and real owners, nothing patched."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.errors import DirectoryNotWritable, ForeignOwner
from hetstream.checkpoint.memory.store_files import StoreFiles
from hetstream.checkpoint.memory.view import find_stores
from hetstream.checkpoint.record.layout import Generation
from hetstream.slurm_plugin.cli import main
from tests.checkpoint.mounted import mounted_memory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts file systems and changes owners")
MIB = 1 << 20
WaitUntil = Callable[..., None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB, with the checkpoint directory of `make` on it."""
    with mounted_memory(tmp_path / "disk", "4m") as place:
        (tmp_path / "ckpt").symlink_to(place / "ckpt")
        (place / "ckpt").mkdir(mode=0o700)
        yield place


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


def state_of(value: int, num_bytes: int) -> dict[str, Any]:
    return {"w": torch.full((num_bytes,), value, dtype=torch.uint8)}


@pytest.mark.shows("the disk is full: the old checkpoint is whole, and training goes on")
@pytest.mark.slow
def test_a_full_disk_leaves_the_old_checkpoint_and_training_goes_on(
    disk: Path, make: Any, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    with make() as checkpointer:
        assert checkpointer.save(1, state_of(1, MIB))
        assert checkpointer.wait(60)
        for step in (2, 3):
            assert checkpointer.save(step, state_of(step, 8 * MIB))
            wait_until(lambda: checkpointer.stats().writer_error, 60, "what the checkpoint writer says")
        assert "are free; nothing was written: hetstream ckpt ls" in checkpointer.stats().writer_error
        assert "checkpoints do not get to disk, training goes on with those in memory" in caplog.text
        found = CheckpointDirectory(disk / "ckpt")
        assert [one.generation for one in found.checkpoints()] == [Generation(1, 1)]
        assert found.verify(Generation(1, 1)) == []
        assert checkpointer.load().step == 3
        remount(disk, "size=64m")
        assert checkpointer.wait(60), "the checkpoint writer did not try again by itself"
        assert checkpointer.stats().writer_error == ""
    with make() as checkpointer:
        loaded = checkpointer.load()
        assert (loaded.step, loaded.sources) == (3, ("disk",))


@pytest.mark.parametrize("ending", ["close", "interpreter", "an exit handler of its own"])
def test_a_full_disk_at_the_end_is_an_exit_code(ending: str, disk: Path, tmp_path: Path, memory: Path) -> None:
    program = f"""
import atexit, pathlib, torch
from hetstream import CheckpointOptions, FlashCheckpointer
options = CheckpointOptions(shared_memory=pathlib.Path({str(memory)!r}), close_timeout_s=1)
if {ending!r}[:2] == "an":
    atexit.register(print, "its own handler")
checkpointer = FlashCheckpointer({str(tmp_path / "ckpt")!r}, options=options)
checkpointer.save(1, {{"w": torch.ones(8 << 20, dtype=torch.uint8)}})
if {ending!r} == "close":
    checkpointer.close()
"""
    out, err = tmp_path / "out", tmp_path / "err"  # a pipe would end with the checkpoint writer
    with out.open("w") as stdout, err.open("w") as stderr:
        done = subprocess.run([sys.executable, "-c", program], stdout=stdout, stderr=stderr, timeout=100)
    assert done.returncode == 1
    said = err.read_text()
    assert "step 1 of attempt 1 is not on disk: " in said
    assert "are free; nothing was written" in said
    assert f"memory of this host, {memory}/" in said
    assert out.read_text() == ("its own handler\n" if ending[:2] == "an" else "")
    (store,) = find_stores([memory])
    assert store.writer_alive
    status = StoreFiles(store.path).read_status()
    assert status is not None
    os.kill(status.pid, signal.SIGKILL)  # else it tries for half a minute more


@pytest.mark.shows("a checkpoint directory that is read-only is refused, and can still be read")
def test_a_read_only_disk_is_refused_and_can_be_looked_at(
    disk: Path, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with make() as checkpointer:
        checkpointer.save(1, state_of(1, MIB))
    remount(disk, "ro")
    with pytest.raises(DirectoryNotWritable, match="cannot be written to"):
        make()
    for words, code, said in (
        (["ls"], 0, "committed, latest"),
        (["verify"], 0, "step-0000000001.1  good"),
        (["gc"], 1, "Read-only file system"),
        (["convert", "--to", "torch", "--dry-run"], 0, "would write"),
    ):
        more = [str(disk / "m.pt")] if words[0] == "convert" else []
        assert main(["ckpt", words[0], str(disk / "ckpt"), *more, *words[1:]]) == code
        told = capsys.readouterr()
        assert said in told.out + told.err
        assert "Traceback" not in told.err
    remount(disk, "rw")
    with make() as checkpointer:
        assert checkpointer.load().step == 1


@pytest.mark.shows("another user's checkpoint directory, or memory, is not touched")
def test_another_users_directory_is_refused_and_stays_as_it_is(make: Any, tmp_path: Path) -> None:
    with make() as checkpointer:
        checkpointer.save(1, state_of(1, MIB))
    before = sorted(path.name for path in (tmp_path / "ckpt").iterdir())
    os.chown(tmp_path / "ckpt", 12345, 12345)
    with pytest.raises(ForeignOwner, match="belongs to user 12345, this is user 0"):
        make()
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == before


@pytest.mark.parametrize("num_bytes", [6 * MIB, 3 * MIB], ids=["before it begins", "in the middle"])
@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp", "flash"])
def test_a_conversion_to_a_full_disk_leaves_nothing_and_says_so(
    tmp_path: Path, kind: str, num_bytes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save(state_of(1, num_bytes), tmp_path / "model.pt")
    argv = ["ckpt", "convert", str(tmp_path / "model.pt"), str(tmp_path / "disk" / "made"), "--to", kind]
    argv += ["--as-step", "5"] if kind == "flash" else []
    with mounted_memory(tmp_path / "disk", "4m") as disk:
        if kind in ("dcp", "torch") and num_bytes < 4 * MIB:  # which need no second copy
            (disk / "other").write_bytes(bytes(2 * MIB))
        before = sorted(os.listdir(disk))
        assert main(argv) == 1
        assert sorted(os.listdir(disk)) == before
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert main(argv) == 0
        gc.collect()  # mappings of the disk that errors still refer to
    told = capfd.readouterr().err
    assert "are free" in told, told
    assert "Traceback" not in told
    assert len(told.splitlines()) <= 2, told
