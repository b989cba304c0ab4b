"""The free parts of a pool, and the layout of a message in it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.transports.base import PAGE_BYTES, Extents, find_frames, lay_out

CAPACITY = 64 * PAGE_BYTES


@given(st.lists(st.tuples(st.integers(0, 20 * PAGE_BYTES), st.integers(0, 100)), max_size=80))
def test_extents_never_overlap_and_all_come_back(moves: list[tuple[int, int]]) -> None:
    extents = Extents(CAPACITY)
    taken: dict[int, int] = {}
    for size, which in moves:
        if which % 3 == 0 and taken:
            offset = sorted(taken)[which % len(taken)]
            extents.give_back(offset)
            del taken[offset]
        elif which % 5 == 0 and taken:
            offset = sorted(taken)[which % len(taken)]
            taken[offset] = min(size, taken[offset])
            extents.shorten(offset, taken[offset])
        elif (offset := extents.take(size)) is not None:
            assert offset % PAGE_BYTES == 0
            assert offset + size <= CAPACITY
            assert all(offset + size <= other or other + length <= offset for other, length in taken.items())
            taken[offset] = size
    assert extents.num_taken() == len(taken)
    for offset in taken:
        extents.give_back(offset)
    assert extents.take(CAPACITY) == 0, "free parts grow together again"


def test_memory_in_use_is_used_again_first() -> None:
    extents = Extents(CAPACITY)
    first, second = extents.take(5000), extents.take(5000)
    assert (first, second) == (0, 2 * PAGE_BYTES)
    extents.give_back(0)
    assert extents.take(5000) == 0
    assert extents.take(CAPACITY) is None
    extents.shorten(0, PAGE_BYTES)
    assert extents.take(5) == PAGE_BYTES
    with pytest.raises(ProtocolError, match="given back, but none begins there"):
        extents.give_back(3 * PAGE_BYTES)
    with pytest.raises(ProtocolError, match="was given back before it was sent"):
        extents.shorten(3 * PAGE_BYTES, 1)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=10))
def test_frames_are_found_where_they_were_laid(sizes: list[int]) -> None:
    table, offsets, total = lay_out(sizes)
    whole = bytearray(total)
    whole[: len(table)] = table
    for number, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        whole[offset : offset + size] = bytes([number + 1]) * size
        assert number == 0 or offset % 64 == 0
    assert [bytes(view) for view in find_frames(memoryview(whole))] == [
        bytes([number + 1]) * size for number, size in enumerate(sizes)
    ]
    for wrong in (whole[:-1], whole + b"x", whole[:11]):
        with pytest.raises(ProtocolError):
            find_frames(memoryview(wrong))


@given(st.binary(max_size=200))
def test_random_bytes_never_do_more_than_raise(junk: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        find_frames(memoryview(junk))
