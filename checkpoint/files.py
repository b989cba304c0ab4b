"""Steps of writing that outlive a power cut: a file is whole or not there, and a name is on disk when it returns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(path: Path) -> Path:
    """A name beside `path` that no other process uses, and that no reader takes for `path`."""
    return path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}.tmp")


def is_temporary(name: str, of: str = "") -> bool:
    """Whether `temporary_path` gives such names, for a file called `of` if that is given."""
    return name.startswith(f".{of}.") and name.endswith(".tmp") if of else name[:1] == "." and name.endswith(".tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path; what the block wrote there, and synced, takes the place of `path` at its end.

    If the block fails, the temporary file is removed and `path` is as it was.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file of mode 0600: after a crash at any moment there is the old content or the new one."""
    with replacing(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)


def link_whole(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`: at any moment there is the old link or the new one."""
    with replacing(path) as temporary:
        temporary.unlink(missing_ok=True)
        os.symlink(target, temporary)
