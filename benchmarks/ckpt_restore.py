"""`make bench-ckpt_restore`: how long does a state take to come back, from memory and from disk, beside its peers?

docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys

from benchmarks import harness, machine
from benchmarks.harness import Metric, System, Target

HETSTREAM, COPY, RAW = "hetstream", "memcpy", "raw read"
SMALL_BYTES = 100_000
PEERS = ("torch.load", "torch.load, mmap", "safetensors", "DCP")


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("How long a restore takes.", repeats=3)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--small", type=int, default=10_000, help="how many small tensors")
    parser.add_argument("--loads", type=int, default=3)
    harness.add_folder(parser)
    args = parser.parse_args()
    if args.quick:
        args.gigabytes, args.small, args.loads = 0.02, 100, 1
    cases = {
        f"{args.gigabytes:g} GB": {"tensors": 8, "bytes": int(args.gigabytes * 1e9)},
        f"{args.small:,} x {SMALL_BYTES // 1000} KB": {"tensors": args.small, "bytes": args.small * SMALL_BYTES},
    }
    shown = tuple(f"{case} from {where}" for case in cases for where in ("memory", "disk"))
    client = System(HETSTREAM, (sys.executable, "-m", "benchmarks.clients.ckpt_restore"))
    with harness.folder_of(args) as folder:
        results = harness.collect(
            [client],
            cases,
            {"folder": folder, "loads": args.loads},
            1 if args.quick else args.repeats,
            600.0,
            lambda case, sample: f"{case}: {sample['seconds']:.2f} s",
        )
    harness.by_system(results)
    names = (HETSTREAM, f"{HETSTREAM} with its start", COPY, RAW, *PEERS)
    systems = [System(name, cases=tuple(case for case in shown if results.of(case, name, "seconds"))) for name in names]
    targets = []
    for case in cases:
        disk = f"{case} from disk"
        targets += [
            Target(f"{case} from memory", HETSTREAM, COPY, "seconds", at_most=1.5),
            Target(disk, RAW, HETSTREAM, "seconds", at_least=0.9),
            *(Target(disk, HETSTREAM, name, "seconds", at_most=1.0) for name in PEERS),
        ]
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch", "safetensors"),
        "notes": [
            "Into the program's own tensors, whose memory is there. Files were taken out of the page cache before.",
            "memcpy: the same tensors by one thread into private memory, in turns. hetstream copies with two threads.",
            "hetstream compares what it reads from disk with its checksums; torch.load compares none by default, "
            "safetensors and DCP have none.",
            "With its start: FlashCheckpointer() too, which starts a writer, and maps the memory while a program would "
            "build its model.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(results, systems, [Metric("seconds", "s", shown)], targets)
    return harness.finish("ckpt_restore", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
