"""From parts to a checkpoint, and from a checkpoint to nothing, each in one step that a crash cannot halve.

    DIR/step-0000000120.2.partial/   ranks write their parts here, each when it can; nobody waits for another
        .in-use                      shared lock: somebody writes or reads; the directory is then not removed
        rank-00000-of-00002.safetensors, rank-00000-of-00002.json   the manifest comes last
    DIR/step-0000000120.2/           the same after the rename that commits it: every part is whole and on disk
    DIR/step-0000000120.2.deleted/   the same on its way out
    DIR/latest                       link to the newest committed one of the line (`ownership.py`); moved only after it
    DIR/.commit                      lock of all of these renames

Called by checkpoint writers and by `CheckpointDirectory`. A reader needs none of it: what has a checkpoint's name is
complete.

The directory is input: it is opened once for each call, what lies in it is reached through that descriptor, and no link
is followed. It is changed only where it belongs to this user and others cannot write to it (`UntrustedFile`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from hetstream.base.files import Directory, UntrustedFile, is_temporary
from hetstream.checkpoint.disk.ownership import check_start, read_lineage
from hetstream.checkpoint.disk.rank_file import (
    Manifest,
    PartSpec,
    is_manifest_name,
    ranks_of_name,
    read_manifest,
    write_file,
)
from hetstream.checkpoint.disk.safetensors import FilePlan
from hetstream.checkpoint.errors import DamagedCheckpoint, NotEnoughSpace, reach
from hetstream.checkpoint.locks import FileLock
from hetstream.checkpoint.record.layout import Generation

_log = logging.getLogger(__name__)

PARTIAL = ".partial"
DELETED = ".deleted"
IN_USE = ".in-use"
_COMMIT = ".commit"
# Renames and a few small files: anything longer is a stopped process or a dead file server.
_LOCK_TIMEOUT_S = 60.0
# What manifests take: one of 48 TB, or one each of 200,000 ranks.
_MAX_MANIFEST_BYTES, _MAX_MANIFESTS_BYTES = 16 << 20, 256 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


def committed(directory: Path) -> list[Generation]:
    """Return what has a checkpoint's name, newest first. Nothing is opened; links do not count."""
    return _generations(directory, "")


def announced(directory: Path) -> list[Generation]:
    """Checkpoints that were begun and are not committed, newest first."""
    return _generations(directory, PARTIAL)


def _generations(directory: Path, suffix: str) -> list[Generation]:
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            generation = (
                Generation.of_directory(entry.name.removesuffix(suffix)) if entry.name.endswith(suffix) else None
            )
            if generation and entry.is_dir(follow_symlinks=False):
                found.append(generation)
    return sorted(found, reverse=True)


def partial_path(directory: Path, generation: Generation) -> Path:
    """Return where a checkpoint lies until it is committed."""
    return directory / _partial(generation)


def _partial(generation: Generation) -> str:
    return generation.directory_name + PARTIAL


def manifests_in(directory: Path, name: str) -> list[str]:
    """Return names of the manifests in a checkpoint's directory; none if it is not there, or not to be used."""
    with contextlib.suppress(FileNotFoundError, UntrustedFile), Directory.open(directory) as root:
        return _manifests_in(root, name)
    return []


def _manifests_in(root: Directory, name: str) -> list[str]:
    try:
        with root.enter(name) as inner:
            return sorted(filter(is_manifest_name, inner.names()))
    except FileNotFoundError:
        return []


def read_parts(inner: Directory, generation: Generation, ranks: Collection[int] | None = None) -> dict[int, Manifest]:
    """Read the manifests of a checkpoint and look for their files, by rank.

    Args:
        inner: the checkpoint's directory.
        generation: which it is.
        ranks: whose manifests; None: all that are there.

    Raises:
        DamagedCheckpoint: one is damaged or belongs elsewhere, or its file is missing or of another size.
        UntrustedFile: one is a link, a stranger's, or open to strangers.
    """
    parts: dict[int, Manifest] = {}
    room_bytes = _MAX_MANIFESTS_BYTES
    for name in sorted(filter(is_manifest_name, inner.names())):
        if ranks is not None and (ranks_of_name(name) or (-1,))[0] not in ranks:
            continue
        path = inner.path / name
        data = inner.read(name, min(_MAX_MANIFEST_BYTES, room_bytes))
        room_bytes -= len(data)
        manifest = read_manifest(data, str(path))
        expected = next(iter(parts.values()), manifest).world_size
        part = manifest.part
        if (part.generation, part.manifest_name, part.world_size) != (generation, name, expected):
            raise DamagedCheckpoint(
                f"{path} says {part.generation}, rank {manifest.rank} of {manifest.world_size}; "
                f"it lies with {generation}" + (f" of {expected} ranks" if expected != manifest.world_size else "")
            )
        file = inner.path / part.file_name
        try:
            status = inner.status(part.file_name)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{file} is missing") from error
        if not stat.S_ISREG(status.st_mode):
            raise DamagedCheckpoint(f"{file} is no regular file")
        if status.st_size != manifest.num_bytes:
            raise DamagedCheckpoint(f"{file} has {status.st_size} bytes, {manifest.num_bytes} were written")
        parts[manifest.rank] = manifest
    return parts


