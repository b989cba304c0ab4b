"""What the benchmarks of RAP's mechanisms share: layers of its model, batches of its plans. Sources are said beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.rap_plans import TERABYTE_IDS, PlanSize
from hetstream.mpi_dataworkers.features.batches import Jagged, Nullable
from hetstream.mpi_dataworkers.gpu_features.operations import Device
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer, Operation, Problem
from hetstream.mpi_dataworkers.gpu_features.search import fuse

BATCH = 4096
NO_GPU = "there is no GPU here: torch.cuda.is_available() is False"
# Of RAP's published program for plan 0: a layer's duration in ms, how many features of its Ngram fit beside it, and
# which resource the layer itself needs most.
_PUBLISHED = (
    ("emb_fwd", 0.90, 26, "memory"),
    ("mlp_fwd", 1.96, 30, "compute"),
    ("mlp_bwd", 2.88, 52, "compute"),
    ("emb_bwd", 0.85, 20, "memory"),
    ("grad_comm", 1.61, 74, "neither"),
)
# Assumed: beside the exchange of gradients all of the GPU is left, and of what a layer does not need most, this part.
_OTHER_SHARE = 0.9


def layers() -> tuple[Layer, ...]:
    """The five layers of RAP's model, with what each leaves in two resources."""
    most = max(features / duration_ms for _, duration_ms, features, _ in _PUBLISHED)
    found = []
    for name, duration_ms, features, needs in _PUBLISHED:
        left = features / duration_ms / most
        memory, compute = (
            left if needs in (resource, "neither") else _OTHER_SHARE for resource in ("memory", "compute")
        )
        found.append(Layer(name, duration_ms / 1e3, memory * duration_ms / 1e3, compute * duration_ms / 1e3))
    return tuple(found)


def problem_of(operations: Sequence[Operation], device: Device, pressure: float) -> Problem:
    """Operations beside a model that leaves so much that they need `pressure` times that, if fused as RAP does.

    Args:
        operations: of a plan.
        device: whose launches they take.
        pressure: of the resource that there is least of, beyond 1 something must be exposed.
    """
    whole = Problem(tuple(operations), layers(), device.launch_s)
    launches_s = len(fuse(whole)) * device.launch_s
    needed = max(
        (sum(getattr(operation, name) for operation in operations) + launches_s)
        / sum(getattr(layer, name) for layer in whole.layers)
        for name in ("memory_s", "compute_s")
    )
    factor = needed / pressure
    return replace(whole, layers=tuple(scaled(layer, factor) for layer in whole.layers))


def scaled(layer: Layer, factor: float) -> Layer:
    """A layer that takes and leaves so many times as much."""
    return Layer(layer.name, layer.duration_s * factor, layer.memory_s * factor, layer.compute_s * factor)


def random_plan(num_operators: int) -> PlanSize:
    """A plan of so many operators, ten for each feature, with lists of many ids; two features of three are sparse."""
    num_dense = round(num_operators / 30)
    return PlanSize(
        f"{num_operators} operators",
        TERABYTE_IDS,
        num_dense,
        max(1, round(num_operators / 10) - num_dense),
        num_operators,
        list_length=(32, 64),
    )


def batch_of(size: PlanSize, rows: int, seed: int = 0) -> dict[str, Any]:
    """A batch of raw columns for a plan: a tenth of the values missing, of lists with one id each a tenth empty."""
    draw = np.random.default_rng(seed)
    batch: dict[str, Any] = {}
    for number in range(size.num_dense):
        values = draw.normal(0, 2, rows).astype(np.float32)
        batch[f"dense{number}"] = Nullable(torch.from_numpy(values), torch.from_numpy(draw.random(rows) > 0.1))
    low, high = size.list_length
    for number in range(size.num_sparse):
        lengths = draw.integers(low, high + 1, rows)
        if high == 1:
            lengths[draw.random(rows) < 0.1] = 0
        ids = draw.integers(0, 1 << 40, int(lengths.sum()))
        ids[::3] %= 256
        batch[f"sparse{number}"] = Jagged(torch.from_numpy(ids), torch.from_numpy(lengths))
    return batch


def batches_of_one_size(size: PlanSize, rows: int, count: int) -> list[dict[str, Any]]:
    """Batches with other values and other lists, and as many ids in each feature: a CUDA graph takes no other ones."""
    first = batch_of(size, rows)
    batches = [first]
    for seed in range(1, count):
        batch = batch_of(size, rows, seed)
        for name, value in first.items():
            if isinstance(value, Jagged):
                batch[name] = Jagged(value.values.flip(0) + seed, value.lengths.roll(seed))
        batches.append(batch)
    return batches
