"""A trainer without torch: saves records whose bytes follow from step and rank, as the lines of its stdin say.

python fake_trainer.py STORES DIRECTORY JOB RANK WORLD_SIZE ATTEMPT NUM_BYTES
save STEP | close | spawn      each is answered by a line
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.memory.segment import join_metadata
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreIdentity
from hetstream.checkpoint.record.layout import Generation, Layout, TensorSpec, lay_out
from hetstream.checkpoint.record.structure import Record, TensorRef
from hetstream.checkpoint.record.tree import TENSOR


def layout_of(num_bytes: int) -> Layout:
    return lay_out(
        [TensorSpec("rng", "U8", (64,)), TensorSpec("model.weight", "U8", (num_bytes,)), TensorSpec("step", "I64", ())]
    )


def content(generation: Generation, rank: int, name: str, num_bytes: int) -> bytes:
    """What a tensor holds; `model` is equal on every rank."""
    whose = "all" if name.startswith("model") else str(rank)
    unit = hashlib.sha256(f"{generation} {whose} {name}".encode()).digest()
    return (unit * (num_bytes // len(unit) + 1))[:num_bytes]


def save(store: Store, generation: Generation, rank: int, world_size: int, num_bytes: int) -> None:
    layout = layout_of(num_bytes)
    tree = {"rng": {TENSOR: 0}, "model": {TENSOR: 1}, "step": {TENSOR: 2}}
    record = Record(tree, [TensorRef(number) for number in range(3)], ["model"], rank, world_size, {"loss": 1.5})
    metadata = join_metadata(layout.to_json(), record.write())
    with store.begin(layout.payload_bytes, len(metadata)) as slot:
        for entry in layout.entries:
            end = entry.offset + entry.num_bytes
            slot.payload[entry.offset : end] = content(generation, rank, entry.name, entry.num_bytes)
        slot.publish(generation, metadata, layout.digest)


def main() -> None:
    stores, directory, job, *numbers = sys.argv[1:]
    rank, world_size, attempt, num_bytes = map(int, numbers)
    lineage = CheckpointDirectory(directory).lineage()
    store = Store.open(StoreIdentity(job, 0, rank, Path(directory), lineage), shared_memory=Path(stores))
    print(store.path, flush=True)
    for line in sys.stdin:
        verb, *args = line.split()
        if verb == "save":
            save(store, Generation(attempt, int(args[0])), rank, world_size, num_bytes)
        elif verb == "close":
            store.close()
        print(line.strip(), flush=True)


if __name__ == "__main__":
    main()
