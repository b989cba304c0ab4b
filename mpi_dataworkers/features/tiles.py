"""Pieces of several features that lie one behind the other, small enough for a processor's cache.

A chain of operators passes over a tile before it begins with the next one: memory is read once and written once,
however long the chain is, and a call of torch does the work of as many features as a tile has. Called by `kernels.py`
and `transform.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

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
