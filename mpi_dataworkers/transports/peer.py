"""What the kernel says of the process at the other end of a Unix socket. Used by `shm.py` and `sockets.py`."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def is_own_user(connection: socket.socket) -> bool:
    """Whether the peer runs as this process's user (SO_PEERCRED, unix(7))."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())
