"""What the dispatcher remembers across its own death: SQLite in WAL mode, one commit for each burst of messages.

It holds the number of starts (the high half of fencing tokens), the keys and the port, the pipelines, which
data workers are registered, and what each loader has delivered. It does not hold leases or positions: the loaders are
the authority on what they have, and say it again when they meet a restarted dispatcher. So recovery does not depend on
how far the epoch is.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import sqlite3
import time
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory, UntrustedFile
from hetstream.base.own_lock import keep_to_owner
from hetstream.base.private import own_directory
from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.mpi_dataworkers.faults import reach
from hetstream.mpi_dataworkers.wire.messages import LoaderStats, ProvidePipeline, RegisterLoader

_log = logging.getLogger(__name__)

# Also of the messages in it: a release whose `ProvidePipeline` or `LoaderStats` has another form has another number.
_SCHEMA_VERSION = 3
_DATABASE = "journal.sqlite"
# SQLite writes its log back into the database after about 4 MiB; the file is cut to this then.
_MAX_WAL_BYTES = 1 << 20
# A commit that takes longer is told: nobody is answered meanwhile, and after 5 s loaders make their steps themselves.
_SLOW_S = 1.0
# A pipeline is stored in parts, because SQLite takes blobs up to 10**9 bytes.
_PART_BYTES = 256 << 20
_SCHEMA = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists pipelines (id text, part integer, message blob not null, primary key (id, part));
create table if not exists loaders (
  job_name text, ordinal integer, rank integer, pid integer, host text, stats blob not null, title text not null,
  primary key (job_name, ordinal, rank, pid, host)
);
create table if not exists workers (peer text primary key);
"""


def remove_leftovers(work_dir: Path) -> None:
    """Remove the directory of a dispatcher that was killed, so that the next one there begins anew.

    Raises:
        ServiceError: the dispatcher lives.
    """
    if not work_dir.is_dir():
        return
    with Directory.open(work_dir) as directory:
        lock = _locked(directory)
    try:
        shutil.rmtree(work_dir)
    finally:
        os.close(lock)


