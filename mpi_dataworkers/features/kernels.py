"""The eleven operators on tiles, with torch: each call does one operator's work for all features of a tile.

A kernel is made once for the operators of a group of features, which have one class and the same kind of parameters,
and is called for every tile of every batch. What the operators mean is said in `operators.py`.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.operators import RANGES, FeatureType, FirstX, Ngram, Onehot

# Pieces of several features that lie one behind the other, small enough for a processor's cache.
#
# A chain of operators passes over a tile before it begins with the next one: memory is read once and written once,
# however long the chain is, and a call of torch does the work of as many features as a tile has. Called by `kernels.py`
# and `transform.py`.

# Of int64 a quarter of a MiB: with what an operator needs beside it, within the second-level cache of a core.
TILE_VALUES = 32 * 1024
# Memory that is taken in larger pieces comes from the kernel each time, page by page, and that takes longer than most
# operators do: of int64, 2 MiB.
SLAB_VALUES = 1 << 18


@dataclass(frozen=True)
class Span:
    """Which part of a group of features a tile is.

    Attributes:
        first, last: its features, the last one exclusive.
        begin, end: which of the group's values.
    """

    first: int
    last: int
    begin: int
    end: int


@dataclass(frozen=True)
class Tile:
    """Values of the features of a span, feature by feature.

    Attributes:
        values: one-dimensional; operators may write into it.
        sizes: values of each feature.
        span: which ones.
        num_rows: of each feature that is whole.
        lengths: of the lists, feature by feature; None for dense features, and where no operator asks.
        valid: where values are there; None where all are.
    """

    values: torch.Tensor
    sizes: tuple[int, ...]
    span: Span
    num_rows: int
    lengths: torch.Tensor | None = None
    valid: torch.Tensor | None = None

    @property
    def is_even(self) -> bool:
        """Whether all features have the same number of values, so that they are the rows of a matrix."""
        return min(self.sizes) == max(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """In which operators take the values: a row for each feature, or else flat."""
        return (len(self.sizes), self.sizes[0]) if self.is_even else (sum(self.sizes),)

    def with_values(self, values: torch.Tensor) -> Tile:
        """The same features with other values, as many."""
        return replace(self, values=values.reshape(-1), valid=None)


class Parameter:
    """A number for each feature of a group, as torch takes it for the values of a tile."""

    def __init__(self, numbers: Sequence[float | int], dtype: torch.dtype) -> None:
        self._numbers = tuple(numbers)
        self._is_same = len(set(numbers)) == 1
        self._tensor = torch.tensor(numbers, dtype=dtype)

    def over(self, tile: Tile, as_tensor: bool = False) -> torch.Tensor | float | int:
        """A number where it is the same for all values, else a tensor that broadcasts to `tile.shape`.

        Args:
            tile: the tile.
            as_tensor: never a number: compiled code would be made anew for each.
        """
        span = tile.span
        if (self._is_same or span.last - span.first == 1) and not as_tensor:
            return self._numbers[span.first]
        tensor = self._tensor[span.first : span.last]
        if tile.is_even:
            return tensor.unsqueeze(1)
        return repeated(tensor, torch.tensor(tile.sizes))


def spans(sizes: Sequence[int], most: int = TILE_VALUES, *, whole: bool = False) -> Iterator[Span]:
    """Cut a group of features into tiles of at most so many values.

    Args:
        sizes: values of each feature.
        most: of a tile, but for a feature that has more and must not be cut.
        whole: whether features must not be cut.
    """
    first = begin = end = 0
    for at, size in enumerate(sizes):
        if at > first and end - begin + size > most:
            yield Span(first, at, begin, end)
            first, begin = at, end
        if size > most and not whole:  # it is alone here
            yield from (Span(at, at + 1, cut, min(cut + most, end + size)) for cut in range(end, end + size, most))
            first, begin = at + 1, end + size
        end += size
    if first < len(sizes):
        yield Span(first, len(sizes), begin, end)


def apart(values: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Views of one memory, of so many values or rows each, that autograd takes for tensors of their own.

    A program that changes one of them in place has not changed the others, unlike those of torch.split.
    """
    found: Sequence[torch.Tensor] = torch.unsafe_split_with_sizes(values, list(sizes))
    return found


