"""One slot file: a generation in memory that describes itself, so that any process can take it up.

    offset 0     header: what it is, its state, generation, sizes and their checksum
    4096         metadata: layout and structure, see `join_metadata`
    next page    payload

The trainer makes, fills and publishes slots; the checkpoint writer and a restore read them. The file is never
truncated, and is replaced by rename when it must grow, so no reader is hit by SIGBUS. A process that dies at any byte
leaves the slot
complete or refused, never in between: the header's checksum covers the word that says "complete", which comes last.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.errors import OptionsError
from hetstream.base.limits import available_bytes
from hetstream.checkpoint.errors import DamagedSegment, SharedMemoryFull, reach
from hetstream.checkpoint.locks import Populate, give_back, populate
from hetstream.checkpoint.record.layout import Generation, checksum

VERSION = 2
PAGE_BYTES = 4096
MAX_METADATA_BYTES = 1 << 30
_MAGIC = b"HETCKPT\n"
_STATE_OFFSET, _STATE_END = 8, 12
# magic, state, version, attempt, step, repeat, serial, layout digest, boot,
# metadata bytes, checksum and capacity, payload bytes and capacity; then the checksum of these
_FIELDS = struct.Struct("<8sIIQQQQ16s16sQQQQQ")
_WORD = struct.Struct("<Q")
# A call of the kernel for more would hold up threads that map memory, and begin anew at a signal.
_STRIDE_BYTES = 64 << 20
# Of the memory that is available: a training that has just begun will take more.
_HEADROOM = 0.05
_NO_GENERATION = Generation(0, 0)
# What a file system without room answers.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


class State(enum.IntEnum):
    """What a slot holds."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


@dataclass(frozen=True, slots=True)
class Header:
    """What a slot says about itself.

    Attributes:
        state: whether there is a generation in it; else only the capacities and `payload_bytes` mean something.
        generation: which.
        serial: number of the publication in its store; the later, the larger.
        layout_digest: `Layout.digest` of the payload.
        metadata_bytes: size of the metadata.
        metadata_checksum: its XXH3.
        metadata_capacity_bytes: how much metadata fits.
        payload_bytes: size of the payload.
        payload_capacity_bytes: how large a payload fits.
    """

    state: State = State.EMPTY
    generation: Generation = _NO_GENERATION
    serial: int = 0
    layout_digest: str = "0" * 32
    metadata_bytes: int = 0
    metadata_checksum: int = 0
    metadata_capacity_bytes: int = 0
    payload_bytes: int = 0
    payload_capacity_bytes: int = 0


