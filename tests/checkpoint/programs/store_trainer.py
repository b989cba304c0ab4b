"""A trainer without a model, for tests: each save fills the payload with its step, so that a mixed one is seen.

    python -m tests.checkpoint.programs.store_trainer DIRECTORY SHARED_MEMORY [--saves N] [--die-in K --die-at BYTE] ...

It goes on after the newest generation that it finds, and says on its standard output what it has done.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from hetstream.checkpoint.memory.segment import Segment, join_metadata, split_metadata
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreIdentity
from hetstream.checkpoint.record.layout import Generation

DIGEST = "ab" * 16


def size_at(step: int, size: int, grows: bool) -> int:
    """Bytes of the payload of a step; with `grows` it changes from save to save."""
    return size + 8 * (step * 7919 % 5000) if grows else size


def payload_of(step: int, num_bytes: int) -> bytes:
    """The step over and over, as a word of 8 bytes."""
    return step.to_bytes(8, "little") * (num_bytes // 8)


def check(segment: Segment) -> int:
    """The step of a generation whose payload and metadata are as they were saved."""
    step = segment.header.generation.step
    layout, structure = split_metadata(segment.metadata)
    assert layout == b"layout"
    assert structure == b"step %d " % step * (step % 50)
    assert segment.payload == payload_of(step, segment.header.payload_bytes), f"step {step} is torn"
    return step


def save(store: Store, step: int, num_bytes: int, die_at: int = -1) -> float:
    """One save; how long it waited. With `die_at` the process dies when it has copied so many bytes."""
    payload = payload_of(step, num_bytes)
    metadata = join_metadata(b"layout", b"step %d " % step * (step % 50))
    with store.begin(len(payload), len(metadata)) as slot:
        if die_at >= 0:
            slot.payload[:die_at] = payload[:die_at]
            os.kill(os.getpid(), signal.SIGKILL)
        slot.payload[:] = payload
        slot.publish(Generation(1, step), metadata, DIGEST)
        return slot.waited_s


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("shared_memory", type=Path)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--num-slots", type=int, default=3)
    parser.add_argument("--die-in", type=int, default=-1)
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--grows", action="store_true")
    parser.add_argument("--prepares", action="store_true")
    parser.add_argument("--waits", action="store_true", help="at the end, for the end of standard input")
    options = parser.parse_args()
    with Store.open(StoreIdentity("77", 0, 0, options.directory), options.num_slots, options.shared_memory) as store:
        held = store.held()
        for content in held:
            with content.open() as segment:
                check(segment)
        first = held[0].header.generation.step + 1 if held else 1
        print("open", first - 1, store.path, flush=True)
        if options.prepares:
            store.prepare(options.size, 100)
        for number, step in enumerate(range(first, first + options.saves)):
            num_bytes = size_at(step, options.size, options.grows)
            waited_s = save(store, step, num_bytes, options.die_at if number == options.die_in else -1)
            print("saved", step, waited_s, flush=True)
        if options.waits:
            sys.stdin.read()


if __name__ == "__main__":
    main()
