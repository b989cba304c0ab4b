"""The log of an embedding server: what was changed, in order, in segments of a base and what came after it.

`000002.log` has the changes that were appended while it was the last segment. `000002.base` has the parts as they were
at its beginning, and all rows, written by a thread while more changes are appended: so a row in it may be newer. That
does no harm to whoever reads on to a place in the log behind that: what changed meanwhile comes again, and each change
says what a row is and not what becomes of it. A base gets its name when all that it may have is on the disk in the log.

A record is appended before its change is made. It is on the disk when a thread has synced the file. A record that is
not whole is the last one: the server was killed in it, or the disk was full. Whoever opens the log cuts it off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hetstream.base.files import Directory, is_temporary, own_directory
from hetstream.base.locks import HeldByAnother, hold_directory
from hetstream.mpi_dataworkers.embedding.parts import Applied, Parts
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.mpi_dataworkers.transports.sockets import left_of
from hetstream.mpi_dataworkers.wire.codec import Buffer, size_of
from hetstream.mpi_dataworkers.wire.messages import EmbeddingTable, MarkGeneration, PartRows

_log = logging.getLogger(__name__)

KEPT_GENERATIONS = 8
# A segment is followed by the next one when its log is larger than this, and larger than its base.
LEAST_LOG_BYTES = 64 << 20
_MAGIC = b"HEL2"
_HEADER = struct.Struct("<4sIQI")  # magic; bytes of the entry, and of the rows behind it; CRC-32 of all that but itself
_CHECKED = _HEADER.size - 4
# What is read at once where only entries are looked at.
_LOOK_BYTES = 4096
_SEGMENT = re.compile(r"(\d{6,})\.(base|log)")
# Of a position in a log, bits for the place in the segment's file.
_OFFSET_BITS = 44


class Head(msgspec.Struct, frozen=True, tag=True):
    """How a base begins: with the parts, and with the first segment that each generation needs, the newest last."""

    parts: Parts
    needs: dict[str, int]


class Mark(msgspec.Struct, frozen=True, tag=True):
    """A rank's mark of a generation, with all that is to be known to read its rows.

    Attributes:
        rank, tables: of the client.
        base: the segment whose base is the beginning.
        places: for each part of the client's: `Parts.since` and `Parts.begin`.
    """

    said: MarkGeneration
    rank: int
    tables: dict[str, EmbeddingTable]
    base: int
    places: dict[int, tuple[int, int]]


Said = Applied | Mark | Head
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
# Rows that a base has, some at a time.
Dump = Iterator[tuple[PartRows, Sequence[Buffer]]]


def position(segment: int, offset: int = 0) -> int:
    """Return a place in a log as one number, in order."""
    return segment << _OFFSET_BITS | offset


class Record(NamedTuple):
    """A record that was found, where it is in the log, and which bytes of the file it has; the last are its rows."""

    said: Said
    at: int
    start: int
    rows_at: int
    end: int


class SegmentFile:
    """A base or a log, open to be read.

    Attributes:
        segment, kind: number, and `base` or `log`.
        size: when it was opened.
        end: where the records that were looked at end; the rest is not whole.
    """

    def __init__(self, directory: Directory, segment: int, kind: str) -> None:
        self.segment, self.kind = segment, kind
        self.path = directory.path / _name(segment, kind)
        self._file = os.fdopen(directory.open_file(self.path.name), "rb", _LOOK_BYTES)
        self.size = os.fstat(self._file.fileno()).st_size
        self.end = 0

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def records(self) -> Iterator[Record]:
        """Give the records one after the other, without their rows; one that is not whole is the end.

        Raises:
            EmbeddingError: it is damaged.
        """
        while self.size - self.end >= _HEADER.size:
            start = self.end
            head = self._read(start, _HEADER.size)
            magic, entry_bytes, rows_bytes, _ = _HEADER.unpack(head)
            if magic != _MAGIC:
                # A file system may have made the file longer, and have lost what was written there with the host.
                if not any(head):
                    return
                raise self.damaged(start, f"begins with {head[:4]!r} instead of {_MAGIC!r}")
            rows_at = start + _HEADER.size + entry_bytes
            if rows_at + rows_bytes > self.size:
                return
            try:
                said = _decoder.decode(self._read(start + _HEADER.size, entry_bytes))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise self.damaged(start, f"cannot be read: {error}") from error
            self.end = rows_at + rows_bytes
            # What is in a base is of before its segment.
            at = position(self.segment, start) if self.kind == "log" else position(self.segment) - 1
            yield Record(said, at, start, rows_at, self.end)

    def rows(self, record: Record) -> memoryview:
        """Return the rows of a record, with the ids before them, once its checksum is compared.

        Raises:
            EmbeddingError: it is damaged.
        """
        whole = memoryview(self._read(record.start, record.end - record.start))
        checksum = zlib.crc32(whole[_HEADER.size :], zlib.crc32(whole[:_CHECKED]))
        if checksum != int.from_bytes(whole[_CHECKED : _HEADER.size], "little"):
            raise self.damaged(record.start, "has another checksum than was written")
        return whole[record.rows_at - record.start :]

    def _read(self, start: int, num_bytes: int) -> bytes:
        self._file.seek(start)
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise self.damaged(start, "has become shorter")
        return data

    def damaged(self, offset: int, how: str) -> EmbeddingError:
        """Return the error for a record."""
        return EmbeddingError(
            f"log {self.path} of an embedding server is damaged: the record at byte {offset} {how}. Restore an older "
            "generation, from a log that is whole"
        )


class Segments:
    """Which segments a log has.

    Attributes:
        first, base, last: the first one that is whole, the newest that has a base, and the last.

    Raises:
        EmbeddingError: there is none, or one between is missing.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        found: dict[str, set[int]] = {"base": set(), "log": set()}
        for match in filter(None, map(_SEGMENT.fullmatch, directory.names())):
            found[match[2]].add(int(match[1]))
        # Older ones may be half deleted.
        self.first, self.base = min(found["base"], default=0), max(found["base"], default=0)
        self.last = max(found["base"] | found["log"], default=0)
        missing = set(range(self.first, self.last)) - found["log"]
        if not self.first or missing:
            raise EmbeddingError(
                f"{directory.path} is no log of an embedding server, or is damaged: it has "
                f"{f'no log of segment {min(missing)}' if self.first else 'no base'}. Restore a generation from whole "
                "logs"
            )
        self._logs = sorted(found["log"])

    def files(self, base: int = 0) -> Iterator[SegmentFile]:
        """Open a base and all logs behind it, one after the other; without `base` all logs."""
        bases = [(base, "base")] if base else []
        for segment, kind in (*bases, *((log, "log") for log in self._logs if log >= max(base, self.first))):
            with SegmentFile(self._directory, segment, kind) as file:
                yield file

    def changes(self) -> Iterator[Record]:
        """Give how the newest base begins, and all changes behind it."""
        for file in self.files(self.base):
            for record in file.records():
                yield record
                if file.kind == "base":
                    break


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


