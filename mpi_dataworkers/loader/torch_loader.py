"""What a torch DataLoader asks for, in hetstream's words: its pipeline, whether it can be streamed, its connection."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
import torch.utils.data

from hetstream.mpi_dataworkers.config import streams_in_process_loaders
from hetstream.mpi_dataworkers.horovod import horovod_identity
from hetstream.mpi_dataworkers.loader.loader_connection import LoaderConnection, ServiceOptions
from hetstream.mpi_dataworkers.loader.step_indices import LookAhead
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline
from hetstream.mpi_dataworkers.ops.staged import BatchStage
from hetstream.mpi_dataworkers.order.bucketing import LengthBuckets
from hetstream.mpi_dataworkers.order.length_rounds import StreamBuckets


def distributed_identity() -> tuple[int, int] | None:
    """Rank and world size of torch.distributed or Horovod, when the program has initialised one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return horovod_identity()


def why_not_streamable(loader: Any) -> str | None:
    """Why a torch DataLoader cannot be streamed, or None when it can."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return (
            f"{type(loader.dataset).__name__} is an IterableDataset, and the start-up hook streams indexed datasets "
            "only. To stream it, use hetstream.DataLoader"
        )
    if loader.num_workers == 0 and not streams_in_process_loaders():
        return (
            "torch promises that the program's own dataset makes these batches; set num_workers=1 or more, or "
            "--stream-in-process-loaders, to let data workers make them"
        )
    if not hasattr(loader.dataset, "__len__") and loader.batch_sampler is None and loader.sampler is None:
        return f"{type(loader.dataset).__name__} has no length and there is no sampler"
    if loader.multiprocessing_context is not None:
        return "multiprocessing_context asks for worker processes of this program. To stream it, leave that out"
    return None


# Samplers that can be drawn ahead without anybody seeing it: what they take of a shared generator, they take at their
# first step. Only these classes themselves: a subclass may do more.
_UNSEEN = (
    torch.utils.data.SequentialSampler,
    torch.utils.data.WeightedRandomSampler,
    torch.utils.data.DistributedSampler,
)
# The same of accelerate, by name, as it may not be installed: a sampler, and those that choose from another's batches.
_UNSEEN_BY_NAME = {"accelerate.data_loader.SeedableRandomSampler"}
_CHOOSING_BY_NAME = {"accelerate.data_loader.BatchSamplerShard", "accelerate.data_loader.SkipBatchSampler"}


def look_ahead_of(loader: Any) -> LookAhead:
    """How far torch draws a loader's sampler ahead, and how far it can be drawn without anybody seeing it."""
    sampler = loader._index_sampler
    # What a sampler does at its end, after its last step, is seen: it may draw once more, or count its epochs.
    num_unseen = len(sampler) - 1 if _is_unseen(sampler) else 0
    return LookAhead(int(loader.prefetch_factor or 0) * int(loader.num_workers), num_unseen)


def _is_unseen(sampler: Any) -> bool:
    kind = type(sampler)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is torch.utils.data.BatchSampler:
        return _is_unseen(sampler.sampler)
    if name in _CHOOSING_BY_NAME:
        return _is_unseen(sampler.batch_sampler)
    if kind is torch.utils.data.RandomSampler and sampler.generator is not None:
        # It draws anew with replacement, and when it goes round.
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return kind in _UNSEEN or kind is torch.utils.data.RandomSampler or name in _UNSEEN_BY_NAME


def torch_options(loader: Any) -> dict[str, Any]:
    """Keywords of the local torch loader that runs the pipeline in process."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory and torch.cuda.is_available(),
        "worker_init_fn": loader.worker_init_fn,
        "timeout": loader.timeout,
    }
    if loader.num_workers > 0:
        options |= {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
            "persistent_workers": loader.persistent_workers,
        }
    return options


def pipeline_of(
    loader: Any,
    buckets: LengthBuckets | StreamBuckets | None = None,
    batch_stage: BatchStage | None = None,
    gpu_stage: BatchStage | None = None,
    forward_stage: BatchStage | None = None,
    begins: bool = True,
) -> Pipeline:
    """What makes a loader's batches, as the loader is now; its class knows nothing of buckets and stages.

    `begins` says whether `worker_init_fn` runs: torch without worker processes does not run it.
    """
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    try:
        num_samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") and not iterable else -1
    except Exception:  # noqa: BLE001, user code; torch itself does not ask for a length where there is a sampler
        num_samples = -1
    batched = loader.batch_sampler is not None
    return Pipeline(
        loader.dataset,
        loader.collate_fn,
        num_samples,
        loader.worker_init_fn if begins else None,
        batched,
        buckets=buckets if isinstance(buckets, LengthBuckets) else None,
        stream_buckets=buckets if isinstance(buckets, StreamBuckets) else None,
        num_workers=max(1, loader.num_workers),
        has_workers=loader.num_workers > 0,
        batch_stage=batch_stage,
        gpu_stage=gpu_stage,
        forward_stage=forward_stage,
    )


def say_pinning_has_no_effect(loader: Any) -> None:
    """Warn as torch does at each iteration, for a loader of ours."""
    if loader.pin_memory and not torch.cuda.is_available():
        warnings.warn("pin_memory=True has no effect: this process has no GPU", UserWarning, stacklevel=4)


def _min_window(loader: Any) -> int:
    return max(2, int(loader.prefetch_factor or 2) * int(loader.num_workers))


def make_connection(
    loader: Any,
    options: ServiceOptions,
    buckets: LengthBuckets | StreamBuckets | None = None,
    batch_stage: BatchStage | None = None,
    gpu_stage: BatchStage | None = None,
    begins: bool = True,
) -> LoaderConnection:
    """The connection of a loader; `options.description` is what the loader says beside its pipeline's description."""
    pipeline = pipeline_of(loader, buckets, batch_stage, gpu_stage, begins=begins)
    described = replace(options, description=pipeline.description() | options.description)
    return LoaderConnection(pipeline, described, loader.pin_memory, loader.timeout, _min_window(loader))
