"""Which features a trainer's GPU computes beside which layer of the model, and with how many programs. Pure.

    plan = plan_launches(graph, Batches(rows=4096), H200, layers, num_multiprocessors=132)

RAP fuses operators of one kind and launches kernel after kernel. With one kernel for whole features (`kernel.py`)
nothing is written between two operators, no feature waits for another one, and each layer has one launch at most. So
a feature is one operation of the `Problem`, and all are of one kind. A launch gets as few programs as let it end with
its layer, if it is alone: so many multiprocessors it may take away from the layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.gpu_features.checks import (
    check_each,
    check_graph,
    check_is,
    check_number,
    check_programs,
)
from hetstream.mpi_dataworkers.gpu_features.opcodes import Chain, program_of
from hetstream.mpi_dataworkers.gpu_features.operations import INSTRUCTIONS, Batches, Device, length_after
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer, Operation, Problem
from hetstream.mpi_dataworkers.gpu_features.search import search

KIND = "features"
_WORD_BYTES = 8


@dataclass(frozen=True)
class Launch:
    """A launch of the kernel.

    Attributes:
        layer: when this layer of the batch before begins.
        chains: the features, as places in `program_of(graph).chains`.
        num_programs: of the grid.
    """

    layer: str
    chains: tuple[int, ...]
    num_programs: int


@dataclass(frozen=True)
class LaunchPlan:
    """How a batch is computed beside the training of the batch before.

    Attributes:
        launches: together they have each feature once.
        exposed_s: by which a training step is longer, as predicted.
        reason: why it is this plan.
        is_padded: whether outputs of lists have zeros behind their last list, up to a size of few (`buckets.padded`):
            then steps are captured, although lists are longer and shorter. A step must take no notice of the zeros.
    """

    launches: tuple[Launch, ...]
    exposed_s: float
    reason: str
    is_padded: bool = False


def all_at_once(graph: FeatureGraph, layer: str, num_programs: int) -> LaunchPlan:
    """All features in one launch when a layer begins: what a program has that knows nothing of its layers.

    Raises:
        FeatureError: graph or layer is something else, or num_programs no whole number of at least 1.
    """
    check_graph("all_at_once", graph)
    check_is("layer", layer, str, "a layer's name, such as 'mlp.forward'")
    check_programs("num_programs", num_programs)
    chains = tuple(range(len(program_of(graph).chains)))
    return LaunchPlan((Launch(layer, chains, num_programs),), 0.0, "all features at once")


def plan_launches(
    graph: FeatureGraph,
    batches: Batches,
    device: Device,
    layers: Sequence[Layer],
    *,
    num_multiprocessors: int,
    factor: float = 1.0,
    limit_s: float = 1.0,
) -> LaunchPlan:
    """Divide the features of a graph among layers so that a training step is as little longer as can be found.

    Args:
        graph: the graph.
        batches: what they are like.
        device: on which it is computed.
        layers: of a training step, with what each leaves; `capacity.capacities` measures it.
        num_multiprocessors: of the device.
        factor: by which features take longer than the device's numbers say, as measured.
        limit_s: of the search; 0: the first plan.

    Raises:
        FeatureError: a number is negative, infinite or NaN, there is no layer or no multiprocessor, or something is of
            another type.
    """
    check_graph("plan_launches", graph)
    check_is("batches", batches, Batches, "Batches(rows=...)")
    check_number("factor", factor, is_above=True)
    check_programs("num_multiprocessors", num_multiprocessors)
    check_is("device", device, Device, "a Device, such as operations.H200")
    check_each("layers", layers, Layer)
    problem = Problem(operations_of_features(graph, batches, device, factor), tuple(layers), device.launch_s)
    found = search(problem, limit_s=limit_s)
    chains: dict[int, list[int]] = {}
    for kernel in found.kernels:
        chains.setdefault(kernel.layer, []).extend(kernel.operations)
    launches = tuple(
        Launch(
            problem.layers[layer].name,
            tuple(sorted(of_layer)),
            _programs(problem, problem.layers[layer], of_layer, num_multiprocessors),
        )
        for layer, of_layer in sorted(chains.items())
    )
    # Two kernels of one layer are one launch here, so nothing is exposed more than was found.
    return LaunchPlan(launches, found.cost.exposed_s, found.reason)


def operations_of_features(
    graph: FeatureGraph, batches: Batches, device: Device, factor: float = 1.0
) -> tuple[Operation, ...]:
    """What each feature takes of a device's memory traffic and arithmetic, in the order of the program's chains."""
    return tuple(_operation(chain, batches, device, factor) for chain in program_of(graph).chains)


def _operation(chain: Chain, batches: Batches, device: Device, factor: float) -> Operation:
    length = given_length = batches.list_length if chain.given.is_jagged else float(chain.given.width)
    instructions = 0.0
    for operator in chain.operators:
        if chain.made.is_jagged:
            length = length_after(operator, length)
        halvings = np.ceil(np.log2(len(operator.borders) + 1)) if isinstance(operator, ops.Bucketize) else 1.0
        instructions += INSTRUCTIONS[type(operator)] * float(halvings)
    made_length = length if chain.made.is_jagged else float(chain.made.width)
    num_bytes = batches.rows * (given_length * _item(chain.given.dtype) + made_length * _item(chain.made.dtype))
    num_bytes += batches.rows * _WORD_BYTES * (chain.given.is_jagged + chain.made.is_jagged)
    # Each value of the result goes through all operators.
    return Operation(
        chain.result,
        KIND,
        -1,
        factor * num_bytes / device.bytes_per_s,
        factor * instructions * batches.rows * made_length / device.instructions_per_s,
    )


def _item(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def _programs(problem: Problem, layer: Layer, chains: Sequence[int], num_multiprocessors: int) -> int:
    operations = [problem.operations[at] for at in chains]
    alone_s = max(sum(each.memory_s for each in operations), sum(each.compute_s for each in operations))
    share = alone_s / layer.duration_s if layer.duration_s > 0 else 1.0
    return max(1, min(num_multiprocessors, math.ceil(share * num_multiprocessors)))


def without_layers(plan: LaunchPlan, known: Sequence[str]) -> LaunchPlan:
    """The same plan where some layers' launches wait for the batch to be wanted, since no such layer begins.

    Raises:
        FeatureError: not one layer of the plan is known.
    """
    unknown = sorted({launch.layer for launch in plan.launches} - set(known))
    if unknown and len(unknown) == len({launch.layer for launch in plan.launches}):
        raise FeatureError(
            f"the plan launches beside {', '.join(unknown)}, and the model has {', '.join(known) or 'no layer'}"
        )
    return replace(plan, reason=f"{plan.reason}; no layer is called {', '.join(unknown)}") if unknown else plan


def check_plan(plan: LaunchPlan, count: int) -> None:
    """Raise FeatureError where a plan is none, does not have each feature once, or a launch has no program."""
    if not isinstance(plan, LaunchPlan):
        raise FeatureError(
            f"plan={plan!r}: give a LaunchPlan; plan_launches finds one, and all_at_once needs no measurements"
        )
    check_each("plan.launches", plan.launches, Launch)
    for launch in plan.launches:
        check_is(f"{launch}: layer", launch.layer, str, "a layer's name, such as 'mlp.forward'")
        check_each(f"{launch}: chains", launch.chains, int)
        check_programs(f"{launch}: num_programs", launch.num_programs)
    chains = sorted(chain for launch in plan.launches for chain in launch.chains)
    if chains != list(range(count)):
        raise FeatureError(f"the plan has the features {chains}, and the graph 0 to {count - 1}: it is another graph's")
