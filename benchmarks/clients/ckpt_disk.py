"""How fast checkpoints get to disk, beside plain sequential writes of as many bytes: one client for all, in turns."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.clients.ckpt_systems import bytes_of, make_state, running, write_raw
from benchmarks.clients.window import Meter


def measure(case: str, options: dict[str, Any], request: dict[str, Any]) -> None:
    """Print a sample for each way."""
    state = make_state(options["tensors"], options["bytes"])
    num_bytes = bytes_of(state) // mmap.PAGESIZE * mmap.PAGESIZE
    raw = Path(request["folder"]) / f"raw-{os.getpid()}"
    # Of the state's own bytes: no disk finds them easier.
    buffer = memoryview(mmap.mmap(-1, num_bytes))
    whole = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in state.values()])
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(whole[:num_bytes])
    del whole
    seconds: dict[str, list[float]] = {"hetstream": [], "raw O_DIRECT": [], "raw buffered": []}

    with running("hetstream", request["folder"], state) as system:

        def persist(step: int) -> float:
            system.save(step, state)
            began_s = time.perf_counter()
            system.wait()
            return time.perf_counter() - began_s

        def write(*, direct: bool) -> float:
            began_s = time.perf_counter()
            write_raw(raw, buffer, direct=direct)
            took_s = time.perf_counter() - began_s
            raw.unlink()
            return took_s

        persist(0)
        meter = Meter(os.sched_getaffinity(0))
        for step in range(1, request["saves"] + 1):
            # Each removes what it wrote, or the checkpoint before; the disk has time to free that before the next.
            time.sleep(request["pause_s"])
            seconds["hetstream"].append(persist(step))
            time.sleep(request["pause_s"])
            seconds["raw O_DIRECT"].append(write(direct=True))
            time.sleep(request["pause_s"])
            seconds["raw buffered"].append(write(direct=False))
        other_load = meter.read().other_load
    for name, each in seconds.items():
        sample = {"gb_per_s": num_bytes / 1e9 / statistics.median(each), "other_load": other_load}
        print(json.dumps({"case": f"{case}|{name}", **sample}), flush=True)


def main() -> None:
    """Measure every case of the request."""
    request = json.loads(sys.argv[-1])
    for case, options in request["cases"].items():
        measure(case, options, request)


if __name__ == "__main__":
    main()
