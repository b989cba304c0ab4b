"""The site's file of quotas: checked at the start, read again when it changes, and the last good one kept."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.errors import QuotaError
from hetstream.slurm_plugin.packing.quota import Quotas, QuotaSite, read_quotas

_log = logging.getLogger(__name__)
# More is no list of tenants.
_MOST_BYTES = 1 << 20


class QuotaFile:
    """A file that an administrator may write anew at any time.

    Args:
        path: of it.
        opportunistic: partitions that no quota can name.
        accounts: of a cluster; None where it has no accounting.
    """

    def __init__(
        self,
        path: Path,
        opportunistic: Collection[str],
        accounts: Callable[[Snapshot], Collection[str] | None],
    ) -> None:
        self._path, self._opportunistic, self._accounts = path, frozenset(opportunistic), accounts
        self._text: bytes | None = None
        self._quotas = Quotas()
        self._problem = ""

    def first(self, snapshot: Snapshot) -> Quotas:
        """Read it.

        Raises:
            QuotaError: it cannot be read, or cannot be kept in this cluster.
        """
        text = self._read()
        self._quotas, self._text = self._checked(text, snapshot), text
        return self._quotas

    def now(self, snapshot: Snapshot) -> Quotas:
        """The quotas that hold: those of the file, or the last good ones, which is said once."""
        try:
            text = self._read()
            if text != self._text:
                self._quotas = self._checked(text, snapshot)
                self._text = text
                _log.info("quotas of %s hold from now on", self._path)
            self._problem = ""
        except QuotaError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.warning("the quotas before hold further: %s", error)
        return self._quotas

    def _read(self) -> bytes:
        try:
            # A pipe or a device has no end.
            with open(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise QuotaError(f"{self._path}: the quotas cannot be read: it is no ordinary file")
                text = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise QuotaError(f"{self._path}: the quotas cannot be read: {error.strerror}") from error
        if len(text) > _MOST_BYTES:
            raise QuotaError(f"{self._path}: more than {_MOST_BYTES:,} bytes are no table of quotas")
        return text

    def _checked(self, text: bytes, snapshot: Snapshot) -> Quotas:
        try:
            accounts = self._accounts(snapshot)
        except SlurmCommandError as error:
            raise QuotaError(f"{self._path}: which accounts there are cannot be found out: {error}") from error
        return read_quotas(str(self._path), text, quota_site(snapshot, self._opportunistic, accounts))


def quota_site(snapshot: Snapshot, opportunistic: Collection[str], accounts: Collection[str] | None) -> QuotaSite:
    """What a cluster has, for `read_quotas`."""

    def num_gpus(partitions: Collection[str]) -> int:
        return sum(node.gpus for node in snapshot.nodes if not set(partitions).isdisjoint(node.partitions))

    exclusive = [partition.name for partition in snapshot.partitions if partition.is_exclusive]
    names = [partition.name for partition in snapshot.partitions]
    return QuotaSite(num_gpus, names, opportunistic, exclusive, accounts)
