"""A rank's file as `torch.save` would write it: `torch.load(path, weights_only=True)` opens it as the nested state.

Pure, and made without torch: the checkpoint writer has none. Beside what torch knows, the archive holds the layout and
the structure, which `torch.load` passes over and a restore reads.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from hetstream.checkpoint.errors import Damaged, DamagedCheckpoint
from hetstream.checkpoint.formats.plan import FilePlan, Range
from hetstream.checkpoint.formats.stored_zip import Record as ZipRecord
from hetstream.checkpoint.formats.stored_zip import find_records, plan_zip
from hetstream.checkpoint.formats.torch_pickle import pickle_record
from hetstream.checkpoint.record.layout import Entry, TensorSpec, from_json, lay_out
from hetstream.checkpoint.record.structure import Record

# torch takes any folder; this is the one that it names itself when it does not know the file's name.
_FOLDER = "archive/"
_LAYOUT, _STRUCTURE = "hetstream/layout.json", "hetstream/structure.json"
# Structures are small; a length that says otherwise is not read.
_MAX_JSON_BYTES = 1 << 30


def plan_torch(entries: Sequence[Entry], record: Record, crc32: Callable[[Range], int]) -> FilePlan:
    """Lay the file out.

    Args:
        entries: what it shall hold, by the numbers that the structure calls them by, at their places in the payload;
            they may leave parts of the payload out.
        record: the structure around them.
        crc32: gives the CRC-32 of a part of the payload. torch does not look at it, other readers of zip archives do.

    Raises:
        DamagedCheckpoint: the entries and the structure do not belong together.
    """
    pickled = pickle_record(record, entries)
    parts = [Range(entry.offset, entry.num_bytes) for entry in entries]
    storages: list[tuple[bytes | Range, int]] = [(part, crc32(part) if part.num_bytes else 0) for part in parts]
    storages += [(data, zlib.crc32(data)) for data in pickled.extra]
    layout = lay_out(TensorSpec(entry.name, entry.dtype, entry.shape) for entry in entries)
    return plan_zip(
        [
            _inline("data.pkl", pickled.data),
            _inline("byteorder", b"little"),
            _inline(_LAYOUT, layout.to_json()),
            _inline(_STRUCTURE, record.write()),
            *(ZipRecord(f"{_FOLDER}data/{key}", *storage) for key, storage in enumerate(storages)),
            _inline("version", b"3\n"),
        ]
    )


def _inline(name: str, data: bytes) -> ZipRecord:
    return ZipRecord(_FOLDER + name, data, zlib.crc32(data))


def read_torch(file: io.BufferedIOBase, num_bytes: int, name: str) -> tuple[tuple[Entry, ...], Record]:
    """Find out what a file of ours holds and where. Nothing is unpickled.

    Args:
        file: seekable.
        num_bytes: its size.
        name: its path, for messages.

    Returns:
        The tensors, with offsets in the file; the structure around them.

    Raises:
        DamagedCheckpoint: it is truncated, damaged, or not of ours; the message says which.
    """
    try:
        return _read_torch(file, num_bytes)
    except Damaged as error:
        raise DamagedCheckpoint(f"{name}: {error}") from error


def _read_torch(file: io.BufferedIOBase, num_bytes: int) -> tuple[tuple[Entry, ...], Record]:
    records = find_records(file, num_bytes)
    if _FOLDER + _LAYOUT not in records or _FOLDER + _STRUCTURE not in records:
        raise DamagedCheckpoint(
            "this zip archive was not written by hetstream: open it with torch.load, or convert it with "
            "`hetstream ckpt convert`"
        )
    layout = from_json(_read(file, *records[_FOLDER + _LAYOUT]))
    record = Record.read(_read(file, *records[_FOLDER + _STRUCTURE]))
    entries = []
    for key, entry in enumerate(layout.entries):
        offset, size = records.get(f"{_FOLDER}data/{key}", (0, -1))
        if size != entry.num_bytes:
            raise DamagedCheckpoint(f"tensor {entry.name!r} needs {entry.num_bytes} bytes, the archive holds {size}")
        entries.append(replace(entry, offset=offset))
    return tuple(entries), record


def _read(file: io.BufferedIOBase, offset: int, size: int) -> bytes:
    if size > _MAX_JSON_BYTES:
        raise DamagedCheckpoint(f"the structure takes {size} bytes, at most {_MAX_JSON_BYTES} are read")
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise DamagedCheckpoint(f"the file ends after {len(data)} of {size} bytes of its structure")
    return data
