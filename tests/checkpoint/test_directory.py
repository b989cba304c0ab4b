"""A directory of checkpoints: who may use it, what counts as a checkpoint, what is removed and what stays."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetstream.base.files import Directory
from hetstream.checkpoint.disk import commit
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.disk.rank_file import PartSpec, read_manifest
from hetstream.checkpoint.errors import (
    DamagedCheckpoint,
    DirectoryInUse,
    DirectoryNotWritable,
    ForeignOwner,
    MissingRanks,
    NoCheckpoint,
    NotEnoughSpace,
)
from hetstream.checkpoint.policy import Attempt, Best, Retention
from hetstream.checkpoint.record.layout import Generation
from tests.base.users import STRANGER, VICTIM, needs_root, run_as
from tests.checkpoint.parts import make_record, write_checkpoint

ME = JobIdentity("8123", "gpu01", 77)


def latest(directory: Path) -> str:
    return os.readlink(directory / "latest")


def names(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.startswith("step-"))


def write_rank(directory: Path, generation: Generation, rank: int, world_size: int) -> None:
    record = make_record(rank)
    commit.write_part(directory, PartSpec(generation, rank, world_size), record.plan, record.payload)


# --- owner ---------------------------------------------------------------------------------------------------------


def test_every_attempt_has_a_number_of_its_own(tmp_path: Path) -> None:
    numbers = []
    for _ in range(3):
        directory = CheckpointDirectory(tmp_path / "new" / "ckpt")
        numbers.append(directory.acquire(ME))
        directory.release()
    (tmp_path / "new/ckpt/owner.json").write_text("{torn")
    directory = CheckpointDirectory(tmp_path / "new/ckpt")
    numbers.append(directory.acquire(ME))
    directory.release()
    assert numbers == [1, 2, 3, 4]


def test_a_number_is_new_even_if_only_a_checkpoint_tells_of_the_old_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Generation(7, 10))
    directory = CheckpointDirectory(tmp_path)
    assert directory.acquire(ME) == 8
    directory.release()


@pytest.mark.shows("two jobs cannot have one checkpoint directory")
def test_two_jobs_with_one_directory(tmp_path: Path) -> None:
    first, second = CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path)
    first.acquire(ME)
    with pytest.raises(DirectoryInUse, match="job 8123 on gpu01, process 77"):
        second.acquire(JobIdentity("8124", "gpu02", 78))
    first.release()
    assert second.acquire(JobIdentity("8124", "gpu02", 78)) == 2
    second.release()


def test_a_killed_owner_does_not_keep_the_directory_and_neither_do_its_children(tmp_path: Path) -> None:
    program = f"""
import os, signal
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
CheckpointDirectory({str(tmp_path)!r}).acquire(JobIdentity("1", "a", 1))
if os.fork() == 0:
    os.write(1, b"x")
signal.pause()
"""
    # The child stands for a data worker that survives its trainer.
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert owner.stdout
    with owner.stdout:
        assert owner.stdout.read(1) == b"x"
        with pytest.raises(DirectoryInUse):
            CheckpointDirectory(tmp_path).acquire(ME)
        owner.kill()
        owner.wait()
        directory = CheckpointDirectory(tmp_path)
        assert directory.acquire(ME) == 2
        directory.release()
        os.killpg(owner.pid, signal.SIGKILL)
        assert owner.stdout.read() == b""


def train(path: Path) -> None:
    """What a training does with locks: it owns the directory, writes a checkpoint there and looks at it."""
    directory = CheckpointDirectory(path)
    attempt = directory.acquire(JobIdentity("local", os.uname().nodename, os.getpid()))
    write_checkpoint(path, Generation(attempt, 10))
    with Directory.open(path) as root:
        commit._commit_lock(root).release()
    directory.release()


def lock_files(path: Path) -> list[Path]:
    return [file for file in path.rglob(".*") if file.name in (".lock", ".commit", ".in-use")]


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory of the victim's, in a place that everybody can enter."""
    with tempfile.TemporaryDirectory(prefix="hetstream-test-") as place:
        os.chmod(place, 0o755)
        path = Path(place, "checkpoints")
        path.mkdir()
        os.chown(path, VICTIM, VICTIM)
        yield path


