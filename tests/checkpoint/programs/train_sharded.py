"""Train a model that FSDP2 has sharded, under torchrun: DIRECTORY STEP-TO-DIE-AT. Says start, and what it came to."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hetstream import FlashCheckpointer

NUM_STEPS = 12
directory, die_at = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.ReLU(), torch.nn.Linear(13, 1))
mesh = init_device_mesh("cpu", (world_size,))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(rank)
with FlashCheckpointer(directory, interval=2) as checkpointer:
    state = {"model": model, "optimizer": optimizer}
    start = step = checkpointer.restore(state) or 0
    while step < NUM_STEPS:
        batch = torch.randn(6, 8)  # another one on each rank
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        step += 1
        if checkpointer.should_save(step):
            checkpointer.save(step, state)
        if step == die_at:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    sums = [parameter.full_tensor().double().sum().item() for parameter in model.parameters()]
sys.stdout.write(f"RESULT {rank} {start} {sums}\n")
sys.stdout.flush()
dist.destroy_process_group()
