"""The eleven operators on tiles, with torch: each call does one operator's work for all features of a tile.

A kernel is made once for the operators of a group of features, which have one class and the same kind of parameters,
and is called for every tile of every batch. What the operators mean is said in `operators.py`.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
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
from hetstream.mpi_dataworkers.features.tiles import Parameter, Tile, ranges, repeated
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
    if not isinstance(low, torch.Tensor) and not isinstance(high, torch.Tensor):
        return x.clamp_(low, high)
    return _at_most(_at_least(x, low), high)


def _at_least(x: torch.Tensor, low: Any) -> torch.Tensor:
    # torch's clamp takes six times as long where its bound is a tensor.
    return torch.maximum(x, low) if isinstance(low, torch.Tensor) else x.clamp_min_(low)


def _at_most(x: torch.Tensor, high: Any) -> torch.Tensor:
    return torch.minimum(x, high) if isinstance(high, torch.Tensor) else x.clamp_max_(high)


class _Logit(ByValue):
    def __init__(self, operators: Sequence[Logit], given: FeatureType) -> None:
        super().__init__(operators, given)
        lows = [float(np.float32(one.eps)) for one in operators]
        highs = [float(np.float32(1) - np.float32(one.eps)) for one in operators]
        self.parameters = Parameter(lows, torch.float32), Parameter(highs, torch.float32)

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        low, high = arguments
        x = x.to(torch.float32)
        # One pass, where there is one eps; it computes 1 - eps as it is computed above.
        return torch.logit_(_clamp_(x, low, high)) if isinstance(low, torch.Tensor) else torch.logit_(x, eps=low)


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


def _hash_in_place(x: npt.NDArray[np.uint64], salt: Any) -> None:
    """What `_SigridHash.compute` says with torch. NumPy has unsigned words: fewer passes, and faster products."""
    other = np.empty_like(x)
    own_salt = salt.numpy().view(np.uint64) if isinstance(salt, torch.Tensor) else np.uint64(salt % 2**64)

    def mix(bits: int, factor: int) -> None:
        np.right_shift(x, np.uint64(bits), out=other)
        np.bitwise_xor(x, other, out=x)
        if factor != 1:
            np.multiply(x, np.uint64(factor % 2**64), out=x)

    np.multiply(x, np.uint64(2**21 - 1), out=x)
    np.subtract(x, np.uint64(1), out=x)
    mix(24, 265)
    mix(14, 21)
    mix(28, 2**31 + 1)
    np.bitwise_xor(x, own_salt, out=x)
    np.multiply(x, np.uint64(_FACTOR % 2**64), out=x)
    mix(47, 1)
    np.bitwise_xor(x, own_salt, out=x)
    np.multiply(x, np.uint64(_FACTOR % 2**64), out=x)
    mix(47, _FACTOR)


class _SigridHash(ByValue):
    def __init__(self, operators: Sequence[SigridHash], given: FeatureType) -> None:
        super().__init__(operators, given)
        self.parameters = tuple(
            Parameter(numbers, torch.int64)
            for numbers in ([one.salt for one in operators], [one.max_value for one in operators])
        )

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        salt, max_value = arguments
        if not torch.compiler.is_compiling():
            _hash_in_place(x.numpy().view(np.uint64), salt)
            return x.remainder_(max_value)
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
        return _at_least(x, *arguments) if self.has[0] else _at_most(x, *arguments)


class _Bucketize(ByValue):
    """Borders are found by a grid, because a binary search takes a mispredicted branch at every second border.

    The values between a feature's first and last border fall into cells of one size. Which cell never decreases from a
    value to a larger one, however it is rounded, so that all borders of earlier cells are below a value. The few of its
    own cell are compared one by one. Where borders are so uneven that a cell has many, they are searched after all.
    """

    def __init__(self, operators: Sequence[Bucketize], given: FeatureType) -> None:
        super().__init__(operators, given)
        tables = [self._without_repeats(np.asarray(one.borders, dtype=given.dtype)) for one in operators]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scales = [(_CELLS - 1) / (table[-1] - table[0]) if len(table) > 1 else 0.0 for table in tables]
        # Neither 0 nor infinity, which would make NaN of infinite values and of the first border.
        smallest, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
        self._tables = [torch.from_numpy(table) for table in tables]
        lows, scales = (
            [float(table[0]) for table in tables],
            [min(max(float(scale), smallest), largest) for scale in scales],
        )
        # Behind the borders of each feature stands infinity: no value is above it.
        places = [0, *np.cumsum([len(table) + 1 for table in tables[:-1]]).tolist()]
        self.parameters = tuple(
            Parameter(numbers, dtype)
            for numbers, dtype in (
                (lows, self.dtype),
                (scales, self.dtype),
                ([(_CELLS + 1) * at for at in range(len(tables))], torch.int64),
                (places, torch.int64),
            )
        )
        self._of_nan = Parameter([int(len(one.borders) > 1) for one in operators], torch.int32)
        cells = [
            _cells(table, *torch.tensor([low, scale], dtype=self.dtype))
            for table, low, scale in zip(self._tables, lows, scales, strict=True)
        ]
        firsts = []
        for of, place, one in zip(cells, places, operators, strict=True):
            of_nan = torch.tensor([place + int(len(one.borders) > 1)])
            firsts += [of_nan, torch.searchsorted(of, torch.arange(1, _CELLS + 1)) + place]
        self._first_of_cell = torch.cat(firsts)
        self._borders = torch.cat([piece for table in self._tables for piece in (table, torch.tensor([np.inf]))])
        self._borders = self._borders.to(self.dtype)
        self._most_in_a_cell = max(int(torch.bincount(of).max()) for of in cells)
        self.may_compile = self._most_in_a_cell <= _MOST_COMPARED

    @staticmethod
    def _without_repeats(borders: np.ndarray) -> np.ndarray:
        """The first of two equal borders becomes the number before it: an equal value is then above one of the two."""
        is_first = np.append(borders[1:] == borders[:-1], False)
        lower: np.ndarray = np.where(is_first, np.nextafter(borders, borders.dtype.type(-np.inf)), borders)
        return lower

    def arguments(self, tile: Tile, as_tensors: bool = False) -> tuple[Any, ...]:
        return *super().arguments(tile, as_tensors), self._first_of_cell, self._borders

    def __call__(self, tile: Tile) -> Tile:
        if self.may_compile:
            return super().__call__(tile)
        span = tile.span
        pieces = zip(torch.split(tile.values, list(tile.sizes)), self._tables[span.first : span.last], strict=True)
        found = torch.cat([torch.bucketize(piece, borders, out_int32=True) for piece, borders in pieces])
        is_nan = torch.isnan(tile.values.view(tile.shape))
        return tile.with_values(_filled(found.view(tile.shape), is_nan, self._of_nan.over(tile)))

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        low, scale, cells_at, place, first_of_cell, borders = arguments
        at = _taken(first_of_cell, _cells(x, low, scale).add_(cells_at))
        for _ in range(self._most_in_a_cell):
            at = at.add_(_taken(borders, at) < x)
        return at.sub_(place).to(torch.int32)


_CELLS = 1024
# So many comparisons take as long as a search of some hundred borders.
_MOST_COMPARED = 6


def _cells(x: torch.Tensor, low: Any, scale: Any) -> torch.Tensor:
    """In which cell of the grid each value is, 1 to _CELLS; NaN is in cell 0."""
    places: torch.Tensor = (x - low).mul_(scale).clamp_(0, _CELLS - 1)
    return places.add_(1).nan_to_num_(nan=0.0).to(torch.int64)


def _taken(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return table[at] if torch.compiler.is_compiling() else table.index_select(0, at.view(-1)).view_as(at)


def _filled(x: torch.Tensor, where: torch.Tensor, value: Any) -> torch.Tensor:
    return torch.where(where, value, x) if isinstance(value, torch.Tensor) else x.masked_fill_(where, value)


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
        at = _at_most(x.to(torch.int64).clamp_min_(-1), size).add_(place)
        return _taken(joined, at)


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
        if valid is None and not isinstance(value, torch.Tensor):
            return x.nan_to_num_(nan=value, posinf=np.inf, neginf=-np.inf)
        missing = torch.isnan(x) if valid is None else ~valid
        if self.nan and valid is not None:
            missing = missing.logical_or_(torch.isnan(x))
        return _filled(x, missing, value)


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
            starts.clamp_max_(len(tile.values) - 1)
            firsts, empty = tile.values.index_select(0, starts).to(torch.float32), tile.lengths == 0
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
        return replace(tile, values=tile.values.index_select(0, taken), sizes=sizes, lengths=new_lengths.view(-1))

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
        counts = repeated(sizes.view(-1), windows.view(-1))
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
        self._function = compiler(_with_code_of_its_own(self._in_turn)) if compiler and self._compiled else None

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


def _with_code_of_its_own(method: Any) -> Callable[..., Any]:
    """torch.compile counts how often a code object was compiled, and gives up: each run of kernels has its own."""
    function = method.__func__
    copied = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return types.MethodType(copied, method.__self__)
