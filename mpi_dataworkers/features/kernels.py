"""The eleven operators with torch, on one feature after the other: what runs where native code does not.

What an operator means is said in `operators.py`. A function is made of it once, for the features of one type, and is
called for every batch. It never writes into what it is given, which may be the batch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import TORCH_DTYPES, Columns, ranges, repeated
from hetstream.mpi_dataworkers.features.graph import Chain, FeatureGraph
from hetstream.mpi_dataworkers.features.operators import RANGES, FeatureType

# Operators that make one value of each, whatever the shape.
OfValues = Callable[[torch.Tensor], torch.Tensor]


def _logit(operator: ops.Logit, _: FeatureType) -> OfValues:
    eps = float(np.float32(operator.eps))
    return lambda x: torch.logit(x.to(torch.float32), eps)  # its upper bound is 1 - eps in float32, too


def _box_cox(operator: ops.BoxCox, _: FeatureType) -> OfValues:
    lmbda = operator.lmbda
    if lmbda == 0:
        return lambda x: torch.where(x > 0, x.log(), x).to(torch.float32)

    def found(x: torch.Tensor) -> torch.Tensor:
        powers = x.to(torch.float64, copy=True).log_().mul_(lmbda).expm1_().div_(lmbda)
        return torch.where(x > 0, powers.to(torch.float32), x.to(torch.float32))

    return found


def _sigrid_hash(operator: ops.SigridHash, _: FeatureType) -> OfValues:
    salt = np.uint64(operator.salt % 2**64)

    def found(x: torch.Tensor) -> torch.Tensor:
        # With NumPy, which has unsigned words. Of `twang_mix64` the sums of shifted words are products:
        # ~x + (x << 21) is x * (2**21 - 1) - 1 modulo 2**64, and so on.
        ids = x.numpy().view(np.uint64) * _FIRST_FACTOR
        ids -= _ONE
        for bits, factor in _MIX:
            ids ^= ids >> bits
            ids *= factor
        for _ in range(2):  # `hash_128_to_64`
            ids ^= salt
            ids *= _FACTOR
            ids ^= ids >> _BITS
        ids *= _FACTOR
        return torch.from_numpy(ids.view(np.int64)).remainder_(operator.max_value)

    return found


_ONE, _FIRST_FACTOR = np.uint64(1), np.uint64(2**21 - 1)
_MIX = tuple((np.uint64(bits), np.uint64(factor)) for bits, factor in ((24, 265), (14, 21), (28, 2**31 + 1)))
_BITS, _FACTOR = np.uint64(47), np.uint64(0x9DDFEA08EB382D69)


def _clamp(operator: ops.Clamp, given: FeatureType) -> OfValues:
    low, high = (
        None if bound is None else _number(bound, given.is_float) for bound in (operator.lower, operator.upper)
    )
    return lambda x: x.clamp(low, high)


def _bucketize(operator: ops.Bucketize, given: FeatureType) -> OfValues:
    table = torch.from_numpy(borders_without_repeats(np.asarray(operator.borders, dtype=given.dtype)))
    of_nan = int(len(operator.borders) > 1)
    return lambda x: torch.bucketize(x, table, out_int32=True).masked_fill_(x.isnan(), of_nan)


def borders_without_repeats(borders: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Let the first of two equal borders become the number before it: an equal value is then above one of
    the two.
    """
    is_first = np.append(borders[1:] == borders[:-1], False)
    return np.where(is_first, np.nextafter(borders, borders.dtype.type(-np.inf)), borders)


def _map_id(operator: ops.MapId, _: FeatureType) -> OfValues:
    size, table = len(operator.table), torch.tensor([0, *operator.table, 0], dtype=torch.int64)

    def found(x: torch.Tensor) -> torch.Tensor:
        places = x.to(torch.int64).clamp(-1, size).add_(1)
        return table.index_select(0, places.view(-1)).view(x.shape)  # table[places] takes three times as long

    return found


def _fill_null(operator: ops.FillNull, given: FeatureType) -> OfValues:
    if not operator.nan:
        return lambda x: x
    value = _number(operator.value, given.is_float)
    return lambda x: x.nan_to_num(nan=value, posinf=np.inf, neginf=-np.inf)


def _filled(x: torch.Tensor, valid: torch.Tensor, operator: Any) -> torch.Tensor:
    """The values, and that of FillNull where there is none."""
    return x.masked_fill(~valid.view(x.shape), _number(operator.value, x.is_floating_point()))


def _cast(operator: ops.Cast, given: FeatureType) -> OfValues:
    goal = TORCH_DTYPES[operator.dtype]
    if operator.dtype not in RANGES or given.dtype in (operator.dtype, "int32"):
        return lambda x: x.to(goal)
    low, high = RANGES[operator.dtype]
    if not given.is_float:
        return lambda x: x.clamp(low, high).to(goal)
    end = -float(low)  # a power of two, which floating point has, unlike 2**63 - 1

    def found(x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            smallest, largest = map(float, torch.aminmax(x))
            if low <= smallest and largest < end:  # not where one of them is NaN
                return x.to(goal)
        inside = x.to(torch.float64).nan_to_num(nan=0.0).clamp(low, float(np.nextafter(end, 0)))
        return inside.to(goal).masked_fill_(x >= end, high)

    return found


def _number(value: float | int, is_float: bool) -> float | int:
    """As torch takes it: an integer beyond int64 is none for it."""
    return float(value) if is_float else value


# Operators that make rows or lists of another length. Lengths are None where a row has no list.
OfRows = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]


