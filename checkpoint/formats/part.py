"""A rank's part of a checkpoint in each of the formats that it may have on disk. Pure; called by the checkpoint writer
and readers.

name          suffix         opens with
safetensors   .safetensors   any safetensors library: the tensors, flat, by their names in the state
torch         .pt            torch.load(..., weights_only=True): the state, nested as it was
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from hetstream.checkpoint.errors import DamagedCheckpoint, OtherRelease
from hetstream.checkpoint.formats import safetensors
from hetstream.checkpoint.formats.plan import FilePlan, Range
from hetstream.checkpoint.formats.torch_zip import plan_torch, read_torch
from hetstream.checkpoint.record.layout import Entry, Layout
from hetstream.checkpoint.record.structure import Record

Format = Literal["safetensors", "torch"]  # as in `structure.Record`
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES: dict[Format, str] = {"safetensors": ".safetensors", "torch": ".pt"}
# Where a safetensors file carries the structure.
STRUCTURE = "hetstream.structure"


def plan_part(
    form: Format,
    entries: Sequence[Entry],
    record: Record,
    payload: memoryview,
    keys: Iterable[str] | None = None,
) -> FilePlan:
    """Lay a rank's file out.

    Args:
        form: of the file.
        entries: of the layout in memory.
        record: the structure in memory.
        payload: in memory; only the torch format reads it, for the checksums of its archive.
        keys: the top-level keys that this rank writes; None: all.

    Raises:
        DamagedCheckpoint: layout and structure do not belong together.
    """
    if keys is not None:
        record, indices = record.only(keys)
        entries = [entries[index] for index in indices]
    if form == "torch":
        return plan_torch(entries, record, _crc32_of(payload))
    return safetensors.plan_file(entries, {"format": "pt", STRUCTURE: record.write().decode()})


def check_structure(form: Format, layout: Layout, structure: bytes) -> None:
    """Refuse a state whose file nobody could read, before it is saved.

    Args:
        form: of the file.
        layout: in memory.
        structure: `Record.write` of the record in memory.

    Raises:
        UnsupportedState: it has too many tensors and values.
    """
    # JSON in JSON is at most three times as long, and a tensor is a line beside its name and shape.
    most_bytes = 3 * (len(structure) + len(layout.encoded)) + 128 * len(layout.entries)
    if form == "safetensors" and most_bytes > safetensors.MAX_HEADER_BYTES:
        safetensors.plan_file(layout.entries, {"format": "pt", STRUCTURE: structure.decode()})


def _crc32_of(payload: memoryview) -> Callable[[Range], int]:
    return lambda part: zlib.crc32(payload[part.offset : part.offset + part.num_bytes])


def read_part(form: Format, data: memoryview, name: str) -> tuple[tuple[Entry, ...], dict[str, str], int]:
    """Find out what a rank's file holds and where.

    Args:
        form: of the file.
        data: the whole file.
        name: its path, for messages.

    Returns:
        The tensors, by the numbers that the structure calls them by, with offsets from where the data begins; text
        that the file carries along; where the data begins.

    Raises:
        DamagedCheckpoint: it is no file of this format, or it was cut off.
    """
    if form == "torch":
        with io.BufferedReader(_MappedFile(data)) as file:
            entries, record = read_torch(file, len(data), name)
        return entries, {STRUCTURE: record.write().decode()}, 0
    return safetensors.read_header(data, name)


def structure_in(metadata: Mapping[str, str], name: str) -> Record:
    """The structure that a file carries along.

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


class _MappedFile(io.RawIOBase):
    """A view of memory as a file, uncopied."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise OSError(f"a seek to {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: object) -> int:
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        part = self._data[self._at : self._at + len(target)]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)
