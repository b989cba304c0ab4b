"""A checkpoint directory is input: nothing that a stranger or an archive has put there makes a command read, write or
delete something elsewhere. Real users and real files."""

from __future__ import annotations

import json
import multiprocessing.popen_fork  # noqa: F401, another user may not be able to read what is imported late
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hetstream.checkpoint.convert.weights  # noqa: F401, as below
from hetstream import CheckpointOptions, FlashCheckpointer
from hetstream.base.files import UntrustedFile, temporary_name
from hetstream.checkpoint.config import JOB_WRITER
from hetstream.checkpoint.convert.weights import write_state
from hetstream.checkpoint.disk import commit
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.disk.rank_file import PartSpec
from hetstream.checkpoint.errors import DamagedCheckpoint, DirectoryNotWritable, ForeignOwner, NoCheckpoint
from hetstream.checkpoint.memory.store_files import FALLBACK
from hetstream.checkpoint.memory.view import places
from hetstream.checkpoint.policy import Retention
from hetstream.checkpoint.record.layout import MAX_NUMBER, Generation
from hetstream.checkpoint.replica import wire
from hetstream.slurm_plugin.cli import main
from tests.base.users import STRANGER, VICTIM, needs_root, run_as
from tests.checkpoint.parts import write_checkpoint

ME = JobIdentity("8123", "gpu01", 77)
STEP = Generation(1, 10)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What no command may touch."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / ".profile").write_text("mine")
    (folder / ".in-use").write_text("mine too")
    return folder


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory of this user's with one good checkpoint."""
    path = tmp_path / "ckpt"
    path.mkdir(mode=0o700)
    write_checkpoint(path, STEP)
    return path


def give(path: Path, uid: int) -> None:
    """Make a tree another user's, its links included."""
    for folder, folders, files in os.walk(path):
        for name in (".", *folders, *files):
            os.lchown(os.path.join(folder, name), uid, uid)


def flip(path: Path) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def untouched(home: Path) -> bool:
    return {one.name: one.read_text() for one in home.iterdir()} == {".profile": "mine", ".in-use": "mine too"}


