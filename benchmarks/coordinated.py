"""`python -m benchmarks.coordinated`: what does reading by length save ranks that wait for one another?

Four emulated ranks train on texts of very different lengths. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys

from benchmarks import harness, machine, peers
from benchmarks.harness import Metric, System, Target

LINEAR, QUADRATIC = "step time linear in the longest text", "step time quadratic in the longest text"
CASES = {LINEAR: {"unit_s": 2e-5, "power": 1.0}, QUADRATIC: {"unit_s": 1e-5, "power": 2.0}}
TOGETHER, APART, TF_DATA = "hetstream by length", "hetstream not by length", "tf.data coordinated reads"
METRICS = (
    Metric("elements_per_s", "text elements/s", tuple(CASES)),
    Metric("padding_waste", "share of padding", tuple(CASES)),
    Metric("step_spread", "share of step waited", tuple(CASES)),
)
TARGETS = tuple(Target(case, TOGETHER, APART, "elements_per_s", at_least=2.0) for case in CASES)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Coordinated reads on texts of skewed length.", repeats=3).parse_args()
    client = (sys.executable, "-m", "benchmarks.clients.coordinated")
    found = peers.environment(make=not args.quick)
    systems = [
        System(TOGETHER, (*client, "by-length")),
        System(APART, (*client, "not-by-length")),
        System(TF_DATA, (str(found.python), "-m", "benchmarks.clients.tf_coordinated"), found.missing),
    ]
    taking_part = harness.chosen(systems, args.systems)
    cores = list(machine.two_cores())
    request = {"cores": cores, "samples": 2_000 if args.quick else 10_000}
    described = machine.describe(all=cores)
    harness.say(f"coordinated: {request['samples']} texts")
    results = harness.collect(
        taking_part,
        CASES,
        request,
        1 if args.quick else args.repeats,
        300.0,
        lambda _case, sample: f"{sample['elements_per_s']:,.0f} elements/s, {sample['padding_waste']:.0%} padding",
    )
    context = {
        "machine": described,
        "versions": machine.versions("torch", "numpy", "pyzmq") | found.versions,
        "notes": [
            "An emulation: no GPU takes part. A rank is a thread, a step is a sleep as long as its longest text asks "
            "for, and all ranks wait for the last.",
            "Lengths are log-normal with median 100, at most 2048; batches of 16. hetstream reads every text once.",
            "Share of padding: of the elements of padded batches. Share of step waited: by ranks for the slowest.",
            "tf.data service reads an endless dataset; it takes as many steps as the others' epoch has at most.",
        ],
    }
    rows = harness.rows_of(results, taking_part, METRICS, TARGETS)
    return harness.finish("coordinated", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
