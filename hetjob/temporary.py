"""Directories that live only as long as a command of this user, and what commands that were killed have left of them.

Each has a file that its process holds locked, so the next command finds out which of them are nobody's any more. What
is removed is looked at through descriptors: anybody can make names in /tmp.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hetstream.base.files import Directory
from hetstream.base.private import temporary_place

log = logging.getLogger(__name__)

PREFIX = "hetstream-"
_LOCK_FILE = ".in-use"


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory of this user alone, removed at the end; first goes what killed commands have left."""
    place = temporary_place()
    remove_leftovers(place)
    unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))
    with Directory.open(unlocked) as directory:
        lock = directory.open_file(_LOCK_FILE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)  # in a directory of mode 0700, which nobody else can enter
    path = unlocked.rename(place / unlocked.name.removeprefix("."))  # only now others would look at its lock
    try:
        yield path
    finally:
        try:
            with Directory.open(place) as outer:
                remove_tree(outer, path.name)
        finally:
            os.close(lock)


def remove_leftovers(place: Path) -> list[Path]:
    """Remove the directories there that killed commands of this user have left; returns them.

    One that is in use, is another user's, or is of something else is left alone.
    """
    removed = []
    for path in sorted(place.glob(f"{PREFIX}*")):
        try:
            if path.lstat().st_uid == os.geteuid() and _is_nobodys(path):
                with Directory.open(place) as outer:
                    remove_tree(outer, path.name)
                removed.append(path)
        except OSError as error:
            log.debug("%s stays: %s", path, error)
    if removed:
        log.info("removed what killed commands had left: %s", ", ".join(map(str, removed)))
    return removed


def _is_nobodys(path: Path) -> bool:
    """Whether its lock file is there and no process holds it."""
    with Directory.open(path) as directory:
        directory.check_own()
        try:
            lock = directory.open_file(_LOCK_FILE, os.O_RDWR)
        except FileNotFoundError:
            return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def remove_tree(outer: Directory, name: str) -> None:
    """Remove a directory of this user with all that is in it; links are removed, not followed.

    Raises:
        UntrustedFile: a directory in it is another user's, or others can write to it.
        OSError: something cannot be removed.
    """
    with outer.enter(name) as inner:
        for entry in inner.names():
            if inner.has_directory(entry):
                remove_tree(inner, entry)
            else:
                inner.unlink(entry, missing_ok=True)
    os.rmdir(name, dir_fd=outer.descriptor)
