"""A rank of a training program: `trainer.py STATE STEPS [DIES_AT]` with torchrun's variables.

It saves after each tenth step, goes on from what is saved, and prints its losses, and last the sum of all weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import hetstream
from tests.mpi_dataworkers.embedding.programs import batches

NUM_ROWS, DIM = 5000, 16


def main() -> None:
    state, steps = Path(sys.argv[1]), int(sys.argv[2])
    dies_at = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1 + rank)  # rank 0's weights are everybody's
    rows = hetstream.RowWiseAdagrad(0.05)
    rows.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    bag = hetstream.EmbeddingBag(NUM_ROWS, DIM, mode="sum", optimizer=rows, cache_bytes=1000 * 4 * (DIM + 1))
    torch.manual_seed(2)
    inner = nn.Linear(DIM, 1)
    head: nn.Module = nn.parallel.DistributedDataParallel(inner) if size > 1 else inner
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    mine, new = state / str(rank), state / f"{rank}.new"
    losses: list[float] = []
    if mine.exists():
        saved = torch.load(mine)
        bag.load_state_dict(saved["bag"])
        inner.load_state_dict(saved["head"])
        losses = saved["losses"]
        scaler.load_state_dict(saved["scaler"])
    data = [(ids[rank::size], target[rank::size]) for ids, target in batches(NUM_ROWS, steps)][len(losses) :]
    for ids, target in hetstream.lookahead(data, {bag: lambda batch: batch[0]}, steps=8):
        if len(losses) == dies_at and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = functional.mse_loss(head(bag(ids)), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        mean = loss.detach().clone()
        if size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / size)
        if len(losses) % 10 == 0:
            text = {
                "bag": bag.state_dict(),
                "head": inner.state_dict(),
                "losses": losses,
                "scaler": scaler.state_dict(),
            }
            torch.save(text, new)
            new.replace(mine)
    weight = hetstream.torch_state_dict(bag)["weight"]
    if rank == 0:
        print(json.dumps([*losses, weight.double().abs().sum().item()]), flush=True)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
