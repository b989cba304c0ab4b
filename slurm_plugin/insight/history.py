"""Samples of a cluster over time, in a small SQLite file. Written and read by the report, the page and the exporter.

One row for each sample, about 500 bytes; what is older than `KEEP_S` goes when a new one comes. Several processes may
use one file. It holds no names of users or jobs.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.slurm_plugin.database import BUSY_TIMEOUT_S, HistoryFile, create_private, transaction
from hetstream.slurm_plugin.insight.observation import Sample

KEEP_S = 92 * 86400.0
# Marks the file as ours (pragma application_id): "hets".
_APPLICATION_ID = 0x68657473
_SCHEMA_VERSION = 1


class History(HistoryFile):
    """The file, made with mode 0600 where it does not exist.

    Args:
        path: in a directory that exists.

    Raises:
        HistoryError: it cannot be used, or is another program's.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "history", "Give another file")
        self._open(self._connect, self._prepare)

    def _connect(self) -> sqlite3.Connection:
        create_private(self.path)
        return sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)

    def _prepare(self) -> None:
        if self._is_new(_APPLICATION_ID, _SCHEMA_VERSION):
            tables = "samples (taken_s real primary key, sample text not null)"
            self._make(tables, _APPLICATION_ID, _SCHEMA_VERSION)

    def append(self, sample: Sample) -> None:
        """Keep a sample, and drop those that are too old.

        Raises:
            HistoryError: it cannot be written.
        """
        with self._named(), transaction(self._database):  # of both, so that they are waited for once
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
