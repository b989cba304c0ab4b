"""A batch as one piece of memory, for one copy to the GPU: the table of its features, tiles, lengths and values.

A `Program` is what does not change from batch to batch. Results have an arena of their own, which is only measured
out here: a `JaggedBatch` lies there key by key, a matrix of dense features row by row.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import TORCH_DTYPES, Columns, Jagged, JaggedBatch, Nullable, Values
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, Input, Output, Step
from hetstream.mpi_dataworkers.features.operators import DTYPES, RANGES, FeatureType
from hetstream.mpi_dataworkers.gpu_features.schedule import check_graph

# A feature graph as numbers that a GPU reads: for each feature of an output, the operators from its input on. Pure.
#
# What several features begin with alike is computed for each: reading it twice costs more than computing it twice.
# `Packer` adds where a batch's values are, and `kernel.py` carries it out; both have the layout from here.

Words = npt.NDArray[np.int64]
# Of a feature in the batch's table, and of an operator in the constants: 8 bytes each.
FEATURE_WORDS = 16
OPERATOR_WORDS = 8
# A batch's arena begins with its rows, where features and tiles are, and from here on the tiles of each launch.
LAUNCHES_AT = 4
# The first three of an operator are its opcode, the dtype that it takes and the dtype that it gives; then its numbers.
_NUMBERS_AT = 3
# More values than any list has.
_MOST = RANGES["int64"][1]


@dataclass(frozen=True)
class Chain:
    """A feature of an output.

    Attributes:
        source: the input that it begins with.
        result: the feature.
        operators: in order.
        first: the place of the first one in the constants, in operators.
        given, made: types of source and result.
        output: the place of the output, and within it.
    """

    source: str
    result: str
    operators: tuple[ops.Operator, ...]
    first: int
    given: FeatureType
    made: FeatureType
    output: tuple[int, int]

    @property
    def is_moved(self) -> bool:
        """Whether its values are not the results of the values at the same places of the source."""
        return any(isinstance(operator, ops.Onehot | ops.FirstX | ops.Ngram) for operator in self.operators)

    @property
    def has_classes(self) -> bool:
        """Whether its rows are made by an Onehot."""
        return any(isinstance(operator, ops.Onehot) for operator in self.operators)

    def lengths(self, lengths: Words) -> Words:
        """Of the lists of the result, where those of the source are these."""
        for operator in self.operators:
            if isinstance(operator, ops.FirstX):
                lengths = np.minimum(lengths, min(operator.n, _MOST))
            elif isinstance(operator, ops.Ngram):
                sizes = np.minimum(lengths, min(operator.n, _MOST))
                lengths = (lengths - sizes + (lengths > 0)) * sizes
        return lengths


@dataclass(frozen=True)
class Program:
    """A graph's chains, and the constants of their operators.

    Attributes:
        chains: by output, and within one in its order.
        constants: operators, `OPERATOR_WORDS` each, and behind them the tables of Bucketize and MapId.
    """

    chains: tuple[Chain, ...]
    constants: Words


def program_of(graph: FeatureGraph) -> Program:
    """Compile a graph.

    Raises:
        FeatureError: this is none.
    """
    check_graph("program_of", graph)
    steps = {step.name: step for step in graph.steps}
    chains: list[Chain] = []
    taken: list[tuple[ops.Operator, FeatureType, bool]] = []
    for number, output in enumerate(graph.outputs):
        for place, name in enumerate(output.of):
            path = _path(steps, name)
            source = path[0].of if path else name
            operators = tuple(step.operator for step in path)
            kinds = (graph.types[source], graph.types[name])
            chains.append(Chain(source, name, operators, len(taken), *kinds, (number, place)))
            last_classes = max((at for at, each in enumerate(operators) if isinstance(each, ops.Onehot)), default=-1)
            taken += [(step.operator, graph.types[step.of], at == last_classes) for at, step in enumerate(path)]
    tables = _Tables(len(taken) * OPERATOR_WORDS)
    rows = [_words_of(operator, given, is_last, tables) for operator, given, is_last in taken]
    operators_words = np.zeros((len(rows), OPERATOR_WORDS), dtype=np.int64)
    for at, row in enumerate(rows):
        operators_words[at, : len(row)] = row
    return Program(tuple(chains), np.concatenate([operators_words.reshape(-1), *tables.pieces]))


def is_matrix(output: Output, kinds: Sequence[FeatureType]) -> bool:
    """Return whether an output has dense features as its columns."""
    return bool(output.keys) and not any(kind.is_jagged for kind in kinds)


def _path(steps: dict[str, Step], name: str) -> list[Step]:
    found = []
    while name in steps:
        found.append(steps[name])
        name = steps[name].of
    return found[::-1]


class _Tables:
    """Tables behind the operators; equal ones are there once."""

    def __init__(self, first: int) -> None:
        self.pieces: list[Words] = []
        self._size = first
        self._known: dict[tuple[ops.Operator, str], int] = {}

    def place(self, operator: ops.Operator, dtype: str, numbers: Words) -> int:
        """Return where an operator's table is, in words."""
        key = operator, dtype
        if key not in self._known:
            self._known[key] = self._size
            self.pieces.append(numbers)
            self._size += len(numbers)
        return self._known[key]


