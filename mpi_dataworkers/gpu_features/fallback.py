"""Who computes a feature graph where the trainer's GPU cannot: data workers, until it can again. Used by `corun.py`.

`shortage.py` decides when the GPU is tried again; here the loader is told, and the user.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.features.cut_transform import DataWorkersPart
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.gpu_features.batch_stages import ComputedByDataWorkers, PackedByDataWorkers
from hetstream.mpi_dataworkers.gpu_features.shortage import Shortage, came_back, fell_short, next_try

_log = logging.getLogger(__name__)


class Fallback:
    """Of one graph.

    Args:
        graph: the whole one.

    Attributes:
        missing: why the GPU can never compute; "" where it can.
        now: seconds, never going back.
    """

    def __init__(self, graph: FeatureGraph) -> None:
        self.missing = ""
        self.now: Callable[[], float] = time.monotonic
        self._graph = graph
        self._shortage = Shortage()
        self._short_of = "", 0  # of a batch that had no memory: why, and of how many bytes; until that is carried out
        self._needed_bytes = 0
        self._has_said_so = False
        # Of loaders whose data workers compute the graph, because the GPU could not: the stage by which they do.
        self._stages: weakref.WeakKeyDictionary[Any, ComputedByDataWorkers] = weakref.WeakKeyDictionary()

    @property
    def is_away(self) -> bool:
        """Whether batches are not the GPU's now."""
        return bool(self.missing) or self._shortage.is_short

    def begin(self, loader: Iterable[Any]) -> None:
        """A loader is iterated from here on."""
        if self.is_away:
            self._leave_to_data_workers(loader, self.missing or "the GPU has no memory")
        else:
            self._take_back(loader)

    def note_shortage(self, reason: str, num_bytes: int) -> None:
        """A batch found no memory; `num_bytes` is 0 where it is not known how much it needs."""
        self._short_of = reason, num_bytes

    def look(self, loader: Iterable[Any], has_room: Callable[[int], bool]) -> None:
        """A batch had no room: data workers compute the next ones, or without such it is tried again.

        Where data workers compute the graph, they give it back when there is room.

        Args:
            loader: that is iterated.
            has_room: whether the GPU has memory for so many bytes.
        """
        reason, num_bytes = self._short_of
        self._short_of = "", 0
        if self.missing:
            return
        if reason and not self._shortage.is_short:
            if self._leave_to_data_workers(loader, reason):
                self._needed_bytes = num_bytes
                self._shortage = fell_short(self._shortage, self.now())
        elif next_try(self._shortage, self.now()).is_due:
            if not has_room(self._needed_bytes):
                self._shortage = fell_short(self._shortage, self.now())
                return
            self._shortage = came_back(self._shortage, self.now())
            self._take_back(loader)
            self._has_said_so = False
            _log.warning("hetstream: features: the GPU has memory again, and computes its part of the graph")

    def close(self) -> None:
        """Give loaders the stages that they had: who iterates them next wants other batches, or says so again."""
        for loader in [*self._stages]:
            with contextlib.suppress(HetstreamError):  # one that is closed, say, needs none
                self._take_back(loader)

    def _take_back(self, loader: Iterable[Any]) -> None:
        if not hasattr(loader, "set_batch_stage") or loader not in self._stages:
            return
        stage = self._stages.pop(loader)
        now = getattr(loader, "batch_stage", None)
        if now is stage:  # else the program has changed it
            loader.set_batch_stage(stage.before)

    def _leave_to_data_workers(self, loader: Iterable[Any], reason: str) -> bool:
        """Have data workers compute the graph from the next step on, and say so once; whether they will."""
        # A stage of the program's own would be gone.
        own = getattr(loader, "batch_stage", None)
        if own is not None and hasattr(loader, "set_batch_stage") and self._stages.get(loader) is own:
            return True
        if isinstance(own, ComputedByDataWorkers):  # of an older CoRun that was not closed
            own = own.before
        can = hasattr(loader, "set_batch_stage") and (
            own is None or isinstance(own, PackedByDataWorkers | DataWorkersPart)
        )
        if can:
            stage = ComputedByDataWorkers(self._graph, own)
            loader.set_batch_stage(stage)  # type: ignore[attr-defined]
            self._stages[loader] = stage
        if not self._has_said_so:
            who = "data workers compute the whole graph" if can else "computed by the trainer's CPU"
            _log.warning("hetstream: features: %s: %s", who, reason)
            self._has_said_so = True
        return can