def _locked(directory: Directory) -> int:
    """The descriptor whose lock says that this process has the directory."""
    lock = directory.open_file("lock", os.O_RDWR | os.O_CREAT)
    keep_to_owner(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise ServiceError(
            f"work directory {directory.path} is in use by the dispatcher with process id {holder}. One dispatcher a "
            "directory: stop that one, or give another --work-dir."
        ) from error
    return lock


class Journal:
    """The dispatcher's memory in `work_dir`; one process at a time.

    Args:
        work_dir: made with mode 0700 where it does not exist.

    Raises:
        ServiceError: another dispatcher holds the directory, somebody else may have a hand in it, or the journal in
            it is damaged or of another release.
    """

    def __init__(self, work_dir: Path) -> None:
        self.path = work_dir / _DATABASE
        try:
            with own_directory(work_dir) as directory:
                self._lock = _locked(directory)
                self._prepare(directory)
        except UntrustedFile as error:
            raise ServiceError(
                f"work directory {work_dir} cannot be used: {error.strerror or error}. It holds the keys of the "
                "service, and is to be this user's alone: give another --work-dir"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        try:
            self._open()
        except (sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
            os.close(self._lock)
            raise ServiceError(
                f"journal {self.path} cannot be used: {error}. Move it away and start the dispatcher again; loaders "
                "and data workers that still run register anew."
            ) from error

    def _open(self) -> None:
        self._database = sqlite3.connect(self.path, isolation_level=None)
        try:
            self._database.execute("pragma journal_mode=wal")
            self._database.execute("pragma synchronous=full")
            self._database.execute(f"pragma journal_size_limit={_MAX_WAL_BYTES}")
            self._check()
            self._database.executescript(_SCHEMA)
            self._read()
            self.begin()
            self.set_fact("schema_version", str(_SCHEMA_VERSION))
            self.set_fact("incarnation", str(self.incarnation))
            self.commit()
        except Exception:
            self._database.close()
            raise

    def _prepare(self, directory: Directory) -> None:
        """Make the file with mode 0600, and refuse what somebody else has put where SQLite looks."""
        try:
            os.close(directory.open_file(_DATABASE, os.O_RDWR | os.O_CREAT))
            for name in (f"{_DATABASE}-wal", f"{_DATABASE}-shm", f"{_DATABASE}-journal"):
                with contextlib.suppress(FileNotFoundError):
                    os.close(directory.open_file(name, os.O_RDWR))
        except BaseException:
            os.close(self._lock)
            raise

    def _check(self) -> None:
        """Refuse what SQLite itself finds damaged: pages, order, duplicates in an index. It is small, so all of it."""
        found = [str(row[0]) for row in self._database.execute("pragma integrity_check")]
        if found != ["ok"]:
            raise ValueError("; ".join(found[:3]))

    def _read(self) -> None:
        """Read all of it, so that damage is found now and not when the value is needed."""
        version = self.fact("schema_version")
        others = [name for (name,) in self._database.execute("select name from facts where name != 'schema_version'")]
        if version not in ("", str(_SCHEMA_VERSION)):
            raise ValueError(f"it has schema version {version}, this release reads {_SCHEMA_VERSION} (docs/upgrade.md)")
        if others and not version:
            raise ValueError(f"the schema version is missing, and {others[0]!r} is there")
        self.incarnation = int(self.fact("incarnation", "0" if not version else "missing")) + 1
        self.keys: list[str] = typed_json.decode(self.fact("keys", "[]"), list[str])
        if len(self.keys) not in (0, 5):
            raise ValueError(f"{len(self.keys)} keys instead of 5")
        if self.fact("port") and not 0 < int(self.fact("port")) < 65536:
            raise ValueError(f"port {self.fact('port')}")
        self.pipelines = []
        rows = self._database.execute("select id, message from pipelines order by id, part")
        for name, parts in itertools.groupby(rows, key=lambda row: row[0]):
            blob = b"".join(part for _, part in parts)
            pipeline = msgspec.msgpack.decode(blob, type=ProvidePipeline)
            if pipeline.pipeline_id != name:
                raise ValueError(f"the pipeline {pipeline.pipeline_id} is filed as {name}")
            self.pipelines.append(pipeline)
        self.workers = {str(row[0]) for row in self._database.execute("select peer from workers")}
        self.loaders()

    def begin(self) -> None:
        """Start a group of changes."""
        self._database.execute("begin")

    def commit(self) -> None:
        """Make the group durable; only then may messages that rest on it leave."""
        reach("dispatcher.before_commit")
        began_s = time.monotonic()
        self._database.execute("commit")
        took_s = time.monotonic() - began_s
        if took_s > _SLOW_S:
            _log.warning(
                "the disk of %s took %.1f s for a commit, and nobody was answered meanwhile. --journal-dir puts the "
                "journal on another disk", self.path, took_s,
            )  # fmt: skip
        reach("dispatcher.after_commit")

    def fact(self, name: str, default: str = "") -> str:
        """A remembered text, or `default`."""
        row = self._database.execute("select value from facts where name = ?", (name,)).fetchone()
        return str(row[0]) if row else default

    def set_fact(self, name: str, value: str) -> None:
        """Remember a text."""
        self._database.execute("insert or replace into facts values (?, ?)", (name, value))

    def remember_pipeline(self, pipeline: ProvidePipeline) -> None:
        """Remember a pipeline, so that a data worker can fetch it after a restart."""
        blob = memoryview(msgspec.msgpack.encode(pipeline))
        self.forget_pipeline(pipeline.pipeline_id)
        for part, start in enumerate(range(0, len(blob), _PART_BYTES)):
            row = pipeline.pipeline_id, part, blob[start : start + _PART_BYTES]
            self._database.execute("insert into pipelines values (?, ?, ?)", row)

    def forget_pipeline(self, pipeline_id: str) -> None:
        """Forget a pipeline that nobody uses."""
        self._database.execute("delete from pipelines where id = ?", (pipeline_id,))

    def remember_worker(self, peer: str) -> None:
        """Remember that a data worker is registered."""
        self._database.execute("insert or replace into workers values (?)", (peer,))

    def forget_worker(self, peer: str) -> None:
        """Forget a data worker that is lost."""
        self._database.execute("delete from workers where peer = ?", (peer,))

    def remember_stats(self, loader: RegisterLoader, stats: LoaderStats) -> None:
        """Remember what a loader has delivered so far."""
        key = (loader.job_name, loader.ordinal, loader.rank, loader.pid, loader.host)
        blob = msgspec.msgpack.encode(stats)
        values = (*key, blob, loader.title)
        self._database.execute("insert or replace into loaders values (?, ?, ?, ?, ?, ?, ?)", values)

    def loaders(self) -> list[dict[str, str | int | float]]:
        """What every loader has delivered, one flat row each."""
        rows = self._database.execute("select * from loaders order by job_name, ordinal, rank, pid")
        return [
            {"job_name": name, "title": title, "ordinal": ordinal, "rank": rank, "pid": pid, "host": host}
            | msgspec.structs.asdict(msgspec.msgpack.decode(stats, type=LoaderStats))
            for name, ordinal, rank, pid, host, stats, title in rows
        ]

    def close(self) -> None:
        """Release the directory."""
        self._database.close()
        os.close(self._lock)
