"""What no mapping of features to GPUs is better than, by the cost model: relaxations that are quickly solved. Pure.

Of every mapping it holds that all GPUs together have to do all work, with the launches of the dense features each.
Either every GPU computes all features for its own rows, with the launches of all of them; or somebody computes each
feature as a whole, and the largest of these is the bound:

* each feature beside the dense ones, with the launches of both;
* of nine features that need many launches two are on one of eight GPUs;
* what a GPU's tables need is computed there or sent there. Features that it does not compute may be divided, and those
  that cost the most for each byte go first; as long as one with many operators stays, its launches stay.

In each, what a GPU does fills its layers as water does, and it needs no fewer launches than, of each kind, the chain
that has the most operators of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from hetstream.mpi_dataworkers.gpu_features import launches as mapping
from hetstream.mpi_dataworkers.gpu_features import schedule
from hetstream.mpi_dataworkers.gpu_features.launches import Model, Sparse
from hetstream.mpi_dataworkers.gpu_features.schedule import Operation, Problem, longest_chains

_RESOURCES = ("memory_s", "compute_s")


def least_exposed_s(model: Model) -> float:
    """No mapping makes the slowest GPU's step longer by less."""
    own_rows = mapping.data_parallel(model, in_step=False)
    on_own_rows_s = schedule.least_exposed_s(model.problem(own_rows, 0))
    as_wholes_s = max(_of_tables(model), _of_pairs(model), *(_together(model, [each]) for each in model.sparse))
    return max(_of_all(model), min(on_own_rows_s, as_wholes_s))


def launches(*parts: Sequence[Operation]) -> int:
    """That a GPU needs for all of these, at least."""
    most: dict[str, int] = {}
    for operations in parts:
        for kind, count in longest_chains(operations).items():
            most[kind] = max(count, most.get(kind, 0))
    return sum(most.values())


def _work(operations: Sequence[Operation], name: str) -> float:
    return sum(float(getattr(operation, name)) for operation in operations)


def _room(model: Model, name: str) -> float:
    return sum(float(getattr(layer, name)) for layer in model.cluster.layers)


def _of_all(model: Model) -> float:
    num, launches_s = model.cluster.num_gpus, launches(model.dense) * model.cluster.launch_s
    shares = []
    for name in _RESOURCES:
        sparse = sum(_work(feature.operations, name) for feature in model.sparse)
        shares.append(sparse / num + _work(model.dense, name) + launches_s - _room(model, name))
    return max(0.0, *shares)


def _together(model: Model, features: Sequence[Sparse]) -> float:
    """Some features on one GPU."""
    cluster = model.cluster
    all_operations = [*model.dense]
    for feature in features:
        mapping.extend(all_operations, feature.operations, 1.0)
    return schedule.least_exposed_s(Problem(tuple(all_operations), cluster.layers, cluster.launch_s))


def _of_pairs(model: Model) -> float:
    """Of one feature more than there are GPUs, two meet: at best those two that go best together."""
    longest = sorted(model.sparse, key=lambda feature: -launches(feature.operations))[: model.cluster.num_gpus + 1]
    if len(longest) <= model.cluster.num_gpus:
        return 0.0
    return min(_together(model, pair) for pair in combinations(longest, 2))


def _of_tables(model: Model) -> float:
    bounds = [0.0]
    for gpu in range(model.cluster.num_gpus):
        # Where nothing has to be sent, a feature may be anywhere.
        own = [feature for feature in model.sparse if gpu in feature.tables and feature.num_bytes > 0]
        longest = sorted(own, key=lambda feature: -launches(feature.operations))
        # The first so many are sent; of the others any part is.
        bounds.append(min(_with_sent(model, longest[:number], longest[number:]) for number in range(len(longest) + 1)))
    return max(bounds)


def _with_sent(model: Model, sent: Sequence[Sparse], others: Sequence[Sparse]) -> float:
    cluster = model.cluster
    # The longest of the others stays.
    launches_s = launches(model.dense, *(feature.operations for feature in others[:1])) * cluster.launch_s
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
