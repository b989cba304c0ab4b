"""A feature graph as numbers that a GPU reads: for each feature of an output, the operators from its input on. Pure.

What several features begin with alike is computed for each: reading it twice costs more than computing it twice.
`arena.py` adds where a batch's values are, and `kernel.py` carries it out; both have the layout from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, Output, Step
from hetstream.mpi_dataworkers.features.types import DTYPES, RANGES, FeatureType
from hetstream.mpi_dataworkers.gpu_features.checks import check_graph

Words = npt.NDArray[np.int64]
# Of a feature in the batch's table, and of an operator in the constants: 8 bytes each.
FEATURE_WORDS = 16
OPERATOR_WORDS = 8
# A batch's arena begins with its rows, where features and tiles are, and from here on the tiles of each launch.
LAUNCHES_AT = 4
# The first three of an operator are its opcode, the dtype that it takes and the dtype that it gives; then its numbers.
_NUMBERS_AT = 3
# More values than any list has.
_MOST = RANGES["int64"][1]


@dataclass(frozen=True)
class Chain:
    """A feature of an output.

    Attributes:
        source: the input that it begins with.
        result: the feature.
        operators: in order.
        first: the place of the first one in the constants, in operators.
        given, made: types of source and result.
        output: the place of the output, and within it.
    """

    source: str
    result: str
    operators: tuple[ops.Operator, ...]
    first: int
    given: FeatureType
    made: FeatureType
    output: tuple[int, int]

    @property
    def is_moved(self) -> bool:
        """Whether its values are not the results of the values at the same places of the source."""
        return any(isinstance(operator, ops.Onehot | ops.FirstX | ops.Ngram) for operator in self.operators)

    @property
    def has_classes(self) -> bool:
        """Whether its rows are made by an Onehot."""
        return any(isinstance(operator, ops.Onehot) for operator in self.operators)

    def lengths(self, lengths: Words) -> Words:
        """Of the lists of the result, where those of the source are these."""
        for operator in self.operators:
            if isinstance(operator, ops.FirstX):
                lengths = np.minimum(lengths, min(operator.n, _MOST))
            elif isinstance(operator, ops.Ngram):
                sizes = np.minimum(lengths, min(operator.n, _MOST))
                lengths = (lengths - sizes + (lengths > 0)) * sizes
        return lengths


@dataclass(frozen=True)
class Program:
    """A graph's chains, and the constants of their operators.

    Attributes:
        chains: by output, and within one in its order.
        constants: operators, `OPERATOR_WORDS` each, and behind them the tables of Bucketize and MapId.
    """

    chains: tuple[Chain, ...]
    constants: Words


def program_of(graph: FeatureGraph) -> Program:
    """Compile a graph.

    Raises:
        FeatureError: this is none.
    """
    check_graph("program_of", graph)
    steps = {step.name: step for step in graph.steps}
    chains: list[Chain] = []
    taken: list[tuple[ops.Operator, FeatureType, bool]] = []
    for number, output in enumerate(graph.outputs):
        for place, name in enumerate(output.of):
            path = _path(steps, name)
            source = path[0].of if path else name
            operators = tuple(step.operator for step in path)
            kinds = (graph.types[source], graph.types[name])
            chains.append(Chain(source, name, operators, len(taken), *kinds, (number, place)))
            last_classes = max((at for at, each in enumerate(operators) if isinstance(each, ops.Onehot)), default=-1)
            taken += [(step.operator, graph.types[step.of], at == last_classes) for at, step in enumerate(path)]
    tables = _Tables(len(taken) * OPERATOR_WORDS)
    rows = [_words_of(operator, given, is_last, tables) for operator, given, is_last in taken]
    operators_words = np.zeros((len(rows), OPERATOR_WORDS), dtype=np.int64)
    for at, row in enumerate(rows):
        operators_words[at, : len(row)] = row
    return Program(tuple(chains), np.concatenate([operators_words.reshape(-1), *tables.pieces]))


def is_matrix(output: Output, kinds: Sequence[FeatureType]) -> bool:
    """Whether an output has dense features as its columns."""
    return bool(output.keys) and not any(kind.is_jagged for kind in kinds)


def _path(steps: dict[str, Step], name: str) -> list[Step]:
    found = []
    while name in steps:
        found.append(steps[name])
        name = steps[name].of
    return found[::-1]


class _Tables:
    """Tables behind the operators; equal ones are there once."""

    def __init__(self, first: int) -> None:
        self.pieces: list[Words] = []
        self._size = first
        self._known: dict[tuple[ops.Operator, str], int] = {}

    def place(self, operator: ops.Operator, dtype: str, numbers: Words) -> int:
        """Where an operator's table is, in words."""
        key = operator, dtype
        if key not in self._known:
            self._known[key] = self._size
            self.pieces.append(numbers)
            self._size += len(numbers)
        return self._known[key]


def _words_of(operator: ops.Operator, given: FeatureType, is_last: bool, tables: _Tables) -> list[int]:
    numbers = _numbers_of(operator, given, is_last, tables)
    assert len(numbers) <= OPERATOR_WORDS - _NUMBERS_AT
    kinds = (DTYPES.index(given.dtype), DTYPES.index(operator.result(given).dtype))
    return [ops.OPERATORS.index(type(operator)), *kinds, *map(_word, numbers)]


def _numbers_of(operator: ops.Operator, given: FeatureType, is_last: bool, tables: _Tables) -> Sequence[float | int]:
    """What `kernel.py` has as the numbers of an operator, in its order; as floats are those of reals."""
    match operator:
        case ops.Logit(eps):
            return float(np.float32(eps)), float(np.float32(1) - np.float32(eps))
        case ops.BoxCox(lmbda):
            return (float(lmbda),)
        case ops.Onehot(lower, _, num_classes):
            return float(np.float32(lower)), operator.step, num_classes, int(is_last)
        case ops.SigridHash(salt, max_value):
            return salt, max_value
        case ops.FirstX(n) | ops.Ngram(n):
            return (min(n, _MOST),)
        case ops.Clamp(lower, upper):
            low, high = (-np.inf, np.inf) if given.is_float else RANGES[given.dtype]
            bounds = low if lower is None else lower, high if upper is None else upper
            return [_rounded(bound, given) for bound in bounds] if given.is_float else bounds
        case ops.Bucketize(borders):
            table = _distinct(np.asarray(borders, dtype=given.dtype)).astype(np.float64)
            return tables.place(operator, given.dtype, table.view(np.int64)), len(table), int(len(table) > 1)
        case ops.MapId(table):
            return tables.place(operator, "", np.asarray(table, dtype=np.int64)), len(table)
        case ops.FillNull(value, nan):
            return (_rounded(value, given) if given.is_float else value), int(nan)
    assert isinstance(operator, ops.Cast)
    return ()


def _distinct(borders: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Of two equal borders the first becomes the number before it, so that an equal value is above one of the two."""
    is_first = np.append(borders[1:] == borders[:-1], False)
    return np.where(is_first, np.nextafter(borders, borders.dtype.type(-np.inf)), borders)


def _rounded(value: float, given: FeatureType) -> float:
    return float(np.dtype(given.dtype).type(value))


def _word(value: float | int) -> int:
    """8 bytes of a number, read as an integer."""
    return int(np.float64(value).view(np.int64)) if isinstance(value, float) else int(value)
