"""The model of PyTorch's caching allocator: its rules, what others have published, and histories of real ones."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.allocator_trace import exported, read_trace, replay
from hetstream.base.errors import HetstreamError
from hetstream.hetjob.gpu.emulation import PYTORCH, Allocator, AllocatorRules, Block, Place

KIB, MIB = 2**10, 2**20
# What a machine with a GPU has recorded: `python -m benchmarks.gpu_sharing --systems allocator` makes such a file.
RECORDED = sorted((Path(__file__).parent / "fixtures").glob("allocator_*.json"))


class Gpu:
    """All of its memory in one number."""

    def __init__(self, free_bytes: int = 1 << 40) -> None:
        self.free_bytes = self.capacity_bytes = free_bytes

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    def take(self, num_bytes: int) -> bool:
        if num_bytes > self.free_bytes:
            return False
        self.free_bytes -= num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        self.free_bytes += num_bytes


def allocator_of(gpu: Gpu, **more: Any) -> Allocator:
    return Allocator(gpu.take, gpu.give, **more)


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (0, 512, 2 * MIB), (1, 512, 2 * MIB), (512, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB), (10 * MIB - 512, 10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB), (100 * MIB, 100 * MIB, 100 * MIB),
    ],
)  # fmt: skip
def test_sizes_of_blocks_and_segments_are_pytorchs(asked: int, block: int, segment: int) -> None:
    gpu = Gpu()
    assert allocator_of(gpu).allocate(asked).num_bytes == block
    assert gpu.used_bytes == segment


def test_a_large_block_is_split_only_if_more_than_a_small_one_is_left() -> None:
    gpu = Gpu()
    allocator = allocator_of(gpu)
    allocator.free(allocator.allocate(12 * MIB))
    assert allocator.allocate(11 * MIB).num_bytes == 12 * MIB  # 1 MiB would be left
    allocator.allocate(2 * MIB)
    assert gpu.used_bytes == 32 * MIB
    small = allocator.allocate(MIB - 512)
    assert (small.num_bytes, gpu.used_bytes) == (MIB - 512, 34 * MIB)
    allocator.allocate(MIB)
    allocator.allocate(512)  # a small block is split to the last
    assert gpu.used_bytes == 34 * MIB


def test_the_smallest_block_that_is_large_enough_is_used_and_free_neighbours_become_one() -> None:
    gpu = Gpu()
    allocator = allocator_of(gpu)
    blocks = [allocator.allocate(size * MIB) for size in (3, 5, 4, 8)]
    assert gpu.used_bytes == 20 * MIB
    allocator.free(blocks[1])
    allocator.free(blocks[3])
    assert allocator.allocate(5 * MIB).address == blocks[1].address
    allocator.free(blocks[2])
    assert allocator.allocate(9 * MIB + 512 * KIB).address == 8 * MIB  # 4 and 8 MiB in one
    assert gpu.used_bytes == 20 * MIB


def test_small_and_large_requests_never_share_a_segment() -> None:
    gpu = Gpu()
    allocator = allocator_of(gpu)
    allocator.free(allocator.allocate(2 * MIB))
    allocator.allocate(MIB)
    assert gpu.used_bytes == 22 * MIB


def test_cached_segments_are_given_back_whole_or_not_at_all() -> None:
    gpu = Gpu()
    allocator = allocator_of(gpu)
    kept, gone = allocator.allocate(3 * MIB), allocator.allocate(4 * MIB)
    own = allocator.allocate(30 * MIB)
    allocator.free(gone)
    allocator.free(own)
    assert allocator.release_cached() == 30 * MIB
    assert gpu.used_bytes == 20 * MIB
    allocator.free(kept)
    assert (allocator.release_cached(), gpu.used_bytes) == (20 * MIB, 0)


def test_a_limit_counts_for_new_segments_alone() -> None:
    gpu = Gpu()
    allocator = allocator_of(gpu, host_capacity_bytes=64 * MIB)
    first = allocator.allocate(30 * MIB)
    allocator.free(first)
    allocator.allocate(12 * MIB)
    allocator.set_limit(16 * MIB)  # nothing is wholly free
    assert allocator.allocate(18 * MIB).place is Place.DEVICE, "what is cached is used without asking"
    assert allocator.allocate(2 * MIB).place is Place.HOST
    use = allocator.memory()
    assert (use.held_bytes, use.peak_bytes, use.host_bytes) == (30 * MIB, 32 * MIB, 2 * MIB)


def test_the_hosts_pool_is_used_before_cached_segments_are_given_back() -> None:
    """As `use_on_oom` is since December 2025: so fragmentation can have tensors on the host beside free cache."""
    gpu = Gpu(30 * MIB)
    allocator = allocator_of(gpu, host_capacity_bytes=16 * MIB)
    allocator.free(allocator.allocate(12 * MIB))
    assert allocator.allocate(14 * MIB).place is Place.DEVICE  # the rest of the GPU
    assert allocator.allocate(13 * MIB).place is Place.HOST
    assert allocator.allocate(13 * MIB).place is Place.DEVICE  # the host is full: now the cache is given back
    with pytest.raises(MemoryError):
        allocator.allocate(13 * MIB)
    without = allocator_of(Gpu(20 * MIB))
    without.free(without.allocate(12 * MIB))
    assert without.allocate(14 * MIB).place is Place.DEVICE


def test_small_tensors_have_their_own_part_of_the_hosts_pool() -> None:
    allocator = allocator_of(Gpu(0), host_capacity_bytes=64 * MIB)
    assert [allocator.allocate(MIB).place for _ in range(4)] == [Place.HOST] * 4
    with pytest.raises(MemoryError, match=r"out of memory: 1,048,576 bytes asked for"):
        allocator.allocate(MIB)
    assert allocator.allocate(50 * MIB).place is Place.HOST


@pytest.mark.shows("a shared GPU has three devices: CUDA, a virtual clock, and a live emulation")
@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_what_others_have_published_of_an_rtx_3090(dtype_bytes: int) -> None:
    """Attention of a UNet, with torch.cuda.memory_snapshot: two tensors of 5 MiB, the scores, something small.

    Of scores with four bytes an element 1,034 MiB were in use and 1,046 reserved: 1,024, 20 and 2. Beside those with
    two, something of four was there for a moment: 1,546 MiB were in use at most, 522 in the end, and 1,558 reserved.
    """
    gpu = Gpu()
    allocator = allocator_of(gpu)
    for _ in range(2):
        allocator.allocate(16 * 4096 * 40 * 2)
    assert (allocator.memory().peak_bytes, gpu.used_bytes) == (10 * MIB, 20 * MIB)
    allocator.allocate(16 * 4096 * 4096 * dtype_bytes)
    if dtype_bytes == 2:
        allocator.free(allocator.allocate(16 * 4096 * 4096 * 4))
        assert allocator.memory().peak_bytes == 1546 * MIB
    allocator.free(allocator.allocate(100))
    assert gpu.used_bytes == {2: 1558, 4: 1046}[dtype_bytes] * MIB
    allocator.begin_mini_batch()
    assert allocator.memory().peak_bytes == {2: 522, 4: 1034}[dtype_bytes] * MIB


SIZES = st.sampled_from([1, 512, 100 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 25 * MIB])


@given(st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=60), st.booleans())
def test_nothing_is_lost_or_given_twice(requests: list[tuple[int, int]], has_host: bool) -> None:
    gpu = Gpu(64 * MIB)
    allocator = allocator_of(gpu, host_capacity_bytes=32 * MIB if has_host else 0)
    blocks: list[Block] = []
    for size, what in requests:
        if what == 0 and blocks:
            allocator.free(blocks.pop(size % len(blocks)))
        elif what == 1:
            allocator.set_limit(size * 3)
        elif what == 2:
            allocator.release_cached()
        else:
            try:
                blocks.append(allocator.allocate(size))
            except MemoryError:
                continue
        assert gpu.used_bytes == allocator.memory().held_bytes
        on_gpu = sum(block.num_bytes for block in blocks if block.place is Place.DEVICE)
        assert on_gpu <= gpu.used_bytes <= gpu.capacity_bytes
        parts = sorted((block.address, block.address + block.num_bytes) for block in blocks)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(parts))
    for block in blocks:
        allocator.free(block)
    allocator.release_cached()
    assert gpu.used_bytes == 0


def test_rules_of_a_small_gpu_have_the_same_proportions() -> None:
    assert AllocatorRules.scaled(20 * MIB) == PYTORCH
    small = AllocatorRules.scaled(MIB)
    assert small.small_bytes == 102 * 512
    assert [small.segment_for(size) for size in (512, small.small_bytes + 512, MIB // 2)] == [
        2 * small.small_bytes, MIB, -(-MIB // 2 // (2 * small.small_bytes)) * 2 * small.small_bytes,
    ]  # fmt: skip


# In the form of torch.cuda.memory._snapshot(), as PyTorch documents it.
FRAME = {"filename": "train.py", "line": 1, "name": "<module>"}


def snapshot_of(*entries: tuple[str, int, int], reserved: int = 22 * MIB) -> dict[str, Any]:
    trace = [
        {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1, "frames": [FRAME]}
        for action, addr, size in entries
    ]
    segments = [{"device": 0, "address": 1, "total_size": reserved, "stream": 0, "blocks": []}]
    return {"segments": segments, "device_traces": [trace], "allocator_settings": {}}


HISTORY = (
    ("segment_alloc", 0x1000, 2 * MIB), ("alloc", 0x1000, 8), ("segment_alloc", 0x9000, 20 * MIB),
    ("alloc", 0x9000, 3 * MIB), ("alloc", 0xA000, 4 * MIB), ("free_requested", 0x9000, 3 * MIB),
    ("free_completed", 0x9000, 3 * MIB), ("alloc", 0x9000, 2 * MIB + 1), ("snapshot", 0, 0),
)  # fmt: skip


def test_a_history_is_exported_without_the_programs_lines_and_replayed() -> None:
    text = exported(snapshot_of(*HISTORY), 0, "made up")
    assert b"train.py" not in text
    trace = read_trace(text)
    assert (trace.source, trace.reserved_bytes) == ("made up", 22 * MIB)
    found = replay(trace)
    assert (found.num_requests, found.num_alike) == (4, 4)
    assert (found.most_bytes, found.model_most_bytes) == (found.end_bytes, found.model_end_bytes) == (22 * MIB,) * 2


def test_a_history_that_the_model_does_not_follow_shows() -> None:
    odd = (("segment_alloc", 0x1000, 4 * MIB), ("alloc", 0x1000, 8), ("alloc", 0x2000, 3 * MIB))
    found = replay(read_trace(exported(snapshot_of(*odd), 0, "made up")))
    assert (found.num_requests, found.num_alike) == (2, 0)
    assert (found.end_bytes, found.model_end_bytes) == (4 * MIB, 22 * MIB)


def test_segments_are_given_back_when_the_real_allocator_gave_them() -> None:
    more = (*HISTORY, *((action, addr, size) for addr, size in ((0x9000, 2 * MIB + 1), (0xA000, 4 * MIB))
                        for action in ("free_completed",)), ("segment_free", 0x9000, 20 * MIB))  # fmt: skip
    found = replay(read_trace(exported(snapshot_of(*more), 0, "made up")))
    assert found.end_bytes == found.model_end_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ((("segment_map", 1, 2 * MIB),), "expandable segments"),
        ((("free_completed", 1, 8),), "begins in the middle"),
    ],
)
def test_a_history_that_the_model_has_no_rules_for_is_refused(entries: Any, message: str) -> None:
    with pytest.raises(HetstreamError, match=message):
        replay(read_trace(exported(snapshot_of(*entries), 0, "made up")))


@pytest.mark.parametrize(
    "text", [b"", b"\x80\x04.", b"{}", b'{"source":"x","reserved_bytes":-1,"entries":[]}', b"[" * 9999]
)
def test_what_is_no_history_is_refused(text: bytes) -> None:
    with pytest.raises(HetstreamError, match="no history of an allocator"):
        read_trace(text)
    two = json.loads(exported(snapshot_of(*HISTORY), 0, "x"))
    two["entries"][1]["stream"] = 7
    with pytest.raises(HetstreamError, match="2 streams"):
        replay(read_trace(json.dumps(two).encode()))


@pytest.mark.shows("a shared GPU has three devices: CUDA, a virtual clock, and a live emulation")
@pytest.mark.parametrize("path", RECORDED or [None], ids=lambda path: path.stem if path else "none")
def test_the_model_does_what_real_allocators_did(path: Path | None) -> None:
    if path is None:
        pytest.skip("no history of a real allocator is recorded yet")
    found = replay(read_trace(path.read_bytes()))
    assert found.num_alike == found.num_requests
    assert (found.model_most_bytes, found.model_end_bytes) == (found.most_bytes, found.end_bytes)
