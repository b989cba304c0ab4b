"""One rank's file of a checkpoint: written by the checkpoint writer past the page cache, read back as a checked
mapping.

Neither knows of commits: `commit.py` gives the file its name and its place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetstream.base.files import Directory, UntrustedFile
from hetstream.checkpoint.disk.manifest import CHUNK_BYTES, Manifest
from hetstream.checkpoint.errors import DamagedCheckpoint
from hetstream.checkpoint.faults import reach
from hetstream.checkpoint.formats.part import structure_in
from hetstream.checkpoint.formats.plan import FilePlan, Range
from hetstream.checkpoint.formats.safetensors import read_header
from hetstream.checkpoint.pages import Populate, populate
from hetstream.checkpoint.record.checksum import Checksum
from hetstream.checkpoint.record.layout import Entry
from hetstream.checkpoint.record.structure import Record

# What O_DIRECT wants of memory, offset and size; more than any disk asks for.
_BLOCK_BYTES = 4096
# One write: large enough for full bandwidth (between two of them the disk has nothing to do), small enough to say how
# far it is.
_WRITE_BYTES = 256 << 20
# Small and unaligned pieces go through this buffer.
_BUFFER_BYTES = 4 << 20
# How much a file system without O_DIRECT may hold back: page cache counts against the job's memory.
_SYNC_BYTES = 256 << 20

Compare = Literal["all", "structure", "nothing"]


def write_file(
    descriptor: int,
    plan: FilePlan,
    payload: memoryview,
    progress: Callable[[int], None] = lambda num_bytes: None,  # noqa: ARG005
) -> tuple[str, ...]:
    """Write a file and bring its content to disk.

    Args:
        descriptor: of a new file.
        plan: what it shall hold.
        payload: the record's payload; it begins on a page, so that most of it goes to disk without a copy.
        progress: told again and again how many bytes are written.

    Returns:
        Checksums of the file, one for every `CHUNK_BYTES`.

    Raises:
        OSError: as from write(2); what was written so far stays.
    """
    chunks = _chunks(plan, payload)
    left = deque(range(len(chunks)))
    digests: dict[int, str] = {}

    def checksum_some() -> None:
        with contextlib.suppress(IndexError):
            while True:
                number = left.popleft()
                digests[number] = _digest(chunks[number])

    # A checksum costs a tenth of the write, and waits for no disk: beside it, it costs nothing, if it never keeps the
    # next write waiting for the core. Where the thread found no idle time, the rest comes after the last write.
    with ThreadPoolExecutor(1, "checksum", _take_only_idle_time) as pool:
        try:
            beside = pool.submit(checksum_some)
            with memoryview(mmap.mmap(-1, _BUFFER_BYTES)) as buffer:
                writer = _Writer(descriptor, buffer, progress)
                for piece in plan.pieces:
                    writer.add(piece, payload)
                writer.finish()
            reach("persist.unsynced")
            os.fsync(descriptor)
            checksum_some()
            beside.result()
            return tuple(digests[index] for index in range(len(chunks)))
        finally:
            left.clear()


class _Writer:
    """Writes pieces one behind the other, in whole blocks past the page cache where the file system lets it.

    Attributes:
        position: bytes of the file that are written; a multiple of `_BLOCK_BYTES` until `finish`.
        fill: bytes that wait in the buffer; they come next.
    """

    def __init__(self, descriptor: int, buffer: memoryview, progress: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._buffer = buffer
        self._progress = progress
        self.position = 0
        self.fill = 0
        self._unsynced_bytes = 0
        self._direct = self._set_direct(True)

    def add(self, piece: bytes | Range, payload: memoryview) -> None:
        """Write a piece, or keep it for a full block."""
        if isinstance(piece, bytes):
            self._buffered(memoryview(piece))
            return
        view = payload[piece.offset : piece.offset + piece.num_bytes]
        # The block that the buffer has begun is filled up; if memory and file then lie alike, the rest goes straight.
        head = min(-self.fill % _BLOCK_BYTES, len(view))
        if (piece.offset + head) % _BLOCK_BYTES == 0 and len(view) - head >= _BLOCK_BYTES:
            self._buffered(view[:head])
            self._flush()
            middle = (len(view) - head) // _BLOCK_BYTES * _BLOCK_BYTES
            self._write(view[head : head + middle])
            view = view[head + middle :]
        self._buffered(view)

    def finish(self) -> None:
        """Write what is left; the last block may be part of one, which O_DIRECT cannot write."""
        blocks = self.fill // _BLOCK_BYTES * _BLOCK_BYTES
        self._write(self._buffer[:blocks])
        if self._direct:
            self._direct = self._set_direct(False)
        self._write(self._buffer[blocks : self.fill])

    def _buffered(self, view: memoryview) -> None:
        while view:
            part = view[: len(self._buffer) - self.fill]
            self._buffer[self.fill : self.fill + len(part)] = part
            self.fill += len(part)
            view = view[len(part) :]
            if self.fill == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        self._write(self._buffer[: self.fill])
        self.fill = 0

    def _write(self, view: memoryview) -> None:
        while view:
            try:
                num_bytes = os.pwrite(self._descriptor, view[:_WRITE_BYTES], self.position)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                # Some file systems take the flag and refuse the write.
                self._direct = self._set_direct(False)
                continue
            self.position += num_bytes
            view = view[num_bytes:]
            self._progress(self.position)
            reach("persist.writing")
            if not self._direct:
                self._drop_behind(num_bytes)

    def _drop_behind(self, num_bytes: int) -> None:
        self._unsynced_bytes += num_bytes
        if self._unsynced_bytes >= _SYNC_BYTES:
            os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, self.position, os.POSIX_FADV_DONTNEED)
            self._unsynced_bytes = 0

    def _set_direct(self, on: bool) -> bool:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return False
        return on


def _chunks(plan: FilePlan, payload: memoryview) -> list[list[memoryview]]:
    """What the file holds, cut at every `CHUNK_BYTES`."""
    chunks: list[list[memoryview]] = []
    room = 0
    for buffer in plan.buffers(payload):
        view = memoryview(buffer)
        while view:
            if not room:
                chunks.append([])
                room = CHUNK_BYTES
            chunks[-1].append(view[:room])
            view, room = view[room:], room - len(chunks[-1][-1])
    return chunks


def _digest(parts: Iterable[memoryview]) -> str:
    digest = Checksum()
    for part in parts:
        digest.update(part)
    return f"{digest.value:016x}"


def _take_only_idle_time() -> None:
    """Make the calling thread run where nothing else wants the core (sched(7), SCHED_IDLE)."""
    with contextlib.suppress(OSError):  # some containers forbid it; then it is a thread like others
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@dataclass(frozen=True)
class RankFile:
    """A rank's file whose every byte was compared with its checksum, unless it was opened without; a context manager
    that unmaps it.

    Attributes:
        path: the file.
        manifest: what is said about it.
        metadata: text that it carries along.
        entries: its tensors by the numbers that the structure calls them by; offsets count from where the data begins.
        data: from there on. Writing to it changes this mapping and not the file.
    """

    path: Path
    manifest: Manifest
    metadata: dict[str, str]
    entries: tuple[Entry, ...]
    data: memoryview
    _mapping: mmap.mmap
    _unchecked: list[int]
    _status: os.stat_result
    _how: Populate

    @functools.cached_property
    def record(self) -> Record:
        """The structure of the state around the tensors.

        Raises:
            DamagedCheckpoint: the file was not written for a state, or the structure breaks its form.
        """
        return structure_in(self.metadata, str(self.path))

    def check(self, num_threads: int = 1) -> None:
        """Compare what was not compared when the file was opened; a second time, nothing.

        Raises:
            DamagedCheckpoint: it is not what was written; the bytes and their tensors are named.
        """
        if self._unchecked:
            begin = len(self._mapping) - len(self.data)
            try:
                descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError as error:
                raise DamagedCheckpoint(f"{self.path} was removed while it was read") from error
            try:
                if not os.path.samestat(os.fstat(descriptor), self._status):
                    raise DamagedCheckpoint(f"{self.path} has been replaced since it was opened")
                damaged = _damaged_chunks(
                    descriptor, self._mapping, self.manifest, self._unchecked, num_threads, how=self._how
                )
            finally:
                os.close(descriptor)
            if damaged:
                raise DamagedCheckpoint(_describe(self.path, self.manifest, damaged, self.entries, begin))
            self._unchecked.clear()

    def bytes_of(self, entry: Entry) -> memoryview:
        """A tensor's bytes. Writing to them changes this mapping and not the file."""
        return self.data[entry.offset : entry.offset + entry.num_bytes]

    def close(self) -> None:
        """Unmap the file, unless something still looks at its bytes: then with the last of these."""
        self.data.release()
        try:
            self._mapping.close()
        except BufferError:
            return

    def __enter__(self) -> RankFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_file(
    directory: Directory,
    manifest: Manifest,
    num_threads: int = 1,
    progress: Callable[[int], None] | None = None,
    *,
    compare: Compare = "all",
    copies: bool = False,
) -> RankFile:
    """Map a rank's file and compare it with its checksums.

    Args:
        directory: that the file is in.
        manifest: what is said about it.
        num_threads: how many compare.
        progress: told how many more bytes have been compared.
        compare: what. After "structure" `RankFile.check` compares the rest, when the first tensor is wanted; "nothing"
            where another process of this host has compared all of it, so that it is in the page cache.
        copies: of all that is compared; what becomes of the file then does not matter. On a file server a mapped file
            that somebody removes would end the process.

    Raises:
        DamagedCheckpoint: it is missing, too short, or not what was written; the bytes and their tensors are named.
    """
    path = directory.path / manifest.part.file_name
    descriptor, num_bytes, status = _open(directory, manifest)
    try:
        # A private mapping: torch wants memory that it may write to, and nobody may change the file.
        mapping = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY)
        entries: tuple[Entry, ...] = ()
        metadata: dict[str, str] = {}
        begin = 0
        unreadable: DamagedCheckpoint | None = None
        with memoryview(mapping) as whole:
            try:
                entries, metadata, begin = read_header(whole, str(path))
            except DamagedCheckpoint as error:
                unreadable = error
        every = range(len(manifest.checksums))
        chunks: Sequence[int] = every
        if compare == "structure" and not unreadable:
            chunks = _chunks_beside(entries, begin, manifest)
        # The mapping is private: pages that are entered to be written to are copies.
        how = Populate.WRITE if copies else Populate.READ
        if compare == "nothing":
            _populate(mapping)
            damaged = []
        else:
            damaged = _damaged_chunks(descriptor, mapping, manifest, chunks, num_threads, progress, how)
    finally:
        os.close(descriptor)
    if damaged:
        raise DamagedCheckpoint(_describe(path, manifest, damaged, entries, begin))
    if unreadable:
        raise unreadable
    unchecked = sorted({*every} - {*chunks})
    return RankFile(path, manifest, metadata, entries, memoryview(mapping)[begin:], mapping, unchecked, status, how)


