"""Compares the model of PyTorch's allocator with a real one: what that has recorded, replayed. Pure.

`torch.cuda.memory._snapshot()` has the allocator's history, if `_record_memory_history()` was called before. PyTorch
writes it down as a pickle, which can run anything where it is read; here it is JSON with the numbers alone, as
`exported` makes it on the machine with the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from hetstream.base.errors import HetstreamError
from hetstream.base.typed_json import decode, encode
from hetstream.hetjob.gpu.emulation import PYTORCH, Allocator, AllocatorRules, Block

# Documented at torch.cuda.memory._snapshot; these change what is reserved, or who uses it.
_ALLOCATED, _FREED = "alloc", "free_completed"
_TAKEN, _RELEASED = "segment_alloc", "segment_free"
_EXPANDABLE = ("segment_map", "segment_unmap")
_Whole = Annotated[int, msgspec.Meta(ge=0)]


class TraceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that the allocator did.

    Attributes:
        action: in PyTorch's words.
        addr: address of the block or segment.
        size: bytes: of an `alloc` those that were asked for.
        stream: whose.
    """

    action: str
    addr: _Whole = 0
    size: _Whole = 0
    stream: _Whole = 0


class AllocatorTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an allocator did, from its first segment on.

    Attributes:
        source: GPU, driver and PyTorch that it is of.
        reserved_bytes: what it held at the end.
        entries: the oldest first.
    """

    source: str
    reserved_bytes: _Whole
    entries: tuple[TraceEntry, ...]


@dataclass(frozen=True)
class Replay:
    """What the model did with the same requests.

    Attributes:
        num_requests: that were compared.
        num_alike: of these, as many as took a segment of the same size as the real one, or none where that took none.
        most_bytes: that the real allocator held at any time.
        model_most_bytes: that the model held at any time.
        end_bytes: that the real one held at the end.
        model_end_bytes: that the model held at the end.
    """

    num_requests: int
    num_alike: int
    most_bytes: int
    model_most_bytes: int
    end_bytes: int
    model_end_bytes: int


def exported(snapshot: Mapping[str, Any], device: int, source: str) -> bytes:
    """The history of one GPU as JSON, without files and lines of the program.

    Args:
        snapshot: from `torch.cuda.memory._snapshot()`.
        device: number of the GPU.
        source: GPU, driver and PyTorch.
    """
    entries = tuple(
        TraceEntry(entry["action"], entry.get("addr", 0), entry.get("size", 0), entry.get("stream", 0))
        for entry in snapshot["device_traces"][device]
    )
    reserved_bytes = sum(segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device)
    return encode(AllocatorTrace(source, reserved_bytes, entries))


def read_trace(text: bytes) -> AllocatorTrace:
    """Read what `exported` wrote.

    Raises:
        HetstreamError: it has another form.
    """
    try:
        return decode(text, AllocatorTrace)
    except msgspec.MsgspecError as error:
        raise HetstreamError(
            f"this is no history of an allocator: {error}. Make one on a machine with a GPU: python -m "
            "benchmarks.gpu_sharing --systems allocator"
        ) from error


def replay(trace: AllocatorTrace, rules: AllocatorRules = PYTORCH) -> Replay:
    """Have the model serve the same requests.

    The real allocator gives cached segments back when it is told to, or when it can take no more; the model does so
    when the history says that the real one did.

    Raises:
        HetstreamError: the history has what the model does not: expandable segments, a second stream, a beginning in
            the middle.
    """
    _check(trace.entries)
    ledger = _Ledger()
    model = Allocator(ledger.take, ledger.give, rules)
    blocks: dict[int, Block] = {}
    real_bytes = most_bytes = num_requests = num_alike = real_taken = 0
    is_releasing = False
    for entry in trace.entries:
        if entry.action == _RELEASED:
            if not is_releasing:
                model.release_cached()
            real_bytes -= entry.size
        elif entry.action == _TAKEN:
            real_bytes += entry.size
            real_taken = entry.size
            most_bytes = max(most_bytes, real_bytes)
        elif entry.action == _ALLOCATED:
            ledger.taken = 0
            blocks[entry.addr] = model.allocate(entry.size)
            num_requests += 1
            num_alike += ledger.taken == real_taken
            real_taken = 0
        elif entry.action == _FREED:
            if entry.addr not in blocks:
                raise HetstreamError(f"the history frees {entry.addr:#x}, which it never gave: it begins in the middle")
            model.free(blocks.pop(entry.addr))
        is_releasing = entry.action == _RELEASED
    return Replay(num_requests, num_alike, most_bytes, ledger.most_bytes, real_bytes, ledger.held_bytes)


class _Ledger:
    """The GPU behind the model: it has room for everything."""

    def __init__(self) -> None:
        self.held_bytes = self.most_bytes = self.taken = 0

    def take(self, num_bytes: int) -> bool:
        self.taken = num_bytes
        self.held_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        return True

    def give(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


def _check(entries: Sequence[TraceEntry]) -> None:
    if any(entry.action in _EXPANDABLE for entry in entries):
        raise HetstreamError("the history is of expandable segments, which the model does not have: record it without")
    streams = _streams(entries)
    if len(streams) > 1:
        raise HetstreamError(
            f"the history is of {len(streams)} streams, and the model has one: record a program of one"
        )


def _streams(entries: Iterable[TraceEntry]) -> set[int]:
    return {entry.stream for entry in entries if entry.action in (_ALLOCATED, _TAKEN)}
