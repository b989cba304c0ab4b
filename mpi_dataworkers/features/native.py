"""`native.cpp` as a library, compiled where it is used, and groups of chains that it runs."""

from __future__ import annotations

import ctypes
import functools
import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hetstream.mpi_dataworkers.compiling import compiled
from hetstream.mpi_dataworkers.compiling import compiler as compiler
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import TORCH_DTYPES, Columns
from hetstream.mpi_dataworkers.features.graph import Chain, FeatureGraph
from hetstream.mpi_dataworkers.features.kernels import borders_without_repeats
from hetstream.mpi_dataworkers.features.operators import DTYPES, RANGES, FeatureType

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("native.cpp")


class Group(ctypes.Structure):
    """`Group` of native.cpp: what one call computes. Addresses are numbers here."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("num_steps", "num_features", "num_rows", "width"),
            *("steps", "numbers", "sizes", "values", "valid", "lengths", "made", "made_lengths"),
        )
    )


@functools.cache
def library() -> Any | None:
    """Return the functions of native.cpp; None, and a line in the log, where they cannot be compiled."""
    path = compiler()
    if path is None:
        _log.warning("features: no C++ compiler (g++, clang++) on this host: the graph runs with torch")
        return None
    try:
        found = compiled(path, _SOURCE)
    except OSError as error:
        _log.warning("features: %s cannot compile %s; the graph runs with torch: %s", path, _SOURCE, error)
        return None
    found.hetstream_run.argtypes = [ctypes.POINTER(Group)]
    found.hetstream_run.restype = ctypes.c_int
    found.hetstream_sizes.argtypes = [ctypes.POINTER(Group), ctypes.c_void_p]
    found.hetstream_sizes.restype = None
    found.hetstream_are_lists.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    found.hetstream_are_lists.restype = ctypes.c_int
    return found


# Whether a feature graph runs in native code or with torch: (chains, time spent, compiler) -> what, and why. Pure.
#
# Used by `transform.py`. Native code has torch's bits in all operators but two. Where results must not depend on
# whether a host has a compiler, it runs only the chains without those, so it may also begin in the midst of an epoch:
# then nobody pays for compiling before torch has cost as much.

# Native code computes them with functions of its own, within 1e-6 of torch's.
_INEXACT = (ops.Logit, ops.BoxCox)
# What torch has to have taken in a process before native code is compiled there: compiling takes as long.
WORTH_S = 2.0


@dataclass(frozen=True)
class NativeChoice:
    """What runs a graph.

    Attributes:
        runs: "undecided": torch for now.
        reason: why, in words; "" where nobody asked for native code.
    """

    runs: Literal["native", "torch", "undecided"]
    reason: str


def is_exact(chains: Sequence[Chain]) -> bool:
    """Return whether native code gives torch's bits for chains of one group."""
    return not any(isinstance(step.operator, _INEXACT) for step in chains[0].steps)


def native_choice(
    *, is_asked_for: bool, num_exact: int, num_chains: int, spent_s: float, compiler: str | None
) -> NativeChoice:
    """Decide what runs a graph.

    Args:
        is_asked_for: whether all of it is to be native, whatever the bits of Logit and BoxCox.
        num_exact, num_chains: chains for which native code gives torch's bits, of all.
        spent_s: that the graph has taken in this process with torch.
        compiler: the path of one; None where there is none.
    """
    if is_asked_for:
        return NativeChoice("native", "native code")
    if not num_exact:
        return NativeChoice("torch", "torch, because all chains have Logit or BoxCox" if num_chains else "")
    if compiler is None:
        return NativeChoice("torch", "torch, because there is no C++ compiler")
    if spent_s < WORTH_S:
        return NativeChoice("undecided", f"torch, until that has taken {WORTH_S:g} s")
    others = "" if num_exact == num_chains else ", torch where Logit or BoxCox is"
    return NativeChoice("native", f"native code in {num_exact} of {num_chains} chains{others}")


# Groups of chains that native.cpp runs: tables of numbers for it, memory for its results. Called by `transform.py`.
#
# A group takes the features where they are and gives views of a few larger tensors. Everything that a call needs is
# made for it, so that several threads may run one group.

_NUMBERS = 4  # of an operator and a feature, 8 bytes each
_MOST = RANGES["int64"][1]
# Of the results that lie in one piece of memory: of int64 8 MiB. glibc gives memory back to the kernel when twice as
# much is free as the largest piece that it took from there. With small pieces a batch's memory goes back when the batch
# does, and the next one pays for each page again, which takes three times as long as a light operator. Pieces above
# 32 MiB come from the kernel each time.
_SLAB_VALUES = 1 << 20


