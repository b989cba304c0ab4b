"""A training program of several processes that knows nothing of sharing: each prints a line with the loss of each step.

Its ranks are torchrun's or srun's. Arguments: how many steps, the width of the model, milliseconds of waiting for data
before each step, and where the lines go: LOSSES.RANK. DataLoader workers are there, too: forked ones, and where a fifth
argument is `spawn`, spawned ones. Those load torch anew; without them their batch is made here, the same one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # who started it is killed: nobody else would end it
    steps, width, wait_ms, losses = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    world_size = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))
    torch.set_num_threads(1)  # sums of floats depend on it
    torch.manual_seed(rank)
    rows = TensorDataset(torch.randn(64, width))
    # Before there are threads, which a forked process would lack.
    forked = DataLoader(rows, 64, num_workers=1, multiprocessing_context="fork")
    spawned: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"} if "spawn" in sys.argv[5:] else {}
    loaders = [forked, DataLoader(rows, 64, **spawned)]
    batch = torch.cat([next(iter(loader))[0] for loader in loaders])
    torch.manual_seed(0)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(minutes=4))
    else:
        meeting = f"file://{os.path.abspath(losses)}.meeting"
        dist.init_process_group("gloo", meeting, timedelta(minutes=4), world_size, rank)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = threading.Event()
    with open(f"{losses}.{rank}", "w", buffering=1) as out:
        for _ in range(steps):
            data.wait(wait_ms / 1000)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            value = loss.item()
            optimizer.step()  # the last thing that is launched, so the GPU is idle from here on
            out.write(f"{value.hex()}\n")


if __name__ == "__main__":  # spawned children import this file
    main()
