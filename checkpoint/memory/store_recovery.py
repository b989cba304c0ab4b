"""How a trainer comes by its store: it adopts what a dead trainer of the same identity has left, or makes a new one.

The trainer's lock tells the dead from the living: it goes with the process. A trainer that ended as it should leaves a
store for as long as its checkpoint writer needs it; that one too is adopted, so that a training that is started again
at once finds its newest generation.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from hetstream.base.locks import own_lock
from hetstream.checkpoint.errors import CheckpointError, ForeignOwner, SharedMemoryFull, StoreInUse, reach
from hetstream.checkpoint.locks import FileLock
from hetstream.checkpoint.memory.slots import unlink_with_target
from hetstream.checkpoint.memory.store_files import (
    STATUS_BYTES,
    Holder,
    SlotContent,
    StoreFiles,
    StoreIdentity,
    list_stores,
    stores_prefix,
)

_log = logging.getLogger(__name__)

_TOKEN_BYTES = 4
# Whoever looks whether a trainer lives holds its lock for a moment.
_GRACE_S = 1.0
# Two trainers of one identity that start at the same moment look for stores one after the other.
_ALONE_TIMEOUT_S = 10.0
_POLL_S = 0.002
_LOCK_NAMES = 8


def own_store(identity: StoreIdentity, shared_memory: Path, fallback: Path | None) -> tuple[StoreFiles, FileLock]:
    """Return the store of an identity with the trainer's lock.

    Args:
        identity: whose it is.
        shared_memory: where stores are.
        fallback: where it is made if that is full or cannot be written to.

    Raises:
        StoreInUse: a living process has it.
        SharedMemoryFull: not even a directory fits, and there is no fallback.
        OSError: neither place can be written to.
    """
    with _alone_in(shared_memory):
        files, lock = _adopt(identity, [root for root in (shared_memory, fallback) if root]) or _make_somewhere(
            identity, shared_memory, fallback
        )
        _write_holder(files, identity)
    return files, lock


def newest_attempt(identity: StoreIdentity, roots: Iterable[Path]) -> int:
    """Return the newest attempt of which the stores of an identity hold anything, of this rank or of others; 0:
    none.
    """
    attempts = [0]
    for files in (files for root in roots for files in list_stores(root, identity.prefix)):
        with contextlib.suppress(CheckpointError):
            files.check_owner()
            held = [*files.complete(), *(content for path in files.replicas() if (content := SlotContent.of(path)))]
            attempts += [content.header.generation.attempt for content in held]
    return max(attempts)


def _adopt(identity: StoreIdentity, roots: list[Path]) -> tuple[StoreFiles, FileLock] | None:
    """The dead trainer's store with the newest generation; others of the same identity are deleted."""
    found: list[tuple[StoreFiles, FileLock]] = []
    refused: list[ForeignOwner] = []
    try:
        for files in (files for root in roots for files in list_stores(root, identity.prefix, of_others=True)):
            if files.path.name.startswith("."):
                continue  # it is being deleted
            try:
                files.check_owner()
            except ForeignOwner as error:
                refused.append(error)
                continue
            lock = _lock_dead(files, identity)
            if lock:
                found.append((files, lock))
    except BaseException:
        for _, lock in found:
            lock.release()
        raise
    if refused:
        # Anybody can make as many as he likes.
        _log.warning("%s%s", refused[0], f". So are {len(refused) - 1} more" if len(refused) > 1 else "")
    ours = [store for store in found if identity.lineage.knows(store[0].read_start_id())]
    for files, lock in (store for store in found if store not in ours):
        with lock:
            _say_given_up(identity, files)
            give_up(files)
    found = ours
    found.sort(key=lambda store: [content.age for content in store[0].complete()[:1]])
    for files, lock in found[:-1]:
        writer = FileLock.try_exclusive(files.writer_lock)
        if writer:
            _log.info("checkpoint store %s: an older one is deleted: %s", identity, files.path)
            files.delete()
            writer.release()
        lock.release()
    if not found:
        return None
    files, lock = found[-1]
    files.write_start_id(identity.lineage.start_id)
    files.closed.unlink(missing_ok=True)
    files.stop.unlink(missing_ok=True)
    reach("store.adopted")
    return files, lock


def _say_given_up(identity: StoreIdentity, files: StoreFiles) -> None:
    held = files.complete()
    if held:
        _log.warning(
            "what memory holds of %s is given up (the newest is %s): %s",
            identity.directory,
            held[0].header.generation,
            "the directory was deleted, or emptied, and made again since the last start, or a copy from before has "
            "taken its place"
            if files.read_start_id()
            else "an earlier release has saved it, which did not say for which directory",
        )


