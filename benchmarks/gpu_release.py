"""How long one process needs to give memory back at a boundary, and to take it again: AntMan's figure 11.

On a real GPU with three models, by PyTorch's own segments and by expandable ones. Called by `gpu_sharing`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu_laws import quantile
from benchmarks.gpu_machines import NO_ENVIRONMENT, Machine, OutOfTime, Run, client
from benchmarks.harness import Row
from hetstream.hetjob.gpu.emulated_file import PREFIX

PLANNED_S = 95.0
# Of that, what a program needs until it begins.
_START_S = 8.0
_REPEATS, _QUICK_REPEATS = 30, 2
_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
# As much as AntMan's, which falls from 17.6 to 1.3 GB.
_FILL_BYTES = 17_600_000_000
_ON_CUDA: Mapping[str, Mapping[str, Any]] = {
    "ResNet-50": {"model": "resnet50"},
    "VGG-16": {"model": "vgg16"},
    "transformer, 1 B parameters": {
        "model": "transformer",
        "width": 2048,
        "layers": 20,
        "tokens": 256,
        "try_sizes": (4, 12),
    },
}
_ALLOCATORS: Mapping[str, Mapping[str, str]] = {"native": NO_ENVIRONMENT, "expandable": _EXPANDABLE}


def release(node: Machine, run: Run) -> Iterator[Row]:
    """How long one process needs to give memory back at a boundary, and by how much the next mini-batch is longer."""
    if not node.is_real:
        request = {**node.sizes.large, "gpu": node.gpu.removeprefix(PREFIX)}
        found = json.loads(client("gpu_release.py", {**request, "repeats": _QUICK_REPEATS if run.quick else 10}))
        yield from rows(node, run, "figure 11: at a boundary", found)
        return
    runs = [(name, allocator) for name in _ON_CUDA for allocator in _ALLOCATORS]
    seconds = max(1.0, run.seconds / len(runs) - _START_S)
    for name, allocator in runs:
        case = f"figure 11: {name}, {allocator} segments"
        repeats = _QUICK_REPEATS if run.quick else _REPEATS
        request = {**_ON_CUDA[name], "gpu": "", "fill_bytes": _FILL_BYTES, "repeats": repeats, "seconds": seconds}
        try:
            found = json.loads(client("gpu_release.py", request, _ALLOCATORS[allocator]))
        except OutOfTime:
            raise
        except Exception as error:  # noqa: BLE001 - of one model and allocator: the others go on
            yield Row(case, "shrink", None, "ms", note=f"{type(error).__name__}: {error}".splitlines()[-1])
            continue
        if found["expandable"] != (allocator == "expandable"):
            yield Row(case, "shrink", None, "ms", note="this PyTorch did not do as its variable says")
            continue
        yield from rows(node, run, case, found)


def rows(node: Machine, run: Run, case: str, found: Mapping[str, Any]) -> Iterator[Row]:
    """What a client has found: medians, of the real GPU also the 99th percentiles, and their goals."""
    step_ms, freed_mib = statistics.median(found["step_ms"]), found["freed_bytes"] / 2**20
    note = f"a mini-batch takes {step_ms:.0f} ms, {freed_mib:,.0f} MiB are given back; {len(found['step_ms'])} times"
    goals = {"shrink": (node.sizes.shrink_ms, node.sizes.shrink_p99_ms), "grow": (node.sizes.grow_ms, None)}
    for name in ("shrink", "seen", "grow"):
        values = found[f"{name}_ms"]
        median_ms, p99_ms = goals.get(name, (None, None))
        if not values:
            if name != "seen" or node.is_real:
                yield Row(case, name, None, "ms", note="nothing was given back")
            continue
        yield _judged(run, case, name, statistics.median(values), values, median_ms, note)
        if node.is_real:
            yield _judged(run, case, f"{name}, p99", quantile(values, 0.99), values, p99_ms, note)


def _judged(run: Run, case: str, name: str, value: float, values: list[float], most_ms: float | None, note: str) -> Row:
    target, met = (None, None) if most_ms is None or run.quick else (f"<= {most_ms:g}", value <= most_ms)
    return Row(case, name, value, "ms", (min(values), max(values)), target, met, note, samples=tuple(values))
