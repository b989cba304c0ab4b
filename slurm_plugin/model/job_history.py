"""Jobs that have ended, in an SQLite file of their own: what new submissions are compared with.

`hetstream advise` and `hetstream convert --auto` add what the records of this user's jobs tell, and read it. A user has
one of his own, or the site names a directory (`HETSTREAM_JOB_HISTORY`, with %u for the user, or one for all). The file
has mode 0600; an administrator who wants others to read it gives them that right. Where it cannot be written, it is
only read. Names of users, and directories, in which they often are, are kept as HMAC-SHA256 under a key that lies
beside it, unless the site says `HETSTREAM_JOB_HISTORY_USERS=plain`.

A job counts once, wherever copies of its record lie: its number and what its record says are what tells it apart, not
the time of a file. A record that is dated ahead of the clock is kept without a date.

WAL mode with one process at a time (locking_mode=exclusive), so that no memory is shared between hosts: homes are on
network file systems. A transaction takes milliseconds; others wait for it.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory
from hetstream.hetjob.jobs_dir import for_user, setting
from hetstream.hetjob.site.address import site_value
from hetstream.slurm_plugin.database import BUSY_TIMEOUT_S, HistoryFile, check_beside, create_private, transaction
from hetstream.slurm_plugin.model.past_job import CLOCKS_DIFFER_S, PastJob, within_bounds

JOB_HISTORY, JOB_HISTORY_USERS = "HETSTREAM_JOB_HISTORY", "HETSTREAM_JOB_HISTORY_USERS"
HISTORY_FILE, KEY_FILE = "job-history.sqlite", "job-history.key"
# A job of a year ago says little of one of today, and the last ten thousand say all that more of them would.
KEEP_S, KEEP_JOBS = 366 * 86400.0, 10_000
# Bytes; one has a few hundred.
_MOST_OF_RECORD = 1 << 20
# What records of older releases do not say of a job.
_NEWER_FIELDS = ("directory", "commands", "files")
# Marks the file as ours (pragma application_id): "hetj".
_APPLICATION_ID = 0x6865746A
_SCHEMA_VERSION = 1
_KEY_BYTES = 32


def history_directory(environ: Mapping[str, str]) -> Path:
    """Where the job history of this user is: what the site or the user says, else in the user's state directory."""
    pattern = setting(JOB_HISTORY, environ)
    if pattern:
        return for_user(pattern)
    state = environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "hetstream"


def keeps_plain_names(environ: Mapping[str, str]) -> bool:
    """Whether the site wants users' names as they are."""
    return site_value(JOB_HISTORY_USERS, environ) == "plain"


