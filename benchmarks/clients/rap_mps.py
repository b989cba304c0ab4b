"""A trainer whose batches another process preprocesses on the same GPU; started under MPS by `rap_mps.py`.

Prints one line of JSON: the seconds of a training step.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rap_model import ModelSize
from benchmarks.rap_plans import PLANS
from benchmarks.rap_systems import Bench


def preprocess(request: dict[str, Any], wire: Connection) -> None:
    """Compute a batch for each message, and say so when it is done."""
    # The model is the other process's; here it is as small as can be.
    bench = bench_of(request, ModelSize(dim=4, bottom=(4,), top=(4,), most_rows=1000))
    packed = bench.packed(bench.graph, bench.fused_plan)
    number = 0
    wire.send(True)
    while wire.recv():
        bench.on_device(bench.graph, bench.fused_plan, packed[number % len(packed)])
        bench.sync()
        number += 1
        wire.send(True)


def bench_of(request: dict[str, Any], model: ModelSize | None = None) -> Bench:
    """The plan on this GPU."""
    size = next(plan for plan in PLANS if plan.name == request["plan"])
    return Bench.on_gpu(size, request["rows"], request["steps"], tf32=request["tf32"], model=model)


def steps(bench: Bench, wire: Connection) -> Iterator[None]:
    """Train on batches that are there, while the next one is computed over there."""
    plan = bench.fused_plan
    ready = [bench.on_device(bench.graph, plan, packed) for packed in bench.packed(bench.graph, plan)]
    number = 0
    while True:
        wire.send(True)
        bench.training.step(ready[number % len(ready)])
        number += 1
        wire.recv()
        yield


def main() -> None:
    """Train, and print how long a step takes."""
    request = json.loads(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=preprocess, args=(request, there), daemon=True)
    process.start()
    try:
        bench = bench_of(request)
        here.recv()
        print(json.dumps({"step_s": bench.timed(steps(bench, here))}))
        here.send(False)
    finally:
        process.join(10)
        process.kill()


if __name__ == "__main__":
    main()
