"""Files in a directory that somebody else may have prepared: reached through descriptors, and never through a link.

A directory of checkpoints, or of a job, is input: it comes from a colleague, from an archive, or from a place where a
group can write. A path is looked up anew at each call, and any part of it may have become a link meanwhile. So a
`Directory` is opened once, and everything in it is reached by its plain name and the directory's descriptor:

* no link is followed, and nothing but regular files and directories is opened;
* what belongs to a stranger, or can be written to by one, is refused (`UntrustedFile`);
* a new file is made under a name that was not there (O_EXCL), and takes its place by a rename;
* what is removed is removed relative to a descriptor.

The path of the directory itself may lead through links: whoever runs the program has named it. Who could put another
directory in its place is another question, which `access.py` answers: what names a program, or holds keys, is only
looked for where nobody could (`Directory.open_safe`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

from hetstream.base.access import SafeWalk, others_can_write, unsafe_below
from hetstream.base.access import UntrustedFile as UntrustedFile
from hetstream.base.posix import open_flags

_P = ParamSpec("_P")
_T = TypeVar("_T")

_TEMPORARY = ".tmp"
_GROUP_ENTERS = stat.S_IRGRP | stat.S_IXGRP
_READ = open_flags("O_RDONLY", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK")


def _telling_where(method: Callable[Concatenate[Directory, _P], _T]) -> Callable[Concatenate[Directory, _P], _T]:
    """What the system says of a plain name, with the directory that it is in: names mean nothing to who reads them."""

    @functools.wraps(method)
    def call(self: Directory, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(self, *args, **kwargs)
        except OSError as error:
            if isinstance(error.filename, str) and not os.path.isabs(error.filename):
                error.filename = os.path.join(self.path, error.filename)
            raise

    return call


class Directory:
    """An open directory; a context manager that closes it.

    Args:
        path: where it is, for messages.
        descriptor: of it; this object closes it.
        owners: users whose files are used; None: this user, root, and the owner of the directory.
        group: who can read what is made in it, beside this user; None: nobody.

    Attributes:
        path: where it was when it was opened.
        descriptor: for calls that take `dir_fd`.
        owner: user id of its owner.
    """

    def __init__(
        self, path: Path, descriptor: int, owners: frozenset[int] | None = None, group: int | None = None
    ) -> None:
        self.path = path
        self.descriptor = descriptor
        self.owner = os.fstat(descriptor).st_uid
        self._owners = frozenset({os.geteuid(), 0, self.owner}) if owners is None else owners
        self._group = group

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, group_reads: bool = False, links: bool = True) -> Directory:
        """Open a directory that the caller has named; links on the way are the caller's.

        Args:
            path: of the directory.
            links: it may be a link itself. Not so where its name was found in a directory that others may write to.
            group_reads: what is made in it can be read by its group, if its mode lets the group in (g+rx) and this user
                is of that group; else, and by default, by this user alone.

        Raises:
            OSError: it is not there, cannot be read, or is no directory.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
        status = os.fstat(descriptor)
        is_open = group_reads and status.st_mode & _GROUP_ENTERS == _GROUP_ENTERS
        return cls(Path(path), descriptor, group=status.st_gid if is_open else None)

    @classmethod
    def open_safe(cls, path: str | os.PathLike[str], *, make: bool = False, own: bool = False) -> Directory:
        """Open a directory in whose place nobody else can put another one, nor something in place of what it holds.

        Every directory on the way is entered from the one above it and looked at, links included: between the look and
        the use nothing can be put in its place.

        Args:
            path: of the directory.
            make: it is made where it is missing, and what is above it, with mode 0755.
            own: it has to be this user's alone to write to.

        Raises:
            UntrustedFile: it, or one above it, is not safe (see `access.unsafe_above`); with `own` see `check_own`.
            OSError: it is not there, or no directory.
        """
        way = SafeWalk(make=make)
        try:
            way.go(path)
            if way.missing is not None:
                code = errno.ENOTDIR if way.missing.exists() else errno.ENOENT
                raise OSError(code, os.strerror(code), str(way.missing))
            way.check(way.path)
            descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=way.descriptor)
        finally:
            os.close(way.descriptor)
        directory = cls(Path(path), descriptor)
        if own and (reason := directory.strangers()):
            directory.close()
            raise UntrustedFile(reason)
        return directory

    def close(self) -> None:
        """Close it. A second time does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Who can change it

    def strangers(self) -> str:
        """Return why this directory is not this user's alone to write to; "" if it is."""
        status = os.fstat(self.descriptor)
        if status.st_uid != os.geteuid():
            return f"{self.path} belongs to user {status.st_uid}, this is user {os.geteuid()}"
        if others_can_write(status, self.descriptor):
            return f"others can write to {self.path} (mode {stat.S_IMODE(status.st_mode):o}): chmod go-w {self.path}"
        return ""

    def check_own(self) -> None:
        """Refuse a directory that is not this user's alone to write to.

        Raises:
            UntrustedFile: it is another user's, or others can write to it.
        """
        reason = self.strangers()
        if reason:
            raise UntrustedFile(reason)

    # Looking

    def names(self) -> list[str]:
        """Return names of all that is in it."""
        return os.listdir(self.descriptor)

    @_telling_where
    def status(self, name: str) -> os.stat_result:
        """Return what is known of a name, of a link as such.

        Raises:
            FileNotFoundError: there is no such name.
        """
        return os.stat(_plain(name), dir_fd=self.descriptor, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Return whether something has this name, a link that leads nowhere included."""
        try:
            self.status(name)
        except FileNotFoundError:
            return False
        return True

    def has_directory(self, name: str) -> bool:
        """Return whether a directory has this name; a link to one does not count."""
        try:
            return stat.S_ISDIR(self.status(name).st_mode)
        except FileNotFoundError:
            return False

    @_telling_where
    def read_link(self, name: str) -> str:
        """Return where a link points to.

        Raises:
            OSError: it is not there, or no link.
        """
        return os.readlink(_plain(name), dir_fd=self.descriptor)

    # Opening

    def enter(self, name: str) -> Directory:
        """Open a directory in this one.

        Raises:
            UntrustedFile: it is a link or no directory, a stranger's, or strangers can write to it.
            FileNotFoundError: there is none.
        """
        descriptor = self._open(name, _READ | os.O_DIRECTORY)
        try:
            self._check(name, descriptor, stat.S_ISDIR, "directory")
            return Directory(self.path / name, descriptor, self._owners, self._group)
        except BaseException:
            os.close(descriptor)
            raise

    @_telling_where
    def make(self, name: str) -> Directory:
        """Open a directory in this one; if it is missing it is made, with mode 0700, or 0750 where the group reads."""
        is_new = False
        with contextlib.suppress(FileExistsError):
            os.mkdir(_plain(name), 0o700, dir_fd=self.descriptor)
            is_new = True
        inner = self.enter(name)
        if is_new:
            self._let_group_read(inner.descriptor, 0o750)
        return inner

    def open_file(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a regular file, for reading or for changing it in place; its descriptor.

        With `os.O_CREAT` in the flags it is made, with mode 0600, if it is missing.

        Raises:
            UntrustedFile: it is a link or no regular file, a stranger's, or strangers can write to it; or it is to be
                changed and has another name, elsewhere.
            FileNotFoundError: there is none.
        """
        descriptor = self._open(name, flags | _READ)
        try:
            status = self._check(name, descriptor, stat.S_ISREG, "regular file")
            if flags & os.O_ACCMODE != os.O_RDONLY and status.st_nlink > 1:
                raise UntrustedFile(
                    f"{self.path / name} has {status.st_nlink} names: it is not changed through this one"
                )
            os.set_blocking(descriptor, True)
            return descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the content of a regular file.

        Raises:
            UntrustedFile: see `open_file`; or it is larger than `max_bytes`.
            FileNotFoundError: there is none.
        """
        with open(self.open_file(name), "rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise UntrustedFile(f"{self.path / name} has more than {max_bytes} bytes: it is not read")
        return data

    # Changing

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[int]:
        """Give the descriptor of a new file; what the block wrote there, and synced, takes the name at its end.

        If the block fails, the new file is removed, and what had the name before still has it.
        """
        temporary = temporary_name(_plain(name))
        self.unlink(temporary, missing_ok=True)  # of a process before with this number
        descriptor = self._open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            try:
                self._let_group_read(descriptor, 0o640)
                yield descriptor
            finally:
                os.close(descriptor)
            self.rename(temporary, name)
        except BaseException:
            self.unlink(temporary, missing_ok=True)
            raise
        self.sync()

    def write_whole(self, name: str, data: bytes) -> None:
        """Write a small file of mode 0600, or 0640 where the group reads: after a crash at any moment there is the old
        content or the new one."""
        with self.replacing(name) as descriptor:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)

    @_telling_where
    def link_whole(self, name: str, target: str) -> None:
        """Let a name be a symbolic link to `target`: at any moment there is the old one or the new one."""
        temporary = temporary_name(_plain(name))
        self.unlink(temporary, missing_ok=True)
        os.symlink(target, temporary, dir_fd=self.descriptor)
        try:
            self.rename(temporary, name)
        except BaseException:
            self.unlink(temporary, missing_ok=True)
            raise
        self.sync()

    @_telling_where
    def rename(self, name: str, to: str) -> None:
        """Give something another name in this directory, in place of what had that before."""
        os.rename(_plain(name), _plain(to), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    @_telling_where
    def unlink(self, name: str, *, missing_ok: bool = False) -> None:
        """Remove a file, or a link and not what it points to."""
        try:
            os.unlink(_plain(name), dir_fd=self.descriptor)
        except FileNotFoundError:
            if not missing_ok:
                raise

    @_telling_where
    def remove_directory(self, name: str, removed: Callable[[], None] = lambda: None) -> None:
        """Remove a directory of files, if it is there. Somebody else may be at it too; of what is no directory, or has
        directories in it, nothing is removed.

        Args:
            name: of the directory.
            removed: called after each file.

        Raises:
            UntrustedFile: it is a link, a file, or a stranger's, or there is a directory in it.
        """
        with contextlib.suppress(FileNotFoundError):
            with self.enter(name) as inner:
                names = inner.names()
                folders = [entry for entry in names if inner.has_directory(entry)]
                if folders:
                    raise UntrustedFile(f"{inner.path / folders[0]} is a directory: nothing of {inner.path} is removed")
                for entry in names:
                    inner.unlink(entry, missing_ok=True)
                    removed()
            os.rmdir(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Bring the names in the directory to disk."""
        os.fsync(self.descriptor)

    def _let_group_read(self, descriptor: int, mode: int) -> None:
        """Give what was made here the mode that the group of this directory is to have, if it is to have any."""
        if self._group is not None:
            with contextlib.suppress(PermissionError):  # this user is not of that group: then it stays private
                os.fchown(descriptor, -1, self._group)
                os.fchmod(descriptor, mode)

    @_telling_where
    def _open(self, name: str, flags: int) -> int:
        try:
            return os.open(_plain(name), flags, 0o600, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR):
                raise
            kind = "a link, which is not followed" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
            with contextlib.suppress(OSError):
                if not stat.S_ISLNK(self.status(name).st_mode):
                    kind = "no directory" if flags & os.O_DIRECTORY else "no regular file"
            raise UntrustedFile(f"{self.path / name} is {kind}") from error

    def _check(self, name: str, descriptor: int, is_kind: Callable[[int], bool], kind: str) -> os.stat_result:
        path, status = self.path / name, os.fstat(descriptor)
        if not is_kind(status.st_mode):
            raise UntrustedFile(f"{path} is no {kind}")
        if status.st_uid not in self._owners:
            named = ", ".join(map(str, sorted(self._owners)))
            raise UntrustedFile(f"{path} belongs to user {status.st_uid}, and not to {named}: it is not used")
        if others_can_write(status, descriptor):
            raise UntrustedFile(
                f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):o}): it is not used. If it is as it "
                f"should be: chmod go-w {path}"
            )
        return status


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes | None:
    """Return the content of a regular file that links may lead to; None for something else, or a larger one.

    It is opened without being read first: a pipe would be waited for, and a device do what it does when it is opened.

    Raises:
        OSError: it cannot be read.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            return None
        with open(f"/proc/self/fd/{place}", "rb") as file:
            data = file.read(most_bytes + 1)
    finally:
        os.close(place)
    return data if len(data) <= most_bytes else None


def temporary_name(name: str) -> str:
    """Return a name that no other process uses, and that no reader takes for `name`."""
    return f".{name}.{os.uname().nodename}-{os.getpid()}{_TEMPORARY}"


def is_temporary(name: str, of: str = "") -> bool:
    """Return whether `temporary_name` gives such names, for a file called `of` if that is given."""
    return name.startswith(f".{of}." if of else ".") and name.endswith(_TEMPORARY)


def _plain(name: str) -> str:
    """A name that stays in its directory."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is no name of something in a directory")
    return name


# Directories that a program makes for itself, below places where others may write too.
#
# A shared directory to submit from, /tmp, a path that a script names: whoever can write there may have prepared the
# name before us, as a directory of his own or as a link. What holds keys, or is read as instructions, is only put where
# nobody else can have a hand in it.

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
    """Return where this user's temporary directories are made: nobody else can put another one in the place of one
    there.

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
