"""`make bench-ckpt_save`: how long does a save hold the program up, beside a copy of its tensors and beside its peers?

docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import harness, machine
from benchmarks.harness import Metric, System, Target

HETSTREAM, FIRST, COPY, TORCH = "hetstream", "hetstream, first save", "memcpy", "torch.save + fsync"
DCP = ("DCP sync", "DCP thread", "DCP thread, cached stager", "DCP process, cached stager")
SMALL_BYTES = 100_000
GIGABYTES = (1.0, 2.0, 4.0)


def cases_of(gigabytes: list[float], num_small: int) -> tuple[dict[str, dict[str, Any]], str]:
    """The states to save, and which of them is the one of small tensors."""
    large = {f"{one:g} GB": {"tensors": 8, "bytes": int(one * 1e9)} for one in gigabytes}
    small = f"{num_small:,} x {SMALL_BYTES // 1000} KB"
    return large | {small: {"tensors": num_small, "bytes": num_small * SMALL_BYTES}}, small


def targets_of(cases: dict[str, Any], small: str) -> list[Target]:
    """What the issue asks for."""
    targets = []
    for case in cases:
        most = 2.0 if case == small else 1.5
        for metric in ("blocked_s", "cpu_s"):
            targets.append(Target(case, HETSTREAM, COPY, metric, at_most=most))
        # It is read back: what was copied is decoded and compared, which reads the state and the copy once more.
        targets.append(Target(case, FIRST, HETSTREAM, "blocked_s", at_most=4.0))
        targets.append(Target(case, TORCH, HETSTREAM, "blocked_s", at_least=5.0))
        targets += [Target(case, HETSTREAM, name, "blocked_s", at_most=1.0) for name in DCP]
    return targets


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("How long a save holds the program up.", repeats=3)
    parser.add_argument("--gigabytes", default=",".join(f"{one:g}" for one in GIGABYTES), help="sizes: A,B,...")
    parser.add_argument("--small", type=int, default=10_000, help="how many small tensors")
    parser.add_argument("--saves", type=int, default=4, help="after the first one")
    harness.add_folder(parser)
    args = parser.parse_args()
    if args.quick:
        args.gigabytes, args.small, args.saves = "0.01", 100, 1
    client = (sys.executable, "-m", "benchmarks.clients.ckpt_save")
    words = ("dcp-sync", "dcp-thread", "dcp-thread-cached", "dcp-process-cached")
    systems = [
        System(HETSTREAM, (*client, "hetstream")),
        System(TORCH, (*client, "torch-save")),
        *(System(name, (*client, word)) for name, word in zip(DCP, words, strict=True)),
    ]
    taking_part = harness.chosen(systems, args.systems)
    cases, small = cases_of([float(word) for word in args.gigabytes.split(",")], args.small)
    with harness.folder_of(args) as folder:
        results = harness.collect(
            taking_part,
            cases,
            {"folder": folder, "saves": args.saves},
            1 if args.quick else args.repeats,
            900.0,
            lambda _case, sample: f"{sample['blocked_s']:.3f} s",
        )
    harness.by_system(results)
    shown = [*taking_part, *(System(name) for name in (FIRST, COPY) if HETSTREAM in {one.name for one in taking_part})]
    metrics = [Metric("blocked_s", "s blocked", tuple(cases)), Metric("cpu_s", "CPU-s", tuple(cases))]
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch", "numpy"),
        "notes": [
            f"CPU tensors in a dict; each save is on disk before the next begins. Median of {args.saves} saves after "
            "the first. hetstream's first save comes after its memory was prepared, as restore() does.",
            "memcpy: the same tensors by one thread into private memory, in turns with hetstream's saves.",
            "A cached stager is DefaultStager kept from save to save; the process also needs its shared memory.",
            "CPU-s: of all threads of the program while it is held up; it hardly feels other load.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(results, shown, metrics, targets_of(cases, small))
    return harness.finish("ckpt_save", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
