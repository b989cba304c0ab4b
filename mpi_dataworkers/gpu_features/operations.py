"""What the operators of a feature graph cost on a device: bytes that they move, instructions that they need. Pure.

Called to make the `Problem` of a graph, and by benchmarks. An operator that runs by itself reads its input from memory
and writes its result there; it takes as long as the slower of memory and arithmetic, and a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.features.operators import FeatureType
from hetstream.mpi_dataworkers.gpu_features.schedule import Operation, check_graph, check_is, check_number

# Instructions for each value of the result, counted in what `operators.py` says of each; of Bucketize for each halving.
INSTRUCTIONS: Mapping[type[ops.Operator], float] = {
    ops.Logit: 30,
    ops.BoxCox: 110,
    ops.Onehot: 8,
    ops.SigridHash: 60,
    ops.FirstX: 20,
    ops.Clamp: 4,
    ops.Bucketize: 6,
    ops.Ngram: 45,
    ops.MapId: 8,
    ops.FillNull: 4,
    ops.Cast: 6,
}
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Batches:
    """What batches are like.

    Attributes:
        rows: of a batch.
        list_length: values in a list of a jagged input, on average.

    Raises:
        FeatureError: there is no row, or a number is negative, infinite or NaN.
    """

    rows: int
    list_length: float = 1.0

    def __post_init__(self) -> None:
        check_number("Batches: rows", self.rows, 1)
        check_number("Batches: list_length", self.list_length)


@dataclass(frozen=True)
class Device:
    """What a GPU can do.

    Attributes:
        launch_s: from one kernel to the next, whatever it does.
        bytes_per_s: of its memory.
        instructions_per_s: of simple ones, by all of its cores together.

    Raises:
        FeatureError: a number is not finite, a rate not above 0, or a launch takes less than no time.
    """

    name: str
    launch_s: float
    bytes_per_s: float
    instructions_per_s: float

    def __post_init__(self) -> None:
        check_number(f"Device {self.name}: launch_s", self.launch_s)
        for name in ("bytes_per_s", "instructions_per_s"):
            check_number(f"Device {self.name}: {name}", getattr(self, name), is_above=True)


# Memory and fp32 rates: NVIDIA's A100 (40 GB) and H200 data sheets; one instruction a lane and clock. A launch of 5 us
# is an estimate.
A100 = Device("A100 40 GB", 5e-6, 1.555e12, 9.75e12)
H200 = Device("H200", 5e-6, 4.8e12, 33.5e12)


# A core of a CPU. Estimates: of these numbers ratios count alone, since what parts of a graph take is measured.
CPU_CORE = Device("CPU core", 1e-5, 8e9, 4e9)


@dataclass(frozen=True)
class FeatureSize:
    """What a batch has of a feature; `num_bytes` with the lengths of lists."""

    values: float
    num_bytes: float


def operations_of(graph: FeatureGraph, rows: int, list_length: float, device: Device) -> tuple[Operation, ...]:
    """Return the operators of a graph, each after the one that it needs.

    Args:
        graph: the graph.
        rows: of a batch.
        list_length: values in a list of a jagged input, on average.
        device: on which they run.

    Raises:
        FeatureError: rows or list_length are negative or not finite, or something is of another type.
    """
    check_graph("operations_of", graph)
    check_number("rows", rows)
    check_number("list_length", list_length)
    check_is("device", device, Device, "a Device, such as H200")
    sizes = sizes_of(graph, rows, list_length)
    places: dict[str, int] = {}
    found: list[Operation] = []
    for step in graph.order:
        source, result = sizes[step.of], sizes[step.name]
        instructions = INSTRUCTIONS[type(step.operator)] * result.values
        if isinstance(step.operator, ops.Bucketize):
            instructions *= np.ceil(np.log2(len(step.operator.borders) + 1))
        places[step.name] = len(found)
        found.append(
            Operation(
                step.name,
                step.operator.name,
                places.get(step.of, -1),
                (source.num_bytes + result.num_bytes) / device.bytes_per_s,
                float(instructions) / device.instructions_per_s,
            )
        )
    return tuple(found)


def length_after(operator: ops.Operator, length: float) -> float:
    """Return values in the list that an operator makes of a list; lengths may be averages."""
    if isinstance(operator, ops.FirstX):
        return min(length, operator.n)
    if isinstance(operator, ops.Ngram):
        size = min(operator.n, length)
        return (length - size + 1) * size if length else 0.0
    return length


def sizes_of(graph: FeatureGraph, rows: int, list_length: float) -> dict[str, FeatureSize]:
    """Return each feature's size, by name; arguments as of `operations_of`."""
    lengths = {node.name: list_length for node in graph.inputs}
    for step in graph.order:
        lengths[step.name] = length_after(step.operator, lengths[step.of])
    return {name: _size(kind, rows, lengths[name]) for name, kind in graph.types.items()}


def _size(kind: FeatureType, rows: int, length: float) -> FeatureSize:
    values = rows * (length if kind.is_jagged else kind.width)
    lengths = rows * _LENGTH_BYTES if kind.is_jagged else 0
    return FeatureSize(values, values * np.dtype(kind.dtype).itemsize + lengths)
