"""`make bench-threads`: what do threads of a data worker bring, beside processes, where code releases the GIL?

JPEG decode, random resized crop to 224 px, flip and default collate on the same two cores.
docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys

from benchmarks import harness, machine
from benchmarks.harness import Metric, System, Target
from benchmarks.overhead import photographs

CASE = "2 cores"
P1T1, P1T2, P2T1 = "hetstream P=1 T=1", "hetstream P=1 T=2", "hetstream P=2 T=1"
TORCH = "torch DataLoader, 2 workers"
METRICS = (
    Metric("images_per_s", "images/s", (CASE,)),
    Metric("cpu_ms_per_image", "CPU-ms/image", (CASE,)),
    Metric("pss_mb", "MB PSS", (CASE,)),
)
TARGETS = (
    Target(CASE, P1T2, P1T1, "images_per_s", at_least=1.2),
    Target(CASE, P1T2, P2T1, "pss_mb", at_most=0.95),
)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Threads and processes of one data worker on the same cores.", repeats=3).parse_args()
    client = (sys.executable, "-m", "benchmarks.clients.threads")
    systems = [
        System(P1T1, (*client, "hetstream", "1", "1")),
        System(P1T2, (*client, "hetstream", "1", "2")),
        System(P2T1, (*client, "hetstream", "2", "1")),
        System(TORCH, (*client, "torch", "2", "1")),
    ]
    taking_part = harness.chosen(systems, args.systems)
    cores = sorted(set(machine.two_cores()))
    root, origin = photographs()
    request = {"root": str(root), "batches": 1 if args.quick else 16, "warmup": 1 if args.quick else 4}
    described = machine.describe(all=cores)
    harness.say(f"threads: {origin}; {request['batches']} batches of 64")
    results = harness.collect(
        taking_part,
        {CASE: {"workers": 0, "cores": cores}},
        request,
        1 if args.quick else args.repeats,
        300.0,
        lambda _case, sample: f"{sample['images_per_s']:,.0f} images/s, {sample['pss_mb']:,.0f} MB",
    )
    context = {
        "machine": described,
        "versions": machine.versions("torch", "pillow", "numpy", "pyzmq"),
        "notes": [
            f"Images: {origin}. Decode, random resized crop to 224 px, flip, default_collate, batches of 64 (uint8).",
            f"All processes of a system share the cores {cores}; the trainer does no training.",
            "P processes of T threads. PSS: of all processes that make batches, and their parent; what is shared is "
            "divided among those who share it.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(results, taking_part, METRICS, TARGETS)
    return harness.finish("threads", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
