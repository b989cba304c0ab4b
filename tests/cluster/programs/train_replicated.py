"""A training of several ranks with replicas on other hosts, of which a node is to be lost.

Usage: train_replicated.py DIRECTORY STEPS GATE; one process for each rank, as Slurm starts them. Each rank has a model
of its own beside the common one, so nobody has the part of another. In the directory:

    checkpoints         of `FlashCheckpointer`: every step is saved; the first one is on disk before the second begins
    restored-RANK       a line for each start: step and digest of the state that it began with
    at-GATE.RANK        the digest after GATE steps, when all that is saved is on the peer's host too
    gate                when it is there, training goes on behind GATE
    result-RANK         the digest at the end
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hetstream.checkpoint.flash.checkpointer import FlashCheckpointer
from hetstream.checkpoint.flash.options import CheckpointOptions
from hetstream.checkpoint.policy import Retention

TIMEOUT_S = 120.0
LOOK_S = 0.02


def digest_of(model: torch.nn.ModuleDict, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *(v for one in optimizer.state.values() for v in one.values())]:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def train(model: torch.nn.ModuleDict, optimizer: torch.optim.Optimizer, world_size: int) -> None:
    """One step: the common model learns from the samples of all ranks, the own one from those of this rank."""
    optimizer.zero_grad()
    sample = torch.rand(16, 64)
    (model["common"](sample) - model["own"](sample)).square().mean().backward()
    for parameter in model["common"].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()


def write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def wait_for_replica(checkpointer: FlashCheckpointer) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while checkpointer.stats().replicated != checkpointer.stats().saved:
        assert time.monotonic() < deadline_s, checkpointer.stats()
        time.sleep(LOOK_S)


def main() -> None:
    directory, num_steps, gate = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    start = f"{os.environ.get('SLURM_RESTART_COUNT', '0')}-{os.environ['SLURM_STEP_ID']}"
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format=f"rank {rank}: %(message)s")
    dist.init_process_group("gloo", f"file://{directory}/meeting-{start}", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    common = torch.nn.Linear(64, 64)
    torch.manual_seed(1 + rank)
    model = torch.nn.ModuleDict({"common": common, "own": torch.nn.Linear(64, 64)})
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    options = CheckpointOptions(replica="SLURM_JOB_ID" in os.environ)
    with FlashCheckpointer(directory / "checkpoints", interval=1, keep=Retention(None), options=options) as ckpt:
        step = ckpt.restore(state) or 0
        with (directory / f"restored-{rank}").open("a") as file:
            print(step, digest_of(model, optimizer), file=file)
        while step < num_steps:
            train(model, optimizer, world_size)
            step += 1
            if ckpt.should_save(step):
                assert ckpt.save(step, state)
            if step == 1:
                assert ckpt.wait(TIMEOUT_S)
            if options.replica and step == gate:
                wait_for_replica(ckpt)
                write(directory / f"at-{gate}.{rank}", digest_of(model, optimizer))
                while not (directory / "gate").exists():
                    time.sleep(LOOK_S)
        write(directory / f"result-{rank}", digest_of(model, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
