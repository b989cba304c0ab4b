"""What every kernel is: an operator at work on the features of a group, tile by tile. See `kernels.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from hetstream.mpi_dataworkers.features.tiles import Parameter, Tile
from hetstream.mpi_dataworkers.features.types import FeatureType

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
