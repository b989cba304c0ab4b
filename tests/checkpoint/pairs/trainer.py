"""One rank of a small training for the table of pairs: it saves each step, and at one of them something happens to it.

Each batch follows from the step and is the same on all ranks, so that the state follows from the step at any number of
ranks up to rounding. What is compared is not that but the state at a step as it was saved, all of it and whole, with
the one that the next start has restored: bit by bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from checkpoint import FlashCheckpointer, Options
from checkpoint.flash import device
from checkpoint.view import StoreView, find_stores

# At which step it happens, and how many more are trained where it ends nothing.
STRIKE_AT, LAST_STEP = 5, 8
# A program that is told to end does so within seconds.
_PATIENCE_S = 60.0


class Job(NamedTuple):
    """What one rank is to do.

    Attributes:
        framework: a row of the table.
        event: a column; "" to restore and say what came, and no more.
        rank: which.
        size: of how many.
        directory: of the checkpoints.
        memory: in place of /dev/shm.
        out: what it says, one JSON object a line.
        meeting: a file of this start, where the ranks meet.
    """

    framework: str
    event: str
    rank: int
    size: int
    directory: Path
    memory: Path
    out: Path
    meeting: Path


def digest(value: Any) -> str:
    """Of the bits of any state; of a sharded tensor, of all of it. Every rank calls it."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, dict):
            for key, item in one.items():
                found.update(str(key).encode())
                add(item)
        elif isinstance(one, list | tuple):
            for item in one:
                add(item)
        else:
            found.update(repr(one).encode())

    add(value)
    return found.hexdigest()


def _sharded(layers: torch.nn.Sequential, size: int) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (size,))
    for layer in (layers[0], layers[2], layers):
        fully_shard(layer, mesh=mesh)
    return layers


# From the layers and the number of ranks.
FRAMEWORKS: dict[str, Callable[[torch.nn.Sequential, int], torch.nn.Module]] = {
    "DDP": lambda layers, _: DistributedDataParallel(layers),
    "FSDP2": _sharded,
}


# What happens, after the save of a step


def _each_dies(job: Job, checkpointer: FlashCheckpointer) -> None:
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _told(job: Job, checkpointer: FlashCheckpointer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _told_twice(job: Job, checkpointer: FlashCheckpointer) -> None:
    _told(job, checkpointer)
    _told(job, checkpointer)


def _writer_told(job: Job, checkpointer: FlashCheckpointer) -> None:
    process = checkpointer._saver.process
    assert process is not None
    os.kill(process.pid, signal.SIGTERM)
    dist.barrier()


def _directory_removed(job: Job, checkpointer: FlashCheckpointer) -> None:
    checkpointer.wait(_PATIENCE_S)
    dist.barrier()
    if job.rank == 0:
        shutil.rmtree(job.directory)
    dist.barrier()


def _store_removed(job: Job, checkpointer: FlashCheckpointer) -> None:
    checkpointer.wait(_PATIENCE_S)
    dist.barrier()
    if job.rank == 0:
        for one in find_stores([job.memory]):
            shutil.rmtree(one.path)
    dist.barrier()


def _nothing(job: Job, checkpointer: FlashCheckpointer) -> None:
    """It happens elsewhere: in the copy, or to what the saver writes to."""


EVENTS: dict[str, Callable[[Job, FlashCheckpointer], None]] = {
    "SIGKILL": _each_dies,
    "SIGTERM once": _told,
    "SIGTERM twice": _told_twice,
    "SIGTERM to the writer": _writer_told,
    "exception in the copy": _nothing,
    "directory removed": _directory_removed,
    "store removed": _store_removed,
    "full disk": _nothing,
}
# These end the program in its own time; after the others it dies some steps later.
_ENDS_ITSELF = ("SIGTERM once", "SIGTERM twice")


def _break_copies() -> Callable[[], bool]:
    """Let the next copy be interrupted behind its first tensor; whether it was."""
    calls = []

    def memmove(*move: Any) -> None:
        calls.append(move)
        if len(calls) == 2:
            device.ctypes = whole  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        whole.memmove(*move)

    whole = device.ctypes  # type: ignore[attr-defined]
    device.ctypes = SimpleNamespace(memmove=memmove)  # type: ignore[attr-defined]
    return lambda: len(calls) == 2


class _Sources(logging.Handler):
    """Where a restore says that it restored from."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("restored "):
            self.text = message.rpartition(" from ")[2]


def train(job: Job) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    sources = _Sources()
    logger = logging.getLogger("checkpoint.flash.restoring")
    logger.addHandler(sources)
    logger.setLevel(logging.INFO)
    dist.init_process_group("gloo", init_method=f"file://{job.meeting}", rank=job.rank, world_size=job.size)
    torch.manual_seed(3)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.ReLU(), torch.nn.Linear(13, 1))
    model = FRAMEWORKS[job.framework](layers, job.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "mean": torch.zeros(4)}
    with (
        job.out.open("a", buffering=1) as out,
        FlashCheckpointer(
            job.directory,
            shared=("model", "optimizer"),
            interval=1,
            options=Options(shared_memory=job.memory),
        ) as checkpointer,
    ):

        def say(**fields: Any) -> None:
            if job.rank == 0:
                out.write(json.dumps(fields) + "\n")

        def bits() -> str:
            return digest([model.state_dict(), optimizer.state_dict(), state["mean"]])

        step = checkpointer.restore(state) or 0
        say(restored=step, source=sources.text, bits=bits())
        deadline_s = time.monotonic() + _PATIENCE_S
        while job.event and not checkpointer.stopping:
            torch.manual_seed(step)
            batch = torch.randn(6, 8)
            optimizer.zero_grad()
            (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            state["mean"].lerp_(batch.mean(0)[:4], 0.1)
            step += 1
            is_struck = step == STRIKE_AT
            if checkpointer.should_save(step):
                is_broken = _break_copies() if is_struck and job.event == "exception in the copy" else None
                try:
                    say(taken=step, bits=bits(), is_saved=checkpointer.save(step, state))
                except KeyboardInterrupt:
                    if not is_broken:
                        raise
                if is_broken:
                    assert is_broken(), "nothing was copied by its address"
            if step == STRIKE_AT - 1:
                checkpointer.wait(_PATIENCE_S)  # from now on there is a saver
            if is_struck:
                EVENTS[job.event](job, checkpointer)
            if step >= LAST_STEP and job.event not in _ENDS_ITSELF:
                say(ends=step)
                _each_dies(job, checkpointer)
            assert time.monotonic() < deadline_s, "the program was told to end, and has not seen it"
    dist.destroy_process_group()


def forget_memory(memory: Path) -> None:
    """Remove what dead trainers have left there; their savers have ended."""
    for found in find_stores([memory]):
        with StoreView(found.path) as view:
            view.remove()
