"""Partitions a program that does not know hetstream: `hetstream run --offload=auto python train.py`.

Called by the start-up hook for each loader that data workers serve. It marks the batches of a loader, sees in which
module's forward they arrive, and partitions that module in the third step; then it is out of the way.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hetstream.mpi_dataworkers.config import explain_file_from_environment
from hetstream.mpi_dataworkers.loader.loader_connection import LoaderConnection
from hetstream.mpi_dataworkers.partitioner.analysis import analyse
from hetstream.mpi_dataworkers.partitioner.capture import NotCaptured
from hetstream.mpi_dataworkers.partitioner.classify import Offload
from hetstream.mpi_dataworkers.partitioner.cut import Rates
from hetstream.mpi_dataworkers.partitioner.findings import Findings
from hetstream.mpi_dataworkers.partitioner.forward import PartitionedForward, saving_nothing
from hetstream.mpi_dataworkers.partitioner.leaves import flatten_call, leaves_of
from hetstream.mpi_dataworkers.partitioner.modules import CHANGES_ITS_ARGUMENTS, check_hooks, check_module, release
from hetstream.mpi_dataworkers.partitioner.own_call import OwnCall
from hetstream.mpi_dataworkers.partitioner.partition import NUM_CHECKED, Partition
from hetstream.mpi_dataworkers.partitioner.provenance import Delivery, origin, whole
from hetstream.mpi_dataworkers.partitioner.side_effects import ModelState, is_plain, watch
from hetstream.mpi_dataworkers.partitioner.wire_rate import with_wire

_log = logging.getLogger(__name__)
_pytree: Any = pytree
_Module: Any = torch.nn.Module
# The step in which a forward is captured: those before show how long a step takes, and where batches arrive.
_STEP_OF_CAPTURE = 3
# A loader whose batches arrive in no forward for so many steps is followed no more.
_MOST_STEPS = 50


class _Calls:
    """Stands in `torch.nn.Module.__call__` as long as some loader is followed."""

    def __init__(self) -> None:
        self.followers: list[Follower] = []
        self._own: Any = None
        self._depth = 0

    def add(self, follower: Follower) -> None:
        """Have it told of the outermost calls."""
        self.followers.append(follower)
        if self._own is None:
            self._own = own = _Module.__call__

            @functools.wraps(own)
            def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self._called(own, module, args, kwargs)

            _Module.__call__ = __call__

    def drop(self, follower: Follower) -> None:
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
        is_wrapper = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        if self._depth or is_wrapper or not any(True for _ in module.parameters()):
            return own(module, *args, **kwargs)
        follower = self._follower_of(args, kwargs)
        if follower is None:
            return own(module, *args, **kwargs)
        self._depth += 1
        try:
            plain_ones = _pytree.tree_map(whole, (args, kwargs))  # what the forward reads, it alone reads
            call = OwnCall(functools.partial(own, module), (args, kwargs), plain_ones)
            return follower.called(call, module, args, kwargs)
        finally:
            self._depth -= 1

    def _follower_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Follower | None:
        deliveries = _deliveries(args, kwargs)
        return next((follower for follower in self.followers if any(map(follower.gave, deliveries))), None)


def _deliveries(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Delivery]:
    """The batches of which tensors are among arguments."""
    return [found[0] for value in _pytree.tree_leaves((args, kwargs)) if (found := origin(value)) is not None]


_calls = _Calls()
_followed: weakref.WeakSet[LoaderConnection] = weakref.WeakSet()


class Follower:
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
        self._read: set[int] = set()
        self._num_processes = num_processes
        self._num_leaves = 0
        self._batch_bytes = 0
        self._steps = 0
        self._seen: list[tuple[torch.nn.Module, float, float]] = []  # in which module, when, waits until then
        self._plain_values: dict[int, Any] | None = None  # among the arguments of the first call
        self._changing = frozenset[int]()
        connection.on_extra = self._deliver
        _calls.add(self)

    def gave(self, delivery: Delivery) -> bool:
        """Whether it is a batch of this loader. It need not be the last one: programs fetch some ahead."""
        return delivery.read is self._read

    def _deliver(self, _step: int, batch: Any, _extra: Sequence[torch.Tensor]) -> Any:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            self._end("its batches arrive in no model's forward as the loader gives them")
            return batch
        leaves = leaves_of(batch)
        self._num_leaves = len(leaves)
        self._batch_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return Delivery(read=self._read, step=self._steps).tag(batch)

    def called(self, call: OwnCall, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An outermost module is called with leaves of the loader's batch."""
        if not module.training:
            return call()
        if any(other is not module for other, _, _ in self._seen):
            self._end("its batches go to several models")
            return call()
        deliveries = _deliveries(args, kwargs)
        latest = max(filter(self.gave, deliveries), key=lambda delivery: delivery.step)
        takes_others = any(delivery is not latest for delivery in deliveries)
        if takes_others and isinstance(vars(module).get("forward"), PartitionedForward):
            self._end(f"what moves of {type(module).__name__} is of another loader, whose batches it takes as well")
            return call()
        self._seen.append((module, time.monotonic(), self._connection.statistics.counters.wait_s))
        self._note_plain_values(args, kwargs)
        if len(self._seen) < _STEP_OF_CAPTURE:
            return call()
        release(module)
        state = ModelState(module, [])
        result, effects = watch(call)
        change = state.change()
        try:
            check_hooks(state)
            if change:
                raise NotCaptured(f"the forward changes the model beside its tensors: {change}")
            if call.has_changed:
                raise NotCaptured(CHANGES_ITS_ARGUMENTS)
            check_module(module)
            with saving_nothing(), _calls.paused():
                analysis = analyse(module, args, kwargs, effects, self._offload, latest, self._changing)
        except NotCaptured as reason:
            self._end(f"nothing of {type(module).__name__} moves: {reason}")
            return result
        self._leave()
        if (path := explain_file_from_environment()) is not None:
            name = type(module).__name__
            why_not_all = analysis.why_not_all  # the rest of the forward may read all of them
            read = tuple(leaf for leaf, form in analysis.leaves.items() if why_not_all or form.number in self._read)
            measured = analysis.graph, analysis.verdicts, analysis.costs, self._rates()
            found = Findings(name, "", *measured, read, why_not_all)
            _explain(path, found)
        self.partition = Partition(module, self._connection, self._offload, follows_rates=True)
        self.partition.begin(analysis, self._num_leaves, self._rates(), NUM_CHECKED, self._read)
        return result

    def _note_plain_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note which arguments that are no tensors are others than in the first call."""
        leaves = enumerate(flatten_call(args, kwargs)[0])
        now = {place: value for place, value in leaves if not isinstance(value, torch.Tensor) and is_plain(value)}
        if self._plain_values is None:
            self._plain_values = now
        first = self._plain_values
        self._changing |= {place for place, value in now.items() if place in first and first[place] != value}

    def _rates(self) -> Rates:
        client = self._connection.client
        pairs = zip(self._seen, self._seen[1:], strict=False)
        steps = [after[1] - before[1] - (after[2] - before[2]) for before, after in pairs]
        num_processes = client.num_data_workers if client is not None else self._num_processes
        rates = Rates(max(1e-6, min(steps)), 0.0, num_processes, batch_bytes=self._batch_bytes)
        return with_wire(rates, self._connection)

    def _leave(self) -> None:
        self._connection.on_extra = None
        _calls.drop(self)

    def _end(self, reason: str) -> None:
        self._leave()
        if (path := explain_file_from_environment()) is not None:
            _explain(path, Findings("the model", reason))
        _log.warning("hetstream: a DataLoader's forward stays where it is: %s", reason)


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
        Follower(connection, Offload(offload), num_processes)
