"""From parts to a checkpoint, and from a checkpoint to nothing, each in one step that a crash cannot halve.

    DIR/step-0000000120.2.partial/   ranks write their parts here, each when it can; nobody waits for another
        .in-use                      shared lock: somebody writes or reads; the directory is then not removed
        rank-00000-of-00002.safetensors, rank-00000-of-00002.json   the manifest comes last
    DIR/step-0000000120.2/           the same after the rename that commits it: every part is whole and on disk
    DIR/step-0000000120.2.deleted/   the same on its way out
    DIR/latest                       link to the newest committed one; moved only forward, only after it
    DIR/.commit                      lock of all of these renames

Called by savers and by `CheckpointDirectory`. A reader needs none of it: what has a checkpoint's name is complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from checkpoint.errors import DamagedCheckpoint, NotEnoughSpace
from checkpoint.faults import reach
from checkpoint.files import is_temporary, link_whole, replacing, sync_directory, write_whole
from checkpoint.formats.plan import FilePlan
from checkpoint.generation import Generation
from checkpoint.locks import FileLock
from checkpoint.manifest import Manifest, Part, is_manifest_name, read_manifest
from checkpoint.rank_file import write_file

PARTIAL = ".partial"
DELETED = ".deleted"
LATEST = "latest"
IN_USE = ".in-use"
_COMMIT = ".commit"
# Renames and a few small files: anything longer is a stopped process or a dead file server.
_LOCK_TIMEOUT_S = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


def committed(directory: Path) -> list[Generation]:
    """What has a checkpoint's name, newest first. Nothing is opened."""
    found = (Generation.of_directory(name) for name in os.listdir(directory))
    return sorted((generation for generation in found if generation), reverse=True)


def announced(directory: Path) -> list[Generation]:
    """Checkpoints that were begun and are not committed, newest first."""
    names = (name.removesuffix(PARTIAL) for name in os.listdir(directory) if name.endswith(PARTIAL))
    found = (Generation.of_directory(name) for name in names)
    return sorted((generation for generation in found if generation), reverse=True)


def partial_path(directory: Path, generation: Generation) -> Path:
    """Where a checkpoint lies until it is committed."""
    return directory / (generation.directory_name + PARTIAL)


def parts_in(path: Path) -> list[str]:
    """Names of the manifests in a checkpoint's directory; none if it is not there."""
    try:
        return sorted(filter(is_manifest_name, os.listdir(path)))
    except FileNotFoundError:
        return []


def read_parts(path: Path, generation: Generation) -> dict[int, Manifest]:
    """Read the manifests of a checkpoint and look for their files, by rank.

    Raises:
        DamagedCheckpoint: one is damaged or belongs elsewhere, or its file is missing or of another size.
    """
    parts: dict[int, Manifest] = {}
    for name in parts_in(path):
        manifest = read_manifest((path / name).read_bytes(), str(path / name))
        expected = next(iter(parts.values()), manifest).world_size
        part = manifest.part
        if (part.generation, part.manifest_name, part.world_size) != (generation, name, expected):
            raise DamagedCheckpoint(
                f"{path / name} says {part.generation}, rank {manifest.rank} of {manifest.world_size}; "
                f"it lies with {generation}" + (f" of {expected} ranks" if expected != manifest.world_size else "")
            )
        file = path / part.file_name
        try:
            num_bytes = file.stat().st_size
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{file} is missing") from error
        if num_bytes != manifest.num_bytes:
            raise DamagedCheckpoint(f"{file} has {num_bytes} bytes, {manifest.num_bytes} were written")
        parts[manifest.rank] = manifest
    return parts


def write_part(
    directory: Path,
    part: Part,
    plan: FilePlan,
    payload: memoryview,
    progress: Callable[[int], None] = lambda num_bytes: None,  # noqa: ARG005
) -> None:
    """Write one rank's part; if it is there already, nothing.

    Args:
        directory: of the checkpoints.
        part: whose.
        plan: what the file holds.
        payload: of the record.
        progress: told again and again how many bytes are written.

    Raises:
        NotEnoughSpace: the disk is full, or would be. What this call wrote is gone again.
        OSError: the file system says no otherwise.
    """
    partial = partial_path(directory, part.generation)
    with _announce(directory, part.generation) as lock:
        if lock is None or (partial / part.manifest_name).exists():
            return
        try:
            _make_room(directory, part, plan.num_bytes)
            _write_part(partial, part, plan, payload, progress)
            return
        except NotEnoughSpace as error:
            full = error
        except FileNotFoundError:
            # Somebody with the same part was faster and it is committed, or the directory was deleted by hand.
            if (directory / part.generation.directory_name).is_dir():
                return
            raise
    # Without a part in it, the directory was only our announcement.
    if not parts_in(partial):
        remove(directory, partial.name)
    raise full


