"""What the daemon remembers across its own death, in SQLite: the jobs' last reports, limits, promises and times, which
policy divides, and the last decisions. Called by `server.py`.

WAL mode: a process that is killed at any point leaves all of a change or nothing of it. It is written before a job has
its answer, so a job never knows more than the daemon's next life, and no report counts twice.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory
from hetstream.base.locks import HeldByAnother, hold_directory
from hetstream.base.text import count_words
from hetstream.hetjob.site.messages import DecisionTaken, ReportDemand
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.slurm_plugin.daemon.registry import Registered, Times
from hetstream.slurm_plugin.daemon.settings import PolicySettings, Promise, decode_settings
from hetstream.slurm_plugin.database import DatabaseFile, check_beside, create_private, make_place
from hetstream.slurm_plugin.errors import DaemonStateError, PolicyError

log = logging.getLogger(__name__)

STATE_FILE = "daemon.sqlite"
HISTORY_FILE = "history.sqlite"
_MAX_WAL_BYTES = 1 << 20
# SQLite keeps whatever is written, also in a column of another type, and infinite numbers.
_MOST_TIME_S = 1e12
_Number = Annotated[float, msgspec.Meta(ge=0, le=_MOST_TIME_S)]
_Limit = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_JobRow = tuple[str, str, Annotated[int, msgspec.Meta(ge=0)], _Number, _Number, _Limit | None, str]
_DecisionRow = tuple[_Number, str, str, _Limit | None, _Limit | None, str, int, str]
# Decisions that are kept, the latest ones: 200 bytes each.
MAX_DECISIONS = 20_000


class _StateFile(DatabaseFile):
    """What is remembered, for whoever reads it."""

    ERROR = DaemonStateError
    APPLICATION_ID = 0x68657464  # "hetd"
    AFRESH = "jobs report again by themselves"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / STATE_FILE, "the daemon's state", "Give another --state-dir")

    def _check(self) -> None:
        self._is_new()
        found = [str(row[0]) for row in self._database.execute("pragma integrity_check")]
        if found != ["ok"]:
            raise DaemonStateError(f"{self} is damaged: {'; '.join(found[:3])}. Move it away: {self.AFRESH}")

    def jobs(self) -> list[Registered]:
        """Return all jobs that are remembered.

        Raises:
            DaemonStateError: the file is damaged.
        """
        with self._named():
            rows = self._database.execute(
                "select user, report, sent_ns, seen_s, weight, max_workers, reason from jobs order by job"
            )
            jobs = []
            for row in rows:
                user, text, sent_ns, seen_s, weight, limit, reason = msgspec.convert(row, _JobRow)
                report = typed_json.decode(text, ReportDemand)
                jobs.append(Registered(user, report, sent_ns, seen_s, weight, limit, reason))
            return jobs

    def settings(self) -> PolicySettings:
        """Return which policy divides; the usual one where nobody has set any.

        Raises:
            DaemonStateError: the file is damaged, or names a policy that this release does not have.
        """
        with self._named():
            # A daemon of before had no such table.
            tables = {name for (name,) in self._database.execute("select name from sqlite_master")}
            row = self._database.execute("select value from settings").fetchone() if "settings" in tables else None
        try:
            return decode_settings(row[0]) if row else PolicySettings()
        except PolicyError as error:
            raise DaemonStateError(
                f"{self}: {error}. Start the release of hetstream that wrote it and set another policy, or move the "
                "file away"
            ) from error


class _LeftState(_StateFile):
    """What a daemon has left, or keeps now, read without becoming it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._open(self._connect, self._check)

    def _connect(self) -> sqlite3.Connection:
        self.is_there = self.path.exists()
        if not self.is_there:
            return sqlite3.connect(":memory:")
        check_beside(self.path, is_own=False)
        return sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)


