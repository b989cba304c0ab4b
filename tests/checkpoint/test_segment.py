"""Slot files: what a process can read in them when their writer stopped at any byte, and when they are no slots."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.base.errors import OptionsError
from hetstream.checkpoint import locks
from hetstream.checkpoint.errors import DamagedSegment
from hetstream.checkpoint.memory.segment import (
    PAGE_BYTES,
    Segment,
    State,
    file_bytes,
    join_metadata,
    read_header,
    split_metadata,
)
from hetstream.checkpoint.record.layout import Generation

DIGEST = "0123456789abcdef" * 2
PAYLOAD = random.Random(1).randbytes(3 * PAGE_BYTES + 17)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slot-0"


@pytest.fixture
def complete(path: Path) -> Iterator[Segment]:
    with Segment.create(path, len(PAYLOAD), 100) as segment:
        fill(segment, Generation(2, 120), 7)
        yield segment


def fill(segment: Segment, generation: Generation, serial: int) -> None:
    segment.begin(len(PAYLOAD))
    segment.payload[:] = PAYLOAD
    segment.publish(generation, serial, DIGEST, b"metadata")


def test_another_mapping_sees_what_was_published(complete: Segment, path: Path) -> None:
    assert path.stat().st_size == file_bytes(len(PAYLOAD), 100)
    assert path.stat().st_mode & 0o777 == 0o600
    with Segment.open(path) as read:
        header = read.header
        assert (header.state, header.generation, header.serial) == (State.COMPLETE, Generation(2, 120), 7)
        assert (header.layout_digest, header.payload_bytes) == (DIGEST, len(PAYLOAD))
        assert read.metadata == b"metadata"
        assert bytes(read.payload) == PAYLOAD
        assert read.payload.readonly
        assert read_header(path) == header


def test_the_payload_begins_on_a_page(complete: Segment, path: Path) -> None:
    assert path.read_bytes().index(PAYLOAD) % PAGE_BYTES == 0


def test_a_payload_may_be_smaller_than_its_room_and_not_larger(complete: Segment) -> None:
    complete.begin(5)
    assert complete.payload.nbytes == 5
    with pytest.raises(OptionsError):
        complete.begin(len(PAYLOAD) + PAGE_BYTES)


def test_metadata_that_does_not_fit_is_refused_before_anything_is_published(complete: Segment, path: Path) -> None:
    complete.begin(1)
    with pytest.raises(OptionsError, match="metadata"):
        complete.publish(Generation(2, 130), 8, DIGEST, bytes(PAGE_BYTES + 1))
    assert read_header(path).state == State.WRITING


def test_a_slot_that_is_being_written_can_be_taken_over_and_not_read(complete: Segment, path: Path) -> None:
    complete.begin(10)
    with pytest.raises(DamagedSegment, match=r"slot-0.*WRITING"):
        Segment.open(path)
    with Segment.open(path, writable=True) as taken:
        taken.begin(3)
        taken.payload[:] = b"new"
        taken.publish(Generation(3, 1), 9, DIGEST, b"")
    with Segment.open(path) as read:
        assert bytes(read.payload) == b"new"


def test_an_abandoned_slot_is_empty(complete: Segment, path: Path) -> None:
    complete.begin(10)
    complete.abandon()
    assert read_header(path).state == State.EMPTY


@pytest.mark.parametrize("writable", [False, True])
def test_populating_changes_nothing(complete: Segment, path: Path, writable: bool) -> None:
    with Segment.open(path, writable) as segment:
        before = path.read_bytes()
        segment.populate()
        assert path.read_bytes() == before


@pytest.mark.parametrize("writable", [False, True])
def test_populating_on_a_kernel_without_the_advice(
    complete: Segment, path: Path, writable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(mapping: mmap.mmap, offset: int, num_bytes: int, _how: int) -> bool:
        return locks.populate(mapping, offset, num_bytes, 9999)  # type: ignore[arg-type]

    monkeypatch.setattr("hetstream.checkpoint.memory.segment.populate", unknown)
    test_populating_changes_nothing(complete, path, writable)


def test_views_outlive_a_close(complete: Segment, path: Path) -> None:
    segment = Segment.open(path)
    view = segment.payload
    segment.close()
    segment.close()
    assert bytes(view) == PAYLOAD


@pytest.mark.shows("SIGKILL at any point of a save leaves the newest generation whole")
def test_a_header_torn_at_any_byte_is_refused(complete: Segment, path: Path) -> None:
    old = path.read_bytes()[:200]
    fill(complete, Generation(2, 130), 8)
    new = path.read_bytes()[:200]
    differing = [place for place in range(200) if old[place] != new[place]]
    for end in range(differing[0] + 1, differing[-1] + 1):
        with path.open("r+b") as file:
            file.write(new[:end] + old[end:])
        with pytest.raises(DamagedSegment, match="slot-0"):
            Segment.open(path)


def test_damaged_metadata_is_refused(complete: Segment, path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(PAGE_BYTES)
        file.write(b"M")
    with pytest.raises(DamagedSegment, match="metadata of step 120 of attempt 2"):
        Segment.open(path)


@pytest.mark.parametrize("size", [0, 100, PAGE_BYTES - 1, PAGE_BYTES, file_bytes(len(PAYLOAD), 100) - 1])
def test_a_short_file_is_refused(complete: Segment, path: Path, size: int) -> None:
    short = path.with_name("short")
    short.write_bytes(path.read_bytes()[:size])
    for read in (Segment.open, read_header):
        with pytest.raises(DamagedSegment, match="short"):
            read(short)


def test_a_file_of_another_version_is_named(complete: Segment, path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(12)
        file.write(b"\x09")
    with pytest.raises(DamagedSegment, match="version 9"):
        Segment.open(path)


def test_a_file_that_outlived_a_restart_of_the_host_is_refused(
    complete: Segment, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetstream.checkpoint.memory.segment.boot_id", lambda: bytes(16))
    with pytest.raises(DamagedSegment, match="last start"):
        Segment.open(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_another_users_file_is_refused(complete: Segment, path: Path) -> None:
    os.chown(path, 65534, 65534)
    with pytest.raises(DamagedSegment, match="user 65534"):
        Segment.open(path)


def test_a_file_that_others_may_write_to_is_refused(complete: Segment, path: Path) -> None:
    path.chmod(0o666)
    with pytest.raises(DamagedSegment, match="666"):
        Segment.open(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: None], ids=["directory", "pipe", "nothing"])
def test_what_is_no_file_is_refused(path: Path, make: object) -> None:
    make(path)  # type: ignore[operator]
    with pytest.raises(DamagedSegment, match="slot-0"):
        Segment.open(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_arbitrary_bytes_never_crash_a_reader(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "slot-0"
    with Segment.create(path, 100, 100) as segment:
        segment.begin(100)
        segment.publish(Generation(1, 1), 1, DIGEST, join_metadata(b"{}", b"{}"))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, 200) | st.integers(0, len(raw) - 1))
        chunk = data.draw(st.binary(min_size=1, max_size=16))
        raw[place : place + len(chunk)] = chunk
    path.write_bytes(raw[: data.draw(st.just(len(raw)) | st.integers(0, len(raw)))])
    for writable in (False, True):
        try:
            with Segment.open(path, writable) as segment:
                assert segment.payload.nbytes <= 100
                split_metadata(segment.metadata)
        except DamagedSegment:
            pass


@given(st.binary(max_size=64))
def test_metadata_of_any_bytes_is_split_or_refused(data: bytes) -> None:
    try:
        layout, structure = split_metadata(data)
    except DamagedSegment:
        return
    assert join_metadata(layout, structure) == data
