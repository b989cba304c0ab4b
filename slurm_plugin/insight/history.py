"""Samples of a cluster over time, in a small SQLite file. Written and read by the report, the page and the exporter.

One row for each sample, about 500 bytes; what is older than `KEEP_S` goes when a new one comes. Several processes may
use one file. It holds no names of users or jobs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import others_can_write
from hetstream.slurm_plugin.errors import HistoryError
from hetstream.slurm_plugin.insight.observation import Sample

KEEP_S = 92 * 86400.0
# Marks the file as ours (pragma application_id): "hets".
_APPLICATION_ID = 0x68657473
_SCHEMA_VERSION = 1
_BUSY_TIMEOUT_S = 30.0


def create_private(path: Path) -> None:
    """Make sure that there is a file for a database which this user may use; a new one has mode 0600.

    SQLite itself says of whatever it may not open that it is unable to. A file that is there is not opened to find out:
    closing it would drop the locks of other connections of this process (https://sqlite.org/howtocorrupt.html, 2.2).

    Raises:
        OSError: it cannot be made, is a directory, or it or its directory is not this user's to read and
            write; or it is another user's, or others can write to it.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # SQLite makes its journal beside the file.
    for place, mode in ((path.parent, os.W_OK | os.X_OK), (path, os.R_OK | os.W_OK)):
        if not os.access(place, mode, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    for status in (os.lstat(path), os.stat(path)):
        if status.st_uid not in (os.geteuid(), 0) or (others_can_write(status) and not stat.S_ISLNK(status.st_mode)):
            text = f"user {status.st_uid} or others may have prepared {path}: it is not used"
            raise PermissionError(errno.EPERM, text, str(path))


class History:
    """The file, made with mode 0600 where it does not exist.

    Args:
        path: in a directory that exists.

    Raises:
        HistoryError: it cannot be used, or is another program's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._named():
            create_private(path)
            self._database = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        try:
            with self._named():
                self._prepare()
        except BaseException:
            self._database.close()
            raise

    def _prepare(self) -> None:
        (owner,) = self._database.execute("pragma application_id").fetchone()
        (version,) = self._database.execute("pragma user_version").fetchone()
        (num_tables,) = self._database.execute("select count(*) from sqlite_master").fetchone()
        if num_tables and owner != _APPLICATION_ID:
            raise HistoryError(f"history {self.path} is another program's. Give another file.")
        if num_tables and version != _SCHEMA_VERSION:
            raise HistoryError(
                f"history {self.path} has schema version {version}, this release reads {_SCHEMA_VERSION}: use the "
                "release of hetstream that wrote it, or give another file (docs/upgrade.md)"
            )
        if not num_tables:
            self._database.executescript(
                f"begin immediate; pragma application_id={_APPLICATION_ID}; pragma user_version={_SCHEMA_VERSION}; "
                "create table if not exists samples (taken_s real primary key, sample text not null); commit;"
            )

    def append(self, sample: Sample) -> None:
        """Keep a sample, and drop those that are too old.

        Raises:
            HistoryError: it cannot be written.
        """
        with self._named():
            self._database.execute(
                "insert or replace into samples values (?, ?)", (sample.taken_s, msgspec.json.encode(sample).decode())
            )
            self._database.execute("delete from samples where taken_s < ?", (sample.taken_s - KEEP_S,))

    def since(self, start_s: float) -> list[Sample]:
        """The samples from a moment on, the oldest first.

        Raises:
            HistoryError: it cannot be read.
        """
        with self._named():
            rows = self._database.execute(
                "select sample from samples where taken_s >= ? order by taken_s", (start_s,)
            ).fetchall()
            return [typed_json.decode(text, Sample) for (text,) in rows]

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise HistoryError(
                f"history {self.path} cannot be opened: {exc.strerror}. Give another file, or check: namei -l "
                f"{shlex.quote(str(self.path))}"
            ) from exc
        except (sqlite3.Error, msgspec.MsgspecError) as exc:
            raise HistoryError(
                f"history {self.path} cannot be used: {exc}. If it is damaged, move it away: a new one is begun."
            ) from exc

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def __enter__(self) -> History:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
