"""Who else could change a file, or put another one in its place: owners, modes, ACLs, and every directory on the way.

Called before anything is read that names a program, holds keys or makes up a program, and before such a thing is made.
`files.py` reaches things in a directory that was found safe. Reads; makes only what `SafeWalk` is asked to make.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import struct
from collections.abc import Collection, Sequence
from pathlib import Path

from hetstream.base.posix import grp, open_flags, pwd
from hetstream.base.text import group_name, user_name

# With O_DIRECTORY an automounter mounts what is entered; O_PATH needs no right to read.
_ENTER = open_flags("O_PATH", "O_DIRECTORY", "O_CLOEXEC", "O_NOFOLLOW")
_MOST_LINKS = 40  # as the kernel follows: https://man7.org/linux/man-pages/man7/path_resolution.7.html
# Entries of an ACL: https://github.com/torvalds/linux/blob/v6.1/include/uapi/linux/posix_acl_xattr.h
_ACL, _ACL_HEADER_BYTES, _ACL_ENTRY = "system.posix_acl_access", 4, struct.Struct("<HHI")
_ACL_USER, _ACL_GROUP_OBJ, _ACL_GROUP, _ACL_WRITE = 0x02, 0x04, 0x08, 0x02

# Among owners of a place: all can write there. No user has this number (uid_t -1).
EVERYBODY = -1
_Step = tuple[Path, os.stat_result]


class UntrustedFile(PermissionError):
    """A link, a device, a stranger's file, or one that strangers can write to. It is not used."""


