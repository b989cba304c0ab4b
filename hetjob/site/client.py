"""Ask the site daemon one question. Used by the thread of `link.py` and by `hetstream daemon status`.

Every wait has a deadline. Nothing here decides anything.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from dataclasses import dataclass

from hetstream.base.unix_sockets import stranger_at
from hetstream.hetjob.errors import SiteClosed, SiteError
from hetstream.hetjob.site.address import SiteSettings, TcpAddress, UnixAddress
from hetstream.hetjob.site.messages import (
    LENGTH,
    MAX_ANSWER_BYTES,
    Answer,
    Question,
    decode_answer,
    encode_request,
    new_request,
)
from hetstream.hetjob.site.munge import Munge

DEFAULT_LIMIT_S = 5.0


def ask(settings: SiteSettings, question: Question, limit_s: float = DEFAULT_LIMIT_S) -> Answer:
    """Ask, and wait for the answer.

    Args:
        settings: with an address.
        question: what to ask.
        limit_s: for all of it together.

    Raises:
        SiteError: no answer within the limit, or none that can be trusted.
        ConfigError: the daemon's user is unknown here.
    """
    deadline = _Deadline(time.monotonic() + limit_s)
    address = settings.address
    if address is None:
        raise SiteError("no address of a site daemon is set")
    request = new_request(question, time.time_ns())
    data = encode_request(request)
    if isinstance(address, TcpAddress):
        data = Munge(settings.munge_socket).encode(data, address.reader_uid(), deadline.left_s())
    try:
        with _connected(address, deadline) as connection:
            connection.settimeout(deadline.left_s())
            connection.sendall(LENGTH.pack(len(data)) + data)
            (length,) = LENGTH.unpack(_read(connection, LENGTH.size, deadline))
            if length > MAX_ANSWER_BYTES:
                raise SiteError(f"an answer of {length} bytes is announced: at most {MAX_ANSWER_BYTES} are read")
            return decode_answer(_read(connection, length, deadline), request.reply_key)
    except OSError as error:
        raise SiteError(f"{address} does not answer: {error.strerror or error}") from error


# struct timeval: seconds, microseconds.
_TIMEVAL = struct.Struct("@ll")


@dataclass(frozen=True)
class _Deadline:
    at_s: float

    def left_s(self) -> float:
        left_s = self.at_s - time.monotonic()
        if left_s <= 0:
            raise SiteError("the site daemon took too long to answer")
        return left_s


def _connected(address: UnixAddress | TcpAddress, deadline: _Deadline) -> socket.socket:
    if isinstance(address, TcpAddress):
        return socket.create_connection((address.host, address.port), deadline.left_s())
    connection = socket.socket(socket.AF_UNIX)
    try:
        # Where many connect, the kernel has each wait for its turn (unix(7)); a timeout of Python's would be told at
        # once that there is no room.
        left_us = max(1, int(deadline.left_s() * 1e6))  # 0 would be no limit
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(left_us, 10**6)))
        connection.connect(str(address.path))
        uid = stranger_at(address.path, connection)
        if uid is not None:
            raise SiteError(
                f"user {uid} listens at {address}, who is neither root nor user {os.geteuid()}, nor has root given "
                f"{address.path.parent} to him alone: he is not asked"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, count: int, deadline: _Deadline) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(deadline.left_s())
        part = connection.recv(min(65536, count - len(data)))
        if not part:
            raise SiteClosed(
                "the site daemon closed the connection: it does not know who asks, could not read the question, or is "
                "of another release of hetstream; its log says which"
            )
        data += part
    return bytes(data)
