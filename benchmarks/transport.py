"""`make bench-transport`: one data worker to one trainer, finished batches at no cost, who moves them fastest?

hetstream over TCP and through shared memory beside raw loopback TCP, memory copies and its peers, all in one run.
docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import prod
from typing import Any

from benchmarks import harness, machine, peers
from benchmarks.harness import Metric, System, Target
from benchmarks.running import Sample

LARGE = ("38.5 MB", "9.6 MB")
SMALL = ("160 KB", "1 KB")
COLLATED = "9.6 MB, default_collate"
CASES: Mapping[str, Mapping[str, Any]] = {
    "38.5 MB": {"shape": [64, 3, 448, 448]},
    "9.6 MB": {"shape": [64, 3, 224, 224]},
    "160 KB": {"shape": [64, 2500]},
    "1 KB": {"shape": [64, 16]},
    COLLATED: {"shape": [64, 3, 224, 224], "collate": True},
}
FINISHED = LARGE + SMALL

TCP, SHM = "hetstream tcp", "hetstream shm"
RAW, RAW_COALESCED = "raw TCP", "raw TCP, coalesced"
MEMCPY, MEMCPY_LARGE = "memcpy", "memcpy, not in cache"
TORCH, TF, QUEUE = "torch DataLoader", "tf.data service", "multiprocessing.Queue"
TORCHDATA, RAY, GRAIN = "torchdata StatefulDataLoader", "Ray Data", "grain"
MOSAIC, RPC = "mosaicml-streaming", "rpcdataloader"
PEERS = (TORCH, TF, QUEUE, TORCHDATA, RAY, GRAIN, MOSAIC, RPC)

METRICS = (
    Metric("gb_per_s", "GB/s", (*LARGE, COLLATED)),
    Metric("batches_per_s", "batches/s", SMALL),
    Metric("client_cpu_s_per_gb", "client CPU-s/GB", (*LARGE, "160 KB")),
    Metric("producer_cpu_s_per_gb", "producer CPU-s/GB", (*LARGE, "160 KB")),
)
TARGETS = (
    *(Target(case, TCP, RAW, "gb_per_s", at_least=0.85) for case in LARGE),
    *(Target(case, TCP, TF, "gb_per_s", at_least=2.5) for case in LARGE),
    *(Target(case, SHM, MEMCPY_LARGE, "gb_per_s", at_least=0.6) for case in LARGE),
    *(Target(case, SHM, TORCH, "gb_per_s", at_least=3.0) for case in LARGE),
    *(Target(case, TCP, TF, "batches_per_s", at_least=4.0) for case in SMALL),
    *(
        Target(case, TCP, peer, f"{side}_cpu_s_per_gb", at_most=1.0)
        for side in ("client", "producer")
        for case in LARGE
        for peer in PEERS
    ),
)


def systems(tensorflow: peers.Peers, torch_peers: peers.Peers) -> list[System]:
    """List the systems; the limit comes first, then hetstream, then the peers."""

    def client(name: str, *words: str) -> tuple[str, ...]:
        return (sys.executable, "-m", f"benchmarks.clients.{name}", *words)

    def peer(system: str, found: peers.Peers, name: str, *words: str) -> System:
        argv = (str(found.python), "-m", f"benchmarks.clients.{name}", *words)
        return System(system, argv, missing=found.missing, cases=FINISHED)

    return [
        System(MEMCPY, client("memcpy", "reused"), cases=FINISHED),
        System(MEMCPY_LARGE, client("memcpy", "large"), cases=FINISHED),
        System(RAW, client("raw_tcp", "framed"), cases=FINISHED),
        System(RAW_COALESCED, client("raw_tcp", "coalesced"), cases=("1 KB",)),
        System(TCP, client("hetstream_loader", "tcp")),
        System(SHM, client("hetstream_loader", "shm")),
        System(TORCH, client("torch_loader", "torch")),
        System(QUEUE, client("mp_queue"), cases=FINISHED),
        peer(TF, tensorflow, "tf_data_service"),
        peer(TORCHDATA, torch_peers, "torch_loader", "torchdata"),
        peer(RAY, torch_peers, "ray_data"),
        peer(GRAIN, torch_peers, "grain_loader"),
        peer(MOSAIC, torch_peers, "mosaicml_streaming"),
        peer(RPC, torch_peers, "rpc_loader"),
    ]


def describe(case: str, sample: Sample) -> str:
    """One figure for the progress line."""
    return f"{sample['batches_per_s']:,.0f}/s" if case in SMALL else f"{sample['gb_per_s']:.2f} GB/s"


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Transport: one data worker to one trainer.", repeats=5).parse_args()
    wanted = {system.name for system in harness.chosen(systems(peers.NONE, peers.NONE), args.systems)}
    tensorflow = peers.environment(make=not args.quick) if TF in wanted else peers.NONE
    needed = wanted & {TORCHDATA, RAY, GRAIN, MOSAIC, RPC}
    torch_peers = peers.environment(peers.TORCH_PEERS, make=not args.quick) if needed else peers.NONE
    taking_part = [system for system in systems(tensorflow, torch_peers) if system.name in wanted]
    client_core, producer_core = machine.two_cores()
    described = machine.describe(client=[client_core], producer=[producer_core])
    request = {
        "seconds": 0.1 if args.quick else 1.0,
        "warmup_s": 0.05 if args.quick else 0.4,
        "client_core": client_core,
        "producer_core": producer_core,
    }
    cases = {case: options for case, options in CASES.items() if not args.quick or prod(options["shape"]) < 1e6}
    where = f"client (trainer) on core {client_core}, everything that makes or sends batches on core {producer_core}"
    harness.say(f"transport: {where}; {request['seconds']} s a case")
    results = harness.collect(taking_part, cases, request, 1 if args.quick else args.repeats, 120.0, describe)
    metrics = [Metric(m.key, m.unit, tuple(case for case in m.cases if case in cases)) for m in METRICS]
    context = {
        "machine": described,
        "versions": machine.versions("torch", "numpy", "pyzmq") | tensorflow.versions | torch_peers.versions,
        "notes": [
            f"Every system: {where}.",
            "A batch counts when the client has read one byte of each of its pages; the bytes are checked.",
            "tf.data service: dispatcher and worker in one process, uncompressed, its own defaults otherwise.",
            "Ray Data and mosaicml-streaming have no finished batches: a block of rows or of an MDS shard holds one.",
            harness.disturbance(results),
            "Ratios are taken repeat by repeat; median and min .. max over the repeats.",
        ],
    }
    rows = harness.rows_of(results, taking_part, metrics, TARGETS)
    return harness.finish("transport", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
