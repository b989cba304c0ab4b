"""The eleven operators on tiles, with torch: each call does one operator's work for all features of a tile.

A kernel is made once for the operators of a group of features, which have one class and the same kind of parameters,
and is called for every tile of every batch. What the operators mean is said in `operators.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.features.operators import (
    BoxCox,
    Bucketize,
    Cast,
    Clamp,
    FillNull,
    FirstX,
    Logit,
    MapId,
    Ngram,
    Onehot,
    Operator,
    SigridHash,
)
from hetstream.mpi_dataworkers.features.tiles import Parameter, Tile, ranges
from hetstream.mpi_dataworkers.features.types import RANGES, FeatureType

TORCH_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "int32", "int64")}


class Kernel(ABC):
    """An operator at work on the features of a group.

    Args:
        operators: one for each feature.
        given: the features' type.
    """

    def __init__(self, operators: Sequence[Any], given: FeatureType) -> None:  # noqa: ARG002, those below need them
        self.given = given
        self.dtype: torch.dtype = TORCH_DTYPES[given.dtype]

    @abstractmethod
    def __call__(self, tile: Tile) -> Tile:
        """What becomes of a tile, whose values may be overwritten."""

    @classmethod
    def kind(cls, operator: Any) -> Hashable:  # noqa: ARG003, likewise
        """What the parameters of two operators must have in common for one kernel to do both."""
        return None


class ByValue(Kernel):
    """A kernel that makes one value of each: several of them can be compiled into one pass.

    Attributes:
        may_compile: whether its arguments have the same form for every tile.
    """

    may_compile: bool = True
    parameters: Sequence[Parameter] = ()

    def arguments(self, tile: Tile, as_tensors: bool = False) -> tuple[Any, ...]:
        """What `compute` needs beside the values."""
        return tuple(parameter.over(tile, as_tensors) for parameter in self.parameters)

    @abstractmethod
    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """The operator; it may write into `x`."""

    def __call__(self, tile: Tile) -> Tile:
        return tile.with_values(self.compute(tile.values.view(tile.shape), *self.arguments(tile)))


def _clamp_(x: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
    if isinstance(low, torch.Tensor) == isinstance(high, torch.Tensor):
        return x.clamp_(low, high)
    return x.clamp_min_(low).clamp_max_(high)


class _Logit(ByValue):
    def __init__(self, operators: Sequence[Logit], given: FeatureType) -> None:
        super().__init__(operators, given)
        lows = [float(np.float32(one.eps)) for one in operators]
        highs = [float(np.float32(1) - np.float32(one.eps)) for one in operators]
        self.parameters = Parameter(lows, torch.float32), Parameter(highs, torch.float32)

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        low, high = arguments
        t = _clamp_(x.to(torch.float32), low, high)
        return t.div_(1 - t).log_()


class _BoxCox(ByValue):
    def __init__(self, operators: Sequence[BoxCox], given: FeatureType) -> None:
        super().__init__(operators, given)
        self.is_log = operators[0].lmbda == 0
        self.parameters = () if self.is_log else (Parameter([one.lmbda for one in operators], torch.float64),)

    @classmethod
    def kind(cls, operator: BoxCox) -> Hashable:
        return operator.lmbda == 0

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if self.is_log:
            return torch.where(x > 0, torch.log(x), x).to(torch.float32)
        [lmbda] = arguments
        powers = torch.expm1_(x.to(torch.float64, copy=True).log_().mul_(lmbda)).div_(lmbda)
        return torch.where(x > 0, powers.to(torch.float32), x.to(torch.float32))


_FACTOR = 0x9DDFEA08EB382D69 - 2**64


def _xor_of_shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^ (x >> bits) of unsigned words, which torch's int64 are not."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


class _SigridHash(ByValue):
    def __init__(self, operators: Sequence[SigridHash], given: FeatureType) -> None:
        super().__init__(operators, given)
        self.parameters = tuple(
            Parameter(numbers, torch.int64)
            for numbers in ([one.salt for one in operators], [one.max_value for one in operators])
        )

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        salt, max_value = arguments
        # ~x + (x << 21) is x * (2**21 - 1) - 1 modulo 2**64; the other sums of shifted words are products, too.
        x.mul_(2**21 - 1).sub_(1)
        _xor_of_shifted(x, 24).mul_(265)
        _xor_of_shifted(x, 14).mul_(21)
        _xor_of_shifted(x, 28).mul_(2**31 + 1)
        for _ in range(2):
            _xor_of_shifted(x.bitwise_xor_(salt).mul_(_FACTOR), 47)
        return x.mul_(_FACTOR).remainder_(max_value)


class _Clamp(ByValue):
    def __init__(self, operators: Sequence[Clamp], given: FeatureType) -> None:
        super().__init__(operators, given)
        self.has = self.kind(operators[0])
        bounds = [[getattr(one, side) for one in operators] for side in ("lower", "upper")]
        self.parameters = tuple(Parameter(side, self.dtype) for side in bounds if side[0] is not None)

    @classmethod
    def kind(cls, operator: Clamp) -> tuple[bool, bool]:
        return operator.lower is not None, operator.upper is not None

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if self.has == (True, True):
            return _clamp_(x, *arguments)
        return x.clamp_min_(*arguments) if self.has[0] else x.clamp_max_(*arguments)


class _Bucketize(ByValue):
    def __init__(self, operators: Sequence[Bucketize], given: FeatureType) -> None:
        super().__init__(operators, given)
        tables = [self._without_repeats(np.asarray(one.borders, dtype=given.dtype)) for one in operators]
        longest = max(map(len, tables))
        # No value is above infinity, so that it is never counted.
        padded = [np.pad(table, (0, longest - len(table)), constant_values=np.inf) for table in tables]
        self._table = torch.from_numpy(np.stack(padded))
        self._of_nan = Parameter([int(len(one.borders) > 1) for one in operators], torch.int32)
        self._is_same = all(one.borders == operators[0].borders for one in operators)
        # Jagged features with borders of their own are searched one by one, in pieces of other sizes for each batch.
        self.may_compile = self._is_same

    @staticmethod
    def _without_repeats(borders: np.ndarray) -> np.ndarray:
        """The first of two equal borders becomes the number before it: an equal value is then above one of the two."""
        is_first = np.append(borders[1:] == borders[:-1], False)
        lower: np.ndarray = np.where(is_first, np.nextafter(borders, borders.dtype.type(-np.inf)), borders)
        return lower

    def arguments(self, tile: Tile, as_tensors: bool = False) -> tuple[Any, ...]:
        span = tile.span
        table = self._table[0] if self._is_same else self._table[span.first : span.last]
        return table, self._of_nan.over(tile, as_tensors), None if self._is_same or tile.is_even else tile.sizes

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        table, of_nan, sizes = arguments
        if sizes is not None:
            pieces = zip(torch.split(x, sizes), table, strict=True)
            found = torch.cat([torch.bucketize(piece, borders, out_int32=True) for piece, borders in pieces])
        elif table.dim() == 1:
            found = torch.bucketize(x, table, out_int32=True)
        else:
            found = torch.searchsorted(table, x, out_int32=True)
        is_nan = torch.isnan(x)
        if isinstance(of_nan, torch.Tensor):
            return torch.where(is_nan, of_nan, found)
        return found.masked_fill_(is_nan, of_nan)


class _MapId(ByValue):
    def __init__(self, operators: Sequence[MapId], given: FeatureType) -> None:
        super().__init__(operators, given)
        # All tables one behind the other, each once and with a 0 before and behind it.
        joined: list[int] = []
        places: dict[tuple[int, ...], int] = {}
        for one in operators:
            if one.table not in places:
                places[one.table] = len(joined)
                joined += [0, *one.table, 0]
        self._joined = torch.tensor(joined, dtype=torch.int64)
        self.parameters = tuple(
            Parameter(numbers, torch.int64)
            for numbers in ([len(one.table) for one in operators], [places[one.table] + 1 for one in operators])
        )

    def arguments(self, tile: Tile, as_tensors: bool = False) -> tuple[Any, ...]:
        return *super().arguments(tile, as_tensors), self._joined

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        size, place, joined = arguments
        at = x.to(torch.int64).clamp_min_(-1).clamp_max_(size).add_(place)
        return joined[at] if torch.compiler.is_compiling() else torch.take(joined, at)


class _FillNull(ByValue):
    def __init__(self, operators: Sequence[FillNull], given: FeatureType) -> None:
        super().__init__(operators, given)
        self.nan = operators[0].nan
        self.parameters = (Parameter([one.value for one in operators], self.dtype),)

    @classmethod
    def kind(cls, operator: FillNull) -> Hashable:
        return operator.nan

    def arguments(self, tile: Tile, as_tensors: bool = False) -> tuple[Any, ...]:
        valid = None if tile.valid is None else tile.valid.view(tile.shape)
        return *super().arguments(tile, as_tensors), valid

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        value, valid = arguments
        if valid is None and not self.nan:
            return x
        missing = torch.isnan(x) if valid is None else ~valid
        if self.nan and valid is not None:
            missing = missing.logical_or_(torch.isnan(x))
        return torch.where(missing, value, x) if isinstance(value, torch.Tensor) else x.masked_fill_(missing, value)


class _Cast(ByValue):
    def __init__(self, operators: Sequence[Cast], given: FeatureType) -> None:
        super().__init__(operators, given)
        self.to = operators[0].dtype

    @classmethod
    def kind(cls, operator: Cast) -> Hashable:
        return operator.dtype

    def compute(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        goal = TORCH_DTYPES[self.to]
        if self.to not in RANGES or self.given.dtype in (self.to, "int32"):
            return x.to(goal)
        low, high = RANGES[self.to]
        if not self.given.is_float:
            return x.clamp_(low, high).to(goal)
        x = x.to(torch.float64).nan_to_num_(nan=0.0)
        if self.to == "int32":
            return x.clamp_(low, high).to(goal)
        # 2**63 - 1 is no floating-point number: what is above the largest one below it is filled in afterwards.
        too_large = x >= 2.0**63
        return x.clamp_(-(2.0**63), float(np.nextafter(2.0**63, 0))).to(goal).masked_fill_(too_large, high)


class _Onehot(Kernel):
    def __init__(self, operators: Sequence[Onehot], given: FeatureType) -> None:
        super().__init__(operators, given)
        self._classes = [one.num_classes for one in operators]
        self._parameters = [
            Parameter(numbers, torch.float32)
            for numbers in (
                [one.lower for one in operators],
                [one.step for one in operators],
                [float(one.num_classes) for one in operators],
            )
        ]

    def __call__(self, tile: Tile) -> Tile:
        span, count = tile.span, len(tile.sizes)
        if tile.lengths is None:
            firsts, empty = tile.values.view(-1, self.given.width)[:, 0].to(torch.float32), None
        elif len(tile.values):
            starts = torch.cumsum(tile.lengths, 0).sub_(tile.lengths)
            firsts, empty = tile.values[starts.clamp_max_(len(tile.values) - 1)].to(torch.float32), tile.lengths == 0
        else:
            firsts, empty = torch.zeros(len(tile.lengths)), torch.ones(len(tile.lengths), dtype=torch.bool)
        by_row = replace(tile, values=firsts, sizes=(tile.num_rows,) * count)
        lower, step, classes = (parameter.over(by_row) for parameter in self._parameters)
        place = (firsts.view(count, tile.num_rows) - lower).div_(step)
        is_outside = (place >= 0).logical_and_(place < classes).logical_not_()
        if empty is not None:
            is_outside.logical_or_(empty.view_as(is_outside))
        chosen = place.masked_fill_(is_outside, 0).to(torch.int64)
        widths = torch.tensor(self._classes[span.first : span.last])
        sizes = widths * tile.num_rows
        chosen += (torch.cumsum(sizes, 0) - sizes).unsqueeze(1)
        chosen += widths.unsqueeze(1) * torch.arange(tile.num_rows)
        values = torch.zeros(int(sizes.sum())).index_fill_(0, chosen.view(-1), 1.0)
        return replace(tile, values=values, sizes=tuple(sizes.tolist()), lengths=None)


class _Lists(Kernel):
    """A kernel of jagged features with a number n for each: the list of a row becomes other values of itself."""

    def __init__(self, operators: Sequence[FirstX] | Sequence[Ngram], given: FeatureType) -> None:
        super().__init__(operators, given)
        self._n = Parameter([min(one.n, RANGES["int64"][1]) for one in operators], torch.int64)

    def __call__(self, tile: Tile) -> Tile:
        assert tile.lengths is not None
        by_row = replace(tile, sizes=(tile.num_rows,) * len(tile.sizes))
        n = self._n.over(by_row)
        lengths = tile.lengths.view(by_row.shape)
        starts = torch.cumsum(tile.lengths, 0).sub_(tile.lengths)
        taken, new_lengths = self.pick(lengths, n, starts)
        if taken is None:
            return tile
        sizes = tuple(new_lengths.sum(1).tolist())
        return replace(tile, values=tile.values[taken], sizes=sizes, lengths=new_lengths.view(-1))

    @abstractmethod
    def pick(self, lengths: torch.Tensor, n: Any, starts: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Which values make the new lists, and the lists' new lengths; None where they stay as they are."""


