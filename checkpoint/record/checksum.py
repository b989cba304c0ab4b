"""Checksums of what is saved: XXH3 with 64 bits, as fast as memory is read. The home of xxhash in this package.

They find flipped and missing bits; they do not prove who wrote them. Large buffers are read without the GIL.
"""

from __future__ import annotations

import xxhash

Bytes = bytes | bytearray | memoryview


class Checksum:
    """A checksum that grows with what is written."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, data: Bytes) -> None:
        """Take in the next bytes."""
        self._state.update(data)

    @property
    def value(self) -> int:
        """Of all bytes so far; below 2**64."""
        return self._state.intdigest()


def checksum(data: Bytes) -> int:
    """Of bytes that are all here; below 2**64."""
    return xxhash.xxh3_64_intdigest(data)
