"""`make bench-startup`: when does the first batch come, and what do the processes that make batches hold in memory?

The dataset is a list of 1.2 million paths in memory. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys

from benchmarks import harness, machine
from benchmarks.clients.startup import BATCH_SIZE, EARLY_STEPS, STEPS_LEFT
from benchmarks.harness import Metric, System, Target

HETSTREAM, SECOND = "hetstream", "hetstream, second loader"
FORK, SPAWN = "torch DataLoader, fork", "torch DataLoader, spawn"
CASES = {"1 process": {"processes": 1}, "4 processes": {"processes": 4}}
METRICS = (
    Metric("first_batch_s", "s to the first batch", tuple(CASES)),
    Metric("first_served_s", "s to the first batch of another process", tuple(CASES)),
    Metric("early_pss_mb", f"MB PSS after {EARLY_STEPS} batches", tuple(CASES)),
    Metric("late_pss_mb", f"MB PSS {STEPS_LEFT} batches before the end of the epoch", tuple(CASES)),
)
TARGETS = tuple(
    Target(case, HETSTREAM, against, metric, at_most=1.0)
    for case in CASES
    for metric, against in (("first_batch_s", FORK), ("first_served_s", SPAWN), ("late_pss_mb", SPAWN))
)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("The first batch, and memory of those who make batches.", repeats=3).parse_args()
    client = (sys.executable, "-m", "benchmarks.clients.startup")
    systems = [
        System(HETSTREAM, (*client, "hetstream")),
        System(FORK, (*client, "fork")),
        System(SPAWN, (*client, "spawn")),
    ]
    taking_part = harness.chosen(systems, args.systems)
    paths = 20_000 if args.quick else 1_200_000
    results = harness.collect(
        taking_part,
        CASES,
        {"paths": paths},
        1 if args.quick else args.repeats,
        600.0,
        lambda _case, sample: f"{sample['first_served_s']:.2f} s, {sample['late_pss_mb']:,.0f} MB",
    )
    harness.by_system(results)
    shown = [
        system
        for system in (*systems[:1], System(SECOND), *systems[1:])
        if system.name == SECOND or system in taking_part
    ]
    context = {
        "machine": machine.describe(all=sorted(set(machine.two_cores()))),
        "versions": machine.versions("torch", "pyzmq"),
        "notes": [
            f"The dataset is a list of {paths:,} paths; a sample is the length of one, a batch has {BATCH_SIZE}.",
            "Counted from the making of the loader. The service of hetstream runs before, and its data worker does not "
            "have the dataset: the first loader makes its first batches itself, until the data worker has loaded it.",
            "PSS of all processes that make batches, and their parent below the trainer: what is shared is divided "
            "among those who share it. It grows with what was read, as Python writes into each object that it uses.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(results, shown, METRICS, TARGETS)
    return harness.finish("startup", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
