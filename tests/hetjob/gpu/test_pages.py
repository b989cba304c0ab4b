"""Pages: one writer, readers at any time, and nothing that a reader could be hurt with."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from contextlib import closing

import pytest

from hetstream.hetjob.gpu import orders as pages
from hetstream.hetjob.gpu.orders import (
    SIZE_BYTES,
    GpuUse,
    Order,
    Page,
    Statistics,
    Work,
    make_orders,
    make_statistics,
    make_work,
)


@pytest.fixture
def orders() -> Iterator[tuple[Page[Order], int]]:
    page, descriptor = make_orders()
    with closing(page):
        yield page, descriptor
        os.close(descriptor)


@pytest.fixture
def statistics() -> Iterator[tuple[Page[Statistics], mmap.mmap, Page[Statistics]]]:
    """The coordinator's side, the raw memory that the job has, and the job's side."""
    page, descriptor = make_statistics()
    with closing(page), mmap.mmap(descriptor, SIZE_BYTES) as raw:
        job = Page(descriptor, Statistics, writable=True)
        os.close(descriptor)
        with closing(job):
            yield page, raw, job


def test_the_newest_record_is_read(orders: tuple[Page[Order], int]) -> None:
    page, descriptor = orders
    with closing(Page(descriptor, Order, writable=False)) as job:
        assert job.read() is None
        for limit_bytes in range(5):
            order = Order(123, GpuUse.RUN, limit_bytes)
            page.write(order)
            assert job.read() == order


@pytest.mark.shows("a shared GPU's pages are read-only for jobs, and peers are known by the kernel")
def test_a_job_can_only_read_its_orders(orders: tuple[Page[Order], int]) -> None:
    page, descriptor = orders
    page.write(Order(7))
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, SIZE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    with pytest.raises((PermissionError, OSError)):
        os.ftruncate(descriptor, 0)
    # Root may open it anew for writing. The seal keeps out even root, and so a job of the coordinator's own user.
    try:
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    except PermissionError:
        return
    try:
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(again, SIZE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(again)
    assert page.read() == Order(7)


def test_that_the_guaranteed_job_is_busy_is_written_by_it_alone() -> None:
    written, read = make_work()
    try:
        with pytest.raises(PermissionError):
            Page(read, Work, writable=True)
        with closing(Page(read, Work, writable=False)) as reader, closing(Page(written, Work, writable=True)) as writer:
            assert reader.read() is None
            for since_ns in range(1000, 1005):
                writer.write(Work(since_ns))
                assert reader.read() == Work(since_ns)
    finally:
        os.close(written)
        os.close(read)


def test_nobody_can_make_a_page_shorter_below_its_reader() -> None:
    page, descriptor = make_statistics()
    with closing(page):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def test_a_writer_that_dies_in_the_middle_leaves_the_record_before(
    statistics: tuple[Page[Statistics], mmap.mmap, Page[Statistics]],
) -> None:
    page, raw, job = statistics
    job.write(Statistics(boundaries=1))
    before = bytes(raw)
    job.write(Statistics(boundaries=2))
    after = bytes(raw)
    changed = [index for index in range(SIZE_BYTES) if before[index] != after[index]]
    for torn in changed[1::7]:
        raw[:] = after[:torn] + before[torn:]
        assert page.read() == Statistics(boundaries=1)


@pytest.mark.shows("forged statistics and pages harm nobody")
def test_whatever_stands_in_a_page_reading_it_does_no_harm(
    statistics: tuple[Page[Statistics], mmap.mmap, Page[Statistics]],
) -> None:
    page, raw, job = statistics
    source = random.Random(0)
    job.write(Statistics(boundaries=1))
    whole = bytes(raw)
    for _ in range(300):
        hurt = bytearray(whole)
        for _ in range(source.randrange(1, 4)):
            hurt[SIZE_BYTES // 2 + source.randrange(0, 120)] ^= 1 << source.randrange(8)
        raw[:] = bytes(hurt)
        assert page.read() in (None, Statistics(boundaries=1))
    raw[:] = source.randbytes(SIZE_BYTES)
    assert page.read() is None


def test_a_record_of_another_version_is_none(
    statistics: tuple[Page[Statistics], mmap.mmap, Page[Statistics]], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, _, job = statistics
    monkeypatch.setattr(pages, "VERSION", pages.VERSION + 1)
    job.write(Statistics(boundaries=1))
    monkeypatch.undo()
    assert page.read() is None
