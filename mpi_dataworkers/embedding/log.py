"""The log of an embedding server: what was changed, in order, in segments of a base and what came after it.

`000002.log` has the changes that were appended while it was the last segment. `000002.base` has the parts as they were
at its beginning, and all rows, written by a thread while more changes are appended: so a row in it may be newer. That
does no harm to whoever goes on to a place in the log behind the word that the base is complete (`BaseComplete`): what
changed meanwhile comes again, and each change says what a row is and not what becomes of it.

A record is appended before its change is made. It is on the disk when a thread has synced the file. A record that is
not whole is the last one: the server was killed in it, or the disk was full. Whoever opens the log cuts it off.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hetstream.base.files import Directory, is_temporary, own_directory
from hetstream.base.posix import fcntl
from hetstream.mpi_dataworkers.embedding.parts import Applied, Parts
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.mpi_dataworkers.wire.codec import Buffer, size_of
from hetstream.mpi_dataworkers.wire.messages import MarkGeneration, PartRows

_log = logging.getLogger(__name__)

KEPT_GENERATIONS = 8
# A segment is followed by the next one when its log is larger than this, and larger than its base.
LEAST_LOG_BYTES = 64 << 20
_MAGIC = b"HEL1"
_HEADER = struct.Struct("<4sIQI")  # magic; bytes of the entry, and of the rows behind it; CRC-32 of all that but itself
_CHECKED = _HEADER.size - 4
# What is read at once where only entries are looked at.
_LOOK_BYTES = 4096
_SEGMENT = re.compile(r"(\d{6,})\.(base|log)")
_LOCK = "lock"
# Of a position in a log, bits for the place in the segment's file.
_OFFSET_BITS = 44


class BaseComplete(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The base of this segment has its name, and what is in it is older than this record."""

    segment: int


Said = Applied | BaseComplete | Parts
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


