"""Beside a checkpoint writer's way to disk: replicas are sent and kept as the trainer wants, which may change."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.checkpoint.memory.store_files import StoreFiles
from hetstream.checkpoint.replica.peers import read_order
from hetstream.checkpoint.replica.service import ReplicaService, Report

_log = logging.getLogger(__name__)

_RETRY_S = 5.0


class ReplicaServing:
    """For one store; plugged into its checkpoint writer as its `Companion`.

    Args:
        files: of the store.
        directory: of the checkpoints.
        report: told the generation that the peer keeps now, or why it does not.
    """

    def __init__(self, files: StoreFiles, directory: Path, report: Report) -> None:
        self._files, self._directory, self._report = files, directory, report
        self._service: ReplicaService | None = None
        self._not_before_s = 0.0

    def advance(self) -> None:
        """Begin, go on or end to send and to keep replicas, as the trainer wants. It never waits for a peer."""
        order = read_order(self._files.replica_order)
        if self._service and self._service.order == order:
            self._service.wake()
            return
        self.close()
        if order is None or time.monotonic() < self._not_before_s:
            return
        try:
            self._service = ReplicaService(self._files, self._directory, order, self._report)
        except (OSError, HetstreamError) as error:
            self._not_before_s = time.monotonic() + _RETRY_S
            _log.warning(
                "rank=%d directory=%s: no replicas, next try in %g s: %s", order.rank, self._directory, _RETRY_S, error
            )
            self._report(None, str(error))

    def close(self) -> None:
        """End all transfers."""
        service, self._service = self._service, None
        if service:
            service.close()
