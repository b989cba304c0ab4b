"""From sample indices to a batch: the one function that data workers, the loader in process and its fallback all run.

A batch depends on the pipeline, the indices and the seeds, and on nothing else: before each sample the generators of
Python's `random`, of NumPy and of torch are seeded (see `sharding.SampleSeeds`).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from mpi_dataworkers.errors import PipelineError
from mpi_dataworkers.sharding import Indices

# The dispatcher's journal is SQLite, which takes blobs up to 10**9 bytes.
_MAX_BLOB_BYTES = 900_000_000


class SampleError(Exception):
    """User code raised for one sample; the cause is chained. Internal: it carries the index to where it is reported."""

    def __init__(self, sample_index: int) -> None:
        super().__init__(sample_index)
        self.sample_index = sample_index

    def user_error(self) -> BaseException:
        """The exception that user code raised."""
        if isinstance(self.__cause__, StopIteration):
            # As itself it would end the training loop as if the data had ended (compare PEP 479).
            return RuntimeError(f"the dataset raised {self.__cause__!r}")
        return self.__cause__ or self


@dataclass(frozen=True)
class Pipeline:
    """What a data worker needs to make batches.

    Attributes:
        dataset: map-style dataset.
        collate_fn: turns a list of samples (or, unbatched, one sample) into a batch.
        num_samples: length of the dataset where it was defined, checked where it is used; -1 where it has none.
        worker_init_fn: called once in each data worker process with its number.
        batched: whether a step is a list of samples.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    num_samples: int
    worker_init_fn: Callable[[int], None] | None = None
    batched: bool = True

    def make_batch(self, indices: Indices, seeds: Sequence[int]) -> Any:
        """Read, transform and collate the samples of one step.

        A dataset with `read_samples(indices)` and `transform` (hetstream's sources) is read once for the batch and
        transformed with a seed for each sample; one with `__getitems__` has one seed for the batch.

        Args:
            indices: int64 array; one index when not batched.
            seeds: 64-bit seed of each sample.

        Raises:
            SampleError: user code raised; the cause is its exception, the index -1 when it was not in one sample.
        """
        wanted = indices.tolist()
        if not self.batched:
            return self._collate(self._read(wanted[0], seeds[0]))
        if callable(getattr(self.dataset, "read_samples", None)):
            samples = self._read_together(self.dataset.read_samples, wanted, seeds[0])
            if self.dataset.transform is not None:
                samples = [self._transform(*one) for one in zip(wanted, samples, seeds, strict=True)]
            return self._collate(samples)
        if callable(getattr(self.dataset, "__getitems__", None)):
            return self._collate(self._read_together(self.dataset.__getitems__, wanted, seeds[0]))
        return self._collate([self._read(index, seed) for index, seed in zip(wanted, seeds, strict=True)])

    def _read_together(self, read: Callable[[list[int]], list[Any]], wanted: list[int], seed: int) -> Any:
        # One seed for the batch: the dataset does not say where one sample's random numbers begin.
        seed_generators(seed)
        try:
            return read(wanted)
        except Exception as error:
            raise SampleError(-1) from error

    def _transform(self, index: int, raw: Any, seed: int) -> Any:
        seed_generators(seed)
        try:
            return self.dataset.transform(raw)
        except Exception as error:
            raise SampleError(index) from error

    def _read(self, index: int, seed: int) -> Any:
        seed_generators(seed)
        try:
            return self.dataset[index]
        except Exception as error:
            raise SampleError(index) from error

    def _collate(self, samples: Any) -> Any:
        try:
            return self.collate_fn(samples)
        except Exception as error:
            raise SampleError(-1) from error

    def description(self) -> dict[str, str]:
        """What makes two pipelines the same, in words that an error can show."""
        return {
            "dataset": _name_of(self.dataset),
            "length": str(self.num_samples),
            "collate_fn": _name_of(self.collate_fn),
            "batched": str(self.batched),
        }


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch's CPU."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Give the trainer its own random state back after a batch was made in its process."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _name_of(value: Any) -> str:
    named = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    module = getattr(named, "__module__", "")
    return f"{module}.{getattr(named, '__qualname__', repr(named))}".removeprefix("builtins.")


