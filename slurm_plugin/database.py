"""SQLite files of ours: made privately, and never taken for what they are not. Used by the histories and the daemon."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from hetstream.base.access import others_can_write, unsafe_above
from hetstream.base.errors import HetstreamError
from hetstream.base.files import Directory
from hetstream.slurm_plugin.errors import HistoryError, UnsafePlace

File = TypeVar("File", bound="DatabaseFile")

_BESIDE = ("-journal", "-wal", "-shm")


# A change is a matter of milliseconds. Who may read a file can keep it from its writer for as long as he likes.
BUSY_TIMEOUT_S = 5.0


def check_beside(path: Path, *, is_own: bool = True) -> None:
    """Refuse a database beside which somebody else could put a journal: SQLite plays that into the file, or reads it.

    It takes for its own whatever has the name (https://sqlite.org/tempfiles.html, 2.1 to 2.3), and it looks at each
    transaction. So it does not help to look before: nobody else may make names there, not even where a sticky bit
    keeps him from taking others away.

    Args:
        path: of the database, which may be missing.
        is_own: it is to be this user's, in his directory; else it is read where its owner has it.

    Raises:
        OSError: somebody else could, or has; or the directory cannot be looked at.
    """
    real = Path(os.path.realpath(path))
    with Directory.open(real.parent) as directory:
        status, owners = os.fstat(directory.descriptor), {0, os.geteuid(), *(() if is_own else (directory.owner,))}
        if others_can_write(status, directory.descriptor):
            text = (
                f"others can make files in {real.parent} (mode {stat.S_IMODE(status.st_mode):04o}), and SQLite would "
                f"read them as its own. Use a directory that others cannot write to, or: chmod go-w {real.parent}"
            )
            raise PermissionError(errno.EPERM, text, str(path))
        if reason := unsafe_above(path, of_colleagues=not is_own):
            raise PermissionError(errno.EPERM, reason, str(path))
        for name in (f"{real.name}{suffix}" for suffix in _BESIDE):
            if not directory.has(name):
                continue
            beside = directory.status(name)
            is_own_file = stat.S_ISREG(beside.st_mode) and beside.st_uid in owners
            if is_own_file and not others_can_write(beside, real.parent / name):
                continue
            text = f"user {beside.st_uid} or others may have made {real.parent / name}: it is not read. Remove it"
            raise PermissionError(errno.EPERM, text, str(path))


def create_private(path: Path) -> None:
    """Make sure that there is a file for a database which this user may use; a new one has mode 0600.

    SQLite's own error says that it is unable to open the file, and not why. A file that is there is not opened to find
    out: that would drop the locks of other connections of this process (https://sqlite.org/howtocorrupt.html, 2.2).

    Raises:
        OSError: it cannot be made, is a directory, or it or its directory is not this user's to read and
            write; or it is another user's, or others can write to it, or to its directory.
    """
    check_beside(path)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # SQLite makes its journal beside the file.
    for place, mode in ((path.parent, os.W_OK | os.X_OK), (path, os.R_OK | os.W_OK)):
        if not os.access(place, mode, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    for status in (os.lstat(path), os.stat(path)):
        is_link = stat.S_ISLNK(status.st_mode)
        if status.st_uid not in (os.geteuid(), 0) or (not is_link and others_can_write(status, path)):
            text = f"user {status.st_uid} or others may have prepared {path}: it is not used"
            raise PermissionError(errno.EPERM, text, str(path))


def locked_by_another(exc: Exception, path: Path) -> str:
    """Return what to say where SQLite gave up waiting for somebody else; empty of any other error.

    A reader's lock stops a writer, too, and whoever may read a file can take it
    (https://sqlite.org/lockingv3.html, 3.0).
    """
    # Names of its codes (sqlite_errorname) are there from Python 3.11 on.
    if not isinstance(exc, sqlite3.OperationalError) or "is locked" not in str(exc):
        return ""
    return (
        f"somebody else has had it locked for {BUSY_TIMEOUT_S:g} s: one who writes to it, or who may read it. Nothing "
        f"in it is damaged. Who it is: fuser -v {shlex.quote(str(path))}. Give others a copy of it"
    )


class DatabaseFile:
    """A SQLite file of ours. Its errors are of one kind, name the file, and say what to do.

    Args:
        path: of the file.
        what: it is, in words.
        elsewhere: how the user names another, such as "Give another file".
    """

    ERROR: ClassVar[type[HetstreamError]] = HistoryError
    APPLICATION_ID: ClassVar[int]  # marks the file as ours (pragma application_id)
    SCHEMA_VERSION: ClassVar[int] = 1  # what this release reads (pragma user_version)
    # What follows where a damaged file is moved away.
    AFRESH: ClassVar[str] = "a new one is begun"

    _database: sqlite3.Connection

    def __init__(self, path: Path, what: str, elsewhere: str) -> None:
        self.path = path
        self._what, self._elsewhere = what, elsewhere

    def _open(self, connect: Callable[[], sqlite3.Connection], prepare: Callable[[], None]) -> None:
        with self._named():
            self._database = connect()
        try:
            with self._named():
                prepare()
        except BaseException:
            self._database.close()
            raise

    def _is_new(self) -> bool:
        """Whether it has no tables yet; if it has, they are ours, of this version.

        Raises:
            HetstreamError: they are not, of the kind `ERROR`.
            sqlite3.Error: it cannot be read.
        """
        (owner,) = self._database.execute("pragma application_id").fetchone()
        (version,) = self._database.execute("pragma user_version").fetchone()
        (num_tables,) = self._database.execute("select count(*) from sqlite_master").fetchone()
        if not num_tables:
            return True
        if owner != self.APPLICATION_ID:
            raise self.ERROR(f"{self} is another program's. {self._elsewhere}")
        if version != self.SCHEMA_VERSION:
            otherwise = self._elsewhere[0].lower() + self._elsewhere[1:]
            raise self.ERROR(
                f"{self} has schema version {version}, this release reads {self.SCHEMA_VERSION}: use the release of "
                f"hetstream that wrote it, or {otherwise}, or move it away: {self.AFRESH} (docs/upgrade.md)"
            )
        return False

    def _make(self, *tables: str) -> None:
        made = "".join(f"create table if not exists {table}; " for table in tables)
        self._database.executescript(
            f"begin immediate; pragma application_id={self.APPLICATION_ID}; "
            f"pragma user_version={self.SCHEMA_VERSION}; {made}commit;"
        )

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise self.ERROR(
                f"{self} cannot be opened: {exc.strerror or exc}. {self._elsewhere}, or check: namei -l "
                f"{shlex.quote(str(self.path))}"
            ) from exc
        except (sqlite3.Error, msgspec.MsgspecError) as exc:
            if locked := locked_by_another(exc, self.path):
                raise self.ERROR(f"{self} cannot be used now: {locked}") from exc
            raise self.ERROR(f"{self} cannot be used: {exc}. If it is damaged, move it away: {self.AFRESH}") from exc

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Change it, all or nothing."""
        self._database.execute("begin immediate")
        try:
            yield
            self._database.execute("commit")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("rollback")
            raise

    def __str__(self) -> str:
        return f"{self._what} {self.path}"

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def __enter__(self: File) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Directories whose files are believed: records, programs, state. Used by `devcluster`, `install` and the daemon.


def check_place(place: Path) -> None:
    """Refuse a directory in which anybody but root and this user could change something, or put another in its place.

    What is found safe stays so: nobody else can change anything on the way to it.

    Args:
        place: absolute; where it is missing, what is there above it is looked at. In a directory like /tmp a stranger
            may be the one who makes it then: see `make_place`.

    Raises:
        UnsafePlace: somebody else could.
    """
    try:
        reason = unsafe_above(place / "file")
        if not reason and place.is_dir() and others_can_write(os.stat(place), place):
            reason = f"others can make files in {place}: chmod go-w {place}, or use another directory"
    except OSError as error:
        raise UnsafePlace(f"{place} cannot be looked at: {error}") from error
    if reason:
        raise UnsafePlace(reason)


def make_place(place: Path, mode: int = 0o755) -> None:
    """Make a directory, if it is missing, in which nobody but root and this user can change anything.

    Args:
        place: absolute.
        mode: of it, if it is made.

    Raises:
        UnsafePlace: as `check_place`.
        OSError: it cannot be made.
    """
    check_place(place)
    place.mkdir(mode=mode, parents=True, exist_ok=True)
    check_place(place)
