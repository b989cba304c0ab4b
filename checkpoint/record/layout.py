"""Where each tensor of a record lies in its payload. Pure; made by the trainer, read by the checkpoint writer and the
formats.

The payload has two regions. *Region A* holds the tensors whose size is a multiple of 64 bytes (nearly all bytes of a
model), back to back in the order of the state. *Region B* holds the others by falling item size, each at a multiple of
64 bytes; on disk they are packed, and the order keeps each at a multiple of its item size. So region A goes to disk as
it lies in memory, in one piece.

Offsets follow from names, dtypes and shapes, so a layout's JSON holds only these: there are no offsets in it that could
overlap or point outside.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import xxhash

from hetstream.base import typed_json
from hetstream.checkpoint.errors import DamagedLayout

VERSION = 1
ALIGN_BYTES = 64
# Item sizes in bytes, by safetensors' names. complex128 has none: it is saved as F64 with one more dimension.
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
# Beyond any machine's memory, and far below what sums of offsets can overflow.
MAX_PAYLOAD_BYTES = 1 << 56
MAX_DIMENSIONS = 64
# A key of the file's header that is not a tensor.
_RESERVED_NAME = "__metadata__"
_DIGEST_BYTES = 16


# Structs and no dataclasses: there is one for each tensor, and they are made ten times as fast.
class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A tensor that is to be laid out.

    Attributes:
        name: unique in its record.
        dtype: a key of `ITEM_BYTES`.
        shape: elements along each dimension; () for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A tensor and its place.

    Attributes:
        name: unique in its record.
        dtype: a key of `ITEM_BYTES`.
        shape: elements along each dimension; () for a scalar.
        offset: where it begins in the payload, in bytes; a multiple of `ALIGN_BYTES`.
        num_bytes: its size, in row-major order without holes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all tensors of a record.

    Attributes:
        entries: in the order of the specs they were made from.
        payload_bytes: size of the payload; a multiple of `ALIGN_BYTES`.
        digest: 32 hexadecimal digits; equal for equal names, dtypes, shapes and order.
        encoded: the layout as JSON.
    """

    entries: tuple[Entry, ...]
    payload_bytes: int
    digest: str
    encoded: bytes = field(repr=False, compare=False)

    def to_json(self) -> bytes:
        """Return what `from_json` reads."""
        return self.encoded


def lay_out(specs: Iterable[TensorSpec]) -> Layout:
    """Give every tensor its place.

    Raises:
        DamagedLayout: a name occurs twice or is not text, a dtype is unknown, a shape is none, or it is all too large.
    """
    ordered = list(specs)
    sizes = [_num_bytes(spec) for spec in ordered]
    names = [spec.name for spec in ordered]
    if len({*names}) < len(names):
        repeated = [name for name, count in Counter(names).items() if count > 1]
        raise DamagedLayout(f"{len(repeated)} names occur twice, {repeated[0]!r} first; names of a record are unique")
    offsets = [0] * len(ordered)
    end = 0
    for number, size in enumerate(sizes):
        if size % ALIGN_BYTES == 0:
            offsets[number] = end
            end += size
    unaligned = [index for index, size in enumerate(sizes) if size % ALIGN_BYTES]
    for number in sorted(unaligned, key=lambda number: -ITEM_BYTES[ordered[number].dtype]):
        offsets[number] = end
        end += -(-sizes[number] // ALIGN_BYTES) * ALIGN_BYTES
    if end > MAX_PAYLOAD_BYTES:
        raise DamagedLayout(f"the tensors take {end} bytes, a record holds at most {MAX_PAYLOAD_BYTES}")
    entries = tuple(
        Entry(spec.name, spec.dtype, spec.shape, offset, size)
        for spec, offset, size in zip(ordered, offsets, sizes, strict=True)
    )
    try:
        encoded = msgspec.json.encode(_Form(VERSION, ordered))
    except UnicodeEncodeError as error:
        raise DamagedLayout(f"the name of a tensor is not text: {error}") from error
    return Layout(entries, end, blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest(), encoded)


def from_json(data: bytes | memoryview) -> Layout:
    """Read what `Layout.to_json` gave.

    Raises:
        DamagedLayout: it is something else, or breaks a rule of `lay_out`.
    """
    try:
        form = typed_json.decode(data, _Form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedLayout(f"a layout of {len(data)} bytes cannot be read: {error}") from error
    if form.version != VERSION:
        raise DamagedLayout(f"a layout has version {form.version}, this release reads version {VERSION}")
    return lay_out(form.tensors)


class _Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    tensors: list[TensorSpec]


def _num_bytes(spec: TensorSpec) -> int:
    item_bytes = ITEM_BYTES.get(spec.dtype)
    if item_bytes is None:
        raise DamagedLayout(f"tensor {spec.name!r} has dtype {spec.dtype!r}, known are {', '.join(ITEM_BYTES)}")
    if not spec.name or spec.name == _RESERVED_NAME:
        raise DamagedLayout(f"a tensor cannot be called {spec.name!r}")
    shape = spec.shape
    if len(shape) > MAX_DIMENSIONS or (shape and not (min(shape) >= 0 and max(shape) < MAX_PAYLOAD_BYTES)):
        raise DamagedLayout(f"tensor {spec.name!r} has shape {shape}: at most {MAX_DIMENSIONS} sizes from 0 up")
    return math.prod(shape) * item_bytes


# Checksums of what is saved: XXH3 with 64 bits, as fast as memory is read. The home of xxhash in this package.
#
# They find flipped and missing bits; they do not prove who wrote them. Large buffers are read without the GIL.

Bytes = bytes | bytearray | memoryview


class Checksum:
    """A checksum that grows with what is written."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, data: Bytes) -> None:
        """Take in the next bytes."""
        self._state.update(data)

    @property
    def value(self) -> int:
        """Of all bytes so far; below 2**64."""
        return self._state.intdigest()


def checksum(data: Bytes) -> int:
    """Of bytes that are all here; below 2**64."""
    return xxhash.xxh3_64_intdigest(data)


# Which saved record is which, and what its directory on disk is called. Pure.

_NAME = re.compile(r"step-(\d{10,19})\.(\d{1,19})(?:\.(\d{1,19}))?", re.ASCII)
# Of a step, an attempt and a repeat: one more still fits into a word of 64 bits, with and without a sign.
MAX_NUMBER = 2**63 - 2


class Generation(NamedTuple):
    """One saved record. A later attempt's step 60 is newer than an earlier attempt's step 100.

    Attributes:
        attempt: number of the start of the training job on its checkpoint directory, from 1.
        step: of training.
        repeat: how often the attempt had saved this step before. Ranks save the same steps in the same order, so all of
            them count the same.
    """

    attempt: int
    step: int
    repeat: int = 0

    @property
    def directory_name(self) -> str:
        """What the checkpoint of this generation is called; names of one attempt sort by step."""
        return f"step-{self.step:010}.{self.attempt}" + (f".{self.repeat}" if self.repeat else "")

    @staticmethod
    def of_directory(name: str) -> Generation | None:
        """Return the generation that a directory of this name holds, or None if it is no checkpoint's name."""
        match = _NAME.fullmatch(name)
        found = Generation(int(match[2]), int(match[1]), int(match[3] or 0)) if match else None
        # Only the one spelling that `directory_name` writes.
        return found if found and found.directory_name == name and max(found) <= MAX_NUMBER else None

    def __str__(self) -> str:
        again = f" (saved {self.repeat + 1} times)" if self.repeat else ""
        return f"step {self.step} of attempt {self.attempt}{again}"
