"""What user code sees in a data worker: the part of one of torch's worker processes."""

from __future__ import annotations

import contextlib
import inspect
import operator
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.ops.changes import change_between, state_of
from hetstream.mpi_dataworkers.ops.origins import Origins, PassSeeds
from hetstream.mpi_dataworkers.ops.pipeline import LARGEST_BASE_SEED, OwnGenerators, Pipeline, function_of, holders
from hetstream.mpi_dataworkers.order.sharding import derive_seed
from hetstream.mpi_dataworkers.wire.messages import WorkerSeeds

_numpy_seed: Any = torch_worker._generate_state
# Parts that are kept, of the passes that were entered last: two iterators of a loader may take turns.
_MOST_PASSES = 2
_NOTHING, _WHOLE = object(), object()
# What torch's worker processes begin with: their base seed, and origins of generators. Each pass has others, but for
# kept workers.
_Processes = tuple[int, ...]


@contextlib.contextmanager
def acting_as_data_worker() -> Iterator[None]:
    """Let the trainer enter a pipeline for one step, and be itself again."""
    before = torch_worker._worker_info
    try:
        yield
    finally:
        torch_worker._worker_info = before


@dataclass
class _Part:
    """One of torch's worker processes, as this process plays it.

    Attributes:
        info: what `get_worker_info()` gives.
        pipeline: what makes its steps.
        attributes: what `worker_init_fn` has set for it, by object and name; of the part that is played now they are
            the objects' own.
    """

    info: Any
    pipeline: Pipeline
    attributes: dict[tuple[int, Any], Any] = field(default_factory=dict)


