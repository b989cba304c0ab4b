"""Saves and loads sharded states with any numbers of ranks. Usage: reshard.py DIR [KIND:]SAVE_RANKS:LOAD_RANKS...

Each pair is a checkpoint of its own in DIR, read by dcp.load or, with "flash:", by FlashCheckpointer.restore, or, with
"reader:", by CheckpointReader while the training that saved it has not ended. Ranks are forked
from this process, which has torch loaded already. Prints "ok PAIR" for each; a rank that fails prints why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a rank would import at its first optimizer, half a second each
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hetstream.checkpoint.convert.dcp import FlashStorageReader
from hetstream.checkpoint.convert.weights import write_state
from hetstream.checkpoint.disk.commit import commit
from hetstream.checkpoint.disk.rank_file import PartSpec
from hetstream.checkpoint.flash.checkpointer import FlashCheckpointer
from hetstream.checkpoint.flash.reader import CheckpointReader
from hetstream.checkpoint.record.layout import Generation


def in_ranks(num_ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Call a function on each of some ranks of a gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = {}
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    store = dist.FileStore(f"{folder}/store", num_ranks)
                    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
                    torch.set_num_threads(1)
                    function(rank, num_ranks, *args)
                    dist.destroy_process_group()
                    code = 0
                except BaseException:  # noqa: BLE001, a forked rank: told and turned into its exit code
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            ranks[pid] = rank
        codes = {ranks[pid]: os.waitstatus_to_exitcode(status) for pid, status in (os.wait() for _ in ranks)}
    failed = {rank: code for rank, code in codes.items() if code}
    if failed:
        raise SystemExit(f"failed ranks: {failed}")


class Net(nn.Module):
    """Sizes that do not divide by the number of ranks, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.block = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6))
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.block(self.embedding(tokens))) @ self.embedding.weight.t()


def divide_gradients(model: nn.Module, num_ranks: int) -> None:
    """Make means of the sums that FSDP2 of torch 2.7 gives on CPUs; later releases give means."""
    if torch.__version__ < "2.8":
        for parameter in model.parameters():
            parameter.grad.div_(num_ranks)


def whole(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state_of(rank: int, num_ranks: int, filled: bool) -> dict[str, Any]:
    """What a rank has: trained and with values if `filled`, else as a program begins."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    torch.manual_seed(0 if filled else 1)
    model = Net()
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 if filled else 0.5)
    for step in range(2):
        torch.manual_seed(step)  # every rank sees the same batch, so that the result does not depend on their number
        model(torch.randint(0, 11, (4,))).square().sum().backward()
        divide_gradients(model, num_ranks)
        optimizer.step()
        optimizer.zero_grad()

    def values(seed: int, *shape: int) -> torch.Tensor:
        return whole(seed, *shape) if filled else torch.zeros(shape)

    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tp": {
            "column": distribute_tensor(values(1, 7, 4), mesh, [Shard(0)]),
            "row": distribute_tensor(values(2, 3, 9), mesh, [Shard(1)]),
            "copy": distribute_tensor(values(3, 5), mesh, [Replicate()]),
            "few": distribute_tensor(values(4, 1, 2), mesh, [Shard(0)]),
            "scalar": values(5),
        },
        "plain": {
            "lr": 0.25 if filled else 0.0,
            "names": ["a", "b"] if filled else None,
            "pair": (1, 2) if filled else (),
        },
        "own": {"rank": rank if filled else -1, "noise": torch.full((2,), float(rank)) if filled else torch.zeros(2)},
    }
    if num_ranks == 4:  # two dimensions of parallelism
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        state["tp"]["grid"] = distribute_tensor(values(6, 6, 5), grid, [Shard(0), Shard(1)])
        state["tp"]["hybrid"] = distribute_tensor(values(7, 6, 5), grid, [Replicate(), Shard(0)])
    else:
        state["tp"]["grid"] = distribute_tensor(values(6, 6, 5), mesh, [Shard(1)])
        state["tp"]["hybrid"] = values(7, 6, 5)
    return state


def save(rank: int, num_ranks: int, directory: Path) -> None:
    part = PartSpec(Generation(1, num_ranks), rank, num_ranks)
    state = state_of(rank, num_ranks, filled=True)
    write_state(directory, part, state, shared=["plain"], keys=None if rank == 0 else set(state) - {"plain"})
    dist.barrier()
    if rank == 0:
        assert commit(directory, part.generation, num_ranks) == ()
    dist.barrier()


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def load(rank: int, num_ranks: int, path: Path, saved_by: int) -> None:
    state = state_of(rank, num_ranks, filled=False)
    expected = state_of(rank, num_ranks, filled=True)
    places = {name: value.data_ptr() for name, value in state["tp"].items() if not isinstance(value, DTensor)}
    dcp.load(state, storage_reader=FlashStorageReader(path, own_rank=rank))
    assert places == {name: value.data_ptr() for name, value in state["tp"].items() if name in places}
    for name, value in expected["tp"].items():
        torch.testing.assert_close(full(state["tp"][name]), full(value), rtol=0, atol=0, msg=name)
    # The gradients are means over the ranks: equal up to rounding, whatever their number.
    for name, value in expected["model"].items():
        torch.testing.assert_close(full(state["model"][name]), full(value), msg=name)
    for number, values in expected["optimizer"]["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(full(state["optimizer"]["state"][number][name]), full(value), msg=name)
    assert state["plain"] == expected["plain"]
    own = rank if rank < saved_by else 0
    assert state["own"]["rank"] == own
    assert state["own"]["noise"].tolist() == [own, own]


class Program:
    """A training program's objects, as it has them at its start; trained if `filled`."""

    def __init__(self, num_ranks: int, filled: bool) -> None:
        self.num_ranks = num_ranks
        mesh = init_device_mesh("cpu", (num_ranks,))
        torch.manual_seed(0 if filled else 1)
        self.model = Net()
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 if filled else 0.5)
        self.table = distribute_tensor(whole(8, 7, 3) if filled else torch.zeros(7, 3), mesh, [Shard(0)])
        self.state = {"model": self.model, "optimizer": self.optimizer, "table": self.table, "seen": 7 if filled else 0}
        for step in range(2 if filled else 0):
            self.train(step)

    def train(self, step: int) -> None:
        torch.manual_seed(step)
        self.model(torch.randint(0, 11, (4,))).square().sum().backward()
        divide_gradients(self.model, self.num_ranks)
        self.optimizer.step()
        self.optimizer.zero_grad()


