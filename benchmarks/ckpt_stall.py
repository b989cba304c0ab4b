"""`make bench-ckpt_stall`: what does a training loop lose on two cores while a checkpoint is written to disk?

docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import harness, machine
from benchmarks.ckpt_disk import arguments
from benchmarks.harness import Metric, System, Target

RAW = "raw O_DIRECT"
NAMES = {
    "hetstream": "hetstream",
    RAW: "raw",
    "DCP thread, cached stager": "dcp-thread-cached",
    "DCP process, cached stager": "dcp-process-cached",
}
IDLE = ", nothing to write"
ONE, TWO = "loop of 1 thread", "loop of 2 threads"


def main() -> int:
    """Run the benchmark."""
    args = arguments("What a training loop loses while a checkpoint is written.")
    client = (sys.executable, "-m", "benchmarks.clients.ckpt_stall")
    systems = [System(name, (*client, word)) for name, word in NAMES.items()]
    taking_part = harness.chosen(systems, args.systems)
    state = {"tensors": 100, "bytes": int(args.gigabytes * 1e9)}
    cases: dict[str, dict[str, Any]] = {ONE: {**state, "threads": 1}, TWO: {**state, "threads": 2}}
    cores = sorted(set(machine.two_cores()))
    with harness.folder_of(args) as folder:
        results = harness.collect(
            taking_part,
            cases,
            {"folder": folder, "saves": args.saves, "seconds": 0.1 if args.quick else 3.0, "cores": cores},
            1 if args.quick else args.repeats,
            600.0,
            lambda _case, sample: f"{sample['steps_per_s']:.0f} steps/s",
        )
    harness.by_system(results)
    shown = [one for system in taking_part for one in (system, System(system.name + IDLE))]
    metrics = [
        Metric("steps_per_s", "steps/s", tuple(cases)),
        Metric("steps_per_cpu_s", "steps/CPU-s", tuple(cases)),
        Metric("lost_ms_per_gb", "ms lost/GB", tuple(cases)),
        Metric("longest_ms", "ms, longest step", tuple(cases)),
    ]
    targets = [
        Target(case, name, name + IDLE, metric, at_least=0.95)
        for case in cases
        for metric in ("steps_per_s", "steps_per_cpu_s")
        for name in ("hetstream", RAW)
    ] + [
        Target(case, "hetstream", name, "steps_per_s", at_least=1.0)
        for case in cases
        for name in NAMES
        if name not in ("hetstream", RAW)
    ]
    context = {
        "machine": machine.describe(all=cores),
        "versions": machine.versions("torch"),
        "notes": [
            f"{args.gigabytes:g} GB in 100 tensors; program and checkpoint writer share the cores {cores}.",
            "In turns the loop runs 3 s with nothing to write, and until a checkpoint is on disk; saves do not count.",
            "A step: a loop in Python and four products of small matrices, by one thread or two.",
            "raw O_DIRECT: a process of niceness 19 that only writes as many bytes: what the disk itself costs.",
            "ms lost/GB: how much longer the steps took than with nothing to write; slow writers lose it more slowly.",
            "steps/CPU-s: of the loop's own thread: what memory, caches and the GIL cost; waiting costs none.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(results, shown, metrics, targets)
    return harness.finish("ckpt_stall", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
