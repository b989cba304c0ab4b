"""A rank that trains a compiled model under DDP on features; prints what it saw and learned, as one line of JSON.

Takes a JSON object: `store`, `rank`, and `features`, "" for a plain batch stage in the program, or "hybrid" with the
`service` of data workers: then the cut changes after every second step, in each rank otherwise.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

from hetstream import DataLoader
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged
from hetstream.mpi_dataworkers.features.cut import CutGraph
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features import hybrid as recut
from hetstream.mpi_dataworkers.gpu_features.hybrid import HybridFeatures, Recut, Recutter, Seen
from hetstream.mpi_dataworkers.loader import features

GRAPH = FeatureGraph.of(
    {
        "dense": [dense("price") >> ops.Clamp(0.0, 50.0) >> ops.Logit(1e-3), dense("price") >> ops.BoxCox(0.5)],
        "ids": [jagged("ids") >> ops.FirstX(2) >> ops.SigridHash(1, 1000)],
    }
)


def collate(rows: list[int]) -> dict[str, Any]:
    lengths = torch.tensor([row % 4 for row in rows])
    ids = torch.cat([torch.arange(row % 4) + row for row in rows])
    return {"price": torch.tensor([row * 0.7 for row in rows]), "ids": Jagged(ids, lengths)}


def hybrid(rank: int) -> HybridFeatures:
    draw = random.Random(rank)

    def decide(self: Recutter, _: Seen, __: float) -> Recut:
        self.cut = CutGraph(GRAPH, tuple(step.name for step in GRAPH.steps if draw.random() < 0.3))
        return Recut(self.cut, "drawn", 0.25)

    features._STEPS, features._LOOK_S, recut.SETTLE_S = 2, 0.0, 0.0
    Recutter.decide = decide  # type: ignore[method-assign]
    return HybridFeatures(GRAPH)


def main() -> None:
    request = json.loads(sys.argv[1])
    rank = request["rank"]
    dist.init_process_group("gloo", init_method=f"file://{request['store']}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    trained = torch.nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    is_hybrid = request["features"] == "hybrid"
    made: dict[str, Any] = {"features": hybrid(rank)} if is_hybrid else {"batch_stage": FeatureTransform(GRAPH)}
    place: dict[str, Any] = {"service": request["service"], "job_name": "ranks"} if is_hybrid else {}
    seen, cuts = hashlib.blake2b(), set()
    with DataLoader([*range(96)], batch_size=4, shuffle=True, seed=5, collate_fn=collate, **made, **place) as loader:
        for batch in loader:
            seen.update(
                pickle.dumps([batch["dense"].numpy().tobytes(), *(part.numpy().tobytes() for part in batch["ids"][1:])])
            )
            optimizer.zero_grad()
            trained(batch["dense"]).sum().backward()
            optimizer.step()
            for thread in threading.enumerate():
                if thread.name == "hetstream-recut":
                    thread.join()
            cuts.add(loader.stats().get("features", {}).get("on_trainer"))
    learned = [parameter.detach().numpy().tobytes().hex() for parameter in model.parameters()]
    print(json.dumps({"seen": seen.hexdigest(), "learned": learned, "num_cuts": len(cuts)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
