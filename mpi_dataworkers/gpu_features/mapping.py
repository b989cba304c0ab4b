"""Which GPU of several computes which feature: where its embedding table is, or where there is room. Pure.

As RAP's section 7.2: every feature begins on the GPUs whose tables need it, and nothing is sent. Then features leave
the GPU whose training step is longest, one after the other, while that makes the longest step shorter. A feature of a
table whose rows are on several GPUs begins on all of those; it may be computed on fewer, and sent to the others.

What a training step is longer by, on a GPU: preprocessing that its layers leave no room for, and the exchange of
features, which comes before the tables can be read and which nothing hides. All GPUs wait for the slowest one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.gpu_features.algorithm_1 import gather
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer, Operation, Problem


@dataclass(frozen=True)
class Cluster:
    """GPUs that train one model together, all alike.

    Attributes:
        num_gpus: how many.
        layers: what the model leaves on each.
        launch_s: of a kernel.
        link_bytes_per_s: that a GPU can send, and receive at the same time.
        message_s: what an exchange of features takes besides.
    """

    num_gpus: int
    layers: tuple[Layer, ...]
    launch_s: float
    link_bytes_per_s: float
    message_s: float


@dataclass(frozen=True)
class Sparse:
    """A sparse feature.

    Attributes:
        operations: for the rows of all GPUs.
        tables: the GPUs that have rows of its table.
        num_bytes: of the result, for the rows of all GPUs.
    """

    name: str
    operations: tuple[Operation, ...]
    tables: tuple[int, ...]
    num_bytes: float


@dataclass(frozen=True)
class Exchange:
    """Bytes that a GPU sends and receives in a training step."""

    sent: float = 0.0
    received: float = 0.0

    def duration_s(self, cluster: Cluster) -> float:
        """How long that takes."""
        most = max(self.sent, self.received)
        return cluster.message_s + most / cluster.link_bytes_per_s if most else 0.0


@dataclass(frozen=True)
class Mapping:
    """Which GPUs compute each feature for the rows of all; None: every GPU computes all of them for its own rows.

    Attributes:
        places: by feature.
        moves: that were made from the data-local start.
    """

    places: tuple[tuple[int, ...], ...] | None
    moves: int = 0


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
        FeatureError: a table is on no GPU, or on one that there is not.
    """

    cluster: Cluster
    sparse: tuple[Sparse, ...]
    dense: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        for feature in self.sparse:
            known = set(range(self.cluster.num_gpus))
            if not feature.tables or not known.issuperset(feature.tables):
                raise FeatureError(f"{feature.name}: tables={feature.tables} of {self.cluster.num_gpus} GPUs")

    def problem(self, mapping: Mapping, gpu: int) -> Problem:
        """What a GPU has to schedule."""
        found = list(self.dense)
        for number, feature in enumerate(self.sparse):
            if mapping.places is None:
                _extend(found, feature.operations, 1 / self.cluster.num_gpus)
            elif gpu in mapping.places[number]:
                _extend(found, feature.operations, 1.0)
        return Problem(tuple(found), self.cluster.layers, self.cluster.launch_s)

    def exchanges(self, mapping: Mapping) -> list[Exchange]:
        """What each GPU sends and receives; of several that have computed a feature the first one sends it."""
        num = self.cluster.num_gpus
        sent, received = [0.0] * num, [0.0] * num
        for number, feature in enumerate(self.sparse):
            for table in feature.tables:
                if mapping.places is None:
                    part = feature.num_bytes / num
                    received[table] += part * (num - 1)
                    for gpu in range(num):
                        sent[gpu] += part * (gpu != table)
                elif table not in mapping.places[number]:
                    received[table] += feature.num_bytes
                    sent[mapping.places[number][0]] += feature.num_bytes
        return [Exchange(*both) for both in zip(sent, received, strict=True)]

    def exposed_s(self, mapping: Mapping, exposed: Exposed) -> list[float]:
        """By how much each GPU's training step is longer."""
        exchanges = self.exchanges(mapping)
        return [
            exposed(self.problem(mapping, gpu)) + exchanges[gpu].duration_s(self.cluster)
            for gpu in range(self.cluster.num_gpus)
        ]