# As the quick start says it: what is sharded nevertheless is written by every rank.
SHARED = ("model", "optimizer", "table", "seen")


def flash_save(rank: int, num_ranks: int, directory: Path) -> None:
    with FlashCheckpointer(directory, shared=SHARED) as ckpt:
        ckpt.save(2, Program(num_ranks, filled=True).state)
        dist.barrier()


def flash_restore(rank: int, num_ranks: int, directory: Path) -> None:
    program, expected = Program(num_ranks, filled=False), Program(num_ranks, filled=True)
    with FlashCheckpointer(directory, shared=SHARED) as ckpt:
        assert ckpt.restore(program.state) == 2
        assert program.state["seen"] == 7
        for step in (2, 3):  # an optimizer whose state does not fit its parameters fails or goes elsewhere
            torch.testing.assert_close(full(program.table), full(expected.table), rtol=0, atol=0)
            for name, value in expected.model.state_dict().items():
                torch.testing.assert_close(full(program.model.state_dict()[name]), full(value), msg=name)
            for number, values in expected.optimizer.state_dict()["state"].items():
                for name, value in values.items():
                    restored = program.optimizer.state_dict()["state"][number][name]
                    assert type(restored) is type(value), name
                    torch.testing.assert_close(full(restored), full(value), msg=name)
            program.train(step)
            expected.train(step)
        dist.barrier()


def flash_save_and_be_read(rank: int, num_ranks: int, directory: Path, loaded_by: int) -> None:
    with FlashCheckpointer(directory, shared=SHARED) as ckpt:
        ckpt.save(2, Program(num_ranks, filled=True).state)
        assert ckpt.wait(60)
        dist.barrier()
        if rank == 0:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            argv = [sys.executable, "-W", "error", __file__, str(directory), f"read:{num_ranks}:{loaded_by}"]
            subprocess.run(argv, check=True, env=environment, stdout=sys.stderr)
        dist.barrier()


def read(rank: int, num_ranks: int, directory: Path) -> None:
    expected = Program(num_ranks, filled=True)
    reader = CheckpointReader(directory)
    assert (reader.all_steps(), reader.latest_step()) == ([2], 2)
    program = Program(num_ranks, filled=False)
    assert reader.restore({"model": program.model, "table": program.table}) == 2
    torch.testing.assert_close(full(program.table), full(expected.table), rtol=0, atol=0)
    plain = Net()
    assert reader.restore({"model": plain}, step=2) == 2
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(full(program.model.state_dict()[name]), full(value), msg=name)
        torch.testing.assert_close(plain.state_dict()[name], full(value), msg=name)


def main() -> None:
    directory = Path(sys.argv[1])
    for pair in sys.argv[2:]:
        kind, saved_by, loaded_by = pair.rpartition(":")[0].rpartition(":")[0], *map(int, pair.split(":")[-2:])
        if kind == "reader":
            in_ranks(saved_by, flash_save_and_be_read, directory / pair, loaded_by)
            print("ok", pair, flush=True)
            continue
        if kind == "read":
            in_ranks(loaded_by, read, directory)
            continue
        if pair.startswith("flash:"):
            in_ranks(saved_by, flash_save, directory / pair)
            in_ranks(loaded_by, flash_restore, directory / pair)
            print("ok", pair, flush=True)
            continue
        place = directory / pair
        place.mkdir()
        in_ranks(saved_by, save, place)
        in_ranks(loaded_by, load, place / Generation(1, saved_by).directory_name, saved_by)
        print("ok", pair, flush=True)


if __name__ == "__main__":
    main()
