"""Ranks of a data parallel training on one host or several, which are directories in place of /dev/shm.

    python -m tests.checkpoint.programs.host_ranks DIRECTORY HOSTS COMMANDS [HOSTS COMMANDS]...

HOSTS has a directory for each rank, joined by commas. Commands, in order: `save STEP`, `wait`, `restore`, `kill RANK`,
`crash`. Ranks are forked from this process, which has torch loaded already; each HOSTS is a start of the job. Prints
a line of JSON for each restore of a rank: rank, step, sources, what its state came to, how many bytes it has compared
with checksums; and for each start the exit codes of its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a rank would import at its first optimizer, half a second each
import torch.distributed as dist

from hetstream import CheckpointOptions, FlashCheckpointer
from hetstream.checkpoint.disk import rank_file
from hetstream.checkpoint.flash import candidates
from hetstream.checkpoint.record.layout import Checksum
from tests.checkpoint.processes import be_and_end
from tests.checkpoint.programs.flash_trainer import digest

SIZE = 700


class Counted(Checksum):
    """Counts what checksums are made of."""

    num_bytes = 0

    def update(self, data: Any) -> None:
        Counted.num_bytes += len(data)
        super().update(data)


def trained(step: int, rank: int) -> dict[str, Any]:
    """A state in which all but `own` is equal on every rank."""
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.BatchNorm1d(SIZE))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if step:
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
    torch.manual_seed(100 * step + rank)
    return {"model": model, "own": {"noise": torch.rand(1000), "step": step}, "optimizer": optimizer}


def came_to(state: dict[str, Any]) -> str:
    """A digest of the state and of the next random number."""
    return digest(state["model"].state_dict(), state["optimizer"].state_dict(), state["own"], torch.rand(1))


def run(rank: int, directory: str, hosts: list[Path], commands: list[str], meeting: str) -> None:
    """In the child: be a rank."""
    store = dist.FileStore(meeting, len(hosts))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(hosts))
    torch.set_num_threads(1)
    rank_file.Checksum = Counted
    chosen: list[Any] = []
    choose = candidates.choose_generation
    candidates.choose_generation = lambda *given: chosen.append(choose(*given)) or chosen[-1]
    options = CheckpointOptions(shared_memory=hosts[rank])
    with FlashCheckpointer(directory, shared=("model", "optimizer"), options=options) as checkpointer:
        words = iter(commands)
        for word in words:
            if word == "save":
                step = int(next(words))
                assert checkpointer.save(step, trained(step, rank))
            elif word == "wait":
                assert checkpointer.wait(60)
            elif word == "restore":
                state = trained(0, rank)
                step = checkpointer.restore(state)
                checkpointer._saving.background.wait()  # what it allocates is looked at
                sources = chosen[-1].sources if step else []
                said = json.dumps([rank, step, sources, came_to(state), Counted.num_bytes]) + "\n"
                os.write(1, said.encode())  # whole, beside others
            elif word == "kill":
                dist.barrier()
                if rank == int(next(words)):
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("a rank is gone, as a collective says")
            elif word == "crash":
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """See the module."""
    directory, *starts = sys.argv[1:]
    for hosts, commands in zip(starts[::2], starts[1::2], strict=True):
        start(directory, hosts.split(","), commands.split())


def start(directory: str, hosts: list[str], commands: list[str]) -> None:
    """Start a rank on each host, and wait for all."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(len(hosts)):
            child = os.fork()
            if child == 0:
                be_and_end(partial(run, rank, directory, [*map(Path, hosts)], commands, f"{folder}/meeting"))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
