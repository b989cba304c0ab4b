"""Limits of memory and processor time."""

from __future__ import annotations

import resource

import pytest

from hetstream.base.limits import TimeExceeded, limited


def test_memory_beyond_the_limit_is_an_error_and_the_limit_ends_with_the_block() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited(64 << 20, 60), pytest.raises(MemoryError):
        bytearray(1 << 30)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(bytearray(1 << 28)) == 1 << 28


def test_time_beyond_the_limit_is_an_error() -> None:
    before = resource.getrlimit(resource.RLIMIT_CPU)

    def work() -> None:
        number = 0
        while True:
            number += 1

    with limited(1 << 30, 1), pytest.raises(TimeExceeded):
        work()
    assert resource.getrlimit(resource.RLIMIT_CPU) == before
