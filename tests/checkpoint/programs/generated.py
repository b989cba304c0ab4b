"""Programs that a seed makes up, run by torch alone and once more with checkpoints, killed and resumed: SCRATCH SEEDS.

Each program is a model, one of torch's optimizers, a scheduler, mixed precision, an average of the weights, a list of
its own, and ranks before and after the kill; it is killed somewhere, and something happens to what it has left. It says
for each seed what it was, and "same" where the resumed run ends with the bits of the one that torch made alone.

Every rank has the same batch, and there are 1, 2 or 4 ranks, so that the mean of their gradients is each one's, bit for
bit. With ranks, what an optimizer makes of a shard must not depend on the others: those of `ELEMENTWISE`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import random
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before the forks, each of which would import it for two seconds
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils

from hetstream import FlashCheckpointer

OPTIMIZERS = sorted(name for name, kind in vars(torch.optim).items() if inspect.isclass(kind))
OPTIMIZERS = [name for name in OPTIMIZERS if name not in ("Optimizer", "SparseAdam")]  # it takes sparse gradients alone
ELEMENTWISE = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adamax", "ASGD"]
SCHEDULERS: dict[str, Any] = {
    "none": lambda _: None,
    "StepLR": lambda one: lr_scheduler.StepLR(one, 2),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, 10),
    "warm-up": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one, 0.1, total_iters=3), lr_scheduler.ExponentialLR(one, 0.9)], [3]
    ),
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda step: 0.95**step),
}
NUM_STEPS = 8


def made_up(seed: int) -> dict[str, Any]:
    """What a program of this seed is."""
    what = _drawn(random.Random(seed))
    if what["parallel"] == "fsdp" and what["ranks"][0] != what["ranks"][1] and what["dtype"] == "bfloat16":
        what["dtype"] = "float32"  # torch alone has other bits in bfloat16 where its shards have other sizes
    return what


def _drawn(draw: random.Random) -> dict[str, Any]:
    parallel = draw.choice(["none", "none", "ddp", "fsdp"])
    before, after = (draw.choice([1, 2]), draw.choice([1, 2, 4])) if parallel != "none" else (1, 1)
    optimizer = draw.choice(OPTIMIZERS if parallel == "none" else ELEMENTWISE)
    return {
        "parallel": parallel,
        "ranks": [before, after],
        "optimizer": optimizer,
        "dtype": draw.choice(["float32", "bfloat16", "float64"]) if optimizer not in ("LBFGS", "Muon") else "float32",
        "scheduler": draw.choice([*SCHEDULERS]),
        "scaler": parallel != "fsdp" and optimizer != "LBFGS" and draw.random() < 0.3,
        "average": parallel == "none" and draw.random() < 0.4,
        "dropout": parallel == "none" and draw.random() < 0.5,
        "shared": parallel != "none" and draw.random() < 0.5,
        "method": draw.choice(["save", "save_async"]),
        "die_after": draw.randint(2, NUM_STEPS - 1),
        "left": draw.choice(["all", "all", "disk", "damaged", "closed"]),
        "is_app": parallel == "fsdp" and draw.random() < 0.5,
    }


class App(Stateful):
    """Model and optimizer as one object, as torch's tutorial for distributed checkpoints has it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parts = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(*self._parts)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(*self._parts, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Program:
    """One rank of it."""

    def __init__(self, what: dict[str, Any], num_ranks: int) -> None:
        torch.manual_seed(7)
        dtype = getattr(torch, what["dtype"])
        bias = what["optimizer"] != "Muon"  # it takes matrices alone
        layers: list[nn.Module] = [nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 4, bias=bias)]
        if what["dropout"]:
            layers.insert(2, nn.Dropout(0.3))
        model: nn.Module = nn.Sequential(*layers).to(dtype)
        if what["parallel"] == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
        self.model = DistributedDataParallel(model) if what["parallel"] == "ddp" else model
        kind = getattr(torch.optim, what["optimizer"])
        self.optimizer = kind(model.parameters(), lr=0.05)
        self.scheduler = SCHEDULERS[what["scheduler"]](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=what["scaler"])
        self.average = swa_utils.AveragedModel(model) if what["average"] else None
        self.losses: list[float] = []
        self.dtype = dtype
        state = {"model": model, "optimizer": self.optimizer, "scheduler": self.scheduler, "average": self.average}
        self.state = {name: one for name, one in state.items() if one is not None}
        if what["is_app"]:
            self.state["app"] = App(self.state.pop("model"), self.state.pop("optimizer"))
        self.state.update(losses=self.losses, scaler=self.scaler)

    def step(self, number: int) -> None:
        """One step of training, all of whose input follows from its number and torch's generator."""
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(5, 6, generator=generator).to(self.dtype)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss: torch.Tensor = (self.model(batch) - 1).square().mean()
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            loss = self.optimizer.step(closure)
        else:
            loss = closure()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.losses.append(float(loss))
        if self.scheduler is not None:
            self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def digest(self) -> str:
        """Of all that it has at its end."""
        found = hashlib.sha256()

        def add(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                found.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
                found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(value, dict):
                for key, item in value.items():
                    found.update(repr(key).encode())
                    add(item)
            elif isinstance(value, list | tuple):
                for item in value:
                    add(item)
            elif not callable(value):
                found.update(repr(value).encode())

        add([one.state_dict() for name, one in self.state.items() if name != "losses"])
        add(self.losses)
        if not dist.is_initialized():
            add(torch.rand(3))
        return found.hexdigest()[:16]


def run_rank(what: dict[str, Any], rank: int, num_ranks: int, place: Path, mode: str) -> None:
    """One rank: `mode` is "plain" (torch alone), "killed" or "resumed"."""
    warnings.simplefilter("ignore")
    if what["parallel"] != "none":
        dist.init_process_group("gloo", f"file://{place}/{mode}.group", rank=rank, world_size=num_ranks)
    program = Program(what, num_ranks)
    first = 0
    if mode != "plain":
        shared = ("model",) if what["shared"] and not what["is_app"] else ()
        checkpointer = FlashCheckpointer(place / "checkpoints", interval=1, shared=shared)
        checkpointer.guard(program.optimizer)
        first = checkpointer.restore(program.state) or 0
    for number in range(first, NUM_STEPS):
        program.step(number)
        if mode != "plain":
            getattr(checkpointer, what["method"])(number + 1, program.state)
            # The last two are on disk where the last one is to be damaged there.
            if mode == "killed" and what["left"] != "all" and number + 2 >= what["die_after"]:
                assert checkpointer.wait(60)
            if mode == "killed" and number + 1 == what["die_after"]:
                if what["left"] == "closed":
                    checkpointer.close()
                if num_ranks > 1:
                    checkpointer.fence()
                    dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
    digest = program.digest()
    if rank == 0:
        place.joinpath(mode).write_text(json.dumps([first, digest]))
    if mode != "plain":
        checkpointer.close()
    # Gloo's threads may wait for each other for good where one rank takes the group down before another: the process
    # ends without.
    if dist.is_initialized():
        dist.barrier()


def run(what: dict[str, Any], num_ranks: int, place: Path, mode: str) -> str:
    """All ranks, each a fork of this process; what went wrong."""
    children = []
    for rank in range(num_ranks):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                with place.joinpath(f"{mode}-{rank}.log").open("w") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                run_rank(what, rank, num_ranks, place, mode)
                code = 0
            except BaseException:  # noqa: BLE001, the end of a process
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    wanted = -signal.SIGKILL if mode == "killed" else 0
    if codes != [wanted] * num_ranks:
        logs = " | ".join(place.joinpath(f"{mode}-{rank}.log").read_text()[-600:] for rank in range(num_ranks))
        return f"{mode}: exit codes {codes}: {logs}"
    return ""


def spoil(what: dict[str, Any], place: Path, memory: Path) -> None:
    """What happens to what the killed program has left."""
    if what["left"] in ("disk", "damaged"):
        for store in memory.iterdir():
            shutil.rmtree(store, ignore_errors=True)
    if what["left"] == "damaged":
        newest = max(place.joinpath("checkpoints").glob("step-*"))
        for file in newest.glob("*.safetensors"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)


def main() -> None:
    """Run the programs of the seeds and say what became of each."""
    scratch, memory = Path(sys.argv[1]), Path(os.environ["HETSTREAM_TEST_MEMORY"])
    torch.set_num_threads(1)
    for seed in map(int, sys.argv[2:]):
        what = made_up(seed)
        place = scratch / str(seed)
        place.mkdir()
        before, after = what["ranks"]
        problem = run(what, before, place, "plain") or run(what, before, place, "killed")
        if not problem:
            spoil(what, place, memory)
            problem = run(what, after, place, "resumed")
        if not problem:
            ends = {mode: json.loads(place.joinpath(mode).read_text()) for mode in ("plain", "resumed")}
            newest = what["die_after"]
            wanted = {newest - 1} if what["left"] == "damaged" else {newest}
            if what["left"] == "all":
                wanted |= {newest - 1} if what["method"] == "save_async" else set()
            if ends["resumed"][0] not in wanted:
                problem = f"it went on from step {ends['resumed'][0]} and not from {wanted}"
            elif ends["plain"][1] != ends["resumed"][1]:
                problem = f"other bits: {ends}"
        sys.stdout.write(f"{seed} {problem or 'same'} {json.dumps(what)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