@needs_root
def test_who_may_read_a_directory_cannot_lock_it(open_place: Path) -> None:
    """The owner opens all of it to readers (chmod -R), lock files too: they are his again when they are next used."""
    run_as(VICTIM, lambda: train(open_place))
    subprocess.run(["chmod", "-R", "g+rX,o+rX", open_place], check=True)
    locks = lock_files(open_place)
    assert {file.name for file in locks} >= {".lock", ".commit"}
    run_as(VICTIM, lambda: train(open_place))

    def read() -> None:
        for file in locks:
            if file.name != ".in-use":
                with pytest.raises(PermissionError):
                    file.open()

    run_as(STRANGER, read)


@needs_root
def test_who_holds_the_lock_of_a_dead_owner_is_looked_for_and_not_the_dead(open_place: Path) -> None:
    run_as(VICTIM, lambda: train(open_place))
    lock = open_place / ".lock"
    lock.chmod(0o644)
    holder = subprocess.Popen(
        ["flock", str(lock), "sh", "-c", "echo held; read line"],
        user=STRANGER,
        group=STRANGER,
        extra_groups=[],
        stdin=-1,
        stdout=-1,
    )
    with holder:
        assert holder.stdout
        assert holder.stdout.readline()

        def refused() -> None:
            with pytest.raises(DirectoryInUse, match=r"its last owner, which is gone.*fuser -v .*\.lock"):
                train(open_place)

        run_as(VICTIM, refused)
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        holder.communicate(b"\n")
    run_as(VICTIM, lambda: train(open_place))


def test_the_history_tells_how_attempts_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("time.time", lambda: now_s[0])
    first = CheckpointDirectory(tmp_path)
    first.acquire(ME)
    now_s[0] = 1100.0
    write_checkpoint(tmp_path, Generation(1, 5))
    # The first dies: its lock goes, and it says nothing.
    assert first._lock
    first._lock.release()
    with open(tmp_path / "history.jsonl", "ab") as file:
        file.write(b'{"event": "to')
    now_s[0] = 2000.0
    second = CheckpointDirectory(tmp_path)
    second.acquire(ME)
    now_s[0] = 2500.0
    second.release()
    third = CheckpointDirectory(tmp_path)
    third.acquire(ME)
    assert third.past_attempts() == [Attempt(1000.0, 1100.0, True), Attempt(2000.0, 2500.0, False)]
    third.release()


@pytest.mark.shows("a checkpoint directory that is read-only is refused, and can still be read")
def test_a_foreign_or_read_only_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(ForeignOwner, match="belongs to user"):
            CheckpointDirectory(tmp_path).acquire(ME)
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryNotWritable, match="cannot be made"):
        CheckpointDirectory(tmp_path / "file" / "ckpt").acquire(ME)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(DirectoryNotWritable, match="cannot be written to"):
            CheckpointDirectory(tmp_path).acquire(ME)


# --- commit --------------------------------------------------------------------------------------------------------


@pytest.mark.shows("`latest` does not move before all ranks have written")
def test_a_set_is_a_checkpoint_once_its_last_part_is_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Generation(1, 60), world_size=3)
    directory, generation = CheckpointDirectory(tmp_path), Generation(1, 120)
    for rank, missing in ((1, (0, 2)), (2, (0,))):
        write_rank(tmp_path, generation, rank, 3)
        assert commit.commit(tmp_path, generation, 3) == missing
        assert latest(tmp_path) == "step-0000000060.1", "latest waits for the last part"
    assert [found.generation.step for found in directory.checkpoints()] == [60]
    assert directory.partials()[0].ranks == (1, 2)
    write_rank(tmp_path, generation, 0, 3)
    assert latest(tmp_path) == "step-0000000060.1"
    assert commit.commit(tmp_path, generation, 3) == ()
    assert names(tmp_path) == ["step-0000000060.1", "step-0000000120.1"]
    assert latest(tmp_path) == "step-0000000120.1"
    assert directory.checkpoints()[0].world_size == 3


