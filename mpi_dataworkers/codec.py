"""Bytes of a message and back. Called by the transports; knows no socket.

A message is a list of frames. Frame 0 is the four-byte prefix `HET` + protocol version and the msgpack body; frames
after it are raw tensor bytes. Small tensors share one frame, large ones have a frame of their own and are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mpi_dataworkers.errors import ProtocolError
from mpi_dataworkers.messages import PROTOCOL_VERSION, AnyMessage, Message

Buffer = bytes | bytearray | memoryview

_MAGIC = b"HET"
_PREFIX = _MAGIC + bytes([PROTOCOL_VERSION])
# Below this a copy into a shared frame costs less than a frame: about 10 us a frame at 10 GB/s memcpy.
FUSE_BELOW_BYTES = 64 * 1024
# Tensors in a shared frame start on cache lines, so that vector loads of the receiver stay aligned.
_ALIGN_BYTES = 64

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Frame 0 of a message."""
    return _PREFIX + _encoder.encode(message)


def decode(frame: Buffer) -> AnyMessage:
    """Read frame 0.

    Raises:
        ProtocolError: not hetstream's bytes, another protocol version, truncated, or an unknown message.
    """
    view = memoryview(frame)
    if view.nbytes < len(_PREFIX) or bytes(view[:3]) != _MAGIC:
        raise ProtocolError(
            f"{view.nbytes} bytes starting {bytes(view[:8])!r} are no hetstream message, which starts with {_MAGIC!r}"
        )
    if view[3] != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {view[3]}, this side version {PROTOCOL_VERSION}. Install the same "
            "hetstream release on trainers and data workers (hetstream --version)."
        )
    try:
        message: AnyMessage = _decoder.decode(view[4:])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a message of {view.nbytes} bytes is truncated or malformed: {error}") from error
    return message


def fuse(buffers: Sequence[Buffer]) -> tuple[list[Buffer], list[tuple[int, int, int]]]:
    """Lay leaf buffers out in frames: small ones together, large ones alone and uncopied.

    Returns:
        The frames, and for each buffer (frame, offset, num_bytes); frame numbers count from the first tensor frame.
    """
    small = [memoryview(buffer).nbytes < FUSE_BELOW_BYTES for buffer in buffers]
    frames: list[Buffer] = []
    places: list[tuple[int, int, int]] = []
    shared_bytes = 0
    if any(small):
        frames.append(b"")
    for buffer, is_small in zip(buffers, small, strict=True):
        num_bytes = memoryview(buffer).nbytes
        if is_small:
            places.append((0, shared_bytes, num_bytes))
            shared_bytes += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        else:
            places.append((len(frames), 0, num_bytes))
            frames.append(buffer)
    if any(small):
        shared = bytearray(shared_bytes)
        for buffer, is_small, (_, offset, num_bytes) in zip(buffers, small, places, strict=True):
            if is_small:
                shared[offset : offset + num_bytes] = memoryview(buffer).cast("B") if num_bytes else b""
        frames[0] = shared
    return frames, places


def split(frames: Sequence[Buffer], places: Sequence[tuple[int, int, int]]) -> list[memoryview]:
    """Undo `fuse`: views of each buffer, without a copy.

    Raises:
        ProtocolError: a place lies outside its frame (a truncated message).
    """
    views = [memoryview(frame).cast("B") if memoryview(frame).nbytes else memoryview(b"") for frame in frames]
    result = []
    for frame, offset, num_bytes in places:
        inside = 0 <= frame < len(views) and min(offset, num_bytes) >= 0
        if not inside or offset + num_bytes > views[frame].nbytes:
            have = [view.nbytes for view in views]
            raise ProtocolError(
                f"a batch names {num_bytes} bytes at {offset} of frame {frame}, but its frames have {have} bytes: "
                "the message is truncated."
            )
        result.append(views[frame][offset : offset + num_bytes])
    return result