def _onehot(operator: ops.Onehot, _: FeatureType) -> OfRows:
    lower, step, num_classes = float(np.float32(operator.lower)), operator.step, operator.num_classes

    def found(x: torch.Tensor, lengths: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        if lengths is None:
            firsts = (x if x.dim() == 1 else x[:, 0]).to(torch.float32)
        else:
            has_one = lengths > 0
            firsts = torch.full(lengths.shape, np.nan, dtype=torch.float32)  # no class: it becomes class 0
            firsts[has_one] = x[_starts(lengths)[has_one]].to(torch.float32)
        places = (firsts - lower).div_(step)
        is_class = (places >= 0).logical_and_(places < num_classes)
        chosen = places.masked_fill_(~is_class, 0).to(torch.int64)
        rows = torch.zeros((len(chosen), num_classes), dtype=torch.float32).scatter_(1, chosen.unsqueeze(1), 1.0)
        return rows if num_classes > 1 else rows.view(-1), None

    return found


def _first_x(operator: ops.FirstX, _: FeatureType) -> OfRows:
    n = min(operator.n, RANGES["int64"][1])

    def found(x: torch.Tensor, lengths: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert lengths is not None
        kept = lengths.clamp(max=n)
        if torch.equal(kept, lengths):
            return x, lengths
        return x.index_select(0, ranges(_starts(lengths), kept, int(kept.sum()))), kept

    return found


def _ngram(operator: ops.Ngram, _: FeatureType) -> OfRows:
    n = min(operator.n, RANGES["int64"][1])

    def found(x: torch.Tensor, lengths: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert lengths is not None
        sizes = lengths.clamp(max=n)  # of a row's windows
        windows = (lengths - sizes).add_(lengths > 0)
        made = windows * sizes
        starts = ranges(_starts(lengths), windows, int(windows.sum()))
        largest = int(sizes.max()) if len(sizes) else 0
        if torch.equal(made, windows * largest):
            # All windows have one size: a matrix of places instead of a list for each.
            places = starts.unsqueeze(1).add(torch.arange(largest)).view(-1)
        else:
            places = ranges(starts, repeated(sizes, windows), int(made.sum()))
        return x.index_select(0, places), made

    return found


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.cumsum(0).sub_(lengths)


_OF_VALUES: Mapping[type[ops.Operator], Callable[[Any, FeatureType], OfValues]] = {
    ops.Logit: _logit,
    ops.BoxCox: _box_cox,
    ops.SigridHash: _sigrid_hash,
    ops.Clamp: _clamp,
    ops.Bucketize: _bucketize,
    ops.MapId: _map_id,
    ops.FillNull: _fill_null,
    ops.Cast: _cast,
}
_OF_ROWS: Mapping[type[ops.Operator], Callable[[Any, FeatureType], OfRows]] = {
    ops.Onehot: _onehot,
    ops.FirstX: _first_x,
    ops.Ngram: _ngram,
}


def _function_of(operator: ops.Operator, given: FeatureType) -> OfRows:
    if type(operator) in _OF_ROWS:
        return _OF_ROWS[type(operator)](operator, given)
    of_values = _OF_VALUES[type(operator)](operator, given)
    return lambda x, lengths: (of_values(x), lengths)


class TorchGroup:
    """Chains that are computed with torch, one after the other.

    Args:
        chains: at least one.
        graph: whose chains they are.
    """

    def __init__(self, chains: Sequence[Chain], graph: FeatureGraph) -> None:
        self.chains = chains
        made: dict[tuple[ops.Operator, str], OfRows] = {}  # equal operators share a table

        def function_of(operator: ops.Operator, given: FeatureType) -> OfRows:
            key = operator, given.dtype
            return made.get(key) or made.setdefault(key, _function_of(operator, given))

        self._functions = [
            [function_of(step.operator, graph.types[step.of]) for step in chain.steps] for chain in chains
        ]

    def run(self, features: Columns, num_rows: int) -> Columns:  # noqa: ARG002, native code asks for it
        """Return the features that the chains make, each in memory of its own."""
        made = Columns()
        for chain, functions in zip(self.chains, self._functions, strict=True):
            given = values = features.values[chain.source].contiguous()
            lengths = features.lengths.get(chain.source)
            if (valid := features.valid.get(chain.source)) is not None:
                values = _filled(values, valid, chain.steps[0].operator)  # no other operator takes such a feature
            for function in functions:
                values, lengths = function(values, lengths)
            made.values[chain.result] = values.clone() if values is given else values
            if lengths is not None:
                made.lengths[chain.result] = lengths
        return made