@pytest.mark.shows("a step that is tried again keeps parts of other ranks")
def test_to_write_a_part_again_changes_nothing(tmp_path: Path) -> None:
    generation = Generation(1, 120)
    write_rank(tmp_path, generation, 0, 2)
    file = tmp_path / "step-0000000120.1.partial/rank-00000-of-00002.safetensors"
    before = file.stat().st_ino
    write_rank(tmp_path, generation, 0, 2)
    assert file.stat().st_ino == before
    write_rank(tmp_path, generation, 1, 2)
    assert commit.commit(tmp_path, generation, 2) == ()
    write_rank(tmp_path, generation, 1, 2)
    assert commit.commit(tmp_path, generation, 2) == ()
    assert names(tmp_path) == ["step-0000000120.1"]


@pytest.mark.shows("`latest` moves last, by rename, after every file was synced, and never back")
def test_latest_follows_attempt_before_step_and_never_goes_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Generation(1, 100))
    write_checkpoint(tmp_path, Generation(2, 60))
    assert latest(tmp_path) == "step-0000000060.2"
    write_checkpoint(tmp_path, Generation(1, 110))
    assert latest(tmp_path) == "step-0000000060.2"
    assert [one.generation for one in CheckpointDirectory(tmp_path).checkpoints()] == [
        Generation(2, 60),
        Generation(1, 110),
        Generation(1, 100),
    ]