@needs_root
def test_verify_of_a_strangers_directory_writes_nothing_anywhere(
    directory: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = directory / STEP.directory_name
    flip(next(step.glob("*.safetensors")))
    for name in ("damaged.txt", temporary_name("damaged.txt")):
        (step / name).symlink_to(home / ".profile")
    give(directory, STRANGER)
    before = sorted(os.listdir(step))
    assert main(["ckpt", "verify", str(directory)]) == 1
    assert "damaged" in capsys.readouterr().out
    assert untouched(home)
    assert sorted(os.listdir(step)) == before


@needs_root
def test_nothing_of_a_strangers_directory_is_removed(
    directory: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "step-0000000007.1.deleted").symlink_to(home)
    give(directory, STRANGER)
    for words in (["--dry-run"], []):
        assert main(["ckpt", "gc", *words, str(directory)]) == 1
        assert f"belongs to user {STRANGER}" in capsys.readouterr().err
    for act in (commit.clean_up, commit.complete):
        with pytest.raises(UntrustedFile):
            act(directory)
    assert untouched(home)


def test_links_of_an_archive_are_neither_followed_nor_removed_through(
    directory: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They belong to who has unpacked it."""
    for name in ("step-0000000007.1.deleted", "step-0000000008.1.partial", "step-0000000020.1"):
        (directory / name).symlink_to(home)
    (directory / temporary_name("latest")).symlink_to(home / ".profile")
    assert main(["ckpt", "ls", str(directory)]) == 0
    assert "step-0000000020" not in capsys.readouterr().out
    assert main(["ckpt", "gc", str(directory)]) == 0
    assert CheckpointDirectory(directory).newest() == STEP
    assert os.readlink(directory / "latest") == STEP.directory_name
    assert untouched(home)


def test_gc_removes_what_it_has_listed(directory: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = directory / "step-0000000007.1.deleted"
    left.mkdir()
    (left / "rank-00000-of-00001.safetensors").write_text("half removed")
    (left / "profile").symlink_to(home / ".profile")
    deep = directory / "step-0000000006.1.deleted"
    (deep / "deeper").mkdir(parents=True)
    assert main(["ckpt", "gc", "--dry-run", str(directory)]) == 0
    assert f"would be removed  {left}" in capsys.readouterr().out
    assert left.exists()
    assert main(["ckpt", "gc", str(directory)]) == 0
    said = capsys.readouterr().out
    assert f"removed  {left}" in said
    assert f"kept  {deep}" in said
    assert not left.exists()
    assert deep.exists()
    assert untouched(home)


@pytest.mark.parametrize("name", ["rank-00000-of-00001.safetensors", "rank-00000-of-00001.json", "damaged.txt"])
def test_a_file_of_a_checkpoint_that_is_a_link_is_not_read(directory: Path, tmp_path: Path, name: str) -> None:
    file = directory / STEP.directory_name / name
    if file.exists():
        file.rename(tmp_path / name)
    else:
        (tmp_path / name).write_text("secret")
    file.symlink_to(tmp_path / name)
    (found,) = CheckpointDirectory(directory).scan()
    assert "secret" not in found.problem
    assert "link" in found.problem or "no regular file" in found.problem
    if name != "damaged.txt":
        with pytest.raises(DamagedCheckpoint, match=r"link|regular file"):
            CheckpointDirectory(directory).read(STEP, 0)


@needs_root
def test_a_step_that_another_user_put_there_is_not_restored(directory: Path) -> None:
    newer = Generation(1, 20)
    write_checkpoint(directory, newer)
    give(directory / newer.directory_name, STRANGER)
    place = CheckpointDirectory(directory)
    assert [one.generation for one in place.checkpoints()] == [STEP]
    problems = {one.generation: one.problem for one in place.scan()}
    assert f"belongs to user {STRANGER}" in problems[newer]
    assert f"belongs to user {STRANGER}" in place.verify(newer)[0]
    place.retain(Retention(keep_last=1))
    assert (directory / newer.directory_name).is_dir()
    file = next((directory / STEP.directory_name).glob("*.safetensors"))
    os.chown(file, STRANGER, STRANGER)
    with pytest.raises(DamagedCheckpoint, match=f"belongs to user {STRANGER}"):
        place.read(STEP, 0)


class Bomb:
    """What makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@needs_root
@pytest.mark.parametrize("owner", [STRANGER, 0])
def test_a_pickle_of_another_user_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int) -> None:
    """Also where pickles are allowed, which they are for checkpoints of one's own."""
    monkeypatch.setenv(JOB_WRITER, "1")  # it is for a job to have one
    directory, exploded = tmp_path / "ckpt", tmp_path / "exploded"
    directory.mkdir(mode=0o700)
    for generation, value in ((STEP, 1), (Generation(1, 20), Bomb(exploded))):
        write_state(directory, PartSpec(generation, 0, 1), {"a": value}, allow_pickle=True)
        assert commit.commit(directory, generation, 1) == ()
    give(directory / "step-0000000020.1", owner)
    (tmp_path / "memory").mkdir(mode=0o700)
    options = CheckpointOptions(shared_memory=tmp_path / "memory", allow_pickle=True)
    with FlashCheckpointer(directory, options=options) as checkpointer:
        found = checkpointer.load()
    assert found is not None
    assert (found.step, exploded.exists()) == ((10, False) if owner else (20, True))


@needs_root
def test_who_looks_at_a_strangers_directory_loses_nothing(common_place: Path) -> None:
    """The stranger plants links to a file that only the victim can write to; the victim runs every command."""
    directory, profile, out = common_place / "ckpt", common_place / "profile", common_place / "out"

    def own() -> None:
        profile.write_text("mine")
        profile.chmod(0o644)
        out.mkdir(mode=0o700)

    def plant() -> None:
        directory.mkdir(mode=0o755)
        write_checkpoint(directory, STEP)
        step = directory / STEP.directory_name
        flip(next(step.glob("*.safetensors")))
        for name in ("damaged.txt", temporary_name("damaged.txt")):
            (step / name).symlink_to(profile)
        (directory / "step-0000000007.1.deleted").symlink_to(common_place)
        (directory / temporary_name("latest")).symlink_to(profile)
        step.chmod(0o755)
        for file in step.iterdir():
            if not file.is_symlink():
                file.chmod(0o644)

    def look() -> None:
        assert main(["ckpt", "ls", str(directory)]) == 0
        assert main(["ckpt", "verify", str(directory)]) == 1
        assert main(["ckpt", "gc", str(directory)]) == 1
        assert main(["ckpt", "convert", str(directory), str(out / "x.pt"), "--to", "torch", "--dry-run"]) == 1
        with pytest.raises(ForeignOwner, match=f"belongs to user {STRANGER}"):
            CheckpointDirectory(directory).acquire(ME)

    run_as(VICTIM, own)
    run_as(STRANGER, plant)
    before = sorted(str(path) for path in directory.rglob("*"))
    run_as(VICTIM, look)
    assert profile.read_text() == "mine"
    assert sorted(str(path) for path in directory.rglob("*")) == before
    assert list(out.iterdir()) == []


@needs_root
@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_no_training_begins_where_others_can_write(common_place: Path, mode: int) -> None:
    directory = common_place / "ckpt"

    def begin() -> None:
        directory.mkdir()
        directory.chmod(mode)

    def plant() -> None:
        (directory / "owner.json").symlink_to(common_place / "elsewhere")

    def train() -> None:
        for act in (
            lambda: CheckpointDirectory(directory).acquire(ME),
            lambda: CheckpointDirectory(directory).check_own(),
        ):
            with pytest.raises(ForeignOwner, match="others can write to"):
                act()
        with pytest.raises(UntrustedFile, match="others can write to"):
            wire.make_key(directory, 1)

    run_as(VICTIM, begin)
    if mode & 0o002:
        run_as(STRANGER, plant)
    run_as(VICTIM, train)
    assert not (common_place / "elsewhere").exists()


def test_no_training_begins_below_what_anybody_can_write_to(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ForeignOwner, match="anybody could put another directory in the place"):
        CheckpointDirectory(tmp_path / "open" / "ckpt").acquire(ME)


@pytest.mark.shows("no link of another user leads a training or `ckpt gc` into another training")
@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o2775, 0o1777])
@pytest.mark.parametrize("below", ["", "run"])
def test_a_strangers_link_leads_no_training_into_another_one(common_place: Path, mode: int, below: str) -> None:
    other, shared = common_place / "other", common_place / "shared"
    shared.mkdir()
    os.chown(shared, STRANGER, STRANGER)
    if mode & 0o1000:
        os.chown(shared, 0, 0)
    shared.chmod(mode)

    def train() -> None:
        (other / below).mkdir(parents=True, exist_ok=True)
        write_checkpoint(other / below, STEP)

    def refused() -> None:
        for place in (shared / "link" / below, shared / "link" / "new" / "run"):
            for act in (CheckpointDirectory(place).check_own, lambda at=place: CheckpointDirectory(at).acquire(ME)):
                with pytest.raises(ForeignOwner, match=f"link is a link of user {STRANGER}"):
                    act()
        assert main(["ckpt", "gc", str(shared / "link" / below)]) == 1
        assert main(["ckpt", "ls", str(shared / "link" / below)]) == 0

    run_as(VICTIM, train)
    run_as(STRANGER, lambda: (shared / "link").symlink_to(other))
    before = sorted(str(path) for path in other.rglob("*"))
    run_as(VICTIM, refused)
    assert sorted(str(path) for path in other.rglob("*")) == before


