"""The ranks of a Horovod program. It never imports Horovod: a program that uses it has imported it already."""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.config import wrong_with_horovod


def imported_horovod() -> ModuleType | None:
    """`horovod.torch`, if the program has imported it."""
    return sys.modules.get("horovod.torch")


class HorovodCommunicator:
    """Exchanges bytes among all ranks of Horovod; see `hetstream.checkpoint.flash.distributed.Communicator`.

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
                f"{wrong}. If each trains for itself, give ranks=Alone() of hetstream.checkpoint.flash.distributed and "
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
