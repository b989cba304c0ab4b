"""Embedding servers of a job: how they are started, what they say at their end, and which of their logs may go.

Called by the job master and the local backend, which keep them alive, and by `hetstream job --clean`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import stat
import time
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from hetstream.base.files import Directory, make_private
from hetstream.base.locks import hold_directory
from hetstream.base.posix import fcntl
from hetstream.base.text import count_words
from hetstream.hetjob.errors import MasterError
from hetstream.hetjob.job.ended_job import EMBEDDING_DIR as EMBEDDING_DIR
from hetstream.hetjob.job.ended_job import JobLeft, look_at
from hetstream.hetjob.job.job import JobEnvironment
from hetstream.hetjob.job.processes import remove_tree
from hetstream.mpi_dataworkers.embedding.background import ENDED
from hetstream.mpi_dataworkers.embedding.history import generations_of
from hetstream.mpi_dataworkers.embedding.registration import REGISTRY
from hetstream.mpi_dataworkers.errors import EmbeddingError

_log = logging.getLogger(__name__)

# Time in which a companion that leaves gives its parts away: 64 GB over a slow network.
_DRAIN_S = 600.0
_LOOK_S = 0.1


@dataclass(frozen=True)
class EmbeddingServers:
    """The embedding servers of one job.

    Attributes:
        count: from the start, for which trainers wait.
        memory_bytes: that the rows of each may take.
        directory: of this start of the job; each server keeps its log in a folder of it.
        cpus: of each, on Slurm.
        most: with companions.
        companion_options: sbatch options of those.
    """

    count: int
    memory_bytes: int
    directory: Path
    cpus: int = 1
    most: int = 0
    companion_options: tuple[str, ...] = ()

    def words(self, program: Sequence[str], address_file: Path, name: str) -> list[str]:
        """Return the command of one: of the same name with the same log, however often it is started.

        Args:
            program: how hetstream is called.
            address_file: of the service.
            name: of the server; "" for a companion, whose name stands behind the command.
        """
        arguments = ["internal", "embedding-server", "--service", f"file:{address_file}"]
        arguments += ["--directory", str(self.directory), "--memory", str(self.memory_bytes)]
        # Those from the start are ended with the service, or to be started again at once: nobody takes their parts.
        last = ["--name", name, "--drain-s", "0"] if name else ["--drain-s", f"{_DRAIN_S:g}"]
        return [*program, *arguments, *last]

    def of_start(self, job: JobEnvironment) -> EmbeddingServers:
        """The same with the folder of this start of a Slurm job, which is made.

        Raises:
            OSError: it cannot be made, or somebody else could put another one in its place.
        """
        directory = job.submit_dir / self.directory / job.directory.name
        make_private(directory)
        return replace(self, directory=directory)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder of a run, and hold it, so that nobody takes the run for one that is over.

        Raises:
            MasterError: it cannot be made.
        """
        try:
            make_private(self.directory)
            with Directory.open(self.directory) as directory:
                lock = hold_directory(directory)
        except OSError as error:
            raise MasterError(f"embedding servers cannot keep rows in {self.directory}: {error}") from error
        try:
            yield
        finally:
            os.close(lock)


def remove_registrations(folder: Path) -> None:
    """Remove what servers have left that were killed."""
    with contextlib.suppress(FileNotFoundError), Directory.open(folder) as outer:
        remove_tree(outer, REGISTRY)


class ServerEnd(msgspec.Struct, frozen=True):
    """What a server said last.

    Attributes:
        rows, bytes, limit_bytes, reads: see `Registration`.
        generations: that its log has; None if it was killed, and may have had one more.
    """

    name: str
    rows: int = 0
    bytes: int = 0
    limit_bytes: int = 0
    reads: int = 0
    generations: int | None = None


def read_ends(folder: Path, wait_s: float = 0.0) -> list[ServerEnd]:
    """Return what the servers of a service said last, by name.

    Args:
        folder: of the address file.
        wait_s: for those that have not ended: companions do so when that file is gone.
    """
    until = time.monotonic() + wait_s
    while True:
        ends = _ends(folder)
        if all(end.generations is not None for end in ends) or time.monotonic() >= until:
            return ends
        time.sleep(_LOOK_S)


def _ends(folder: Path) -> list[ServerEnd]:
    found: dict[str, ServerEnd] = {}
    with contextlib.suppress(OSError), Directory.open(folder / REGISTRY) as directory:
        for name in sorted(directory.names()):  # NAME.ended, and then NAME.json of one that was started again
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                if name.endswith((ENDED, ".json")):
                    end = msgspec.json.decode(directory.read(name, 1 << 20), type=ServerEnd)
                    found[end.name] = end if name.endswith(ENDED) else msgspec.structs.replace(end, generations=None)
    return [found[name] for name in sorted(found, key=lambda name: (len(name), name))]


def summary_of(ends: Sequence[ServerEnd]) -> dict[str, Any]:
    """Return it for the summary of a job; nothing without servers."""
    return {"embedding_servers": [msgspec.structs.asdict(end) for end in ends]} if ends else {}


