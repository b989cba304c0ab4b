"""`make bench-scale`: does the rate grow with the number of data workers?

The transform sleeps (an emulation: this machine does not have the CPUs), so that n data workers could make exactly n
batches in the time of one. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import harness, machine
from benchmarks.harness import Metric, System, Target

HETSTREAM, TORCH = "hetstream", "torch DataLoader"
WORKERS = (1, 4, 16, 64, 256)
# torch gives up on descriptors and memory well before.
TORCH_WORKERS = (1, 4, 16)
SLEEP_S = 0.5
BATCH_BYTES = 16 << 10


def case_of(workers: int) -> str:
    """Name of the case."""
    return f"{workers} data workers" if workers > 1 else "1 data worker"


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Scale-out with a transform that sleeps.", repeats=3).parse_args()
    counts = WORKERS[:2] if args.quick else WORKERS
    cases: dict[str, dict[str, Any]] = {case_of(count): {"workers": count} for count in counts}
    client = (sys.executable, "-m", "benchmarks.clients.scale_out")
    systems = [
        System(HETSTREAM, (*client, "hetstream")),
        System(TORCH, (*client, "torch"), cases=tuple(case_of(count) for count in TORCH_WORKERS)),
    ]
    taking_part = harness.chosen(systems, args.systems)
    request = {
        "sleep_s": 0.05 if args.quick else SLEEP_S,
        "batch_bytes": BATCH_BYTES,
        "sleeps": 4 if args.quick else 10,
    }
    described = machine.describe()
    harness.say(f"scale: a transform that sleeps {request['sleep_s']} s, batches of {BATCH_BYTES} bytes")
    results = harness.collect(
        taking_part,
        cases,
        request,
        1 if args.quick else args.repeats,
        300.0,
        lambda _case, sample: f"{sample['of_linear']:.1%}",
    )
    names = tuple(cases)
    # The limit is arithmetic: n batches a sleep.
    for repeat in {repeat for _, _, repeat in results.samples}:
        for case, options in cases.items():
            results.samples[case, "linear", repeat] = {
                "batches_per_s": options["workers"] / float(request["sleep_s"]),
                "of_linear": 1.0,
            }
    rows = harness.rows_of(
        results,
        [System("linear"), *taking_part],
        [Metric("batches_per_s", "batches/s", names)],
        [Target(case, HETSTREAM, "linear", "batches_per_s", at_least=0.95) for case in names],
    )
    context = {
        "machine": described,
        "versions": machine.versions("torch", "pyzmq"),
        "notes": [
            f"Emulation: making a batch sleeps {request['sleep_s']} s and costs no CPU. All processes share all cores.",
            "linear: n data workers make n batches in the time of one.",
        ],
    }
    return harness.finish("scale", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
