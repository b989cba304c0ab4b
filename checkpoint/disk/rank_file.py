"""One rank's file of a checkpoint: written by the checkpoint writer past the page cache, read back as a checked
mapping.

Neither knows of commits: `commit.py` gives the file its name and its place.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import mmap
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory, UntrustedFile
from hetstream.base.limits import TimeExceeded, limited
from hetstream.base.posix import fcntl
from hetstream.checkpoint.disk.safetensors import SUFFIX, FilePlan, Range, read_header, structure_in
from hetstream.checkpoint.errors import DamagedCheckpoint, OtherRelease, reach
from hetstream.checkpoint.locks import Populate, populate
from hetstream.checkpoint.record.layout import Checksum, Entry, Generation, checksum
from hetstream.checkpoint.record.structure import Record

# What is said about one rank's file of a checkpoint, beside it as JSON: it exists only once the file is whole on disk.
#
# Pure: bytes to `Manifest` and back, every field checked. A manifest carries a checksum of itself, so a torn or flipped
# one is refused like a damaged file.

VERSION = 1
# Bytes of one checksum: damage is known to within them.
CHUNK_BYTES = 64 << 20
# More ranks than any machine has; a file that says so takes no more memory than one that is right.
MAX_RANKS = 1_000_000
_NAME = re.compile(r"rank-(\d{5,7})-of-(\d{5,7})\.json")

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]


@dataclass(frozen=True)
class PartSpec:
    """Whose part of which record; what is known before a byte of it is written.

    Attributes:
        generation: the record.
        rank: whose part.
        world_size: how many parts there are.
        layout_digest: digest of the record's layout in memory.
        metrics: what `save` was given.
    """

    generation: Generation
    rank: int
    world_size: int
    layout_digest: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Name of the file that holds it."""
        return f"rank-{self.rank:05}-of-{self.world_size:05}{SUFFIX}"

    @property
    def manifest_name(self) -> str:
        """Name of the file that describes that file."""
        return f"rank-{self.rank:05}-of-{self.world_size:05}.json"

    def manifest(self, num_bytes: int, checksums: tuple[str, ...], time_s: float) -> Manifest:
        """Return what is to be said about the file, once it is on disk."""
        return Manifest(
            attempt=self.generation.attempt,
            step=self.generation.step,
            rank=self.rank,
            world_size=self.world_size,
            num_bytes=num_bytes,
            checksums=checksums,
            layout_digest=self.layout_digest,
            # They choose the best checkpoint, which one that is not finite never is. The record has all of them.
            metrics={name: float(value) for name, value in self.metrics.items() if math.isfinite(value)},
            time_s=time_s,
            repeat=self.generation.repeat or msgspec.UNSET,
        )


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's part of a checkpoint.

    Attributes:
        attempt: number of the start of the job that saved it.
        step: of training.
        rank: whose part this is.
        world_size: how many parts there are.
        num_bytes: size of the file.
        checksums: XXH3 of every `chunk_bytes` of the file, the last one of the rest.
        layout_digest: digest of the record's layout in memory.
        metrics: what `save` was given; rank 0's count.
        time_s: when the file was whole on disk, in seconds since 1970. Told to people, never compared.
        chunk_bytes: how many bytes one checksum covers.
        format: of the file.
        version: of this form.
        repeat: see `Generation`; not written where it is 0, so that the checksums of manifests from before it was there
            fit.
        itself: checksum of all of the above; "" in one that is not written yet.
    """

    attempt: _Positive
    step: _Count
    rank: _Count
    world_size: _Ranks
    num_bytes: _Positive
    checksums: tuple[_Digest, ...]
    layout_digest: str
    metrics: dict[str, float]
    time_s: float
    chunk_bytes: _Positive = CHUNK_BYTES
    format: Literal["safetensors"] = "safetensors"
    version: int = VERSION
    repeat: _Positive | msgspec.UnsetType = msgspec.UNSET
    itself: str = ""

    @property
    def part(self) -> PartSpec:
        """Whose part of which record this is."""
        generation = Generation(self.attempt, self.step, self.repeat or 0)
        return PartSpec(generation, self.rank, self.world_size, self.layout_digest, self.metrics)

    def to_json(self) -> bytes:
        """Return what `read_manifest` reads."""
        return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(self, itself=self._checksum()))) + b"\n"

    def problems(self) -> Iterator[str]:
        """Yield what contradicts itself in it."""
        if self.itself != self._checksum():
            yield "its own checksum does not fit"
        if self.rank >= self.world_size:
            yield f"rank={self.rank} of world_size={self.world_size}"
        if len(self.checksums) != -(-self.num_bytes // self.chunk_bytes):
            yield f"{len(self.checksums)} checksums for {self.num_bytes} bytes"

    def _checksum(self) -> str:
        return f"{checksum(msgspec.json.encode(msgspec.structs.replace(self, itself=''))):016x}"


class _Versioned(msgspec.Struct, frozen=True):
    version: int = VERSION


def read_manifest(data: bytes, name: str) -> Manifest:
    """Read what `to_json` gave.

    Args:
        data: the file's content.
        name: its path, for messages.

    Raises:
        DamagedCheckpoint: it is torn or changed.
        OtherRelease: it is of another version.
    """
    try:
        # Only then the rest: it may have another form.
        version = typed_json.decode(data, _Versioned).version
        if version != VERSION:
            raise OtherRelease.of(name, version, VERSION)
        manifest = typed_json.decode(data, Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DamagedCheckpoint(f"{name}: {len(data)} bytes that are no manifest: {error}") from error
    problems = list(manifest.problems())
    if problems:
        raise DamagedCheckpoint(f"{name} is damaged: {'; '.join(problems)}")
    return manifest


def is_manifest_name(name: str) -> bool:
    """Return whether a file of this name is a manifest."""
    return ranks_of_name(name) is not None


def ranks_of_name(name: str) -> tuple[int, int] | None:
    """Return the rank and the number of ranks in a manifest's name; None if it is no such name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    rank, world_size = int(match[1]), int(match[2])
    return (rank, world_size) if rank < world_size <= MAX_RANKS else None


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
        """Return a tensor's bytes. Writing to them changes this mapping and not the file."""
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
            # All pages enter this process's page tables: one call for many faults.
            for at in range(0, len(mapping), CHUNK_BYTES):
                populate(mapping, at, min(CHUNK_BYTES, len(mapping) - at), Populate.READ)
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
    low, high = first - begin, end - begin
    touched = [entry.name for entry in entries if entry.offset < high and entry.offset + entry.num_bytes > low]
    named = ", ".join(touched[:3]) + (f" and {len(touched) - 3} more" if len(touched) > 3 else "")
    return (
        f"{path} is damaged in {len(damaged)} of {len(manifest.checksums)} chunks, first in bytes {first}-{end - 1}"
        + (f" (tensors {named})" if named else "")
    )