def compare_chunks(directory: Directory, manifest: Manifest, chunks: Sequence[int], num_threads: int) -> None:
    """Compare some chunks of a rank's file with their checksums.

    Args:
        directory: that the file is in.
        manifest: what is said about it.
        chunks: their numbers.
        num_threads: how many compare.

    Raises:
        DamagedCheckpoint: it is missing, too short, or not what was written; the bytes and their tensors are named.
    """
    descriptor, num_bytes, _ = _open(directory, manifest)
    try:
        with mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY) as mapping:  # see `populate`
            damaged = _damaged_chunks(descriptor, mapping, manifest, chunks, num_threads)
            if damaged:
                path, begin = directory.path / manifest.part.file_name, 0
                entries: tuple[Entry, ...] = ()
                with contextlib.suppress(DamagedCheckpoint), memoryview(mapping) as whole:
                    entries, _, begin = read_header(whole, str(path))
                raise DamagedCheckpoint(_describe(path, manifest, damaged, entries, begin))
    finally:
        os.close(descriptor)


def _open(directory: Directory, manifest: Manifest) -> tuple[int, int, os.stat_result]:
    """Descriptor, size and status of a rank's file."""
    path = directory.path / manifest.part.file_name
    try:
        descriptor = directory.open_file(path.name)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    except UntrustedFile as error:
        raise DamagedCheckpoint(str(error)) from error
    status = os.fstat(descriptor)
    if status.st_size != manifest.num_bytes:
        os.close(descriptor)
        raise DamagedCheckpoint(f"{path} has {status.st_size} bytes, {manifest.num_bytes} were written")
    return descriptor, status.st_size, status


