"""What the keywords of `DataLoader` must be together, and with the dataset and the environment. Used by `options.py`.

Each rule gives its problems. What a keyword must be by itself is declared with it, and is one of the rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from hetstream.mpi_dataworkers.config import (
    buffer_bytes_from_environment,
    compression_from_environment,
    service_from_environment,
    transports_from_environment,
)
from hetstream.mpi_dataworkers.loader.device import check_device, is_cuda_missing
from hetstream.mpi_dataworkers.loader.keyword import problem_of, problems_of
from hetstream.mpi_dataworkers.ops.iterable import generator_problem
from hetstream.mpi_dataworkers.order.bucketing import LengthBuckets, boundary_problems
from hetstream.mpi_dataworkers.wire.address import parse_service

if TYPE_CHECKING:
    from hetstream.mpi_dataworkers.loader.options import LoaderOptions


def _environment_rules(options: LoaderOptions) -> Iterator[str]:
    """What stands in for keywords that are not given."""
    if options.service is None and (service := service_from_environment()) is not None:
        for problem in problem_of(parse_service, service):
            yield f"environment variable HETSTREAM_SERVICE: {problem}"
    if options.buffer_bytes is None:
        yield from problem_of(buffer_bytes_from_environment)
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