class _FirstX(_Lists):
    def pick(self, lengths: torch.Tensor, n: Any, starts: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        kept = lengths.clamp(max=n)
        if torch.equal(kept, lengths):
            return None, lengths
        return ranges(starts, kept.view(-1), int(kept.sum())), kept


class _Ngram(_Lists):
    def pick(self, lengths: torch.Tensor, n: Any, starts: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        sizes = lengths.clamp(max=n)  # of a row's windows
        windows = (lengths - sizes).add_(lengths > 0)
        num_windows = int(windows.sum())
        window_starts = ranges(starts, windows.view(-1), num_windows)
        made = windows * sizes
        largest = int(sizes.max()) if sizes.numel() else 0
        if torch.equal(made, windows * largest):
            # All windows have one size: a matrix of places instead of a list for each.
            return (window_starts.unsqueeze(1) + torch.arange(largest)).view(-1), made
        counts = torch.repeat_interleave(sizes.view(-1), windows.view(-1), output_size=num_windows)
        return ranges(window_starts, counts, int(made.sum())), made


KERNELS: dict[type[Operator], type[Kernel]] = {
    Logit: _Logit,
    BoxCox: _BoxCox,
    Onehot: _Onehot,
    SigridHash: _SigridHash,
    FirstX: _FirstX,
    Clamp: _Clamp,
    Bucketize: _Bucketize,
    Ngram: _Ngram,
    MapId: _MapId,
    FillNull: _FillNull,
    Cast: _Cast,
}


class Run(Kernel):
    """Kernels by value that follow one another, as one pass over a tile: compiled, or one after the other.

    Args:
        kernels: at least one.
        compiler: makes a function faster, as `torch.compile`; None for none.
    """

    def __init__(self, kernels: Sequence[ByValue], compiler: Callable[..., Any] | None) -> None:
        super().__init__((), kernels[0].given)
        self._kernels = kernels
        self._compiled = compiler is not None and all(kernel.may_compile for kernel in kernels)
        self._function = compiler(self._in_turn) if compiler is not None and self._compiled else None

    def __call__(self, tile: Tile) -> Tile:
        if self._function is None:
            for kernel in self._kernels:
                tile = kernel(tile)
            return tile
        arguments = [kernel.arguments(tile, as_tensors=True) for kernel in self._kernels]
        return tile.with_values(self._function(tile.values.view(tile.shape), arguments))

    def _in_turn(self, x: torch.Tensor, arguments: list[tuple[Any, ...]]) -> torch.Tensor:
        # Compiled code leaves this copy out, and need not write into what it was given.
        x = x.clone()
        for kernel, own in zip(self._kernels, arguments, strict=True):
            x = kernel.compute(x, *own)
        return x
