"""A rank's file: what the real safetensors library reads in it, and that no wrong byte gets past the checksums."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from hetstream.base.files import Directory
from hetstream.checkpoint.disk import rank_file
from hetstream.checkpoint.disk.rank_file import Manifest, PartSpec, RankFile, open_file, write_file
from hetstream.checkpoint.disk.safetensors import FilePlan, Range, plan_file, read_header
from hetstream.checkpoint.errors import DamagedCheckpoint
from hetstream.checkpoint.record.layout import ITEM_BYTES, Generation, TensorSpec
from tests.checkpoint.parts import Record, make_record

# What this safetensors and this torch know both.
TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def write_at(path: Path, plan: FilePlan, payload: memoryview) -> tuple[str, ...]:
    with path.open("wb") as file:
        return write_file(file.fileno(), plan, payload)


def open_at(path: Path, manifest: Manifest, num_threads: int = 1) -> RankFile:
    assert path.name == manifest.part.file_name
    with Directory.open(path.parent) as directory:
        return open_file(directory, manifest, num_threads)


def written(path: Path, record: Record) -> Manifest:
    checksums = write_at(path, record.plan, record.payload)
    return PartSpec(Generation(1, 120), 0, 1, record.layout.digest).manifest(path.stat().st_size, checksums, 0.0)


def test_safetensors_reads_every_dtype_and_odd_sizes(tmp_path: Path) -> None:
    specs = [
        TensorSpec(f"{dtype}.{number}", dtype, shape)
        for dtype in TORCH_DTYPES
        for number, shape in enumerate([(), (0,), (3,), (5, 7), (64, 64), (1, 4099)])
    ]
    record = make_record(1, specs)
    # Bytes that are no bool are not to be read back as one.
    for entry in record.layout.entries:
        if entry.dtype == "BOOL":
            record.payload[entry.offset : entry.offset + entry.num_bytes] = bytes(
                byte & 1 for byte in record.payload[entry.offset : entry.offset + entry.num_bytes]
            )
    path = tmp_path / "rank-00000-of-00001.safetensors"
    written(path, record)
    loaded = load_file(path)
    assert list(loaded)
    assert set(loaded) == {spec.name for spec in specs}
    for spec in specs:
        tensor = loaded[spec.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (TORCH_DTYPES[spec.dtype], spec.shape)
        assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == record.bytes_of(spec.name)
    with safe_open(path, "pt") as file:
        assert file.metadata()["step"] == "120"


def test_the_data_begins_on_a_page_and_large_tensors_are_one_range() -> None:
    record = make_record(2, [TensorSpec(f"layer.{number}", "F32", (64, 64)) for number in range(100)])
    header, *ranges = record.plan.pieces
    assert isinstance(header, bytes)
    assert len(header) % 4096 == 0
    assert ranges == [Range(0, 100 * 64 * 64 * 4)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 40), max_size=3).map(tuple)), max_size=12
    ),
    left_out=st.sets(st.integers(0, 11)),
    large=st.booleans(),
)
@example(shapes=[("BF16", ()), ("C64", (0,))], left_out=set(), large=False)
def test_what_is_read_back_is_what_was_written(
    tmp_path: Path, shapes: list[tuple[str, tuple[int, ...]]], left_out: set[int], large: bool
) -> None:
    specs = [TensorSpec(str(number), *shape) for number, shape in enumerate(shapes)]
    if large:
        specs.insert(len(specs) // 2, TensorSpec("large", "U8", (3 * 4096 + 64,)))
    record = make_record(len(specs), specs)
    wanted = [
        entry
        for number, entry in enumerate(sorted(record.layout.entries, key=lambda entry: entry.offset))
        if number not in left_out
    ]
    path = tmp_path / "rank-00000-of-00001.safetensors"
    plan = plan_file(wanted, {})
    manifest = PartSpec(Generation(1, 1), 0, 1).manifest(plan.num_bytes, write_at(path, plan, record.payload), 0.0)
    with open_at(path, manifest) as file:
        assert {entry.name: bytes(file.bytes_of(entry)) for entry in file.entries} == {
            entry.name: record.bytes_of(entry.name) for entry in wanted
        }
        for entry in file.entries:
            assert entry.offset % ITEM_BYTES[entry.dtype] == 0


def test_pieces_that_lie_differently_in_memory_and_file_are_written_right(tmp_path: Path) -> None:
    record = make_record(3, [TensorSpec("all", "U8", (32 << 20,))])
    pieces = (
        b"x" * 4096,
        Range(0, 9 << 20),
        b"y" * 100,
        Range(4096, 5 << 20),
        Range((20 << 20) + 100, 6 << 20),
        Range(11 << 20, 3),
        b"z" * 4093,
        Range(64, (10 << 20) + 1),
    )
    plan = FilePlan(pieces)
    path = tmp_path / "file"
    write_at(path, plan, record.payload)
    assert path.read_bytes() == b"".join(plan.buffers(record.payload))


def test_a_file_system_that_refuses_direct_writes_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that does not begin on a page is refused by the kernel in the middle of a file, as FUSE may."""
    monkeypatch.setattr(rank_file, "_SYNC_BYTES", 1 << 20)
    data = os.urandom((3 << 20) + 5)
    plan = FilePlan((b"h" * 4096, Range(0, len(data) - 17), Range(11, 5)))
    path = tmp_path / "file"
    write_at(path, plan, memoryview(b"!" + data)[1:])
    assert path.read_bytes() == b"h" * 4096 + data[:-17] + data[11:16]


@pytest.mark.parametrize("at", [0, 7, 9, 4095, 4096, 5000, -1])
def test_a_flipped_bit_is_found_and_its_place_named(tmp_path: Path, at: int) -> None:
    path = tmp_path / "rank-00000-of-00001.safetensors"
    manifest = written(path, make_record(4))
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=rf"{path} .*bytes 0-{len(data) - 1}"):
        open_at(path, manifest)


@pytest.mark.shows("a flipped bit is found, its tensors are named, and the checkpoint before is used")
def test_the_damaged_chunk_and_its_tensors_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file, "CHUNK_BYTES", 8192)
    record = make_record(5, [TensorSpec(f"layer.{number}", "U8", (4096,)) for number in range(10)])
    path = tmp_path / "rank-00000-of-00001.safetensors"
    checksums = write_at(path, record.plan, record.payload)
    manifest = Manifest(1, 1, 0, 1, path.stat().st_size, checksums, "", {}, 0.0, chunk_bytes=8192)
    data = bytearray(path.read_bytes())
    data[4096 * 5 + 9] ^= 0x80
    path.write_bytes(data)
    with pytest.raises(
        DamagedCheckpoint, match=r"1 of 6 chunks, first in bytes 16384-24575 \(tensors layer\.3, layer\.4"
    ):
        open_at(path, manifest, num_threads=2)


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 9000])
def test_a_truncated_or_missing_file_is_refused(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "rank-00000-of-00001.safetensors"
    manifest = written(path, make_record(6))
    os.truncate(path, num_bytes)
    with pytest.raises(DamagedCheckpoint, match=f"has {num_bytes} bytes, {manifest.num_bytes} were written"):
        open_at(path, manifest)
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        open_at(path, manifest)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"a":1}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"__metadata__":[]}',
    ],
)
def test_a_wrong_header_is_refused(header: bytes) -> None:
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    with pytest.raises(DamagedCheckpoint):
        read_header(memoryview(data), "file")
    with pytest.raises(DamagedCheckpoint):
        read_header(memoryview(bytes([255] * 8)), "file")