def _words_of(operator: ops.Operator, given: FeatureType, is_last: bool, tables: _Tables) -> list[int]:
    numbers = _numbers_of(operator, given, is_last, tables)
    assert len(numbers) <= OPERATOR_WORDS - _NUMBERS_AT
    kinds = (DTYPES.index(given.dtype), DTYPES.index(operator.result(given).dtype))
    return [ops.OPERATORS.index(type(operator)), *kinds, *map(_word, numbers)]


def _numbers_of(operator: ops.Operator, given: FeatureType, is_last: bool, tables: _Tables) -> Sequence[float | int]:
    """What `kernel.py` has as the numbers of an operator, in its order; as floats are those of reals."""
    match operator:
        case ops.Logit(eps):
            return float(np.float32(eps)), float(np.float32(1) - np.float32(eps))
        case ops.BoxCox(lmbda):
            return (float(lmbda),)
        case ops.Onehot(lower, _, num_classes):
            return float(np.float32(lower)), operator.step, num_classes, int(is_last)
        case ops.SigridHash(salt, max_value):
            return salt, max_value
        case ops.FirstX(n) | ops.Ngram(n):
            return (min(n, _MOST),)
        case ops.Clamp(lower, upper):
            low, high = (-np.inf, np.inf) if given.is_float else RANGES[given.dtype]
            bounds = low if lower is None else lower, high if upper is None else upper
            return [_rounded(bound, given) for bound in bounds] if given.is_float else bounds
        case ops.Bucketize(borders):
            table = _distinct(np.asarray(borders, dtype=given.dtype)).astype(np.float64)
            return tables.place(operator, given.dtype, table.view(np.int64)), len(table), int(len(table) > 1)
        case ops.MapId(table):
            return tables.place(operator, "", np.asarray(table, dtype=np.int64)), len(table)
        case ops.FillNull(value, nan):
            return (_rounded(value, given) if given.is_float else value), int(nan)
    assert isinstance(operator, ops.Cast)
    return ()


