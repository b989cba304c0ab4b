"""The preprocessing plans of RAP's Table 3 as feature graphs, and a fifth one with lists of many ids. Pure.

    graph = make_plan(PLANS[2])

The paper gives the number of features and operators of each plan, and says of plans 0 and 1 that every feature is
filled and then normalised; the operators of plans 2 and 3 are drawn at random, there and here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.graph import Feature, FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.operators import FeatureType
from hetstream.mpi_dataworkers.gpu_features.schedule import check_each, check_is, check_whole

# Distinct ids of the 26 sparse columns of the two public Criteo datasets; their sums are the paper's 33.7 and 177.9
# million (Table 2).
KAGGLE_IDS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
TERABYTE_IDS = (
    *(45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10),
    *(2209, 11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35),
)
_BORDERS = tuple(float(place) for place in range(-8, 9))
_TABLE_PLACES = 256
# Features, and operators: a graph of more is made for minutes.
_MOST = 100_000


@dataclass(frozen=True)
class PlanSize:
    """What Table 3 says of a plan.

    Attributes:
        name: the paper's.
        num_ids: rows of the embedding tables, one for each sparse column of the dataset.
        num_dense, num_sparse: features.
        num_operators: in the whole graph.
        list_length: ids in a sparse feature's list, at least and at most; 1 in Criteo's data, which has no lists.
        is_random: whether operators are drawn; else every feature is filled and normalised.

    Raises:
        FeatureError: a number is negative, not whole or beyond 100,000, there is no feature, sparse ones have no table,
            there are fewer than two operators for each feature, lists are to be shorter than their shortest, or
            something is of another type.
    """

    name: str
    num_ids: tuple[int, ...]
    num_dense: int
    num_sparse: int
    num_operators: int
    list_length: tuple[int, int] = (1, 1)
    is_random: bool = True

    def __post_init__(self) -> None:
        who = f"PlanSize {self.name}"
        check_whole(f"{who}: num_dense", self.num_dense, 0, _MOST)
        check_whole(f"{who}: num_sparse", self.num_sparse, 0 if self.num_dense else 1, _MOST)
        if self.is_random:
            check_whole(f"{who}: num_operators", self.num_operators, 2 * (self.num_dense + self.num_sparse), _MOST)
        check_each(f"{who}: num_ids", self.num_ids, int)
        if self.num_sparse and not (self.num_ids and min(self.num_ids) >= 1):
            raise FeatureError(
                f"{who}: num_ids={self.num_ids!r}: give the rows of at least one table, 1 at least of each"
            )
        if not isinstance(self.list_length, tuple) or len(self.list_length) != 2:
            raise FeatureError(
                f"{who}: list_length={self.list_length!r}: give the least and the most, such as (32, 64)"
            )
        low, high = self.list_length
        check_whole(f"{who}: list_length[0]", low, 0)
        check_whole(f"{who}: list_length[1]", high, low)


PLANS = (
    PlanSize("plan 0", KAGGLE_IDS, 13, 26, 104, is_random=False),
    PlanSize("plan 1", TERABYTE_IDS, 13, 26, 104, is_random=False),
    PlanSize("plan 2", TERABYTE_IDS, 26, 52, 384),
    PlanSize("plan 3", TERABYTE_IDS, 52, 104, 1548),
    # Not of the paper: its plans have one id in each list, and are over on a new GPU before they are worth hiding.
    PlanSize("plan 4", TERABYTE_IDS, 52, 104, 1548, list_length=(32, 64)),
)


def make_plan(size: PlanSize, seed: int = 0) -> FeatureGraph:
    """A plan as a feature graph.

    Its inputs are `dense0`, `dense1`, ... (float32, values may be missing) and `sparse0`, ... (lists of int64); its
    outputs a matrix `dense` and a `JaggedBatch` called `sparse`; without such features one is left out.

    Args:
        size: How many features and operators.
        seed: The same size and seed make the same graph everywhere.

    Raises:
        FeatureError: this is no `PlanSize`, or seed no whole number: 1.0 would make another graph than 1.
    """
    if not isinstance(size, PlanSize):
        raise FeatureError(f"make_plan({size!r}): give a PlanSize, such as PLANS[2]")
    check_is("seed", seed, int, "a whole number")
    draw = random.Random(f"{size.name} {seed}")
    counts = _operators_of_each(size, draw) if size.is_random else []
    dense_features, sparse_features = [], []
    for number in range(size.num_dense):
        filled = dense(f"dense{number}", is_nullable=True) >> ops.FillNull(0.0)
        dense_features.append(_grown(filled, counts[number], draw) if size.is_random else filled >> ops.Logit())
    for number in range(size.num_sparse):
        filled = jagged(f"sparse{number}") >> ops.FillNull(0)
        num_rows = _rows_of_table(size, number)
        if size.is_random:
            count = counts[size.num_dense + number]
            feature = _grown(filled, count - 1, draw) >> ops.SigridHash(number, num_rows)
        else:
            feature = filled >> ops.SigridHash(number, num_rows) >> ops.FirstX(1)
        sparse_features.append(feature)
    outputs = {"dense": dense_features, "sparse": sparse_features}
    return FeatureGraph.of({name: features for name, features in outputs.items() if features})


def _operators_of_each(size: PlanSize, draw: random.Random) -> list[int]:
    """How many operators each feature has: two at least, the others at random."""
    counts = [2] * (size.num_dense + size.num_sparse)
    for _ in range(size.num_operators - sum(counts)):
        counts[draw.randrange(len(counts))] += 1
    return counts


def _rows_of_table(size: PlanSize, number: int) -> int:
    """Plans with several features for each column of the dataset share its rows among them."""
    copies = max(1, size.num_sparse // len(size.num_ids))
    return max(1, size.num_ids[number % len(size.num_ids)] // copies)


def _grown(feature: Feature, count: int, draw: random.Random) -> Feature:
    """A feature with operators added at random until it has `count`; the last one gives the dtype that it has now."""
    given = _type_of(feature)
    wanted = given.dtype
    while len(feature.operators) < count:
        is_last = len(feature.operators) == count - 1
        given = _type_of(feature)
        choices = [
            operator
            for operator in _candidates(given, feature, draw)
            if not operator.refusal(given) and not (is_last and operator.result(given).dtype != wanted)
        ]
        feature = feature >> draw.choice(choices)
    return feature


def _type_of(feature: Feature) -> FeatureType:
    kind = feature.input.type
    for operator in feature.operators:
        kind = operator.result(kind)
    return kind


def _candidates(given: FeatureType, feature: Feature, draw: random.Random) -> list[ops.Operator]:
    """An operator of each class that makes sense there; those that do not take the type are refused later."""
    found: list[ops.Operator] = [
        ops.Clamp(-draw.randint(1, 50), draw.randint(50, 1000)),
        ops.FillNull(draw.randint(0, 9)),
        *(ops.Cast(dtype) for dtype in ("float32", "int32", "int64") if dtype != given.dtype),
        ops.MapId(tuple(draw.randrange(1 << 40) for _ in range(_TABLE_PLACES))),
    ]
    if given.is_jagged:
        found += [
            ops.SigridHash(draw.randrange(1 << 30), draw.randint(1 << 10, 1 << 40)),
            ops.FirstX(draw.randint(8, 64)),
        ]
        if not any(isinstance(operator, ops.Ngram) for operator in feature.operators):
            found.append(ops.Ngram(draw.randint(2, 4)))  # two of them would make lists of hundreds
        return [operator for operator in found if operator != ops.Cast("float32")]
    found += [ops.Logit(draw.uniform(1e-6, 1e-2)), ops.BoxCox(draw.uniform(-1, 1)), ops.Bucketize(_BORDERS)]
    if not any(isinstance(operator, ops.Onehot) for operator in feature.operators):
        found.append(ops.Onehot(-4.0, 4.0, draw.randint(2, 8)))
    return found