def give_up(files: StoreFiles) -> None:
    """Delete a store that is of no use to anybody, or have its writer do so. For who has its trainer's lock."""
    writer = FileLock.try_exclusive(files.writer_lock)
    if writer:
        with writer:
            files.delete()
        return
    for path in (*files.slots(), *files.replicas()):
        unlink_with_target(path)
    files.closed.touch(0o600)  # its checkpoint writer removes it


def delete_without_writer(files: StoreFiles, *, keep_unsaved: bool) -> bool:
    """Delete a store, unless a checkpoint writer serves it. For who holds the trainer's lock.

    Args:
        files: of the store.
        keep_unsaved: leave it if something in it is not on disk.

    Returns:
        Whether it was left for that.
    """
    with contextlib.suppress(FileNotFoundError):  # somebody else deletes it
        writer = FileLock.try_exclusive(files.writer_lock)
        if writer:
            with writer:
                if keep_unsaved and files.has_unsaved():
                    return True
                files.delete()
    return False


def _lock_dead(files: StoreFiles, identity: StoreIdentity) -> FileLock | None:
    """The trainer's lock of a store, or None if the store has just been deleted."""
    deadline_s = time.monotonic() + _GRACE_S
    while True:
        try:
            lock = FileLock.try_exclusive(files.trainer_lock)
        except FileNotFoundError:
            return None
        if lock:
            if lock.is_of(files.trainer_lock):
                return lock
            lock.release()
            return None
        if time.monotonic() > deadline_s:
            holder = files.holder()
            raise StoreInUse(
                f"{identity}: process {holder.pid} of host {holder.host} is this rank's trainer and lives. Two "
                f"trainings need two checkpoint directories. See: fuser -v {files.trainer_lock}"
            )
        time.sleep(_POLL_S)


def make_store(identity: StoreIdentity, shared_memory: Path, fallback: Path | None) -> tuple[StoreFiles, FileLock]:
    """Return a new store of an identity with the trainer's lock; arguments and errors are those of `own_store`."""
    files, lock = _make_somewhere(identity, shared_memory, fallback)
    _write_holder(files, identity)
    return files, lock


def _make_somewhere(identity: StoreIdentity, shared_memory: Path, fallback: Path | None) -> tuple[StoreFiles, FileLock]:
    try:
        return _make(identity, shared_memory)
    except OSError as error:
        if fallback is None:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SharedMemoryFull(
                    f"{shared_memory} is full: {error.strerror}. See `df -i {shared_memory}`"
                ) from error
            raise
        _log.warning("checkpoints leave shared memory: %s. Their store is in %s; saves are slower", error, fallback)
        return _make(identity, fallback)


def _make(identity: StoreIdentity, root: Path) -> tuple[StoreFiles, FileLock]:
    name = identity.prefix + secrets.token_hex(_TOKEN_BYTES)
    # Under another name until it is locked: nobody may take it for a dead trainer's.
    hidden = StoreFiles(root / f".{name}")
    hidden.path.mkdir(mode=0o700)
    lock = None
    try:
        lock = FileLock.try_exclusive(hidden.trainer_lock)
        if lock is None:
            raise StoreInUse(f"{hidden.path} was locked by another process while it was made; start again")
        os.mkfifo(hidden.wake, 0o600)
        # Room that the checkpoint writer can write to when memory is full; where there is none the store is made
        # elsewhere.
        hidden.status.write_bytes(b" " * STATUS_BYTES)
        hidden.write_start_id(identity.lineage.start_id)
        hidden.path.rename(root / name)
    except BaseException:
        if lock:
            lock.release()
        shutil.rmtree(hidden.path, ignore_errors=True)
        raise
    reach("store.created")
    return StoreFiles(root / name), lock


def _write_holder(files: StoreFiles, identity: StoreIdentity) -> None:
    directory = os.path.realpath(identity.directory)
    holder = Holder(os.getpid(), os.uname().nodename, identity.job, identity.component, identity.rank, directory)
    # In memory without a free page, and for a path that is no text, the name of the store has to do.
    with contextlib.suppress(OSError, UnicodeError):
        files.trainer_lock.write_bytes(msgspec.json.encode(holder))


@contextlib.contextmanager
def _alone_in(root: Path) -> Iterator[None]:
    """Have trainers of this user look for their stores one after the other.

    Without the lock two that start at the same instant may miss each other; nothing else comes of it.
    """
    with contextlib.ExitStack() as held:
        # Anybody can have the first names; all of the user's trainers come to the same one.
        for number in range(_LOCK_NAMES):
            try:
                held.enter_context(own_lock(root / f"{stores_prefix()}lock-{number}", _ALONE_TIMEOUT_S))
            except TimeoutError as error:
                _log.warning("%s", error)
            except OSError:
                continue
            break
        yield
