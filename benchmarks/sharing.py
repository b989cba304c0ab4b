"""`python -m benchmarks.sharing`: what do more jobs on one pipeline cost the data workers?

1 to 8 jobs read the same epoch in the same order from one data worker process on one core. docs/benchmarks-data.md
explains the rows.
"""

from __future__ import annotations

import sys

from benchmarks import harness, machine, peers
from benchmarks.harness import Metric, System, Target

SPIN, SLEEP = "transform spins 5 ms", "transform sleeps 5 ms"
CASES = {SPIN: {"spin_s": 0.005, "sleep_s": 0.0}, SLEEP: {"spin_s": 0.0, "sleep_s": 0.005}}
JOBS = (1, 2, 4, 8)
TF_DATA = "tf.data CrossTrainerCache, 8 jobs"
METRICS = (
    Metric("computed", "computations/sample", tuple(CASES)),
    Metric("worker_cpu_s", "CPU-s of data worker", tuple(CASES)),
    Metric("batches_per_s", "batches/s, all jobs", tuple(CASES)),
)


def name_of(num_jobs: int, sharing: str) -> str:
    """What the table calls it."""
    return f"{num_jobs} job" if num_jobs == 1 else f"{num_jobs} jobs, {'not shared' if sharing == 'none' else 'shared'}"


TARGETS = (
    Target(SPIN, name_of(8, "lossless"), name_of(1, "lossless"), "computed", at_most=1.1),
    Target(SLEEP, name_of(8, "lossless"), name_of(1, "lossless"), "computed", at_most=1.1),
    Target(SPIN, name_of(8, "lossless"), name_of(1, "lossless"), "worker_cpu_s", at_most=1.1),
)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Several jobs on one pipeline.", repeats=3).parse_args()
    client = (sys.executable, "-m", "benchmarks.clients.shared_jobs")
    systems = [System(name_of(n, "lossless"), (*client, str(n), "lossless")) for n in JOBS]
    systems.append(System(name_of(8, "none"), (*client, "8", "none")))
    found = peers.environment(make=not args.quick)
    systems.append(System(TF_DATA, (str(found.python), "-m", "benchmarks.clients.tf_shared_jobs", "8"), found.missing))
    taking_part = harness.chosen(systems, args.systems)
    client_core, producer_core = machine.two_cores()
    samples = 64 if args.quick else 400
    request = {"client_core": client_core, "producer_core": producer_core}
    described = machine.describe(client=[client_core], producer=[producer_core])
    results = harness.collect(
        taking_part,
        {case: options | {"samples": samples} for case, options in CASES.items()},
        request,
        1 if args.quick else args.repeats,
        300.0,
        lambda _case, sample: f"{sample['computed']:.2f} computations/sample, {sample['worker_cpu_s']:.1f} CPU-s",
    )
    context = {
        "machine": described,
        "versions": machine.versions("torch", "numpy", "pyzmq") | found.versions,
        "notes": [
            f"Each job reads {samples} samples of 150 KB in the same shuffled order, batches of 16, in one epoch.",
            "CPU-s of hetstream are those of the data worker process and the dispatcher, with sending to all jobs; "
            "tf.data service runs as threads of one process, so its CPU-s include the trainers, and it has no end of "
            "an epoch: its trainers take as many batches of an endless dataset.",
            harness.disturbance(results),
        ],
    }
    return harness.finish(
        "sharing", args.out, harness.rows_of(results, taking_part, METRICS, TARGETS), results.failures, context
    )


if __name__ == "__main__":
    sys.exit(main())
