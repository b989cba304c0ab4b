"""Run a feature graph on whole batches: what a loader is given as its `batch_stage`, or a program calls itself.

Chains of like operators are run together for all features that have them (`Group`), tile by tile (see `tiles.py`). It
never writes into the batch that it is given.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, Input, Output, Step
from hetstream.mpi_dataworkers.features.kernel import TORCH_DTYPES, ByValue, Kernel
from hetstream.mpi_dataworkers.features.kernels import KERNELS, Run
from hetstream.mpi_dataworkers.features.tiles import TILE_VALUES, Tile, spans
from hetstream.mpi_dataworkers.features.types import FeatureType

_log = logging.getLogger(__name__)
# Memory that is taken in larger pieces comes from the kernel each time, page by page, and that takes longer than most
# operators do: of int64, 2 MiB.
_SLAB_VALUES = 1 << 18


class _Values(NamedTuple):
    """A feature of the batch at hand.

    Attributes:
        values: of all rows, one-dimensional.
        lengths: int64, of the lists of a jagged feature.
        valid: where values are there; None where all are.
    """

    values: torch.Tensor
    lengths: torch.Tensor | None = None
    valid: torch.Tensor | None = None


@dataclass(frozen=True)
class Chain:
    """Steps of which each has the one before it as its only user, or the feature that it begins with."""

    source: str
    steps: tuple[Step, ...]

    @property
    def result(self) -> str:
        """The feature that it makes."""
        return self.steps[-1].name


class FeatureTransform:
    """A feature graph as a function of batches: a dict of its inputs in, a dict of its outputs out.

        loader = DataLoader(dataset, batch_size=4096, collate_fn=collate_rows, batch_stage=FeatureTransform(graph))

    Keys of the batch that are no inputs are left out of the result. Inputs are tensors or NumPy arrays of the graph's
    dtypes, `Nullable` and `Jagged`. Outputs are tensors, `Jagged` or `JaggedBatch`. The numbers are those of
    `reference.py`: the same bits for integers, and 1e-6 of the value for floating point.

    It can be pickled; several threads may call it.

    Args:
        graph: What to compute.
        compiled: Make one pass of each chain with `torch.compile` and its C++ backend. The first batches of a process
            then take many seconds. Where there is no C++ compiler the graph runs as without it, and a line in the log
            says so.
        torchrec: Give torchrec's KeyedJaggedTensor in the place of JaggedBatch.

    Raises:
        FeatureError: when it is called, the batch does not fit the graph; the message names each feature.
    """

    def __init__(self, graph: FeatureGraph, *, compiled: bool = False, torchrec: bool = False) -> None:
        self.graph = graph
        self.compiled = compiled
        self.torchrec = torchrec
        with _in_host_memory():
            self._groups = [_Group(chains, graph, _compiler(compiled)) for chains in groups_of(graph)]

    def __getstate__(self) -> dict[str, Any]:
        return {"graph": self.graph, "compiled": self.compiled, "torchrec": self.torchrec}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["graph"], compiled=state["compiled"], torchrec=state["torchrec"])  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"FeatureTransform({self.graph}, compiled={self.compiled})"

    @property
    def fingerprint(self) -> str:
        """Of the graph: two transforms that share it make the same of a batch."""
        return f"{self.graph.digest}{'-torchrec' if self.torchrec else ''}"

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        with torch.no_grad(), _in_host_memory():
            num_rows, features = read_batch(self.graph.inputs, batch)
            for group in self._groups:
                features.update(group.run(features, num_rows))
            return {output.name: self._output(output, features, num_rows) for output in self.graph.outputs}

    def _output(self, output: Output, features: Mapping[str, _Values], num_rows: int) -> Any:
        types = [self.graph.types[name] for name in output.of]
        found = [features[name] for name in output.of]
        if not output.keys:
            return _as_it_is(found[0], types[0], num_rows)
        if not any(kind.is_jagged for kind in types):
            if all(kind.width == 1 for kind in types):
                # As the rows of a matrix they may lie together already: one pass instead of one for each feature.
                rows = _joined([part.values for part in found]).view(len(found), num_rows)
                return rows.t().contiguous()
            each = zip(found, types, strict=True)
            return torch.cat([_as_matrix(values, kind.width, num_rows) for values, kind in each], dim=1)
        lengths = [
            torch.full((num_rows,), part.width) if values.lengths is None else values.lengths
            for values, part in zip(found, types, strict=True)
        ]
        batch = JaggedBatch(output.keys, _joined([values.values for values in found]), _joined(lengths))
        return batch.to_torchrec() if self.torchrec else batch


class _Group:
    """Chains that are run together: the same operators, but for numbers, on features of one type."""

    def __init__(self, chains: Sequence[Chain], graph: FeatureGraph, compiler: Callable[..., Any] | None) -> None:
        self._chains = chains
        given = graph.types[chains[0].source]
        kernels: list[Kernel] = []
        for steps in zip(*(chain.steps for chain in chains), strict=True):
            operators = [step.operator for step in steps]
            kernels.append(KERNELS[type(operators[0])](operators, given))
            given = operators[0].result(given)
        self._by_value = all(isinstance(kernel, ByValue) for kernel in kernels)
        self._dtype = TORCH_DTYPES[given.dtype]
        self._kernels: list[Kernel] = []
        for _, some in groupby(kernels, lambda kernel: isinstance(kernel, ByValue)):
            alike = list(some)
            by_value = [kernel for kernel in alike if isinstance(kernel, ByValue)]
            self._kernels += [Run(by_value, compiler)] if by_value else alike
        self._tile_values = TILE_VALUES if compiler is None else _SLAB_VALUES  # it keeps values in registers

    def run(self, features: Mapping[str, _Values], num_rows: int) -> dict[str, _Values]:
        """The features that the chains make."""
        given = [features[chain.source] for chain in self._chains]
        made: list[_Values] = []
        for slab in spans([column.values.numel() for column in given], _SLAB_VALUES, whole=True):
            some = given[slab.first : slab.last]
            made += (self._by_values if self._by_value else self._by_lists)(some, slab.first, num_rows)
        return {chain.result: values for chain, values in zip(self._chains, made, strict=True)}

    def _by_values(self, given: Sequence[_Values], first: int, num_rows: int) -> list[_Values]:
        sizes = [column.values.numel() for column in given]
        values = torch.empty(sum(sizes), dtype=self._dtype)
        for tile in self._tiles(given, first, num_rows, values):
            made = self._through(tile).values
            goal = values[tile.span.begin : tile.span.end]
            if made.data_ptr() != goal.data_ptr():
                goal.copy_(made)
        pieces = zip(torch.split(values, sizes), given, strict=True)
        return [_Values(piece, source.lengths) for piece, source in pieces]

    def _by_lists(self, given: Sequence[_Values], first: int, num_rows: int) -> list[_Values]:
        made: list[_Values] = []
        for tile in map(self._through, self._tiles(given, first, num_rows, None)):
            pieces = zip(torch.split(tile.values, list(tile.sizes)), _by_feature(tile), strict=True)
            made += [_Values(piece, lengths) for piece, lengths in pieces]
        return made

    def _through(self, tile: Tile) -> Tile:
        for kernel in self._kernels:
            tile = kernel(tile)
        return tile

    def _tiles(self, given: Sequence[_Values], first: int, num_rows: int, goal: torch.Tensor | None) -> Iterator[Tile]:
        """The tiles with their values: where they are to be in the end, if they can be changed there.

        Args:
            given: some of the group's features.
            first: which one of the group the first of them is.
            num_rows: of each.
            goal: where the values are to be in the end.
        """
        sizes = [column.values.numel() for column in given]
        dtype = given[0].values.dtype
        for span in spans(sizes, self._tile_values, whole=not self._by_value):
            some = given[span.first : span.last]
            pieces, valid = [source.values for source in some], [source.valid for source in some]
            if span.last - span.first == 1 and self._by_value:
                before = sum(sizes[: span.first])
                part = slice(span.begin - before, span.end - before)
                pieces, valid = [pieces[0][part]], [None if valid[0] is None else valid[0][part]]
            tile_sizes = tuple(piece.numel() for piece in pieces)
            if goal is not None and goal.dtype == dtype:
                values = goal[span.begin : span.end]
            else:
                values = torch.empty(sum(tile_sizes), dtype=dtype)
            torch.cat(pieces, out=values)
            lengths = None
            if not self._by_value and some[0].lengths is not None:
                lengths = _joined([source.lengths for source in some if source.lengths is not None])
            span = replace(span, first=span.first + first, last=span.last + first)
            yield Tile(values, tile_sizes, span, num_rows, lengths, _joined_valid(valid, pieces))


def groups_of(graph: FeatureGraph) -> list[list[Chain]]:
    """The chains of a graph by what can run together; each group comes after those whose results it needs."""
    users = Counter(step.of for step in graph.order)
    for output in graph.outputs:
        users.update(dict.fromkeys(output.of, 2))  # a chain ends where its feature is an output
    next_of = {step.of: step for step in graph.order}
    inputs = {node.name for node in graph.inputs}
    depth = dict.fromkeys(inputs, 0)
    groups: dict[Hashable, list[Chain]] = {}
    for step in graph.order:
        if step.of not in inputs and users[step.of] == 1:
            continue  # within a chain
        steps = [step]
        while users[steps[-1].name] == 1 and steps[-1].name in next_of:
            steps.append(next_of[steps[-1].name])
        chain = Chain(step.of, tuple(steps))
        depth[chain.result] = depth[chain.source] + 1
        given = replace(graph.types[chain.source], is_nullable=False)
        kinds = tuple((type(step.operator), KERNELS[type(step.operator)].kind(step.operator)) for step in steps)
        if all(issubclass(KERNELS[operator], ByValue) for operator, _ in kinds):
            given = FeatureType(given.dtype, given.is_jagged)  # the width is nothing to them
        groups.setdefault((depth[chain.result], given, kinds), []).append(chain)
    place = {name: at for at, name in enumerate(name for output in graph.outputs for name in output.of)}
    ordered = [sorted(chains, key=lambda chain: place.get(chain.result, len(place))) for chains in groups.values()]
    return sorted(ordered, key=lambda chains: depth[chains[0].result])


def read_batch(inputs: Sequence[Input], batch: Mapping[str, Any]) -> tuple[int, dict[str, _Values]]:
    """The inputs of a graph out of a batch, and its number of rows.

    Raises:
        FeatureError: The batch does not fit; the message names each feature.
    """
    problems: list[str] = []
    features: dict[str, _Values] = {}
    rows: dict[str, int] = {}
    for node in inputs:
        try:
            features[node.name], rows[node.name] = _read(node, batch)
        except FeatureError as error:
            problems.append(str(error))
    if len(set(rows.values())) > 1:
        counted = Counter(rows.values())
        usual = counted.most_common(1)[0][0]
        others = ", ".join(f"{name} has {count}" for name, count in rows.items() if count != usual)
        problems.append(f"features of one batch must have one number of rows, {usual} here: {others}")
    num_rows = next(iter(rows.values()), 0)
    if not problems:
        problems = _problems_of_lists(
            {name: feature for name, feature in features.items() if feature.lengths is not None}, num_rows
        )
    if problems:
        raise FeatureError("the batch does not fit the feature graph: " + "; ".join(problems))
    return num_rows, features


def _read(node: Input, batch: Mapping[str, Any]) -> tuple[_Values, int]:
    if not isinstance(batch, Mapping):
        raise FeatureError(f"it is a {type(batch).__name__}; it must be a dict of features (see collate_rows)")
    if node.name not in batch:
        raise FeatureError(f"it has no {node.name!r}; it has {', '.join(map(str, list(batch)[:10])) or 'nothing'}")
    found, valid, lengths = batch[node.name], None, None
    is_plain = type(found) is torch.Tensor and found.is_cpu and found.layout is torch.strided
    if is_plain and found.dtype is TORCH_DTYPES[node.type.dtype]:
        shape = found.shape
        if len(shape) == 1 and node.type.width == 1 and not node.type.is_jagged:  # as most are
            return _Values(found), shape[0]
    if node.type.is_jagged:
        if not (isinstance(found, tuple) and len(found) == 2):
            raise FeatureError(f"{node.name} is {_described(found)}; a jagged feature is Jagged(values, lengths)")
        found, lengths = (_tensor(node.name, part) for part in found)
    elif isinstance(found, tuple) and len(found) == 2:
        if not node.type.is_nullable:
            raise FeatureError(f"{node.name} has missing values; say dense({node.name!r}, ..., is_nullable=True)")
        found, valid = (_tensor(node.name, part) for part in found)
    values = _tensor(node.name, found)
    if values.dtype != TORCH_DTYPES[node.type.dtype]:
        raise FeatureError(f"{node.name} is {_described(values)}, and {node.type.dtype} in the graph")
    if lengths is not None:
        if values.dim() != 1 or lengths.dim() != 1 or lengths.dtype not in (torch.int64, torch.int32):
            raise FeatureError(f"{node.name}: values and lengths have one dimension, and lengths are int64 or int32")
        return _Values(values, lengths.to(torch.int64)), len(lengths)
    shape = values.shape if node.type.width == 1 else values.shape[:-1]
    if len(shape) != 1 or (node.type.width > 1 and values.shape[-1] != node.type.width):
        wanted = "(rows,)" if node.type.width == 1 else f"(rows, {node.type.width})"
        raise FeatureError(f"{node.name} has the shape {tuple(values.shape)}, and {wanted} in the graph")
    if valid is not None:
        if valid.dtype != torch.bool or valid.shape != values.shape:
            raise FeatureError(f"{node.name}: valid is bool and has the shape of the values")
        valid = valid.reshape(-1)
    return _Values(values.reshape(-1), None, valid), shape[0]


def _tensor(name: str, found: Any) -> torch.Tensor:
    if isinstance(found, np.ndarray) and found.dtype.kind in "fiub":
        # Copied where torch does not take it: read-only, backwards, of another byte order.
        return torch.from_numpy(np.require(found, found.dtype.newbyteorder("="), ["C", "W"]))
    if not isinstance(found, torch.Tensor) or found.device.type != "cpu" or found.layout is not torch.strided:
        raise FeatureError(f"{name} is {_described(found)}; it must be a tensor in host memory, or a NumPy array")
    return found


def _described(found: Any) -> str:
    if isinstance(found, torch.Tensor):
        if found.layout is not torch.strided:
            return f"{str(found.layout).removeprefix('torch.')}"
        return f"{str(found.dtype).removeprefix('torch.')} on {found.device}"
    kind = f" of {found.dtype}" if isinstance(found, np.ndarray) else ""
    return f"a {type(found).__name__}{kind}"


def _problems_of_lists(jagged: Mapping[str, _Values], num_rows: int) -> list[str]:
    if not jagged:
        return []
    lengths = torch.stack([feature.lengths for feature in jagged.values() if feature.lengths is not None])
    problems = []
    sums = lengths.sum(1).tolist()
    for (name, feature), total in zip(jagged.items(), sums, strict=True):
        if total != len(feature.values):
            problems.append(f"{name} has {len(feature.values)} values, and its lengths are {total} together")
    if num_rows and int(lengths.min()) < 0:
        wrong = [name for name, smallest in zip(jagged, lengths.amin(1).tolist(), strict=True) if smallest < 0]
        problems += [f"{name} has a negative length" for name in wrong]
    return problems


def _by_feature(tile: Tile) -> Sequence[torch.Tensor | None]:
    if tile.lengths is None:
        return [None] * len(tile.sizes)
    return tile.lengths.view(len(tile.sizes), tile.num_rows).unbind()


def _as_it_is(found: _Values, kind: FeatureType, num_rows: int) -> torch.Tensor | Jagged:
    if found.lengths is not None:
        return Jagged(found.values, found.lengths)
    return found.values if kind.width == 1 else found.values.view(num_rows, kind.width)


def _as_matrix(found: _Values, width: int, num_rows: int) -> torch.Tensor:
    return found.values.view(num_rows, width)


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """One behind the other; without a copy where they lie so."""
    first = pieces[0]
    end = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for piece in pieces:
        if piece.storage_offset() != end or piece.untyped_storage().data_ptr() != storage or not piece.is_contiguous():
            return torch.cat(list(pieces))
        end += piece.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def _joined_valid(valid: Sequence[torch.Tensor | None], pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if all(mask is None for mask in valid):
        return None
    each = zip(valid, pieces, strict=True)
    return torch.cat([torch.ones(len(piece), dtype=torch.bool) if mask is None else mask for mask, piece in each])


def _in_host_memory() -> AbstractContextManager[Any]:
    """A program may have set another default device for new tensors; a data worker has not."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _compiler(wanted: bool) -> Callable[..., Any] | None:
    if not wanted:
        return None
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        _log.warning("features: no C++ compiler (g++, clang++) on this host: the graph runs without torch.compile")
        return None
    return partial(torch.compile, dynamic=True)
