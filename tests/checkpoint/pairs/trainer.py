"""One rank of a small training for the table of pairs: it saves each step, and at one of them something happens to it.

Each batch follows from the step and is the same on all ranks, so that the state follows from the step at any number of
ranks up to rounding. What is compared is not that but the state at a step as it was saved, all of it and whole, with
the one that the next start has restored: bit by bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hetstream import CheckpointOptions, FlashCheckpointer
from hetstream.checkpoint.memory.view import StoreView, find_stores
from hetstream.checkpoint.tensors import copy_plan
from tests.checkpoint.pairs import writer
from tests.checkpoint.parts import delete_in_use

# At which step it happens, and how many more are trained where it ends nothing.
STRIKE_AT, LAST_STEP = 5, 8
# A program that is told to end does so within seconds.
_PATIENCE_S = 60.0


class Job(NamedTuple):
    """What one rank is to do.

    Attributes:
        framework: how it trains.
        event: what happens; "" to restore and say what came, and no more.
        rank: which.
        size: of how many.
        directory: of the checkpoints.
        memory: in place of /dev/shm.
        out: what it says, one JSON object a line.
        meeting: a file of this start, where the ranks meet.
        launcher: process of the launcher that has started this rank; 0 without.
    """

    framework: str
    event: str
    rank: int
    size: int
    directory: Path
    memory: Path
    out: Path
    meeting: Path
    launcher: int = 0

    def options(self) -> dict[str, Any]:
        """What all programs give a checkpointer."""
        return {"interval": 1, "options": CheckpointOptions(shared_memory=self.memory)}


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


def _sharded(layers: torch.nn.Sequential, size: int, *, copies: int = 0) -> torch.nn.Module:
    """By FSDP2; by HSDP if there are to be copies."""
    if copies:
        mesh = init_device_mesh("cpu", (copies, size // copies), mesh_dim_names=("copies", "shards"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    for layer in (layers[0], layers[2], layers):
        fully_shard(layer, mesh=mesh)
    return layers


def _everywhere(layers: torch.nn.Sequential, size: int) -> torch.nn.Module:
    return DistributedDataParallel(layers)


# How the program of a row is made, from its layers and the number of ranks.
MODELS: dict[str, Callable[[torch.nn.Sequential, int], torch.nn.Module]] = {
    "DDP": _everywhere,
    "FSDP2": _sharded,
    "HSDP": lambda layers, size: _sharded(layers, size, copies=size),
    "torchrun": _everywhere,
    "accelerate launch": _everywhere,
}


# What happens, after the save of a step


def _meet(checkpointer: FlashCheckpointer) -> None:
    checkpointer._storage._ranks.all_gather(b"")


def _each_dies(job: Job, checkpointer: FlashCheckpointer) -> None:
    _meet(checkpointer)
    writer.before_death(job.event, checkpointer)
    os.kill(os.getpid(), signal.SIGKILL)


def _told(job: Job, checkpointer: FlashCheckpointer) -> None:
    if not job.launcher:
        os.kill(os.getpid(), signal.SIGTERM)
    elif job.rank == 0:
        os.kill(job.launcher, signal.SIGTERM)


def _told_twice(job: Job, checkpointer: FlashCheckpointer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    _told(job, checkpointer)


def _writer_told(job: Job, checkpointer: FlashCheckpointer) -> None:
    process = checkpointer._storage.writer.process
    assert process is not None
    os.kill(process.pid, signal.SIGTERM)
    process.wait(_PATIENCE_S)
    _meet(checkpointer)


def _directory_removed(job: Job, checkpointer: FlashCheckpointer) -> None:
    checkpointer.wait(_PATIENCE_S)
    _meet(checkpointer)
    if job.rank == 0:
        delete_in_use(job.directory)
    _meet(checkpointer)


def _store_removed(job: Job, checkpointer: FlashCheckpointer) -> None:
    checkpointer.wait(_PATIENCE_S)
    _meet(checkpointer)
    if job.rank == 0:
        for one in find_stores([job.memory]):
            delete_in_use(one.path)
    _meet(checkpointer)


def _nothing(job: Job, checkpointer: FlashCheckpointer) -> None:
    """It happens elsewhere: in the copy, or to what is written to."""


EVENTS: dict[str, Callable[[Job, FlashCheckpointer], None]] = {
    "SIGKILL": _each_dies,
    "SIGTERM once": _told,
    "SIGTERM twice": _told_twice,
    "SIGTERM to the writer": _writer_told,
    "exception in the copy": _nothing,
    "directory removed": _directory_removed,
    "store removed": _store_removed,
    "full disk": _nothing,
    "full memory": _nothing,
}
_ALL_EVENTS = {
    **EVENTS,
    writer.STARTS: _each_dies,
    writer.ENDS: lambda job, checkpointer: writer.stop_at_its_end(job.out, job.rank, checkpointer),
    writer.IS_GONE: _each_dies,
}
# These end the program in its own time, and these at once; after the others it dies some steps later.
_ENDS_ITSELF = ("SIGTERM once", "SIGTERM twice")
_ENDS_AT_ONCE = ("SIGKILL", writer.STARTS, writer.IS_GONE)


def _break_copies() -> Callable[[], bool]:
    """Let the next copy be interrupted behind its first tensor; whether it was."""
    calls = []

    def memmove(*move: Any) -> None:
        calls.append(move)
        if len(calls) == 2:
            copy_plan.ctypes = whole  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        whole.memmove(*move)

    whole = copy_plan.ctypes  # type: ignore[attr-defined]
    copy_plan.ctypes = SimpleNamespace(memmove=memmove)  # type: ignore[attr-defined]
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


class Witness:
    """Looks at each save of a rank, lets happen what is to happen, and says what was saved and what is restored.

    Attributes:
        source: where the state comes from, if the checkpointer does not say so in its log.

    Args:
        job: of this rank.
    """

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        writer.arrange(job.event, job.out, job.rank)
        self._job = job
        self._out = job.out.open("a", buffering=1)
        self._parent = os.getppid()
        self._deadline_s = time.monotonic() + _PATIENCE_S
        self.source = ""
        self._sources = _Sources()
        logger = logging.getLogger("hetstream.checkpoint.flash.destinations")
        logger.addHandler(self._sources)
        logger.setLevel(logging.INFO)

    def say(self, **fields: Any) -> None:
        """Rank 0 says it."""
        if self._job.rank == 0:
            self._out.write(json.dumps(fields) + "\n")

    def note_restored(self, step: int, bits: str) -> None:
        """Say where the training begins, from where, and with which state."""
        self.say(restored=step, source=self.source or self._sources.text, bits=bits)

    def watch(self, bits: Callable[[], str]) -> None:
        """Look at the saves of this process from now on.

        Args:
            bits: of the state that is saved.
        """
        save = FlashCheckpointer.save

        def watched(checkpointer: FlashCheckpointer, step: int, state: Mapping[str, Any]) -> bool:
            job = self._job
            is_struck = step == STRIKE_AT
            if is_struck:
                writer.before_save(job.event, checkpointer)
            is_broken = _break_copies() if is_struck and job.event == "exception in the copy" else None
            try:
                is_saved = save(checkpointer, step, state)
            except KeyboardInterrupt:
                assert is_broken, "nobody has pressed a key"
                raise
            finally:
                if is_broken:
                    assert is_broken(), "nothing was copied by its address"
            self.say(taken=step, bits=bits(), is_saved=is_saved)
            if step == STRIKE_AT - 1 and job.event != writer.STARTS:
                checkpointer.wait(_PATIENCE_S)  # from now on there is a checkpoint writer
            if is_struck:
                if job.event in _ENDS_AT_ONCE:
                    self.say(ends=step)
                _ALL_EVENTS[job.event](job, checkpointer)
            if step >= LAST_STEP and job.event not in _ENDS_ITSELF:
                self.say(ends=step)
                _each_dies(job, checkpointer)
            if job.launcher and os.getppid() != self._parent:
                self.say(ends=step, is_left=True)  # by its launcher, and Slurm kills what is left
                _each_dies(job, checkpointer)
            assert time.monotonic() < self._deadline_s, "the program was told to end, and has not seen it"
            return is_saved

        FlashCheckpointer.save = watched  # type: ignore[method-assign]


def layers_of() -> torch.nn.Sequential:
    """What all programs train."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.ReLU(), torch.nn.Linear(13, 1))


