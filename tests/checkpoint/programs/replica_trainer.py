"""A trainer with replicas, one of two ranks; says what it restored, and does what the lines of its stdin say.

python replica_trainer.py DIRECTORY RANK SHARED_MEMORY MEETING WITH_REPLICAS
train | back STEP | committed | replicated | end      each is answered by a line of JSON
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hetstream.checkpoint.flash.checkpointer import FlashCheckpointer
from hetstream.checkpoint.flash.options import CheckpointOptions
from hetstream.checkpoint.policy import Retention

TIMEOUT_S = 60.0


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of the state."""
    found = hashlib.sha256()
    tensors = [*model.state_dict().values()]
    tensors += [one for of in optimizer.state_dict()["state"].values() for one in of.values()]
    for tensor in tensors:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    directory, rank_word, shared_memory, meeting, with_replicas = sys.argv[1:]
    rank = int(rank_word)
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = torch.nn.Linear(700, 700)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    options = CheckpointOptions(replica=with_replicas == "True", shared_memory=Path(shared_memory))
    with FlashCheckpointer(directory, keep=Retention(keep_last=None), options=options) as ckpt:
        step = ckpt.restore(state) or 0
        print(json.dumps([step, digest(model, optimizer)]), flush=True)
        for line in map(str.strip, sys.stdin):
            if line == "train":
                optimizer.zero_grad()
                model(torch.rand(4, 700)).sum().backward()
                optimizer.step()
                step += 1
                assert ckpt.save(step, state)
            elif line.startswith("back "):
                step = ckpt.restore(state, step=int(line.split()[1]))
            elif line == "committed":
                assert ckpt.wait(TIMEOUT_S)
            elif line == "replicated":
                deadline_s = time.monotonic() + TIMEOUT_S
                while ckpt.stats().replicated != ckpt.stats().saved:
                    assert time.monotonic() < deadline_s, ckpt.stats()
                    time.sleep(0.02)
            elif line == "end":
                break
            print(json.dumps([step, digest(model, optimizer)]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