class EnteredPipeline:
    """A pipeline in a process that plays the parts of torch's worker processes.

    `torch.utils.data.get_worker_info()` has an id below the loader's `num_workers`, the dataset that this process uses
    and torch's seed of that worker: the base seed that torch draws for the pass, plus the id. In a program that only
    knows torch the id is that of the worker process which makes the step there, and the steps' random numbers follow
    from what `worker_init_fn` makes of the generators for it; see `origins`. `hetstream.DataLoader` shows each process
    one id.

    `worker_init_fn` runs once for each base seed and id, with the generators seeded as torch seeds them: torch starts
    its workers anew for each pass, and with `persistent_workers` draws one base seed. Of an IterableDataset each shard
    plays the part of a worker, see `ops.iterable`.

    Attributes:
        has_workers: of the pipeline.

    Args:
        pipeline: as it was loaded in this process.
        number: of the data worker.
        is_torchs: in one of torch's own worker processes; see `_PrivateCollate`.
    """

    def __init__(self, pipeline: Pipeline, number: int, is_torchs: bool = False) -> None:
        self._number = number
        self.has_workers = pipeline.has_workers
        self._is_iterable = isinstance(pipeline.dataset, torch.utils.data.IterableDataset)
        self._loaded = pipeline.with_own_generators()
        self._collate_fn = pipeline.collate_fn if is_torchs else _PrivateCollate(pipeline.collate_fn)
        own = self._loaded.own_generators
        self._states = [] if own is None else own.states()
        self._attributes = _Attributes()
        self._parts: OrderedDict[_Processes, dict[int, _Part]] = OrderedDict()  # by id
        # What user code was shown last: to look it up for each step would cost more than a small sample.
        self._shown: _Part | None = None
        self._shown_for: tuple[_Processes, int] | None = None
        # The processes of the pass that was asked for last.
        self._pass: tuple[PassSeeds | None, _Processes] = None, ()

    def enter(self, seeds: PassSeeds, step: int, begins: Callable[[], None] | None = None) -> Pipeline:
        """Let user code see its part; what `worker_init_fn` raises passes through.

        Args:
            seeds: of the pass.
            step: that is to be made.
            begins: called before a new part, as its `worker_init_fn` is user code.

        Returns:
            The pipeline to run now.
        """
        processes, worker_id = wanted = self._part_of(seeds, step)
        if wanted != self._shown_for:
            self._attributes.leave(self._shown)
            self._shown = self._shown_for = None
            parts = self._parts.setdefault(processes, {})
            self._parts.move_to_end(processes)
            while len(self._parts) > _MOST_PASSES:
                self._parts.popitem(last=False)
            if worker_id not in parts:
                if begins is not None:
                    begins()
                parts[worker_id] = self._begin(seeds, worker_id)
            else:
                self._attributes.enter(parts[worker_id])
            self._shown, self._shown_for = parts[worker_id], wanted
        assert self._shown is not None
        torch_worker._worker_info = self._shown.info  # another pipeline may have been entered since
        return self._shown.pipeline

    @contextlib.contextmanager
    def in_trainer(self) -> Iterator[None]:
        """Play a part in the process of the program: globals and their generators are its own again afterwards."""
        own = self._loaded.own_generators or OwnGenerators()
        with own.kept():
            try:
                yield
            finally:
                self.rest()

    def rest(self) -> None:
        """Play no part: what `worker_init_fn` has set as a global is no other pipeline's."""
        self._attributes.leave(self._shown)
        self._attributes.rest()
        self._shown = self._shown_for = None

    def left_by_parts(self, seeds: PassSeeds) -> str:
        """What `worker_init_fn` does for one id and is still there for the next one, on one line; "" where that is
        nothing. Called before any step."""
        if self._loaded.worker_init_fn is None:
            return ""
        left = []
        for worker_id in range(min(2, self._loaded.num_workers)):
            self.enter(seeds, worker_id)
            self.rest()
            (self._loaded.own_generators or OwnGenerators()).restore(self._states)
            left.append(
                state_of(
                    {
                        **self._loaded.user_objects,
                        "worker_init_fn": self._loaded.worker_init_fn,
                        "os.environ": os.environ,
                    }
                )
            )
        return change_between(left[0], left[-1])

    def _part_of(self, seeds: PassSeeds, step: int) -> tuple[_Processes, int]:
        """Which of torch's worker processes, and the id of the one that makes the step."""
        workers = seeds.workers
        if self._pass[0] is not seeds:
            self._pass = seeds, (seeds.seed,) if workers is None else (workers.base_seed, *workers.generators)
        return self._pass[1], (self._number if workers is None else step) % self._loaded.num_workers

    def _begin(self, seeds: PassSeeds, worker_id: int) -> _Part:
        workers = seeds.workers
        base_seed = seeds.seed if workers is None else workers.base_seed
        loaded = self._loaded
        private = replace(loaded, collate_fn=self._collate_fn)
        begins = not self._is_iterable and loaded.worker_init_fn is not None
        if workers is None or not begins:
            info = enter_worker(loaded, base_seed, worker_id, begins)
            if begins:  # also those that worker_init_fn has made
                private = replace(private, own_generators=loaded.with_own_generators().own_generators)
            return _Part(info, private if workers is None else with_origins_of(private, workers))
        # Each of torch's worker processes begins with what the program has, and not with what another one has left.
        before = loaded.own_generators or OwnGenerators()
        before.restore(self._states)
        known = zip(before, before.digests(), _of_all(workers, len(before)), strict=True)
        unchanged = {id(generator): (digest, origin) for generator, digest, origin in known}
        with self._attributes.noted(loaded.dataset, loaded.worker_init_fn) as attributes:
            info = enter_worker(loaded, base_seed, worker_id, begins)
        after = loaded.with_own_generators().own_generators or OwnGenerators()
        own = []
        for generator, digest in zip(after, after.digests(), strict=True):
            # What worker_init_fn has left alone is the program's own, as the program had it.
            was, origin = unchanged.get(id(generator), (None, 0))
            own.append(origin if was == digest else digest)
        pipeline = replace(private, own_generators=after or None, origins=Origins.here(own))
        return _Part(info, pipeline, attributes)


def with_origins_of(pipeline: Pipeline, workers: WorkerSeeds) -> Pipeline:
    """A pipeline whose random numbers are those of torch's worker processes where no `worker_init_fn` runs."""
    own = _of_all(workers, len(pipeline.own_generators or ()))
    base = derive_seed(workers.base_seed)
    return replace(pipeline, origins=Origins(base, base, base, own))


