"""Samples of a cluster over time, in a small SQLite file. Written and read by the report, the page and the exporter.

One row for each sample, about 500 bytes; what is older than `KEEP_S` goes when a new one comes. Several processes may
use one file. It holds no names of users or jobs.
"""

from __future__ import annotations

import contextlib
import shlex
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from hetstream.base import typed_json
from hetstream.slurm_plugin.database import ForeignDatabase, OtherSchema, create_private, is_new
from hetstream.slurm_plugin.errors import HistoryError
from hetstream.slurm_plugin.insight.observation import Sample

KEEP_S = 92 * 86400.0
# Marks the file as ours (pragma application_id): "hets".
_APPLICATION_ID = 0x68657473
_SCHEMA_VERSION = 1
_BUSY_TIMEOUT_S = 30.0


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
        try:
            new = is_new(self._database, _APPLICATION_ID, _SCHEMA_VERSION)
        except ForeignDatabase as exc:
            raise HistoryError(f"history {self.path} is another program's. Give another file.") from exc
        except OtherSchema as exc:
            raise HistoryError(
                f"history {self.path} {exc}: use the release of hetstream that wrote it, or give another file "
                "(docs/upgrade.md)"
            ) from exc
        if new:
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
