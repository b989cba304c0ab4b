"""What a training loop loses while a checkpoint is written to disk: `ckpt_stall SYSTEM`, on two cores.

The loop runs without and with a save under way, in turns. A step is plain Python and small products of matrices, as a
loop that is bound by Python has it. The time of the save itself is not counted: `ckpt_save` has it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.clients.ckpt_systems import bytes_of, end, make_state, running
from benchmarks.clients.window import Meter

# To ask a system whether it is done is no part of training.
_ASK_EVERY_S = 0.02


class Loop:
    """A busy loop; counts steps and the longest of them."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        edge = 128 * num_threads
        self.weight = torch.randn(edge, edge) / edge
        self.steps = 0
        self.seconds = 0.0
        self.cpu_s = 0.0
        self.longest_s = 0.0

    def step(self) -> None:
        """About a millisecond, half of it Python."""
        total = 0
        for number in range(6000):
            total += number & 7
        value = self.weight
        for _ in range(4):
            value = value @ self.weight

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Step until told otherwise; the question is asked now and then."""
        while goes_on():
            until = time.perf_counter() + _ASK_EVERY_S
            cpu_s, began_s = time.thread_time(), time.perf_counter()
            before_s = began_s
            while before_s < until:
                self.step()
                now_s = time.perf_counter()
                self.steps += 1
                self.longest_s = max(self.longest_s, now_s - before_s)
                before_s = now_s
            self.seconds += before_s - began_s
            self.cpu_s += time.thread_time() - cpu_s

    def sample(self) -> dict[str, float]:
        """Rates of all that was run."""
        return {
            "steps_per_s": self.steps / self.seconds,
            "steps_per_cpu_s": self.steps / self.cpu_s,
            "longest_ms": 1e3 * self.longest_s,
        }


def measure(case: str, name: str, options: dict[str, Any], request: dict[str, Any]) -> None:
    """Print two samples: without and with a checkpoint on its way to disk."""
    state = make_state(options["tensors"], options["bytes"])
    without, beside = Loop(options["threads"]), Loop(options["threads"])
    with running(name, request["folder"], state) as system:
        for step in range(2):
            system.save(step, state)
            system.wait()
        meter = Meter(os.sched_getaffinity(0))
        for step in range(2, 2 + request["saves"]):
            until = time.perf_counter() + request["seconds"]
            without.run(lambda until=until: time.perf_counter() < until)  # type: ignore[misc]
            system.save(step, state)
            beside.run(lambda: not system.is_done())
            system.wait()
        other_load = meter.read().other_load
    lost_s = beside.seconds - beside.steps * without.seconds / without.steps
    lost = {"lost_ms_per_gb": 1e3 * lost_s / (request["saves"] * bytes_of(state) / 1e9)} if beside.steps else {}
    for suffix, loop, more in (("", beside, lost), ("|, nothing to write", without, {})):
        if loop.steps:
            sample = {"case": case + suffix, **loop.sample(), **more, "other_load": other_load}
            print(json.dumps(sample), flush=True)


def main() -> None:
    """Measure every case of the request."""
    request = json.loads(sys.argv[-1])
    os.sched_setaffinity(0, set(request["cores"]))
    for case, options in request["cases"].items():
        measure(case, sys.argv[1], options, request)
    end()


if __name__ == "__main__":
    main()
