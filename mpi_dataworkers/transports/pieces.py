"""A message on a socket: its length, and then what `extents.lay_out` makes of its frames, as pieces for sendmsg(2).

Used by `sockets.py`. Pure; the tensors stay where they lie.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hetstream.mpi_dataworkers.transports.extents import lay_out
from hetstream.mpi_dataworkers.wire.codec import ALIGN_BYTES, Buffer, Leaf, in_one_piece, in_pieces, size_of

LENGTH = struct.Struct("<Q")
_PADDING = bytes(ALIGN_BYTES)


def pieces_of(frames: Sequence[Leaf]) -> list[Buffer]:
    """A message as it is sent, with the tensors where they lie."""
    sizes = [size_of(frame) for frame in frames]
    table, offsets, total = lay_out(sizes)
    pieces: list[Buffer] = [b"".join((LENGTH.pack(total), table, in_one_piece(frames[0])))]
    end = len(table) + sizes[0]
    for frame, offset, size in zip(frames[1:], offsets[1:], sizes[1:], strict=True):
        if offset > end:
            pieces.append(_PADDING[: offset - end])
        if size:
            pieces += in_pieces(frame)
        end = offset + size
    return pieces


def left_of(pieces: list[Buffer], num_sent: int) -> list[Buffer]:
    """What is left of pieces of which so many bytes were sent."""
    for index, piece in enumerate(pieces):
        if num_sent < len(piece):
            return [memoryview(piece)[num_sent:], *pieces[index + 1 :]]
        num_sent -= len(piece)
    return []
