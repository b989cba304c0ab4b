"""Which features a trainer's GPU computes beside which layer of the model, and with how many programs. Pure.

    plan = plan_launches(graph, Batches(rows=4096), H200, layers, num_multiprocessors=132)

RAP fuses operators of one kind and launches kernel after kernel. With one kernel for whole features (`kernel.py`)
nothing is written between two operators, no feature waits for another one, and each layer has one launch at most. So
a feature is one operation of the `Problem`, and all are of one kind. A launch gets as few programs as let it end with
its layer, if it is alone: so many multiprocessors it may take away from the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.gpu_features.arena import Chain, program_of
from hetstream.mpi_dataworkers.gpu_features.operations import INSTRUCTIONS, Batches, Device, length_after
from hetstream.mpi_dataworkers.gpu_features.schedule import (
    Layer,
    Operation,
    Problem,
    check_callable,
    check_each,
    check_graph,
    check_is,
    check_number,
    check_programs,
    check_whole,
    filled_s,
)
from hetstream.mpi_dataworkers.gpu_features.search import gather, search

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
    """Return all features in one launch when a layer begins: what a program has that knows nothing of its layers.

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
    """Return what each feature takes of a device's memory traffic and arithmetic, in the order of the program's
    chains.
    """
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
    """Return the same plan where some layers' launches wait for the batch to be wanted, since no such layer begins.

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


# Which GPU of several computes which feature: where its embedding table is, or where there is room. Pure.
#
# As RAP's section 7.2: every feature begins on the GPUs whose tables need it, and nothing is sent. Then features leave
# the GPU whose training step is longest, one after the other, while that makes the longest step shorter. A feature of a
# table whose rows are on several GPUs begins on all of those; it may be computed on fewer, and sent to the others.
#
# What a training step is longer by, on a GPU: preprocessing that its layers leave no room for, and the exchange of
# features, where that is more than what the model leaves of the links. All GPUs wait for the slowest one.

# GPUs that compute a feature.
Places = tuple[int, ...]
# What is exposed and by how much room is exceeded, of all GPUs, the largest first; to the picosecond.
Rank = tuple[list[float], list[float]]


@dataclass(frozen=True)
class GpuGroup:
    """GPUs that train one model together, all alike.

    Attributes:
        num_gpus: how many.
        layers: what the model leaves on each.
        launch_s: of a kernel.
        link_bytes_per_s: that a GPU can send, and receive at the same time.
        message_s: what an exchange of features takes besides.
        free_link_s: of a training step, in which the model leaves the links unused: so much of an exchange that is for
            the next batch is hidden.

    Raises:
        FeatureError: there is no GPU, a number is negative or NaN, or the links send nothing.
    """

    num_gpus: int
    layers: tuple[Layer, ...]
    launch_s: float
    link_bytes_per_s: float
    message_s: float
    free_link_s: float = 0.0

    def __post_init__(self) -> None:
        check_whole("Cluster: num_gpus", self.num_gpus, 1)
        check_number("Cluster: link_bytes_per_s", self.link_bytes_per_s, is_above=True, may_be_infinite=True)
        for name in ("launch_s", "message_s", "free_link_s"):
            check_number(f"Cluster: {name}", getattr(self, name))


@dataclass(frozen=True)
class Sparse:
    """A sparse feature.

    Attributes:
        operations: for the rows of all GPUs.
        tables: the GPUs that have rows of its table.
        num_bytes: of the result, for the rows of all GPUs.

    Raises:
        FeatureError: num_bytes is negative, infinite or NaN, or something is of another type.
    """

    name: str
    operations: tuple[Operation, ...]
    tables: tuple[int, ...]
    num_bytes: float

    def __post_init__(self) -> None:
        check_each(f"feature {self.name}: operations", self.operations, Operation)
        check_each(f"feature {self.name}: tables", self.tables, int)
        check_number(f"feature {self.name}: num_bytes", self.num_bytes)


@dataclass(frozen=True)
class Exchange:
    """Bytes that a GPU sends and receives in a training step."""

    sent: float = 0.0
    received: float = 0.0

    def duration_s(self, cluster: GpuGroup) -> float:
        """Return how long that takes."""
        most = max(self.sent, self.received)
        return cluster.message_s + most / cluster.link_bytes_per_s if most else 0.0

    def exposed_s(self, cluster: GpuGroup) -> float:
        """By how much it makes a step longer, if it is for the next batch."""
        return max(0.0, self.duration_s(cluster) - cluster.free_link_s)


@dataclass(frozen=True)
class Mapping:
    """Which GPUs compute each feature for the rows of all; None: every GPU computes all of them for its own rows.

    Attributes:
        places: by feature.
        moves: features that are computed elsewhere than in the data-local mapping.
        in_step: features are exchanged when a step needs them, and nothing hides that; else ahead, for the next batch.
    """

    places: tuple[Places, ...] | None
    moves: int = 0
    in_step: bool = False


# Seconds by which operations make the training step of one GPU longer.
Exposed = Callable[[Problem], float]


@dataclass(frozen=True)
class Model:
    """What is to be mapped.

    Attributes:
        cluster: the GPUs.
        sparse: features of embedding tables.
        dense: operations of all dense features, for the rows of one GPU, which computes them itself: its part of the
            batch goes through the dense layers there.

    Raises:
        FeatureError: a table is on no GPU, on one that there is not, or twice on one.
    """

    cluster: GpuGroup
    sparse: tuple[Sparse, ...]
    dense: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        check_is("cluster", self.cluster, GpuGroup, "a GpuGroup")
        check_each("sparse", self.sparse, Sparse)
        for feature in self.sparse:
            self._check_gpus(f"feature {feature.name}: tables", feature.tables)
        Problem(self.dense, self.cluster.layers, self.cluster.launch_s)  # which looks at the others

    def _check_gpus(self, name: str, gpus: object) -> None:
        num = self.cluster.num_gpus
        check_each(name, gpus, int)
        assert isinstance(gpus, tuple | list)
        if not gpus or not all(0 <= gpu < num for gpu in gpus) or len(set(gpus)) < len(gpus):
            raise FeatureError(f"{name}={gpus} of {num} GPUs: name one at least, by its number from 0, each once")

    def _check_mapping(self, mapping: Mapping) -> None:
        check_is("mapping", mapping, Mapping, "a Mapping, such as data_local(model)")
        if mapping.places is None:
            return
        check_each("mapping.places", mapping.places, tuple)
        if len(mapping.places) != len(self.sparse):
            raise FeatureError(
                f"the mapping has the places of {len(mapping.places)} features, and the model {len(self.sparse)}: "
                "it is another model's"
            )
        for feature, computing in zip(self.sparse, mapping.places, strict=True):
            self._check_gpus(f"feature {feature.name}: places", computing)

    def problem(self, mapping: Mapping, gpu: int) -> Problem:
        """Return what a GPU has to schedule.

        Raises:
            FeatureError: the mapping is none of this model, or there is no such GPU.
        """
        self._check_mapping(mapping)
        check_whole("gpu", gpu, 0, self.cluster.num_gpus - 1)
        found = list(self.dense)
        for number, feature in enumerate(self.sparse):
            if mapping.places is None:
                extend(found, feature.operations, 1 / self.cluster.num_gpus)
            elif gpu in mapping.places[number]:
                extend(found, feature.operations, 1.0)
        return Problem(tuple(found), self.cluster.layers, self.cluster.launch_s)

    def exchanges(self, mapping: Mapping) -> list[Exchange]:
        """Return what each GPU sends and receives; of several that have computed a feature the first one sends it.

        Raises:
            FeatureError: the mapping is none of this model.
        """
        self._check_mapping(mapping)
        return self.exchanges_of(mapping)

    def exchanges_of(self, mapping: Mapping) -> list[Exchange]:
        """As `exchanges`, unchecked; a feature may have no place yet, and is then not sent."""
        num = self.cluster.num_gpus
        sent, received = [0.0] * num, [0.0] * num
        for number, feature in enumerate(self.sparse):
            for table in feature.tables:
                if mapping.places is None:
                    part = feature.num_bytes / num
                    received[table] += part * (num - 1)
                    for gpu in range(num):
                        sent[gpu] += part * (gpu != table)
                elif mapping.places[number] and table not in mapping.places[number]:
                    received[table] += feature.num_bytes
                    sent[mapping.places[number][0]] += feature.num_bytes
        return [Exchange(*both) for both in zip(sent, received, strict=True)]

    def exposed_s(self, mapping: Mapping, exposed: Exposed) -> list[float]:
        """By how much each GPU's training step is longer.

        Raises:
            FeatureError: the mapping is none of this model, or exposed no function.
        """
        check_callable("exposed", exposed, "a function of a Problem, such as estimate_s")
        exchanges = self.exchanges(mapping)
        taken = Exchange.duration_s if mapping.in_step else Exchange.exposed_s
        return [
            exposed(self.problem(mapping, gpu)) + taken(exchanges[gpu], self.cluster)
            for gpu in range(self.cluster.num_gpus)
        ]


def data_parallel(model: Model, *, in_step: bool = True) -> Mapping:
    """Return the mapping by which every GPU computes all features for its own rows and sends each to its table.

    In the step, as TorchRec does.

    Raises:
        FeatureError: this is no `Model`.
    """
    check_is("model", model, Model, "a Model")
    return Mapping(None, in_step=in_step)


def data_local(model: Model) -> Mapping:
    """Return the mapping that has every feature where its table is.

    Raises:
        FeatureError: this is no `Model`.
    """
    check_is("model", model, Model, "a Model")
    return Mapping(tuple(feature.tables for feature in model.sparse))


def balanced(model: Model) -> Mapping:
    """Return the data-local mapping, and moves while they help; also from mappings in which many features have moved at
    once.

    Where launches are most of what a GPU has to do, one feature less saves none of them, and only many do. Where the
    exchange is hidden anyway, every GPU on its own rows may be the best. Of mappings that expose alike, the one is
    taken that leaves the most room: a schedule never fills all of it.

    Raises:
        FeatureError: this is no `Model`.
    """
    local = list(data_local(model).places or ())
    costs = _Costs(model)
    worst = costs.worst(local)
    starts = [local, _spread(costs, local, [at for at, computing in enumerate(local) if worst in computing])]
    starts.append(_spread(costs, local, range(len(local))))
    found = min((_descend(costs, start) for start in starts), key=costs.rank)
    own_rows = data_parallel(model, in_step=False)
    if costs.rank_of_own_rows(own_rows) < costs.rank(found):
        return own_rows
    return Mapping(tuple(found), sum(computing != before for computing, before in zip(found, local, strict=True)))


def _spread(costs: _Costs, local: Sequence[Places], moving: Iterable[int]) -> list[Places]:
    """These features one after the other, the dearest first, each where the GPUs then have the least; others stay."""
    places: list[Places] = list(local)
    order = sorted(moving, key=lambda number: -costs.alone_s(number))
    for number in order:
        places[number] = ()
    for number in order:
        goals = [local[number], *((gpu,) for gpu in range(costs.num_gpus) if (gpu,) != local[number])]
        places[number] = min(goals, key=lambda goal: costs.rank(_with(places, number, goal)))
    return places


def _descend(costs: _Costs, start: Sequence[Places]) -> list[Places]:
    """Features leave the GPU with the longest step, one after the other, while that makes the longest step shorter."""
    places = list(start)
    now = costs.rank(places)
    while True:
        worst = costs.worst(places)
        moves = (
            _with(places, number, goal)
            for number, computing in enumerate(places)
            for goal in _other_places(computing, worst, costs.num_gpus)
        )
        best = min(moves, key=costs.rank, default=places)
        if not (rank := costs.rank(best)) < now:
            return places
        places, now = best, rank


def _with(places: Sequence[Places], number: int, goal: Places) -> list[Places]:
    return [*places[:number], goal, *places[number + 1 :]]


def _other_places(computing: Places, worst: int, num_gpus: int) -> list[Places]:
    """Where a feature could be computed so that the GPU with the longest step has less of it."""
    if worst not in computing:
        return []
    others = tuple(gpu for gpu in computing if gpu != worst)
    found = [others] if others else []
    found += [(gpu, *others) for gpu in range(num_gpus) if gpu not in computing]
    # It is computed there already, but another one sends it.
    if len(others) and computing[0] == worst:
        found.append((*others, worst))
    return found


class _Costs:
    """What mappings cost, quickly: launches are estimated, and each set of features is looked at once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.num_gpus = model.cluster.num_gpus
        self._known: dict[frozenset[int], float] = {}

    def rank_of_own_rows(self, mapping: Mapping) -> Rank:
        """As `rank`."""
        model = self._model
        loads = [_filled_s(model.problem(mapping, gpu)) for gpu in range(self.num_gpus)]
        exchanges = [exchange.exposed_s(model.cluster) for exchange in model.exchanges(mapping)]
        return _rank([*zip(loads, exchanges, strict=True)])

    def alone_s(self, number: int) -> float:
        """Of a feature, by itself."""
        return sum(operation.alone_s for operation in self._model.sparse[number].operations)

    def rank(self, places: Sequence[Places]) -> Rank:
        """Return the smaller the better: the longest step, then the second longest, and so on; then who has the least
        room.
        """
        return _rank(self._of_all(places))

    def worst(self, places: Sequence[Places]) -> int:
        """Return the GPU with the longest step; of several the one with the least room."""
        each = self._of_all(places)
        return max(range(len(each)), key=lambda gpu: (max(0.0, each[gpu][0]) + each[gpu][1], each[gpu][0]))

    def _of_all(self, places: Sequence[Places]) -> list[tuple[float, float]]:
        """Of each GPU: by how much preprocessing exceeds its room, and what of its exchange is exposed."""
        cluster = self._model.cluster
        exchanges = self._model.exchanges_of(Mapping(tuple(places)))
        sets: list[set[int]] = [set() for _ in range(self.num_gpus)]
        for number, computing in enumerate(places):
            for gpu in computing:
                sets[gpu].add(number)
        return [
            (self._preprocessing_s(frozenset(found)), exchange.exposed_s(cluster))
            for found, exchange in zip(sets, exchanges, strict=True)
        ]

    def _preprocessing_s(self, features: frozenset[int]) -> float:
        if features not in self._known:
            operations = list(self._model.dense)
            for number in sorted(features):
                extend(operations, self._model.sparse[number].operations, 1.0)
            cluster = self._model.cluster
            self._known[features] = _filled_s(Problem(tuple(operations), cluster.layers, cluster.launch_s))
        return self._known[features]


def estimate_s(problem: Problem) -> float:
    """Return what a good schedule exposes, without one: operations fill the layers as water does, with `gather`'s
    launches.

    Raises:
        FeatureError: this is no `Problem`.
    """
    check_is("problem", problem, Problem, "a Problem")
    return max(0.0, _filled_s(problem))


def _filled_s(problem: Problem) -> float:
    return filled_s(problem, len(gather(problem.operations)))


def _rank(costs: Sequence[tuple[float, float]]) -> Rank:
    exposed = sorted((round(max(0.0, over_s) + exchange_s, 12) for over_s, exchange_s in costs), reverse=True)
    return exposed, sorted((round(over_s, 12) for over_s, _ in costs), reverse=True)


def extend(operations: list[Operation], more: Sequence[Operation], share: float) -> None:
    """Add the operations of a feature, for a share of its rows."""
    first = len(operations)
    for operation in more:
        parent = operation.parent + first if operation.parent >= 0 else -1
        memory_s, compute_s = operation.memory_s * share, operation.compute_s * share
        operations.append(replace(operation, parent=parent, memory_s=memory_s, compute_s=compute_s))
