"""What no mapping of features to GPUs is better than, by the cost model: relaxations that are quickly solved. Pure.

Three things hold of every mapping, and the largest of them is the bound:

* all GPUs together have to do all work, with the launches of the dense features each;
* somebody has to compute each feature: with the launches of its longest chain, beside the dense ones;
* what a GPU's tables need is computed there or sent there. Features that it does not compute may be divided, and those
  that cost the most for each byte go first; as long as one with many operators stays, its launches stay.

In each, what a GPU does fills its layers as water does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hetstream.mpi_dataworkers.gpu_features.mapping import Model, Sparse
from hetstream.mpi_dataworkers.gpu_features.schedule import Operation, Problem, filled_s

_RESOURCES = ("memory_s", "compute_s")


def least_exposed_s(model: Model) -> float:
    """No mapping makes the slowest GPU's step longer by less."""
    return max(_of_all(model), *(_of_one(model, feature) for feature in model.sparse), _of_tables(model))


def chain(operations: Sequence[Operation]) -> int:
    """Operators that need each other, the most of them: so many launches."""
    depths: list[int] = []
    for operation in operations:
        depths.append(1 + (depths[operation.parent] if operation.parent >= 0 else 0))
    return max(depths, default=0)


def _work(operations: Sequence[Operation], name: str) -> float:
    return sum(float(getattr(operation, name)) for operation in operations)


def _room(model: Model, name: str) -> float:
    return sum(float(getattr(layer, name)) for layer in model.cluster.layers)


def _of_all(model: Model) -> float:
    num, launches_s = model.cluster.num_gpus, chain(model.dense) * model.cluster.launch_s
    shares = []
    for name in _RESOURCES:
        sparse = sum(_work(feature.operations, name) for feature in model.sparse)
        shares.append(sparse / num + _work(model.dense, name) + launches_s - _room(model, name))
    return max(0.0, *shares)


def _of_one(model: Model, feature: Sparse) -> float:
    cluster = model.cluster
    alone = [*model.dense]
    first = len(alone)
    for operation in feature.operations:
        parent = operation.parent + first if operation.parent >= 0 else -1
        alone.append(Operation(operation.name, operation.kind, parent, operation.memory_s, operation.compute_s))
    launches = max(chain(model.dense), chain(feature.operations))
    return filled_s(Problem(tuple(alone), cluster.layers, cluster.launch_s), launches)


def _of_tables(model: Model) -> float:
    bounds = [0.0]
    for gpu in range(model.cluster.num_gpus):
        # Where nothing has to be sent, a feature may be anywhere.
        own = [feature for feature in model.sparse if gpu in feature.tables and feature.num_bytes > 0]
        longest = sorted(own, key=lambda feature: -chain(feature.operations))
        # The first so many are sent; of the others any part is.
        bounds.append(min(_with_sent(model, longest[:number], longest[number:]) for number in range(len(longest) + 1)))
    return max(bounds)


def _with_sent(model: Model, sent: Sequence[Sparse], others: Sequence[Sparse]) -> float:
    cluster = model.cluster
    launches = max([chain(model.dense), *(chain(feature.operations) for feature in others)])
    launches_s = launches * cluster.launch_s
    alone_s = launches_s - sum(min(layer.memory_s, layer.compute_s) for layer in cluster.layers)
    sent_bytes = sum(feature.num_bytes for feature in sent)
    bounds = []
    for name in _RESOURCES:
        kept_s = _work(model.dense, name) + launches_s - _room(model, name)
        kept_s += sum(_work(feature.operations, name) for feature in others)
        # What costs the most for each byte goes first.
        rates = sorted(
            ((feature.num_bytes, _work(feature.operations, name)) for feature in others),
            key=lambda pair: -pair[1] / pair[0],
        )
        points = [(sent_bytes, kept_s)]
        for num_bytes, work_s in rates:
            at_bytes, at_s = points[-1]
            if at_s > 0 >= at_s - work_s:
                points.append((at_bytes + num_bytes * at_s / work_s, 0.0))
            points.append((at_bytes + num_bytes, at_s - work_s))
        free_bytes = max(0.0, (cluster.free_link_s - cluster.message_s) * cluster.link_bytes_per_s)
        points += [
            (free_bytes, before_s + (after_s - before_s) * (free_bytes - before) / (after - before))
            for (before, before_s), (after, after_s) in pairwise(points)
            if before < free_bytes < after
        ]
        bounds.append(min(max(0.0, alone_s, at_s) + _sending_s(model, at_bytes) for at_bytes, at_s in points))
    return max(bounds)


def _sending_s(model: Model, num_bytes: float) -> float:
    cluster = model.cluster
    if num_bytes <= 0:
        return 0.0
    return max(0.0, cluster.message_s + num_bytes / cluster.link_bytes_per_s - cluster.free_link_s)
