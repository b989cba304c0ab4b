"""A control message as frames of ZeroMQ. Used by the endpoints in `zmq.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.wire.codec import Buffer, chop, decode, encode, join
from hetstream.mpi_dataworkers.wire.messages import Message

# Frames that libzmq takes; larger messages (datasets in pickled form, which are rare) travel in pieces. What a stranger
# can make a process hold is one frame for each connection, until the handshake's time is over: small frames are what
# lets many connections be in their handshake at once.
CONTROL_FRAME_BYTES = 64 << 10
# A loader's number in its process, in decimal digits.
_NUMBER_BYTES = 19
# As plain numbers: pyzmq's enums cost more than the calls that get them.
NO_WAIT, _MORE_FOLLOWS = int(zmq.NOBLOCK), int(zmq.SNDMORE)


def receive(socket: zmq.Socket[Any]) -> list[zmq.Frame]:
    """Take the frames of a message that has come, which `recv_multipart` needs twice the time for.

    Raises:
        zmq.Again: none has come.
    """
    frame = socket.recv(NO_WAIT, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(NO_WAIT, copy=False)
        frames.append(frame)
    return frames


def send(socket: zmq.Socket[Any], frames: Sequence[Buffer]) -> None:
    """Send a message, as `send_multipart` does in more than twice the time.

    Raises:
        zmq.Again: there is no connection, nor one in the making, to queue it for.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE_FOLLOWS | NO_WAIT)
    socket.send(frames[-1], NO_WAIT)


def frames_of(message: Message, loader: int | None) -> list[Buffer]:
    """A control message as it is sent: one frame, and behind it the number of the loader that it is about."""
    first = encode(message)
    frames: list[Buffer] = [first] if loader is None else [first, b"%d" % loader]
    return frames if len(first) < CONTROL_FRAME_BYTES else chop(frames, CONTROL_FRAME_BYTES)


def decode_control(pieces: list[memoryview]) -> tuple[Message, int | None]:
    """Undo `frames_of`.

    Raises:
        ProtocolError: it is none.
    """
    first, *others = join(pieces, CONTROL_FRAME_BYTES) or [b""]
    if not others:
        return decode(first), None
    if len(others) > 1 or not (number := bytes(others[0][:_NUMBER_BYTES])).isdigit():
        raise ProtocolError(
            f"a control message of {len(others) + 1} frames is none: behind the first is a loader's number"
        )
    return decode(first), int(number)