def _distinct(borders: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Of two equal borders the first becomes the number before it, so that an equal value is above one of the two."""
    is_first = np.append(borders[1:] == borders[:-1], False)
    return np.where(is_first, np.nextafter(borders, borders.dtype.type(-np.inf)), borders)


def _rounded(value: float, given: FeatureType) -> float:
    return float(np.dtype(given.dtype).type(value))


def _word(value: float | int) -> int:
    """8 bytes of a number, read as an integer."""
    return int(np.float64(value).view(np.int64)) if isinstance(value, float) else int(value)


# Sizes for which training steps are captured: how long lists become, and how a step runs, with its reason. Pure.
#
# A CUDA graph runs on the sizes with which it was captured, and batches of lists have other ones each time. So lists
# may be made longer, up to the next size of a row of few (`padded`), and each size has graphs of its own, if it comes
# often. Carried out by `captured.py`.

# Sizes grow by an eighth at the most, and by no less than this.
_LEAST_STEP = 16
_STEPS_OF_A_DOUBLING = 3  # as a power of two
# Steps of a size that run as they are before it is captured: a rare one is not worth the time and the memory.
LEAST_SEEN = 3
# Sizes that are captured: each has a graph for each slot.
MOST_SIZES = 8


def padded(count: int) -> int:
    """Return the next size: so many values have room in it, and at most an eighth (and 15) more."""
    step = max(_LEAST_STEP, 1 << max(0, count.bit_length() - 1 - _STEPS_OF_A_DOUBLING))
    return -(-count // step) * step


class StepMode(enum.Enum):
    """What is done with a training step."""

    RUN = "run"
    CAPTURE = "capture"
    REPLAY = "replay"


@dataclass(frozen=True)
class BucketStep:
    """What to do, and why."""

    act: StepMode
    reason: str


def decide_step(
    *, is_captured: bool, is_warm: bool, has_next: bool, num_seen: int, size_at: int, num_sizes: int, refusal: str
) -> BucketStep:
    """Decide how a step runs.

    Args:
        is_captured: whether there is a graph of these sizes for this slot.
        is_warm: whether libraries and allocators have settled.
        has_next: whether the next batch is where a graph would look for it.
        num_seen: steps of these sizes before.
        size_at: which of the captured sizes these are, in the order in which they came; -1: none of them.
        num_sizes: that are captured.
        refusal: why nothing can be captured; "" if it can.
    """
    if is_captured:
        return BucketStep(StepMode.REPLAY, "captured")
    if refusal:
        return BucketStep(StepMode.RUN, refusal)
    if not is_warm:
        return BucketStep(StepMode.RUN, "the first steps run as they are")
    if not has_next:
        return BucketStep(StepMode.RUN, "there is no next batch to compute beside it")
    if size_at < 0 and num_seen < LEAST_SEEN:
        return BucketStep(StepMode.RUN, f"{num_seen} steps had these sizes before, and {LEAST_SEEN} are waited for")
    if size_at < 0 and num_sizes >= MOST_SIZES:
        return BucketStep(StepMode.RUN, f"{num_sizes} sizes are captured, and no more are")
    return BucketStep(StepMode.CAPTURE, "these sizes come often")


_WORD_BYTES = 8
_TILE_BYTES = 2 * _WORD_BYTES
# Parts begin where 16 bytes can be read at once.
_ALIGNED_BYTES = 16


class Place(NamedTuple):
    """Where an output is among the results, and its lengths in the batch's arena.

    Attributes:
        first, num_values: of its values, in values of its dtype.
        lengths_at: in words; -1 where there are none.
        num_lengths: of them.
        num_padding: zeros among the values, behind the last list.
    """

    dtype: str
    first: int
    num_values: int
    width: int
    lengths_at: int = -1
    num_lengths: int = 0
    num_padding: int = 0


class Packed(NamedTuple):
    """A batch's arena, and how large that of its results is. Data workers may make it, and every transport takes it.

    Attributes:
        fingerprint: of the graph, its launches and tiles.
        words: in host memory.
        num_tiles: of each launch.
        places: of each output.
        made_bytes: of the results.
    """

    fingerprint: str
    words: torch.Tensor
    num_rows: int
    num_tiles: tuple[int, ...]
    places: tuple[Place, ...]
    made_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of both arenas."""
        return self.words.numel() * _WORD_BYTES + self.made_bytes

    @property
    def padding(self) -> list[tuple[int, int]]:
        """Where zeros are to be in the results, which no kernel writes: first byte and end."""
        found = []
        for place in self.places:
            item = np.dtype(place.dtype).itemsize
            end = place.first + place.num_values
            if place.num_padding:
                found.append(((end - place.num_padding) * item, end * item))
        return found


def fingerprint_of(graph: FeatureGraph, launches: Sequence[Sequence[int]], tile: int, is_padded: bool = False) -> str:
    """Return what two packers share if a batch of one is a batch of the other."""
    text = f"{graph.digest} {[list(chains) for chains in launches]} {tile}{' padded' * is_padded}"
    return blake2b(text.encode(), digest_size=16).hexdigest()


def check_packed(packed: Packed, fingerprint: str) -> None:
    """Raise FeatureError where a batch was packed by another packer, or is not in host memory any more."""
    if packed.fingerprint != fingerprint:
        raise FeatureError("this batch was packed for another graph, plan or tile: PackedByDataWorkers needs CoRun's")
    if packed.words.device.type != "cpu":
        raise FeatureError(
            f"this batch is on {packed.words.device}, and CoRun copies it from host memory: leave out the loader's "
            "device="
        )


class Packer:
    """Packs batches of a graph.

    Args:
        graph: the graph.
        program: of the graph.
        tile: values in a tile.
        launches: the chains of each launch of the kernel; default: one of all.
        is_padded: whether outputs of lists have zeros behind them, as a `LaunchPlan` says.
        pinned: whether arenas are in page-locked memory, from where a GPU reads on its own.
        most_bytes: what a batch and its results may need together; default: anything.

    Attributes:
        fingerprint: of the graph, its launches and tiles.
    """

    def __init__(
        self,
        graph: FeatureGraph,
        program: Program,
        tile: int,
        *,
        launches: Sequence[Sequence[int]] | None = None,
        is_padded: bool = False,
        pinned: bool = False,
        most_bytes: int | None = None,
    ) -> None:
        self._graph = graph
        self._chains = program.chains
        self._tile = tile
        self._launches = [list(range(len(program.chains)))] if launches is None else launches
        self.fingerprint = fingerprint_of(graph, self._launches, tile, is_padded)
        self._is_padded = is_padded
        self._pinned = pinned
        self._most_bytes = most_bytes
        self._table = np.zeros((len(program.chains), FEATURE_WORDS), dtype=np.int64)
        for row, chain in zip(self._table, program.chains, strict=True):
            row[:4] = DTYPES.index(chain.given.dtype), chain.first, len(chain.operators), DTYPES.index(chain.made.dtype)
            row[6:9] = chain.is_moved, *(0 if kind.is_jagged else kind.width for kind in (chain.given, chain.made))
            row[14] = chain.has_classes

    def __call__(self, num_rows: int, features: Columns) -> Packed:
        """Pack what `Reader` has read.

        Raises:
            torch.OutOfMemoryError: it needs more than `most_bytes`; nothing has been made of it.
        """
        lengths = {name: _numpy(values.lengths) for name, values in features.items() if values.lengths is not None}
        made_lengths = [
            chain.lengths(lengths[chain.source]) if chain.made.is_jagged else None for chain in self._chains
        ]
        layout = _Layout(self._table.copy(), num_rows, len(self._launches))
        sizes = [
            num_rows * chain.made.width if found is None else int(found.sum())
            for chain, found in zip(self._chains, made_lengths, strict=True)
        ]
        self._check_size(features, sizes)
        layout.table[:, 13] = sizes
        # First, so that lengths are at one place, whatever the batch's sizes are.
        places, made_bytes = self._measure(layout, num_rows, made_lengths, sizes)
        tiles = [_tiles_of(chains, sizes, self._tile) for chains in self._launches]
        num_tiles = tuple(len(of_launch) // 2 for of_launch in tiles)
        layout.add_tiles(np.concatenate(tiles), num_tiles)
        for name, values in features.items():
            layout.add_input(values, [at for at, chain in enumerate(self._chains) if chain.source == name])
        for at, (chain, found) in enumerate(zip(self._chains, made_lengths, strict=True)):
            if found is not None and chain.is_moved:
                layout.table[at, 10] = layout.add(_starts(found))
        return Packed(self.fingerprint, layout.words(self._pinned), num_rows, num_tiles, places, made_bytes)

    def _check_size(self, features: Columns, sizes: Sequence[int]) -> None:
        if self._most_bytes is None:
            return
        items = [np.dtype(chain.made.dtype).itemsize for chain in self._chains]
        num_bytes = sum(size * item for size, item in zip(sizes, items, strict=True))
        num_bytes += sum(size // self._tile + 1 for size in sizes) * _TILE_BYTES
        for parts in (features.values, features.lengths, features.valid):
            num_bytes += sum(part.nbytes for part in parts.values())
        if num_bytes > self._most_bytes:
            raise torch.OutOfMemoryError(f"a batch and its results need {num_bytes} bytes, of {self._most_bytes}")

    def _measure(
        self, layout: _Layout, num_rows: int, made_lengths: Sequence[Words | None], sizes: Sequence[int]
    ) -> tuple[tuple[Place, ...], int]:
        """Where each output is among the results."""
        places: list[Place] = []
        made_bytes = at = 0
        for output in self._graph.outputs:
            own = range(at, at + len(output.of))
            at += len(output.of)
            chains = [self._chains[number] for number in own]
            item = np.dtype(chains[0].made.dtype).itemsize
            made_bytes = _aligned(made_bytes)
            first = value = made_bytes // item
            kinds = [chain.made for chain in chains]
            width = sum(kind.width for kind in kinds) if is_matrix(output, kinds) else kinds[0].width
            for number, kind in zip(own, kinds, strict=True):
                layout.table[number, 11] = value
                layout.table[number, 12] = width if is_matrix(output, kinds) else kind.width
                value += kind.width if is_matrix(output, kinds) else sizes[number]
            is_jagged = any(kind.is_jagged for kind in kinds)
            filled = sum(sizes[number] for number in own)
            count = padded(filled) if is_jagged and self._is_padded else filled
            made_bytes += count * item
            place = Place(chains[0].made.dtype, first, count, width)
            if is_jagged:
                all_lengths = [
                    np.full(num_rows, kind.width) if found is None else found
                    for kind, found in zip(kinds, (made_lengths[number] for number in own), strict=True)
                ]
                joined = np.concatenate(all_lengths).astype(np.int64)
                place = Place(place.dtype, first, count, width, layout.add(joined), len(joined), count - filled)
            places.append(place)
        return tuple(places), made_bytes


class _Layout:
    """What lies in an arena, while it is measured out.

    Attributes:
        table: of the features.
    """

    def __init__(self, table: Words, num_rows: int, num_launches: int) -> None:
        self.table = table
        self._num_rows = num_rows
        self._pieces: list[tuple[int, torch.Tensor]] = []
        num_words = _aligned((LAUNCHES_AT + 2 * num_launches) * _WORD_BYTES) // _WORD_BYTES
        self._header = np.zeros(num_words, dtype=np.int64)
        self._bytes = self._header.nbytes + self.table.nbytes

    def add_tiles(self, tiles: Words, num_tiles: Sequence[int]) -> None:
        """Add the tiles of all launches."""
        ends = np.cumsum(num_tiles)
        self._header[LAUNCHES_AT::2][: len(num_tiles)] = ends - num_tiles
        self._header[LAUNCHES_AT + 1 :: 2][: len(num_tiles)] = ends
        self._header[:3] = self._num_rows, len(self._header), self.add(tiles)

    def add(self, numbers: Words) -> int:
        """Add int64 numbers; where they are, in words."""
        return self._add(torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))) // _WORD_BYTES

    def add_input(self, values: Values, chains: Sequence[int]) -> None:
        """Add the values of an input, their starts and validity, and tell its chains where they are."""
        flat = values.values.reshape(-1)
        self.table[chains, 4] = self._add(flat) // flat.element_size()
        self.table[chains, 5] = -1 if values.valid is None else self._add(values.valid.to(torch.int8))
        if values.lengths is not None:
            self.table[chains, 9] = self.add(_starts(_numpy(values.lengths)))

    def _add(self, piece: torch.Tensor) -> int:
        begin = _aligned(self._bytes)
        self._pieces.append((begin, piece))
        self._bytes = begin + piece.numel() * piece.element_size()
        return begin

    def words(self, pinned: bool) -> torch.Tensor:
        """Return the arena, with everything in it."""
        memory = torch.empty(_aligned(self._bytes) // _WORD_BYTES, dtype=torch.int64, pin_memory=pinned)
        before = np.concatenate([self._header, self.table.reshape(-1)])
        memory[: len(before)].copy_(torch.from_numpy(before))
        for begin, piece in self._pieces:
            here = memory.view(torch.int8)[begin : begin + piece.numel() * piece.element_size()].view(piece.dtype)
            here.copy_(piece)
        return memory


def unpack(
    graph: FeatureGraph, packed: Packed, batch: torch.Tensor, made: torch.Tensor
) -> dict[str, torch.Tensor | Jagged | JaggedBatch]:
    """Return the outputs of a graph, over the memory of the two arenas.

    Args:
        graph: the graph.
        packed: what was packed.
        batch: its words, where the results are.
        made: the results.
    """
    return {
        output.name: _output(output, graph.types[output.of[0]], place, packed.num_rows, batch, made)
        for output, place in zip(graph.outputs, packed.places, strict=True)
    }


def raw_of(graph: FeatureGraph, program: Program, packed: Packed) -> dict[str, torch.Tensor | Nullable | Jagged]:
    """Return the batch that was packed, over the memory of its arena in host memory; inputs that nothing needs are
    zeros.
    """
    numbers = packed.words
    features_at = int(numbers[1])
    table = numbers[features_at : features_at + len(program.chains) * FEATURE_WORDS].view(-1, FEATURE_WORDS).tolist()
    row_of = {chain.source: row for chain, row in zip(program.chains, table, strict=True)}
    return {node.name: _input(node, row_of.get(node.name), packed) for node in graph.inputs}


def _input(node: Input, row: Sequence[int] | None, packed: Packed) -> torch.Tensor | Nullable | Jagged:
    dtype, num_rows, kind = TORCH_DTYPES[node.type.dtype], packed.num_rows, node.type
    if row is None:
        if kind.is_jagged:
            return Jagged(torch.zeros(0, dtype=dtype), torch.zeros(num_rows, dtype=torch.int64))
        return torch.zeros((num_rows,) if kind.width == 1 else (num_rows, kind.width), dtype=dtype)
    flat = packed.words.view(dtype)[row[4] :]
    if kind.is_jagged:
        starts = packed.words[row[9] : row[9] + num_rows + 1]
        return Jagged(flat[: int(starts[-1])], starts.diff())
    values = flat[: num_rows * kind.width]
    shape = (num_rows,) if kind.width == 1 else (num_rows, kind.width)
    if row[5] < 0:
        return values.view(shape)
    valid = packed.words.view(torch.int8)[row[5] : row[5] + num_rows * kind.width] != 0
    return Nullable(values.view(shape), valid.view(shape))


def _output(
    output: Output, kind: FeatureType, place: Place, num_rows: int, batch: torch.Tensor, made: torch.Tensor
) -> torch.Tensor | Jagged | JaggedBatch:
    dtype = TORCH_DTYPES[place.dtype]
    values = made.view(dtype)[place.first : place.first + place.num_values]
    if place.lengths_at < 0:
        return values if place.width == 1 and not output.keys else values.view(num_rows, place.width)
    lengths = batch[place.lengths_at : place.lengths_at + place.num_lengths]
    if not output.keys:
        assert kind.is_jagged
        return Jagged(values, lengths)
    return JaggedBatch(output.keys, values, lengths)


def _tiles_of(chains: Sequence[int], sizes: Sequence[int], tile: int) -> Words:
    """A feature and its first value for each tile of some chains."""
    counts = -(-np.asarray([sizes[at] for at in chains], dtype=np.int64) // tile)
    tiles_before = np.cumsum(counts) - counts
    firsts = (np.arange(counts.sum()) - np.repeat(tiles_before, counts)) * tile
    features = np.repeat(np.asarray(chains, dtype=np.int64), counts)
    return np.stack([features, firsts], axis=1).reshape(-1).astype(np.int64)


def _starts(lengths: Words) -> Words:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _numpy(lengths: torch.Tensor | None) -> Words:
    assert lengths is not None
    found: Words = lengths.numpy()
    return found


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
