"""`make bench-tensors`: what do 141 tensors in one batch cost more than one tensor of the same bytes?

141 features are what DeepFM has. hetstream on two rails and torch's DataLoader, each against itself with one tensor;
and what the program's own tensor objects cost, without any loader.
docs/benchmarks.md explains the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import harness
from benchmarks.harness import Metric, System, Target

CASES: Mapping[str, Mapping[str, Any]] = {"9.6 MB": {"num_bytes": 9_633_792}, "1 MB": {"num_bytes": 1 << 20}}
ONE, MANY = "1 tensor", "141 tensors"
TCP, SHM, TORCH, ALONE = "hetstream tcp", "hetstream shm", "torch DataLoader", "made and dropped in process"
SYSTEMS = {TCP: "tcp", SHM: "shm", TORCH: "torch", ALONE: "in-process"}

METRICS = (
    Metric("batches_per_s", "batches/s", tuple(CASES)),
    Metric("cpu_ms_per_batch", "CPU-ms/batch", tuple(CASES)),
    Metric("loader_cpu_ms_per_batch", "CPU-ms/batch, program's own left out", tuple(CASES)),
)
TARGETS = tuple(
    Target(case, f"{rail}, {MANY}", f"{rail}, {ONE}", "cpu_ms_per_batch", at_most=1.1)
    for rail in (TCP, SHM)
    for case in CASES
)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Many tensors in one batch.", repeats=5).parse_args()
    client = (sys.executable, "-m", "benchmarks.clients.tensors")
    systems = [
        System(f"{name}, {count}", (*client, word, count.partition(" ")[0]))
        for name, word in SYSTEMS.items()
        for count in (ONE, MANY)
    ]
    taking_part = harness.chosen(systems, args.systems)
    client_core, producer_core = harness.two_cores()
    request = {
        "seconds": 0.1 if args.quick else 1.0,
        "warmup_s": 0.05 if args.quick else 0.4,
        "client_core": client_core,
        "producer_core": producer_core,
    }
    results = harness.collect(
        taking_part,
        CASES,
        request,
        1 if args.quick else args.repeats,
        120.0,
        lambda _case, sample: f"{sample['cpu_ms_per_batch']:.2f} CPU-ms/batch",
    )
    context = {
        "machine": harness.machine(client=[client_core], producer=[producer_core]),
        "versions": harness.versions("torch", "numpy", "pyzmq"),
        "notes": [
            "A batch is a dict of float32 tensors of equal size, made once; CPU-ms counts trainer and data worker.",
            "Program's own: what it costs the dataset to make the tensors' objects over memory that is there.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(results, taking_part, METRICS, TARGETS)
    return harness.finish("tensors", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
