"""What `rap_predict.py` measures: single operators on several features, and what is known of them and of whole graphs.

The counts are those of `native.cpp`: what its loops do for an operator. A processor that guesses wrong how long the
next list is loses more time than a value takes, so that lists are told by all their lengths.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from benchmarks.latency_model import CLASSES, KernelSize, beyond_caches
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, Nullable
from hetstream.mpi_dataworkers.features.graph import Feature, FeatureGraph, dense, groups_of, jagged
from hetstream.mpi_dataworkers.features.operators import FeatureType

# Lengths of a feature's lists, each as often as the others.
Lengths = np.ndarray[Any, np.dtype[np.int64]]

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
# Of lists also: some of them are empty.
SHORT_WIDTHS = (0.5, 1.5)
FEATURES, ROWS = (1, 2, 3, 5, 8, 13, 21, 34), (256, 2048)
MOST_VALUES = 600_000  # of a kernel
# Kernels of each program at each width: more of those that have numbers of their own.
SAMPLES, SAMPLES_OF_CLASSES = 4, 18
_EVEN = 0.3  # of the kernels of lists
_LINE_BYTES, _PAGE_BYTES = 64, 4096  # of memory: a value is read with those beside it
# native.cpp copies so many values of a list at once, and has a loop of its own for windows of two.
_BLOCK, _PAIR = 8, 2
# Windows of more values than this are counted as if they had so many.
_LARGE_WINDOW = 4
# Of turns of the loops for one list, after so many a processor no longer knows by heart when the next one ends.
_KNOWN_TURNS, _FORGOTTEN_TURNS = 12, 36
# Between a private cache and the one that all cores share: of that nobody knows how much is left for one of them.
# With the edges of `beyond_caches` these steps reach every power of two.
_SHARE_STEP = 8
_TABLE = tuple(range(1000, 1256))
_BORDERS = tuple(float(place) for place in range(-8, 9))
# Every program of the plans: an operator with a number that is drawn, and the type that it takes.
PROGRAMS: tuple[tuple[Callable[[random.Random], ops.Operator], FeatureType], ...] = (
    (lambda _: ops.Logit(1e-3), FeatureType("float32")),
    (lambda draw: ops.BoxCox(draw.uniform(-1, 1)), FeatureType("float32")),
    (lambda _: ops.Bucketize(_BORDERS), FeatureType("float32")),
    *(
        (lambda draw: ops.Onehot(-4.0, 4.0, draw.randint(2, 8)), FeatureType(dtype))
        for dtype in ("float32", "int32", "int64")
    ),
    *(
        (lambda draw: ops.Clamp(-draw.randint(1, 50), 900), FeatureType(dtype))
        for dtype in ("float32", "int32", "int64")
    ),
    *((lambda draw: ops.FillNull(draw.randint(0, 9)), FeatureType(dtype)) for dtype in ("float32", "int32", "int64")),
    (lambda draw: ops.FillNull(draw.randint(0, 9)), FeatureType("float32", is_nullable=True)),
    *((lambda _: ops.MapId(_TABLE), FeatureType(dtype)) for dtype in ("int32", "int64")),
    (lambda draw: ops.SigridHash(draw.randint(0, 99), draw.randint(1 << 10, 1 << 30)), FeatureType("int64")),
    *(
        (lambda _, made=made: ops.Cast(made), FeatureType(given))  # type: ignore[misc]
        for given, made in itertools.permutations(("float32", "int32", "int64"), 2)
    ),
    *(
        (lambda draw: ops.FirstX(draw.randint(8, 64)), FeatureType(dtype, is_jagged=True))
        for dtype in ("int32", "int64")
    ),
    *((lambda draw: ops.Ngram(draw.randint(2, 4)), FeatureType(dtype, is_jagged=True)) for dtype in ("int32", "int64")),
)


@dataclass(frozen=True)
class Work:
    """A kernel to be measured.

    Attributes:
        operators: one for each feature.
        given: the features' type, of one value in a row.
        num_rows: of each.
        width: values in a row; of lists on average.
        lengths: of lists, each as often as the others; empty for others.
    """

    operators: tuple[ops.Operator, ...]
    given: FeatureType
    num_rows: int
    width: float
    lengths: tuple[int, ...] = ()

    @cached_property
    def size(self) -> KernelSize:
        """What is known of it beforehand."""
        first = self.operators[0]
        made, count = first.result(self.given), len(self.operators)
        lengths = np.array(self.lengths, dtype=np.int64) if self.lengths else None
        made_widths = [_made_width(operator, self.width, lengths) for operator in self.operators]
        counts: Counter[str] = Counter()
        for operator in self.operators:
            counts.update(counts_of(operator, self.num_rows, self.width, lengths))
        item = np.dtype(self.given.dtype).itemsize
        read = {}
        if isinstance(first, ops.Onehot):
            read = _first_values(int(self.width) * item, count * self.num_rows)
        return KernelSize(
            first.name,
            form_of(self.given, made),
            count,
            self.num_rows,
            self.width,
            sum(made_widths) / count,
            item,
            np.dtype(made.dtype).itemsize,
            dict(counts),
            **read,
        )

    @cached_property
    def graph(self) -> FeatureGraph:
        """It as a graph."""
        chains = {f"y{at}": self._source(f"x{at}") >> operator for at, operator in enumerate(self.operators)}
        return FeatureGraph.of(chains)

    def batch(self, draw: np.random.Generator) -> dict[str, Any]:
        """Values that are drawn."""
        return {f"x{at}": self._input(draw) for at in range(len(self.operators))}

    def terms(self, caches: Sequence[int]) -> dict[str, float]:
        """As of any graph."""
        lengths = np.array(self.lengths, dtype=np.int64)
        return terms_of_graph(self.graph, {name.name: lengths for name in self.graph.inputs}, self.num_rows, caches)

    def _source(self, name: str) -> Feature:
        if self.given.is_jagged:
            return jagged(name, self.given.dtype)
        return dense(name, self.given.dtype, width=int(self.width), is_nullable=self.given.is_nullable)

    def _input(self, draw: np.random.Generator) -> Any:
        width = int(self.width)
        if self.given.is_jagged:
            lengths = draw.choice(self.lengths, self.num_rows)
            return Jagged(self._values(int(lengths.sum()), draw), torch.from_numpy(lengths))
        shape = (self.num_rows,) if width == 1 else (self.num_rows, width)
        values = self._values(self.num_rows * width, draw).reshape(shape)
        if self.given.is_nullable:
            return Nullable(values, torch.from_numpy(draw.random(shape) > 0.1))
        return values

    def _values(self, count: int, draw: np.random.Generator) -> torch.Tensor:
        drawn = draw.normal(0, 200, count) if not self.given.is_float else draw.normal(0, 2, count)
        return torch.from_numpy(drawn.astype(self.given.dtype))


def samples(draw: random.Random, widths: Sequence[int], count: int, count_of_classes: int) -> Iterator[Work]:
    """Kernels of all programs at all widths."""
    for make, given in PROGRAMS:
        for width in (*(SHORT_WIDTHS if given.is_jagged else ()), *widths):
            for _ in range(count_of_classes if make(draw).name in CLASSES else count):
                num_features = draw.choice(FEATURES)
                most = min(float(ROWS[1]), MOST_VALUES / num_features / width)
                num_rows = round(math.exp(draw.uniform(math.log(ROWS[0]), math.log(max(ROWS[0], most)))))
                operators = tuple(make(draw) for _ in range(num_features))
                lengths = _lengths(width, draw) if given.is_jagged else ()
                yield Work(operators, given, num_rows, float(width), lengths)


def _lengths(width: float, draw: random.Random) -> tuple[int, ...]:
    """Lists of so many values on average: from half of it to one and a half, or all alike."""
    if width == int(width) and draw.random() < _EVEN:  # a processor then guesses right how long the next one is
        return (int(width),)
    low = math.ceil(width / 2) if width >= 1 else 0
    return tuple(range(low, round(2 * width) - low + 1))


def form_of(given: FeatureType, made: FeatureType) -> str:
    """What tells programs of an operator apart."""
    return f"{given.dtype}{'?' if given.is_nullable else ''} to {made.dtype}"


def counts_of(operator: ops.Operator, rows: int, width: float, lengths: Lengths | None) -> dict[str, float]:
    """What native.cpp does for a feature, beside its values: of its loops, how often each one turns.

    Args:
        operator: the operator.
        rows: of the feature.
        width: values in a row.
        lengths: of lists.
    """
    match operator:
        case ops.Bucketize(borders):
            return {"pass": rows * width * (len(borders) + 1).bit_length()}
        case ops.FirstX(n) if lengths is not None:
            blocks = -(-np.minimum(n, lengths) // _BLOCK)
            found = {"block": blocks.mean(), "guess": _unlike(blocks), "two blocks": (blocks > 1).mean()}
        case ops.Ngram(n) if lengths is not None and n == _PAIR:
            windows = np.maximum(lengths - 1, 0)
            blocks, rest = windows // _BLOCK, windows % _BLOCK
            found = {"pairs": 1.0, "pair block": blocks.mean(), "pair": rest.mean()}
            found |= {"pair guess": _unlike(blocks), "pair guess of rest": _unlike(rest)}
        case ops.Ngram(n) if lengths is not None:
            sizes = np.minimum(n, lengths)
            windows = np.where(sizes > 0, lengths - sizes + 1, 0)
            known = np.clip((_FORGOTTEN_TURNS - windows * sizes) / (_FORGOTTEN_TURNS - _KNOWN_TURNS), 0, 1).mean()
            guess = max(_unlike(lengths), 1 - known) if len(lengths) == 1 else _unlike(windows * 64 + sizes)
            found = {"list": float((sizes > 0).mean()), "guess": guess, "guess of size": _unlike(sizes)}
            for size in range(1, _LARGE_WINDOW + 1):
                alike = sizes == size if size < _LARGE_WINDOW else sizes >= size
                found[f"window of {size}"] = (windows * alike).mean()
        case _:
            return {}
    return {name: rows * float(each) for name, each in found.items()}


def _unlike(outcomes: Lengths) -> float:
    """How often an outcome is not what the one before was."""
    _, counts = np.unique(outcomes, return_counts=True)
    return 1 - float(((counts / counts.sum()) ** 2).sum())


def _first_values(stride: int, rows: int) -> dict[str, float]:
    """Of the first value in each row, rows being so many bytes apart: bytes read, held in a cache, and apart.

    Lines come in pairs. A cache has places for a line by its address in the page: where a stride leaves some of them
    out, the others are fought for, and it holds less. Second-level caches mix other bits of the address in, so that it
    is less than that: the root of it is between the two.
    """
    lines = rows * min(1.0, stride / _LINE_BYTES)
    step = 2 * _LINE_BYTES if stride > 2 * _LINE_BYTES else _LINE_BYTES
    shared = math.sqrt(max(1.0, math.gcd(stride, _PAGE_BYTES) / step))
    is_apart = stride > 2 * _LINE_BYTES
    return {
        "read_bytes": _LINE_BYTES * lines,
        "held_bytes": step * lines * shared,
        "apart_bytes": _LINE_BYTES * lines * is_apart,
    }


def _made_width(operator: ops.Operator, width: float, lengths: Lengths | None) -> float:
    if isinstance(operator, ops.Onehot):
        return float(operator.num_classes)
    return width if lengths is None else float(lengths_after(operator, lengths).mean())


def lengths_after(operator: ops.Operator, lengths: Lengths) -> Lengths:
    """The lengths of the lists that an operator makes."""
    if isinstance(operator, ops.FirstX):
        return np.minimum(operator.n, lengths)
    if isinstance(operator, ops.Ngram):
        sizes = np.minimum(operator.n, lengths)
        return np.where(sizes > 0, (lengths - sizes + 1) * sizes, 0)
    return lengths


def terms_of_graph(
    graph: FeatureGraph, lengths: Mapping[str, Lengths], rows: int, caches: Sequence[int]
) -> dict[str, float]:
    """What a whole graph takes is a sum of these: of the call, its inputs, groups, chains, operators and outputs.

    Args:
        graph: the graph.
        lengths: of each jagged input.
        rows: of a batch.
        caches: bytes of the processor's caches.
    """
    terms: Counter[str] = Counter(call=1.0)
    known: dict[str, Lengths] = dict(lengths)
    num_bytes = made_bytes = joined_bytes = 0.0

    def bytes_of(name: str) -> float:
        kind = graph.types[name]
        width = known[name].mean() + 1 if kind.is_jagged else kind.width
        return float(rows * width * np.dtype(kind.dtype).itemsize)

    for node in graph.inputs:
        terms[f"input, {'list' if node.type.is_jagged else 'mask' if node.type.is_nullable else 'dense'}"] += 1
        terms["row of a list"] += rows * node.type.is_jagged
        num_bytes += bytes_of(node.name)
    for group in groups_of(graph):
        is_list = graph.types[group[0].source].is_jagged
        terms[f"group, {'list' if is_list else 'dense'}"] += 1
        terms["operator"] += len(group[0].steps)
        for chain in group:
            terms[f"chain, {'list' if is_list else 'dense'}"] += 1
            for step in chain.steps:
                terms["operator of a chain"] += 1
                terms.update(_terms_of_step(graph, step.name, step.of, step.operator, known, rows))
            made_bytes += bytes_of(chain.result)
    for output in graph.outputs:
        kind = "as it is" if not output.keys else "lists" if graph.types[output.of[0]].is_jagged else "matrix"
        terms[f"output, {kind}"] += 1
        terms[f"feature, {kind}"] += len(output.of)
        terms["row, lists"] += rows * len(output.of) * (kind == "lists")
        joined = sum(map(bytes_of, output.of)) if output.keys else 0.0
        terms[f"byte, {kind}"] += joined
        joined_bytes += joined
    num_bytes += made_bytes + joined_bytes
    return {**terms, "byte": num_bytes, **beyond_caches("byte", num_bytes, num_bytes, with_shares(caches))}


def with_shares(caches: Sequence[int]) -> list[int]:
    """Bytes of the caches, and what one process may have of the last one, where that is larger than the one before."""
    found = [*caches]
    for private, shared in itertools.pairwise(caches[-2:]):
        size = private * _SHARE_STEP
        while size < shared / 2:
            found.append(size)
            size *= _SHARE_STEP
    return found


def _terms_of_step(
    graph: FeatureGraph, name: str, of: str, operator: ops.Operator, known: dict[str, Lengths], rows: int
) -> dict[str, float]:
    given, made = graph.types[of], graph.types[name]
    lengths = known[of] if given.is_jagged else None
    if made.is_jagged and lengths is not None:
        known[name] = lengths_after(operator, lengths)
    width = given.width if lengths is None else float(lengths.mean())
    made_width = made.width if not made.is_jagged else float(known[name].mean())
    found = {"value": rows * width, **counts_of(operator, rows, width, lengths)}
    if isinstance(operator, ops.Onehot):  # of which it reads the first ones
        found["value"] = rows * min(1.0, width * np.dtype(given.dtype).itemsize / _LINE_BYTES)
    if isinstance(operator, ops.Onehot | ops.FirstX | ops.Ngram):
        found |= {"row": float(rows), "made": rows * made_width}
    if isinstance(operator, ops.FirstX):  # the rest of a list is not touched
        del found["value"]
    return {f"{operator.name} {form_of(given, made)}: {each}": count for each, count in found.items()}