def _populate(mapping: mmap.mmap) -> None:
    """Enter all pages into this process's page tables: one call for many faults."""
    for at in range(0, len(mapping), CHUNK_BYTES):
        populate(mapping, at, min(CHUNK_BYTES, len(mapping) - at), Populate.READ)


def _chunks_beside(entries: Sequence[Entry], begin: int, manifest: Manifest) -> list[int]:
    """Chunks with bytes before or behind all tensors: what the file says about itself."""
    first = min((begin + entry.offset for entry in entries if entry.num_bytes), default=manifest.num_bytes)
    end = max((begin + entry.offset + entry.num_bytes for entry in entries if entry.num_bytes), default=0)
    size = manifest.chunk_bytes
    wanted = {*range(-(-first // size))}
    if end < manifest.num_bytes:
        wanted |= {*range(end // size, len(manifest.checksums))}
    return sorted(wanted)


def _damaged_chunks(
    descriptor: int,
    mapping: mmap.mmap,
    manifest: Manifest,
    chunks: Sequence[int],
    num_threads: int,
    progress: Callable[[int], None] | None = None,
    how: Populate = Populate.READ,
) -> list[int]:
    def is_damaged(chunk: int) -> bool:
        begin = chunk * manifest.chunk_bytes
        end = min(begin + manifest.chunk_bytes, manifest.num_bytes)
        os.posix_fadvise(descriptor, begin, (num_threads + 1) * manifest.chunk_bytes, os.POSIX_FADV_WILLNEED)
        digest = Checksum()
        for at in range(begin, end, _BUFFER_BYTES):
            num_bytes = min(_BUFFER_BYTES, end - at)
            # In the mapping, as they are needed there next. A disk that cannot read them would end the process there.
            if populate(mapping, at, num_bytes, how):
                digest.update(whole[at : at + num_bytes])
            else:
                digest.update(os.pread(descriptor, num_bytes, at))
        return f"{digest.value:016x}" != manifest.checksums[chunk]

    found = []
    with memoryview(mapping) as whole, ThreadPoolExecutor(num_threads, "verify") as pool:
        for chunk, damaged in zip(chunks, pool.map(is_damaged, chunks), strict=True):
            if damaged:
                found.append(chunk)
            if progress:
                progress(min(manifest.chunk_bytes, manifest.num_bytes - chunk * manifest.chunk_bytes))
    return found


def _describe(path: Path, manifest: Manifest, damaged: list[int], entries: Sequence[Entry], begin: int) -> str:
    first = damaged[0] * manifest.chunk_bytes
    end = min(first + manifest.chunk_bytes, manifest.num_bytes)
    touched = list(_touched(entries, first - begin, end - begin))
    named = ", ".join(touched[:3]) + (f" and {len(touched) - 3} more" if len(touched) > 3 else "")
    return (
        f"{path} is damaged in {len(damaged)} of {len(manifest.checksums)} chunks, first in bytes {first}-{end - 1}"
        + (f" (tensors {named})" if named else "")
    )


def _touched(entries: Sequence[Entry], begin: int, end: int) -> Iterator[str]:
    return (entry.name for entry in entries if entry.offset < end and entry.offset + entry.num_bytes > begin)