def as_matrix(values: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """The same values as rows; for autograd it is a tensor of its own, as in `apart`."""
    return values.reshape(num_rows, width).data


def ranges(starts: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
    """`start, start + 1, ...`, `count` numbers for each pair, one after the other; `total` is the sum of the counts."""
    before = torch.cumsum(counts, 0) - counts
    return repeated(starts - before, counts).add_(torch.arange(total, device="cpu"))


def repeated(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each value so many times. NumPy takes a third of the time of `torch.repeat_interleave`."""
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


# What every kernel is: an operator at work on the features of a group, tile by tile. See `kernels.py`.

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


# Kernels of operators that make rows or lists of another length: Onehot, FirstX and Ngram. See `kernels.py`.


class OnehotKernel(Kernel):
    def __init__(self, operators: Sequence[Onehot], given: FeatureType) -> None:
        super().__init__(operators, given)
        self._classes = [operator.num_classes for operator in operators]
        self._parameters = [
            Parameter(numbers, torch.float32)
            for numbers in (
                [operator.lower for operator in operators],
                [operator.step for operator in operators],
                [float(operator.num_classes) for operator in operators],
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
            firsts, empty = (
                torch.zeros(len(tile.lengths), dtype=torch.float32),
                torch.ones(len(tile.lengths), dtype=torch.bool),
            )
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
        values = torch.zeros(int(sizes.sum()), dtype=torch.float32).index_fill_(0, chosen.view(-1), 1.0)
        return replace(tile, values=values, sizes=tuple(sizes.tolist()), lengths=None)


class _Lists(Kernel):
    """A kernel of jagged features with a number n for each: the list of a row becomes other values of itself."""

    def __init__(self, operators: Sequence[FirstX] | Sequence[Ngram], given: FeatureType) -> None:
        super().__init__(operators, given)
        self._n = Parameter([min(operator.n, RANGES["int64"][1]) for operator in operators], torch.int64)

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


class FirstXKernel(_Lists):
    def pick(self, lengths: torch.Tensor, n: Any, starts: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        kept = lengths.clamp(max=n)
        if torch.equal(kept, lengths):
            return None, lengths
        return ranges(starts, kept.view(-1), int(kept.sum())), kept


class NgramKernel(_Lists):
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


# Kernels of operators that make one value of each: all but Onehot, FirstX and Ngram. See `kernels.py`.


def _clamp_(x: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
    if not isinstance(low, torch.Tensor) and not isinstance(high, torch.Tensor):
        return x.clamp_(low, high)
    return _at_most(_at_least(x, low), high)


def _at_least(x: torch.Tensor, low: Any) -> torch.Tensor:
    # torch's clamp takes six times as long where its bound is a tensor.
    return torch.maximum(x, low) if isinstance(low, torch.Tensor) else x.clamp_min_(low)


def _at_most(x: torch.Tensor, high: Any) -> torch.Tensor:
    return torch.minimum(x, high) if isinstance(high, torch.Tensor) else x.clamp_max_(high)


class LogitKernel(ByValue):
    def __init__(self, operators: Sequence[ops.Logit], given: FeatureType) -> None:
        super().__init__(operators, given)
        lows = [float(np.float32(operator.eps)) for operator in operators]
        highs = [float(np.float32(1) - np.float32(operator.eps)) for operator in operators]
        self.parameters = Parameter(lows, torch.float32), Parameter(highs, torch.float32)

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        low, high = arguments
        x = x.to(torch.float32)
        # One pass, where there is one eps; it computes 1 - eps as it is computed above.
        return torch.logit_(_clamp_(x, low, high)) if isinstance(low, torch.Tensor) else torch.logit_(x, eps=low)


class BoxCoxKernel(ByValue):
    def __init__(self, operators: Sequence[ops.BoxCox], given: FeatureType) -> None:
        super().__init__(operators, given)
        self.is_log = operators[0].lmbda == 0
        self.parameters = () if self.is_log else (Parameter([operator.lmbda for operator in operators], torch.float64),)

    @classmethod
    def kind(cls, operator: ops.BoxCox) -> Hashable:
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
    """What `SigridHashKernel.compute` says with torch. NumPy has unsigned words: fewer passes, and faster products."""
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


class SigridHashKernel(ByValue):
    def __init__(self, operators: Sequence[ops.SigridHash], given: FeatureType) -> None:
        super().__init__(operators, given)
        self.parameters = tuple(
            Parameter(numbers, torch.int64)
            for numbers in ([operator.salt for operator in operators], [operator.max_value for operator in operators])
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


class ClampKernel(ByValue):
    def __init__(self, operators: Sequence[ops.Clamp], given: FeatureType) -> None:
        super().__init__(operators, given)
        self.has = self.kind(operators[0])
        bounds = [[getattr(operator, side) for operator in operators] for side in ("lower", "upper")]
        self.parameters = tuple(Parameter(side, self.dtype) for side in bounds if side[0] is not None)
        self._has_zero = given.is_float and any(0 in side for side in bounds)

    @classmethod
    def kind(cls, operator: ops.Clamp) -> tuple[bool, bool]:
        return operator.lower is not None, operator.upper is not None

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if self._has_zero and any(isinstance(bound, torch.Tensor) for bound in arguments):
            # Of 0 and -0 torch.maximum gives one or the other, as a value is among those that make a vector or not.
            if self.has[0]:
                x = torch.where(x < arguments[0], arguments[0], x)
            return torch.where(x > arguments[-1], arguments[-1], x) if self.has[1] else x
        if self.has == (True, True):
            return _clamp_(x, *arguments)
        return _at_least(x, *arguments) if self.has[0] else _at_most(x, *arguments)


class BucketizeKernel(ByValue):
    """Borders are found by a grid, because a binary search takes a mispredicted branch at every second border.

    The values between a feature's first and last border fall into cells of one size. Which cell never decreases from a
    value to a larger one, however it is rounded, so that all borders of earlier cells are below a value. The few of its
    own cell are compared one by one. Where borders are so uneven that a cell has many, they are searched after all.
    """

    def __init__(self, operators: Sequence[ops.Bucketize], given: FeatureType) -> None:
        super().__init__(operators, given)
        tables = [borders_without_repeats(np.asarray(operator.borders, dtype=given.dtype)) for operator in operators]
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
        self._of_nan = Parameter([int(len(operator.borders) > 1) for operator in operators], torch.int32)
        cells = [
            _cells(table, *torch.tensor([low, scale], dtype=self.dtype))
            for table, low, scale in zip(self._tables, lows, scales, strict=True)
        ]
        firsts = []
        for of, place, operator in zip(cells, places, operators, strict=True):
            of_nan = torch.tensor([place + int(len(operator.borders) > 1)])
            firsts += [of_nan, torch.searchsorted(of, torch.arange(1, _CELLS + 1)) + place]
        self._first_of_cell = torch.cat(firsts)
        self._borders = torch.cat([piece for table in self._tables for piece in (table, torch.tensor([np.inf]))])
        self._borders = self._borders.to(self.dtype)
        self._most_in_a_cell = max(int(torch.bincount(of).max()) for of in cells)
        self.may_compile = self._most_in_a_cell <= _MOST_COMPARED

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


def borders_without_repeats(borders: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The first of two equal borders becomes the number before it: an equal value is then above one of the two."""
    is_first = np.append(borders[1:] == borders[:-1], False)
    return np.where(is_first, np.nextafter(borders, borders.dtype.type(-np.inf)), borders)


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


class MapIdKernel(ByValue):
    def __init__(self, operators: Sequence[ops.MapId], given: FeatureType) -> None:
        super().__init__(operators, given)
        # All tables one behind the other, each once and with a 0 before and behind it.
        joined: list[int] = []
        places: dict[tuple[int, ...], int] = {}
        for operator in operators:
            if operator.table not in places:
                places[operator.table] = len(joined)
                joined += [0, *operator.table, 0]
        self._joined = torch.tensor(joined, dtype=torch.int64)
        self.parameters = tuple(
            Parameter(numbers, torch.int64)
            for numbers in (
                [len(operator.table) for operator in operators],
                [places[operator.table] + 1 for operator in operators],
            )
        )

    def arguments(self, tile: Tile, as_tensors: bool = False) -> tuple[Any, ...]:
        return *super().arguments(tile, as_tensors), self._joined

    def compute(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        size, place, joined = arguments
        at = _at_most(x.to(torch.int64).clamp_min_(-1), size).add_(place)
        return _taken(joined, at)


class FillNullKernel(ByValue):
    def __init__(self, operators: Sequence[ops.FillNull], given: FeatureType) -> None:
        super().__init__(operators, given)
        self.nan = operators[0].nan
        self.parameters = (Parameter([operator.value for operator in operators], self.dtype),)

    @classmethod
    def kind(cls, operator: ops.FillNull) -> Hashable:
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


class CastKernel(ByValue):
    def __init__(self, operators: Sequence[ops.Cast], given: FeatureType) -> None:
        super().__init__(operators, given)
        self.to = operators[0].dtype

    @classmethod
    def kind(cls, operator: ops.Cast) -> Hashable:
        return operator.dtype

    def compute(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        goal = TORCH_DTYPES[self.to]
        if self.to not in RANGES or self.given.dtype in (self.to, "int32"):
            return x.to(goal)
        low, high = RANGES[self.to]
        if not self.given.is_float:
            return x.clamp_(low, high).to(goal)
        if not torch.compiler.is_compiling() and x.numel():
            smallest, largest = (float(bound) for bound in torch.aminmax(x))
            if low <= smallest and largest < high:  # not where one of them is NaN
                return x.to(goal)
        x = x.to(torch.float64).nan_to_num_(nan=0.0)
        if self.to == "int32":
            return x.clamp_(low, high).to(goal)
        # 2**63 - 1 is no floating-point number: what is above the largest one below it is filled in afterwards.
        too_large = x >= 2.0**63
        return x.clamp_(-(2.0**63), float(np.nextafter(2.0**63, 0))).to(goal).masked_fill_(too_large, high)


KERNELS: dict[type[ops.Operator], type[Kernel]] = {
    ops.Logit: LogitKernel,
    ops.BoxCox: BoxCoxKernel,
    ops.Onehot: OnehotKernel,
    ops.SigridHash: SigridHashKernel,
    ops.FirstX: FirstXKernel,
    ops.Clamp: ClampKernel,
    ops.Bucketize: BucketizeKernel,
    ops.Ngram: NgramKernel,
    ops.MapId: MapIdKernel,
    ops.FillNull: FillNullKernel,
    ops.Cast: CastKernel,
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
