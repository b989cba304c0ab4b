"""Who is at the other end of a connection, as far as the kernel says, and how many strangers may be there."""

from __future__ import annotations

import os
import resource
import socket
import struct
import time

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
# A connection that cannot be taken stays, and with it the listener's readiness: without a pause the thread would spin.
_PAUSE_S = 0.01


def most_unproven(most: int) -> int:
    """How many connections that have not proved the key a process keeps: an eighth of the descriptors that it may have
    at most, since each takes one, and the training program needs them.

    Args:
        most: where there are many.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // 8))


def is_own_user(connection: socket.socket) -> bool:
    """Whether the peer runs as this process's user (SO_PEERCRED, unix(7))."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())


def accept_peer(listener: socket.socket) -> socket.socket | None:
    """Take a connection, not blocking; over a Unix socket only from this process's user.

    Returns:
        None when there is none to take: it has ended already, is another user's, or this process has too many files
        open. Then the data worker comes by another rail, or later.
    """
    try:
        accepted, _ = listener.accept()
    except (BlockingIOError, ConnectionError):
        return None
    except OSError:
        time.sleep(_PAUSE_S)
        return None
    accepted.setblocking(False)
    if accepted.family == socket.AF_UNIX and not is_own_user(accepted):
        accepted.close()
        return None
    return accepted
