"""The cluster that is simulated: nodes with GPUs, CPUs, memory and a network link. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hetstream.base.text import shortened
from hetstream.slurm_plugin.client.model import Node
from hetstream.slurm_plugin.errors import SimulationInputError

Floats = npt.NDArray[np.float64]
_KEYS = {"count": 1.0, "gpus": 0.0, "cpus": 0.0, "memory_gib": math.inf, "network_gbps": math.inf}
_MB_PER_GIB = 1024
# More than any cluster has; what is beyond it is a slip, and would not fit into memory.
_MOST_NODES, _MOST_OF_A_NODE = 1_000_000, 1e9


@dataclass(frozen=True)
class Cluster:
    """Nodes, as one array for each resource; values of CPUs and GPUs are whole.

    Attributes:
        gpus, cpus: of each node.
        memory_gib: infinite where memory is no limit.
        network_gbps: what a node's link takes in; infinite where it is no limit.
        notes: what the reader should know of how they were counted.
    """

    gpus: Floats
    cpus: Floats
    memory_gib: Floats
    network_gbps: Floats
    notes: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        return len(self.gpus)

    @property
    def num_gpus(self) -> float:
        return float(self.gpus.sum())

    @property
    def num_cpus(self) -> float:
        return float(self.cpus.sum())

    def describe(self) -> str:
        """`8 nodes, 64 GPUs, 512 CPUs`."""
        return f"{self.num_nodes:,} nodes, {self.num_gpus:,.0f} GPUs, {self.num_cpus:,.0f} CPUs"


def of_groups(groups: Iterable[Mapping[str, Any]]) -> Cluster:
    """A cluster of groups of equal nodes, each with the keys count, gpus, cpus, memory_gib and network_gbps.

    Raises:
        SimulationInputError: with all that is wrong.
    """
    problems: list[str] = []
    columns: dict[str, list[float]] = {name: [] for name in _KEYS if name != "count"}
    for place, group in enumerate(groups, start=1):
        unknown = sorted(set(group) - set(_KEYS))
        if unknown:
            problems.append(f"group {place}: no key {', '.join(unknown)}; there are {', '.join(_KEYS)}")
        values = {name: group.get(name, default) for name, default in _KEYS.items()}
        wrong = [name for name, value in values.items() if not _is_amount(value)]
        # Infinite memory and links are no limit.
        large = [
            name
            for name, value in values.items()
            if name not in wrong and value > _MOST_OF_A_NODE and value != _KEYS[name]
        ]
        problems += [
            f"group {place}: {name} is {_amount(values[name])}: must be at most {_MOST_OF_A_NODE:g}" for name in large
        ]
        problems += [f"group {place}: {name} is {values[name]!r}: must be a number of 0 or more" for name in wrong]
        if wrong or large:
            continue
        fractions = [name for name in ("count", "gpus", "cpus") if values[name] != int(values[name])]
        problems += [f"group {place}: {name} is {values[name]!r}: must be whole" for name in fractions]
        if len(columns["gpus"]) + values["count"] > _MOST_NODES:
            problems.append(f"group {place}: with it there are more than {_MOST_NODES:,} nodes")
        elif not fractions:
            for name, column in columns.items():
                column += [float(values[name])] * int(values["count"])
    if not problems and not columns["gpus"]:
        problems.append("there is no node in it")
    if problems:
        raise SimulationInputError("cluster", problems)
    gpus, cpus, memory_gib, network_gbps = (np.array(columns[name]) for name in _KEYS if name != "count")
    return Cluster(gpus, cpus, memory_gib, network_gbps)


def parse(text: str) -> Cluster:
    """A cluster from text: JSON, or groups such as `8*gpus=8,cpus=64,memory_gib=256;4*cpus=64`.

    JSON is `{"nodes": [{"count": 8, "gpus": 8, "cpus": 64, "memory_gib": 256, "network_gbps": 20}]}`.

    Raises:
        SimulationInputError: it is neither.
    """
    if text.lstrip().startswith("{"):
        try:
            document = json.loads(text, object_pairs_hook=_without_doubles)
        except (ValueError, RecursionError) as exc:
            raise SimulationInputError("cluster", [f"it cannot be read as JSON: {exc}"]) from exc
        groups = document.get("nodes") if isinstance(document, dict) else None
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise SimulationInputError("cluster", ['it has no list "nodes" of objects'])
        return of_groups(groups)
    groups, problems = [], []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = re.fullmatch(r"(?:(\d+)\*)?(\w+=[\d.]+(?:,\w+=[\d.]+)*)", part)
        if not match:
            problems.append(f"{part!r}: must look like 8*gpus=8,cpus=64,memory_gib=256")
            continue
        try:
            pairs = [item.split("=") for item in match[2].split(",")]
            own = _without_doubles([(name, float(value)) for name, value in pairs])
            groups.append({"count": float(match[1] or 1), **own})
        except ValueError as exc:
            problems.append(f"{part!r}: {exc}")
    if problems:
        raise SimulationInputError("cluster", problems)
    return of_groups(groups)


def of_nodes(nodes: Iterable[Node]) -> Cluster:
    """The usable nodes of a site, from what Slurm says of them; it says nothing of their network.

    Instances of MIG are parts of GPUs, of which the simulator knows none: the GPUs that they make up count, rounded up.

    Raises:
        SimulationInputError: none is usable.
    """
    usable = [node for node in nodes if node.is_usable]
    found = of_groups(
        {
            "gpus": math.ceil(round(node.gpus_with_mig(), 6)) + sum(part.gpus_free for part in node.reserved_parts),
            # What is kept there for a reservation is there for its jobs.
            "cpus": node.cpus + sum(part.cpus_free for part in node.reserved_parts),
            "memory_gib": node.memory_mb / _MB_PER_GIB,
        }
        for node in usable
    )
    divided = [node for node in usable if node.mig]
    if not divided:
        return found
    instances = sum(node.mig for node in divided)
    note = (
        f"{instances:,} MIG instances of {len(divided):,} node(s) count as the whole GPUs that they make up; a job on "
        "one is taken to have a GPU of its own, so such jobs wait longer here than on the site"
    )
    return replace(found, notes=(note,))


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dictionary; of a key that stands twice nobody can know which one is meant.

    Raises:
        ValueError: there is one.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        double = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(double)} stands there twice")
    return found


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _amount(value: float) -> str:
    """JSON has whole numbers that no float can hold."""
    return f"{value:g}" if isinstance(value, float) else shortened(str(value), 40)