def write_part(
    directory: Path,
    part: PartSpec,
    plan: FilePlan,
    payload: memoryview,
    progress: Callable[[int], None] = lambda num_bytes: None,  # noqa: ARG005
    start_id: str = "",
) -> None:
    """Write one rank's part; if it is there already, nothing.

    Args:
        directory: of the checkpoints.
        part: whose.
        plan: what the file holds.
        payload: of the record.
        progress: told again and again how many bytes are written.
        start_id: of the start of the job whose part it is; "": not known, and any directory of this name will do.

    Raises:
        DirectoryReplaced: it is meant for another directory.
        NotEnoughSpace: the disk is full, or would be. What this call wrote is gone again.
        OSError: the file system says no otherwise.
    """
    name = _partial(part.generation)
    with _own(directory) as root:
        check_start(root, start_id)
        with _announce(root, part.generation) as inner:
            if inner is None or inner.has(part.manifest_name):
                return
            try:
                _make_room(root, inner, part, plan.num_bytes)
                _write_part(inner, part, plan, payload, progress)
                return
            except NotEnoughSpace as error:
                full = error
            except FileNotFoundError:
                # Somebody with the same part was faster and it is committed, or the directory was deleted by hand.
                if root.has_directory(part.generation.directory_name):
                    return
                raise
        # Without a part in it, the directory was only our announcement.
        if not _manifests_in(root, name):
            remove(directory, name)
        raise full


def written_by(directory: Path, rank: int) -> dict[Generation, int]:
    """Uncommitted checkpoints in which a rank's part is whole on disk, each with its world size."""
    written = {}
    for generation in announced(directory):
        for name in manifests_in(directory, _partial(generation)):
            ranks = ranks_of_name(name)
            if ranks and ranks[0] == rank:
                written[generation] = ranks[1]
    return written


def missing_ranks(directory: Path, generation: Generation, world_size: int) -> tuple[int, ...]:
    """Ranks without a part, by names alone: every rank asks this of a directory with a file for each of them."""
    there = {ranks[0] for name in manifests_in(directory, _partial(generation)) if (ranks := ranks_of_name(name))}
    return tuple(rank for rank in range(world_size) if rank not in there)


def is_being_written(directory: Path, generation: Generation) -> bool:
    """Return whether some rank writes its part of an uncommitted checkpoint just now."""
    with _own(directory) as root, _commit_lock(root):
        try:
            with root.enter(_partial(generation)) as inner:
                lock = FileLock.try_exclusive(inner.path / IN_USE, inner)
        except FileNotFoundError:
            return False
        if lock:
            lock.release()
        return lock is None


def commit(directory: Path, generation: Generation, world_size: int) -> tuple[int, ...]:
    """Commit a checkpoint if all of its parts are there.

    Returns:
        The ranks whose parts are missing; none if it is committed, by whomever.

    Raises:
        DamagedCheckpoint: a part is damaged; nothing was changed.
    """
    partial, final = _partial(generation), generation.directory_name
    missing = missing_ranks(directory, generation, world_size)
    with _own(directory) as root:
        if missing:
            return () if root.has_directory(final) else missing
        with _commit_lock(root):
            if not root.has_directory(final):
                with root.enter(partial) as inner:
                    parts = read_parts(inner, generation)
                    missing = tuple(rank for rank in range(world_size) if rank not in parts)
                    if missing:
                        return missing
                    for name in filter(is_temporary, inner.names()):
                        inner.unlink(name, missing_ok=True)
                reach("commit.locked")
                root.rename(partial, final)
                reach("commit.renamed")
            _move_latest(root)
    return ()


def complete(directory: Path) -> list[Generation]:
    """Finish what dead checkpoint writers left: commit complete sets, then `clean_up`.

    Returns:
        What was committed here.
    """
    done = []
    for generation in announced(directory):
        with contextlib.suppress(DamagedCheckpoint, FileNotFoundError, UntrustedFile):
            with Directory.open(directory) as root, root.enter(_partial(generation)) as inner:
                parts = read_parts(inner, generation)
            if parts and not commit(directory, generation, next(iter(parts.values())).world_size):
                done.append(generation)
    clean_up(directory)
    return done


