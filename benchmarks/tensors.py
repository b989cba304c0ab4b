"""`make bench-tensors`: what do 141 tensors in one batch cost more than one tensor of the same bytes?

141 features are what DeepFM has. hetstream on two transports and its peers, each against itself with one tensor, and
hetstream's 141 against theirs; what the program's own tensor objects cost, without any loader; and below each ratio of
hetstream's the least that it could be. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness, machine, peers
from benchmarks.harness import Metric, Results, Row, System, Target

CASES: Mapping[str, Mapping[str, Any]] = {
    "38.5 MB": {"num_bytes": 38_535_168},
    "9.6 MB": {"num_bytes": 9_633_792},
    "1 MB": {"num_bytes": 1 << 20},
}
ONE, MANY = "1 tensor", "141 tensors"
TCP, SHM, ALONE = "hetstream tcp", "hetstream shm", "made and dropped in process"
TORCH, TF, RAY = "torch DataLoader", "tf.data service", "Ray Data"
TRANSPORTS, PEERS = (TCP, SHM), (TORCH, TF, RAY)
LEAST = "least work in process"
# The words of `clients.tensors`; the other peers have clients of their own.
SYSTEMS = {TCP: "tcp", SHM: "shm", ALONE: "in-process", TORCH: "torch"}
# Through shared memory every batch is copied, so a copy of many pieces is part of the least; a socket could do without.
LEAST_KEYS = {TCP: "objects_cpu_ms_per_batch", SHM: "cpu_ms_per_batch"}

METRICS = (
    Metric("batches_per_s", "batches/s", tuple(CASES)),
    Metric("cpu_ms_per_batch", "CPU-ms/batch", tuple(CASES)),
    Metric("loader_cpu_ms_per_batch", "CPU-ms/batch, program's own left out", tuple(CASES)),
)
TARGETS = tuple(
    target
    for case in CASES
    for target in (
        *(
            Target(case, f"{transport}, {MANY}", f"{transport}, {ONE}", "cpu_ms_per_batch", at_most=1.1)
            for transport in TRANSPORTS
        ),
        *(Target(case, f"{peer}, {MANY}", f"{peer}, {ONE}", "cpu_ms_per_batch") for peer in PEERS),
        *(
            Target(case, f"{transport}, {MANY}", f"{peer}, {MANY}", "cpu_ms_per_batch", at_most=1.0)
            for transport in TRANSPORTS
            for peer in PEERS
        ),
    )
)


def systems(tensorflow: peers.Peers, torch_peers: peers.Peers) -> list[System]:
    """Each with one tensor and with many; hetstream first."""
    own = (sys.executable, "-m", "benchmarks.clients.tensors")
    foreign = {TF: (tensorflow, "tensors_tf"), RAY: (torch_peers, "tensors_ray")}
    number_of = {count: count.partition(" ")[0] for count in (ONE, MANY)}
    return [
        *(
            System(f"{name}, {count}", (*own, word, number))
            for name, word in SYSTEMS.items()
            for count, number in number_of.items()
        ),
        *(
            System(
                f"{name}, {count}",
                (str(found.python), "-m", f"benchmarks.clients.{client}", number),
                missing=found.missing,
            )
            for name, (found, client) in foreign.items()
            for count, number in number_of.items()
        ),
    ]


def with_floors(rows: Sequence[Row], results: Results) -> list[Row]:
    """The rows, and behind the ratio of each transport what it is where 141 tensors cost no more than `LEAST` says."""
    out = []
    for row in rows:
        out.append(row)
        transport = row.system.partition(",")[0]
        if row.system != f"{transport}, {MANY} / {transport}, {ONE}" or transport not in LEAST_KEYS:
            continue
        one = results.of(row.case, f"{transport}, {ONE}", "cpu_ms_per_batch")
        least, most = (results.of(row.case, f"{LEAST}, {count}", LEAST_KEYS[transport]) for count in (ONE, MANY))
        floors = [1 + (most[n] - least[n]) / one[n] for n in sorted(one.keys() & least.keys() & most.keys())]
        if floors:
            name, spread = f"{transport}, {MANY} / {transport}, {ONE}: least", (min(floors), max(floors))
            out.append(Row(row.case, name, statistics.median(floors), "x", spread, samples=tuple(floors)))
    return out


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Many tensors in one batch.", repeats=5).parse_args()
    wanted = {system.name for system in harness.chosen(systems(peers.NONE, peers.NONE), args.systems)}
    found = [
        peers.environment(which, make=not args.quick) if any(name.startswith(peer) for name in wanted) else peers.NONE
        for peer, which in ((TF, peers.TENSORFLOW), (RAY, peers.TORCH_PEERS))
    ]
    least = (sys.executable, "-m", "benchmarks.clients.tensors", "least", MANY.partition(" ")[0])
    # Not chosen like others: each ratio has it beside it.
    taking_part = [System(LEAST, least), *(system for system in systems(*found) if system.name in wanted)]
    client_core, producer_core = machine.two_cores()
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
    harness.by_system(results)
    shown = [*(System(f"{LEAST}, {count}") for count in (ONE, MANY)), *taking_part[1:]]
    context = {
        "machine": machine.describe(client=[client_core], producer=[producer_core]),
        "versions": machine.versions("torch", "numpy", "pyzmq") | found[0].versions | found[1].versions,
        "notes": [
            "A batch is a dict of float32 tensors of equal size, made once.",
            "CPU-ms counts the trainer's process and all below it: dispatcher, data worker, servers, Ray's daemons.",
            "tf.data service: in one process, uncompressed. Ray Data: columns of 64 rows as NumPy arrays, uncopied.",
            "Program's own: what it costs the dataset to make the tensors' objects over memory that is there.",
            f"Least: one tensor's cost, and what 141 cost more in the rows of {LEAST}; through TCP, without a copy.",
            harness.disturbance(results),
        ],
    }
    rows = with_floors(harness.rows_of(results, shown, METRICS, TARGETS), results)
    return harness.finish("tensors", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
