"""Kernels of operators that make rows or lists of another length: Onehot, FirstX and Ngram. See `kernels.py`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hetstream.mpi_dataworkers.features.kernel import Kernel
from hetstream.mpi_dataworkers.features.operators import (
    FirstX,
    Ngram,
    Onehot,
)
from hetstream.mpi_dataworkers.features.tiles import Parameter, Tile, ranges, repeated
from hetstream.mpi_dataworkers.features.types import RANGES, FeatureType


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
