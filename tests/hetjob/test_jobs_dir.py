"""Where a job's directory is, and what is believed of it, where another user has a hand in it. As root: two users."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hetstream.base.errors import ConfigError
from hetstream.base.files import Directory, make_private
from hetstream.hetjob.elastic.controller import ControllerState
from hetstream.hetjob.errors import MasterError
from hetstream.hetjob.job.job import IN_SUBMIT_DIR, choose, places
from hetstream.hetjob.master.controller_state_file import ControllerStateFile
from hetstream.hetjob.master.server import MasterConfig
from tests.base.users import STRANGER, VICTIM, needs_root, run_as

GROUP = 54399  # that no account is in
SPEC = {"data_workers": 1, "data_worker_cpus": 4}


def made(path: Path, uid: int, mode: int, gid: int | None = None) -> Path:
    """A directory of a user."""
    path.mkdir()
    os.chown(path, uid, uid if gid is None else gid)
    path.chmod(mode)
    return path


@pytest.fixture
def home(common_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The victim's."""
    monkeypatch.setenv("HOME", str(common_place / "home"))
    return made(common_place / "home", VICTIM, 0o700)


@needs_root
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "prepared", "is_safe"),
    [
        pytest.param(VICTIM, VICTIM, 0o755, None, True, id="one's own"),
        pytest.param(0, 0, 0o1777, None, True, id="root's, sticky"),
        pytest.param(STRANGER, STRANGER, 0o1777, None, False, id="a stranger's, sticky"),
        pytest.param(0, GROUP, 0o2775, None, False, id="a project's"),
        pytest.param(VICTIM, GROUP, 0o2775, None, False, id="one's own, a project's"),
        pytest.param(0, GROUP, 0o3775, None, True, id="a project's, sticky"),
        pytest.param(0, 0, 0o1777, STRANGER, False, id="a stranger has made .hetstream"),
        pytest.param(0, 0, 0o1777, VICTIM, True, id="one's own .hetstream is there"),
    ],
)
def test_where_it_is_not_safe_it_is_in_the_home_directory(
    common_place: Path, home: Path, uid: int, gid: int, mode: int, prepared: int | None, is_safe: bool
) -> None:
    place = made(common_place / "work", uid, mode, gid)
    if prepared is not None:
        made(place / IN_SUBMIT_DIR, prepared, 0o755)

    def look() -> None:
        found, why = choose(None, place)
        assert found == (None if is_safe else home / IN_SUBMIT_DIR)
        assert ("" if is_safe else f"below {home / IN_SUBMIT_DIR}, and not where") in why
        assert "\n" not in why
        named = place / IN_SUBMIT_DIR
        if is_safe:
            assert choose(str(named), place) == (named, "")
        else:
            with pytest.raises(ConfigError, match=r"is not used: .* could put another (one|directory) in the place of"):
                choose(str(named), place)

    run_as(VICTIM, look)


@needs_root
def test_without_a_safe_place_it_is_said_of_both(common_place: Path, home: Path) -> None:
    work = made(common_place / "work", STRANGER, 0o1777)
    home.chmod(0o777)

    def look() -> None:
        with pytest.raises(
            ConfigError, match=r"Where it is submitted: .*work.* In the home directory: .*home.*--jobs-dir"
        ):
            choose(None, work)

    run_as(VICTIM, look)


def test_directories_are_looked_for_in_the_home_directory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert places([tmp_path, Path("/work")], "/scratch/x") == [
        tmp_path / IN_SUBMIT_DIR, Path("/work/.hetstream"), Path("/scratch/x"),
    ]  # fmt: skip


# What somebody else has done to a job's directory between its making and its use.
SWAPS: dict[str, Callable[[Path], None]] = {
    "the parent is another's": lambda job: (job.parent.rename(job.parents[1] / "gone"), plant(job))[-1],
    "the directory is another's": lambda job: (job.rename(job.parent / "gone"), plant(job))[-1],
    "the directory is a link to another's": lambda job: (
        job.rename(job.parent / "gone"),
        plant(job.parents[1] / "evil"),
        job.symlink_to(job.parents[1] / "evil"),
    )[-1],
    "the file is another's": lambda job: ((job / "spec.json").unlink(), plant(job))[-1],
    "the file is a link": lambda job: (
        (job / "spec.json").unlink(),
        plant(job.parents[1] / "evil"),
        (job / "spec.json").symlink_to(job.parents[1] / "evil" / "spec.json"),
    )[-1],
    "everybody writes to the file": lambda job: (job / "spec.json").chmod(0o666),
    "everybody writes to the directory": lambda job: job.chmod(0o777),
    "everybody writes above": lambda job: job.parents[1].chmod(0o777),
    "a group writes above": lambda job: (os.chown(job.parents[1], VICTIM, GROUP), job.parents[1].chmod(0o2775))[-1],
    "what is above is another's": lambda job: (os.chown(job.parents[1], STRANGER, 0), job.parents[1].chmod(0o1777))[-1],
}


def plant(job: Path) -> None:
    """A stranger's directory of a job, which names her program."""
    for directory in (job.parent, job):
        if not directory.exists():
            made(directory, STRANGER, 0o777)
    (job / "spec.json").write_text(json.dumps({**SPEC, "program": ["/home/mallory/evil.sh"]}))
    os.chown(job / "spec.json", STRANGER, STRANGER)


@needs_root
@pytest.mark.parametrize("swap", SWAPS)
def test_what_names_programs_is_read_only_where_nobody_else_has_a_hand_in_it(common_place: Path, swap: str) -> None:
    job = made(common_place / "work", VICTIM, 0o755) / ".hetstream" / "job-7"

    def start() -> None:
        make_private(job, own_parents=1)
        with Directory.open(job) as directory:
            directory.write_whole("spec.json", json.dumps({**SPEC, "program": ["/opt/hetstream"]}).encode())
        assert MasterConfig.read(job / "spec.json").program == ("/opt/hetstream",)

    def read() -> None:
        with pytest.raises(MasterError, match=r"belongs to user|link|can write to|could put another"):
            MasterConfig.read(job / "spec.json")

    run_as(VICTIM, start)
    SWAPS[swap](job)
    run_as(VICTIM, read)


@pytest.mark.shows("every directory on the way to a job's directory is safe, or the home directory takes its place")
@needs_root
def test_a_controllers_state_that_a_stranger_planted_is_neither_read_nor_kept_there(common_place: Path) -> None:
    work = made(common_place / "work", VICTIM, 0o755)

    def keep() -> None:
        ControllerStateFile(work / "elastic.json").write(ControllerState())
        assert ControllerStateFile(work / "elastic.json").memory == ControllerState()

    def find_nothing() -> None:
        file = ControllerStateFile(work / "elastic.json")
        assert file.memory is None
        file.write(ControllerState())

    run_as(VICTIM, keep)
    kept = (work / "elastic.json").read_bytes()
    work.rename(common_place / "gone")
    made(work, STRANGER, 0o1777)
    (work / "elastic.json").write_bytes(kept)
    os.chown(work / "elastic.json", STRANGER, STRANGER)
    run_as(VICTIM, find_nothing)
    assert (work / "elastic.json").stat().st_uid == STRANGER
    assert [path.name for path in work.iterdir()] == ["elastic.json"]
