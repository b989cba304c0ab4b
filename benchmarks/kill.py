"""`make bench-kill`: one of two data workers is killed in mid-epoch: what is lost or doubled, how long is the wait?

docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys

from benchmarks import harness, machine, peers
from benchmarks.harness import Goal, Metric, System, Target

CASE = "SIGKILL of 1 of 2 data workers"
HETSTREAM, TORCH, TF, GOAL = "hetstream", "torch DataLoader", "tf.data service", "goal"
LENGTH = 400
SLEEP_S = 0.01
# What the issue of a lost data worker may cost.
STALL_GOAL_S = 1.0


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("SIGKILL of a data worker in mid-epoch.", repeats=3).parse_args()
    names = (HETSTREAM, TORCH, TF)
    wanted = {system.name for system in harness.chosen([System(name) for name in names], args.systems)}
    found = peers.environment(make=not args.quick) if TF in wanted else peers.NONE
    client = (sys.executable, "-m", "benchmarks.clients.kill")
    systems = [
        System(HETSTREAM, (*client, "hetstream")),
        System(TORCH, (*client, "torch")),
        System(TF, (str(found.python), "-m", "benchmarks.clients.tf_data_kill"), missing=found.missing),
    ]
    taking_part = [system for system in systems if system.name in wanted]
    request = {"length": 60 if args.quick else LENGTH, "sleep_s": SLEEP_S}
    results = harness.collect(
        taking_part,
        {CASE: {}},
        request,
        1 if args.quick else args.repeats,
        180.0,
        lambda _case, sample: (
            f"{sample['lost']:.0f} lost, {sample['duplicated']:.0f} twice, longest wait {sample['stall_s']:.2f} s"
        ),
    )
    for repeat in {repeat for _, _, repeat in results.samples}:
        results.samples[CASE, GOAL, repeat] = {"stall_s": STALL_GOAL_S}
    rows = harness.rows_of(
        results,
        [*taking_part, System(GOAL)],
        [
            Metric("lost", "batches lost", (CASE,)),
            Metric("duplicated", "batches twice", (CASE,)),
            Metric("stall_s", "s, longest wait", (CASE,)),
        ],
        [Target(CASE, HETSTREAM, GOAL, "stall_s", at_most=1.0)],
    )
    for unit in ("batches lost", "batches twice"):
        rows = [Goal(CASE, HETSTREAM, unit, at_most=0).judge(row) for row in rows]
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch", "pyzmq") | found.versions,
        "notes": [
            f"An epoch of {request['length']} batches, {SLEEP_S} s each to make; the kill comes after a quarter of it.",
            "torch's DataLoader raises an error and the epoch is over. tf.data service (DYNAMIC, not fault-tolerant) "
            "loses what the worker had; a wait of 45 s means that it was still waiting.",
            "Longest wait: between two batches after the kill, and until the end was said.",
        ],
    }
    return harness.finish("kill", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
