"""The bytes of a pickled pipeline on their way from a trainer to data workers: in a message, or by a file.

What fits in a message goes through the dispatcher. More is written once to a file of the service's directory, which
trainers and data workers share, and only its digest travels: the dispatcher never holds it. A file is named by its
digest, so ranks with the same data write it once, and whoever reads it knows whether it is what was meant. The
dispatcher removes files that no loader uses.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.wire.codec import ALIGN_BYTES, Buffer
from hetstream.mpi_dataworkers.wire.messages import Contents

# More than this is no message: it would hold up the heartbeats behind it, and lie in the dispatcher's memory and
# journal.
IN_MESSAGE_BYTES = 8 << 20
# Data workers hold it in memory, beside what they make of it.
MOST_BYTES = 4_000_000_000
# A file that nobody uses may be in use again: another rank may have seen it and be about to say so.
_KEEP_UNUSED_S = 60.0
_CHUNK_BYTES = 8 << 20


class HandoverFailed(Exception):
    """A file cannot be read here, or is not what the trainer wrote."""


def places_of(sizes: Sequence[int]) -> list[int]:
    """Return where each of the buffers starts when they lie one after the other, in a message, a file and memory alike;
    at last, where they end.
    """
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // ALIGN_BYTES) * ALIGN_BYTES)
    return places


def pack(blob: Buffer, buffers: Sequence[Buffer], directory: Path) -> tuple[bytes, Contents]:
    """Prepare a pickled pipeline for its message; writes a file if it is large.

    Args:
        blob: the pickle stream.
        buffers: what it refers to.
        directory: for files, the service's `pipelines_dir`.

    Returns:
        The stream as it goes into the message, and what goes with it.

    Raises:
        PipelineError: it is too large, or the file cannot be written.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    whole = memoryview(blob).cast("B")
    num_bytes = whole.nbytes + sum(view.nbytes for view in views)
    if num_bytes > MOST_BYTES:
        raise PipelineError(
            f"the dataset is {num_bytes:,} bytes in pickled form, more than the {MOST_BYTES:,} that are sent to data "
            "workers. Have it read its data from files."
        )
    with_blob = whole.nbytes > IN_MESSAGE_BYTES
    if with_blob:
        views.insert(0, whole)
    sizes = [view.nbytes for view in views]
    views = [part for view in views for part in (view, memoryview(bytes(-view.nbytes % ALIGN_BYTES)))]
    if num_bytes <= IN_MESSAGE_BYTES:
        return bytes(whole), Contents(sizes, b"".join(views))
    try:
        sha256 = _write(views, directory)
    except OSError as error:
        raise PipelineError(
            f"the dataset is {num_bytes:,} bytes in pickled form; more than {IN_MESSAGE_BYTES:,} go to data workers by "
            f"a file, and it cannot be written: {error}. Make room there, or have the dataset read its data from files."
        ) from error
    return b"" if with_blob else bytes(whole), Contents(sizes, b"", sha256, with_blob)


def _write(views: Sequence[memoryview], directory: Path) -> str:
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    sha256 = digest.hexdigest()
    final = directory / sha256
    with contextlib.suppress(FileNotFoundError):
        os.utime(final)  # from now on it is too young to be removed
        return sha256
    directory.mkdir(mode=0o700, exist_ok=True)
    temporary = directory / f".{sha256[:16]}.{secrets.token_hex(8)}"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as stream:
            for view in views:
                at = 0
                while at < view.nbytes:
                    at += stream.write(view[at : at + _CHUNK_BYTES]) or 0
        os.replace(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return sha256


def read_into(room: memoryview, contents: Contents, directory: Path) -> None:
    """Put the buffers of a pickled pipeline into memory.

    Args:
        room: where the buffers end, as `places_of` says, is its size.
        contents: what came in the message.
        directory: as for `pack`.

    Raises:
        HandoverFailed: the file is not here, is not this user's own, or its bytes are not those that were written.
    """
    if not contents.sha256:
        if len(contents.data) != room.nbytes:
            raise HandoverFailed(f"{len(contents.data)} bytes came instead of {room.nbytes}")
        room[:] = contents.data
        return
    path = directory / contents.sha256
    digest = hashlib.sha256()
    at = 0
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as stream:
            facts = os.fstat(stream.fileno())
            if facts.st_uid not in (os.getuid(), 0) or stat.S_IMODE(facts.st_mode) & 0o077:
                raise HandoverFailed(f"{path} is not this user's own, with mode 0600")
            while at < room.nbytes and (num_bytes := stream.readinto(room[at : at + _CHUNK_BYTES])):
                digest.update(room[at : at + num_bytes])
                at += num_bytes
    except OSError as error:
        raise HandoverFailed(
            f"the dataset's file cannot be read on this host: {error}. The address file's directory must be on a file "
            "system that trainers and data workers share"
        ) from error
    if at < room.nbytes or digest.hexdigest() != contents.sha256:
        raise HandoverFailed(f"{path} is damaged: its {at} bytes are not the {room.nbytes} that the trainer wrote")


def buffers_in(room: memoryview, contents: Contents) -> list[memoryview]:
    """Return the buffers where `read_into` has put them; with `contents.with_blob` the pickle stream is the
    first one.
    """
    places = places_of(contents.sizes)
    return [room[place:][:size] for place, size in zip(places, contents.sizes, strict=False)]


def is_there(contents: Contents, directory: Path) -> bool:
    """Return whether data workers can get it: in the message, or from a file that exists."""
    return not contents.sha256 or (directory / contents.sha256).exists()


def remove_unused(directory: Path, used: Collection[str], now: float | None = None) -> None:
    """Remove files that nobody uses.

    Args:
        directory: as for `pack`.
        used: digests of the files in use.
        now: time on the file system's clock, s since 1970.
    """
    now = time.time() if now is None else now
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            with contextlib.suppress(OSError):
                if path.name not in used and now - path.stat().st_mtime > _KEEP_UNUSED_S:
                    path.unlink()


def remove_all(directory: Path) -> None:
    """Remove the directory: the service has ended."""
    shutil.rmtree(directory, ignore_errors=True)