@pytest.mark.shows("`latest` moves last, by rename, after every file was synced, and never back")
def test_ranks_that_commit_at_once(tmp_path: Path) -> None:
    """Threads have locks of their own, as processes have."""
    seen: list[str] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                seen.append(latest(tmp_path))
            except FileNotFoundError:
                continue

    def save(rank: int) -> None:
        for step in range(1, 9):
            generation = Generation(1, step)
            write_rank(tmp_path, generation, rank, 4)
            commit.commit(tmp_path, generation, 4)

    watcher = threading.Thread(target=watch)
    writers = [threading.Thread(target=save, args=(rank,)) for rank in range(4)]
    for thread in (watcher, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    watcher.join()
    assert seen == sorted(seen)
    assert names(tmp_path) == [f"step-{step:010}.1" for step in range(1, 9)]
    assert latest(tmp_path) == "step-0000000008.1"


def test_dead_writers_work_is_completed_and_cleaned_up(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    write_checkpoint(tmp_path, Generation(1, 10))
    write_rank(tmp_path, Generation(1, 5), 0, 2)
    write_rank(tmp_path, Generation(1, 20), 0, 1)
    write_rank(tmp_path, Generation(1, 30), 1, 2)
    (tmp_path / "latest").unlink()
    (tmp_path / "step-0000000001.1.deleted").mkdir()
    (tmp_path / "step-0000000001.1.deleted" / "rest").write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    for name in (".latest.gpu01-5.tmp", ".owner.json.gpu01-5.tmp"):
        (tmp_path / name).symlink_to("nowhere")
    assert directory.complete_partials() == [Generation(1, 20)]
    assert names(tmp_path) == ["step-0000000010.1", "step-0000000020.1", "step-0000000030.1.partial"]
    assert latest(tmp_path) == "step-0000000020.1"
    assert (tmp_path / "notes.txt").exists()
    directory.acquire(ME)
    directory.release()
    assert not list(tmp_path.glob(".*.tmp"))


# --- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.shows("the newest generation that all ranks have is restored, memory and disk mixed")
def test_a_manifest_of_the_first_release_is_read_and_written_as_then() -> None:
    text = b"""{
  "attempt": 2,
  "step": 120,
  "rank": 0,
  "world_size": 2,
  "num_bytes": 73400320,
  "checksums": [
    "00112233445566aa",
    "00112233445566bb"
  ],
  "layout_digest": "abababababababababababababababab",
  "metrics": {
    "loss": 0.5
  },
  "time_s": 1700000000.25,
  "chunk_bytes": 67108864,
  "format": "safetensors",
  "version": 1,
  "itself": "5d40192c447da109"
}
"""
    manifest = read_manifest(text, "golden")
    assert manifest.part.generation == Generation(2, 120)
    assert manifest.to_json() == text
    again = PartSpec(Generation(2, 120, repeat=1), 0, 2).manifest(1, ("0" * 16,), 0.0)
    assert read_manifest(again.to_json(), "again").part.generation == Generation(2, 120, repeat=1)


@pytest.mark.parametrize("name", ["step-0000000120.2.0", "step-120.2", "step-0000000120.2.01", "step-0000000120.2."])
def test_a_checkpoint_has_one_name_only(name: str) -> None:
    assert Generation.of_directory(name) is None
    for generation in (Generation(2, 120), Generation(2, 120, 1), Generation(3, 10**11, 12)):
        assert Generation.of_directory(generation.directory_name) == generation


def spoil_torn_manifest(path: Path) -> str:
    file = path / "rank-00000-of-00002.json"
    file.write_bytes(file.read_bytes()[:-30])
    return "no manifest"


def spoil_flipped_manifest(path: Path) -> str:
    file = path / "rank-00000-of-00002.json"
    value = json.loads(file.read_text())
    file.write_text(json.dumps({**value, "time_s": value["time_s"] + 1}))
    return "checksum does not fit"


def spoil_missing_rank(path: Path) -> str:
    (path / "rank-00001-of-00002.json").unlink()
    return r"lacks the parts of rank 1 of 2"


def spoil_missing_file(path: Path) -> str:
    (path / "rank-00001-of-00002.safetensors").unlink()
    return "is missing"


def spoil_truncated_file(path: Path) -> str:
    os.truncate(path / "rank-00001-of-00002.safetensors", 4097)
    return "has 4097 bytes"


def spoil_moved_manifest(path: Path) -> str:
    os.replace(path / "rank-00000-of-00002.json", path / "rank-00001-of-00002.json")
    return "rank 0 of 2; it lies with"


def spoil_everything(path: Path) -> str:
    for file in path.iterdir():
        file.unlink()
    return r"lacks the parts of rank 0 of 1"


@pytest.mark.shows("a checkpoint with missing ranks is passed over, and a log says which are missing")
@pytest.mark.shows("a damaged or missing file: the checkpoint before is used, and a warning says why")
@pytest.mark.parametrize(
    "spoil",
    [
        spoil_torn_manifest,
        spoil_flipped_manifest,
        spoil_missing_rank,
        spoil_missing_file,
        spoil_truncated_file,
        spoil_moved_manifest,
        spoil_everything,
    ],
)
def test_a_spoilt_checkpoint_is_passed_over(tmp_path: Path, spoil: object, caplog: pytest.LogCaptureFixture) -> None:
    directory = CheckpointDirectory(tmp_path)
    write_checkpoint(tmp_path, Generation(1, 10), 2)
    write_checkpoint(tmp_path, Generation(1, 20), 2)
    rule = spoil(tmp_path / "step-0000000020.1")  # type: ignore[operator]
    assert [one.generation for one in directory.checkpoints()] == [Generation(1, 10)]
    assert "step 20 of attempt 1 is passed over" in caplog.text
    with pytest.raises((DamagedCheckpoint, MissingRanks), match=rule):
        directory.read(Generation(1, 20), 0)
    assert directory.verify(Generation(1, 20))
    assert directory.verify(Generation(1, 10)) == []
    directory.retain(Retention(keep_last=1))
    assert "step-0000000010.1" in names(tmp_path)


@pytest.mark.shows("a flipped bit is found, its tensors are named, and the checkpoint before is used")
def test_a_flipped_bit_is_found_by_reading_and_remembered(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    write_checkpoint(tmp_path, Generation(1, 10), 2)
    write_checkpoint(tmp_path, Generation(1, 20), 2)
    file = tmp_path / "step-0000000020.1" / "rank-00001-of-00002.safetensors"
    with open(file, "r+b") as stream:
        stream.seek(4200)
        byte = stream.read(1)[0]
        stream.seek(4200)
        stream.write(bytes([byte ^ 4]))
    assert directory.checkpoints()[0].generation == Generation(1, 20)
    directory.read(Generation(1, 20), 0).close()
    with pytest.raises(DamagedCheckpoint, match=r"rank-00001-of-00002\.safetensors is damaged .*bytes 0-"):
        directory.read(Generation(1, 20), 1)
    assert [one.generation for one in directory.checkpoints()] == [Generation(1, 10)]
    with directory.read(Generation(1, 10), 1) as good:
        record = make_record(10 * 1000 + 1)
        assert {e.name: bytes(good.bytes_of(e)) for e in good.entries} == {
            e.name: record.bytes_of(e.name) for e in record.layout.entries
        }
        assert good.metadata["step"] == "120"


def test_what_is_not_there(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "none")
    assert directory.checkpoints() == []
    write_checkpoint(tmp_path, Generation(1, 10))
    directory = CheckpointDirectory(tmp_path)
    with pytest.raises(NoCheckpoint, match="hetstream ckpt ls"):
        directory.read(Generation(1, 11), 0)
    with pytest.raises(MissingRanks, match="there is no rank 1"):
        directory.read(Generation(1, 10), 1)
    # Names that are nearly right are somebody else's.
    for name in ("step-10.1", "step-0000000010.01", "step-0000000010", "step-0000000010.1.bak"):
        (tmp_path / name).mkdir()
    assert len(directory.scan()) == 1


# --- removal -------------------------------------------------------------------------------------------------------


@pytest.mark.shows("retention is a function of what is in the directory, and spares what is read")
def test_retention_keeps_what_the_rule_says_and_survives_a_restart(tmp_path: Path) -> None:
    for step in range(10, 70, 10):
        write_checkpoint(tmp_path, Generation(1, step), metrics={"loss": abs(step - 30)})
    CheckpointDirectory(tmp_path).retain(Retention(keep_last=2, keep_best=Best("loss")))
    assert names(tmp_path) == ["step-0000000030.1", "step-0000000050.1", "step-0000000060.1"]
    assert latest(tmp_path) == "step-0000000060.1"


def test_metrics_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Generation(1, 10), metrics={"loss": float("nan"), "steps": 3, "max": float("inf")})
    assert CheckpointDirectory(tmp_path).checkpoints()[0].metrics == {"steps": 3.0}


@pytest.mark.shows("retention is a function of what is in the directory, and spares what is read")
def test_what_is_being_read_stays(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, Generation(1, step))
    directory, rule = CheckpointDirectory(tmp_path), Retention(keep_last=1)
    with directory.hold(Generation(1, 10)):
        CheckpointDirectory(tmp_path).retain(rule)
        assert names(tmp_path) == ["step-0000000010.1", "step-0000000030.1"]
        with directory.read(Generation(1, 10), 0) as file:
            assert file.entries
    directory.retain(rule)
    assert names(tmp_path) == ["step-0000000030.1"]


def test_a_full_disk_leaves_the_old_checkpoint_and_no_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, Generation(1, 10))
    before = names(tmp_path)
    monkeypatch.setattr(commit, "_free_bytes", lambda _: 1000)
    with pytest.raises(NotEnoughSpace, match="1000 are free; nothing was written"):
        write_checkpoint(tmp_path, Generation(1, 20))
    assert names(tmp_path) == before


@pytest.mark.shows("the disk is full: the old checkpoint is whole, and training goes on")
def test_on_a_full_disk_a_rank_gives_up_its_older_uncommitted_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(tmp_path, Generation(1, 10), 0, 2)
    free_bytes = iter([0, 1 << 30])
    monkeypatch.setattr(commit, "_free_bytes", lambda _: next(free_bytes))
    write_rank(tmp_path, Generation(1, 20), 0, 2)
    assert [one.ranks for one in CheckpointDirectory(tmp_path).partials()] == [(0,), ()]
