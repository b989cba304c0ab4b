"""SQLite's own files, put beside a database by somebody else. As root: the other one is a process of another user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sqlite3
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetstream.slurm_plugin.daemon.store import Store, remembered_jobs
from hetstream.slurm_plugin.errors import DaemonStateError, HistoryError, UnsafePlace
from hetstream.slurm_plugin.insight.observation import History, Sample
from hetstream.slurm_plugin.past_jobs import JobHistory
from tests.base.users import STRANGER, VICTIM, needs_root, run_as

GROUP = 54399  # that no account is in
# What opens a database in a directory, and the name of the file.
OPENERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "history": ("h.sqlite", lambda place: History(place / "h.sqlite").close()),
    "job history": ("job-history.sqlite", lambda place: JobHistory(place, plain_names=True).close()),
    "daemon": ("daemon.sqlite", lambda place: Store(place).close()),
}


def made(path: Path, uid: int, mode: int, gid: int | None = None) -> Path:
    """A directory of a user."""
    path.mkdir()
    os.chown(path, uid, uid if gid is None else gid)
    path.chmod(mode)
    return path


def hot_journal(pages: bytes) -> bytes:
    """A journal that makes a database of these pages (https://sqlite.org/fileformat2.html, 3)."""
    page_bytes = int.from_bytes(pages[16:18], "big")
    num, nonce = len(pages) // page_bytes, 12345
    journal = bytes.fromhex("d9d505f920a163d7") + struct.pack(">IIIII", num, nonce, num, 512, page_bytes)
    journal = journal.ljust(512, b"\0")
    for number in range(num):
        page = pages[number * page_bytes : (number + 1) * page_bytes]
        checksum = (nonce + sum(page[page_bytes - 200 : 0 : -200])) & 0xFFFFFFFF
        journal += struct.pack(">I", number + 1) + page + struct.pack(">I", checksum)
    return journal


def refused(open_it: Callable[[Path], object], place: Path, why: str) -> None:
    """The victim is told why a database is not opened."""

    def act() -> None:
        with pytest.raises((HistoryError, DaemonStateError, UnsafePlace)) as raised:
            open_it(place)
        assert re.search(why, str(raised.value)), str(raised.value)

    run_as(VICTIM, act)


@needs_root
@pytest.mark.parametrize("name", OPENERS)
@pytest.mark.parametrize(
    ("uid", "mode", "gid"),
    [
        (0, 0o1777, 0),
        (VICTIM, 0o1777, VICTIM),
        (0, 0o2775, GROUP),
        (VICTIM, 0o2775, GROUP),
        (STRANGER, 0o755, STRANGER),
    ],
    ids=["sticky", "one's own, sticky", "a group's", "one's own, a group's", "a stranger's"],
)
def test_where_others_can_put_a_journal_no_database_is(
    common_place: Path, name: str, uid: int, mode: int, gid: int
) -> None:
    file, open_it = OPENERS[name]
    place = made(common_place / "place", uid, mode, gid)
    refused(open_it, place, "others can make files|could put another|another user's|belongs to user")
    assert not (place / file).exists()


@needs_root
@pytest.mark.parametrize("name", OPENERS)
@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
@pytest.mark.parametrize("kind", ["file", "link", "open"])
def test_what_others_have_put_beside_it_before_is_not_read(
    common_place: Path, name: str, suffix: str, kind: str
) -> None:
    file, open_it = OPENERS[name]
    place = made(common_place / "place", VICTIM, 0o700)
    run_as(VICTIM, lambda: open_it(place))
    planted = place / f"{file}{suffix}"
    planted.unlink(missing_ok=True)
    if kind == "link":
        (common_place / "elsewhere").touch()
        planted.symlink_to(common_place / "elsewhere")
    else:
        planted.touch()
        os.chown(planted, *((STRANGER, STRANGER) if kind == "file" else (VICTIM, VICTIM)))
        planted.chmod(0o644 if kind == "file" else 0o666)
    refused(open_it, place, f"may have made {planted}: it is not read")
    assert planted.exists()


@pytest.mark.shows("a stranger's journal beside a database is not played into it")
@needs_root
def test_a_strangers_hot_journal_does_not_become_the_history(common_place: Path) -> None:
    hers = common_place / "hers.sqlite"
    with contextlib.closing(sqlite3.connect(hers)) as database:
        database.execute("create table planted (x)")
        database.commit()
    place = made(common_place / "place", VICTIM, 0o2775, GROUP)
    # Of a time when the directory was the victim's alone; SQLite itself takes the journal.
    run_as(VICTIM, lambda: sqlite3.connect(place / "h.sqlite").execute("create table mine (x)").connection.commit())
    mine = (place / "h.sqlite").read_bytes()
    journal = place / "h.sqlite-journal"
    journal.write_bytes(hot_journal(hers.read_bytes()))
    os.chown(journal, STRANGER, STRANGER)
    refused(lambda folder: History(folder / "h.sqlite").close(), place, "others can make files|could put another")
    assert (place / "h.sqlite").read_bytes() == mine
    assert journal.exists()
    with contextlib.closing(sqlite3.connect(place / "h.sqlite")) as database:  # as root, who reads without asking
        assert database.execute("select name from sqlite_master").fetchall() == [("planted",)]


@needs_root
def test_what_a_daemon_of_another_user_remembers_is_read_where_he_alone_writes(common_place: Path) -> None:
    place = made(common_place / "place", STRANGER, 0o755)
    run_as(STRANGER, lambda: Store(place).close())
    assert remembered_jobs(place) == []
    (place / "daemon.sqlite-wal").touch()
    os.chown(place / "daemon.sqlite-wal", VICTIM, VICTIM)
    with pytest.raises(DaemonStateError, match="it is not read"):
        remembered_jobs(place)


def writes_history(path: Path) -> None:
    with History(path) as history:
        history.append(Sample(time.time(), 1, 0, 8, 0, 1, 0, None, 0, 0, None, (0, 0, 0, 0, 0), 0, 0, 0.0, {}))


@needs_root
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("h.sqlite", lambda place: writes_history(place / "h.sqlite")),
        ("job-history.sqlite", lambda place: JobHistory(place, plain_names=True).close()),
    ],
)
def test_a_reader_who_locks_a_file_is_waited_for_a_while_and_named(
    tmp_path: Path, name: str, write: Callable[[Path], object]
) -> None:
    """A read lock keeps a writer waiting; nothing is damaged, and the file goes on as soon as the reader has gone."""
    for path in (one for one in (tmp_path, *tmp_path.parents) if one != Path("/tmp")):
        path.chmod(path.stat().st_mode | 0o011)
    place = made(tmp_path / "place", VICTIM, 0o755)
    run_as(VICTIM, lambda: write(place))
    (place / name).chmod(0o644)
    hold, held = os.pipe(), os.pipe()
    reader = os.fork()
    if reader == 0:
        os.close(hold[1])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        file = os.open(place / name, os.O_RDONLY)
        fcntl.lockf(file, fcntl.LOCK_SH, 510, 0x40000002)  # SHARED_FIRST and SHARED_SIZE of SQLite's source
        os.write(held[1], b"x")
        os.read(hold[0], 1)
        os._exit(0)
    os.close(hold[0])
    try:
        assert os.read(held[0], 1) == b"x"
        begin_s = time.monotonic()
        refused(lambda _: write(place), place, f"locked.*Nothing in it is damaged.*fuser -v .*{name}.*a copy")
        assert time.monotonic() - begin_s < 60.0, "some waits of 5 s"
    finally:
        os.close(hold[1])
        os.waitpid(reader, 0)
        for descriptor in held:
            os.close(descriptor)
    run_as(VICTIM, lambda: write(place))
