"""`make bench-resume`: how long does a restarted trainer wait for its data?

A state at 90 % of an epoch of 10 million samples is loaded into a new loader, for hetstream with another number of data
workers than it was taken with. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys

from benchmarks import harness, machine, peers
from benchmarks.harness import Metric, System, Target

HETSTREAM, IN_PROCESS, STATEFUL = "hetstream, 1 then 2 data workers", "hetstream in process", "StatefulDataLoader"
SHUFFLED, IN_ORDER = "shuffled", "in order"
CASES = {SHUFFLED: {"shuffle": True}, IN_ORDER: {"shuffle": False}}
METRICS = (
    Metric("load_ms", "ms for load_state_dict", tuple(CASES)),
    Metric("first_batch_ms", "ms to the first batch", tuple(CASES)),
    Metric("state_bytes", "bytes of the state", tuple(CASES)),
)
TARGETS = tuple(
    Target(case, HETSTREAM, STATEFUL, metric, at_most=1.0)
    for case in CASES
    for metric in ("first_batch_ms", "state_bytes")
)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("A restarted trainer.", repeats=3).parse_args()
    found = peers.environment(peers.TORCH_PEERS, make=not args.quick)
    systems = [
        System(IN_PROCESS, (sys.executable, "-m", "benchmarks.clients.resume", "in-process")),
        System(HETSTREAM, (sys.executable, "-m", "benchmarks.clients.resume", "hetstream")),
        System(STATEFUL, (str(found.python), "-m", "benchmarks.clients.resume", "torchdata"), found.missing),
    ]
    taking_part = harness.chosen(systems, args.systems)
    samples = 100_000 if args.quick else 10_000_000
    first, second = machine.two_cores()
    results = harness.collect(
        taking_part,
        CASES,
        {"samples": samples, "batch_size": 1000},
        1 if args.quick else args.repeats,
        600.0,
        lambda _case, sample: f"{sample['first_batch_ms']:.1f} ms, {sample['state_bytes']:.0f} bytes",
    )
    context = {
        "machine": machine.describe(all=sorted({first, second})),
        "versions": machine.versions("torch", "numpy", "pyzmq") | found.versions,
        "notes": [
            f"{samples:,} samples of one number each, batches of 1000; the state is of 90 % of the epoch, as JSON "
            "where it is plain and else as pickle.",
            "The first batch is counted from the call of load_state_dict, so both rows have its time; the loader "
            "and the data workers are there before. StatefulDataLoader has one worker process, as its state asks for, "
            "and starts it with the first batch.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(results, taking_part, METRICS, TARGETS)
    return harness.finish("resume", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
