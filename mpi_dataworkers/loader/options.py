"""The keywords of `DataLoader`: one typed declaration, from which its signature, its checks and its help come.

To add a keyword: a field here, with its check and its line in the docstring; a rule below if it needs or
excludes another one; and a line in the table of docs/reference.md.

They are flat, torch's and hetstream's: most programs give one of a group (`on_error="skip"`), and that reads best flat.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
import torch.utils.data

from hetstream.base.errors import HetstreamError, OptionsError
from hetstream.mpi_dataworkers.loader.canary import Canary
from hetstream.mpi_dataworkers.loader.connection import ServiceOptions, SharedStream, SharingMode, picklable_stage
from hetstream.mpi_dataworkers.loader.features import features_or_none
from hetstream.mpi_dataworkers.loader.pass_iterator import check_device, is_cuda_missing
from hetstream.mpi_dataworkers.loader.shards import Division
from hetstream.mpi_dataworkers.loader.statistics import SkippedSamples, quarantine_file, writing_problem
from hetstream.mpi_dataworkers.ops.streams import files_of, generator_problem
from hetstream.mpi_dataworkers.order.bucketing import LengthBuckets, StreamBuckets, boundary_problems
from hetstream.mpi_dataworkers.order.data_state import MAX_EPOCH
from hetstream.mpi_dataworkers.order.visitation import Cut, ShardingPlan, ShardingPolicy, Traits, Visitation, decide
from hetstream.mpi_dataworkers.process.config import (
    TrainerIdentity,
    buffer_bytes_from_environment,
    cache_from_environment,
    checked_cache,
    compression_from_environment,
    identity_from_environment,
    service_from_environment,
    transports_from_environment,
)
from hetstream.mpi_dataworkers.wire.address import parse_service
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy

# Keywords as fields of a dataclass: a field declares a keyword and its check, and a constructor takes them all.
#
# Used by `data_loader.py`.

# Gives the problems of a keyword's value.
Check = Callable[[str, Any], Iterator[str]]
_Options = TypeVar("_Options")
_Keywords = ParamSpec("_Keywords")


def must_be(check: Check) -> dict[str, Any]:
    """Metadata of a field of a dataclass: what its value must be."""
    return {"check": check}


def problems_of(options: Any) -> Iterator[str]:
    """What is wrong with the value of each keyword by itself."""
    for declared in fields(options):
        if (check := declared.metadata.get("check")) is not None:
            yield from check(declared.name, getattr(options, declared.name))


def help_of(declaration: object) -> str:
    """The docstring of what takes the keywords of a declaration, from the declaration's own."""
    return inspect.cleandoc(declaration.__doc__ or "").replace("Attributes:\n", "Args:\n", 1)


def takes(
    declaration: Callable[_Keywords, _Options],
) -> Callable[[Callable[[Any, _Options], None]], Callable[Concatenate[Any, _Keywords], None]]:
    """Decorate a constructor: callers give the keywords, and the constructor gets one value that has them all.

    Editors, type checkers, `help` and `inspect.signature` show the keywords.

    Args:
        declaration: the dataclass whose fields are the keywords.
    """

    def decorate(construct: Callable[[Any, _Options], None]) -> Callable[Concatenate[Any, _Keywords], None]:
        signature = inspect.signature(declaration)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

        def __init__(self: Any, /, *args: _Keywords.args, **keywords: _Keywords.kwargs) -> None:
            try:
                signature.bind(*args, **keywords)  # else its error would name the declaration, and not the class
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}: {error}") from None
            construct(self, declaration(*args, **keywords))

        __init__.__module__, __init__.__qualname__ = construct.__module__, construct.__qualname__
        __init__.__doc__ = help_of(declaration)
        parameters = [itself, *signature.parameters.values()]
        __init__.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        return __init__

    return decorate


# --- checks ---------------------------------------------------------------------------------------------------------


