"""`make bench-slow`: what a trainer waits for where 1 of 100 samples is 50 times slower than the others.

docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys

from benchmarks import harness, machine
from benchmarks.clients.slow import BOUND, HETSTREAM, NUM_STEPS, TORCH, WORKERS, step_costs_s, trainer_s
from benchmarks.harness import Metric, System, Target

IN_ORDER, ANY_ORDER = "in order", "any order"
METRICS = (Metric("wait_s", "s waited", (IN_ORDER, ANY_ORDER)), Metric("epoch_s", "s an epoch", (IN_ORDER, ANY_ORDER)))
TARGETS = (
    Target(IN_ORDER, HETSTREAM, BOUND, "wait_s", at_most=1.1),
    Target(ANY_ORDER, HETSTREAM, BOUND, "wait_s", at_most=1.05),
    *(Target(case, HETSTREAM, BOUND, "epoch_s") for case in (IN_ORDER, ANY_ORDER)),
    *(Target(case, TORCH, BOUND, metric) for case in (IN_ORDER, ANY_ORDER) for metric in ("wait_s", "epoch_s")),
)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Waiting for steps of which some are much slower.", repeats=3).parse_args()
    client = (sys.executable, "-m", "benchmarks.clients.slow")
    systems = [System(name, (*client, name)) for name in (BOUND, HETSTREAM, TORCH)]
    taking_part = harness.chosen(systems, args.systems)
    results = harness.collect(
        taking_part,
        {IN_ORDER: {"in_order": True}, ANY_ORDER: {"in_order": False}},
        {},
        1 if args.quick else args.repeats,
        120.0,
        lambda _case, sample: f"waited {sample['wait_s']:.2f} s of {sample['epoch_s']:.2f} s",
    )
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch", "pyzmq"),
        "notes": [
            f"{NUM_STEPS} steps, {WORKERS} data worker processes; samples sleep, and 1 of 100 sleeps 50 times as long. "
            f"Steps take {min(step_costs_s()):.3f} to {max(step_costs_s()):.3f} s. The trainer takes "
            f"{trainer_s():.4f} s for one: what the processes need together.",
            "list scheduling: simulated, with a window that holds all steps, and this machine's sleeps; each "
            "step goes to the first free process.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(results, taking_part, METRICS, TARGETS)
    return harness.finish("slow", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