def left_over(directory: Path) -> list[str]:
    """Return names of what was being removed when whoever did so died: `clean_up` removes it."""
    return [generation.directory_name + DELETED for generation in _generations(directory, DELETED)]


def clean_up(directory: Path) -> None:
    """Bring `latest` up to date, and remove parts of older checkpoints and what was being made or removed."""
    with _own(directory) as root:
        with _commit_lock(root):
            for name in root.names():
                # Made with this lock only: whoever began it is dead.
                if is_temporary(name, LATEST):
                    root.unlink(name, missing_ok=True)
            _move_latest(root)
        newest = next(iter(committed(directory)), None)
        for name in [_partial(generation) for generation in announced(directory) if newest and generation <= newest]:
            with _stays_if_untrusted():
                remove(directory, name)
        for name in left_over(directory):
            with _stays_if_untrusted():
                _purge(root, name)


@contextlib.contextmanager
def _stays_if_untrusted() -> Iterator[None]:
    try:
        yield
    except UntrustedFile as error:
        _log.warning("it stays where it is: %s", error)


def remove(directory: Path, name: str) -> bool:
    """Remove a checkpoint, or one that is not committed.

    Args:
        directory: of the checkpoints.
        name: of the checkpoint's directory.

    Returns:
        Whether it is gone; False while somebody reads or writes it.

    Raises:
        UntrustedFile: it is not this user's; nothing was removed.
    """
    out = name.removesuffix(PARTIAL) + DELETED
    with _own(directory) as root:
        with _commit_lock(root):
            _purge(root, out)
            try:
                with root.enter(name) as inner:
                    lock = FileLock.try_exclusive(inner.path / IN_USE, inner)
            except FileNotFoundError:
                return True
            if lock is None:
                return False
            with lock:
                root.rename(name, out)
                root.sync()
                _move_latest(root)
                reach("remove.renamed")
        _purge(root, out)
    return True


def move_latest(directory: Path) -> None:
    """Let `latest` name the newest checkpoint of the line."""
    with _own(directory) as root, _commit_lock(root):
        _move_latest(root)


@contextlib.contextmanager
def holding(directory: Path, generation: Generation, *, locks: bool = True) -> Iterator[Directory | None]:
    """Keep a committed checkpoint from being removed.

    Args:
        directory: of the checkpoints.
        generation: which.
        locks: without, it may be removed all the time, and nothing is locked or made.

    Yields:
        Its directory, or None if it is not there.

    Raises:
        UntrustedFile: it is a link or a stranger's, or strangers can write to it.
    """
    name = generation.directory_name
    with contextlib.ExitStack() as stack:
        inner = None
        with contextlib.suppress(FileNotFoundError):
            root = stack.enter_context(Directory.open(directory))
            inner = stack.enter_context(root.enter(name))
            if locks and not root.strangers():
                with contextlib.suppress(OSError):
                    # A copy made by hand may lack it; where it cannot be made, nothing can be removed either.
                    os.close(inner.open_file(IN_USE, os.O_RDWR | os.O_CREAT))
            lock = None
            try:
                lock = _use(root, name, inner) if locks else None
            except UntrustedFile:
                raise
            except PermissionError:
                pass  # another user's, who lets us read and not lock it: it may be removed meanwhile
            if lock:
                stack.callback(lock.release)
        yield inner


@contextlib.contextmanager
def _announce(root: Directory, generation: Generation) -> Iterator[Directory | None]:
    """Begin a checkpoint, or join those who did, and keep it from being removed; None if it is committed."""
    name = _partial(generation)
    with contextlib.ExitStack() as stack:
        lock = inner = None
        with _commit_lock(root):
            if not root.has_directory(generation.directory_name):
                inner = stack.enter_context(root.make(name))
                os.close(inner.open_file(IN_USE, os.O_RDWR | os.O_CREAT))
                root.sync()
                lock = _use(root, name, inner)
        if lock is None:
            yield None
            return
        with lock:
            reach("persist.announced")
            yield inner


def _use(root: Directory, name: str, inner: Directory) -> FileLock | None:
    """Share the lock of a checkpoint's directory; None if it is not there or about to go."""
    try:
        lock = FileLock.try_shared(inner.path / IN_USE, inner)
    except FileNotFoundError:
        return None
    if lock and not _is_called(root, name, inner):
        lock.release()
        return None
    return lock


def _is_called(root: Directory, name: str, inner: Directory) -> bool:
    """Whether a directory still has its name: it may have been renamed on its way out."""
    try:
        return os.path.samestat(root.status(name), os.fstat(inner.descriptor))
    except FileNotFoundError:
        return False


