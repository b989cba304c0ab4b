"""How long a save holds the program up: `ckpt_save SYSTEM`, beside a copy of the same tensors."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.clients.ckpt_systems import Copy, end, make_state, running
from benchmarks.clients.window import Meter


def measure(case: str, name: str, options: dict[str, Any], request: dict[str, Any]) -> None:
    """Save, wait for the disk, copy; again and again. Prints a sample for saves, first saves and copies."""
    state = make_state(options["tensors"], options["bytes"])
    copy = Copy(state)
    copy.run()
    saves, copies = [], []
    with running(name, request["folder"], state) as system:
        meter = Meter(os.sched_getaffinity(0))
        for step in range(request["saves"] + 1):
            with timed(saves):
                system.save(step, state)
            system.wait()
            with timed(copies):
                copy.run()
        other_load = meter.read().other_load
    emit(case, saves[1:], other_load)
    emit(f"{case}|, first save", saves[:1], other_load)
    if name == "hetstream":
        emit(f"{case}|memcpy", copies[1:], other_load)


@contextlib.contextmanager
def timed(into: list[tuple[float, float]]) -> Iterator[None]:
    """Note the seconds, and the CPU seconds of all threads of this process."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    yield
    into.append((time.perf_counter() - began_s, time.process_time() - cpu_s))


def emit(case: str, spent: list[tuple[float, float]], other_load: float) -> None:
    """Print a sample."""
    blocked_s, cpu_s = (statistics.median(column) for column in zip(*spent, strict=True))
    print(json.dumps({"case": case, "blocked_s": blocked_s, "cpu_s": cpu_s, "other_load": other_load}), flush=True)


def main() -> None:
    """Measure every case of the request."""
    request = json.loads(sys.argv[-1])
    for case, options in request["cases"].items():
        measure(case, sys.argv[1], options, request)
    end()


if __name__ == "__main__":
    main()
