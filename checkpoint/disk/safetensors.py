"""The safetensors form of a rank's part: which bytes the file holds, and what a header says. Pure.

Any safetensors library opens the file. Two things are ours: the header is padded so that the data begins on a page,
which lets large tensors go from shared memory to disk and from disk to a mapping without a copy; and `__metadata__`
holds the structure of the record around its tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from hetstream.base import typed_json
from hetstream.checkpoint.errors import DamagedCheckpoint, OtherRelease, UnsupportedState
from hetstream.checkpoint.record.layout import ITEM_BYTES, MAX_DIMENSIONS, Entry, Layout
from hetstream.checkpoint.record.structure import Record

# What a file will hold, before a byte of it is written. Each format makes one; the checkpoint writer writes any of
# them.
#
# Pure. The payload is named by its place in the record's payload and not copied, so that the checkpoint writer writes
# large tensors straight from shared memory.


@dataclass(frozen=True)
class Range:
    """Bytes of the record's payload that go into the file as they are.

    Attributes:
        offset: where they begin in the payload, in bytes.
        num_bytes: how many.
    """

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class FilePlan:
    """All bytes of a file, in order.

    Attributes:
        pieces: bytes of the format's own, and ranges of the payload.
    """

    pieces: tuple[bytes | Range, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return sum(piece.num_bytes if isinstance(piece, Range) else len(piece) for piece in self.pieces)

    def buffers(self, payload: memoryview) -> Iterator[memoryview]:
        """Yield the pieces as memory, uncopied.

        Args:
            payload: the record's payload, as bytes.
        """
        for piece in self.pieces:
            yield (
                payload[piece.offset : piece.offset + piece.num_bytes]
                if isinstance(piece, Range)
                else memoryview(piece)
            )


PAGE_BYTES = 4096
_LENGTH_BYTES = 8
# The limit of the reference implementation.
MAX_HEADER_BYTES = 100_000_000
_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


def plan_file(entries: Sequence[Entry], metadata: Mapping[str, str]) -> FilePlan:
    """Lay a file out: the header names the entries in the given order, the data follows that of the payload.

    Args:
        entries: what it shall hold; they may leave parts of the payload out.
        metadata: text to carry along.

    Raises:
        UnsupportedState: the header would be too long to be read.
    """
    places: dict[str, list[int]] = {}
    at = 0
    ranges: list[Range] = []
    # An empty tensor shares its place with the next: before it, it is aligned as in memory.
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        places[entry.name] = [at, at + entry.num_bytes]
        at += entry.num_bytes
        if ranges and ranges[-1].offset + ranges[-1].num_bytes == entry.offset:
            ranges[-1] = Range(ranges[-1].offset, ranges[-1].num_bytes + entry.num_bytes)
        elif entry.num_bytes:
            ranges.append(Range(entry.offset, entry.num_bytes))
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in entries:
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": places[entry.name]}
    text = json.dumps(table, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES - PAGE_BYTES:
        raise UnsupportedState(
            f"{len(entries)} tensors and the values around them take {len(text)} bytes of a header, and no reader of "
            f"safetensors takes more than {MAX_HEADER_BYTES}. Have fewer and larger tensors, and keep long texts and "
            "nested values as bytes or arrays"
        )
    padding = -(_LENGTH_BYTES + len(text)) % PAGE_BYTES
    length = (len(text) + padding).to_bytes(_LENGTH_BYTES, "little")
    return FilePlan((length + text + b" " * padding, *ranges))


def read_header(data: memoryview, name: str) -> tuple[tuple[Entry, ...], dict[str, str], int]:
    """Read and check the beginning of a file.

    Args:
        data: the whole file.
        name: its path, for messages.

    Returns:
        The tensors in the header's order, with offsets from where the data begins; the metadata; where the data begins.

    Raises:
        DamagedCheckpoint: it is no safetensors file, or it was cut off.
    """
    num_header = int.from_bytes(data[:_LENGTH_BYTES], "little") if len(data) >= _LENGTH_BYTES else MAX_HEADER_BYTES + 1
    begin = _LENGTH_BYTES + num_header
    if num_header > MAX_HEADER_BYTES or begin > len(data):
        raise DamagedCheckpoint(f"{name}: bytes 0-7 announce a header of {num_header} bytes in a file of {len(data)}")
    try:
        # Typed, and part by part: as Python's own objects a header takes thirty times its size.
        table = typed_json.decode(data[_LENGTH_BYTES:begin], dict[str, msgspec.Raw])
        metadata = typed_json.decode(table.pop("__metadata__", msgspec.Raw(b"{}")), dict[str, str])
        entries = tuple(_entry(tensor, typed_json.decode(raw, _Tensor)) for tensor, raw in table.items())
    except (ValueError, msgspec.MsgspecError, RecursionError) as exc:
        raise DamagedCheckpoint(f"{name}: the header in bytes 8-{begin} cannot be read: {exc!r}") from exc
    problems = list(_problems(entries, len(data) - begin))
    if problems:
        raise DamagedCheckpoint(f"{name}: the header in bytes 8-{begin} is wrong: {'; '.join(problems)}")
    return entries, metadata, begin


class _Tensor(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


def _entry(name: str, value: _Tensor) -> Entry:
    begin, end = value.data_offsets
    return Entry(name, value.dtype, value.shape, begin, end - begin)


def _problems(entries: Iterable[Entry], num_data: int) -> Iterator[str]:
    at = 0
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if math.prod(entry.shape) * ITEM_BYTES.get(entry.dtype, -1) != entry.num_bytes:
            yield f"{entry.name!r} has {entry.num_bytes} bytes for {entry.dtype}{list(entry.shape)}"
        if entry.offset != at:
            yield f"{entry.name!r} begins at {entry.offset} instead of {at}"
        at = entry.offset + entry.num_bytes
    if at != num_data:
        yield f"{at} bytes of tensors in {num_data} bytes of data"


# A rank's part of a checkpoint on disk: a safetensors file, whose metadata hold the structure of the state. Pure.
#
# Called by the checkpoint writer and readers.

SUFFIX = ".safetensors"
# Where the file carries the structure.
STRUCTURE = "hetstream.structure"


def plan_part(entries: Sequence[Entry], record: Record, keys: Iterable[str] | None = None) -> FilePlan:
    """Lay a rank's file out.

    Args:
        entries: of the layout in memory.
        record: the structure in memory.
        keys: the top-level keys that this rank writes; None: all.

    Raises:
        DamagedCheckpoint: layout and structure do not belong together.
    """
    if keys is not None:
        record, indices = record.only(keys)
        entries = [entries[index] for index in indices]
    return plan_file(entries, {"format": "pt", STRUCTURE: record.write().decode()})


def check_structure(layout: Layout, structure: bytes) -> None:
    """Refuse a state whose file nobody could read, before it is saved.

    Args:
        layout: in memory.
        structure: `Record.write` of the record in memory.

    Raises:
        UnsupportedState: it has too many tensors and values.
    """
    # JSON in JSON is at most three times as long, and a tensor is a line beside its name and shape.
    most_bytes = 3 * (len(structure) + len(layout.encoded)) + 128 * len(layout.entries)
    if most_bytes > MAX_HEADER_BYTES:
        plan_file(layout.entries, {"format": "pt", STRUCTURE: structure.decode()})


def structure_in(metadata: Mapping[str, str], name: str) -> Record:
    """Return the structure that a file carries along.

    Raises:
        DamagedCheckpoint: there is none, or it is damaged.
    """
    text = metadata.get(STRUCTURE)
    if text is None:
        raise DamagedCheckpoint(
            f"{name} holds no structure of a state: it was not written by hetstream. `hetstream ckpt convert` takes it"
        )
    try:
        return Record.read(text.encode())
    except OtherRelease as error:
        raise OtherRelease(f"{name}: {error}") from error
    except (DamagedCheckpoint, UnicodeEncodeError) as error:
        raise DamagedCheckpoint(f"{name}: {error}") from error
