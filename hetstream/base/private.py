"""Directories that a program makes for itself, below places where others may write too. Built on `files.py`.

A shared directory to submit from, /tmp, a path that a script names: whoever can write there may have prepared the name
before us, as a directory of his own or as a link. What holds keys, or is read as instructions, is only put where nobody
else can have a hand in it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

from hetstream.base.access import UntrustedFile, others_can_write, unsafe_below
from hetstream.base.files import Directory

_log = logging.getLogger(__name__)
_IN_HOME = ".hetstream"


def own_directory(path: str | os.PathLike[str], *, own_parents: int = 0) -> Directory:
    """Open a directory that this user alone can write to; it is made if it is missing.

    What is above it is made, too, and may lead through links, but for the last `own_parents` of it: they are this
    user's, as the directory is. A link with its name counts only if it is this user's own.

    Args:
        path: of the directory.
        own_parents: how many directories above it are made by programs of ours, such as `.hetstream` in
            `.hetstream/job-7`.

    Raises:
        UntrustedFile: it, or such a parent, is somebody else's, others can write to it, or somebody else could put
            another one in its place (`access.unsafe_above`).
        OSError: it cannot be made.
    """
    whole = Path.cwd() / path
    names = whole.parts[len(whole.parts) - own_parents - 1 :]
    directory = Directory.open_safe(Path(*whole.parts[: len(whole.parts) - own_parents - 1]), make=True)
    for index, name in enumerate(names):
        outer = directory
        try:
            directory = _own(outer, name, 0o700 if index == own_parents else 0o755)
        finally:
            outer.close()
    return directory


def make_private(path: str | os.PathLike[str], *, own_parents: int = 0) -> None:
    """Make a directory that only this user can enter, as `own_directory` does: it will hold keys.

    Raises:
        OSError: see `own_directory`.
    """
    with own_directory(path, own_parents=own_parents) as directory:
        os.fchmod(directory.descriptor, 0o700)


def temporary_place(*, make: bool = True) -> Path:
    """Where this user's temporary directories are made: nobody else can put another one in the place of one there.

    That is TMPDIR, or where Python makes them without it; if that is not safe, `/tmp`, `/var/tmp`, or the home
    directory's. Of programs and scripts there the user runs what he wrote.

    Args:
        make: the home directory's is made where it is taken and missing. To look for something, nothing is made.

    Raises:
        UntrustedFile: none of them is safe.
    """
    wanted = Path(tempfile.gettempdir())
    why = unsafe_below(wanted)
    if not why:
        return wanted
    found = next(
        (place for place in (Path("/tmp"), Path("/var/tmp")) if place.is_dir() and not unsafe_below(place)), None
    )
    if found is None:
        try:
            found = Path.home() / _IN_HOME / "tmp"
            if make:
                own_directory(found, own_parents=1).close()
        except (OSError, RuntimeError) as error:
            raise UntrustedFile(f"no safe place for temporary files: {why}. In the home directory: {error}") from error
    _say_once(wanted, found, why)
    return found


@functools.cache
def _say_once(wanted: Path, found: Path, why: str) -> None:
    _log.warning("temporary files are in %s, and not in %s: %s", found, wanted, why)


def _own(outer: Directory, name: str, mode: int) -> Directory:
    """Open a directory of this user in another one, made with this mode if it is missing; the user's own link may lead
    to it.

    Raises:
        UntrustedFile: it, or the link, is another user's, or others can write to it.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode & ~0o022, dir_fd=outer.descriptor)
    found = outer.status(name)
    if stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid():
        directory = Directory.open_safe(outer.path / name)
    else:
        if found.st_uid != os.geteuid():
            raise UntrustedFile(f"{outer.path / name} belongs to user {found.st_uid}, this is user {os.geteuid()}")
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer.descriptor)
        directory = Directory(outer.path / name, descriptor)
    try:
        status = os.fstat(directory.descriptor)
        if status.st_uid == os.geteuid() and others_can_write(status, directory.descriptor):
            # Ours, made with a wide umask. What others have put there is refused when it is opened.
            os.fchmod(directory.descriptor, stat.S_IMODE(status.st_mode) & ~0o022)
        if reason := directory.strangers():
            raise UntrustedFile(reason)
    except BaseException:
        directory.close()
        raise
    return directory
