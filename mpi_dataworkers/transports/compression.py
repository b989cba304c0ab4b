"""Batches made smaller for slow networks, with Zstandard at its fastest level, where that is worth the time. Pure.

Used by `sockets.py` on TCP when the loader asks for it. One core compresses some 100 to 300 MB/s, so it pays on links
of 1 Gbit/s and below, for data that is much alike (masks, token ids), and never for decoded photographs: a frame is
compressed only if a sample of it shrinks well.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.wire.codec import Buffer, aligned

try:
    import zstandard
except ImportError:  # an optional extra: without it nothing is compressed
    zstandard = None  # type: ignore[assignment]

IS_AVAILABLE = zstandard is not None
_LEVEL = 1
# Smaller frames are not worth the call.
_LEAST_BYTES = 16 << 10
_SAMPLE_BYTES = 64 << 10
# A frame is compressed if the sample shrinks to less than this.
_WORTH_RATIO = 0.7


def compress(frames: Sequence[Buffer]) -> tuple[list[Buffer], list[int]]:
    """Compress the frames that shrink well.

    Returns:
        The frames to send, and for each its size before, or -1 where it is sent as it was.
    """
    if not IS_AVAILABLE:
        return list(frames), [-1] * len(frames)
    packer = zstandard.ZstdCompressor(level=_LEVEL)
    sent: list[Buffer] = []
    sizes = []
    for frame in frames:
        view = memoryview(frame)
        start = max(0, (view.nbytes - _SAMPLE_BYTES) // 2)
        sample = view[start : start + _SAMPLE_BYTES]
        if view.nbytes < _LEAST_BYTES or len(packer.compress(sample)) > _WORTH_RATIO * sample.nbytes:
            sent.append(frame)
            sizes.append(-1)
        else:
            sent.append(packer.compress(view))
            sizes.append(view.nbytes)
    return sent, sizes


def decompress(frames: Sequence[Buffer], sizes: Sequence[int]) -> list[Buffer]:
    """Undo `compress`. Takes no more memory than the announced sizes, whatever the frames hold.

    Raises:
        ProtocolError: frames and sizes do not fit, or this side cannot decompress.
    """
    if len(frames) != len(sizes) or not IS_AVAILABLE:
        raise ProtocolError(f"{len(frames)} frames came with {len(sizes)} sizes before compression")
    return [frame if size < 0 else _decompress(frame, size) for frame, size in zip(frames, sizes, strict=True)]


def _decompress(frame: Buffer, size: int) -> memoryview:
    try:
        whole = aligned(size).data
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(frame)) as reader:
            at = 0
            while count := reader.readinto(whole[at:]):
                at += count
            fits = at == size and not reader.read(1)
    except (zstandard.ZstdError, MemoryError, ValueError) as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes cannot be decompressed: {error}") from error
    if not fits:
        raise ProtocolError(f"a frame was to have {size} bytes after decompression, and has not")
    return whole