class Log:
    """The log of this server, open to be appended to. All but its two threads call it from one thread.

    Args:
        folder: its directory; it is made.
        changed: called from another thread when more is on the disk.
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
        self._changed, self._least_log_bytes, self._kept_generations = changed, least_log_bytes, kept_generations
        # By generation, the newest last: from which segment on it needs them.
        self._needs: dict[str, int] = {}
        self._base_bytes = self._size = 0
        self._descriptor = -1
        self._files = contextlib.ExitStack()
        try:
            self._directory = self._files.enter_context(own_directory(folder))
            os.fchmod(self._directory.descriptor, 0o700)
            self._files.callback(os.close, hold_directory(self._directory))
            for name in filter(is_temporary, self._directory.names()):
                self._directory.unlink(name, missing_ok=True)
            if not any(map(_SEGMENT.fullmatch, self._directory.names())):
                self._write_base(1, record_of(Head(Parts(), {})), iter(()))
            segments = Segments(self._directory)
            self._first, self._base, self._segment = segments.first, segments.base, segments.last
            # The same number for each segment's file in turn.
            self._descriptor = self._open(self._segment)
            self._files.callback(os.close, self._descriptor)
        except BaseException as error:
            self._files.close()
            if isinstance(error, HeldByAnother):
                raise EmbeddingError(
                    f"another embedding server uses {folder}, process {error}: give each a --name of its own, or wait "
                    "for its end"
                ) from error
            if isinstance(error, OSError):
                raise EmbeddingError(f"no log for an embedding server at {folder}: {error}") from error
            raise
        self._guard = threading.Condition()
        self._closing = False
        self._failure: OSError | None = None
        self._syncer = threading.Thread(target=self._sync, name="hetstream-sync", daemon=True)
        self._base_writer: threading.Thread | None = None

    def _open(self, segment: int) -> int:
        descriptor = self._directory.open_file(_name(segment, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._directory.sync()
        return descriptor

    def recover(self) -> Iterator[tuple[Applied | Parts, int, memoryview]]:
        """Give what the parts and rows follow from, in order, each with its position; then it can be appended to.

        Raises:
            EmbeddingError: the log is damaged.
            OSError: it cannot be read.
        """
        for file in Segments(self._directory).files(self._base):
            is_last = file.kind == "log" and file.segment == self._segment
            for record in file.records():
                try:
                    rows = file.rows(record)
                except EmbeddingError:
                    if not is_last or record.end != file.size:
                        raise
                    file.end = record.start  # its host has ended before it was on the disk
                    break
                said = record.said
                if isinstance(said, Head):
                    self._base_bytes, self._needs = file.size, said.needs
                    yield said.parts, record.at, rows
                elif isinstance(said, Mark):
                    self._need(said)
                    yield said.said, record.at, rows
                else:
                    yield said, record.at, rows
            if file.end < file.size and not is_last:
                raise file.damaged(file.end, "is not whole")
            if file.end < file.size:
                _log.warning("cut %d bytes of a record that is not whole off %s", file.size - file.end, file.path)
            self._size = file.end
        os.ftruncate(self._descriptor, self._size)
        self._syncer.start()

    @property
    def num_generations(self) -> int:
        """How many can be restored."""
        return len(self._needs)

    def _need(self, mark: Mark) -> None:
        name = mark.said.name
        self._needs[name] = min(mark.base, self._needs.pop(name, mark.base))
        while len(self._needs) > self._kept_generations:
            del self._needs[next(iter(self._needs))]

    # Appending

    def append(self, said: Applied | Mark, frames: Sequence[Buffer] = ()) -> int:
        """Append a record, and return its position.

        Raises:
            EmbeddingError: there is no room on the disk; the log is as it was.
            OSError: the log is of no use any more.
        """
        if self._failure is not None:
            raise self._failure
        at = position(self._segment, self._size)
        head, *others = record_of(said, frames)
        try:
            size = _write_all(self._descriptor, [head])
            reach("embedding.in_record")
            size += _write_all(self._descriptor, others)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise EmbeddingError(
                f"{type(said).__name__} cannot be written to {_name(self._segment, 'log')} in {self._directory.path}: "
                f"{error}. Nothing was changed; make room there, and start the program again"
            ) from error
        self._size += size
        with self._guard:
            self.num_records += 1
            self._guard.notify()
        return at

    def mark(self, said: MarkGeneration, parts: Parts) -> int:
        """Append a rank's mark of a generation, as `append` does.

        Args:
            said: what is asked.
            parts: as they are before it.
        """
        client = parts.clients[said.client]
        mine = (part for part, holder in enumerate(parts.holder) if holder == said.client)
        places = {part: (parts.since[part], parts.begin[part]) for part in mine}
        with self._guard:  # its base is not removed before it is known to be needed
            mark = Mark(said, client.rank, client.tables, self._base, places)
            at = self.append(mark)
            self._need(mark)
        return at

    def _sync(self) -> None:
        while True:
            with self._guard:
                self._guard.wait_for(lambda: self._closing or self.num_records > self.num_synced)
                num_records = self.num_records
            if num_records == self.num_synced:
                return
            try:
                reach("embedding.before_fsync")
                os.fdatasync(self._descriptor)
            except OSError as error:
                # What the system could not write, it may have dropped: a second try would not say so.
                self._failure = error
                self._changed()
                return
            self.num_synced = num_records
            self._changed()

    # Segments

    def look_after(self, parts: Parts, dump: Callable[[], Dump]) -> None:
        """Begin a new segment where the last one is large enough.

        Args:
            parts: as they are now.
            dump: gives all rows; asked in this thread, it is gone through in another.

        Raises:
            OSError: the log is of no use any more.
        """
        if self._failure is not None:
            raise self._failure
        is_busy = self._base_writer is not None and self._base_writer.is_alive()
        if is_busy or self._size <= max(self._least_log_bytes, self._base_bytes):
            return
        os.fdatasync(self._descriptor)
        try:
            new = self._open(self._segment + 1)
        except OSError as error:
            _log.warning("no new segment of the log: %s", error)
            return
        os.dup2(new, self._descriptor, inheritable=False)
        os.close(new)
        self._segment, self._size = self._segment + 1, 0
        # Encoded here: this thread changes them.
        head = Head(parts, self._needs)
        self._base_writer = threading.Thread(
            target=self._renew, args=(self._segment, record_of(head), dump()), name="hetstream-base", daemon=True
        )
        self._base_writer.start()

    def _renew(self, number: int, head: list[Buffer], dump: Dump) -> None:
        """Write a base, and remove the segments that nothing needs any more."""
        try:
            self._write_base(number, head, dump)
            with self._guard:
                self._base = number
                first, self._first = self._first, min([number, *self._needs.values()])
            for unneeded in range(first, self._first):
                for kind in ("base", "log"):
                    self._directory.unlink(_name(unneeded, kind), missing_ok=True)
        except OSError as error:
            _log.warning("older segments of the log stay, as those of segment %d are not renewed: %s", number, error)

    def _write_base(self, number: int, head: list[Buffer], dump: Dump) -> None:
        with self._directory.replacing(_name(number, "base")) as descriptor:
            size = _write_all(descriptor, head)
            for said, frames in dump:
                size += _write_all(descriptor, record_of(said, frames))
            os.fsync(descriptor)
            reach("embedding.base_written")
            if self._descriptor >= 0:
                os.fdatasync(self._descriptor)
        self._base_bytes = size

    def close(self) -> None:
        """Wait until all is on the disk, and give the directory to others."""
        with self._guard:
            self._closing = True
            self._guard.notify()
        for thread in (self._syncer, self._base_writer):
            if thread is not None and thread.ident is not None:
                thread.join()
        self._files.close()


def record_of(said: Said, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the pieces of a record: its head, and the frames where they lie."""
    entry = _encoder.encode(said)
    checked = _HEADER.pack(_MAGIC, len(entry), sum(map(size_of, frames)), 0)[:_CHECKED]
    checksum = zlib.crc32(entry, zlib.crc32(checked))
    for frame in frames:
        checksum = zlib.crc32(frame, checksum)
    return [b"".join((checked, checksum.to_bytes(4, "little"), entry)), *frames]


def _name(segment: int, kind: str) -> str:
    return f"{segment:06d}.{kind}"


def _write_all(descriptor: int, pieces: Sequence[Buffer]) -> int:
    left: list[Buffer] = [memoryview(piece).cast("B") for piece in pieces if size_of(piece)]
    total = sum(map(len, left))
    while left:
        left = left_of(left, os.writev(descriptor, left))
    return total