class Segment:
    """A mapped slot file. `create` and `open` make it; a context manager.

    Args:
        path: where it is, for messages.
        descriptor: of the file; the segment closes it.
        size: of the file in bytes.
        writable: whether the mapping is.
    """

    def __init__(self, path: Path, descriptor: int, size: int, writable: bool) -> None:
        self.path = path
        self._descriptor = descriptor
        self._is_new = False
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._map = mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection)
        except (OSError, ValueError, OverflowError) as error:
            raise DamagedSegment(f"{path}: its {size} bytes cannot be mapped: {error}") from error
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, path: Path, payload_bytes: int, metadata_bytes: int) -> Segment:
        """Make an empty slot file whose memory is allocated.

        Args:
            path: must not exist.
            payload_bytes: room for the payload.
            metadata_bytes: room for the metadata.

        Raises:
            SharedMemoryFull: there is no room. Nothing is written, no file is left.
            OSError: the file cannot be made.
        """
        if not 0 <= metadata_bytes <= MAX_METADATA_BYTES or payload_bytes < 0:
            raise OptionsError(
                f"a slot for {metadata_bytes} bytes of metadata and {payload_bytes} of payload: metadata takes at most "
                f"{MAX_METADATA_BYTES}; large arrays and byte strings belong into the payload"
            )
        size = file_bytes(payload_bytes, metadata_bytes)
        check_room(path.parent, size)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _allocate(path, descriptor, size)
            segment = cls(path, descriptor, size, writable=True)
            segment._is_new = True
            segment._write(
                Header(
                    metadata_capacity_bytes=_whole_pages(metadata_bytes),
                    payload_capacity_bytes=_whole_pages(payload_bytes),
                )
            )
        except BaseException:
            os.close(descriptor)
            path.unlink()
            raise
        return segment

    @classmethod
    def open(cls, path: Path, writable: bool = False) -> Segment:
        """Map a slot file that is there.

        Args:
            path: where it is.
            writable: for the trainer, which can also use a slot that holds no complete generation.

        Raises:
            DamagedSegment: it is no slot file of this user, boot and version, or holds no complete generation.
        """
        descriptor, size = _open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            segment = cls(path, descriptor, size, writable)
        except BaseException:
            os.close(descriptor)
            raise
        try:
            if not writable or segment.header.state == State.COMPLETE:
                segment.check_complete()
        except BaseException:
            segment.close()
            raise
        return segment

    def check_complete(self) -> None:
        """Refuse a slot without a complete generation.

        Raises:
            DamagedSegment: there is none, or its metadata is damaged.
        """
        header = self.header
        if header.state != State.COMPLETE:
            raise DamagedSegment(f"{self.path}: it holds no complete generation, its state is {header.state.name}")
        if checksum(self._metadata(header)) != header.metadata_checksum:
            raise DamagedSegment(f"{self.path}: the metadata of {header.generation} is damaged")

    @property
    def header(self) -> Header:
        """As it is now.

        Raises:
            DamagedSegment: it breaks a rule, as while it is being changed.
        """
        return _parse(self.path, bytes(self._view[: _FIELDS.size + _WORD.size]), self._view.nbytes)

    @property
    def metadata(self) -> bytes:
        """A copy of what was published with the payload."""
        return bytes(self._metadata(self.header))

    @property
    def payload(self) -> memoryview:
        """The payload itself, uncopied; after `begin` to be written."""
        header = self.header
        offset = PAGE_BYTES + header.metadata_capacity_bytes
        return self._view[offset : offset + header.payload_bytes]

    def begin(self, payload_bytes: int) -> None:
        """Mark the slot as being written. What it held is given up.

        Args:
            payload_bytes: size of the payload that will be written.
        """
        header = self.header
        if payload_bytes > header.payload_capacity_bytes:
            raise OptionsError(f"{self.path}: {payload_bytes} bytes into {header.payload_capacity_bytes}")
        self._write(
            Header(
                State.WRITING,
                metadata_capacity_bytes=header.metadata_capacity_bytes,
                payload_bytes=payload_bytes,
                payload_capacity_bytes=header.payload_capacity_bytes,
            )
        )

    def publish(self, generation: Generation, serial: int, layout_digest: str, metadata: bytes) -> None:
        """Make the payload that has been written a complete generation.

        Args:
            generation: which.
            serial: larger than that of all publications in the store before.
            layout_digest: `Layout.digest` of the payload.
            metadata: see `join_metadata`.

        Raises:
            OptionsError: the metadata does not fit; the slot remains as it is.
        """
        begun = self.header
        if len(metadata) > begun.metadata_capacity_bytes:
            raise OptionsError(f"{self.path}: {len(metadata)} bytes of metadata into {begun.metadata_capacity_bytes}")
        self._view[PAGE_BYTES : PAGE_BYTES + len(metadata)] = metadata
        reach("slot.described")
        self._write(
            Header(
                State.COMPLETE,
                generation,
                serial,
                layout_digest,
                len(metadata),
                checksum(metadata),
                begun.metadata_capacity_bytes,
                begun.payload_bytes,
                begun.payload_capacity_bytes,
            )
        )

    def abandon(self) -> None:
        """Give up what was being written: the slot is empty."""
        header = self.header
        self._write(
            Header(
                metadata_capacity_bytes=header.metadata_capacity_bytes,
                payload_capacity_bytes=header.payload_capacity_bytes,
            )
        )

    def populate(self) -> None:
        """Enter all pages into this process's page tables now instead of at the first copy. Changes no byte.

        The GIL is free meanwhile, if the mapping is writable.
        """
        # Reading enters many pages with one fault, if something is in them; then they can be written to as well.
        how = Populate.WRITE if self._is_new else Populate.READ
        for offset in range(0, self._view.nbytes, _STRIDE_BYTES):
            length = min(_STRIDE_BYTES, self._view.nbytes - offset)
            if not populate(self._map, offset, length, how):
                # A kernel without the advice.
                bytes(self._view[offset : offset + length : PAGE_BYTES])

    def is_of(self, path: Path) -> bool:
        """Return whether the mapped file is the one that has this name now."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def give_back(self) -> None:
        """Give the memory of a deleted file back now, whoever has it mapped. For who holds its lock alone."""
        give_back(self._map)

    def close(self) -> None:
        """Unmap the file: at once, or when the last view of the payload is gone. A second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            with contextlib.suppress(BufferError):
                self._view.release()
                self._map.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _metadata(self, header: Header) -> memoryview:
        return self._view[PAGE_BYTES : PAGE_BYTES + header.metadata_bytes]

    def _write(self, header: Header) -> None:
        raw = _pack(header)
        self._view[_STATE_END : len(raw)] = raw[_STATE_END:]
        self._view[:_STATE_OFFSET] = raw[:_STATE_OFFSET]
        if header.state == State.COMPLETE:
            reach("slot.before_complete")
        self._view[_STATE_OFFSET:_STATE_END] = raw[_STATE_OFFSET:_STATE_END]