class Store(_StateFile):
    """The file, for one daemon at a time.

    Args:
        directory: made with mode 0700 where it does not exist.

    Raises:
        DaemonStateError: another daemon has it, or the file is damaged or another program's.
        UnsafePlace: somebody else than root and this user could change what is there.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._has_said_damage = False
        with self._named():
            make_place(directory.absolute(), 0o700)  # root's link may lead to it, as with systemd's DynamicUser=
            with Directory.open_safe(directory) as opened:
                try:
                    self._lock = hold_directory(opened)
                except HeldByAnother as error:
                    raise DaemonStateError(
                        f"{directory} is in use by the daemon with process id {error}. Stop that one, or give another "
                        "--state-dir"
                    ) from error
        try:
            self._open(self._connect, self._prepare)
        except BaseException:
            os.close(self._lock)
            raise

    def _connect(self) -> sqlite3.Connection:
        create_private(self.path)
        return sqlite3.connect(self.path, isolation_level=None)

    def _prepare(self) -> None:
        self._check()
        # The log is not synced at every commit: what a power failure takes are reports that jobs repeat within seconds.
        self._database.execute("pragma journal_mode=wal")
        self._database.execute("pragma synchronous=normal")
        self._database.execute(f"pragma journal_size_limit={_MAX_WAL_BYTES}")
        self._make(
            "jobs (job text primary key, user text not null, report text not null, sent_ns integer not null, "
            "seen_s real not null, weight real not null, max_workers integer, reason text not null)",
            "promises (job text primary key, done_s real not null, due_s real not null, seen_s real not null)",
            "times (job text primary key, changed_s real, starved_s real)",
            "settings (only_row integer primary key check (only_row = 1), value text not null)",
            "decisions (number integer primary key autoincrement, time_s real not null, job text not null, "
            "user text not null, before integer, after integer, policy text not null, is_told integer not null, "
            "reason text not null)",
        )

    def promises(self) -> dict[str, Promise]:
        """Return what the jobs that are remembered have claimed of their remaining work.

        What can be no promise is said and left out, and those jobs begin anew. An older daemon has left none.

        Raises:
            DaemonStateError: the file is damaged.
        """
        with self._named():
            rows = self._database.execute(
                "select job, done_s, due_s, seen_s from promises where job in (select job from jobs) order by job"
            ).fetchall()
        found = {job: Promise(*numbers) for job, *numbers in rows}
        kept = {job: promise for job, promise in found.items() if promise.is_valid}
        if len(kept) < len(found):
            job = next(job for job in found if job not in kept)
            log.warning(
                "%s: of %s it is no promise that is kept there, and they begin anew: job=%.20r has %.80r",
                self.path, count_words(len(found) - len(kept), "job"), job, tuple(found[job]),
            )  # fmt: skip
        return kept

    def times(self) -> dict[str, Times]:
        """Since when the jobs that are remembered starve, or have what they have; what is no time is left out.

        Raises:
            DaemonStateError: the file is damaged.
        """
        with self._named():
            rows = self._database.execute(
                "select job, changed_s, starved_s from times where job in (select job from jobs) order by job"
            ).fetchall()
        found = {job: Times(*(value if _is_time(value) else None for value in values)) for job, *values in rows}
        if damaged := [job for job, *values in rows if tuple(values) != found[job]]:
            jobs = count_words(len(damaged), "job")
            log.warning("%s: of %s a time that is kept is none: job=%.20r", self.path, jobs, damaged[0])
        return found

    def save(
        self,
        jobs: Mapping[str, Registered | None],
        decisions: Iterable[DecisionTaken] = (),
        promises: Mapping[str, Promise] | None = None,
        times: Mapping[str, Times] | None = None,
    ) -> None:
        """Remember these jobs, their promises and times, forget those that are None, note decisions. All or nothing.

        Raises:
            DaemonStateError: it cannot be written.
        """
        with self._named(), self._changing():
            for name, job in jobs.items():
                for table in ("jobs", "promises", "times"):
                    self._database.execute(f"delete from {table} where job = ?", (name,))
                if job is not None:
                    report = msgspec.json.encode(job.report).decode()
                    row = (name, job.user, report, job.sent_ns, job.seen_s, job.weight, job.limit, job.reason)
                    self._database.execute("insert into jobs values (?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._database.executemany(
                "insert into promises values (?, ?, ?, ?)",
                [(job, *promise) for job, promise in (promises or {}).items() if jobs.get(job) is not None],
            )
            self._database.executemany(
                "insert into times values (?, ?, ?)",
                [(job, *kept) for job, kept in (times or {}).items() if jobs.get(job) is not None],
            )
            columns = DecisionTaken.__struct_fields__
            added = self._database.executemany(
                f"insert into decisions ({', '.join(columns)}) values (?, ?, ?, ?, ?, ?, ?, ?)",
                [tuple(getattr(decision, column) for column in columns) for decision in decisions],
            )
            if added.rowcount > 0:
                oldest = "(select max(number) from decisions) - ?"
                self._database.execute(f"delete from decisions where number <= {oldest}", (MAX_DECISIONS,))
            reach("daemon.before_commit")
        reach("daemon.after_commit")

    def decisions(self, users: Collection[str] | None, job: str, limit: int) -> tuple[DecisionTaken, ...]:
        """Return the latest decisions, the last one first. What can be no decision is said once and left out.

        Args:
            users: whose jobs; None for all.
            job: of this one; empty for all.
            limit: how many at most.

        Raises:
            DaemonStateError: the file is damaged.
        """
        where, values = ["1"], list[str | int]()
        if users is not None:
            where.append(f"user in ({', '.join('?' * len(users))})")
            values += sorted(users)
        if job:
            where.append("job = ?")
            values.append(job)
        text = (
            f"select {', '.join(DecisionTaken.__struct_fields__)} from decisions where {' and '.join(where)} "
            "order by number desc limit ?"
        )
        with self._named():
            rows = self._database.execute(text, [*values, limit]).fetchall()
        found = []
        for row in rows:
            try:
                time_s, job_id, by, before, after, policy, is_told, reason = msgspec.convert(row, _DecisionRow)
            except msgspec.ValidationError as error:
                if not self._has_said_damage:
                    self._has_said_damage = True
                    log.warning("%s: a decision that is kept there is none, and is not shown: %s", self.path, error)
            else:
                found.append(DecisionTaken(time_s, job_id, by, before, after, policy, bool(is_told), reason))
        return tuple(found)

    def save_settings(self, settings: PolicySettings) -> None:
        """Remember which policy divides.

        Raises:
            DaemonStateError: it cannot be written.
        """
        with self._named(), self._changing():
            value = msgspec.json.encode(settings).decode()
            self._database.execute("insert or replace into settings values (1, ?)", (value,))

    def close(self) -> None:
        """Let go of the directory."""
        super().close()
        os.close(self._lock)


def remembered_jobs(directory: Path) -> list[Registered]:
    """Return what a daemon with this directory remembers, without becoming it; nothing if there never was one.

    Raises:
        DaemonStateError: it cannot be read.
    """
    with _LeftState(directory) as state:
        return state.jobs() if state.is_there else []


def remembered_settings(directory: Path) -> PolicySettings:
    """Return which policy a daemon with this directory has, without becoming it; the usual one if there never was one.

    Raises:
        DaemonStateError: it cannot be read.
    """
    with _LeftState(directory) as state:
        return state.settings()


def _is_time(value: object) -> bool:
    return value is None or (isinstance(value, float) and 0 <= value <= _MOST_TIME_S)
