"""`make bench-ckpt_growth`: what grows over a thousand saves?

docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys

from benchmarks import harness, machine
from benchmarks.harness import Metric, System, Target

NAMES = {
    "hetstream": "hetstream",
    "DCP thread": "dcp-thread",
    "DCP thread, cached stager": "dcp-thread-cached",
    "DCP process, cached stager": "dcp-process-cached",
}
GOAL = "goal"
# Allocators keep what they have had; a leak of a kilobyte a save passes this.
GOAL_MB = 1.0


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("What grows over many saves.", repeats=1)
    parser.add_argument("--saves", type=int, default=1000)
    parser.add_argument("--gigabytes", type=float, default=0.016)
    harness.add_folder(parser)
    args = parser.parse_args()
    warmup = 50
    if args.quick:
        args.saves, warmup = 20, 2
    client = (sys.executable, "-m", "benchmarks.clients.ckpt_growth")
    taking_part = harness.chosen([System(name, (*client, word)) for name, word in NAMES.items()], args.systems)
    case = f"{args.saves} saves of {args.gigabytes * 1e3:g} MB"
    with harness.folder_of(args) as folder:
        results = harness.collect(
            taking_part,
            {case: {"tensors": 16, "bytes": int(args.gigabytes * 1e9)}},
            {"folder": folder, "saves": args.saves, "warmup": warmup},
            1 if args.quick else args.repeats,
            1800.0,
            lambda _case, sample: f"{sample['private_mb']:+.2f} MB",
        )
    for repeat in {repeat for _, _, repeat in results.samples}:
        results.samples[case, GOAL, repeat] = {"private_mb": GOAL_MB}
    metrics = [
        Metric("private_mb", "MB of memory more", (case,)),
        Metric("descriptors", "descriptors more", (case,)),
        Metric("mappings", "mappings more", (case,)),
        Metric("segments", "segments more", (case,)),
    ]
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch"),
        "notes": [
            f"Median of the last 9 saves less median of the first 9 after {warmup}; over the program and its helpers.",
            "Memory: anonymous and resident. Segments: mappings of shared memory, also of files that are gone.",
        ],
    }
    targets = [Target(case, "hetstream", GOAL, "private_mb", at_most=1.0)]
    rows = harness.rows_of(results, [*taking_part, System(GOAL)], metrics, targets)
    return harness.finish("ckpt_growth", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