def written_by(directory: Path, rank: int) -> dict[Generation, int]:
    """Uncommitted checkpoints in which a rank's part is whole on disk, each with its world size."""
    written = {}
    for generation in announced(directory):
        for name in parts_in(partial_path(directory, generation)):
            _, number, _, world_size = name.removesuffix(".json").split("-")
            if int(number) == rank:
                written[generation] = int(world_size)
    return written


def missing_ranks(directory: Path, generation: Generation, world_size: int) -> tuple[int, ...]:
    """Ranks without a part, by names alone: every rank asks this of a directory with a file for each of them."""
    there = {int(name.split("-")[1]) for name in parts_in(partial_path(directory, generation))}
    return tuple(rank for rank in range(world_size) if rank not in there)


def is_being_written(directory: Path, generation: Generation) -> bool:
    """Whether some rank writes its part of an uncommitted checkpoint just now."""
    with _commit_lock(directory):
        try:
            lock = FileLock.try_exclusive(partial_path(directory, generation) / IN_USE)
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
    partial, final = partial_path(directory, generation), directory / generation.directory_name
    missing = missing_ranks(directory, generation, world_size)
    if missing:
        return () if final.is_dir() else missing
    with _commit_lock(directory):
        if not final.is_dir():
            parts = read_parts(partial, generation)
            missing = tuple(rank for rank in range(world_size) if rank not in parts)
            if missing:
                return missing
            for name in filter(is_temporary, os.listdir(partial)):
                (partial / name).unlink(missing_ok=True)
            reach("commit.locked")
            os.rename(partial, final)
            reach("commit.renamed")
        _move_latest(directory)
    return ()


def complete(directory: Path) -> list[Generation]:
    """Finish what dead savers left: commit complete sets, then `clean_up`.

    Returns:
        What was committed here.
    """
    done = []
    for generation in announced(directory):
        with contextlib.suppress(DamagedCheckpoint, FileNotFoundError):
            parts = read_parts(partial_path(directory, generation), generation)
            if parts and not commit(directory, generation, next(iter(parts.values())).world_size):
                done.append(generation)
    clean_up(directory)
    return done


def clean_up(directory: Path) -> None:
    """Bring `latest` up to date, and remove parts of older checkpoints and what was being made or removed."""
    with _commit_lock(directory):
        for name in os.listdir(directory):
            # Made with this lock only: whoever began it is dead.
            if is_temporary(name, LATEST):
                (directory / name).unlink(missing_ok=True)
        _move_latest(directory)
    newest = next(iter(committed(directory)), None)
    for generation in announced(directory):
        if newest and generation <= newest:
            remove(directory, partial_path(directory, generation).name)
    for name in os.listdir(directory):
        if name.endswith(DELETED) and Generation.of_directory(name.removesuffix(DELETED)):
            _purge(directory / name)


def remove(directory: Path, name: str) -> bool:
    """Remove a checkpoint, or one that is not committed.

    Args:
        directory: of the checkpoints.
        name: of the checkpoint's directory.

    Returns:
        Whether it is gone; False while somebody reads or writes it.
    """
    path = directory / name
    out = directory / (name.removesuffix(PARTIAL) + DELETED)
    with _commit_lock(directory):
        _purge(out)
        try:
            lock = FileLock.try_exclusive(path / IN_USE)
        except FileNotFoundError:
            return True
        if lock is None:
            return False
        with lock:
            os.rename(path, out)
            sync_directory(directory)
            _move_latest(directory)
            reach("remove.renamed")
    _purge(out)
    return True


def problem_of_latest(directory: Path) -> str:
    """Why `latest` does not name the newest checkpoint; "" if it does, or can."""
    link = directory / LATEST
    if link.is_symlink() or not os.path.lexists(link):
        return ""
    what = "directory" if link.is_dir() else "file"
    return (
        f"{link} is a {what} of somebody else's and no link: it stays, and does not name the newest checkpoint. "
        "Checkpoints are written and restored all the same; move it away"
    )