# --- definition: the pipeline as it travels -------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """A pipeline in pickled form, with the import paths it needs.

    Attributes:
        definition_id: digest of the bytes.
        sys_path: directories that the trainer imports from and a data worker may not.
        working_dir: the trainer's, where relative paths in the dataset start.
        blob: the bytes, for `load_pipeline`.
    """

    definition_id: str
    sys_path: list[str]
    working_dir: str
    blob: bytes


def define(pipeline: Pipeline) -> Definition:
    """Pickle a pipeline. Classes and functions of `__main__` travel by value, those of modules by name.

    Raises:
        PipelineError: something in it cannot be pickled; the message names the object.
    """
    try:
        blob = cloudpickle.dumps(pipeline)
    except Exception as error:  # pickling runs user code (__reduce__, __getstate__): any exception may come
        where = find_unpicklable(pipeline)
        raise PipelineError(
            f"the dataset cannot be sent to data workers: {where} cannot be pickled ({error}). Open files, locks and "
            "connections belong into __getitem__ or worker_init_fn, or leave them out in __getstate__."
        ) from error
    if len(blob) > _MAX_BLOB_BYTES:
        raise PipelineError(
            f"the dataset is {len(blob)} bytes in pickled form, more than the {_MAX_BLOB_BYTES} that can be sent to "
            "data workers. Have it read its data from files."
        )
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    script_dir = [os.path.dirname(os.path.abspath(main_file))] if main_file else []
    inherited = (os.path.abspath(entry or os.getcwd()) for entry in sys.path)
    outside = (entry for entry in inherited if not entry.startswith((sys.prefix, sys.base_prefix)))
    paths = list(dict.fromkeys([*script_dir, *outside]))
    return Definition(hashlib.blake2b(blob, digest_size=16).hexdigest(), paths, os.getcwd(), blob)


def load_pipeline(definition: Definition) -> Pipeline:
    """Rebuild a pipeline in a data worker.

    Raises:
        PipelineError: it cannot be rebuilt here, or its dataset has another length here.
    """
    sys.path.extend(entry for entry in definition.sys_path if entry not in sys.path)
    with contextlib.suppress(OSError):  # not on this host: a relative path then fails with its own error
        os.chdir(definition.working_dir)
    try:
        pipeline: Pipeline = pickle.loads(definition.blob)
        here = len(pipeline.dataset) if pipeline.num_samples >= 0 else -1
    except Exception as error:  # unpickling runs user code: any exception may come, and all of them are reported
        text = f"{type(error).__name__}: {error}"
        raise PipelineError(f"the dataset cannot be rebuilt in a data worker: {text}") from error
    if here != pipeline.num_samples:
        raise PipelineError(
            f"the dataset has {here} samples in a data worker and {pipeline.num_samples} in the trainer: its files "
            "changed, or differ between hosts. All hosts must see the same data."
        )
    return pipeline


def find_unpicklable(value: Any, path: str = "", depth: int = 0) -> str:
    """Name the innermost object that cannot be pickled, as `dataset.transform.lock (_thread.lock)`."""
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        parts = {f"[{key!r}]": item for key, item in value.items()}
    elif isinstance(value, list | tuple | set):
        parts = {f"[{number}]": item for number, item in enumerate(value)}
    elif inspect.isfunction(value) and value.__closure__:
        names = value.__code__.co_freevars
        parts = {f".<closure>.{name}": cell.cell_contents for name, cell in zip(names, value.__closure__, strict=True)}
    elif hasattr(value, "__dict__") and not inspect.isclass(value):
        parts = {f".{name}": item for name, item in vars(value).items()}
    if depth < 8:
        for name, part in parts.items():
            try:
                cloudpickle.dumps(part)
            except Exception:  # noqa: BLE001, the question is only whether it raises
                return find_unpicklable(part, path + name, depth + 1)
    return f"{path.lstrip('.') or 'it'} ({type(value).__module__}.{type(value).__qualname__})"


@contextlib.contextmanager
def acting_as_data_worker(pipeline: Pipeline) -> Iterator[None]:
    """Let user code see in the trainer, for one step, what it sees in a data worker."""
    before = torch_worker._worker_info
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=0, num_workers=1, seed=torch.initial_seed(), dataset=pipeline.dataset
    )
    try:
        yield
    finally:
        torch_worker._worker_info = before


def enter_data_worker(pipeline: Pipeline, number: int, num_workers: int) -> Pipeline:
    """Make `torch.utils.data.get_worker_info()` and `worker_init_fn` work as they do in torch's own workers.

    Returns:
        The pipeline to run here.
    """
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=torch.initial_seed(), dataset=pipeline.dataset
    )
    if pipeline.worker_init_fn is not None:
        pipeline.worker_init_fn(number)
    return replace(pipeline, collate_fn=_PrivateCollate(pipeline.collate_fn))


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


def use_one_thread() -> None:
    """Keep torch's thread pool out of data worker processes: each has one CPU."""
    torch.set_num_threads(1)