def record_of(said: Said, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the pieces of a record: its head, and the frames where they lie."""
    entry = _encoder.encode(said)
    checked = _HEADER.pack(_MAGIC, len(entry), sum(map(size_of, frames)), 0)[:_CHECKED]
    checksum = zlib.crc32(entry, zlib.crc32(checked))
    for frame in frames:
        checksum = zlib.crc32(frame, checksum)
    return [b"".join((checked, checksum.to_bytes(4, "little"), entry)), *frames]


def position(segment: int, offset: int) -> int:
    """Return a place in a log as one number, in order."""
    return segment << _OFFSET_BITS | offset


@dataclass(frozen=True)
class Record:
    """A record that was found; its rows lie from `rows_at` to `end`."""

    said: Said
    start: int
    rows_at: int
    end: int


class SegmentFile:
    """A base or a log, open to be read.

    Attributes:
        size: when it was opened.
        end: where the records that were looked at end; the rest is not whole.
    """

    def __init__(self, directory: Directory, name: str) -> None:
        self.path = directory.path / name
        self._descriptor = directory.open_file(name)
        self.size = os.fstat(self._descriptor).st_size
        self.end = 0

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def records(self) -> Iterator[Record]:
        """Give the records one after the other, without their rows; one that is not whole is the end.

        Raises:
            EmbeddingError: it is damaged.
        """
        while self.size - self.end >= _HEADER.size:
            start = self.end
            head = os.pread(self._descriptor, _LOOK_BYTES, start)
            magic, entry_bytes, rows_bytes, _ = _HEADER.unpack_from(head)
            if magic != _MAGIC:
                # A file system may have made the file longer, and have lost what was written there with the host.
                if not any(head):
                    return
                raise self.damaged(start, f"begins with {head[:4]!r} instead of {_MAGIC!r}")
            rows_at = start + _HEADER.size + entry_bytes
            if rows_at + rows_bytes > self.size:
                return
            if len(head) < _HEADER.size + entry_bytes:
                head = os.pread(self._descriptor, _HEADER.size + entry_bytes, start)
            entry = head[_HEADER.size : _HEADER.size + entry_bytes]
            try:
                found = _decoder.decode(entry)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise self.damaged(start, f"cannot be read: {error}") from error
            self.end = rows_at + rows_bytes
            yield Record(found, start, rows_at, self.end)

    def rows(self, record: Record) -> memoryview:
        """Return the rows of a record, with the ids before them, once its checksum is compared.

        Raises:
            EmbeddingError: it is damaged.
        """
        whole = memoryview(bytearray(record.end - record.start))
        count = 0
        while count < whole.nbytes:
            more = os.preadv(self._descriptor, [whole[count:]], record.start + count)
            if not more:
                raise self.damaged(record.start, "has become shorter")
            count += more
        checksum = zlib.crc32(whole[_HEADER.size :], zlib.crc32(whole[:_CHECKED]))
        if checksum != int.from_bytes(whole[_CHECKED : _HEADER.size], "little"):
            raise self.damaged(record.start, "has another checksum than was written")
        return whole[record.rows_at - record.start :]

    def damaged(self, offset: int, how: str) -> EmbeddingError:
        """Return the error for a record."""
        return EmbeddingError(
            f"log {self.path} of an embedding server is damaged: the record at byte {offset} {how}. Restore an older "
            "generation, from a log that is whole"
        )


def segments_of(directory: Directory) -> dict[int, set[str]]:
    """Return which files each segment has (`base`, `log`), in the order of the segments.

    Raises:
        EmbeddingError: one between is missing.
    """
    found: dict[int, set[str]] = {}
    for name in directory.names():
        if match := _SEGMENT.fullmatch(name):
            found.setdefault(int(match[1]), set()).add(match[2])
    if not found:
        return {}
    # Older ones may be half deleted.
    first, last = min((number for number, kinds in found.items() if "base" in kinds), default=0), max(found)
    lacking = [number for number in range(first, last) if "log" not in found.get(number, ())]
    if not first or lacking:
        raise EmbeddingError(
            f"log {directory.path} of an embedding server is damaged: it has "
            f"{f'no log of segment {lacking[0]}' if first else 'no base'}. Restore a generation from whole logs"
        )
    return {number: found[number] for number in range(first, last + 1)}


def base_name(segment: int) -> str:
    """Return the name of a base."""
    return f"{segment:06d}.base"


def log_name(segment: int) -> str:
    """Return the name of a log."""
    return f"{segment:06d}.log"


def open_log(folder: str | os.PathLike[str]) -> Directory:
    """Open the log of a server, of this user, to read it.

    Raises:
        EmbeddingError: it cannot be read.
    """
    try:
        return Directory.open_safe(folder, own=True)
    except OSError as error:
        raise EmbeddingError(
            f"the log {folder} of an embedding server cannot be read: {error}. It must lie on a file system that all "
            "embedding servers share"
        ) from error


# What a base has.
Dump = Iterator[tuple[PartRows, Sequence[Buffer]]]


class Log:
    """The log of this server, open to be appended to. All but its two threads call it from one thread.

    Args:
        folder: its directory; it is made.
        changed: called from another thread when more is on the disk, or a base is written.
        kept_generations: that can be restored from it.
        least_log_bytes: see `LEAST_LOG_BYTES`.

    Attributes:
        num_records: that were appended.
        num_synced: of them, that are on the disk.

    Raises:
        EmbeddingError: another server uses the directory, it is another user's, or what is in it is damaged.
    """

    def __init__(
        self,
        folder: Path,
        changed: Callable[[], None],
        kept_generations: int = KEPT_GENERATIONS,
        least_log_bytes: int = LEAST_LOG_BYTES,
    ) -> None:
        self.num_records = self.num_synced = 0
        self._changed, self._least_log_bytes = changed, least_log_bytes
        self._files = contextlib.ExitStack()
        try:
            self._directory = self._files.enter_context(own_directory(folder))
            os.fchmod(self._directory.descriptor, 0o700)
            self._lock()
            for name in filter(is_temporary, self._directory.names()):
                self._directory.unlink(name, missing_ok=True)
            self._base_bytes = 0
            if not segments_of(self._directory):
                self._write_base(1, record_of(Parts()), iter(()))
            self._first = next(iter(segments_of(self._directory)))
        except BaseException as error:
            self._files.close()
            if isinstance(error, OSError):
                raise EmbeddingError(f"no log for an embedding server at {folder}: {error}") from error
            raise
        self._base = self._first  # the newest that the log knows to be complete
        # By generation, the newest last: from which segment on it needs them.
        self._needs: dict[str, int] = {}
        self._kept_generations = kept_generations
        self._descriptor = -1
        self._segment = self._size = 0
        self._base_writer: threading.Thread | None = None
        self._base_written = 0  # the segment whose base is complete, while that is not in the log
        # For the thread that syncs: files of segments before, to be closed then; and names to be deleted then.
        self._to_do = threading.Condition()
        self._left: list[int] = []
        self._unwanted: list[str] = []
        self._closing = False
        self._failure: OSError | None = None
        self._syncer = threading.Thread(target=self._sync, name="hetstream-sync", daemon=True)

    def _lock(self) -> None:
        lock = self._directory.open_file(_LOCK, os.O_RDWR | os.O_CREAT)
        self._files.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise EmbeddingError(
                f"another embedding server uses {self._directory.path}: give each a --name of its own, or wait for its "
                "end"
            ) from error

    def recover(self) -> Iterator[tuple[Applied | Parts, memoryview]]:
        """Give what the parts and rows follow from, in order; then the log can be appended to.

        Raises:
            EmbeddingError: the log is damaged.
            OSError: it cannot be read.
        """
        segments = segments_of(self._directory)
        base = max(number for number, kinds in segments.items() if "base" in kinds)
        last = max(segments)
        for number in range(self._first, base):
            with SegmentFile(self._directory, log_name(number)) as file:
                for record in file.records():
                    self._note(record.said)
        with SegmentFile(self._directory, base_name(base)) as file:
            self._base_bytes = file.size
            yield from self._replay(file, is_last=False)
        self._segment, self._descriptor = last, self._open_new(last)
        for number in range(base, last + 1):
            with SegmentFile(self._directory, log_name(number)) as file:
                yield from self._replay(file, is_last=number == last)
                self._size = file.end
        os.ftruncate(self._descriptor, self._size)
        if self._base != base:  # the server was killed between its name and that record
            self._base_written = base
        self._syncer.start()

    def _replay(self, file: SegmentFile, is_last: bool) -> Iterator[tuple[Applied | Parts, memoryview]]:
        for record in file.records():
            self._note(record.said)
            try:
                rows = file.rows(record)
            except EmbeddingError:
                if not is_last or record.end != file.size:
                    raise
                file.end = record.start  # its host has ended before it was on the disk
                break
            if not isinstance(record.said, BaseComplete):
                yield record.said, rows
        if file.end < file.size and not is_last:
            raise file.damaged(file.end, "is not whole")
        if file.end < file.size:
            _log.warning("cut %d bytes of a record that is not whole off %s", file.size - file.end, file.path)

    def _open_new(self, number: int) -> int:
        return self._directory.open_file(log_name(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _note(self, said: Said) -> None:
        """Keep in mind which segments are needed."""
        if isinstance(said, BaseComplete):
            self._base = said.segment
        elif isinstance(said, MarkGeneration):
            self._needs[said.name] = min(self._base, self._needs.pop(said.name, self._base))
            while len(self._needs) > self._kept_generations:
                del self._needs[next(iter(self._needs))]

    # Appending

    def append(self, said: Said, frames: Sequence[Buffer] = ()) -> None:
        """Append a record.

        Raises:
            EmbeddingError: there is no room on the disk; the log is as it was.
            OSError: the log is of no use any more.
        """
        if self._failure is not None:
            raise self._failure
        head, *others = record_of(said, frames)
        try:
            size = _write_all(self._descriptor, [head])
            reach("embedding.in_record")
            size += _write_all(self._descriptor, others)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise EmbeddingError(
                f"{type(said).__name__} cannot be written to {log_name(self._segment)} in {self._directory.path}: "
                f"{error}. Nothing was changed; make room there, and start the program again"
            ) from error
        self._size += size
        self._note(said)
        with self._to_do:
            self.num_records += 1
            self._to_do.notify()

    def _sync(self) -> None:
        while True:
            with self._to_do:
                self._to_do.wait_for(lambda: self._closing or self.num_records > self.num_synced or self._unwanted)
                num_records, left, unwanted = self.num_records, self._left, self._unwanted
                if self._closing and num_records == self.num_synced and not left and not unwanted:
                    return
                self._left, self._unwanted = [], []
                current = self._descriptor
            try:
                reach("embedding.before_fsync")
                for descriptor in left:
                    os.fdatasync(descriptor)
                    os.close(descriptor)
                os.fdatasync(current)
                for name in unwanted:
                    self._directory.unlink(name, missing_ok=True)
            except OSError as error:
                # What the system could not write, it may have dropped: a second try would not say so.
                self._failure = error
                self._changed()
                return
            self.num_synced = num_records
            self._changed()

    # Segments

    def look_after(self, parts: Parts, dump: Callable[[], Dump]) -> None:
        """Begin a new segment where the last one is large enough, and delete those of no use.

        Args:
            parts: as they are now.
            dump: gives all rows; asked in this thread, it is gone through in another.

        Raises:
            OSError: the log is of no use any more.
        """
        if self._failure is not None:
            raise self._failure
        if self._base_written:
            with contextlib.suppress(EmbeddingError):  # a full disk: later
                self.append(BaseComplete(self._base_written))
                self._base_written = 0
                self._delete_unneeded()
        is_busy = self._base_writer is not None and self._base_writer.is_alive()
        if is_busy or self._base_written or self._size <= max(self._least_log_bytes, self._base_bytes):
            return
        number = self._segment + 1
        try:
            descriptor = self._open_new(number)
        except OSError as error:
            _log.warning("no new segment of the log: %s", error)
            return
        with self._to_do:
            self._left.append(self._descriptor)
            self._segment, self._descriptor, self._size = number, descriptor, 0
        self._base_writer = threading.Thread(
            target=self._try_base, args=(number, record_of(parts), dump()), name="hetstream-base", daemon=True
        )
        self._base_writer.start()

    def _try_base(self, number: int, first: list[Buffer], dump: Dump) -> None:
        try:
            self._write_base(number, first, dump)
        except OSError as error:
            _log.warning("no base for segment %d of the log, older segments stay: %s", number, error)
            return
        self._base_written = number
        self._changed()

    def _write_base(self, number: int, first: list[Buffer], dump: Dump) -> None:
        with self._directory.replacing(base_name(number)) as descriptor:
            size = _write_all(descriptor, first)
            for said, frames in dump:
                size += _write_all(descriptor, record_of(said, frames))
            os.fsync(descriptor)
            reach("embedding.base_written")
        self._base_bytes = size

    def _delete_unneeded(self) -> None:
        needed = min([self._base, *self._needs.values()])
        with self._to_do:
            for number in range(self._first, needed):
                self._unwanted += [base_name(number), log_name(number)]
            self._to_do.notify()
        self._first = max(self._first, needed)

    def close(self) -> None:
        """Wait until all is on the disk, and give the directory to others."""
        with self._to_do:
            self._closing = True
            self._to_do.notify()
        if self._syncer.ident is not None:
            self._syncer.join()
        if self._base_writer is not None:
            self._base_writer.join()
        for descriptor in (*self._left, self._descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._files.close()


def _write_all(descriptor: int, pieces: Sequence[Buffer]) -> int:
    left = [memoryview(piece).cast("B") for piece in pieces if size_of(piece)]
    total = sum(map(len, left))
    while left:
        count = os.writev(descriptor, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return total
