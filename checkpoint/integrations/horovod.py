"""The ranks of a Horovod program, for `FlashCheckpointer(..., ranks=HorovodCommunicator())`."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from checkpoint.errors import OptionsError


class HorovodCommunicator:
    """Exchanges bytes among all ranks of Horovod; see `checkpoint.flash.distributed.Communicator`.

    Attributes:
        rank: of this process.
        world_size: number of processes.

    Raises:
        OptionsError: `hvd.init()` was not called: every rank would take itself for the only one.
    """

    def __init__(self) -> None:
        if not hvd.is_initialized():
            raise OptionsError("a checkpointer is made before Horovod knows its rank: call hvd.init() first")
        self.rank = int(hvd.rank())
        self.world_size = int(hvd.size())

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give `data` to every rank; the answers by rank. Every rank calls it."""
        sizes = hvd.allgather(torch.tensor([len(data)]), name="hetstream.checkpoint.sizes").tolist()
        sent = torch.tensor(list(data), dtype=torch.uint8)  # the first dimension may differ between ranks
        everything = bytes(hvd.allgather(sent, name="hetstream.checkpoint.data").tolist())
        ends = [sum(sizes[: rank + 1]) for rank in range(self.world_size)]
        return [everything[end - size : end] for size, end in zip(sizes, ends, strict=True)]
