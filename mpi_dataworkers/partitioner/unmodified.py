"""Partitions a program that does not know hetstream: `hetstream run --offload=auto python train.py`.

Called by the start-up hook for each loader that data workers serve. It sees in which module's forward the batches of a
loader arrive, and partitions that module in the third step; then it is out of the way.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hetstream.mpi_dataworkers.loader.connection import LoaderConnection
from hetstream.mpi_dataworkers.partitioner.analysis import Findings, Offload, analyse
from hetstream.mpi_dataworkers.partitioner.cut import Rates
from hetstream.mpi_dataworkers.partitioner.leaves import leaves_of, same_bytes
from hetstream.mpi_dataworkers.partitioner.partition import NUM_CHECKED, Partition, check_module, release, with_wire
from hetstream.mpi_dataworkers.partitioner.unguarded_constants import NotCaptured
from hetstream.mpi_dataworkers.process.config import explain_file_from_environment

_log = logging.getLogger(__name__)
_pytree: Any = pytree
_Module: Any = torch.nn.Module
# The step in which a forward is captured: those before show how long a step takes, and where batches arrive.
_STEP_OF_CAPTURE = 3
# Steps after which a loader is given up whose batches arrive in no forward.
_MOST_STEPS = 50
# Batches that a program may have fetched ahead.
_MOST_AHEAD = 4


class _Calls:
    """Stands in `torch.nn.Module.__call__` as long as some loader is followed."""

    def __init__(self) -> None:
        self.followers: list[BatchFollower] = []
        self._own: Any = None
        self._depth = 0

    def add(self, follower: BatchFollower) -> None:
        """Have it told of the outermost calls."""
        self.followers.append(follower)
        if self._own is None:
            self._own = own = _Module.__call__

            @functools.wraps(own)
            def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self._called(own, module, args, kwargs)

            _Module.__call__ = __call__

    def drop(self, follower: BatchFollower) -> None:
        """Tell it no more."""
        self.followers.remove(follower)
        if not self.followers:
            _Module.__call__, self._own = self._own, None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Have modules called as torch does it: a compiler takes what stands there for a part of the model."""
        stands_in, _Module.__call__ = _Module.__call__, self._own
        try:
            yield
        finally:
            _Module.__call__ = stands_in

    def _called(self, own: Any, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or self._depth or not module.training:
            return own(module, *args, **kwargs)
        is_wrapper = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        if is_wrapper or not any(True for _ in module.parameters()):
            return own(module, *args, **kwargs)
        tensors = [value for value in _pytree.tree_leaves((args, kwargs)) if type(value) is torch.Tensor]
        follower = next((follower for follower in self.followers if follower.gave(tensors)), None)
        self._depth += 1
        try:
            if follower is not None:
                follower.called(module, args, kwargs)
            return own(module, *args, **kwargs)
        finally:
            self._depth -= 1


_calls = _Calls()
_followed: weakref.WeakSet[LoaderConnection] = weakref.WeakSet()


class BatchFollower:
    """Follows the batches of one loader to the forward in which they arrive.

    Args:
        connection: the loader's.
        offload: what may move.
        num_processes: of the loader in process, which make batches where there are no data workers.

    Attributes:
        partition: what became of it; None as long as it is followed.
    """

    def __init__(self, connection: LoaderConnection, offload: Offload, num_processes: int) -> None:
        self.partition: Partition | None = None
        self._connection = connection
        self._offload = offload
        self._num_processes = num_processes
        self._batches: deque[list[Any]] = deque(maxlen=_MOST_AHEAD)
        self._steps = 0
        self._seen: list[tuple[torch.nn.Module, float, float]] = []  # in which module, when, waits until then
        connection.on_extra = self._deliver
        _calls.add(self)

    def gave(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether one of the tensors is of a batch of this loader, not only the last: programs fetch
        some ahead.
        """
        return any(_is_of(tensors, batch) for batch in self._batches)

    def _deliver(self, _step: int, batch: Any, _extra: Sequence[torch.Tensor]) -> Any:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            self._end("its batches arrive in no model's forward as the loader gives them")
            return batch
        self._batches.appendleft(leaves_of(batch))
        return batch

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost module is about to be called with leaves of the loader's batch."""
        if any(other is not module for other, _, _ in self._seen):
            self._end("its batches go to several models")
            return
        self._seen.append((module, time.monotonic(), self._connection.statistics.counters.wait_s))
        if len(self._seen) < _STEP_OF_CAPTURE:
            return
        release(module)
        tensors = [value for value in _pytree.tree_leaves((args, kwargs)) if type(value) is torch.Tensor]
        batch = next(batch for batch in self._batches if _is_of(tensors, batch))
        try:
            check_module(module)
            with _calls.paused():
                analysis = analyse(module, args, kwargs, batch, self._offload)
        except NotCaptured as reason:
            self._end(f"nothing of {type(module).__name__} moves: {reason}")
            return
        self._leave()
        rates = self._rates(batch)
        if (path := explain_file_from_environment()) is not None:
            measured = analysis.graph, analysis.verdicts, analysis.costs, rates
            _explain(path, Findings(type(module).__name__, "", *measured, analysis.why_not_all))
        self.partition = Partition(module, self._connection, self._offload, follows_rates=True)
        self.partition.begin(analysis, len(batch), rates, NUM_CHECKED)

    def _rates(self, batch: Sequence[Any]) -> Rates:
        client = self._connection.client
        pairs = zip(self._seen, self._seen[1:], strict=False)
        steps = [after[1] - before[1] - (after[2] - before[2]) for before, after in pairs]
        num_processes = client.num_data_workers if client is not None else self._num_processes
        batch_bytes = sum(leaf.nbytes for leaf in batch if isinstance(leaf, torch.Tensor))
        return with_wire(Rates(max(1e-6, min(steps)), 0.0, num_processes, batch_bytes=batch_bytes), self._connection)

    def _leave(self) -> None:
        self._batches.clear()
        self._connection.on_extra = None
        _calls.drop(self)

    def _end(self, reason: str) -> None:
        self._leave()
        if (path := explain_file_from_environment()) is not None:
            _explain(path, Findings("the model", reason))
        _log.warning("hetstream: a DataLoader's forward stays where it is: %s", reason)


def _is_of(tensors: Sequence[torch.Tensor], batch: Sequence[Any]) -> bool:
    """Whether one of the tensors is a leaf of a batch, or has its bytes, as on another device."""
    leaves = [leaf for leaf in batch if isinstance(leaf, torch.Tensor) and leaf.numel()]
    if {*map(id, tensors)} & {*map(id, leaves)}:
        return True
    return any(same_bytes(tensor, leaf) for tensor in tensors for leaf in leaves)


def _explain(path: Path, findings: Findings) -> None:
    """Write what was found, and end the program: it was run for that alone."""
    path.write_text(findings.to_json())
    raise SystemExit(0)


def follow(connection: LoaderConnection | None, offload: str, num_processes: int) -> None:
    """Follow a loader's batches, once.

    Args:
        connection: the loader's; None where it stays local, which has been said. One for which the program itself has
            called `partition` is the program's.
        offload: `auto` or `all`.
        num_processes: worker processes of the loader.
    """
    if connection is None or connection.has_features:
        return
    if connection.on_extra is None and connection not in _followed:
        _followed.add(connection)
        BatchFollower(connection, Offload(offload), num_processes)