def _write_part(
    inner: Directory, part: PartSpec, plan: FilePlan, payload: memoryview, progress: Callable[[int], None]
) -> None:
    try:
        with inner.replacing(part.file_name) as descriptor:
            checksums = write_file(descriptor, plan, payload, progress)
            reach("persist.synced")
        reach("persist.named")
        manifest = part.manifest(plan.num_bytes, checksums, time.time())
        inner.write_whole(part.manifest_name, manifest.to_json())
        reach("persist.described")
    except OSError as error:
        if error.errno not in _FULL:
            raise
        inner.unlink(part.file_name, missing_ok=True)
        directory = inner.path.parent
        raise NotEnoughSpace(
            f"{directory}: the disk or the quota was full before the {plan.num_bytes} bytes of {part.generation}, "
            f"rank {part.rank}, were written ({error}); older checkpoints are untouched: "
            f"hetstream ckpt ls {directory}"
        ) from error


def _make_room(root: Directory, inner: Directory, part: PartSpec, num_bytes: int) -> None:
    """Remove what a dead writer left of this part, and where the disk is full this rank's older uncommitted parts."""
    for name in inner.names():
        if is_temporary(name, part.file_name):
            inner.unlink(name, missing_ok=True)
    free_bytes = _free_bytes(root)
    if free_bytes < num_bytes:
        with contextlib.ExitStack() as stack:
            old = []
            for generation in announced(root.path):
                if generation < part.generation:
                    with contextlib.suppress(FileNotFoundError, UntrustedFile):
                        old.append(stack.enter_context(root.enter(_partial(generation))))
            there = [generation for generation in old if generation.has(part.file_name)]
            if num_bytes <= free_bytes + sum(generation.status(part.file_name).st_size for generation in there):
                with _commit_lock(root):
                    for present in there:
                        present.unlink(part.manifest_name, missing_ok=True)
                        present.unlink(part.file_name, missing_ok=True)
        free_bytes = _free_bytes(root)
    if free_bytes < num_bytes:
        raise NotEnoughSpace(
            f"{root.path}: rank {part.rank}'s part of {part.generation} has {num_bytes} bytes, {free_bytes} are free; "
            f"nothing was written: hetstream ckpt ls {root.path}"
        )


def _free_bytes(root: Directory) -> int:
    status = os.statvfs(root.descriptor)
    return status.f_bavail * status.f_frsize


def _move_latest(root: Directory) -> None:
    point_latest_to(root, read_lineage(root).newest(committed(root.path)))


def _purge(root: Directory, name: str) -> None:
    """Delete a directory of plain files that has lost its name; somebody else may be at it too."""
    root.remove_directory(name, lambda: reach("remove.unlinked"))


def _own(directory: Path) -> Directory:
    """Open a directory of checkpoints to change it.

    Raises:
        UntrustedFile: it is another user's, or others can write to it.
    """
    root = Directory.open(directory, group_reads=True)
    try:
        root.check_own()
    except BaseException:
        root.close()
        raise
    return root


def _commit_lock(root: Directory) -> FileLock:
    return FileLock.wait_exclusive(root.path / _COMMIT, _LOCK_TIMEOUT_S, root)


# The link in a directory of checkpoints that names the newest one of the line, for people and other programs.
#
#     DIR/latest -> step-0000000120.2
#
# Nothing of ours is restored by it. Whoever commits, removes or goes back moves it, with the commit lock of the
# directory held.

LATEST = "latest"


def point_latest_to(root: Directory, newest: Generation | None) -> None:
    """Let `latest` name a committed checkpoint, or none; where something else has this name, nothing."""
    if _problem_of(root):
        return
    try:
        old = root.read_link(LATEST)
    except FileNotFoundError:
        old = None
    if newest is None:
        root.unlink(LATEST, missing_ok=True)
    elif old != newest.directory_name:
        # Whoever renamed it may have died before it was on disk.
        root.sync()
        reach("commit.synced")
        root.link_whole(LATEST, newest.directory_name)
        reach("commit.linked")


def target_of_latest(directory: Path) -> Generation | None:
    """Return the checkpoint that `latest` names, whether it is there or not; None if it names none."""
    with contextlib.suppress(OSError), Directory.open(directory) as root:
        return Generation.of_directory(root.read_link(LATEST))
    return None


def problem_of_latest(directory: Path) -> str:
    """Return why `latest` does not name the newest checkpoint; "" if it does, or can."""
    with Directory.open(directory) as root:
        return _problem_of(root)


def _problem_of(root: Directory) -> str:
    try:
        mode = root.status(LATEST).st_mode
    except FileNotFoundError:
        return ""
    if stat.S_ISLNK(mode):
        return ""
    what = "directory" if stat.S_ISDIR(mode) else "file"
    return (
        f"{root.path / LATEST} is a {what} of somebody else's and no link: it stays, and does not name the newest "
        "checkpoint. Checkpoints are written and restored all the same; move it away"
    )