def batches() -> list[torch.Tensor]:
    """More than any program takes."""
    made = torch.Generator().manual_seed(7)
    return [torch.randn(6, 8, generator=made) for _ in range(20_000)]


def environment_of(job: Job) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(job.size),
        "LOCAL_WORLD_SIZE": str(job.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "pairs",
    }


def meet_at(job: Job) -> None:
    """Make the ranks of this start known to each other, without a port."""
    dist.init_process_group("gloo", init_method=f"file://{job.meeting}", rank=job.rank, world_size=job.size)


def train(job: Job) -> None:
    """Be one rank of torch.distributed, in a program with a loop of its own."""
    witness = Witness(job)
    if "MASTER_PORT" in os.environ:
        dist.init_process_group("gloo")
    else:
        meet_at(job)
    model = MODELS[job.framework](layers_of(), job.size)
    run_loop(job, witness, model, optimizer_of(model))
    dist.destroy_process_group()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """What all programs train with."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def run_loop(
    job: Job, witness: Witness, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> None:
    """Restore, train and save.

    Args:
        job: of this rank.
        witness: of this rank.
        model: what is trained.
        optimizer: with what.
        options: more of the checkpointer's.
    """
    state = {"model": model, "optimizer": optimizer, "mean": torch.zeros(4)}
    with FlashCheckpointer(job.directory, shared=("model", "optimizer"), **job.options(), **options) as checkpointer:

        def bits() -> str:
            return digest([model.state_dict(), optimizer.state_dict(), state["mean"]])

        step = checkpointer.restore(state) or 0
        witness.note_restored(step, bits())
        witness.watch(bits)
        while job.event and not checkpointer.stopping:
            torch.manual_seed(step)
            batch = torch.randn(6, 8)
            optimizer.zero_grad()
            (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            state["mean"].lerp_(batch.mean(0)[:4], 0.1)
            step += 1
            if checkpointer.should_save(step):
                with contextlib.suppress(KeyboardInterrupt):
                    checkpointer.save(step, state)
    witness.say(ends=step)


def forget_memory(memory: Path) -> None:
    """Remove what dead trainers have left there; their checkpoint writers have ended."""
    for found in find_stores([memory]):
        with StoreView(found.path) as view:
            view.remove()