@contextlib.contextmanager
def holding(directory: Path, generation: Generation) -> Iterator[Path | None]:
    """Keep a committed checkpoint from being removed.

    Yields:
        Its directory, or None if it is not there.
    """
    path = directory / generation.directory_name
    with contextlib.suppress(OSError):
        # A copy made by hand may lack it; where it cannot be made, nothing can be removed either.
        os.close(os.open(path / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    lock = _use(path)
    try:
        yield path if path.is_dir() else None
    finally:
        if lock:
            lock.release()


@contextlib.contextmanager
def _announce(directory: Path, generation: Generation) -> Iterator[FileLock | None]:
    """Begin a checkpoint, or join those who did, and keep it from being removed; None if it is committed."""
    path = partial_path(directory, generation)
    with _commit_lock(directory):
        lock = None
        if not (directory / generation.directory_name).is_dir():
            path.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(path / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            sync_directory(directory)
            lock = _use(path)
    if lock is None:
        yield None
        return
    with lock:
        reach("persist.announced")
        yield lock


def _use(path: Path) -> FileLock | None:
    """Share the lock of a checkpoint's directory; None if it is not there or about to go."""
    try:
        lock = FileLock.try_shared(path / IN_USE)
    except FileNotFoundError:
        return None
    if lock and not lock.is_of(path / IN_USE):
        lock.release()
        return None
    return lock


def _write_part(
    partial: Path, part: Part, plan: FilePlan, payload: memoryview, progress: Callable[[int], None]
) -> None:
    try:
        with replacing(partial / part.file_name) as temporary:
            checksums = write_file(temporary, plan, payload, progress)
            reach("persist.synced")
        reach("persist.named")
        manifest = part.manifest(plan.num_bytes, checksums, time.time())
        write_whole(partial / part.manifest_name, manifest.to_json())
        reach("persist.described")
    except OSError as error:
        if error.errno not in _FULL:
            raise
        (partial / part.file_name).unlink(missing_ok=True)
        raise NotEnoughSpace(
            f"{partial.parent}: the disk or the quota was full before the {plan.num_bytes} bytes of {part.generation}, "
            f"rank {part.rank}, were written ({error}); older checkpoints are untouched: "
            f"hetstream ckpt ls {partial.parent}"
        ) from error


def _make_room(directory: Path, part: Part, num_bytes: int) -> None:
    """Remove what a dead saver left of this part, and where the disk is full this rank's older uncommitted parts."""
    partial = partial_path(directory, part.generation)
    for name in os.listdir(partial):
        if is_temporary(name, part.file_name):
            (partial / name).unlink(missing_ok=True)
    old = [partial_path(directory, one) for one in announced(directory) if one < part.generation]
    files = [path / part.file_name for path in old if (path / part.file_name).exists()]
    free_bytes = _free_bytes(directory)
    if free_bytes < num_bytes <= free_bytes + sum(file.stat().st_size for file in files):
        with _commit_lock(directory):
            for file in files:
                file.with_suffix(".json").unlink(missing_ok=True)
                file.unlink(missing_ok=True)
        free_bytes = _free_bytes(directory)
    if free_bytes < num_bytes:
        raise NotEnoughSpace(
            f"{directory}: rank {part.rank}'s part of {part.generation} has {num_bytes} bytes, {free_bytes} are free; "
            f"nothing was written: hetstream ckpt ls {directory}"
        )


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _move_latest(directory: Path) -> None:
    """Let `latest` name the newest committed checkpoint; where something else has this name, nothing."""
    if problem_of_latest(directory):
        return
    newest = next(iter(committed(directory)), None)
    link = directory / LATEST
    try:
        old = os.readlink(link)
    except FileNotFoundError:
        old = None
    if newest is None:
        link.unlink(missing_ok=True)
    elif old != newest.directory_name:
        # Whoever renamed it may have died before it was on disk.
        sync_directory(directory)
        reach("commit.synced")
        link_whole(link, newest.directory_name)
        reach("commit.linked")


def _purge(path: Path) -> None:
    """Delete a directory of plain files that has lost its name; somebody else may be at it too."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(path):
            (path / name).unlink(missing_ok=True)
            reach("remove.unlinked")
        path.rmdir()


def _commit_lock(directory: Path) -> FileLock:
    return FileLock.wait_exclusive(directory / _COMMIT, _LOCK_TIMEOUT_S)
