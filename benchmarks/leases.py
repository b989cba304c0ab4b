"""`make bench-leases`: how many leases a second does one dispatcher hand out, and how many samples are in them?

A real dispatcher process, journal and all, and real CURVE connections; data workers and loader are a client that makes
nothing and says at once that it has. Beside the limit, bare messages back and forth over the same kind of connections,
and beside tf.data service, whose dispatcher hands out DYNAMIC splits. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import harness, machine, peers
from benchmarks.harness import Goal, Metric, System, Target

SINGLE, MANY, CROWD = "1 step a lease", "64 steps a lease", "1 step a lease, 256 data workers"
CASES: Mapping[str, Mapping[str, Any]] = {
    SINGLE: {"steps": 1, "workers": 8},
    MANY: {"steps": 64, "workers": 8},
    CROWD: {"steps": 1, "workers": 256},
}
HETSTREAM, LIMIT, TF = "hetstream", "CURVE ping-pong", "tf.data service"

# What the data plane promises of its dispatcher, on any machine of these days.
LEAST_PER_S = 10_000

METRICS = (
    Metric("leases_per_s", "leases/s", tuple(CASES)),
    Metric("samples_per_s", "samples/s", (SINGLE, MANY)),
    Metric("dispatcher_cpu_us", "dispatcher CPU-us/lease", tuple(CASES)),
)
TARGETS = (
    Target(SINGLE, HETSTREAM, LIMIT, "leases_per_s", at_least=0.1),
    Target(SINGLE, HETSTREAM, TF, "leases_per_s", at_least=1.0),
    Target(MANY, HETSTREAM, TF, "samples_per_s", at_least=20.0),
)


def systems(found: peers.Peers) -> list[System]:
    """List the systems; the limit comes first, then hetstream, then the peer."""

    def client(mode: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "benchmarks.clients.leases", mode)

    tf_argv = (str(found.python), "-m", "benchmarks.clients.tf_data_splits")
    return [
        System(LIMIT, client("ping-pong"), cases=(SINGLE, CROWD)),
        System(HETSTREAM, client("hetstream")),
        System(TF, tf_argv, missing=found.missing, cases=(SINGLE, MANY)),
    ]


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Leases: how fast one dispatcher hands out work.", repeats=5).parse_args()
    wanted = {system.name for system in harness.chosen(systems(peers.NONE), args.systems)}
    found = peers.environment(make=not args.quick) if TF in wanted else peers.NONE
    taking_part = [system for system in systems(found) if system.name in wanted]
    client_core, server_core = machine.two_cores()
    cases = {case: options for case, options in CASES.items() if not args.quick or case != CROWD}
    request = {
        "seconds": 0.1 if args.quick else 2.0,
        "warmup_s": 0.05 if args.quick else 0.5,
        "client_core": client_core,
        "producer_core": server_core,
    }
    results = harness.collect(
        taking_part,
        cases,
        request,
        1 if args.quick else args.repeats,
        120.0,
        lambda _case, sample: f"{sample['leases_per_s']:,.0f} leases/s",
    )
    context = {
        "machine": machine.describe(client=[client_core], dispatcher=[server_core]),
        "versions": machine.versions("pyzmq", "msgspec") | found.versions,
        "notes": [
            f"Every system: client on core {client_core}, dispatcher (and tf.data's worker) on core {server_core}.",
            "hetstream: each lease is granted, reported as finished, received and consumed. Batches of one sample.",
            "CURVE ping-pong: as many messages under way as hetstream has leases; the server sends each one back.",
            "tf.data service: ShardingPolicy.DYNAMIC on Dataset.range, where each element is a split of its own; "
            "elements travel in batches of 64.",
            harness.disturbance(results),
        ],
    }
    metrics = [Metric(m.key, m.unit, tuple(case for case in m.cases if case in cases)) for m in METRICS]
    goal = Goal(SINGLE, HETSTREAM, "leases/s", at_least=LEAST_PER_S)
    rows = [goal.judge(row) for row in harness.rows_of(results, taking_part, metrics, TARGETS)]
    return harness.finish("leases", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
