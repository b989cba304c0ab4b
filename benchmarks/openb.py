"""Alibaba's openb cluster of 2023 as arrays and shapes, or a made-up one like it where the files are not there.

Called by the benchmarks of placement. The files are of alibaba/clusterdata (cluster-trace-gpu-v2023), cited in
docs/benchmarks-cluster.md; they are no part of this repository.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.running import ROOT
from hetstream.slurm_plugin.placement import WHOLE, Nodes, Shape

TRACES = ROOT.parent / "shared" / "traces"


@dataclass(frozen=True)
class Cluster:
    """Nodes, from which a fresh `Nodes` is made for each replay."""

    cpus: tuple[int, ...]
    memory_mb: tuple[int, ...]
    num_gpus: tuple[int, ...]
    gpu_type: tuple[int, ...]

    def nodes(self) -> Nodes:
        """All of it free."""
        return Nodes(self.cpus, self.memory_mb, self.num_gpus, self.gpu_type)


def read_cluster(traces: Path) -> tuple[Cluster, dict[str, int]]:
    """The nodes, and the code of each type of GPU."""
    with (traces / "openb_node_list_all_node.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    codes = {name: code for code, name in enumerate(sorted({row["model"] for row in rows if row["model"]}), start=1)}
    found = Cluster(
        tuple(int(row["cpu_milli"]) for row in rows),
        tuple(int(row["memory_mib"]) for row in rows),
        tuple(int(row["gpu"]) for row in rows),
        tuple(codes.get(row["model"], 0) for row in rows),
    )
    return found, codes


def read_jobs(traces: Path, workload: str, codes: Mapping[str, int]) -> list[Shape]:
    """The shapes of one workload, in the file's order."""
    with (traces / f"openb_pod_list_{workload}.csv").open(newline="") as file:
        return [_shape(row, codes) for row in csv.DictReader(file)]


def _shape(row: Mapping[str, str], codes: Mapping[str, int]) -> Shape:
    gpus = int(row["num_gpu"])
    # A type that no node has can be met by none: a code that is nobody's.
    types = frozenset(codes.get(name, -1) for name in (row.get("gpu_spec") or "").split("|") if name)
    share = int(row["gpu_milli"]) if gpus == 1 else WHOLE
    return Shape(int(row["cpu_milli"]), int(row["memory_mib"]), gpus, share or WHOLE, types)


def made_up_cluster(seed: int = 0) -> tuple[Cluster, dict[str, int]]:
    """Nodes of openb's commonest kinds, in their proportions."""
    # CPUs, memory in GiB, GPUs, how many in a hundred.
    kinds = [(96, 736, 8, 36), (104, 512, 2, 26), (64, 256, 2, 9), (96, 368, 4, 9), (128, 768, 8, 6), (94, 384, 0, 14)]
    generator = np.random.default_rng(seed)
    drawn = generator.choice(len(kinds), 1200, p=np.array([kind[3] for kind in kinds]) / 100)
    chosen = [kinds[one] for one in drawn]
    return Cluster(
        tuple(1000 * cpus for cpus, _, _, _ in chosen),
        tuple(1024 * memory for _, memory, _, _ in chosen),
        tuple(gpus for _, _, gpus, _ in chosen),
        tuple(1 if gpus else 0 for _, _, gpus, _ in chosen),
    ), {"made up": 1}


def made_up_jobs(workload: str, seed: int = 0) -> list[Shape]:
    """Jobs in openb's proportions: parts of a GPU, one GPU, two, four, eight, and CPUs alone (2.5 times as many of
    those in cpu250)."""
    generator = np.random.default_rng(seed)
    cpu_only = 0.13 * (2.5 if workload == "cpu250" else 1.0)
    kinds: Sequence[tuple[int, float]] = [(0, cpu_only), (1, 0.33), (2, 0.48), (3, 0.01), (4, 0.005), (5, 0.045)]
    weights = np.array([weight for _, weight in kinds])
    found = []
    for kind in generator.choice(len(kinds), 8000, p=weights / weights.sum()):
        per_gpu = int(generator.choice([4, 8, 10, 11, 12, 16], p=[0.15, 0.2, 0.1, 0.2, 0.25, 0.1])) * 1000
        if kind == 0:
            cpus = int(generator.choice([2, 8, 16, 32])) * 1000
            found.append(Shape(cpus, cpus * 2))
        elif kind == 1:
            share = int(generator.choice([160, 250, 460, 500, 750]))
            found.append(Shape(max(1000, per_gpu * share // WHOLE), per_gpu, 1, share))
        else:
            gpus = {2: 1, 3: 2, 4: 4, 5: 8}[int(kind)]
            found.append(Shape(per_gpu * gpus, 2 * per_gpu * gpus, gpus))
    return found
