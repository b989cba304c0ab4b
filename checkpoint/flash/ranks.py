"""The ranks of a training: how they talk to each other, and which of them share a host.

Ranks talk by one operation, over torch.distributed or whatever the program brings. The checkpointer calls it when it
starts and when it restores, never while it saves: a rank that saves waits for no other.

Where several share a host, one holds for all of them what is equal on all: replicated state is in memory once for
each host, in the store of the lowest rank there. Stores outlive their trainers, so it is as safe there as in each
rank's own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from hetstream.base import typed_json
from hetstream.base.errors import OptionsError
from hetstream.checkpoint import errors
from hetstream.checkpoint.config import several_ranks, wrong_with_horovod
from hetstream.checkpoint.memory.segment import boot_id
from hetstream.checkpoint.memory.store import Store

# The ranks of a Horovod program. It never imports Horovod: a program that uses it has imported it already.


def imported_horovod() -> ModuleType | None:
    """`horovod.torch`, if the program has imported it."""
    return sys.modules.get("horovod.torch")


class HorovodCommunicator:
    """Exchanges bytes among all ranks of Horovod; see `hetstream.checkpoint.flash.ranks.Communicator`.

    Attributes:
        rank: of this process.
        world_size: number of processes.

    Raises:
        OptionsError: `hvd.init()` was not called, or Horovod does not know the other ranks: every rank would take
            itself for the only one.
    """

    def __init__(self) -> None:
        hvd = imported_horovod()
        if hvd is None or not hvd.is_initialized():
            raise OptionsError("a checkpointer is made before Horovod knows its rank: call hvd.init() first")
        self.rank = int(hvd.rank())
        self.world_size = int(hvd.size())
        if wrong := wrong_with_horovod(self.world_size):
            raise OptionsError(
                f"{wrong}. If each trains for itself, give ranks=Alone() of hetstream.checkpoint.flash.ranks and "
                "a directory of its own"
            )
        self._allgather = hvd.allgather

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give `data` to every rank; the answers by rank. Every rank calls it."""
        sizes = self._allgather(torch.tensor([len(data)]), name="hetstream.checkpoint.sizes").tolist()
        sent = torch.tensor(list(data), dtype=torch.uint8)  # the first dimension may differ between ranks
        everything = bytes(self._allgather(sent, name="hetstream.checkpoint.data").tolist())
        ends = [sum(sizes[: rank + 1]) for rank in range(self.world_size)]
        return [everything[end - size : end] for size, end in zip(sizes, ends, strict=True)]


T = TypeVar("T")


class Communicator(Protocol):
    """What the checkpointer needs from the group of trainers.

    Attributes:
        rank: of this process, from 0.
        world_size: number of processes.
    """

    rank: int
    world_size: int

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give `data` to every rank; the answers by rank. Every rank calls it."""
        ...


class Alone:
    """A program of one process."""

    rank = 0
    world_size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the one answer."""
        return [data]