def read_header(path: Path) -> Header:
    """Return the header of a slot file, without mapping it.

    Raises:
        DamagedSegment: it is no slot file of this user, boot and version.
    """
    descriptor, size = _open(path, os.O_RDONLY)
    try:
        return _parse(path, os.pread(descriptor, _FIELDS.size + _WORD.size, 0), size)
    finally:
        os.close(descriptor)


def join_metadata(layout_json: bytes, structure: bytes) -> bytes:
    """Return the metadata of a generation: its layout, then the structure of its state."""
    return b"".join((_WORD.pack(len(layout_json)), layout_json, structure))


def split_metadata(metadata: bytes) -> tuple[bytes, bytes]:
    """Layout and structure of what `join_metadata` gave.

    Raises:
        DamagedSegment: it is something else.
    """
    size = _WORD.unpack_from(metadata)[0] if len(metadata) >= _WORD.size else 0
    end = _WORD.size + size
    if end > len(metadata):
        raise DamagedSegment(f"metadata of {len(metadata)} bytes begins with a layout of {size} bytes")
    return metadata[_WORD.size : end], metadata[end:]


def file_bytes(payload_bytes: int, metadata_bytes: int) -> int:
    """Size of a slot file for this much."""
    return PAGE_BYTES + _whole_pages(metadata_bytes) + _whole_pages(payload_bytes)


def check_room(directory: Path, num_bytes: int) -> None:
    """Refuse to begin what the file system of `directory` has no room for.

    Raises:
        SharedMemoryFull: it has not.
    """
    system = os.statvfs(directory)
    free_bytes = system.f_bavail * system.f_frsize
    # A tmpfs without a limit reports no blocks at all.
    if system.f_blocks and free_bytes < num_bytes:
        raise SharedMemoryFull(_no_room(directory, num_bytes, f"{free_bytes} bytes are free"))


def check_memory(directory: Path, num_bytes: int, promised_bytes: int = 0) -> None:
    """Refuse to take more memory than there is: shared memory may be larger, and filling it would end processes.

    Args:
        directory: where it would be taken.
        num_bytes: how much.
        promised_bytes: what other ranks of this host are about to take.

    Raises:
        SharedMemoryFull: the host, or a control group that the job runs in, has less.
    """
    available = available_bytes()
    left_bytes = int(available * (1 - _HEADROOM)) - promised_bytes
    if left_bytes < num_bytes:
        reason = f"only {available} bytes of memory are available, and {_HEADROOM:.0%} of that is left to the program"
        promised = f"; other ranks of this host will take {promised_bytes}" if promised_bytes else ""
        raise SharedMemoryFull(_no_room(directory, num_bytes, reason + promised))


