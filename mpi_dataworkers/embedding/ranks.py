"""What the ranks of a program say to each other about rows: which ones they need, the rows, and their gradients.

Each row belongs to one rank, the remainder of its id by the number of ranks. A rank keeps those of its rows that are in
use, and gives them to whoever needs them in a step. CPU tensors only, over a gloo group of their own, so that nothing
of the program's own collectives is in their order.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.wire.messages import EMBEDDING_PARTS

# A rank that does not come for this long has ended, or has fewer steps than the others.
_TIMEOUT = timedelta(minutes=5)


class Ranks:
    """The ranks of a program; without a group there is one.

    Attributes:
        rank, size: of this process.
    """

    def __init__(self, group: Any = None) -> None:
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._group = group

    def exchange(self, tensors: Sequence[torch.Tensor], lengths: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Give each rank a tensor, and return what each has given this one.

        Args:
            tensors: for each rank, of one dtype and alike but for the first dimension.
            lengths: first dimensions of what comes; without them the ranks tell each other.
        """
        counts = [len(tensor) for tensor in tensors]
        if lengths is None:
            others = torch.empty(self.size, dtype=torch.int64)
            dist.all_to_all_single(others, torch.tensor(counts), group=self._group)
            lengths = others.tolist()
        given = torch.cat(list(tensors))
        got = given.new_empty(sum(lengths), *given.shape[1:])
        dist.all_to_all_single(got, given, list(lengths), counts, group=self._group)
        return list(torch.split(got, list(lengths)))

    def all_agree(self, is_so: bool) -> bool:
        """Return whether it is so on all ranks."""
        return all(map(bool, self.from_all(torch.tensor([is_so], dtype=torch.uint8))))

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what rank 0 has."""
        if self.size > 1:
            dist.broadcast(tensor, 0, group=self._group)
        return tensor

    def from_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return what each rank has, of one shape."""
        got = [tensor] if self.size == 1 else [torch.empty_like(tensor) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(got, tensor, group=self._group)
        return got


@functools.cache
def _distributed() -> Ranks:
    ranks = Ranks(dist.new_group(backend="gloo", timeout=_TIMEOUT))
    # Its threads are ended while the interpreter is whole: where only the end of the process drops it, they abort.
    atexit.register(ranks.__dict__.clear)
    return ranks


def ranks_of_program() -> Ranks:
    """Return the ranks that there are; the first call is for all of them, as `torch.distributed.new_group` is.

    Raises:
        EmbeddingError: there are more ranks than parts of a table.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return Ranks()
    ranks = _distributed()
    if ranks.size > EMBEDDING_PARTS:
        raise EmbeddingError(f"{ranks.size} ranks: embedding tables are divided among {EMBEDDING_PARTS} at most")
    return ranks
