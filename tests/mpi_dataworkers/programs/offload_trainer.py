"""A training program for `--offload`: writes down the loss and the batch of each step, and goes on from its checkpoint.

    offload_trainer.py torch|ours DIRECTORY EPOCHS LAST_STEP

It saves model, optimizer and loader every few steps, and ends after LAST_STEP steps of the last epoch (-1: its end).
`DIRECTORY` gets `ledger.RANK` (a line `epoch step loss sha256` a batch) and `checkpoint`. With RANK and WORLD_SIZE in
the environment it trains under DistributedDataParallel. It knows nothing of hetstream but the loader that `ours` is;
HETSTREAM_OFFLOAD=auto then moves what may move whether it pays or not, as EAGER in the environment says.
"""

from __future__ import annotations

import hashlib
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import sample_models as models
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

NUM_ROWS, GLOBAL_BATCH_SIZE, SAVE_EVERY = 640, 8, 5
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def make_loader(kind: str) -> Any:
    dataset = models.Rows(NUM_ROWS)
    if kind == "torch":
        sampler = DistributedSampler(dataset, WORLD_SIZE, RANK, seed=3)
        return DataLoader(dataset, GLOBAL_BATCH_SIZE // WORLD_SIZE, sampler=sampler)
    from hetstream import DataLoader as OurLoader

    return OurLoader(dataset, global_batch_size=GLOBAL_BATCH_SIZE, shuffle=True, seed=3)


def train(kind: str, directory: Path, epochs: int, last_step: int) -> None:
    torch.manual_seed(0)
    model = models.Clean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = make_loader(kind)
    epoch = step = 0
    checkpoint = directory / "checkpoint"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        epoch, step = saved["epoch"], saved["step"]
    outer = DistributedDataParallel(model) if WORLD_SIZE > 1 else model

    def save() -> None:
        if RANK == 0 and kind == "ours":
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save(parts | {"epoch": epoch, "step": step}, directory / "checkpoint.new")
            (directory / "checkpoint.new").replace(checkpoint)

    with (directory / f"ledger.{RANK}").open("a", buffering=1) as ledger:
        while epoch < epochs:
            (loader.sampler if kind == "torch" else loader).set_epoch(epoch)
            most = last_step - step if epoch == epochs - 1 and last_step >= 0 else None
            for values, labels in islice(loader, most):
                optimizer.zero_grad()
                loss = torch.nn.functional.binary_cross_entropy_with_logits(outer(values), labels)
                loss.backward()
                optimizer.step()
                content = values.numpy().tobytes() + labels.numpy().tobytes()
                digest = hashlib.sha256(content).hexdigest()[:16]
                ledger.write(f"{epoch} {step} {float(loss.detach()).hex()} {digest}\n")
                step += 1
                if step % SAVE_EVERY == 0:
                    save()
            if most is None:
                epoch, step = epoch + 1, 0
            save()
            if most is not None:
                break
    names = [*model.state_dict()]
    assert names == [*models.Clean().state_dict()], names


def main() -> None:
    kind, directory, epochs, last_step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if os.environ.get("EAGER"):
        from hetstream.mpi_dataworkers.partitioner.cut import Cutter

        Cutter.decide = Cutter.largest  # type: ignore[method-assign]
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo", os.environ["STORE"], rank=RANK, world_size=WORLD_SIZE)
    train(kind, directory, epochs, last_step)
    if WORLD_SIZE > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
