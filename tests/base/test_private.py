"""Directories for keys in places where others may write too. As root: the strangers are processes of other users."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hetstream.base.files import Directory, UntrustedFile, make_private, own_directory
from hetstream.mpi_dataworkers.dispatcher.events import EventLog
from hetstream.mpi_dataworkers.dispatcher.server import Journal

# Numbers that no account has: the processes need no more than that.
VICTIM, STRANGER = 61001, 61002
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


def run_as(uid: int, act: Callable[[], object]) -> str:
    """What a process of another user says: the name and the text of its exception, or ""."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b""
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
        except BaseException as error:  # noqa: BLE001, the process's boundary: the parent asserts on it
            said = f"{type(error).__name__}: {error}".encode()
        os.write(writing, said)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        said = stream.read().decode()
    os.waitpid(pid, 0)
    return said


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory in which everybody can write, as a group's for submitting, or /tmp."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and not stat.S_IMODE(parent.stat().st_mode) & 0o001:
            parent.chmod(stat.S_IMODE(parent.stat().st_mode) | 0o011)
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


def test_a_directory_is_made_private_and_its_parents_ones_own(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / ".hetstream" / "job-7", own_parents=1)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / "a" / name).stat().st_mode) for name in (".hetstream", ".hetstream/job-7")]
    assert modes == [0o755, 0o700]
    (tmp_path / "a" / ".hetstream").chmod(0o777)
    make_private(tmp_path / "a" / ".hetstream" / "job-7", own_parents=1)
    assert stat.S_IMODE((tmp_path / "a" / ".hetstream").stat().st_mode) == 0o755, "ours, made with a wide umask"


def test_ones_own_link_is_followed_and_the_place_it_leads_to_looked_at(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(mode=0o700)
    (tmp_path / ".hetstream").symlink_to("scratch")
    make_private(tmp_path / ".hetstream" / "job-7", own_parents=1)
    assert (tmp_path / "scratch" / "job-7").is_dir()


def test_where_anybody_can_swap_directories_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UntrustedFile, match="which has no sticky bit"):
        own_directory(tmp_path / "open" / "work")
    assert not (tmp_path / "open" / "work").exists()


@as_root
@pytest.mark.parametrize("prepared", ["parent", "parent is a link", "directory", "directory is a link"])
def test_what_a_stranger_has_prepared_is_refused(shared: Path, prepared: str) -> None:
    home = shared.parent / "home"
    home.mkdir()
    os.chown(home, VICTIM, VICTIM)
    outer, job = shared / ".hetstream", shared / ".hetstream" / "job-7"

    def prepare() -> None:
        os.umask(0)
        if prepared == "parent is a link":
            outer.symlink_to(home)
        elif prepared == "parent":
            outer.mkdir(mode=0o777)
        elif prepared == "directory":
            job.mkdir(mode=0o777)
        else:
            job.symlink_to(home)

    if prepared.startswith("directory"):
        assert run_as(VICTIM, lambda: (os.umask(0), outer.mkdir(mode=0o777))) == ""
    assert run_as(STRANGER, prepare) == ""
    said = run_as(VICTIM, lambda: make_private(job, own_parents=1))
    assert said.startswith("UntrustedFile"), said
    assert f"belongs to user {STRANGER}" in said
    assert list(home.iterdir()) == []
    assert stat.S_IMODE(home.stat().st_mode) == 0o755


@as_root
def test_a_work_directory_that_a_stranger_made_gets_no_keys(shared: Path) -> None:
    work = shared / "work"
    assert run_as(STRANGER, lambda: (os.umask(0), work.mkdir(mode=0o777))) == ""
    said = run_as(VICTIM, lambda: Journal(work))
    assert said.startswith("ServiceError")
    assert f"{work} belongs to user {STRANGER}" in said
    assert list(work.iterdir()) == []


@as_root
@pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite-wal", "lock"])
@pytest.mark.parametrize("how", ["file", "link"])
def test_files_that_a_stranger_has_planted_are_not_opened(shared: Path, name: str, how: str) -> None:
    work, secret = shared / "work", shared / "secret"
    assert run_as(VICTIM, lambda: (os.umask(0), work.mkdir(mode=0o777), secret.write_text("thesis"))) == ""

    def plant() -> None:
        os.umask(0)
        if how == "file":
            (work / name).touch(mode=0o666)
        else:
            (work / name).symlink_to(secret)

    assert run_as(STRANGER, plant) == ""
    said = run_as(VICTIM, lambda: Journal(work))
    assert said.startswith("ServiceError"), said
    assert name in said
    assert secret.read_text() == "thesis"
    assert stat.S_IMODE(work.stat().st_mode) == 0o755


def test_a_planted_link_gets_no_events(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedFile, match="a link, which is not followed"):
        EventLog(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_work_directory_is_used_again(tmp_path: Path) -> None:
    for incarnation in (1, 2):
        journal = Journal(tmp_path / "work")
        assert journal.incarnation == incarnation
        journal.close()
    with Directory.open(tmp_path / "work") as directory:
        assert stat.S_IMODE(os.fstat(directory.descriptor).st_mode) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Journal(tmp_path / "file")
