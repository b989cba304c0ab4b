"""`make bench-ckpt_disk`: how fast do checkpoints get to disk, beside plain writes?

docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import harness, machine
from benchmarks.harness import Metric, System, Target

HETSTREAM, RAW, BUFFERED = "hetstream", "raw O_DIRECT", "raw buffered"


def arguments(summary: str) -> argparse.Namespace:
    """The command line of a benchmark that saves to a disk."""
    parser = harness.parser(summary, repeats=3)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--saves", type=int, default=5)
    harness.add_folder(parser)
    args = parser.parse_args()
    if args.quick:
        args.gigabytes, args.saves = 0.02, 1
    return args


def main() -> int:
    """Run the benchmark."""
    args = arguments("How fast checkpoints get to disk.")
    case = f"{args.gigabytes:g} GB"
    client = System(HETSTREAM, (sys.executable, "-m", "benchmarks.clients.ckpt_disk"))
    with harness.folder_of(args) as folder:
        results = harness.collect(
            [client],
            {case: {"tensors": 8, "bytes": int(args.gigabytes * 1e9)}},
            {"folder": folder, "saves": args.saves, "pause_s": 0.0 if args.quick else 1.0},
            1 if args.quick else args.repeats,
            600.0,
            lambda _case, sample: f"{sample['gb_per_s']:.2f} GB/s",
        )
    harness.by_system(results)
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch"),
        "notes": [
            "hetstream: from the end of save() until the commit: with checksums, fsync of files and folders.",
            "raw: a new file of the same bytes in pieces of 64 MiB, then fsync; all in turns.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(
        results,
        [System(name) for name in (HETSTREAM, RAW, BUFFERED)],
        [Metric("gb_per_s", "GB/s", (case,))],
        [Target(case, HETSTREAM, name, "gb_per_s", at_least=0.9) for name in (RAW, BUFFERED)],
    )
    return harness.finish("ckpt_disk", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