def _of_all(workers: WorkerSeeds, num_generators: int) -> list[int]:
    """The origin of each generator that this process holds, from those of the program."""
    if len(workers.generators) == num_generators:
        return workers.generators
    # Pickling has left some out, or made others: which is which nobody knows.
    return [derive_seed(num_generators, *workers.generators, place) for place in range(num_generators)]


def enter_worker(pipeline: Pipeline, base_seed: int, worker_id: int, begins: bool) -> Any:
    """Show user code a worker's id, seed and dataset; when it begins, seed as torch does and run `worker_init_fn`.

    Returns:
        What `get_worker_info()` gives.
    """
    base_seed &= LARGEST_BASE_SEED
    seed = base_seed + worker_id
    info = torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id, num_workers=pipeline.num_workers, seed=seed, dataset=pipeline.dataset
    )
    if begins and pipeline.worker_init_fn is not None:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        np.random.seed(_numpy_seed(base_seed, worker_id))
        pipeline.worker_init_fn(worker_id)
    return info


class _Attributes:
    """What `worker_init_fn` sets for each part anew, in the dataset, in what that holds, and as a global.

    `info.dataset.seed = info.seed` belongs to one of torch's worker processes; here several share the dataset.
    """

    def __init__(self) -> None:
        self._holders: dict[int, Any] = {}
        self._before: dict[tuple[int, Any], Any] = {}  # what stood there before any part began

    @contextlib.contextmanager
    def noted(self, dataset: Any, worker_init_fn: Any) -> Iterator[dict[tuple[int, Any], Any]]:
        """Run `worker_init_fn` where no part is played; gives what it has set when it is over."""
        self._put(self._before)
        its_call = inspect.getattr_static(type(worker_init_fn), "__call__", None)
        function = function_of(worker_init_fn) or function_of(its_call)
        its_globals = [] if function is None else [function.__globals__]  # `global` in it is no other worker's
        before = [(holder, _held_in(holder)) for holder in [*holders(dataset), *its_globals]]
        found: dict[tuple[int, Any], Any] = {}
        yield found
        for holder, values in before:
            now = _held_in(holder)
            for name in {*values, *now}:
                was, value = values.get(name, _NOTHING), now.get(name, _NOTHING)
                if not _is_same(was, value):
                    place = id(holder), name
                    found[place] = value
                    self._holders[id(holder)] = holder
                    self._before.setdefault(place, was)

    def leave(self, part: _Part | None) -> None:
        """Another part is about to be played: keep what samples have made of this one's attributes."""
        if part is not None:
            for number, name in part.attributes:
                part.attributes[number, name] = _held_in(self._holders[number]).get(name, _NOTHING)

    def enter(self, part: _Part) -> None:
        """Play a part that has begun. What other parts have set is not its own, which may be what was there before."""
        self._put(self._before)
        self._put(part.attributes)

    def rest(self) -> None:
        """Play none."""
        self._put(self._before)

    def _put(self, attributes: dict[tuple[int, Any], Any]) -> None:
        for (number, name), value in attributes.items():
            holder = self._holders[number]
            if isinstance(holder, list):
                holder[:] = value
            elif value is _NOTHING:
                holder.pop(name, None)
            else:
                holder[name] = value


def _held_in(holder: dict[Any, Any] | list[Any]) -> dict[Any, Any]:
    """What stands where; a list as a whole."""
    return dict(holder) if isinstance(holder, dict) else {_WHOLE: tuple(holder)}


def _is_same(was: Any, value: Any) -> bool:
    if isinstance(was, tuple) and isinstance(value, tuple):
        return len(was) == len(value) and all(map(operator.is_, was, value))
    return was is value


@dataclass(frozen=True)
class _PrivateCollate:
    """A collate function that does not see `get_worker_info()`.

    Where torch sees it, `default_collate` puts each batch into a new shared-memory segment, for a parent process that
    a data worker does not have; that costs several times what collating into private memory does.
    """

    collate_fn: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            return self.collate_fn(samples)
        finally:
            torch_worker._worker_info = info