def others_can_write(status: os.stat_result, where: int | str | os.PathLike[str]) -> bool:
    """Return whether anybody but the owner, root or this user can write to a file or into a directory.

    A group of one user alone does not count: many sites give each user one, and let it write (umask 002). Where a file
    has an ACL, the group's bits of its mode are the most that the ACL gives to anybody it names
    (https://man7.org/linux/man-pages/man5/acl.5.html), so the ACL is read.

    Args:
        status: of the file.
        where: a descriptor of it, or its path.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    users, groups = _named_writers(where, status.st_gid)
    alone = {status.st_uid, os.geteuid()}
    return bool(users - alone - {0}) or any(not any(_is_private_group(gid, uid) for uid in alone) for gid in groups)


def _named_writers(where: int | str | os.PathLike[str], gid: int) -> tuple[set[int], set[int]]:
    """The users and groups, beside the owner, that may write to what a group may write to."""
    try:
        acl = os.getxattr(f"/proc/self/fd/{where}" if isinstance(where, int) else where, _ACL)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):
            raise
        return set(), {gid}
    entries = [
        (tag, number)
        for tag, permissions, number in _ACL_ENTRY.iter_unpack(acl[_ACL_HEADER_BYTES:])
        if permissions & _ACL_WRITE
    ]
    groups = {number for tag, number in entries if tag == _ACL_GROUP}
    groups |= {gid for tag, _ in entries if tag == _ACL_GROUP_OBJ}
    return {number for tag, number in entries if tag == _ACL_USER}, groups


def unsafe_above(path: str | os.PathLike[str], *, of_colleagues: bool = False, own_links: bool = False) -> str:
    """Return why somebody else could put something in the place of a path; "" if nobody but root and this user can.

    Looks at each directory that a name on the way is looked up in, those of links included, as sshd (StrictModes),
    munged and systemd do. It is root's or this user's; where others can write to it, it has the sticky bit, which
    binds all but its owner (https://man7.org/linux/man-pages/man2/rename.2.html, EPERM). A link is root's or this
    user's. Of a path that is not there, what is there is looked at.

    Args:
        path: of a file or directory, which itself is not looked at; if it is a link, where that leads.
        of_colleagues: directories of another user, or of a group, count as safe as long as not everybody can write to
            them, and so do links of others. For data of which each directory and file is looked at when it is opened.
        own_links: a link is root's or this user's also there. For who writes or removes: another user's link may lead
            to this user's own files, which stand every look at them.

    Returns:
        The directory, who owns it and its mode, the rule, and what can be done.

    Raises:
        OSError: something on the way cannot be entered.
    """
    way = SafeWalk(of_colleagues=of_colleagues, own_links=own_links)
    try:
        way.go(path)
    except UntrustedFile as error:
        return str(error)
    finally:
        os.close(way.descriptor)
    return ""


def unsafe_below(place: Path) -> str:
    """As `unsafe_above`, for whatever is made in a directory; one that cannot be entered is not safe either.

    Returns:
        Why it is not; "" if it is.
    """
    try:
        return unsafe_above(place / "file")
    except OSError as error:
        return f"{error.filename or place}: {error.strerror or error}"


def owners_of(path: str) -> list[int]:
    """Return whose a file or directory is, and each directory and link on the way to it: user ids, ascending.

    Where all can write to a directory on the way without the sticky bit, or to it itself, it is `EVERYBODY`'s, too.
    Empty if it is not there.
    """
    try:
        trail = _trail(path)
    except OSError:
        return []
    is_public = any(_is_open(status) for _, status in trail[:-1]) or bool(_in_common(trail[-1][1]))
    return sorted({status.st_uid for _, status in trail} | ({EVERYBODY} if is_public else set()))


def is_in_common(path: str) -> bool:
    """Return whether all can make names in a directory on the way to a path, as in /tmp and /dev/shm: nodes have their
    own.

    What is there belongs to this user on one node, and to anybody on the next.
    """
    way = _Trail()
    try:
        with contextlib.suppress(OSError):
            way.go(path)
    finally:
        os.close(way.descriptor)
    return any(status.st_mode & stat.S_IWOTH and stat.S_ISDIR(status.st_mode) for _, status in way.seen)


def strange_here(path: str, owners_there: Collection[int]) -> str:
    """Return why what another host has under a path may be a stranger's on this one; "" if it is the same users'.

    A place on a node's own disk or memory that is this user's on one node may be anybody's on the next. What is looked
    up on the way is looked at, too: whoever owns a directory or a link there puts what he likes at its end.

    Args:
        path: of a program, or of a directory that programs are found in.
        owners_there: as `owners_of` says on the other host.
    """
    try:
        trail = _trail(path)
    except OSError as error:
        return f"{path} is not on this host: {error.strerror or error}"
    if why := _why_strange(path, trail, owners_there):
        return why
    status = trail[-1][1]
    is_own = status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX  # open to all: so it is there
    return f"anybody can write to {path} on this host" if _in_common(status) and not is_own else ""


def strange_value(path: str, owners_there: Collection[int]) -> str:
    """Return the same of a path that a program is told of, and may make, read or keep things in, such as a cache.

    A place in which all make names, such as /tmp, may be that on both hosts. One that is on neither may be made.
    """
    try:
        trail = _trail(path)
    except FileNotFoundError:
        return _why_makeable(path) if owners_there else ""
    except OSError:
        return ""  # nor can the program reach it
    if why := _why_strange(path, trail, owners_there):
        return why
    is_public = _in_common(trail[-1][1]) and EVERYBODY not in owners_there
    return f"anybody can write to {path} on this host" if is_public else ""


def _why_strange(path: str, trail: Sequence[_Step], owners_there: Collection[int]) -> str:
    known = {0, os.geteuid(), *owners_there}
    for place, status in trail:
        # Who has no number here is root, or anybody: of the thing itself that is not enough.
        is_unknown = status.st_uid == _uid_without_number() and place != trail[-1][0]
        if status.st_uid not in known and not is_unknown:
            there = ", ".join(user_name(uid) for uid in owners_there if uid != EVERYBODY) or "nobody"
            way = "" if place == trail[-1][0] else f", on the way to {path},"
            return f"{place}{way} belongs to {user_name(status.st_uid)} on this host, and to {there} on the program's"
    open_to_all = [place for place, status in trail[:-1] if _is_open(status)]
    if open_to_all and EVERYBODY not in owners_there:
        return f"anybody could put something in the place of {path}: all can write to {open_to_all[0]} on this host"
    return ""


def _why_makeable(path: str) -> str:
    """Why somebody else could make what is missing here; "" if nobody but root and this user can."""
    way = _Trail()
    try:
        way.go(path)
        status = os.fstat(way.descriptor)
    except OSError:
        return ""
    finally:
        os.close(way.descriptor)
    if status.st_uid in (0, os.geteuid(), _uid_without_number()) and not status.st_mode & stat.S_IWOTH:
        return ""
    return f"{path} is not on this host, and others could make it in {way.path}"


def _is_open(status: os.stat_result) -> bool:
    """Whether all can put other things in the place of those in a directory."""
    return bool(status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX) and stat.S_ISDIR(status.st_mode)


def _in_common(status: os.stat_result) -> bool:
    """Whether all can make things in a directory, or write to a file."""
    return bool(status.st_mode & stat.S_IWOTH) and (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode))


class SafeWalk:
    """A walk from `/`, one name at a time, that looks at each directory before it looks a name up there.

    Attributes:
        descriptor: of the directory that was reached (O_PATH); whoever walks closes it.
        path: of that.
        missing: what was looked up last and is no directory, or not there; None if the walk came to its end.
    """

    def __init__(self, *, make: bool = False, of_colleagues: bool = False, own_links: bool = False) -> None:
        self.descriptor = os.open("/", _ENTER)
        self.path = Path("/")
        self.missing: Path | None = None
        self._make = make
        self._of_colleagues = of_colleagues
        self._own_links = own_links or not of_colleagues

    def go(self, path: str | os.PathLike[str]) -> None:
        """Walk.

        Raises:
            UntrustedFile: a directory on the way is not safe.
            OSError: it cannot be entered.
        """
        whole = Path.cwd() / path  # `..` stays in it: behind a link it leads elsewhere than the text says
        names = [*reversed(whole.parts[1:])]
        num_links = 0
        while names and self.missing is None:
            name = names.pop()
            self.check(whole)
            try:
                self._enter(name)
            except FileNotFoundError:
                if not self._make:
                    self.missing = self.path / name
                    continue
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=self.descriptor)
                self._enter(name)
            except NotADirectoryError:
                target = self._read_link(name)
                if target is None:
                    self.missing = self.path / name
                    continue
                num_links += 1
                if num_links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(whole)) from None
                parts = Path(target).parts
                if target.startswith("/"):
                    self._enter("/")
                    parts = parts[1:]
                names += reversed(parts)

    def _enter(self, name: str) -> None:
        inner = os.open(name, _ENTER, dir_fd=self.descriptor)
        os.close(self.descriptor)
        self.descriptor = inner
        self.path = Path(name) if name == "/" else self.path.parent if name == ".." else self.path / name

    def _read_link(self, name: str) -> str | None:
        """Where a link leads to; None if it is none."""
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISLNK(status.st_mode):
                return None
            self._check_link(self.path / name, status)
            return os.readlink("", dir_fd=descriptor)
        finally:
            os.close(descriptor)

    def _check_link(self, path: Path, status: os.stat_result) -> None:
        if status.st_uid not in (0, os.geteuid()) and self._own_links:
            raise UntrustedFile(
                f"{path} is a link of user {status.st_uid}, who can let it lead elsewhere: a link on the way is "
                f"{_of_whom()}. Use another place"
            )

    def _is_of_system(self, uid: int) -> bool:
        """Whether it is `/` or one of its directories, in a container in which root has no number.

        There root's directories look like those of any other user who has no number there. What is at the top, root or
        the maker of the container has put there; further down it may be anybody's.
        """
        is_at_top = self.path == self.path.parent or self.path.parent == Path("/")
        return is_at_top and uid == _uid_without_number()

    def check(self, whole: Path) -> None:
        """Look at the directory that was reached.

        Args:
            whole: what is looked for, for the message.

        Raises:
            UntrustedFile: it is not safe.
        """
        status = os.fstat(self.descriptor)
        is_own = status.st_uid in (0, os.geteuid()) or self._is_of_system(status.st_uid)
        facts = f"{self.path} (owner {user_name(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o})"
        rule = f"a directory on the way is {_of_whom()}"
        if not is_own and not (self._of_colleagues and not status.st_mode & stat.S_IWOTH):
            raise UntrustedFile(
                f"somebody else could put another one in the place of {whole}: {facts} is another user's; {rule}, "
                "whatever its mode: the sticky bit does not bind the owner. Use another place, or have it given to root"
            )
        if not is_own or status.st_mode & stat.S_ISVTX:
            return
        writes = bool(status.st_mode & stat.S_IWOTH)
        if writes or (not self._of_colleagues and others_can_write(status, self.descriptor)):
            who = "anybody" if writes else "others"
            whom = "all" if writes else f"group {group_name(status.st_gid)}, or others that an ACL names,"
            raise UntrustedFile(
                f"{who} could put another directory in the place of {whole}: {whom} can write to {facts}, which has no "
                f"sticky bit. Use another place, or: chmod {'+t' if writes else 'g-w'} {self.path}"
            )


class _Trail(SafeWalk):
    """A walk that only notes what it comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[_Step] = []

    def check(self, _: Path) -> None:
        self.seen.append((self.path, os.fstat(self.descriptor)))

    def _check_link(self, path: Path, status: os.stat_result) -> None:
        self.seen.append((path, status))


def _trail(path: str) -> list[_Step]:
    """Each directory and link on the way to a file or directory, and that itself at last.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it cannot be reached.
    """
    way = _Trail()
    try:
        way.go(path)
        if way.missing is None:
            way.check(way.path)
        else:
            status = os.stat(way.missing.name, dir_fd=way.descriptor, follow_symlinks=False)
            os.stat(path)  # it may be a file where a directory is asked for
            way.seen.append((way.missing, status))
        return way.seen
    finally:
        os.close(way.descriptor)


def _uid_without_number() -> int | None:
    """The id that stands for all users without one in this user namespace, root among them; None if root has one.

    See https://man7.org/linux/man-pages/man7/user_namespaces.7.html, "Unmapped user and group IDs".
    """
    try:
        mapped = Path("/proc/self/uid_map").read_text().splitlines()
        if any(line.split()[0] == "0" for line in mapped):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


def _of_whom() -> str:
    return f"root's or user {user_name(os.geteuid())}'s" if os.geteuid() else "root's"


@functools.lru_cache(maxsize=64)
def _is_private_group(gid: int, uid: int) -> bool:
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    if user.pw_gid != gid or group.gr_name != user.pw_name or not {*group.gr_mem} <= {user.pw_name}:
        return False
    try:
        return not members_by_first_group(Path("/etc/passwd").read_text(errors="replace"), gid) - {uid}
    except OSError:
        return False


def members_by_first_group(passwd: str, gid: int) -> set[int]:
    """Return the users whose primary group this is, by the host's list: the group's entry does not name them.

    A directory service is not asked for all of its users: at each start of a thousand ranks it would not bear that.

    Args:
        passwd: text of /etc/passwd (https://man7.org/linux/man-pages/man5/passwd.5.html).
        gid: of the group.
    """
    fields = [line.split(":") for line in passwd.splitlines()]
    return {int(user[2]) for user in fields if len(user) > 3 and user[3] == str(gid) and user[2].isdigit()}
