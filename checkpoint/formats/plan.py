"""What a file will hold, before a byte of it is written. Each format makes one; the checkpoint writer writes any of
them.

Pure. The payload is named by its place in the record's payload and not copied, so that the checkpoint writer writes
large tensors straight from shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Bytes of the record's payload that go into the file as they are.

    Attributes:
        offset: where they begin in the payload, in bytes.
        num_bytes: how many.
    """

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class FilePlan:
    """All bytes of a file, in order.

    Attributes:
        pieces: bytes of the format's own, and ranges of the payload.
    """

    pieces: tuple[bytes | Range, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return sum(piece.num_bytes if isinstance(piece, Range) else len(piece) for piece in self.pieces)

    def buffers(self, payload: memoryview) -> Iterator[memoryview]:
        """The pieces as memory, uncopied.

        Args:
            payload: the record's payload, as bytes.
        """
        for piece in self.pieces:
            yield (
                payload[piece.offset : piece.offset + piece.num_bytes]
                if isinstance(piece, Range)
                else memoryview(piece)
            )
