"""Unix sockets of services that all users of a host know by name: where one listens, and who may answer there.

A name in a directory where others can write may be anybody's by now. Who listens makes sure of the directory; who
connects asks the kernel who is there. Used by the site daemon, by the coordinator of GPUs, and by those who ask them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Collection
from pathlib import Path

from hetstream.base.access import SafeWalk, UntrustedFile, others_can_write, unsafe_above

# struct ucred: pid, uid, gid (unix(7)).
_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("@ll")  # seconds, microseconds


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, by the kernel's word (SO_PEERCRED, unix(7))."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid), int(uid)


def listen_at(path: Path, kind: socket.SocketKind, mode: int, backlog: int) -> socket.socket:
    """Listen, not blocking. A socket that nobody listens at is a dead service's, and is replaced.

    Args:
        path: of the socket.
        kind: of the connections.
        mode: of the socket's file: who may connect.
        backlog: connections that wait to be accepted.

    Raises:
        UntrustedFile: somebody else could put another socket in its place.
        FileExistsError: what is there is no socket.
        OSError: with EADDRINUSE, somebody listens there; or it cannot be listened at.
    """
    if reason := unsafe_above(path):
        raise UntrustedFile(reason)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "it is there, and is no socket: it is not replaced")
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)  # one that is stopped, with a full queue, listens as well
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            except BlockingIOError:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from None
            else:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(str(path))
        os.chmod(path, mode)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class StrangerListens(Exception):
    """Somebody listens at a service's socket as whom it would not run; the text says who."""


def connect_to(
    path: Path, kind: socket.SocketKind, timeout_s: float, services: Collection[int | None] = ()
) -> socket.socket:
    """Connect to a service; see `stranger_at` for who may be one.

    Args:
        path: of its socket.
        kind: of the connection.
        timeout_s: at most; sending has the same timeout then.
        services: more users that it may run as.

    Raises:
        StrangerListens: it is another user's.
        OSError: nobody listens, or not in time.
    """
    connection = socket.socket(socket.AF_UNIX, kind)
    try:
        # Where many connect, the kernel has each wait for its turn (unix(7)). With a timeout of Python's it would say
        # at once that there is no room. 0 would be no limit.
        limit = _TIMEVAL.pack(*divmod(max(1, int(timeout_s * 1e6)), 10**6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.connect(str(path))
        if (uid := stranger_at(path, connection, services)) is not None:
            raise StrangerListens(f"user {uid}")
    except BaseException:
        connection.close()
        raise
    return connection


def stranger_at(path: Path, connection: socket.socket, services: Collection[int | None] = ()) -> int | None:
    """Return the user at the other end of a connection, if he is none that the service may run as; None: he may be
    believed.

    A service runs as root, as this user, as one that is named, or as the user to whom root has given the directory of
    its socket: in a directory that is his, below directories that are root's, nobody else can listen (systemd's
    RuntimeDirectory=, for a service with User= or DynamicUser=).

    Args:
        path: of the socket.
        connection: to it.
        services: more users that it may run as.
    """
    uid = peer_of(connection)[1]
    return None if uid in {0, os.geteuid(), *services} or uid == _given_by_root_to(path.parent) else uid


def _given_by_root_to(directory: Path) -> int | None:
    """The only user, beside root, who can make files in a directory that root made; None: there may be others."""
    way = _WayOfRoot()
    try:
        way.go(directory)
        status = os.fstat(way.descriptor)
        return None if way.missing or others_can_write(status, way.descriptor) else status.st_uid
    except OSError:
        return None
    finally:
        os.close(way.descriptor)


class _WayOfRoot(SafeWalk):
    """Looks whether nobody but root can put something in the place of a directory on the way."""

    def check(self, whole: Path) -> None:
        """Look at the directory that was reached, on the way to `whole`.

        Raises:
            UntrustedFile: somebody else can.
        """
        status = os.fstat(self.descriptor)
        if status.st_uid or others_can_write(status, self.descriptor):
            raise UntrustedFile(f"{self.path}, on the way to {whole}, is not root's alone")
