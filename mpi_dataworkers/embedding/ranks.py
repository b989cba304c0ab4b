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

# A rank that does not come for this long has ended, or has fewer steps than the others.
_TIMEOUT = timedelta(minutes=5)


class Ranks:
    """The ranks of a program.

    Attributes:
        rank, size: of this process.
    """

    rank, size = 0, 1

    def counts(self, counts: Sequence[int]) -> list[int]:
        """Tell each rank a number, and return what each has told this one."""
        return list(counts)

    def tensors(self, tensors: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        """Give each rank a tensor, and return what each has given this one.

        Args:
            tensors: for each rank, of one dtype and alike but for the first dimension.
            lengths: first dimensions of what comes.
        """
        del lengths
        return list(tensors)

    def all_agree(self, is_so: bool) -> bool:
        """Return whether it is so on all ranks."""
        return is_so

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what rank 0 has."""
        return tensor

    def from_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return what each rank has, of one shape."""
        return [tensor]


class _Distributed(Ranks):
    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        # Its threads are ended while the interpreter is whole: where only the end of the process drops it, they abort.
        atexit.register(self.__dict__.clear)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def counts(self, counts: Sequence[int]) -> list[int]:
        given = torch.tensor(counts, dtype=torch.int64)
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given, group=self._group)
        return got.tolist()

    def tensors(self, tensors: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
        given = torch.cat(list(tensors))
        got = given.new_empty(sum(lengths), *given.shape[1:])
        dist.all_to_all_single(got, given, list(lengths), [len(tensor) for tensor in tensors], group=self._group)
        return list(torch.split(got, list(lengths)))

    def all_agree(self, is_so: bool) -> bool:
        value = torch.tensor([is_so], dtype=torch.int32)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group)
        return bool(value.item())

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, 0, group=self._group)
        return tensor

    def from_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        got = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(got, tensor, group=self._group)
        return got


@functools.cache
def _distributed() -> Ranks:
    return _Distributed()


def ranks_of_program() -> Ranks:
    """Return the ranks that there are; the first call is for all of them, as `torch.distributed.new_group` is.

    Raises:
        EmbeddingError: there are more ranks than parts of a table.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return Ranks()
    ranks = _distributed()
    if ranks.size > 256:
        raise EmbeddingError(f"{ranks.size} ranks: embedding tables are divided among 256 at most")
    return ranks