def are_lists(library: Any, lengths: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    """As that of `batches.py`, where the lengths are."""
    lengths = [each.contiguous() for each in lengths]
    addresses, numbers = array("q", map(torch.Tensor.data_ptr, lengths)), array("q", sizes)
    places = addresses.buffer_info()[0], numbers.buffer_info()[0]
    return bool(library.hetstream_are_lists(len(lengths), len(lengths[0]), *places))


class NativeGroup:
    """Chains that are run together: the same operators, but for numbers, on features of one type.

    Args:
        chains: at least one.
        graph: whose chains they are.
        library: what `native.library` has loaded.
    """

    def __init__(self, chains: Sequence[Chain], graph: FeatureGraph, library: Any) -> None:
        self.chains = chains
        self._library = library
        self._sources = [chain.source for chain in chains]
        self._results = [chain.result for chain in chains]
        given = graph.types[chains[0].source]
        operators = [step.operator for step in chains[0].steps]
        self._width, self._is_jagged = given.width, given.is_jagged
        self._source_widths = [graph.types[chain.source].width for chain in chains]
        self._has_one_width = len({*self._source_widths}) == 1
        # Whose addresses stand among the numbers.
        self._tables: dict[tuple[ops.Operator, np.dtype[Any]], torch.Tensor] = {}
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
        # Of the results, if they are dense.
        self._widths = None if given.is_jagged else [graph.types[chain.result].width for chain in chains]
        self._addresses = [table.ctypes.data for table in self._steps_and_numbers]

    def run(self, features: Columns, num_rows: int) -> Columns:
        """Return the features that the chains make."""
        values = [*map(features.values.__getitem__, self._sources)]
        count = len(values)
        if not all(map(torch.Tensor.is_contiguous, values)):
            values = [each.contiguous() for each in values]
        if self._is_jagged:
            sizes = array("q", map(torch.Tensor.numel, values))
        elif self._has_one_width:
            sizes = array("q", [num_rows * self._source_widths[0]]) * count
        else:
            sizes = array("q", [num_rows * width for width in self._source_widths])
        addresses = array("q", map(torch.Tensor.data_ptr, values))
        group = Group(self._num_steps, count, num_rows, self._width, *self._addresses)
        group.sizes, group.values = sizes.buffer_info()[0], addresses.buffer_info()[0]
        kept: list[Any] = []  # until the call is over
        if features.valid and not features.valid.keys().isdisjoint(self._sources):
            masks = [None if mask is None else mask.contiguous() for mask in map(features.valid.get, self._sources)]
            kept += [masks, array("q", (0 if mask is None else mask.data_ptr() for mask in masks))]
            group.valid = kept[-1].buffer_info()[0]
        lengths: Sequence[torch.Tensor] = ()
        if self._is_jagged:
            lengths = [features.lengths[name].contiguous() for name in self._sources]
            kept += [lengths, array("q", map(torch.Tensor.data_ptr, lengths))]
            group.lengths = kept[-1].buffer_info()[0]
        made_sizes = sizes
        if self._changes_lengths:
            lengths = _apart(torch.empty(count * num_rows, dtype=torch.int64), [num_rows] * count)
            kept.append(array("q", map(torch.Tensor.data_ptr, lengths)))
            group.made_lengths = kept[-1].buffer_info()[0]
            made_sizes = array("q", bytes(8 * count))
            self._library.hetstream_sizes(ctypes.byref(group), made_sizes.buffer_info()[0])
        elif self._widths is not None and (self._is_jagged or self._widths != self._source_widths):
            made_sizes = array("q", [num_rows * width for width in self._widths])
        made, places = self._memory(made_sizes.tolist(), num_rows)
        group.made = places.buffer_info()[0]
        if self._library.hetstream_run(ctypes.byref(group)):
            raise MemoryError("features: no memory for what stands between two operators")
        values_of = dict(zip(self._results, made, strict=True))
        return Columns(values_of, {} if self._widths else dict(zip(self._results, lengths, strict=True)))

    def _memory(self, sizes: Sequence[int], num_rows: int) -> tuple[Sequence[torch.Tensor], array[int]]:
        """A tensor for each result, some of them behind one another, and their addresses."""
        made: list[torch.Tensor] = []
        widths = self._widths or [1] * len(sizes)
        if sizes.count(sizes[0]) == len(sizes) and widths.count(widths[0]) == len(sizes):
            places = array("q")
            each_bytes = sizes[0] * self._dtype.itemsize
            length, shape = (sizes[0], ()) if widths[0] == 1 else (num_rows, (widths[0],))
            most = max(1, _SLAB_VALUES // max(1, sizes[0]))
            for first in range(0, len(sizes), most):
                some = min(most, len(sizes) - first)
                slab = torch.empty((some * length, *shape), dtype=self._dtype)
                begin = slab.data_ptr()
                made += _apart(slab, [length] * some)
                places.extend(range(begin, begin + some * each_bytes, each_bytes) if each_bytes else [begin] * some)
            return made, places
        for some_sizes in _slabs(sizes):
            made += _apart(torch.empty(sum(some_sizes), dtype=self._dtype), some_sizes)
        places = array("q", map(torch.Tensor.data_ptr, made))
        each = zip(made, widths, strict=True)
        # For autograd a matrix is a tensor of its own, as those of `_apart`.
        return [values if width == 1 else values.view(num_rows, width).data for values, width in each], places

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
        """Where a table is kept; equal operators of one dtype share one, which then stays in the caches."""
        return self._tables.setdefault((operator, table.dtype), torch.from_numpy(table)).data_ptr()


def _slabs(sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """The sizes of results by the piece of memory in which they lie; one that is larger lies alone."""
    some: list[int] = []
    total = 0
    for size in sizes:
        if some and total + size > _SLAB_VALUES:
            yield some
            some, total = [], 0
        some.append(size)
        total += size
    yield some


def _apart(values: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Views of one memory, of so many values or rows each, that autograd takes for tensors of their own.

    A program that changes one of them in place has not changed the others, unlike those of torch.split.
    """
    found: Sequence[torch.Tensor] = torch.unsafe_split_with_sizes(values, list(sizes))
    return found


_OPCODES = {kind: at for at, kind in enumerate(ops.OPERATORS)}


def _word(value: float | int) -> int:
    """8 bytes of a number, read as an integer."""
    return int(np.float64(value).view(np.int64)) if isinstance(value, float) else int(value)
