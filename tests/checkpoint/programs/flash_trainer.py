"""A small training with everything that a record holds, for tests that kill it.

    python -m tests.checkpoint.programs.flash_trainer DIRECTORY OUT [--steps N] [--every K] [--group FILE RANK SIZE] ...

Writes a line for each step to OUT.steps (step, epoch, samples) and at its end one digest of all that is trained to
OUT.done; an undisturbed run writes the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hetstream import CheckpointOptions, DataLoader, FlashCheckpointer


class Samples:
    """Sample i is the number i with some noise."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(4) + index / 37


def digest(*states: Any) -> str:
    """Of the bits of any state."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            found.update(repr(value).encode())

    for state in states:
        add(state)
    return found.hexdigest()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--group", nargs=3, metavar=("FILE", "RANK", "SIZE"))
    parser.add_argument("--shared-memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--kill-at", type=int, default=0, help="after this step")
    parser.add_argument("--term-at", type=int, default=0, help="SIGTERM to this rank alone, after this step")
    parser.add_argument("--waits", action="store_true", help="for the disk after each save")
    parser.add_argument("--delete-store-at", type=int, default=0, help="before this step, as a clean-up job does it")
    parser.add_argument("--from-step", type=int, help="go back to this step")
    parser.add_argument("--resizes", action="store_true", help="the number of ranks may change")
    parser.add_argument("--ddp", action="store_true", help="torch's DistributedDataParallel averages the gradients")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.0, help="each step takes so much longer")
    parser.add_argument(
        "--wait-for", type=Path, help="in the middle of training, until this file is there; says so in NAME.awaited"
    )
    parser.add_argument("--close-timeout", type=float, metavar="S", help="of the checkpointer")
    options = parser.parse_args()
    rank, size = 0, 1
    if options.group:
        rank, size = int(options.group[1]), int(options.group[2])
        dist.init_process_group("gloo", init_method=f"file://{options.group[0]}", rank=rank, world_size=size)
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(16))
    head = torch.nn.Linear(16, 1)
    model.append(head)
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    optimizer = torch.optim.AdamW([*model.parameters()], lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    # With a global batch the order does not depend on the number of ranks.
    size_of = {"global_batch_size": 6} if options.resizes else {"batch_size": 5}
    loader = DataLoader(Samples(), shuffle=True, seed=3, drop_last=True, **size_of)
    network = DistributedDataParallel(model) if options.ddp else model
    state = {"model": network, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "mean": torch.zeros(4)}
    with (
        open(f"{options.out}.{rank}.steps", "a", buffering=1) as mine,
        FlashCheckpointer(
            options.directory,
            shared=("model", "optimizer", "scheduler"),
            interval=options.every,
            options=CheckpointOptions(
                shared_memory=options.shared_memory,
                check_async=options.asynchronous,
                close_timeout_s=options.close_timeout,
            ),
        ) as checkpointer,
    ):
        if options.asynchronous:
            checkpointer.guard(optimizer)
        step = checkpointer.restore(state, step=options.from_step) or 0
        mine.write(f"start {step}\n")
        while step < options.steps and not checkpointer.stopping:
            for indices, samples in loader:
                samples += random.random() + np.random.rand()
                optimizer.zero_grad()
                network(samples).pow(2).mean().backward()
                for one in model.parameters() if options.group and not options.ddp else ():
                    dist.all_reduce(one.grad)
                optimizer.step()
                scheduler.step()
                for one in model.buffers() if options.group and not options.ddp else ():
                    dist.broadcast(one, 0)
                state["mean"].lerp_(samples.mean(0), 0.1)
                time.sleep(options.step_s)
                if options.wait_for and step == options.steps // 2:
                    options.wait_for.with_suffix(".awaited").touch()
                    while not options.wait_for.exists():
                        time.sleep(0.01)
                step += 1
                if step == options.delete_store_at:
                    shutil.rmtree(checkpointer._storage.store.path)
                if step == options.term_at:
                    os.kill(os.getpid(), signal.SIGTERM)
                mine.write(json.dumps([step, indices.tolist()]) + "\n")
                if checkpointer.should_save(step):
                    save = checkpointer.save_async if options.asynchronous else checkpointer.save
                    assert save(step, state)
                    assert not options.waits or checkpointer.wait(60)
                if step == options.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == options.steps or checkpointer.stopping:
                    break
        trained = digest(
            model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), loader.state_dict(), state["mean"]
        )
        draws = [random.random(), float(np.random.rand()), float(torch.rand(1))]
        result = {"step": step, "digest": trained, "draws": draws}
        Path(f"{options.out}.{rank}.done").write_text(json.dumps(result))
    if options.group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
