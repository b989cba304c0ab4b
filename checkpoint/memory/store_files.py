"""A store as files: one rank's directory in shared memory, who owns it and what lies in it. Used by both of its sides.

    /dev/shm/hetstream-ckpt-<uid>-<job>-<component>-<rank>-<hash of the checkpoint directory>-<token>/
        slot-0 ...       generations, see `segment.py`; a link where shared memory was full
        trainer.lock     locked by the trainer as long as it lives; says who it is
        writer.lock       locked by the checkpoint writer as long as it lives
        wake             a pipe: a byte for each generation
        status.json      what the checkpoint writer has done
        closed           there once the trainer has ended as it should
        reserved         how much memory its slots will take, in bytes, before they do
        stop             why the trainer is asked to save and to end, from a job's checkpoint writer
        directory        id of the checkpoint directory and of the start that it was made for, see `lineage.py`
        replicas.json    what the checkpoint writer does about replicas, see `replica/`
        replica-1-0 ...  generations of rank 1, which runs on another host

Python's `multiprocessing.shared_memory` is not used: its resource tracker deletes segments of other processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.base.errors import OptionsError
from hetstream.base.files import Directory
from hetstream.checkpoint.errors import CheckpointError, DamagedSegment, DirectoryNotWritable, ForeignOwner, reach
from hetstream.checkpoint.locks import FileLock, is_locked
from hetstream.checkpoint.memory.segment import Header, Segment, State, read_header
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Lineage

_NAME = re.compile(r"\.?hetstream-ckpt-(\d+)-([\w.+]+)-(\d+)-(\d+)-([0-9a-f]{8})-([0-9a-f]{8})", re.ASCII)
_JOB = re.compile(r"[\w.+]{1,64}", re.ASCII)
_SLOT = re.compile(r"slot-\d+")
_REPLICA = re.compile(r"replica-(\d{1,9})-\d", re.ASCII)
_HASH_BYTES = 4
SHARED_MEMORY = Path("/dev/shm")
# In a checkpoint directory: generations, and whole stores, for which there was no shared memory.
FALLBACK = ".memory"
# Of a page, which a file system in memory gives or does not.
STATUS_BYTES = 4096


@dataclass(frozen=True)
class StoreIdentity:
    """Whose store it is. Two living processes never have the same.

    Attributes:
        job: Slurm's id of the job, of the leader in a heterogeneous job; "local" without Slurm.
        component: offset in the heterogeneous job; 0 without.
        rank: of the trainer.
        directory: the checkpoint directory.
        lineage: of that one, empty while it is not known. Not a part of the store's name: a store of a directory that
            was deleted is found, and given up.
    """

    job: str
    component: int
    rank: int
    directory: Path
    lineage: Lineage = Lineage()  # noqa: RUF009, it is frozen

    def __post_init__(self) -> None:
        if not _JOB.fullmatch(self.job):
            raise OptionsError(f"job {self.job!r}: must be 1 to 64 letters, digits, '_', '.' or '+'")
        if self.component < 0 or self.rank < 0:
            raise OptionsError(f"component {self.component} and rank {self.rank}: must not be negative")

    @property
    def prefix(self) -> str:
        """How the names of this identity's stores begin."""
        path = os.fsencode(os.path.realpath(self.directory))
        digest = blake2b(path, digest_size=_HASH_BYTES).hexdigest()
        return f"{stores_prefix()}{self.job}-{self.component}-{self.rank}-{digest}-"

    def __str__(self) -> str:
        return f"job={self.job}+{self.component} rank={self.rank} directory={self.directory}"


class Holder(msgspec.Struct, frozen=True):
    """Who has or had a store, as its trainer.lock says.

    Attributes:
        pid: of the trainer.
        host: where it runs.
        job: see `StoreIdentity`.
        component: see `StoreIdentity`.
        rank: see `StoreIdentity`.
        directory: see `StoreIdentity`; "" where it was not written down.
    """

    pid: int
    host: str
    job: str
    component: int
    rank: int
    directory: str


class WriterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint writer of a store tells its trainer and the next checkpoint writer.

    Attributes:
        pid: of the checkpoint writer.
        persisted: newest generation of this store that is on disk.
        num_persisted: generations that this checkpoint writer has written.
        num_skipped: generations that were replaced in memory before the checkpoint writer came to them.
        num_failed: attempts to write that failed.
        error: why the last attempt failed; "" if it did not.
        is_lost: there is no directory to write to any more: who waits for the disk waits in vain.
        persist_s: how long the last one took, in seconds.
        replicated: newest generation that another host keeps.
        num_replicated: generations that were sent there.
        replica_error: why the last one was not; "" if it was, or if there are no replicas.
    """

    pid: int
    persisted: Generation | None = None
    num_persisted: int = 0
    num_skipped: int = 0
    num_failed: int = 0
    error: str = ""
    is_lost: bool = False
    persist_s: float = 0.0
    replicated: Generation | None = None
    num_replicated: int = 0
    replica_error: str = ""


@dataclass(frozen=True)
class SlotContent:
    """A slot with a complete generation.

    Attributes:
        path: the slot file.
        header: what it says.
    """

    path: Path
    header: Header

    @staticmethod
    def of(path: Path) -> SlotContent | None:
        """Return what a slot file holds; None if it holds nothing complete."""
        with contextlib.suppress(DamagedSegment):
            header = read_header(path)
            if header.state == State.COMPLETE:
                return SlotContent(path, header)
        return None

    @property
    def age(self) -> tuple[Generation, int]:
        """The newer a generation, the larger; of one that was published twice, the later."""
        return self.header.generation, self.header.serial

    @contextlib.contextmanager
    def open(self) -> Iterator[Segment]:
        """The generation, mapped for reading and locked against being overwritten.

        Raises:
            DamagedSegment: it is not there any more, or damaged.
        """
        with self.lock() as lock, Segment.open(self.path) as segment:
            self.check(lock, segment)
            yield segment

    def check(self, lock: FileLock, segment: Segment) -> None:
        """Refuse a slot that is not what was found: the trainer may have been faster than the lock.

        Args:
            lock: of `lock`.
            segment: the slot.

        Raises:
            DamagedSegment: it was replaced or overwritten, or is damaged.
        """
        if not lock.is_of(self.path) or segment.header.serial != self.header.serial:
            raise DamagedSegment(f"{self.path}: {self.header.generation} has been overwritten meanwhile")
        segment.check_complete()

    def lock(self) -> FileLock:
        """Hold the slot's file against being overwritten.

        Raises:
            DamagedSegment: it is not there, or being written.
        """
        try:
            lock = FileLock.try_shared(self.path)
        except OSError as error:
            raise DamagedSegment(f"{self.path}: it cannot be opened: {error.strerror}") from error
        if lock is None:
            raise DamagedSegment(f"{self.path}: {self.header.generation} is being overwritten")
        return lock


class StoreFiles:
    """The files of one store.

    Args:
        path: its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trainer_lock = path / "trainer.lock"
        self.writer_lock = path / "writer.lock"
        self.wake = path / "wake"
        self.status = path / "status.json"
        self.closed = path / "closed"
        self.stop = path / "stop"
        self.reserved = path / "reserved"
        self.replica_order = path / "replicas.json"
        self._start_id = path / "directory"

    def slot(self, number: int) -> Path:
        """Return where a slot is or is to be."""
        return self.path / f"slot-{number}"

    def slots(self) -> list[Path]:
        """Return the slot files that are there, usable or not."""
        return self._called(_SLOT)

    def complete(self) -> list[SlotContent]:
        """Return the complete generations, newest first. Damaged slots are left out."""
        return _newest_first(self.slots())

    def has_unsaved(self) -> bool:
        """Return whether the newest generation is newer than all that checkpoint writers have reported as being on
        disk.
        """
        status, newest = self.read_status(), next(iter(self.complete()), None)
        persisted = status.persisted if status else None
        return newest is not None and (persisted is None or persisted < newest.header.generation)

    def replica(self, rank: int, number: int) -> Path:
        """Return where a replica is or is to be."""
        return self.path / f"replica-{rank}-{number}"

    def replicas(self) -> list[Path]:
        """Return the files for replicas that are there, usable or not."""
        return self._called(_REPLICA)

    def replicas_of(self, rank: int) -> list[SlotContent]:
        """Return the complete generations of another rank that are kept here, newest first."""
        return _newest_first(path for path in self.replicas() if self.rank_of_replica(path) == rank)

    @staticmethod
    def rank_of_replica(path: Path) -> int:
        """Return whose generation a file of `replicas` holds."""
        match = _REPLICA.fullmatch(path.name)
        assert match is not None
        return int(match[1])

    def _called(self, pattern: re.Pattern[str]) -> list[Path]:
        try:
            return [self.path / name for name in sorted(os.listdir(self.path)) if pattern.fullmatch(name)]
        except FileNotFoundError:
            return []

    def siblings(self) -> list[StoreFiles]:
        """Return the stores of the same job and checkpoint directory on this host, with this one."""
        found = []
        directory_id = self._read_directory_id()
        for store in list_stores(self.path.parent, stores_prefix()):
            if not store.path.name.startswith(".") and _training(store.path.name) == _training(self.path.name):
                with contextlib.suppress(CheckpointError):  # it has just gone, or is a foreigner's
                    store.check_owner()
                    if store._read_directory_id() == directory_id:
                        found.append(store)
        return found

    def check_owner(self) -> None:
        """Refuse what is no directory of this user alone.

        Raises:
            CheckpointError: it is not there.
            ForeignOwner: it is another's, or others can write to it.
        """
        try:
            status = os.lstat(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: there is no store: {error.strerror}") from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ForeignOwner(
                f"{self.path}: a store is a directory of user {os.geteuid()} with mode 700; this has owner "
                f"{status.st_uid} and mode {stat.S_IMODE(status.st_mode):o}. It is not used. See: ls -ld {self.path}"
            )

    def holder(self) -> Holder:
        """Return who has or had the store."""
        try:
            return typed_json.decode(self.trainer_lock.read_bytes(), Holder)
        except (OSError, msgspec.MsgspecError):
            # Memory was too full to write it down. The name says all but the process and the directory.
            match = _NAME.fullmatch(self.path.name)
            job, component, rank = match.group(2, 3, 4) if match else ("", "0", "0")
            return Holder(0, "", job, int(component), int(rank), "")

    def read_status(self) -> WriterStatus | None:
        """Return what the checkpoint writer last said; None before it has."""
        try:
            return typed_json.decode(self.status.read_bytes(), WriterStatus)
        except (OSError, msgspec.MsgspecError):
            return None

    def write_status(self, status: WriterStatus) -> None:
        """Replace what the checkpoint writer says; readers see the old or the new, or nothing for an instant in full
        memory.

        Raises:
            OSError: there is no room.
        """
        said = msgspec.json.encode(status)
        temporary = self.path / ".status.json"
        try:
            temporary.write_bytes(said)
            temporary.rename(self.status)
        except OSError:
            if len(said) > STATUS_BYTES:
                raise
            # Memory is full, but for the page that the store was made with. Without it nobody would learn what is on
            # disk.
            with self.status.open("r+b") as file:
                file.write(said.ljust(STATUS_BYTES))

    def read_start_id(self) -> str:
        """Return which start of the job in which checkpoint directory has it, see `Lineage.start_id`; "" where that is
        not known.
        """
        try:
            return self._start_id.read_text(errors="replace")
        except OSError:
            return ""

    def _read_directory_id(self) -> str:
        return self.read_start_id().partition("-")[0]

    def write_start_id(self, start_id: str) -> None:
        """Say which start has it.

        Raises:
            OSError: there is no room.
        """
        # Never empty in between: what is of no known start is given up. One start's text is as long as another's.
        descriptor = os.open(self._start_id, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            file.write(start_id.encode())
            file.truncate()

    def forget_others(self) -> None:
        """Free what is kept of other ranks; the checkpoint writer stops to do so."""
        self.replica_order.unlink(missing_ok=True)
        for path in self.replicas():
            path.unlink(missing_ok=True)

    def stop_reason(self) -> str:
        """Return why a job's writer asks the trainer to save and to end; "" while it does not. Cheap: once for each
        step.
        """
        try:
            return self.stop.read_text(errors="replace") or "asked by the job's checkpoint writer"
        except OSError:
            return ""

    def write_stop_reason(self, reason: str) -> None:
        """Ask the trainer to save and to end. It finds the file with the reason in it, or empty where memory is full.

        Raises:
            OSError: not even an empty file could be made.
        """
        temporary = self.path / ".stop"
        try:
            temporary.write_text(reason)
            temporary.rename(self.stop)
        except OSError:
            temporary.unlink(missing_ok=True)
            self.stop.touch()

    def is_trainer_alive(self) -> bool:
        """Return whether a process holds the store as its trainer."""
        return is_locked(self.trainer_lock)

    def is_writer_alive(self) -> bool:
        """Return whether a process holds the store as its checkpoint writer."""
        return is_locked(self.writer_lock)

    def reserve(self, num_bytes: int) -> None:
        """Say how much memory the slots will take all in all, before they are made: others then leave it."""
        with contextlib.suppress(OSError):  # memory is full: who looks at it finds that, too
            self.reserved.write_text(str(num_bytes))

    def outstanding_bytes(self) -> int:
        """Return memory that the slots of a living trainer will take, and have not taken yet."""
        try:
            reserved_bytes = int(self.reserved.read_text())
            with os.scandir(self.path) as entries:
                taken = sum(
                    entry.stat().st_blocks * 512 for entry in entries if entry.name.startswith(("slot-", "new-slot-"))
                )
        except (OSError, ValueError):
            return 0
        return max(0, reserved_bytes - taken) if self.is_trainer_alive() else 0

    def promised_bytes(self) -> int:
        """Return memory that the other ranks of this host are about to take."""
        return sum(sibling.outstanding_bytes() for sibling in self.siblings() if sibling.path != self.path)

    def num_bytes(self) -> int:
        """Return memory that the slots and replicas take."""
        total = 0
        for path in [*self.slots(), *self.replicas()]:
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def delete(self) -> None:
        """Delete the store with what its links point to. For who holds both locks."""
        hidden = self.path.with_name("." + self.path.name.removeprefix("."))
        # From here on nobody takes it for a store, however far the deletion gets.
        self.path.rename(hidden)
        for entry in list(hidden.iterdir()):
            if entry.is_symlink():
                # Only what `Store` has made: a file named after the store.
                target = Path(os.readlink(entry))
                if target.name.startswith(self.path.name.removeprefix(".")):
                    target.unlink(missing_ok=True)
            entry.unlink()
            reach("store.removing")
        hidden.rmdir()


def make_fallback(directory: Path) -> None:
    """Make the place in a checkpoint directory for what shared memory has no room for.

    Raises:
        DirectoryNotWritable: something else has its name, such as a link that an archive has brought.
    """
    try:
        with Directory.open(directory) as root:
            root.make(FALLBACK).close()
    except OSError as error:
        raise DirectoryNotWritable(
            f"{error}. What shared memory has no room for would lie in {directory / FALLBACK}: remove what is there"
        ) from error


def stores_prefix() -> str:
    """Return how the names of all stores of this user begin."""
    return f"hetstream-ckpt-{os.geteuid()}-"


def list_stores(root: Path, prefix: str, *, of_others: bool = False) -> list[StoreFiles]:
    """Return the directories below `root` whose name begins so; with a dot in front while they are made or deleted.

    Args:
        root: where they are.
        prefix: of their names.
        of_others: also what other users have given such a name. Anybody can make 100,000 of them in shared memory, and
            this is asked again and again.
    """
    found = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if not entry.name.removeprefix(".").startswith(prefix) or not _NAME.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):  # it has just gone
                    if of_others or entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        found.append(entry.name)
    except OSError:
        return []
    return [StoreFiles(root / name) for name in sorted(found)]


def _newest_first(paths: Iterable[Path]) -> list[SlotContent]:
    found = (SlotContent.of(path) for path in paths)
    return sorted((content for content in found if content), key=lambda content: content.age, reverse=True)


def _training(name: str) -> tuple[str, ...]:
    """User, job and checkpoint directory in a store's name."""
    match = _NAME.fullmatch(name)
    return match.group(1, 2, 5) if match else ()
