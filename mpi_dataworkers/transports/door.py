"""Watches connections that have not shown a ticket yet, and cuts those that are no data worker's. Used by `zmq.py`.

ZeroMQ reads the first frame of a stranger before it asks who he is, up to the length that batches may have. A data
worker sends some hundred bytes before it is let in and answered; whoever sends more, or is another user of this host,
is cut off. The door only looks at sockets: it never reads from one.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Sequence

_log = logging.getLogger(__name__)

# How often to look while there are strangers, s: what they can send in that time is what they can make a process hold.
LOOK_S = 0.01
# A ticket with all that ZeroMQ puts around it is a tenth of this.
_MAX_BYTES = 4 << 10
# Data workers come in by the hundreds at most; the oldest make room.
_MAX_STRANGERS = 1024
# Where `tcpi_bytes_received` is in struct tcp_info (linux/tcp.h, since 4.1).
_BYTES_RECEIVED = struct.Struct("128xQ")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Door:
    """The connections of one receiver that nobody knows yet.

    Args:
        addresses: where the receiver is bound; only connections to these are ever cut.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._strangers: dict[int, None] = {}  # descriptors, in order of arrival
        self._told = False

    def __len__(self) -> int:
        return len(self._strangers)

    def came(self, descriptor: int) -> None:
        """A connection was accepted."""
        self._strangers.pop(descriptor, None)
        self._strangers[descriptor] = None

    def spoke(self, descriptor: int) -> None:
        """A message came by a connection, so its ticket is good; or it is closed."""
        self._strangers.pop(descriptor, None)

    def look(self) -> None:
        """Cut off who is no data worker."""
        surplus = len(self._strangers) - _MAX_STRANGERS
        for number, descriptor in enumerate(list(self._strangers)):
            # A copy stays the same connection, whatever the descriptor is used for meanwhile.
            try:
                connection = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                del self._strangers[descriptor]
                continue
            with connection:
                if _address_of(connection) not in self._addresses:
                    del self._strangers[descriptor]
                elif why := "it is one of too many" if number < surplus else _objection(connection):
                    del self._strangers[descriptor]
                    self._cut(connection, why)

    def _cut(self, connection: socket.socket, why: str) -> None:
        if not self._told:
            self._told = True
            _log.warning("hetstream: cut a connection to the batch socket off: %s; others like it are not told", why)
        try:
            # So that ZeroMQ's close drops at once what is on its way.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has just ended by itself


def _address_of(connection: socket.socket) -> str:
    """Its own end, as `zmq.py` writes addresses; "" where it has none like that."""
    try:
        name = connection.getsockname()
    except OSError:
        return ""
    if connection.family == socket.AF_INET:
        return f"tcp://{name[0]}:{name[1]}"
    if connection.family == socket.AF_UNIX and isinstance(name, bytes):
        return f"ipc://{name.decode(errors='replace').replace(chr(0), '@', 1)}"
    return ""


def _objection(connection: socket.socket) -> str:
    """Why it is no data worker's, or ""."""
    try:
        if connection.family == socket.AF_UNIX:
            told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            uid = _CREDENTIALS.unpack(told)[1]
            return "" if uid in (os.getuid(), 0) else f"user {uid} of this host"
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
    except OSError:
        return ""
    num_bytes = _BYTES_RECEIVED.unpack(info)[0] if len(info) == _BYTES_RECEIVED.size else 0
    return f"{num_bytes} bytes before a ticket" if num_bytes > _MAX_BYTES else ""