def whole(least: int, most: int | None = None, or_none: bool = False) -> Check:
    """A whole number within limits."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"

    def check(name: str, value: Any) -> Iterator[str]:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        fits = is_whole and value >= least and (most is None or value <= most)
        if not fits and not (value is None and or_none):
            yield f"{name}={value!r}: must be a whole number {limits}{' or None' if or_none else ''}"

    return check


def among(*allowed: Any) -> Check:
    """One of these values."""
    *most, last = map(repr, allowed)

    def check(name: str, value: Any) -> Iterator[str]:
        if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in allowed):
            yield f"{name}={value!r}: must be {', '.join(most)} or {last}"

    return check


def waiting_seconds(name: str, value: Any) -> Iterator[str]:
    """Seconds to wait, 0 for ever."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= TIMEOUT_MAX:
        yield f"{name}={value!r}: must be a number of seconds of at least 0; 0 waits for ever"


def seconds_limit(name: str, value: Any) -> Iterator[str]:
    """Seconds that something may take."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.1 <= value < float("inf"):
        yield f"{name}={value!r}: must be a number of seconds of at least 0.1"


def printable(name: str, value: Any) -> Iterator[str]:
    """Text that can be shown, or None."""
    if value is not None and not (isinstance(value, str) and value and value.isprintable()):
        yield f"{name}={value!r}: must be non-empty printable text or None"


def function(name: str, value: Any) -> Iterator[str]:
    """A function or None."""
    if value is not None and not callable(value):
        yield f"{name}={value!r}: must be a function or None"


def iterated(name: str, value: Any) -> Iterator[str]:
    """Something to iterate, or None."""
    if value is not None and not hasattr(value, "__iter__") and not hasattr(value, "__getitem__"):
        yield f"{name}={value!r}: must be something to iterate, or None"


def folder(name: str, value: Any) -> Iterator[str]:
    """The path of a folder, or None."""
    if value is not None and (not isinstance(value, str | os.PathLike) or not os.fspath(value)):
        yield f"{name}={value!r}: must be the path of a folder, or None"


def problem_of(function: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    """What a function refuses, in its own words."""
    try:
        function(*arguments)
    except HetstreamError as error:
        yield str(error)


# What the keywords of `DataLoader` must be together, and with the dataset and the environment.
#
# Each rule gives its problems. What a keyword must be by itself is declared with it, and is one of the rules.


def _environment_rules(options: LoaderOptions) -> Iterator[str]:
    """What stands in for keywords that are not given."""
    if options.service is None and (service := service_from_environment()) is not None:
        for problem in problem_of(parse_service, service):
            yield f"environment variable HETSTREAM_SERVICE: {problem}"
    if options.buffer_bytes is None:
        yield from problem_of(buffer_bytes_from_environment)
    if options.cache is None:
        yield from problem_of(cache_from_environment)
    elif isinstance(options.cache, str):
        yield from problem_of(checked_cache, options.cache)
    yield from problem_of(transports_from_environment)
    yield from problem_of(compression_from_environment)


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
        if options.is_iterable or options.asks_for_shards:
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
    if options.sharing is not None and options.asks_for_shards:
        yield f"sharing={options.sharing!r} with sharding, visitation or in_order: jobs share one stream of steps"
    is_divided = options.is_iterable or options.asks_for_shards or options.sharing is not None
    if options.gpu_stage is not None and is_divided:
        yield "gpu_stage with an IterableDataset, sharding, visitation, in_order or sharing: give batch_stage instead"
    if options.verify is True and (is_divided or options.gpu_stage is not None):
        yield (
            "verify with an IterableDataset, sharding, visitation, in_order, sharing or gpu_stage: no step of it can "
            "be made here alone"
        )
    if options.quarantine_dir is not None and options.on_error != "quarantine":
        yield f"quarantine_dir={options.quarantine_dir!r} goes with on_error='quarantine'"
    if options.pipeline_name is not None and options.sharing is None:
        yield f"pipeline_name={options.pipeline_name!r} goes with sharing="


def _device_rules(options: LoaderOptions) -> Iterator[str]:
    """Where batches come, and who computes features."""
    falls_back = options.features is not None and is_cuda_missing(options.device)
    if options.device is not None and not falls_back and (problem := check_device(options.device)):
        yield problem
    if options.features is not None:
        for name in ("batch_stage", "gpu_stage"):
            if getattr(options, name) is not None:
                yield f"features with {name}: the graph is the loader's stage; put the function into collate_fn"


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
    if options.asks_for_shards:
        yield "bucket_boundaries with sharding, visitation or in_order: the order by length is one stream of steps"
    if options.is_iterable:
        yield "lengths: an IterableDataset has no sample numbers that they could belong to"
    if not hasattr(options.lengths, "__len__") or not isinstance(options.bucket_boundaries, Sequence):
        yield f"lengths={type(options.lengths).__name__}: must be an array, and bucket_boundaries a list"
        return
    if not options.is_iterable and hasattr(options.dataset, "__len__") and len(options.lengths) != len(options.dataset):
        yield f"lengths has {len(options.lengths)} entries for a dataset of {len(options.dataset)} samples"
    yield from problem_of(LengthBuckets, options.lengths, options.bucket_boundaries)


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


# The rules, in the order in which their problems are told.
RULES: tuple[Callable[[LoaderOptions], Iterator[str]], ...] = (
    _dataset_rules,
    problems_of,
    _environment_rules,
    _combination_rules,
    _device_rules,
    _in_process_rules,
    _length_rules,
    _refused_keywords,
)


_log = logging.getLogger(__name__)

# Seeds travel as signed 64-bit numbers.
_MAX_SEED = 2**63 - 1
OnError = Literal["raise", "skip", "quarantine"]


def _address(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, str | None):
        yield f"{name}={value!r}: must be the text file:PATH, the address file of a dispatcher, or None"
    elif value is not None:
        yield from problem_of(parse_service, value)


def _generator(name: str, value: Any) -> Iterator[str]:
    if value is not None and not isinstance(value, torch.Generator):
        yield f"{name}={value!r}: must be a torch.Generator or None"


@dataclass(frozen=True)
class LoaderOptions:
    """The keywords of one `DataLoader`.

    Attributes:
        dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last, timeout,
            worker_init_fn, multiprocessing_context, generator, prefetch_factor, persistent_workers, pin_memory_device,
            in_order: as in torch.utils.data.DataLoader. `num_workers` counts local processes when there is no service,
            and with one only sizes the prefetch window; either way it is the shards of an IterableDataset that
            divides itself.
        snapshot_every_n_steps: as in torchdata's StatefulDataLoader; a state is always of the last batch taken here,
            whatever the number.
        global_batch_size: samples in a step of all ranks together, instead of `batch_size`: the order is then the same
            at any world size, and a state can be loaded at another.
        seed: base of the order and of all augmentation. In the order of a sampler each rank augments differently; else
            a sample is augmented alike at any number of ranks.
        service: `file:PATH` of a dispatcher's address file; default from HETSTREAM_SERVICE; in process without either.
        rank, world_size: who this trainer is; default from torch.distributed, Horovod, torchrun or Slurm.
        job_name: name under which the ranks of one program meet; default from Slurm or torchrun.
        buffer_bytes: bytes of finished batches to hold ahead of the training loop; default from
            HETSTREAM_BUFFER_BYTES, else 512 MiB. A window of a few steps is held even if it is larger.
        sharing: share the data workers' batches with other jobs that read the same pipeline in the same order:
            `lossless` keeps this loader's own epochs, byte for byte; `window` follows the stream that the jobs have in
            common and skips what is over, but never waits. Default None: do not share.
        pipeline_name: what makes pipelines the same for `sharing`; default a digest of the dataset and collate_fn.
        lengths: length of each sample, whole numbers; with `bucket_boundaries`, all ranks read samples of one bucket
            of length at each step (see `bucketing.BucketPlan`).
        bucket_boundaries: ascending lengths, at each of which a bucket begins.
        length_of: the same for an IterableDataset: a picklable function that gives an element's length. Every rank
            then reads all shards, its slice of each round (see `length_rounds.RoundFormer`).
        sharding: how the data is divided among data workers, a `ShardingPolicy`; default DYNAMIC, and HINT for an
            IterableDataset.
        visitation: `exactly_once` (default), `at_most_once`: go on without what a lost data worker held, or, under
            sharding OFF, `zero_once_or_more`.
        num_shards: shards of FILE, DATA and HINT, and files that DYNAMIC reads at a time; default under HINT
            `num_workers` for each rank and at least one, as in torch, else 8, and more where there are more ranks. The
            batches depend on it, but not on the number of data workers.
        repeat: passes over the data of one iteration; None for an endless stream.
        on_error: what becomes of a sample that raises, kills its process or hangs: `raise` it here at its step; `skip`
            it, told and counted; `quarantine`: skip it in later epochs and in resumed runs too, without trying it.
            An element of an IterableDataset that raises is skipped where it is met, and met again in each epoch.
        max_attempts: how often a step is tried before that, on different hosts or data workers where there are several;
            where there are two, on both in any case.
        sample_timeout_s: a data worker that is at one sample for longer hangs: its process is replaced, and the attempt
            counts.
        quarantine_dir: folder where `quarantine` writes a JSON line for each sample; None: no file is
            written.
        verify: have a worker process of torch make some steps of the first pass and one of each later pass, too, and
            compare; a difference raises `PipelineError`, which names the field and both values.
        batch_stage: picklable function of a batch, called after `collate_fn` with each one where it is made, in data
            workers or here; what it returns is the batch. Random generators are seeded before it from (seed, epoch,
            step). `set_batch_stage` changes it between two steps.
        gpu_stage: the same, after `batch_stage`, on data workers with a GPU each (`hetstream internal worker --device
            gpu`); they get batches from those without. What it returns is in host memory.
        features: a `FeatureGraph`, which data workers compute on each batch, or with a CUDA `device` the trainer's GPU;
            or a `CutGraph`, whose second part the trainer computes, on the device; or `HybridFeatures`, whose cut
            follows what steps take. Without that GPU, Triton or GPU memory data workers compute all of it, and the log
            says why. `set_features` changes it between two steps.
        cache: `memory:8G`, or a directory on the hosts' own disk (`/local/cache`, `/local/cache:50G`): where the
            deterministic front of each sample is kept, for later epochs and other jobs of this user; `off` in spite of
            HETSTREAM_CACHE, which is the default.
        device: where batches come, copied one batch ahead of the training loop from pinned memory; default host memory.
    """

    # torch's
    dataset: Any
    batch_size: int | None = field(default=1, metadata=must_be(whole(1, or_none=True)))
    shuffle: bool | None = field(default=None, metadata=must_be(among(True, False, None)))
    sampler: Iterable[Any] | None = field(default=None, metadata=must_be(iterated))
    batch_sampler: Iterable[Sequence[Any]] | None = field(default=None, metadata=must_be(iterated))
    num_workers: int = field(default=0, metadata=must_be(whole(0)))
    collate_fn: Callable[[Any], Any] | None = field(default=None, metadata=must_be(function))
    pin_memory: bool = field(default=False, metadata=must_be(among(True, False)))
    drop_last: bool = field(default=False, metadata=must_be(among(True, False)))
    timeout: float = field(default=0, metadata=must_be(waiting_seconds))
    worker_init_fn: Callable[[int], None] | None = field(default=None, metadata=must_be(function))
    multiprocessing_context: Any = None
    generator: torch.Generator | None = field(default=None, metadata=must_be(_generator))
    _: KW_ONLY
    prefetch_factor: int | None = field(default=None, metadata=must_be(whole(1, or_none=True)))
    persistent_workers: bool = field(default=False, metadata=must_be(among(True, False)))
    pin_memory_device: str = ""
    in_order: bool = field(default=True, metadata=must_be(among(True, False)))

    # order, and who this trainer is
    snapshot_every_n_steps: int = field(default=1, metadata=must_be(whole(0)))
    global_batch_size: int | None = field(default=None, metadata=must_be(whole(1, or_none=True)))
    seed: int | None = field(default=None, metadata=must_be(whole(0, _MAX_SEED, or_none=True)))
    rank: int | None = field(default=None, metadata=must_be(whole(0, or_none=True)))
    world_size: int | None = field(default=None, metadata=must_be(whole(1, or_none=True)))

    # the service
    service: str | None = field(default=None, metadata=must_be(_address))
    job_name: str | None = field(default=None, metadata=must_be(printable))
    buffer_bytes: int | None = field(default=None, metadata=must_be(whole(1, or_none=True)))

    # sharing
    sharing: SharingMode | None = field(default=None, metadata=must_be(among("lossless", "window", None)))
    pipeline_name: str | None = field(default=None, metadata=must_be(printable))

    # lengths
    lengths: Sequence[int] | None = None
    bucket_boundaries: Sequence[int] | None = None
    length_of: Callable[[Any], int] | None = None

    # how the data is divided
    sharding: ShardingPolicy | str | None = None
    visitation: Visitation | None = None
    num_shards: int | None = None
    repeat: int | None = field(default=1, metadata=must_be(whole(1, MAX_EPOCH, or_none=True)))

    # errors
    on_error: OnError = field(default="raise", metadata=must_be(among("raise", "skip", "quarantine")))
    max_attempts: int = field(default=3, metadata=must_be(whole(1, 100)))
    sample_timeout_s: float = field(default=300.0, metadata=must_be(seconds_limit))
    quarantine_dir: str | os.PathLike[str] | None = field(default=None, metadata=must_be(folder))
    verify: bool = field(default=False, metadata=must_be(among(True, False)))

    batch_stage: Callable[[Any], Any] | None = field(default=None, metadata=must_be(picklable_stage))
    gpu_stage: Callable[[Any], Any] | None = field(default=None, metadata=must_be(picklable_stage))
    features: Any = field(default=None, metadata=must_be(features_or_none))
    cache: str | None = field(default=None, metadata=must_be(printable))
    device: torch.device | str | int | None = None  # a rule checks it

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset gives its samples one after the other, in its own order."""
        return isinstance(self.dataset, torch.utils.data.IterableDataset)

    @property
    def asks_for_shards(self) -> bool:
        """Whether a keyword asks for another division, or another order of arrival, than one order for all."""
        return (self.sharding, self.visitation, self.in_order) != (None, None, True)

    @property
    def is_listed(self) -> bool:
        """Whether the program's own sampler decides the order; else it is a function of the seed and the epoch."""
        if self.is_iterable:
            return False
        given = (self.sampler, self.batch_sampler, self.generator)
        return self.batch_size is None or any(value is not None for value in given)

    def sharding_plan(self, world_size: int = 1) -> ShardingPlan:
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

    def order_description(self, sharding_plan: ShardingPlan) -> dict[str, str]:
        """What the order of the samples depends on beside the dataset, in words that an error can show."""
        size = {"batch_size": str(self.batch_size)}
        if self.global_batch_size is not None:
            size = {"global_batch_size": str(self.global_batch_size)}
        order = {"shuffle": str(bool(self.shuffle)), "seed": str(self.seed or 0), "drop_last": str(self.drop_last)}
        passes = {"listed": str(self.is_listed), "repeat": str(self.repeat)}
        return size | order | passes | sharding_plan.description() | {"in_order": str(self.in_order)}

    def division(self, sharding_plan: ShardingPlan, rank: int, world_size: int) -> Division | None:
        """Into which shards the data is divided; None for indexed data in one order."""
        if sharding_plan.cut is Cut.STEPS and sharding_plan.visitation == "exactly_once" and self.in_order:
            return None
        return Division(
            sharding_plan,
            num_samples=-1 if self.is_iterable else len(self.dataset),
            batch_size=self.batch_size or 0,
            drop_last=self.drop_last,
            shuffle=bool(self.shuffle),
            seed=self.seed or 0,
            copies_alike=self.seed is not None,
            rank=rank,
            world_size=world_size,
            in_order=self.in_order,
            in_rounds=self.length_of is not None,
        )

    def length_buckets(self) -> LengthBuckets | None:
        """The samples by length, if they are read in rounds of like lengths."""
        if self.lengths is None or self.bucket_boundaries is None:
            return None
        return LengthBuckets(self.lengths, self.bucket_boundaries)

    def stream_buckets(self) -> StreamBuckets | None:
        """How a stream's elements are told apart by length, if they are read in rounds of like lengths."""
        if self.length_of is None:
            return None
        return StreamBuckets(self.length_of, tuple(self.bucket_boundaries or ()))

    def service_options(
        self, service: str | None, identity: TrainerIdentity, description: dict[str, str]
    ) -> ServiceOptions:
        """What is asked of the service.

        Args:
            service: where it is; None: steps are made in process.
            identity: who this trainer is.
            description: the loader in words, which programs of one job name must agree on.
        """
        sharing, pipeline_name = self.sharing, self.pipeline_name or ""
        return ServiceOptions(
            service=service,
            identity=identity,
            description=description | {"sharing": str(sharing), "pipeline_name": pipeline_name},
            shared=SharedStream(sharing, pipeline_name) if sharing is not None else None,
            buffer_bytes=self.buffer_bytes,
            skipped=SkippedSamples(self.error_policy(), self.quarantine_file(identity), not self.is_iterable),
            divides=not self.is_listed and identity.world_size > 1,
            canary=Canary(self.persistent_workers, self.multiprocessing_context) if self.verify else None,
        )

    def torch_keywords(self, world_size: int) -> dict[str, Any]:
        """What torch's own constructor is given."""
        names = (
            "batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory drop_last timeout "
            "worker_init_fn generator prefetch_factor persistent_workers multiprocessing_context"
        )
        keywords = {name: getattr(self, name) for name in names.split()}
        if self.place()[0].type == "cuda":
            keywords["pin_memory"] = True  # only from there a copy runs beside the training loop
        if self.global_batch_size is not None:
            keywords["batch_size"] = -(-self.global_batch_size // world_size)
        # torch has nothing to shuffle there; here it is the files. And it refuses to shuffle a dataset that is empty.
        if self.is_iterable or (self.shuffle and hasattr(self.dataset, "__len__") and len(self.dataset) == 0):
            keywords["shuffle"] = None
        return keywords

    @property
    def cache_place(self) -> str | None:
        """Where fronts of samples are kept; "" nowhere, None where the environment says it."""
        return None if self.cache is None else checked_cache(self.cache)

    def place(self) -> tuple[torch.device, str]:
        """Where batches come; and, where features were to be computed on a GPU that is not there, why they are not."""
        if self.features is not None and is_cuda_missing(self.device):
            return torch.device("cpu"), check_device(self.device)
        return torch.device("cpu" if self.device is None else self.device), ""

    def say_what_has_no_effect(self, is_streamed: bool) -> None:
        """Log, once in a process, which keywords ask for processes that this loader does not have."""
        divided = self.is_iterable or self.asks_for_shards
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

    def quarantine_file(self, identity: TrainerIdentity) -> Path | None:
        """Where quarantined samples are written down, if anywhere."""
        if self.quarantine_dir is None or self.on_error != "quarantine":
            return None
        return quarantine_file(Path(self.quarantine_dir), identity)

    def check(self, known: Callable[[], tuple[int, int] | None]) -> TrainerIdentity:
        """Check every keyword, and the environment that stands in for those not given.

        Args:
            known: says (rank, world size) of torch.distributed or Horovod, when the program has initialised one; asked
                where the keywords do not say it.

        Returns:
            Who this trainer is.

        Raises:
            OptionsError: with every problem.
        """
        problems = [problem for rule in RULES for problem in rule(self)]
        identity = None
        world_size = 1
        try:
            if isinstance(self.rank, int) and isinstance(self.world_size, int):
                given: tuple[int, int] | None = (self.rank, self.world_size)
            else:  # not given, or a rule has said what is wrong
                given = known()
            is_name = not [*printable("job_name", self.job_name)]  # likewise
            streams = self.service or service_from_environment()
            identity = identity_from_environment(
                given, self.job_name if is_name else None, of_mpi_world=_of_mpi_world if streams else lambda: None
            )
            world_size = identity.world_size
            if isinstance(self.quarantine_dir, str | os.PathLike | None):
                file = self.quarantine_file(identity)
                if file is not None and (problem := writing_problem(file)):
                    problems.append(f"quarantine_dir={str(file.parent)!r}: {file} cannot be written: {problem}")
        except HetstreamError as error:
            problems.append(str(error))
        problems += problem_of(self.sharding_plan, world_size)
        if isinstance(self.global_batch_size, int) and 0 < self.global_batch_size < world_size:
            problems.append(
                f"global_batch_size={self.global_batch_size} with {world_size} ranks: each rank needs a sample"
            )
        if problems or identity is None:
            raise OptionsError("DataLoader: " + "; ".join(dict.fromkeys(problems)))
        return identity


def _of_mpi_world() -> tuple[int, int] | None:
    from hetstream.mpi_dataworkers.transports.mpi import trainer_identity

    return trainer_identity()


@functools.cache
def _say_once(text: str) -> None:
    _log.warning("hetstream: %s", text)
