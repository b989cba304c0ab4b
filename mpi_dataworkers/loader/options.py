"""The keywords of `DataLoader` as one frozen value, checked in one place: every problem is named, all of them at once.

To add a keyword: a field here with its default, a rule in one of the functions below, the keyword in
`DataLoader.__init__`, and a line in the table of docs/user-guide.md.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any

import torch
import torch.utils.data

from hetstream.base.errors import HetstreamError, OptionsError
from hetstream.mpi_dataworkers.config import (
    Identity,
    buffer_bytes_from_environment,
    compression_from_environment,
    identity_from_environment,
    quarantine_dir_from_environment,
    service_from_environment,
    transports_from_environment,
)
from hetstream.mpi_dataworkers.loader.device import check_device
from hetstream.mpi_dataworkers.loader.skipped import quarantine_file, writing_problem
from hetstream.mpi_dataworkers.ops.iterable import files_of, generator_problem
from hetstream.mpi_dataworkers.order.bucketing import LengthBuckets, boundary_problems
from hetstream.mpi_dataworkers.order.data_state import MAX_EPOCH
from hetstream.mpi_dataworkers.order.visitation import Guarantee, Traits, decide
from hetstream.mpi_dataworkers.wire.address import parse_service
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy

_log = logging.getLogger(__name__)

# Seeds travel as signed 64-bit numbers.
_MAX_SEED = 2**63 - 1
SHARING_MODES = ("lossless", "window")


@dataclass(frozen=True)
class LoaderOptions:
    """The keywords of one `DataLoader`, with its defaults; their meaning is told there."""

    dataset: Any
    batch_size: Any = 1
    shuffle: Any = None
    sampler: Any = None
    batch_sampler: Any = None
    num_workers: Any = 0
    collate_fn: Any = None
    pin_memory: Any = False
    drop_last: Any = False
    timeout: Any = 0
    worker_init_fn: Any = None
    multiprocessing_context: Any = None
    generator: Any = None
    _: KW_ONLY
    prefetch_factor: Any = None
    persistent_workers: Any = False
    pin_memory_device: Any = ""
    in_order: Any = True
    snapshot_every_n_steps: Any = 1
    global_batch_size: Any = None
    seed: Any = None
    rank: Any = None
    world_size: Any = None
    service: Any = None
    job_name: Any = None
    buffer_bytes: Any = None
    sharing: Any = None
    pipeline_name: Any = None
    lengths: Any = None
    bucket_boundaries: Any = None
    length_of: Any = None
    sharding: Any = None
    visitation: Any = None
    num_shards: Any = None
    repeat: Any = 1
    on_error: Any = "raise"
    max_attempts: Any = 3
    sample_timeout_s: Any = 300.0
    quarantine_dir: Any = None
    device: Any = None

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset gives its samples one after the other, in its own order."""
        return isinstance(self.dataset, torch.utils.data.IterableDataset)

    @property
    def is_listed(self) -> bool:
        """Whether the program's own sampler decides the order; else it is a function of the seed and the epoch."""
        if self.is_iterable:
            return False
        given = (self.sampler, self.batch_sampler, self.generator)
        return self.batch_size is None or any(value is not None for value in given)

    def guarantee(self, world_size: int = 1) -> Guarantee:
        """What the loader promises, and how it divides its passes.

        Raises:
            ConfigError: the keywords do not go together, or not with this dataset.
        """
        files = files_of(self.dataset) if self.is_iterable else None
        traits = Traits(
            type(self.dataset).__name__,
            self.is_iterable,
            -1 if files is None else len(files),
            self.is_listed,
            bool(self.shuffle),
            self.in_order is not False,
            # In rounds the ranks need no shard of their own.
            world_size if self.length_of is None else 1,
            self.num_workers if isinstance(self.num_workers, int) else 0,
        )
        return decide(self.sharding, self.visitation, self.num_shards, traits)

    def order_description(self, guarantee: Guarantee) -> dict[str, str]:
        """What the order of the samples depends on beside the dataset, in words that an error can show."""
        size = {"batch_size": str(self.batch_size)}
        if self.global_batch_size is not None:
            size = {"global_batch_size": str(self.global_batch_size)}
        order = {"shuffle": str(bool(self.shuffle)), "seed": str(self.seed or 0), "drop_last": str(self.drop_last)}
        passes = {"listed": str(self.is_listed), "repeat": str(self.repeat)}
        return size | order | passes | guarantee.description() | {"in_order": str(self.in_order)}

    def length_buckets(self) -> LengthBuckets | None:
        """The samples by length, if they are read in rounds of like lengths."""
        if self.lengths is None or self.bucket_boundaries is None:
            return None
        return LengthBuckets(self.lengths, self.bucket_boundaries)

    def torch_keywords(self, world_size: int) -> dict[str, Any]:
        """What torch's own constructor is given."""
        names = (
            "batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory drop_last timeout "
            "worker_init_fn generator prefetch_factor persistent_workers multiprocessing_context"
        )
        keywords = {name: getattr(self, name) for name in names.split()}
        if self.device is not None and torch.device(self.device).type == "cuda":
            keywords["pin_memory"] = True  # only from there a copy runs beside the training loop
        if self.global_batch_size is not None:
            keywords["batch_size"] = -(-self.global_batch_size // world_size)
        # torch has nothing to shuffle there; here it is the files. And it refuses to shuffle a dataset that is empty.
        if self.is_iterable or (self.shuffle and hasattr(self.dataset, "__len__") and len(self.dataset) == 0):
            keywords["shuffle"] = None
        return keywords

    def say_what_has_no_effect(self, is_streamed: bool) -> None:
        """Log, once in a process, which keywords ask for processes that this loader does not have."""
        divided = self.is_iterable or (self.sharding, self.visitation, self.in_order) != (None, None, True)
        if is_streamed and self.multiprocessing_context is not None:
            _say_once("multiprocessing_context has no effect with a service: data workers are no processes of this one")
        if not is_streamed and self.persistent_workers and divided:
            _say_once(
                "persistent_workers has no effect without a service for an IterableDataset, sharding, visitation or "
                "in_order: each pass has a process of its own"
            )

    def error_policy(self) -> ErrorPolicy:
        """What becomes of a step that cannot be made."""
        return ErrorPolicy(self.on_error, self.max_attempts, float(self.sample_timeout_s))

    def quarantine_file(self, identity: Identity) -> Path | None:
        """Where quarantined samples are written down, if anywhere."""
        directory = quarantine_dir_from_environment() if self.quarantine_dir is None else self.quarantine_dir
        if directory is None or self.on_error != "quarantine":
            return None
        return quarantine_file(Path(directory), identity)

    def check(self, known: tuple[int, int] | None) -> Identity:
        """Check every keyword, and the environment that stands in for those not given.

        Args:
            known: (rank, world size) of torch.distributed or Horovod, when the program has initialised one.

        Returns:
            Who this trainer is.

        Raises:
            OptionsError: with every problem.
        """
        problems = [problem for rule in _RULES for problem in rule(self)]
        identity = None
        world_size = 1
        try:
            both = isinstance(self.rank, int) and isinstance(self.world_size, int)  # else a rule has said what is wrong
            given = (self.rank, self.world_size) if both else known
            is_name = not [*_printable("job_name", self.job_name)]  # likewise
            identity = identity_from_environment(given, self.job_name if is_name else None)
            world_size = identity.world_size
            if isinstance(self.quarantine_dir, str | os.PathLike | None):
                file = self.quarantine_file(identity)
                if file is not None and (problem := writing_problem(file)):
                    problems.append(f"quarantine_dir={str(file.parent)!r}: {file} cannot be written: {problem}")
        except HetstreamError as error:
            problems.append(str(error))
        problems += _said_by(self.guarantee, world_size)
        if isinstance(self.global_batch_size, int) and 0 < self.global_batch_size < world_size:
            problems.append(
                f"global_batch_size={self.global_batch_size} with {world_size} ranks: each rank needs a sample"
            )
        if problems or identity is None:
            raise OptionsError("DataLoader: " + "; ".join(dict.fromkeys(problems)))
        return identity


def _value_rules(options: LoaderOptions) -> Iterator[str]:
    """Each keyword by itself."""
    yield from _whole("batch_size", options.batch_size, 1, or_none=True)
    yield from _whole("num_workers", options.num_workers, 0)
    yield from _whole("prefetch_factor", options.prefetch_factor, 1, or_none=True)
    yield from _whole("global_batch_size", options.global_batch_size, 1, or_none=True)
    yield from _whole("snapshot_every_n_steps", options.snapshot_every_n_steps, 0)
    yield from _whole("seed", options.seed, 0, _MAX_SEED, or_none=True)
    yield from _whole("repeat", options.repeat, 1, MAX_EPOCH, or_none=True)
    yield from _whole("rank", options.rank, 0, or_none=True)
    yield from _whole("world_size", options.world_size, 1, or_none=True)
    yield from _whole("buffer_bytes", options.buffer_bytes, 1, or_none=True)
    for name in ("pin_memory", "drop_last", "persistent_workers", "in_order"):
        yield from _one_of(name, getattr(options, name), (True, False))
    yield from _one_of("shuffle", options.shuffle, (True, False, None))
    yield from _one_of("sharing", options.sharing, (*SHARING_MODES, None))
    for name in ("collate_fn", "worker_init_fn"):
        value = getattr(options, name)
        if value is not None and not callable(value):
            yield f"{name}={value!r}: must be a function or None"
    for name in ("sampler", "batch_sampler"):
        value = getattr(options, name)
        if value is not None and not hasattr(value, "__iter__") and not hasattr(value, "__getitem__"):
            yield f"{name}={value!r}: must be something to iterate, or None"
    for name in ("job_name", "pipeline_name"):
        yield from _printable(name, getattr(options, name))
    timeout_s = options.timeout
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 <= timeout_s <= TIMEOUT_MAX:
        yield f"timeout={timeout_s!r}: must be a number of seconds of at least 0; 0 waits for ever"
    yield from _one_of("on_error", options.on_error, ("raise", "skip", "quarantine"))
    yield from _whole("max_attempts", options.max_attempts, 1, 100)
    limit_s = options.sample_timeout_s
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0.1 <= limit_s < float("inf"):
        yield f"sample_timeout_s={limit_s!r}: must be a number of seconds of at least 0.1"
    if options.quarantine_dir is not None:
        if not isinstance(options.quarantine_dir, str | os.PathLike) or not os.fspath(options.quarantine_dir):
            yield f"quarantine_dir={options.quarantine_dir!r}: must be the path of a folder, or None"
        if options.on_error != "quarantine":
            yield f"quarantine_dir={options.quarantine_dir!r} goes with on_error='quarantine'"
    if options.device is not None and (problem := check_device(options.device)):
        yield problem
    if options.generator is not None and not isinstance(options.generator, torch.Generator):
        yield f"generator={options.generator!r}: must be a torch.Generator or None"
    if not isinstance(options.service, str | None):
        yield f"service={options.service!r}: must be the text file:PATH, the address file of a dispatcher, or None"
    elif options.service is not None:
        yield from _said_by(parse_service, options.service)
    elif (service := service_from_environment()) is not None:
        for problem in _said_by(parse_service, service):
            yield f"environment variable HETSTREAM_SERVICE: {problem}"
    if options.buffer_bytes is None:
        yield from _said_by(buffer_bytes_from_environment)
    yield from _said_by(transports_from_environment)
    yield from _said_by(compression_from_environment)


def _combination_rules(options: LoaderOptions) -> Iterator[str]:
    """Keywords that need or exclude one another."""
    if options.sampler is not None and options.shuffle:
        yield "sampler and shuffle=True: the sampler decides the order; leave one out"
    if options.batch_sampler is not None:
        others = {
            "batch_size": options.batch_size != 1,
            "shuffle": options.shuffle,
            "sampler": options.sampler is not None,
            "drop_last": options.drop_last,
        }
        if any(others.values()):
            given = ", ".join(name for name, is_given in others.items() if is_given)
            yield f"batch_sampler with {given}: the batch_sampler alone decides what a batch is"
    elif options.batch_size is None and options.drop_last:
        yield "drop_last=True with batch_size=None: without batches there is no last one to drop"
    if options.global_batch_size is not None:
        if options.batch_size != 1:
            yield (
                f"batch_size={options.batch_size!r} with global_batch_size={options.global_batch_size!r}: give one of "
                "them; a rank's share of the global batch depends on the world size"
            )
        if options.sampler is not None or options.batch_sampler is not None or options.generator is not None:
            yield (
                "global_batch_size with a sampler, batch_sampler or generator: the order must be a function of the "
                "seed. Use shuffle and seed instead"
            )
        if options.is_iterable or (options.sharding, options.visitation, options.in_order) != (None, None, True):
            yield "global_batch_size with an IterableDataset, sharding, visitation or in_order: give batch_size instead"
    if options.num_workers == 0:
        if options.prefetch_factor is not None:
            yield f"prefetch_factor={options.prefetch_factor!r} needs num_workers of at least 1"
        if options.persistent_workers is True:
            yield "persistent_workers=True needs num_workers of at least 1"
    if (options.rank is None) != (options.world_size is None):
        yield f"rank={options.rank!r} with world_size={options.world_size!r}: they must be given together"
    if options.sharing is not None and options.is_listed:
        yield (
            f"sharing={options.sharing!r} with a sampler, batch_sampler, generator or batch_size=None: jobs can share "
            "an order only if data workers compute it. Use shuffle and seed instead"
        )
    if options.sharing is not None and (options.sharding, options.visitation, options.in_order) != (None, None, True):
        yield f"sharing={options.sharing!r} with sharding, visitation or in_order: jobs share one stream of steps"
    if options.pipeline_name is not None and options.sharing is None:
        yield f"pipeline_name={options.pipeline_name!r} goes with sharing="


def _in_process_rules(options: LoaderOptions) -> Iterator[str]:
    """What data workers take care of, and this process cannot do by itself."""
    if options.service is not None or service_from_environment() is not None:
        return
    if options.num_workers == 0 and isinstance(options.timeout, int | float) and options.timeout > 0:
        yield (
            f"timeout={options.timeout!r} without a service needs num_workers of at least 1: "
            "nobody but this process makes the batch"
        )


def _length_rules(options: LoaderOptions) -> Iterator[str]:
    """Reading by length."""
    if options.lengths is None and options.bucket_boundaries is None and options.length_of is None:
        return
    if options.length_of is not None:
        yield from _length_of_rules(options)
        return
    if options.lengths is None or options.bucket_boundaries is None:
        missing = "lengths" if options.lengths is None else "bucket_boundaries"
        yield f"{missing} is missing: lengths and bucket_boundaries must be given together"
        return
    if options.is_listed:
        yield (
            "bucket_boundaries with a sampler, batch_sampler, generator or batch_size=None: the order by length is "
            "hetstream's own. Use shuffle and seed instead"
        )
    if (options.sharding, options.visitation, options.in_order) != (None, None, True):
        yield "bucket_boundaries with sharding, visitation or in_order: the order by length is one stream of steps"
    if options.is_iterable:
        yield "lengths: an IterableDataset has no sample numbers that they could belong to"
    if not hasattr(options.lengths, "__len__") or not isinstance(options.bucket_boundaries, Sequence):
        yield f"lengths={type(options.lengths).__name__}: must be an array, and bucket_boundaries a list"
        return
    if not options.is_iterable and hasattr(options.dataset, "__len__") and len(options.lengths) != len(options.dataset):
        yield f"lengths has {len(options.lengths)} entries for a dataset of {len(options.dataset)} samples"
    yield from _said_by(LengthBuckets, options.lengths, options.bucket_boundaries)


def _length_of_rules(options: LoaderOptions) -> Iterator[str]:
    """Reading a stream by length."""
    if not callable(options.length_of):
        yield f"length_of={options.length_of!r}: must be a function of an element"
    if not options.is_iterable:
        yield "length_of with a map-style dataset: give the lengths of all samples as lengths="
    if options.lengths is not None:
        yield "lengths and length_of: give lengths for a map-style dataset, length_of for an IterableDataset"
    if options.batch_size is None:
        yield "length_of with batch_size=None: a round is a batch for each rank"
    if options.visitation not in (None, "exactly_once") or options.sharding == "off":
        yield "length_of with sharding OFF, or a visitation that is not exactly_once: the ranks would not read alike"
    if options.in_order is not True:
        yield "length_of with in_order=False: the ranks would not read alike"
    if not isinstance(options.bucket_boundaries, Sequence):
        yield f"bucket_boundaries={options.bucket_boundaries!r} with length_of: must be a list of lengths"
    else:
        yield from boundary_problems(options.bucket_boundaries)


def _refused_keywords(options: LoaderOptions) -> Iterator[str]:
    """torch's keywords that are not supported: refused by name, never ignored."""
    if options.pin_memory_device != "":
        yield (
            f"pin_memory_device={options.pin_memory_device!r}: torch pins memory for the current accelerator and has "
            "deprecated this keyword; leave it out"
        )


def _dataset_rules(options: LoaderOptions) -> Iterator[str]:
    if options.is_iterable:
        if options.sampler is not None or options.batch_sampler is not None:
            yield f"sampler or batch_sampler: {type(options.dataset).__name__} is an IterableDataset, in its own order"
        if options.on_error != "raise" and inspect.isgeneratorfunction(type(options.dataset).__iter__):
            yield f"on_error={options.on_error!r}: {generator_problem(options.dataset)}"
        if options.on_error != "raise" and options.length_of is not None:
            yield f"on_error={options.on_error!r} with length_of: all ranks must form the same rounds"
        if options.sharing is not None:
            yield f"sharing={options.sharing!r}: an IterableDataset is read by one job"
    elif isinstance(options.dataset, type):
        yield f"dataset={options.dataset!r} is a class: give an instance of it"
    elif not hasattr(options.dataset, "__getitem__"):
        yield f"dataset={options.dataset!r}: a map-style dataset has __getitem__"
    elif not hasattr(options.dataset, "__len__") and (options.sampler, options.batch_sampler) == (None, None):
        yield f"{type(options.dataset).__name__} has no length and there is no sampler"


@functools.cache
def _say_once(text: str) -> None:
    _log.warning("hetstream: %s", text)


# The rules, in the order in which their problems are told.
_RULES: tuple[Callable[[LoaderOptions], Iterator[str]], ...] = (
    _dataset_rules,
    _value_rules,
    _combination_rules,
    _in_process_rules,
    _length_rules,
    _refused_keywords,
)


def _whole(name: str, value: Any, least: int, most: int | None = None, or_none: bool = False) -> Iterator[str]:
    if value is None and or_none:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        yield f"{name}={value!r}: must be a whole number {limits}{' or None' if or_none else ''}"


def _printable(name: str, value: Any) -> Iterator[str]:
    if value is not None and not (isinstance(value, str) and value and value.isprintable()):
        yield f"{name}={value!r}: must be non-empty printable text or None"


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Iterator[str]:
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in allowed):
        *most, last = map(repr, allowed)
        yield f"{name}={value!r}: must be {', '.join(most)} or {last}"


def _said_by(function: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    try:
        function(*arguments)
    except HetstreamError as error:
        yield str(error)
