"""Who is at the other end of a connection, as far as the kernel says, and how many strangers may be there."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time

from hetstream.base.places import Places
from hetstream.base.unix_sockets import peer_of

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
    return peer_of(connection)[1] == os.geteuid()


def accept_peer(listener: socket.socket) -> socket.socket | None:
    """Take a connection, not blocking; over a Unix socket only from this process's user.

    Returns:
        None when there is none to take: it has ended already, is another user's, or this process has too many files
        open. Then the data worker comes by another transport, or later.
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


def _address_of(connection: socket.socket) -> str:
    """The host at the other end; "" of one that is gone."""
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return ""


class Newcomers:
    """Connections that libzmq has accepted and that have brought no message: strangers, or peers in their handshake.

    libzmq sets them a time but no number. Each is held by a descriptor of our own, because libzmq's may be another
    connection's by the time that we use it, and what is shut down must not be a peer's.

    Args:
        most: of them; the oldest of the address with the most make room.
    """

    def __init__(self, most: int) -> None:
        self._held: dict[int, socket.socket] = {}  # by libzmq's descriptor
        self._places: Places[int] = Places(most)

    def came(self, descriptor: int) -> None:
        """libzmq has accepted a connection. If it is closed already, `gone` follows before the next `make_room`."""
        self.gone(descriptor)
        with contextlib.suppress(OSError):
            newcomer = self._held[descriptor] = socket.socket(fileno=os.dup(descriptor))
            self._places.enter(descriptor, _address_of(newcomer))

    def gone(self, descriptor: int) -> None:
        """It has closed, or brought a message."""
        self._places.leave(descriptor)
        if (newcomer := self._held.pop(descriptor, None)) is not None:
            newcomer.close()

    def make_room(self) -> None:
        """End those that are too many. Call it when nothing is left to be read of the monitor."""
        while (descriptor := self._places.one_too_many()) is not None:
            with contextlib.suppress(OSError):
                self._held[descriptor].shutdown(socket.SHUT_RDWR)
            self.gone(descriptor)

    def close(self) -> None:
        """Let go of all."""
        for descriptor in list(self._held):
            self.gone(descriptor)
