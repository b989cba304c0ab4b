"""Records to write, made without torch: a few tensors of bytes, their layout, and the plan of a rank's file."""

from __future__ import annotations

import mmap
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetstream.checkpoint.disk.commit import commit, write_part
from hetstream.checkpoint.disk.rank_file import PartSpec
from hetstream.checkpoint.disk.safetensors import STRUCTURE, FilePlan, plan_file
from hetstream.checkpoint.record.layout import Generation, Layout, TensorSpec, lay_out
from hetstream.checkpoint.record.structure import Record as StateRecord
from hetstream.checkpoint.record.structure import TensorRef
from hetstream.checkpoint.record.tree import TENSOR

SPECS = (
    TensorSpec("model.weight", "F32", (64, 33)),
    TensorSpec("model.bias", "BF16", (33,)),
    TensorSpec("mask", "BOOL", (7,)),
    TensorSpec("empty", "F16", (0, 3)),
    TensorSpec("step", "I64", ()),
)


@dataclass(frozen=True)
class Record:
    """A record in page-aligned memory, as a slot holds it."""

    layout: Layout
    payload: memoryview

    @property
    def plan(self) -> FilePlan:
        names = [entry.name for entry in self.layout.entries]
        tree = {name: {TENSOR: number} for number, name in enumerate(names)}
        structure = StateRecord(tree, [TensorRef(number) for number in range(len(names))])
        return plan_file(self.layout.entries, {"step": "120", STRUCTURE: structure.write().decode()})

    def bytes_of(self, name: str) -> bytes:
        entry = next(entry for entry in self.layout.entries if entry.name == name)
        return bytes(self.payload[entry.offset : entry.offset + entry.num_bytes])


def make_record(seed: int, specs: Sequence[TensorSpec] = SPECS) -> Record:
    """A record whose bytes follow from `seed`."""
    layout = lay_out(specs)
    payload = memoryview(mmap.mmap(-1, max(4096, layout.payload_bytes)))[: layout.payload_bytes]
    payload[:] = random.Random(seed).randbytes(layout.payload_bytes)
    return Record(layout, payload)


def write_checkpoint(
    directory: Path,
    generation: Generation,
    world_size: int = 1,
    metrics: dict[str, float] | None = None,
    start_id: str = "",
) -> None:
    """Write and commit a checkpoint whose ranks' records follow from the step."""
    for rank in range(world_size):
        record = make_record(generation.step * 1000 + rank)
        part = PartSpec(generation, rank, world_size, record.layout.digest, metrics or {})
        write_part(directory, part, record.plan, record.payload, start_id=start_id)
    assert commit(directory, generation, world_size) == ()


def delete_in_use(path: Path, timeout_s: float = 10.0) -> None:
    """Delete a directory in which a writer may be at work, and make a file meanwhile: `rm -r`, until it succeeds."""
    deadline_s = time.monotonic() + timeout_s
    while path.exists():
        assert time.monotonic() < deadline_s, f"{path} is still there"
        shutil.rmtree(path, ignore_errors=True)
