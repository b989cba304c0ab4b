"""Groups of chains that native.cpp runs: tables of numbers for it, memory for its results. Called by `transform.py`.

A group takes the features where they are and gives views of a few larger tensors. Everything that a call needs is made
for it, so that several threads may run one group.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.chains import Chain
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.features.kernel import TORCH_DTYPES
from hetstream.mpi_dataworkers.features.native import Group
from hetstream.mpi_dataworkers.features.reading import Values
from hetstream.mpi_dataworkers.features.tiles import SLAB_VALUES, spans
from hetstream.mpi_dataworkers.features.types import DTYPES, RANGES, FeatureType
from hetstream.mpi_dataworkers.features.value_kernels import borders_without_repeats

_NUMBERS = 4  # of an operator and a feature, 8 bytes each
_MOST = RANGES["int64"][1]


class NativeGroup:
    """Chains that are run together: the same operators, but for numbers, on features of one type.

    Args:
        chains: at least one.
        graph: whose chains they are.
        library: what `native.library` has loaded.
    """

    def __init__(self, chains: Sequence[Chain], graph: FeatureGraph, library: Any) -> None:
        self._library = library
        self._sources = [chain.source for chain in chains]
        self._results = [chain.result for chain in chains]
        given = graph.types[chains[0].source]
        operators = [step.operator for step in chains[0].steps]
        self._width = given.width
        self._tables: dict[ops.Operator, torch.Tensor] = {}  # whose addresses stand among the numbers
        steps, numbers = [], np.zeros((len(operators), len(chains), _NUMBERS), dtype=np.int64)
        for at, operator in enumerate(operators):
            for number, chain in enumerate(chains):
                found = self._numbers_of(chain.steps[at].operator, given)
                numbers[at, number, : len(found)] = [_word(value) for value in found]
            made = operator.result(given)
            steps.append([_OPCODES[type(operator)], DTYPES.index(given.dtype), DTYPES.index(made.dtype)])
            given = made
        self._steps_and_numbers = np.asarray(steps, dtype=np.int64), numbers
        self._num_steps = len(steps)
        self._dtype = TORCH_DTYPES[given.dtype]
        self._changes_lengths = given.is_jagged and any(isinstance(each, ops.FirstX | ops.Ngram) for each in operators)
        # Rows of their own width come after Onehot, else those of the source stay.
        has_classes = any(isinstance(each, ops.Onehot) for each in operators)
        widths = [graph.types[chain.result].width for chain in chains]
        self._classes = widths if has_classes else None
        self._addresses = [table.ctypes.data for table in self._steps_and_numbers]

    def run(self, features: Mapping[str, Values], num_rows: int) -> dict[str, Values]:
        """The features that the chains make."""
        values, lengths, valid = zip(*map(features.__getitem__, self._sources), strict=True)
        count = len(values)
        if not all(map(torch.Tensor.is_contiguous, values)):
            values = tuple(each.contiguous() for each in values)
        sizes = array("q", map(torch.Tensor.numel, values))
        addresses = array("q", map(torch.Tensor.data_ptr, values))
        group = Group(self._num_steps, count, num_rows, self._width, *self._addresses)
        group.sizes, group.values = sizes.buffer_info()[0], addresses.buffer_info()[0]
        kept: list[Any] = []  # until the call is over
        if valid.count(None) != count:
            masks = [None if mask is None else mask.contiguous() for mask in valid]
            kept += [masks, array("q", (0 if mask is None else mask.data_ptr() for mask in masks))]
            group.valid = kept[-1].buffer_info()[0]
        if lengths[0] is not None:
            whole = [each.contiguous() for each in lengths]
            kept += [whole, array("q", map(torch.Tensor.data_ptr, whole))]
            group.lengths = kept[-1].buffer_info()[0]
        made_sizes, shapes = sizes, None
        if self._changes_lengths:
            lengths = torch.empty((count, num_rows), dtype=torch.int64).unbind()
            kept.append(array("q", map(torch.Tensor.data_ptr, lengths)))
            group.made_lengths = kept[-1].buffer_info()[0]
            made_sizes = array("q", bytes(8 * count))
            self._library.hetstream_sizes(ctypes.byref(group), made_sizes.buffer_info()[0])
        elif self._classes is not None:
            made_sizes = array("q", (classes * num_rows for classes in self._classes))
            lengths = (None,) * count
        elif lengths[0] is None:
            shapes = list(map(_shape_of, values))
        made, places = self._memory(made_sizes.tolist(), shapes)
        group.made = places.buffer_info()[0]
        if self._library.hetstream_run(ctypes.byref(group)):
            raise MemoryError("features: no memory for what stands between two operators")
        return dict(zip(self._results, map(Values, made, lengths), strict=True))

    def _memory(
        self, sizes: Sequence[int], shapes: Sequence[torch.Size] | None
    ) -> tuple[Sequence[torch.Tensor], array[int]]:
        """A tensor for each feature, some of them behind one another, and their addresses."""
        made: list[torch.Tensor] = []
        if sizes.count(sizes[0]) == len(sizes) and (shapes is None or shapes.count(shapes[0]) == len(shapes)):
            shape = (sizes[0],) if shapes is None else shapes[0]
            most = max(1, SLAB_VALUES // max(1, sizes[0]))
            for first in range(0, len(sizes), most):
                made += torch.empty((min(most, len(sizes) - first), *shape), dtype=self._dtype).unbind()
            return made, array("q", map(torch.Tensor.data_ptr, made))
        for span in spans(sizes, SLAB_VALUES, whole=True):
            some = sizes[span.first : span.last]
            made += torch.split(torch.empty(sum(some), dtype=self._dtype), list(some))
        places = array("q", map(torch.Tensor.data_ptr, made))
        return (made if shapes is None else list(map(torch.Tensor.view, made, shapes))), places

    def _numbers_of(self, operator: ops.Operator, given: FeatureType) -> Sequence[float | int]:
        """What native.cpp has as the numbers of an operator, in its order."""
        match operator:
            case ops.Logit(eps):
                return float(np.float32(eps)), float(np.float32(1) - np.float32(eps))
            case ops.BoxCox(lmbda):
                return (float(lmbda),)
            case ops.Onehot(lower, _, num_classes):
                return float(np.float32(lower)), operator.step, num_classes
            case ops.SigridHash(salt, max_value):
                return salt, max_value
            case ops.FirstX(n) | ops.Ngram(n):
                return (min(n, _MOST),)
            case ops.Clamp(lower, upper):
                low, high = (-np.inf, np.inf) if given.is_float else RANGES[given.dtype]
                bounds = low if lower is None else lower, high if upper is None else upper
                return [float(bound) for bound in bounds] if given.is_float else bounds
            case ops.Bucketize(borders):
                table = borders_without_repeats(np.asarray(borders, dtype=given.dtype))
                passes = len(table).bit_length()
                padded = np.full(2**passes - 1, np.inf, dtype=table.dtype)
                padded[: len(table)] = table
                return self._address_of(operator, padded), passes, int(len(borders) > 1)
            case ops.MapId(table):
                return self._address_of(operator, np.asarray([*table, 0], dtype=np.int64)), len(table)
            case ops.FillNull(value, nan):
                return (float(value) if given.is_float else value), int(nan)
        assert isinstance(operator, ops.Cast)
        return ()

    def _address_of(self, operator: ops.Operator, table: np.ndarray[Any, Any]) -> int:
        """Where a table is kept; equal operators share one, which then stays in the caches."""
        return self._tables.setdefault(operator, torch.from_numpy(table)).data_ptr()


_OPCODES = {kind: at for at, kind in enumerate(ops.OPERATORS)}
_shape_of = attrgetter("shape")


def _word(value: float | int) -> int:
    """8 bytes of a number, read as an integer."""
    return int(np.float64(value).view(np.int64)) if isinstance(value, float) else int(value)