def data_parallel(model: Model) -> Mapping:  # noqa: ARG001, as the other two
    """Every GPU computes all features for its own rows, and sends each to its table."""
    return Mapping(None)


def data_local(model: Model) -> Mapping:
    """Every feature where its table is."""
    return Mapping(tuple(feature.tables for feature in model.sparse))


def balanced(model: Model) -> Mapping:
    """The data-local mapping, and then moves while they help."""
    places = list(data_local(model).places or ())
    costs = _Costs(model)
    moves = 0
    while True:
        now = costs.of_all(places)
        worst = max(range(len(now)), key=lambda gpu: now[gpu])
        coolest = min(range(len(now)), key=lambda gpu: now[gpu])
        best, best_costs = None, sorted(now, reverse=True)
        for number, computing in enumerate(places):
            for goal in _other_places(computing, worst, coolest):
                after = sorted(costs.of_all([*places[:number], goal, *places[number + 1 :]]), reverse=True)
                if after < best_costs:
                    best, best_costs = (number, goal), after
        if best is None or now[worst] - best_costs[0] < 1e-12:
            return Mapping(tuple(places), moves)
        places[best[0]] = best[1]
        moves += 1


def _other_places(computing: tuple[int, ...], worst: int, coolest: int) -> list[tuple[int, ...]]:
    """Where a feature could be computed so that the GPU with the longest step has less of it."""
    if worst not in computing:
        return []
    others = tuple(gpu for gpu in computing if gpu != worst)
    found = [others] if others else []
    if coolest not in computing:
        found.append((coolest, *others))
    # It is computed there already, but another one sends it.
    if len(others) and computing[0] == worst:
        found.append((*others, worst))
    return found


class _Costs:
    """What mappings cost, quickly: launches are estimated, and each set of features is looked at once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[frozenset[int], float] = {}

    def of_all(self, places: Sequence[tuple[int, ...]]) -> list[float]:
        cluster = self._model.cluster
        exchanges = self._model.exchanges(Mapping(tuple(places)))
        sets: list[set[int]] = [set() for _ in range(cluster.num_gpus)]
        for number, computing in enumerate(places):
            for gpu in computing:
                sets[gpu].add(number)
        return [
            self._preprocessing_s(frozenset(found)) + exchange.duration_s(cluster)
            for found, exchange in zip(sets, exchanges, strict=True)
        ]

    def _preprocessing_s(self, features: frozenset[int]) -> float:
        if features not in self._known:
            operations = list(self._model.dense)
            for number in sorted(features):
                _extend(operations, self._model.sparse[number].operations, 1.0)
            cluster = self._model.cluster
            self._known[features] = estimate_s(Problem(tuple(operations), cluster.layers, cluster.launch_s))
        return self._known[features]


def estimate_s(problem: Problem) -> float:
    """What a good schedule exposes, without one: the layers as one, and as many launches as `gather`."""
    launches_s = len(gather(problem.operations)) * problem.launch_s
    over = [0.0]
    for name in ("memory_s", "compute_s"):
        work = sum(getattr(operation, name) for operation in problem.operations)
        over.append(work + launches_s - sum(getattr(layer, name) for layer in problem.layers))
    return max(over)


def _extend(operations: list[Operation], more: Sequence[Operation], share: float) -> None:
    """Add the operations of a feature, for a share of its rows."""
    first = len(operations)
    for operation in more:
        parent = operation.parent + first if operation.parent >= 0 else -1
        memory_s, compute_s = operation.memory_s * share, operation.compute_s * share
        operations.append(replace(operation, parent=parent, memory_s=memory_s, compute_s=compute_s))