# How much memory and time a command may take to read a directory or a file that others may have made: in proportion to
# what lies on disk. A file of some kilobytes that says it is a terabyte is refused before it fills the machine.

# What the program takes by itself, most of it torch; and what for each byte on disk: a mapping that may be written to,
# a copy, and one to be converted.
_BASE_BYTES = 2 << 30
_FACTOR = 4
_BASE_CPU_S = 60
_CPU_S_PER_GB = 30
_MAX_ENTRIES = 1_000_000


@dataclass(frozen=True)
class Bounds:
    """What reading a source may take.

    Attributes:
        source: what is read.
        num_bytes: what it takes on disk.
    """

    source: Path
    num_bytes: int

    @staticmethod
    def of(source: Path) -> Bounds:
        """Return those of a file or a directory."""
        return Bounds(source, bytes_on_disk(source))

    @property
    def memory_bytes(self) -> int:
        """Beyond what the process has."""
        return _BASE_BYTES + _FACTOR * self.num_bytes

    @property
    def cpu_s(self) -> int:
        """Of all threads together."""
        return _BASE_CPU_S + _CPU_S_PER_GB * self.num_bytes // 10**9

    def memory_exceeded(self) -> DamagedCheckpoint:
        """Return the error that says so."""
        return self._exceeded(f"{self.memory_bytes} bytes of memory")

    def time_exceeded(self) -> DamagedCheckpoint:
        """Return the error that says so."""
        return self._exceeded(f"{self.cpu_s} s of processor time")

    def _exceeded(self, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self.source} takes {self.num_bytes} bytes on disk, and more than {what} to read: "
            "it is damaged, or a trap"
        )


@contextlib.contextmanager
def bounded(source: Path) -> Iterator[None]:
    """Read a directory of checkpoints, or a file, within these bounds.

    Args:
        source: what is read.

    Raises:
        DamagedCheckpoint: it takes more memory or time than what is right can take.
    """
    bounds = Bounds.of(source)
    with explained(bounds), limited(bounds.memory_bytes, bounds.cpu_s):
        yield


@contextlib.contextmanager
def explained(bounds: Bounds) -> Iterator[None]:
    """What the errors of a process that has reached its bounds become.

    Raises:
        DamagedCheckpoint: in place of each.
    """
    try:
        yield
    except MemoryError as error:
        raise bounds.memory_exceeded() from error
    except TimeExceeded as error:
        raise bounds.time_exceeded() from error
    except OSError as error:
        # A file that is mapped takes room as well.
        if error.errno != errno.ENOMEM:
            raise
        raise bounds.memory_exceeded() from error
    except RuntimeError as error:
        # torch's own word for it.
        if "can't allocate memory" not in str(error):
            raise
        raise bounds.memory_exceeded() from error


def bytes_on_disk(source: Path) -> int:
    """Return what a file takes on disk, or all files in a directory and one below; holes and links count nothing."""
    total = 0
    left = _MAX_ENTRIES
    folders = [(str(source), 0)] if source.is_dir() else []
    if not folders:
        with contextlib.suppress(OSError):
            total = _blocks(os.stat(source))
    while folders:
        folder, depth = folders.pop()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                left -= 1
                if left < 0:
                    return total
                if entry.is_dir(follow_symlinks=False):
                    folders += [(entry.path, depth + 1)] if depth == 0 else []
                else:
                    total += _blocks(entry.stat(follow_symlinks=False))
    return total


def _blocks(status: os.stat_result) -> int:
    return status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
