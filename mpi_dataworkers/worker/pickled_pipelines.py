"""Where a data worker process finds a pickled pipeline: on this host, or at the dispatcher."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from hetstream.mpi_dataworkers.ops.pickled_pipeline import PickledPipeline
from hetstream.mpi_dataworkers.wire.messages import FetchPipeline, ProvidePipeline
from hetstream.mpi_dataworkers.worker.connection import DispatcherConnection
from hetstream.mpi_dataworkers.worker.exchange import Exchange
from hetstream.mpi_dataworkers.worker.leases import LeaseGone

_log = logging.getLogger(__name__)

# Who waits for a pickled pipeline looks this often whether it is still to have it.
_LOOK_AGAIN_S = 0.5


class PickledPipelines:
    """Pickled pipelines for one process. The main thread finds them; those that it asks for come to the control thread.

    Args:
        exchange: pickled pipelines that this host has; None for a process that shares them with no other.
        directory: where large pickled pipelines lie, the service's `pipelines_dir`.
        dispatcher: has those that this host lacks.
    """

    def __init__(self, exchange: Exchange | None, directory: Path, dispatcher: DispatcherConnection) -> None:
        self._is_shared = exchange is not None
        self._exchange = exchange or Exchange(num_slots=0)
        self._directory, self._dispatcher = directory, dispatcher
        # Its lock guards all that follows.
        self._came = threading.Condition()
        self._messages: dict[str, ProvidePipeline] = {}
        self._asked_for: set[str] = set()  # on their way
        self._dropped: set[str] = set()  # used by no loader

    def close(self) -> None:
        """Give back what belongs to this process alone."""
        if not self._is_shared:
            self._exchange.close()

    # --- of the main thread -----------------------------------------------------------------------------------------

    def find(self, pipeline_id: str, is_wanted: Callable[[], bool]) -> PickledPipeline:
        """A pickled pipeline, from bytes that this host has or that come from the dispatcher.

        Raises:
            LeaseGone: it is wanted no more.
            HandoverFailed: its bytes cannot be had.
        """
        found = self._exchange.find(pipeline_id)
        if found is None:
            with self._exchange.alone(lambda: not is_wanted()) as is_its_turn:
                if not is_wanted():
                    raise LeaseGone
                found = self._exchange.find(pipeline_id)
                if found is None:
                    came = self.fetch(pipeline_id, is_wanted)
                    found = self._exchange.keep(came, self._directory, shared=is_its_turn)
                    num_bytes = len(came.blob) + sum(came.contents.sizes)
                    _log.info("pipeline=%s fetched for this host: %d bytes", pipeline_id[:8], num_bytes)
        return found

    def fetch(self, pipeline_id: str, is_wanted: Callable[[], bool]) -> ProvidePipeline:
        """Ask the dispatcher for a pickled pipeline, once for each connection, and wait for it.

        Raises:
            LeaseGone: it is wanted no more.
        """
        with self._came:
            if pipeline_id not in self._asked_for and pipeline_id not in self._messages:
                self._asked_for.add(pipeline_id)
                self._dispatcher.tell(FetchPipeline(pipeline_id))
            while pipeline_id not in self._messages:
                self._came.wait(_LOOK_AGAIN_S)
                if not is_wanted():
                    raise LeaseGone
            return self._messages.pop(pipeline_id)

    @property
    def has_dropped(self) -> bool:
        """Whether `take_dropped` has something; asked without the lock, at each step: the next one comes soon."""
        return bool(self._dropped)

    def take_dropped(self) -> set[str]:
        """Pickled pipelines that no loader uses any more, since this was asked last."""
        with self._came:
            dropped, self._dropped = self._dropped, set()
        return dropped

    # --- of the control thread --------------------------------------------------------------------------------------

    def take(self, message: ProvidePipeline) -> None:
        """Give a pickled pipeline that came to the main thread."""
        with self._came:
            self._asked_for.discard(message.pipeline_id)
            self._messages[message.pipeline_id] = message
            self._came.notify_all()

    def drop(self, pipeline_id: str) -> None:
        """No loader uses a pickled pipeline any more."""
        with self._came:
            self._messages.pop(pipeline_id, None)
            self._dropped.add(pipeline_id)

    def ask_again(self) -> None:
        """Ask another incarnation of the dispatcher for what the last one was asked for."""
        with self._came:
            for pipeline_id in sorted(self._asked_for):
                self._dispatcher.tell(FetchPipeline(pipeline_id))
