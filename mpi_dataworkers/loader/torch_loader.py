"""What a torch DataLoader asks for, in hetstream's words: its pipeline, whether it can be streamed, its stream."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
import torch.utils.data

from mpi_dataworkers.config import Identity
from mpi_dataworkers.horovod import horovod_identity
from mpi_dataworkers.loader.stream import Stream
from mpi_dataworkers.ops.pipeline import Pipeline


def distributed_identity() -> tuple[int, int] | None:
    """Rank and world size of torch.distributed or Horovod, when the program has initialised one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return horovod_identity()


def why_not_streamable(loader: Any) -> str | None:
    """Why a torch DataLoader cannot be streamed, or None when it can."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return f"{type(loader.dataset).__name__} is an IterableDataset; only map-style datasets are streamed"
    if not hasattr(loader.dataset, "__len__") and loader.batch_sampler is None and loader.sampler is None:
        return f"{type(loader.dataset).__name__} has no length and there is no sampler"
    if loader.multiprocessing_context is not None:
        return "multiprocessing_context asks for worker processes of this program"
    return None


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
        }
    return options


def _pipeline_of(loader: Any) -> Pipeline:
    num_samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else -1
    return Pipeline(
        loader.dataset, loader.collate_fn, num_samples, loader.worker_init_fn, loader.batch_sampler is not None
    )


def _min_window(loader: Any) -> int:
    return max(2, int(loader.prefetch_factor or 2) * int(loader.num_workers))


def make_stream(loader: Any, service: str | None, identity: Identity, extra: dict[str, str]) -> Stream:
    pipeline = _pipeline_of(loader)
    return Stream(
        pipeline,
        service,
        identity,
        loader.pin_memory,
        loader.timeout,
        _min_window(loader),
        pipeline.description() | extra,
    )