def remove_unneeded(directory: Path, ends: Sequence[ServerEnd]) -> None:
    """Remove the logs of a start that has ended, if no server has a generation that a checkpoint could need."""
    said = {f"server-{end.name}": end.generations for end in ends}
    try:
        with Directory.open(directory.parent) as outer:
            with outer.enter(directory.name) as logs:
                is_needed = any(said.get(name) != 0 for name in logs.names() if logs.has_directory(name))
            if not is_needed:
                remove_tree(outer, directory.name)
    except OSError as error:
        _log.warning("what embedding servers have kept stays: %s", error)


# Which logs in `hetstream-embedding` are of no use any more.

# First bytes of files of gzip, bzip2, xz, zstd and lz4: those beside checkpoints that can be read.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
_NAME = r"job-(\d+)(?:-restart-\d+)?|run-[\d-]+-[0-9a-f]{8}"
_START = re.compile(_NAME)
# Checkpoints name the logs of servers by their paths.
_LOG, _BEFORE_LOG = b"/server-", re.compile(rf"/({_NAME})$".encode())
_MOST_NAME_BYTES = 100


def logs_left(place: Path, living: Collection[str], checkpoints: Sequence[Path]) -> list[JobLeft]:
    """Return what starts of jobs have left in a place, each with why it has to stay; the oldest first.

    Args:
        place: `hetstream-embedding`, or another one, where there may be directories of such names by somebody else.
        living: ids of the jobs that are not over.
        checkpoints: directories with all checkpoints that are kept; without any, generations may be needed.
    """
    found = []
    named, doubt = _named_by(checkpoints)
    for path in place.glob("*-*"):
        name = _START.fullmatch(path.name)
        if name is None or not stat.S_ISDIR(path.lstat().st_mode):
            continue
        if place.name == EMBEDDING_DIR or any(path.glob("server-*/lock")):
            left = look_at(path, name[1] or path.name, living)
            found.append(left if left.why_kept else replace(left, why_kept=_why_needed(path, named, doubt)))
    return sorted(found, key=lambda left: left.newest_s)


def _why_needed(path: Path, named: Mapping[str, Path], doubt: str) -> str:
    """Why the logs of a start have to stay; "" if nobody can need them. The rest is of `_named_by`."""
    servers = sorted(path.glob("server-*"))
    if any(_is_held(folder) for folder in (path, *servers)):
        return "it is in use"
    try:
        generations = {name for server in servers for name in generations_of(server)}
    except EmbeddingError as error:
        generations = {str(error)}
    if not generations:
        return ""
    if path.name in named:
        return f"{named[path.name]} needs it"
    return doubt and f"a checkpoint may need one of its {count_words(len(generations), 'generation')}: {doubt}"


def _named_by(checkpoints: Sequence[Path]) -> tuple[dict[str, Path], str]:
    """Return the starts that checkpoints name, each with a file, and why others may be needed; "" if they are not."""
    if not checkpoints:
        return {}, "say with --checkpoints where all are that you keep"
    named: dict[str, Path] = {}
    packed, is_empty = None, True
    for file in _files_in(checkpoints):
        if file.is_file() and file.stat().st_size:  # no link that leads nowhere
            is_empty = False
            named |= dict.fromkeys(_starts_in(file), file)
            packed = file if packed is None and _is_compressed(file) else packed
    if packed is not None:
        return named, f"{packed} is compressed, and cannot be searched"
    # Compressed otherwise, encrypted, or another directory: whoever reads nothing there knows nothing.
    if not named and not is_empty:
        return {}, f"no file in {', '.join(map(str, checkpoints))} names embedding servers, so it has other checkpoints"
    return named, ""


def _files_in(directories: Sequence[Path]) -> Iterator[Path]:
    """Files of directories and of those that links in them lead to, each directory once."""
    seen: set[tuple[int, int]] = set()
    for directory in directories:
        for folder, inner, names in os.walk(directory, onerror=_raise, followlinks=True):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                inner.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            yield from (Path(folder, name) for name in names)


def _raise(error: OSError) -> None:
    raise error


def _starts_in(path: Path) -> set[str]:
    """The starts whose logs a file names."""
    found = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(_LOG)
        while at >= 0:
            if match := _BEFORE_LOG.search(data[max(0, at - _MOST_NAME_BYTES) : at]):
                found.add(match[1].decode())
            at = data.find(_LOG, at + 1)
    return found


def _is_compressed(path: Path) -> bool:
    """Whether a file, or a member of a zip archive as `torch.save` writes them, has to be unpacked to be searched."""
    with path.open("rb") as file:
        if file.read(6).startswith(_COMPRESSED):
            return True
    try:
        with zipfile.ZipFile(path) as archive:
            return any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())
    except zipfile.BadZipFile:
        return False


def _is_held(folder: Path) -> bool:
    """Whether a process holds a directory (`hold_directory`)."""
    with contextlib.suppress(FileNotFoundError), Directory.open(folder) as directory:
        lock = directory.open_file("lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False
