"""A batch as one piece of memory, for one copy to the GPU: the table of its features, tiles, lengths and values.

`opcodes.py` has what does not change from batch to batch. Results have an arena of their own, which is only measured
out here: a `JaggedBatch` lies there key by key, a matrix of dense features row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch, Nullable
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, Input, Output
from hetstream.mpi_dataworkers.features.kernel import TORCH_DTYPES
from hetstream.mpi_dataworkers.features.reading import Columns, Values
from hetstream.mpi_dataworkers.features.types import DTYPES, FeatureType
from hetstream.mpi_dataworkers.gpu_features.buckets import padded
from hetstream.mpi_dataworkers.gpu_features.opcodes import FEATURE_WORDS, LAUNCHES_AT, Program, Words, is_matrix

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
    """What two packers share if a batch of one is a batch of the other."""
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
        self._header = np.zeros(_aligned_words(LAUNCHES_AT + 2 * num_launches), dtype=np.int64)
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
        """The arena, with everything in it."""
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
    """The outputs of a graph, over the memory of the two arenas.

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
    """The batch that was packed, over the memory of its arena in host memory; inputs that nothing needs are zeros."""
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


def _aligned_words(count: int) -> int:
    return _aligned(count * _WORD_BYTES) // _WORD_BYTES


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
