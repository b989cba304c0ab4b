"""The eleven operators on tiles, with torch: each call does one operator's work for all features of a tile.

A kernel is made once for the operators of a group of features, which have one class and the same kind of parameters,
and is called for every tile of every batch. What the operators mean is said in `operators.py`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.kernel import ByValue, Kernel
from hetstream.mpi_dataworkers.features.list_kernels import FirstXKernel, NgramKernel, OnehotKernel
from hetstream.mpi_dataworkers.features.tiles import Tile
from hetstream.mpi_dataworkers.features.value_kernels import (
    BoxCoxKernel,
    BucketizeKernel,
    CastKernel,
    ClampKernel,
    FillNullKernel,
    LogitKernel,
    MapIdKernel,
    SigridHashKernel,
)

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