def _no_room(directory: Path, num_bytes: int, reason: str) -> str:
    return (
        f"{directory} has no room for a generation of {num_bytes} bytes: {reason}. Nothing was written. See "
        f"`df {directory}` and `free`; have the job ask for more memory, or the site for a larger file "
        "system, or give num_slots=2"
    )


def _allocate(path: Path, descriptor: int, size: int) -> None:
    """Have the file's memory given now: a file system that is full says so here, and not by SIGBUS in a copy."""
    try:
        for offset in range(0, size, _STRIDE_BYTES):
            os.posix_fallocate(descriptor, offset, min(_STRIDE_BYTES, size - offset))
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise SharedMemoryFull(_no_room(path.parent, size, str(error.strerror))) from error
        raise


def _open(path: Path, flags: int) -> tuple[int, int]:
    """Descriptor and size of a file that may be a slot of ours."""
    try:
        # Not to wait for the other end of a pipe that somebody has put here.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedSegment(f"{path}: it cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    problem = (
        "it is no file"
        if not stat.S_ISREG(status.st_mode)
        else f"it belongs to user {status.st_uid} and not to {os.geteuid()}"
        if status.st_uid != os.geteuid()
        else f"its mode {stat.S_IMODE(status.st_mode):o} lets others write to it"
        if status.st_mode & 0o022
        else f"its {status.st_size} bytes are less than a header"
        if status.st_size < PAGE_BYTES
        else ""
    )
    if problem:
        os.close(descriptor)
        raise DamagedSegment(f"{path}: {problem}")
    return descriptor, status.st_size


def _pack(header: Header) -> bytes:
    raw = _FIELDS.pack(
        _MAGIC,
        header.state,
        VERSION,
        *header.generation,
        header.serial,
        bytes.fromhex(header.layout_digest),
        boot_id(),
        header.metadata_bytes,
        header.metadata_checksum,
        header.metadata_capacity_bytes,
        header.payload_bytes,
        header.payload_capacity_bytes,
    )
    return raw + _WORD.pack(checksum(raw))


def _parse(path: Path, raw: bytes, size: int) -> Header:
    if len(raw) != _FIELDS.size + _WORD.size:
        raise DamagedSegment(f"{path}: it has no whole header")
    magic, state, version, attempt, step, repeat, serial, digest, boot, *sizes = _FIELDS.unpack_from(raw)
    if magic != _MAGIC:
        raise DamagedSegment(f"{path}: it is no slot of a checkpoint store")
    if version != VERSION:
        raise DamagedSegment(f"{path}: it has version {version}, this release reads version {VERSION}")
    if _WORD.unpack_from(raw, _FIELDS.size)[0] != checksum(raw[: _FIELDS.size]):
        raise DamagedSegment(f"{path}: its header is torn: a process died while it wrote, or still writes")
    if boot != boot_id():
        raise DamagedSegment(f"{path}: it was written before the host's last start, its pages may be lost")
    metadata_bytes, metadata_checksum, metadata_capacity, payload_bytes, payload_capacity = sizes
    if (
        state > State.COMPLETE
        or metadata_bytes > metadata_capacity
        or metadata_capacity > MAX_METADATA_BYTES
        or payload_bytes > payload_capacity
        or size != PAGE_BYTES + metadata_capacity + payload_capacity
        or metadata_capacity % PAGE_BYTES
    ):
        raise DamagedSegment(f"{path}: its header does not describe a file of {size} bytes")
    return Header(
        State(state),
        Generation(attempt, step, repeat),
        serial,
        digest.hex(),
        metadata_bytes,
        metadata_checksum,
        metadata_capacity,
        payload_bytes,
        payload_capacity,
    )


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@functools.cache
def boot_id() -> bytes:
    """Return which start of the host this is: a file on disk can outlive the memory that its pages were in."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