class TorchCommunicator:
    """The ranks of a torch.distributed process group.

    Args:
        group: the group; None: all ranks.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        # NCCL carries device tensors only.
        is_nccl = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give `data` to every rank; the answers by rank. Every rank calls it."""
        sizes = self._gather(torch.tensor([len(data)], dtype=torch.int64))
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(data.ljust(max(longest, 1), b"\0")), dtype=torch.uint8)
        return [bytes(answer[: int(size)].numpy()) for answer, size in zip(self._gather(padded), sizes, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        here = tensor.to(self._device)
        answers = [torch.empty_like(here) for _ in range(self.world_size)]
        dist.all_gather(answers, here, group=self._group)
        return [answer.cpu() for answer in answers]


def communicator() -> Communicator:
    """Return all ranks of torch.distributed or Horovod, where the program has initialised it, else this process alone.

    Raises:
        OptionsError: it is not alone: every rank would take itself for the only one.
    """
    if dist.is_available() and dist.is_initialized():
        return TorchCommunicator()
    hvd = imported_horovod()
    if hvd and hvd.is_initialized():
        return HorovodCommunicator()
    setting = several_ranks(is_horovod=hvd is not None)
    if setting:
        raise OptionsError(
            f"{setting}, and neither torch.distributed nor Horovod is initialised: every rank would take itself for "
            "the only one. Call torch.distributed.init_process_group() first (TrainingArguments of the Hugging Face "
            "Trainer does), or hvd.init(); or give ranks=Alone() of hetstream.checkpoint.flash.ranks if each has "
            "a directory of its own"
        )
    return Alone()


def gather(ranks: Communicator, value: T) -> list[T]:
    """Exchange a typed value with every rank, as JSON.

    Args:
        value: a msgspec.Struct, dataclass or plain value; the answers have its type.
    """
    answers = ranks.all_gather(msgspec.json.encode(value))
    return [typed_json.decode(answer, type(value)) for answer in answers]


class _Failure(msgspec.Struct, frozen=True):
    """A rank's error in a step that all ranks take together; empty if it had none."""

    error: str = ""
    message: str = ""


def together(ranks: Communicator, act: Callable[[], T], undo: Callable[[T], None] = lambda _result: None) -> T:
    """Do something on every rank; each has its own result, or all have the error of the first rank that failed.

    Args:
        ranks: all of them call it.
        act: what to do.
        undo: takes this rank's result back where another rank has failed.
    """
    with contextlib.ExitStack() as stack:
        error: Exception | None = None
        try:
            result = act()
            stack.callback(undo, result)
        except Exception as caught:  # noqa: BLE001, others wait for this rank: they hear of it, and it is raised below
            error = caught
        failures = gather(ranks, _Failure(type(error).__name__, str(error)) if error else _Failure())
        if error:
            raise error
        for rank, failure in enumerate(failures):
            if failure.error:
                kinds = {**vars(errors), OptionsError.__name__: OptionsError}
                kind = kinds.get(failure.error, errors.CheckpointError)
                raise kind(f"rank {rank}: {failure.message}")
        stack.pop_all()
        return result


def from_rank_0(ranks: Communicator, read: Callable[[], T], kind: type[T]) -> T:
    """Return what rank 0 reads, or does: its result on all ranks, or its error.

    Args:
        ranks: all of them call it.
        read: called on rank 0.
        kind: of the result; it travels as JSON.
    """
    encoded = together(ranks, lambda: msgspec.json.encode(read()) if ranks.rank == 0 else b"")
    return typed_json.decode(ranks.all_gather(encoded)[0], kind)


@dataclass(frozen=True)
class Host:
    """The host of this process.

    Attributes:
        name: equal on ranks that can open each other's stores, and on no others.
        rank: of this process.
        stores: of the ranks of this host, ascending.
    """

    name: str
    rank: int
    stores: dict[int, Path]

    @property
    def holds_shared(self) -> bool:
        """Whether this rank holds the shared keys for its host."""
        return self.rank == next(iter(self.stores))


class _Address(msgspec.Struct, frozen=True):
    host: str
    store: str


def find_host(ranks: Communicator, store: Store, directory: Path) -> Host:
    """Find out which ranks share this host. Every rank calls it.

    Args:
        ranks: all.
        store: of this one.
        directory: of checkpoints.
    """
    places = "-".join(_place(path, ranks.rank) for path in (store.path.parent, directory))
    kernel = boot_id().hex() if any(boot_id()) else os.uname().nodename
    mine = _Address(f"{kernel}-{os.geteuid()}-{places}", os.fsencode(store.path).hex())
    addresses = gather(ranks, mine)
    stores = {
        rank: Path(os.fsdecode(bytes.fromhex(address.store)))
        for rank, address in enumerate(addresses)
        if address.host == mine.host
    }
    return Host(mine.host, ranks.rank, stores)


def _place(path: Path, rank: int) -> str:
    """A directory as this kernel knows it. Two containers of a machine often have two of one name, such as /dev/shm,
    and the name has to lead both to the same one; what a rank cannot look at, it shares with nobody."""
    try:
        status = os.stat(path)
    except OSError:
        return f"rank-{rank}"
    return f"{status.st_dev}-{status.st_ino}-{os.fsencode(path).hex()}"
