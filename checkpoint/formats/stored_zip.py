"""An uncompressed zip archive as a plan of its bytes, and where its records lie when it is read. For `torch_zip.py`.

APPNOTE.TXT 6.3 of the zip format: 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16 (its end), 4.5.3
(zip64). Nothing is ever unpacked here: what is compressed or encrypted is refused.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, cast

from hetstream.checkpoint.errors import DamagedCheckpoint
from hetstream.checkpoint.formats.plan import FilePlan, Range

# A storage begins on a cache line, so that a mapped file can be used in place.
ALIGN_BYTES = 64
# A large one lies at the same place of a page in the file as in memory: so it can be written past the page cache.
PAGE_BYTES = 4096
_LARGE_BYTES = 1 << 20

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_LOCAL_MAGIC, _CENTRAL_MAGIC, _END_MAGIC, _END64_MAGIC, _LOCATOR_MAGIC = (
    0x04034B50,
    0x02014B50,
    0x06054B50,
    0x06064B50,
    0x07064B50,
)
_VERSION, _VERSION64 = 20, 45
_UTF8_NAMES = 0x0800
_DATE = 0x0021  # 1980-01-01: a file's bytes depend on its content alone
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_ZIP64_ID = 0x0001
_PADDING_ID = 0x4246  # "FB", as torch pads


@dataclass(frozen=True)
class Record:
    """One file of the archive.

    Attributes:
        name: its path in the archive.
        content: its bytes, or the part of the payload that it is.
        crc32: of its bytes.
    """

    name: str
    content: bytes | Range
    crc32: int

    @property
    def num_bytes(self) -> int:
        """Size of the record."""
        return self.content.num_bytes if isinstance(self.content, Range) else len(self.content)


def plan_zip(records: Sequence[Record]) -> FilePlan:
    """Lay an archive out.

    Args:
        records: what it holds, in this order.
    """
    pieces: list[bytes | Range] = []
    central: list[bytes] = []
    end = 0
    for record in records:
        header = _local_header(record, end)
        central.append(_central_header(record, end))
        pieces += [header, record.content]
        end += len(header) + record.num_bytes
    directory = b"".join(central)
    return FilePlan((*pieces, directory + _end_of(len(records), len(directory), end)))


def _local_header(record: Record, at: int) -> bytes:
    name, size = record.name.encode(), record.num_bytes
    is_large = size >= _MAX32
    extra = struct.pack("<HHQQ", _ZIP64_ID, 16, size, size) if is_large else b""
    padding = b""
    if isinstance(record.content, Range) and size:
        unit = PAGE_BYTES if size >= _LARGE_BYTES else ALIGN_BYTES
        bare = at + _LOCAL.size + len(name) + len(extra) + 4
        num_padding = (record.content.offset - bare) % unit
        padding = struct.pack("<HH", _PADDING_ID, num_padding) + bytes(num_padding)
    extra += padding
    fields = _shared_fields(record, _VERSION64 if is_large else _VERSION, name, extra)
    return _LOCAL.pack(_LOCAL_MAGIC, *fields) + name + extra


def _central_header(record: Record, at: int) -> bytes:
    name, size = record.name.encode(), record.num_bytes
    large = b"".join(
        [struct.pack("<QQ", size, size) if size >= _MAX32 else b"", struct.pack("<Q", at) if at >= _MAX32 else b""]
    )
    extra = struct.pack("<HH", _ZIP64_ID, len(large)) + large if large else b""
    version = _VERSION64 if large else _VERSION
    fields = _shared_fields(record, version, name, extra)
    return _CENTRAL.pack(_CENTRAL_MAGIC, version, *fields, 0, 0, 0, 0, min(at, _MAX32)) + name + extra


def _shared_fields(record: Record, version: int, name: bytes, extra: bytes) -> tuple[int, ...]:
    """What both headers of a record hold, in this order."""
    shown = min(record.num_bytes, _MAX32)
    return version, _UTF8_NAMES, 0, 0, _DATE, record.crc32, shown, shown, len(name), len(extra)


def _end_of(count: int, num_bytes: int, at: int) -> bytes:
    end64 = b""
    if count >= _MAX16 or num_bytes >= _MAX32 or at >= _MAX32:
        end64 = _END64.pack(
            _END64_MAGIC, _END64.size - 12, _VERSION64, _VERSION64, 0, 0, count, count, num_bytes, at
        ) + _LOCATOR.pack(_LOCATOR_MAGIC, 0, at + num_bytes, 1)
    shown = min(count, _MAX16)
    return end64 + _END.pack(_END_MAGIC, 0, 0, shown, shown, min(num_bytes, _MAX32), min(at, _MAX32), 0)


def find_records(file: io.BufferedIOBase, num_bytes: int) -> dict[str, tuple[int, int]]:
    """Where the records of an archive lie.

    Args:
        file: the archive, seekable.
        num_bytes: its size.

    Returns:
        Offset and size of each record's bytes, by its name.

    Raises:
        DamagedCheckpoint: it is no zip archive, is truncated, or holds a record that is not stored as it is.
    """
    try:
        with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
            infos = archive.infolist()
    # zipfile raises whatever its parsing runs into: BadZipFile, struct.error, UnicodeDecodeError ...
    except Exception as error:
        raise DamagedCheckpoint(f"this is no whole zip archive: {error}") from error
    places: dict[str, tuple[int, int]] = {}
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise DamagedCheckpoint(f"the archive's record {info.filename!r} is compressed or encrypted")
        if info.filename in places:
            raise DamagedCheckpoint(f"the archive names its record {info.filename!r} twice")
        places[info.filename] = (_begin_of(file, info, num_bytes), info.file_size)
    return places


def _begin_of(file: io.BufferedIOBase, info: zipfile.ZipInfo, num_bytes: int) -> int:
    if not 0 <= info.header_offset <= num_bytes - _LOCAL.size:
        raise DamagedCheckpoint(f"the archive's record {info.filename!r} begins outside the file")
    file.seek(info.header_offset)
    fields: tuple[int, ...] = _LOCAL.unpack(file.read(_LOCAL.size))
    magic, name_bytes, extra_bytes = fields[0], *fields[-2:]
    begin = info.header_offset + _LOCAL.size + name_bytes + extra_bytes
    if magic != _LOCAL_MAGIC or begin + info.file_size > num_bytes:
        raise DamagedCheckpoint(f"the archive's record {info.filename!r} is damaged or ends outside the file")
    return begin