def test_ones_own_link_leads_to_a_training(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("other")
    directory = CheckpointDirectory(tmp_path / "link")
    directory.acquire(ME)
    directory.release()
    assert (tmp_path / "other" / ".lineage.json").exists()


@pytest.mark.shows("no link of another user leads a training or `ckpt gc` into another training")
def test_a_directory_that_was_renamed_into_the_place_of_another_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other, odd = tmp_path / "one", tmp_path / "other", tmp_path / "odd\udcff\n"

    def start(path: Path) -> str:
        caplog.clear()
        directory = CheckpointDirectory(path)
        directory.acquire(ME)
        directory.release()
        return caplog.text

    assert (start(one), start(other), start(one)) == ("", "", "")
    one.rename(tmp_path / "away")
    other.rename(one)
    assert f"{one} holds the training that was last started as {other}" in start(one)
    assert start(one) == ""
    one.rename(odd)
    assert "odd\\udcff\\n holds the training" in start(odd)
    assert start(odd) == ""
    record = json.loads((odd / ".lineage.json").read_text())
    del record["path"]  # as an earlier release wrote it
    (odd / ".lineage.json").write_text(json.dumps(record))
    assert start(odd) == ""


@pytest.mark.parametrize("name", [".lock", ".commit", "owner.json", "history.jsonl", "handover.json", "replicas"])
def test_planted_files_of_the_directory_itself_are_not_written_through(directory: Path, home: Path, name: str) -> None:
    with_link = directory / name
    with_link.unlink(missing_ok=True)
    with_link.symlink_to(home if name == "replicas" else home / ".profile")

    place = CheckpointDirectory(directory)
    refusals: list[str] = []

    def attempt(act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, DirectoryNotWritable) as error:
            refusals.append(str(error))

    for act in (
        lambda: place.acquire(ME),
        lambda: wire.make_key(directory, 1),
        lambda: commit.clean_up(directory),
        place.release,
        lambda: wire.remove_key(directory, 1),
    ):
        attempt(act)
    assert all("link" in one for one in refusals)
    assert bool(refusals) == (name not in ("owner.json", "handover.json"))  # a new file takes the link's place
    assert untouched(home)


def test_no_store_is_made_behind_a_link_in_place_of_the_fallback(
    directory: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOB_WRITER, "1")
    (tmp_path / "memory").mkdir(mode=0o700)
    options = CheckpointOptions(shared_memory=tmp_path / "memory")
    (directory / FALLBACK).symlink_to(home)
    with pytest.raises(DirectoryNotWritable, match=r"\.memory is a link, which is not followed.*remove what is there"):
        FlashCheckpointer(directory, options=options)
    assert places([directory]) == places([])
    assert untouched(home)
    (directory / FALLBACK).unlink()
    FlashCheckpointer(directory, options=options).close()
    assert places([directory]) == [*places([]), directory / FALLBACK]


@pytest.mark.parametrize("number", [2**63 - 1, 10**30, 10**240])
def test_a_name_with_a_number_that_no_training_counts_to_is_no_checkpoints(directory: Path, number: int) -> None:
    names = (f"step-{number}.1", f"step-0000000020.{number}", f"step-0000000020.1.{number}")
    for name in names:
        assert Generation.of_directory(name) is None
        if len(name) < 200:
            shutil.copytree(directory / STEP.directory_name, directory / name)
    place = CheckpointDirectory(directory)
    assert [one.generation for one in place.scan()] == [STEP]
    assert place.acquire(ME) == 2
    place.release()
    assert Generation.of_directory("step-٠٠٠٠٠٠٠٠١٠.1") is None


def test_a_planted_attempt_leaves_the_next_one_no_number_and_that_is_said(directory: Path) -> None:
    planted = Generation(MAX_NUMBER, 20)
    write_checkpoint(directory, planted)
    assert Generation.of_directory(planted.directory_name) == planted
    with pytest.raises(DirectoryNotWritable, match=f"something in it is of attempt {MAX_NUMBER}, and attempts are"):
        CheckpointDirectory(directory).acquire(ME)
    shutil.rmtree(directory / planted.directory_name)
    place = CheckpointDirectory(directory)
    assert place.acquire(ME) == 2
    place.release()


def test_what_somebody_wrote_about_damage_is_told_without_escape_sequences(directory: Path) -> None:
    (directory / STEP.directory_name / "damaged.txt").write_text("\x1b]0;owned\x07\x1b[2J")
    (found,) = CheckpointDirectory(directory).scan()
    assert found.problem == r"\x1b]0;owned\x07\x1b[2J"


def test_a_directory_that_is_gone_meanwhile_is_told_as_before(directory: Path) -> None:
    shutil.rmtree(directory)
    with pytest.raises(NoCheckpoint), CheckpointDirectory(directory).hold(STEP):
        pass