class JobHistory(HistoryFile):
    """The file, made where it does not exist.

    Args:
        directory: holds it and the key; made with mode 0700 where it does not exist.
        plain_names: keep names of users as they are.
        keep_s, keep_jobs: what is older, or more, goes when something is added.

    Attributes:
        is_read_only: nothing can be added: the file is somebody else's.
        num_unreadable: records that `jobs` last left out.

    Raises:
        HistoryError: it cannot be used, or is another program's.
    """

    def __init__(
        self, directory: Path, *, plain_names: bool = False, keep_s: float = KEEP_S, keep_jobs: int = KEEP_JOBS
    ) -> None:
        super().__init__(directory / HISTORY_FILE, "job history", f"Name another directory in {JOB_HISTORY}")
        self._keep_s, self._keep_jobs = keep_s, keep_jobs
        self._key: bytes | None = None
        self._plain_names = plain_names
        self.is_read_only = False
        self.num_unreadable = 0
        self._open(self._connect, self._prepare)

    def _connect(self) -> sqlite3.Connection:
        self.is_read_only = self.path.exists() and not os.access(self.path, os.W_OK, effective_ids=True)
        if self.is_read_only:
            check_beside(self.path, is_own=False)
            # Without its log beside it, nobody is writing: the file is whole, and read as it is.
            beside = "" if Path(f"{self.path}-wal").exists() else "&immutable=1"
            address = f"{self.path.absolute().as_uri()}?mode=ro{beside}"
            return sqlite3.connect(address, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_private(self.path)
        return sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)

    def _prepare(self) -> None:
        if not self.is_read_only:
            self._database.execute("pragma locking_mode=exclusive")
        new = self._is_new(_APPLICATION_ID, _SCHEMA_VERSION)
        if not self.is_read_only:
            self._database.execute("pragma journal_mode=wal")
        if new and not self.is_read_only:
            tables = "jobs (job text not null, ended_s real not null, record text not null, primary key (job, ended_s))"
            self._make(tables, _APPLICATION_ID, _SCHEMA_VERSION)
        if not self._plain_names:
            self._key = self._key_of_place()

    def kept_name(self, name: str) -> str:
        """What is kept for a user's name or a directory; "" where the key cannot be read: then it is not compared."""
        if self._plain_names or not name:
            return name
        digest = hmac.new(self._key, os.fsencode(name), hashlib.sha256) if self._key else None
        return digest.hexdigest()[:32] if digest else ""

    def add(self, jobs: Iterable[PastJob], now_s: float) -> int:
        """Keep jobs, and drop those that are too old or too many; returns how many were new.

        Args:
            jobs: whose features have the user's name and the directory; they are replaced by what is kept for them.
            now_s: in seconds since the epoch.

        Raises:
            HistoryError: it cannot be written.
        """
        if self.is_read_only:
            return 0
        with self._named():
            before = self._count()
            with transaction(self._database):
                for job in jobs:
                    self._add(job, now_s)
                added = self._count() - before
                # By a clock that is a year ahead, all that is kept would be too old.
                (newest_s,) = self._database.execute("select coalesce(max(ended_s), 0) from jobs").fetchone()
                oldest_s = min(now_s, newest_s) - self._keep_s
                self._database.execute("delete from jobs where ended_s < ?", (oldest_s,))
                self._database.execute(
                    "delete from jobs where rowid not in (select rowid from jobs order by ended_s desc, job limit ?)",
                    (self._keep_jobs,),
                )
        return added

    def _add(self, job: PastJob, now_s: float) -> None:
        """Keep one job, unless it is there; of a copy's date and the original's, the earlier counts.

        What was kept by an older release, or before the job's record was whole, is replaced by what says more of it.
        """
        features = msgspec.structs.replace(
            job.features, user=self.kept_name(job.features.user), directory=self.kept_name(job.features.directory)
        )
        is_ahead = job.ended_s > now_s + CLOCKS_DIFFER_S
        kept = msgspec.structs.replace(job, features=features, ended_s=0.0 if is_ahead else job.ended_s)
        row_s = now_s if is_ahead else job.ended_s
        found = self._database.execute(
            "select rowid, ended_s, cast(record as blob) from jobs where job = ?", (job.job,)
        ).fetchall()
        for rowid, found_s, text in found:
            other = _decoded(text)
            if other is None or _told_by(other) != _told_by(kept):
                continue
            says_more = any(getattr(features, name) and not getattr(other.features, name) for name in _NEWER_FIELDS)
            if not says_more and (is_ahead or found_s <= row_s):
                return
            if found_s <= row_s:
                row_s, kept = found_s, msgspec.structs.replace(kept, ended_s=other.ended_s)
            self._database.execute("delete from jobs where rowid = ?", (rowid,))
        text = msgspec.json.encode(kept).decode()
        self._database.execute("insert or ignore into jobs values (?, ?, ?)", (kept.job, row_s, text))

    def jobs(self, now_s: float = math.inf) -> list[PastJob]:
        """All that are kept, the oldest first. A damaged record is left out.

        Args:
            now_s: in seconds since the epoch. A later date, which older releases kept, counts as none.

        Raises:
            HistoryError: it cannot be read.
        """
        with self._named():
            # It may be another user's, who puts anything there: the newest count, and no record of megabytes.
            rows = self._database.execute(
                "select cast(case when length(record) <= ? then record else '' end as blob) from jobs "
                "order by ended_s desc, job limit ?",
                (_MOST_OF_RECORD, self._keep_jobs),
            ).fetchall()
        found = [job for (text,) in reversed(rows) if (job := _decoded(text)) is not None]
        self.num_unreadable = len(rows) - len(found)
        # Of a file of an older release, which kept every copy of a record.
        first: dict[tuple[object, ...], PastJob] = {}
        for job in found:
            is_ahead = job.ended_s > now_s + CLOCKS_DIFFER_S
            first.setdefault((job.job, *_told_by(job)), msgspec.structs.replace(job, ended_s=0.0) if is_ahead else job)
        bounded = (within_bounds(job) for job in first.values())
        return sorted((job for job in bounded if job is not None), key=lambda job: (job.ended_s, job.job))

    def _key_of_place(self) -> bytes | None:
        """The key for names, made where there is none: by one process, and whole or not at all.

        A part of one, which a crash has left, has named nobody yet: it is replaced.
        """
        path = self.path.parent / KEY_FILE
        found = _read_key(path)
        if found or found is None or self.is_read_only:
            return found
        with transaction(self._database):
            found = _read_key(path)
            if found == b"":
                found = secrets.token_bytes(_KEY_BYTES)
                with Directory.open(path.parent) as directory:
                    directory.write_whole(path.name, found)
        return found

    def _count(self) -> int:
        (num,) = self._database.execute("select count(*) from jobs").fetchone()
        return int(num)


def _told_by(job: PastJob) -> tuple[object, ...]:
    """What a job's record says of its run, in every release: not where a copy lies, nor when it was written."""
    features = job.features
    return (
        features.name, features.gpus, features.user, features.batch, job.trainer_cpus, job.steps_per_s, job.wait_share,
        job.data_worker_mb, job.limit_share, job.gradient_s, job.update_s, job.embedding_s,
    )  # fmt: skip


def _decoded(text: bytes) -> PastJob | None:
    """A record; None if it is damaged."""
    try:
        return typed_json.decode(text, PastJob)
    except msgspec.MsgspecError:
        return None


def _read_key(path: Path) -> bytes | None:
    """The key for names; empty if there is none that is whole, None if this user may not read it.

    Raises:
        OSError: others could have written it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        return None
    except FileNotFoundError:
        return b""
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_IMODE(status.st_mode) & 0o022 or status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(1, f"others can write to {path}, which holds the key for names", str(path))
        found = file.read(_KEY_BYTES)
    return found if len(found) == _KEY_BYTES else b""
