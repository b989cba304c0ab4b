"""`make bench-compared`: what does it cost a trainer that some steps are compared with the program's own?

An unmodified DataLoader under the start-up hook, with the comparisons and without, and torch's own with one worker
process, which makes all steps. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys

from benchmarks import harness, machine
from benchmarks.harness import Metric, System, Target

COMPARED, PLAIN, TORCH = "hetstream, compared", "hetstream, not compared", "torch DataLoader"
# Of a training step's CPU time on the trainer; a pass of a minute, and one that is as short as a validation.
CASES = {
    "1,000 steps a pass": {"steps": 1000, "step_s": 0.02, "passes": 2},
    "20 steps a pass": {"steps": 20, "step_s": 0.02, "passes": 10},
}
STEADY = "1,000 steps a pass"
TARGETS = (Target(STEADY, COMPARED, PLAIN, "cpu_share_of_trainer", at_most=1.01),)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Cost of comparing steps with the program's own.", repeats=3).parse_args()
    client = (sys.executable, "-m", "benchmarks.clients.compared")
    systems = [
        System(COMPARED, (*client, "compared")),
        System(PLAIN, (*client, "not compared")),
        System(TORCH, (*client, "torch")),
    ]
    taking_part = harness.chosen(systems, args.systems)
    cases = {case: {**options, "steps": 4, "passes": 2} if args.quick else options for case, options in CASES.items()}
    described = machine.describe()
    results = harness.collect(
        taking_part,
        cases,
        {},
        1 if args.quick else args.repeats,
        600.0,
        lambda _case, sample: f"{sample['cpu_ms_per_pass']:,.1f} ms a pass",
    )
    metrics = [
        Metric("cpu_ms_per_pass", "CPU-ms/pass beside training", tuple(cases)),
        Metric("cpu_share_of_trainer", "CPU of the trainer, training = 1", tuple(cases)),
    ]
    context = {
        "machine": described,
        "versions": machine.versions("torch", "numpy"),
        "notes": [
            "A training step takes 20 ms of CPU time; batches of 32 samples of 64 KiB. One data worker.",
            "CPU of the trainer: its process and its own children; data workers are not among them.",
        ],
    }
    rows = harness.rows_of(results, taking_part, metrics, TARGETS)
    return harness.finish("compared", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
